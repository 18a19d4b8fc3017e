"""What is relied on of Zennit beyond its documented use, one test for each.

A Zennit release that moves something fails here first, with the name of what moved.
"""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drsa_core.model_state import restored
from torch import Tensor, nn
from zennit.attribution import Attributor, Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.canonizers import Canonizer, SequentialMergeBatchNorm
from zennit.composites import COMPOSITES, EpsilonPlus, NameMapComposite, layer_map_base, register_composite
from zennit.core import BasicHook, Composite, Hook, ParamMod, Stabilizer
from zennit.layer import Sum
from zennit.rules import (
    AlphaBeta,
    Epsilon,
    Gamma,
    Norm,
    Pass,
    ReLUBetaSmooth,
    ReLUDeconvNet,
    ReLUGuidedBackprop,
    ZBox,
    ZPlus,
)
from zennit.torchvision import ResNetCanonizer, VGGCanonizer
from zennit.types import Activation, AvgPool, Convolution, ConvolutionStandard, MaxPool

from tests.model_state import model_state
from zennit_drsa import _zennit

VERSION = f"Zennit {version('zennit')}"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def register(rule: Hook, model: nn.Module, name: str) -> tuple[Composite, Hook]:
    composite = NameMapComposite([([name], rule)])
    composite.register(model)
    (hook,) = composite.hook_refs
    return composite, hook


def test_a_hook_is_found_by_the_methods_that_it_registers() -> None:
    model = network()
    composite, hook = register(Epsilon(), model, "0")
    assert _zennit.hooks_on(model[0]) == [hook], f"{VERSION} registers hooks in another way"
    assert list(_zennit.hooks_by_module(model)) == [(model[0], hook)]
    with composite.inactive():
        assert not hook.active
        assert not _zennit.holds_relevance(model)
    assert _zennit.holds_relevance(model)
    _zennit.take_hooks_off(model[0])
    assert _zennit.hooks_on(model[0]) == []
    composite.remove()


def test_a_hook_has_a_state_with_these_names() -> None:
    unknown = set(vars(Epsilon())) - _zennit._WORKING_STATE
    expected = {"input_modifiers", "param_modifiers", "output_modifiers", "gradient_mapper", "reducer"}
    assert unknown == expected, f"{VERSION} keeps something new: a parameter of the rule, or working state?"


def test_the_layers_input_and_the_arriving_relevance_are_stored_under_these_names() -> None:
    model = network()
    composite, hook = register(Epsilon(), model, "2")
    x, start = torch.rand(5, 3).double().requires_grad_(), torch.rand(5, 2).double()
    model(x).backward(start)
    assert torch.equal(hook.stored_tensors["input"][0], model[1](model[0](x)))
    assert torch.equal(hook.stored_tensors["grad_output"][0], start)
    composite.remove()
    assert not hook.stored_tensors


@pytest.mark.parametrize("name", ["backward", "pre_backward"])
def test_the_methods_of_a_hook_are_looked_up_in_every_pass(name: str) -> None:
    model = network()
    composite, hook = register(Pass(), model, "1")
    called = []

    def replacement(module: nn.Module, grad_input: object, grad_output: tuple[Tensor]) -> None:
        called.append(module)
        hook.stored_tensors["grad_output"] = grad_output

    output = model(torch.rand(5, 3).double().requires_grad_())
    setattr(hook, name, replacement)
    output.sum().backward(retain_graph=True)
    assert called == [model[1]]
    delattr(hook, name)
    output.sum().backward()
    assert len(called) == 1
    composite.remove()


@pytest.mark.parametrize(
    "rule", [AlphaBeta(), Epsilon(), Gamma(), ZBox(torch.zeros(1, 1), torch.ones(1, 1)), ZPlus(), Norm()]
)
def test_rules_on_layers_are_basic_hooks(rule: Hook) -> None:
    assert _zennit.is_basic(rule), f"{VERSION}: {type(rule).__name__} has a backward of its own"
    assert _zennit.replaces_gradient(rule)


@pytest.mark.parametrize("rule", [Pass(), ReLUBetaSmooth(), ReLUDeconvNet()])
def test_rules_that_do_not_read_the_gradient_of_their_layer(rule: Hook) -> None:
    rule.stored_tensors["input"] = (torch.rand(2, 3),)
    relevance = torch.randn(2, 3)
    values = [rule.backward(nn.ReLU(), (gradient,), (relevance,))[0] for gradient in (torch.ones(2, 3), None)]
    assert torch.equal(*values), f"{VERSION}: {type(rule).__name__} reads the gradient"
    assert _zennit.replaces_gradient(rule)


def test_guided_backpropagation_reads_the_gradient_of_its_layer() -> None:
    relevance, gradient = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, 3.0]])
    value = ReLUGuidedBackprop().backward(nn.ReLU(), (gradient,), (relevance,))[0]
    assert value.tolist() == [[2.0, 0.0]]
    assert not _zennit.replaces_gradient(ReLUGuidedBackprop())


def by_parts(hook: Any, module: nn.Module, start: Tensor) -> Tensor:
    """Modified forward passes, mapped and reduced, as `shared_passes` does."""
    passes = _zennit.modified_forwards(hook, module)
    inputs, outputs = [input for input, _ in passes], [output for _, output in passes]
    mapped = hook.gradient_mapper(start, outputs)
    mapped = [mapped] if isinstance(mapped, Tensor) else mapped
    return hook.reducer(inputs, torch.autograd.grad(outputs, inputs, mapped))


