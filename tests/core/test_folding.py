"""Batch norms folded into convolutions: the formula, what must not be folded, the model left as it was."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import pytest
import torch
from drsa_core.evaluation.folding import fold_batch_norms
from torch import Tensor, nn

from tests.model_state import model_state

Model = TypeVar("Model", bound=nn.Module)


def randomised(model: Model) -> Model:
    """In eval mode and double precision, with batch norms that do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(1e-3, 2)
        if module.affine:
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.double().eval()


def n_batch_norms(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many batch norms are computed in a forward pass."""
    calls, original = [], nn.functional.batch_norm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "batch_norm", counted)
        model(x)
    return len(calls)


@pytest.mark.parametrize(("bias", "affine"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(("axes", "eps"), [(1, 0.1), (2, 1e-5), (2, 1e-3), (3, 1e-3)])
def test_weight_and_bias_are_those_of_the_formula(axes: int, eps: float, affine: bool, bias: bool) -> None:
    """With the norm's own ε: Keras' 1e-3 counts where variances are small."""
    convolution = getattr(nn, f"Conv{axes}d")(4, 6, 3, padding=1, groups=2, bias=bias)
    norm = getattr(nn, f"BatchNorm{axes}d")(6, affine=affine, eps=eps)
    model = randomised(nn.Sequential(convolution, norm, nn.ReLU()))
    folded = fold_batch_norms(model)
    assert folded is not None
    found: Any = next(m for m in folded.modules() if type(m) is type(convolution))
    # w ← s w, b ← s (b − μ) + β with s = γ / √(σ² + ε), channel by channel.
    for channel in range(6):
        scale = (norm.weight[channel] if affine else 1) / (norm.running_var[channel] + eps) ** 0.5
        shift = norm.bias[channel] if affine else 0
        before = convolution.bias[channel] if bias else 0
        torch.testing.assert_close(found.weight[channel], scale * convolution.weight[channel])
        torch.testing.assert_close(found.bias[channel], scale * (before - norm.running_mean[channel]) + shift)
    x = torch.randn(3, 4, *[5] * axes, dtype=torch.float64)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)


class Functional(nn.BatchNorm2d):
    """As timm's: the batch norm as a function, after a look at the shape."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4 axes, got {x.ndim}")
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps
        ).relu()


class Padded(nn.Conv2d):
    """Padding that depends on the size of the input, which no graph can show."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] % 2 == 0:
            x = nn.functional.pad(x, (0, 1, 0, 1))
        return super().forward(x)


class Network(nn.Module):
    """Convolution, batch norm, and what `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.last: object = None
        self.one = (Padded if kind == "padded" else nn.Conv2d)(3, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 4, 1)
        self.norm, self.other = nn.BatchNorm2d(4, eps=1e-3), nn.BatchNorm2d(4)
        if kind == "functional":
            self.norm, self.other = Functional(4), Functional(4, eps=1e-3)
        if kind == "no statistics":
            self.norm, self.other = (nn.BatchNorm2d(4, track_running_stats=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "branch" and x.mean() > 100:
            return x.mean((2, 3))
        self.last = x
        a = self.one(x)
        if self.kind == "residual":
            return torch.relu(self.norm(a) + a).mean((2, 3))
        if self.kind == "norm first":
            return self.two(self.norm(torch.relu(a))).mean((2, 3))
        if self.kind == "shared":
            return (self.norm(self.two(a)) + self.other(self.two(torch.relu(a)))).mean((2, 3))
        if self.kind == "functions":
            return self.norm(nn.functional.conv2d(x, self.one.weight)).mean((2, 3))
        return self.other(self.two(torch.relu(self.norm(a)))).mean((2, 3))


X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["plain", "functional", "shared", "padded"])
def test_every_batch_norm_behind_a_convolution_goes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(Network(kind))
    model.last = kept = object()
    before, version = model_state(model), [p._version for p in model.parameters()]
    folded = fold_batch_norms(model)
    assert folded is not None
    assert model.last is kept
    assert (model_state(model), [p._version for p in model.parameters()]) == (before, version)
    assert (n_batch_norms(model, X, monkeypatch), n_batch_norms(folded, X, monkeypatch)) == (2, 0)
    torch.testing.assert_close(folded(X), model(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["residual", "norm first", "no statistics", "branch", "functions"])
def test_others_are_left_alone(kind: str) -> None:
    assert fold_batch_norms(randomised(Network(kind))) is None


@pytest.mark.parametrize("why", ["parametrized", "training", "hook"])
def test_one_that_trains_has_a_hook_or_a_weight_of_parts_is_left_alone(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomised(Network("plain"))
    if why == "hook":
        model.two.register_forward_hook(lambda *_: None)
        assert fold_batch_norms(model) is None
        return
    if why == "parametrized":
        nn.utils.parametrizations.weight_norm(model.one)
    else:
        model.norm.train()
    folded = fold_batch_norms(copy.deepcopy(model))
    assert folded is not None
    assert n_batch_norms(folded, X, monkeypatch) == 1  # behind the other convolution
