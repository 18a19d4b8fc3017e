"""Batch norms folded into convolutions: the formula, what must not be folded, the model left as it was."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import pytest
import torch
from drsa_core.evaluation import patch_flipping
from drsa_core.evaluation.folding import fold_batch_norms
from torch import Tensor, fx, nn

Model = TypeVar("Model", bound=nn.Module)


def randomised(model: Model) -> Model:
    """In eval mode and double precision, with batch norms that do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.double().eval()


def count_batch_norms(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one with every batch norm that is computed from now on."""
    calls: list[None] = []
    original = nn.functional.batch_norm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "batch_norm", counted)
    return calls


def n_batch_norms(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many batch norms are computed in a forward pass."""
    with monkeypatch.context() as patched:
        calls = count_batch_norms(patched)
        model(x)
    return len(calls)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_weight_and_bias_are_those_of_the_formula(axes: int, affine: bool, bias: bool) -> None:
    convolution = getattr(nn, f"Conv{axes}d")(4, 6, 3, padding=1, groups=2, bias=bias)
    norm = getattr(nn, f"BatchNorm{axes}d")(6, affine=affine, eps=0.1)
    model = randomised(nn.Sequential(convolution, norm, nn.ReLU()))
    folded = fold_batch_norms(model)
    assert folded is not None
    found: Any = next(m for m in folded.modules() if type(m) is type(convolution))
    # w ← s w, b ← s (b − μ) + β with s = γ / √(σ² + ε), channel by channel.
    for channel in range(6):
        scale = (norm.weight[channel] if affine else 1) / (norm.running_var[channel] + 0.1) ** 0.5
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


class Standardised(nn.Conv2d):
    """A weight that is scaled before it is used: folding into it would be undone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight / self.weight.norm(), self.bias, padding=1)


class Network(nn.Module):
    """Convolution, batch norm, and what `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        if kind in ("padded", "standardised"):
            self.one = (Padded if kind == "padded" else Standardised)(3, 4, 3, padding=1)
        if kind == "functional":
            self.norm, self.other = Functional(4), Functional(4)
        if kind == "no statistics":
            self.norm, self.other = (nn.BatchNorm2d(4, track_running_stats=False) for _ in range(2))
        self.last: object = None

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


@pytest.mark.parametrize("kind", ["plain", "functional", "shared", "padded"])
def test_every_batch_norm_behind_a_convolution_goes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = randomised(Network(kind)), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    folded = fold_batch_norms(model)
    assert folded is not None
    assert (n_batch_norms(model, x, monkeypatch), n_batch_norms(folded, x, monkeypatch)) == (2, 0)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["residual", "norm first", "no statistics", "branch", "functions"])
def test_others_are_left_alone(kind: str) -> None:
    assert fold_batch_norms(randomised(Network(kind))) is None


def test_a_convolution_that_changes_its_weight_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for model in (randomised(Network("standardised")), randomised(Network("plain"))):
        if type(model.one) is nn.Conv2d:
            nn.utils.parametrizations.weight_norm(model.one)
        folded = fold_batch_norms(model)
        assert folded is not None
        assert n_batch_norms(folded, x, monkeypatch) == 1  # behind the other convolution
        torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)


def test_one_that_trains_or_has_a_hook_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model = randomised(Network("plain"))
    model.norm.train()
    folded = fold_batch_norms(copy.deepcopy(model))
    assert folded is not None
    assert n_batch_norms(folded, x, monkeypatch) == 1  # the other one is gone
    model.eval().two.register_forward_hook(lambda *_: None)
    assert fold_batch_norms(model) is None


def test_the_model_stays_as_it_was() -> None:
    model = randomised(Network("plain"))
    model.last = kept = object()
    state = copy.deepcopy(model.state_dict())
    version = [p._version for p in model.parameters()]
    assert fold_batch_norms(model) is not None
    assert model.last is kept
    assert [p._version for p in model.parameters()] == version
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("batch_size", [None, 3])
def test_patch_flipping_folds_a_module_and_runs_a_function_as_it_is(
    batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomised(Network("plain")).float()
    generator = torch.Generator().manual_seed(1)
    inputs, maps = (
        torch.rand(4, 3, 16, 16, generator=generator),
        torch.rand(4, 3, 16, 16, generator=generator),
    )
    calls = count_batch_norms(monkeypatch)
    options: dict[str, Any] = {"patch_size": 4, "fill": "mean", "batch_size": batch_size}
    found = patch_flipping(model, inputs, maps, 1, (0.0, 1.0), **options)
    assert len(calls) == 4  # each convolution on noise, and one image through the model itself, to compare
    expected = patch_flipping(model.forward, inputs, maps, 1, (0.0, 1.0), **options)
    assert len(calls) > 4 + 4
    assert float(expected.scores.max()) > 0.01
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-6)


def test_a_copy_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(Network("plain")).float()
    wrong = fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)))
    monkeypatch.setattr("drsa_core.evaluation.running.fold_batch_norms", lambda model: wrong)
    inputs = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"patch_size": 4, "fill": "mean", "batch_size": 3}
    found = patch_flipping(model, inputs, inputs, 1, (0.0, 1.0), **options)
    expected = patch_flipping(model.forward, inputs, inputs, 1, (0.0, 1.0), **options)
    assert torch.equal(found.scores, expected.scores)