@pytest.mark.parametrize("rule", [Epsilon(), Gamma(0.3), ZPlus(), AlphaBeta()])
def test_modified_forward_passes_mapped_and_reduced_are_the_rule(rule: Hook) -> None:
    model = network()
    composite, hook = register(rule, model, "2")
    x, start = torch.rand(5, 3).double().requires_grad_(), torch.rand(5, 2).double()
    model(x)
    hidden = hook.stored_tensors["input"][0]
    ours = by_parts(hook, model[2], start)
    hook.stored_tensors["grad_output"] = (start,)
    torch.testing.assert_close(ours, hook.backward(model[2], (hidden,), (start,))[0])
    composite.remove()


class Scaled(nn.Linear):
    """A layer with a further argument, by position or by name."""

    def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(input) * scale


class UsesScaled(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.layer, self.by_name = Scaled(3, 2), by_name

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x, scale=3.0) if self.by_name else self.layer(x, 3.0)
        return result


@pytest.mark.parametrize("by_name", [False, True])
def test_further_arguments_of_a_layer_go_where_zennit_sends_them(by_name: bool) -> None:
    model = UsesScaled(by_name).double()
    composite, hook = register(Epsilon(), model, "layer")
    x, start = torch.rand(5, 3).double().requires_grad_(), torch.rand(5, 2).double()
    try:
        model(x)
    except AttributeError:
        pytest.skip(f"{VERSION} has no rules for layers with numbers as arguments")
    hook.stored_tensors["grad_output"] = (start,)
    theirs = hook.backward(model.layer, (x,), (start,))[0]
    torch.testing.assert_close(by_parts(hook, model.layer, start), theirs)
    composite.remove()


def test_a_parameter_modifier_acts_for_a_while() -> None:
    layer = nn.Linear(3, 2)
    weight = layer.weight.detach().clone()
    with ParamMod.ensure(lambda parameter, name: 2 * parameter)(layer) as modified:
        assert modified is layer
        assert torch.equal(layer.weight, 2 * weight)
    assert torch.equal(layer.weight, weight)


def test_a_stabilizer_is_added_with_the_sign_and_zero_counts_as_positive() -> None:
    assert Stabilizer.ensure(0.5)(torch.tensor([2.0, -2.0, 0.0])).tolist() == [2.5, -2.5, 0.5]


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (nn.SiLU(), Pass),
        (nn.BatchNorm2d(2), Pass),
        (Sum(), Norm),
        (nn.AvgPool2d(2), Norm),
        (nn.AdaptiveAvgPool2d(1), Norm),
        (nn.Linear(2, 2), type(None)),
        (nn.MaxPool2d(2), type(None)),
        (nn.Flatten(), type(None)),
    ],
)
def test_rules_for_layers_without_weights(module: nn.Module, rule: type) -> None:
    assert type(_zennit.rule_for_others(module, 1e-6)) is rule
    assert all(isinstance(hook, Hook) for _, hook in layer_map_base(1e-6))


def test_a_canonizer_of_zennit_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3)).eval()
    nn.init.uniform_(model.get_parameter("1.weight"), 0.5, 1.5)
    x = torch.rand(2, 2, 4, 4)
    before, expected = model_state(model), model(x)
    composite = Composite(canonizers=[SequentialMergeBatchNorm()])
    with restored(
        model, enter=lambda: _zennit.register(composite, model), leave=lambda: _zennit.unregister(composite)
    ):
        torch.testing.assert_close(model[0](x), expected)
    assert model_state(model) == before


def test_a_composite_has_these_parts() -> None:
    composite = EpsilonPlus(canonizers=[SequentialMergeBatchNorm()])
    model = network()
    assert callable(composite.module_map)
    assert [type(canonizer) for canonizer in composite.canonizers] == [SequentialMergeBatchNorm]
    with composite.context(model) as registered:
        assert registered is model
        assert composite.handles
        assert len(composite.hook_refs) == 3
    assert composite.handles == []
    seen: list[str] = []
    Composite(module_map=lambda ctx, name, module: seen.append(name)).register(model)
    assert seen == ["", "0", "1", "2"], f"{VERSION} meets modules in another order; the root must come first"


def test_attributors_have_these_parts() -> None:
    model, composite = network(), EpsilonPlus()
    for kind in (Gradient, SmoothGrad, IntegratedGradients, Occlusion):
        built = kind(model, composite)
        assert isinstance(built, Attributor)
        assert (built.model, built.composite) == (model, composite)
        assert callable(built.attr_output_fn)
        assert isinstance(built, Gradient) == (kind is not Occlusion)
    gradient = Gradient(model, create_graph=True, retain_graph=True)
    assert (gradient.create_graph, gradient.retain_graph) == (True, True)


def test_an_attributor_asks_its_own_grad_for_gradients() -> None:
    """Which is how the gradients of one concept take their place."""
    asked = SimpleNamespace(n=0)

    class Counting(SmoothGrad):  # type: ignore[misc]
        def grad(self, input: Tensor, attr_output_fn: Any) -> Any:
            asked.n += 1
            return super().grad(input, attr_output_fn)

    Counting(network(), n_iter=3)(torch.rand(2, 3).double(), torch.ones(2, 2))
    assert asked.n == 3


def test_registry_types_and_canonizers_exist() -> None:
    assert COMPOSITES["epsilon_plus"] is EpsilonPlus
    assert callable(register_composite("unused"))
    for canonizer in (SequentialMergeBatchNorm, ResNetCanonizer, VGGCanonizer):
        assert issubclass(canonizer, Canonizer)
    assert isinstance(nn.Conv2d(1, 1, 1), Convolution)
    assert isinstance(nn.Conv2d(1, 1, 1), ConvolutionStandard)
    assert isinstance(nn.MaxPool2d(2), MaxPool)
    assert isinstance(nn.AvgPool2d(2), AvgPool)
    assert isinstance(nn.ReLU(), Activation)
    assert BasicHook.backward is Epsilon.backward
