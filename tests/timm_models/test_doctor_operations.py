"""Which operations in a model's own code `doctor` lets pass, and which it names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.model_state import model_state

from zennit.canonizers import SequentialMergeBatchNorm  # isort: skip
from zennit.composites import EpsilonPlus  # isort: skip
from drsa_core import Subspaces  # isort: skip
from zennit_drsa import SubspaceFilter, doctor  # isort: skip

Operation = Callable[[Tensor], Tensor]
KERNEL = torch.linspace(-1, 1, 36).view(4, 1, 3, 3)


class Network(nn.Module):
    """A convolution, an operation on its 4×6×6 output, and a linear layer."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation
        self.conv = nn.Conv2d(3, 4, 3)
        with torch.no_grad():
            features = operation(self.conv(torch.zeros(1, 3, 8, 8))).flatten(1).shape[1]
        self.relu, self.fc = nn.ReLU(), nn.Linear(features, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.operation(self.relu(self.conv(x))).flatten(1))


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


WRONG: dict[str, Operation] = {
    "mean": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "upsample_nearest2d": lambda x: F.interpolate(x, scale_factor=2),
    "upsample_bilinear2d": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "sum": lambda x: x.sum((2, 3)),
    "cumsum": lambda x: x.cumsum(2),
    "add": lambda x: x + F.relu(x),
    "sub": lambda x: torch.ones(()) - x,
    "rsub": lambda x: 1 - x,
    "neg": lambda x: -x,
    "mul": lambda x: 2 * x,
    "div": lambda x: x / 2,
    "convolution": lambda x: F.conv2d(x, KERNEL, groups=4),
    "native_batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "native_layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, 1),
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "hardtanh": F.relu6,
    "clamp": lambda x: x.clamp(0, 1),
    "mm": lambda x: x.flatten(1) @ torch.eye(144),
    "addmm": lambda x: F.linear(x.flatten(1), torch.eye(144), torch.ones(144)),
    "custom": Custom.apply,
}
RIGHT: dict[str, Operation] = {
    "reshape": lambda x: x.permute(0, 2, 3, 1).reshape(len(x), -1, 4).transpose(1, 2).contiguous(),
    "cat": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "index": lambda x: x[:, [2, 0, 2], 1:],
    "stack": lambda x: torch.stack(x.unbind(1), 2),
    "pad": lambda x: F.pad(F.pad(x, (1, 2)), (1, 1, 1, 1), mode="reflect"),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "flip": lambda x: x.flip(1).roll(1, 2),
    "relu": F.relu,
    "in-place relu": lambda x: F.relu_(x.clone()),
    "clamp from below": lambda x: x.clamp(min=0),
    "bias": lambda x: x + torch.ones(4, 1, 1) - 0.5,
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 1),
    "amax": lambda x: x.amax((2, 3)),
    "double": lambda x: x.double().float(),
    "dropout in evaluation mode": lambda x: F.dropout(x, training=False),
}


def diagnose(operation: Operation):
    torch.manual_seed(0)
    model, x = Network(operation).eval(), torch.rand(2, 3, 8, 8)
    before = model_state(model)
    diagnosis = doctor(model, EpsilonPlus(), x, verbose=False)
    assert model_state(model) == before
    return diagnosis


@pytest.mark.parametrize("name", WRONG)
def test_an_operation_that_needs_a_rule_is_named(name):
    diagnosis = diagnose(WRONG[name])
    assert not diagnosis.ok
    assert diagnosis.functional == [f"(model) (Network: {name})"]
    assert "captum_drsa" in str(diagnosis.suggestion)


@pytest.mark.parametrize("name", RIGHT)
def test_an_operation_that_moves_or_selects_passes(name):
    diagnosis = diagnose(RIGHT[name])
    assert diagnosis.ok, str(diagnosis)


@pytest.mark.parametrize("name", ["sum", "add", "neg", "mul", "cumsum", "sigmoid", "convolution"])
def test_what_does_not_conserve_relevance_is_measured_too(name):
    assert "(model)" in diagnose(WRONG[name]).drift


def test_active_dropout_in_the_code_is_named():
    assert diagnose(F.dropout).functional == ["(model) (Network: mul)"]


def test_written_as_modules_they_pass():
    """What the suggestion for functional pooling says."""
    modules = nn.Sequential(nn.AvgPool2d(2), nn.GELU(), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), modules, nn.Linear(4, 5)).eval()
    assert doctor(model, EpsilonPlus(), torch.rand(2, 3, 8, 8), verbose=False).ok


def test_modules_without_parameters_need_a_rule_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2)).eval()
    diagnosis = doctor(model, EpsilonPlus(), torch.rand(2, 3), verbose=False)
    assert diagnosis.functional == ["1 (Softmax: softmax)"]


@pytest.mark.parametrize(
    ("part", "expected"), [(None, ["(model)"]), ("1", ["1"]), ("2", ["2"])], ids=["all", "dropout", "norm"]
)
def test_training_mode_is_reported_and_statistics_stay(part, expected):
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    (model if part is None else model.get_submodule(part)).train()
    before = model_state(model)
    diagnosis = doctor(model, EpsilonPlus(), torch.rand(4, 3), verbose=False)
    assert model_state(model) == before
    assert diagnosis.training == expected
    assert diagnosis.in_training
    assert not diagnosis.ok
    assert "call model.eval()" in str(diagnosis)


def test_a_canonizer_that_fails_half_way_leaves_the_model_as_it_was():
    """BatchNorm1d(4) is merged before the norm without weights fails."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)]
    model = nn.Sequential(*layers, nn.Linear(4, 2)).eval()
    before, expected = model_state(model), model(torch.ones(1, 3))
    with pytest.raises((AttributeError, TypeError), match="NoneType"):  # as Zennit's release has it
        doctor(model, EpsilonPlus(canonizers=[SequentialMergeBatchNorm()]), torch.rand(2, 3), verbose=False)
    assert model_state(model) == before
    assert torch.equal(model(torch.ones(1, 3)), expected)


def test_an_input_that_the_model_overwrites_stays():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).eval()
    x = torch.randn(4, 3)
    copy = x.clone()
    assert doctor(model, EpsilonPlus(), x, verbose=False).ok
    assert torch.equal(x, copy)


class Returns(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> object:
        return self.function(self.fc(x))


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda y: {"logits": y}, TypeError, r"one tensor of shape \(N, classes\), got dict; wrap the model"),
        (lambda y: (y, y), TypeError, "got tuple"),
        (lambda y: y[:, 0], ValueError, r"got \(4,\) for 4 examples; add the axis of classes"),
        (lambda y: y.sum(), ValueError, r"got \(\)"),
        (lambda y: y[:2], ValueError, r"got \(2, 2\) for 4 examples"),
        (lambda y: y.argmax(1, keepdim=True), TypeError, "floating point"),
        (lambda y: y.detach(), ValueError, "does not depend on its input"),
    ],
)
def test_outputs_that_cannot_be_explained_are_named(function, error, match):
    model = Returns(function).eval()
    before = model_state(model)
    with pytest.raises(error, match=match):
        doctor(model, EpsilonPlus(), torch.rand(4, 3), verbose=False)
    assert model_state(model) == before


@pytest.mark.parametrize(
    ("target", "error", "match"),
    [
        (2, ValueError, r"target must be in 0 … 1, got 2"),
        (torch.tensor([0, 1, 0]), ValueError, "one for each of the 4 examples"),
        (0.5, ValueError, "int"),
    ],
)
def test_bad_targets_are_named(target, error, match):
    with pytest.raises(error, match=match):
        doctor(nn.Linear(3, 2).eval(), EpsilonPlus(), torch.rand(4, 3), target=target, verbose=False)


def test_integers_and_a_registered_composite_are_named():
    model, composite = nn.Linear(3, 2).eval(), EpsilonPlus()
    with pytest.raises(TypeError, match=r"got torch.int64: relevance cannot reach integers"):
        doctor(model, composite, torch.ones(1, 3, dtype=torch.int64))
    with composite.context(model), pytest.raises(ValueError, match="is registered"):
        doctor(model, composite, torch.ones(1, 3))


def test_a_composite_with_a_virtual_layer_passes():
    torch.manual_seed(0)
    model = Network(lambda x: x).eval()
    composite = EpsilonPlus(canonizers=[SubspaceFilter("relu", Subspaces(torch.eye(4), [2, 2]))])
    before = model_state(model)
    diagnosis = doctor(model, composite, torch.rand(2, 3, 8, 8), verbose=False)
    assert diagnosis.ok, str(diagnosis)
    assert model_state(model) == before
