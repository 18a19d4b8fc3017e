"""What is relied on of Zennit beyond its documented use, one test for each; all of it is in `_zennit.py`.

A Zennit release that moves something fails here first, with the name of what moved.
"""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from zennit.attribution import Attributor, Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.canonizers import Canonizer, SequentialMergeBatchNorm
from zennit.composites import COMPOSITES, EpsilonPlus, NameMapComposite, layer_map_base, register_composite
from zennit.core import BasicHook, Composite, Hook, ParamMod, RemovableHandleList, Stabilizer
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

import zennit_drsa
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
    _zennit.take_hooks_off(model[0])
    assert _zennit.hooks_on(model[0]) == []
    composite.remove()


def test_a_hook_has_a_state_with_these_names() -> None:
    hook = Epsilon()
    assert hook.active is True
    assert isinstance(hook.stored_tensors, dict)
    unknown = set(vars(hook)) - _zennit._WORKING_STATE
    expected = {"input_modifiers", "param_modifiers", "output_modifiers", "gradient_mapper", "reducer"}
    assert unknown == expected, f"{VERSION} keeps something new: a parameter of the rule, or working state?"


def test_the_layers_input_and_the_arriving_relevance_are_stored_under_these_names() -> None:
    model = network()
    composite, hook = register(Epsilon(), model, "2")
    x, start = torch.rand(5, 3).double().requires_grad_(), torch.rand(5, 2).double()
    model(x).backward(start)
    assert torch.equal(_zennit.kept(hook, "input")[0], model[1](model[0](x)))
    assert torch.equal(_zennit.kept(hook, "grad_output")[0], start)
    composite.remove()
    assert not hook.stored_tensors


@pytest.mark.parametrize("name", ["backward", "pre_backward"])
def test_the_methods_of_a_hook_are_looked_up_in_every_pass(name: str) -> None:
    model = network()
    composite, hook = register(Pass(), model, "1")
    called = []

    def replacement(module: nn.Module, grad_input: object, grad_output: tuple[Tensor]) -> None:
        called.append(module)
        _zennit.keep(hook, grad_output=grad_output)

    output = model(torch.rand(5, 3).double().requires_grad_())
    with _zennit.replaced_method(hook, name, replacement):
        output.sum().backward(retain_graph=True)
    assert called == [model[1]]
    output.sum().backward()
    assert len(called) == 1
    assert name not in vars(hook)
    composite.remove()


def test_an_inactive_composite_has_inactive_hooks() -> None:
    model = network()
    composite, hook = register(Epsilon(), model, "0")
    with composite.inactive():
        assert not _zennit.is_active(hook)
        assert not _zennit.holds_relevance(model)
    assert _zennit.is_active(hook)
    assert _zennit.holds_relevance(model)
    composite.remove()


@pytest.mark.parametrize(
    "rule", [AlphaBeta(), Epsilon(), Gamma(), ZBox(torch.zeros(1, 1), torch.ones(1, 1)), ZPlus(), Norm()]
)
def test_rules_on_layers_are_basic_hooks(rule: Hook) -> None:
    assert _zennit.is_basic(rule), f"{VERSION}: {type(rule).__name__} has a backward of its own"
    assert _zennit.replaces_gradient(rule)
    assert _zennit.multiplies_by_input(rule)


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


@pytest.mark.parametrize("rule", [Epsilon(), Gamma(0.3), ZPlus(), AlphaBeta()])
def test_modified_forward_passes_mapped_and_reduced_are_the_rule(rule: Hook) -> None:
    model = network()
    composite, hook = register(rule, model, "2")
    x, start = torch.rand(5, 3).double().requires_grad_(), torch.rand(5, 2).double()
    output = model(x)
    hidden = _zennit.kept(hook, "input")[0]
    passes = _zennit.modified_forwards(hook, model[2])
    inputs, outputs = [input for input, _ in passes], [output for _, output in passes]
    mapped = _zennit.mapped_relevance(hook, start, outputs)
    gradients = torch.autograd.grad(outputs, inputs, mapped)
    ours = _zennit.reduced(hook, inputs, gradients)
    _zennit.keep(hook, grad_output=(start,))
    theirs = _zennit.original_backward(hook, model[2], (hidden,), (start,))[0]
    assert output.shape == start.shape
    torch.testing.assert_close(ours, theirs)
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
    _zennit.keep(hook, grad_output=(start,))
    theirs = _zennit.original_backward(hook, model.layer, (x,), (start,))[0]
    ((input, output),) = _zennit.modified_forwards(hook, model.layer)
    (gradient,) = torch.autograd.grad(output, input, _zennit.mapped_relevance(hook, start, [output])[0])
    torch.testing.assert_close(_zennit.reduced(hook, [input], [gradient]), theirs)
    composite.remove()


def test_a_parameter_modifier_acts_for_a_while() -> None:
    layer = nn.Linear(3, 2)
    weight = layer.weight.detach().clone()
    with ParamMod.ensure(lambda parameter, name: 2 * parameter)(layer) as modified:
        assert modified is layer
        assert torch.equal(layer.weight, 2 * weight)
    assert torch.equal(layer.weight, weight)


def test_a_stabilizer_is_added_with_the_sign_and_zero_counts_as_positive() -> None:
    denominator = torch.tensor([2.0, -2.0, 0.0])
    assert _zennit.stabilized(denominator, 0.5).tolist() == [2.5, -2.5, 0.5]
    assert Stabilizer.ensure(0.5)(denominator).tolist() == [2.5, -2.5, 0.5]


def test_positional_hooks_are_registered_and_removed() -> None:
    class Doubling(Hook):  # type: ignore[misc]
        def pre_forward(self, module: nn.Module, args: tuple[Tensor]) -> Tensor:
            return args[0] + 1

        def forward(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            return 2 * output

    layer, hook = nn.Identity(), Doubling()
    _zennit.keep(hook, input=torch.ones(1))
    handles = _zennit.register_positional(hook, layer)
    assert isinstance(handles, RemovableHandleList)
    assert layer(torch.ones(1)).tolist() == [4.0]
    handles.remove()
    assert layer(torch.ones(1)).tolist() == [1.0]
    assert not hook.stored_tensors


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (nn.ReLU(), Pass),
        (nn.SiLU(), Pass),
        (nn.BatchNorm2d(2), Pass),
        (Sum(), Norm),
        (nn.AvgPool2d(2), Norm),
        (nn.AdaptiveAvgPool2d(1), Norm),
        (nn.Linear(2, 2), None),
        (nn.MaxPool2d(2), None),
        (nn.Flatten(), None),
    ],
)
def test_rules_for_layers_without_weights(module: nn.Module, rule: type[Hook] | None) -> None:
    found = _zennit.rule_for_others(module, 1e-6)
    assert (None if found is None else type(found)) is rule
    assert all(isinstance(hook, Hook) for _, hook in layer_map_base(1e-6))


@pytest.mark.parametrize("bias", [True, False])
def test_a_canonizer_of_zennit_leaves_no_trace(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1, bias=bias), nn.BatchNorm2d(3)).eval()
    nn.init.uniform_(model.get_parameter("1.weight"), 0.5, 1.5)
    x = torch.rand(2, 2, 4, 4)
    before, expected = model_state(model), model(x)
    handles = _zennit.applied_reversibly(SequentialMergeBatchNorm(), model)
    torch.testing.assert_close(model[0](x), expected)
    torch.testing.assert_close(model(x), expected)
    for handle in handles:
        handle.remove()
    assert model_state(model) == before


def test_a_composite_has_these_parts() -> None:
    composite = EpsilonPlus(canonizers=[SequentialMergeBatchNorm()])
    model = network()
    assert callable(composite.module_map)
    assert [type(canonizer) for canonizer in composite.canonizers] == [SequentialMergeBatchNorm]
    assert isinstance(composite.handles, list)
    with composite.context(model) as registered:
        assert registered is model
        assert composite.handles
        assert len(composite.hook_refs) == 3
    assert not composite.handles
    seen: list[str] = []
    Composite(module_map=lambda ctx, name, module: seen.append(name)).register(model)
    assert seen == ["", "0", "1", "2"], f"{VERSION} meets modules in another order; the root must come first"


def test_attributors_have_these_parts() -> None:
    model, composite = network(), EpsilonPlus()
    for attributor in (Gradient, SmoothGrad, IntegratedGradients, Occlusion):
        built = attributor(model, composite)
        assert isinstance(built, Attributor)
        assert built.model is model
        assert built.composite is composite
        assert callable(built.attr_output_fn)
    assert SmoothGrad(model, n_iter=3).n_iter == 3
    assert IntegratedGradients(model, n_iter=3).n_iter == 3
    assert isinstance(SmoothGrad(model), Gradient)
    assert isinstance(IntegratedGradients(model), Gradient)
    gradient = Gradient(model, create_graph=True, retain_graph=True)
    assert (gradient.create_graph, gradient.retain_graph) == (True, True)


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


PRIVATE = {
    *("stored_tensors", "tensor_handles", "pre_backward", "input_modifiers", "param_modifiers"),
    *("output_modifiers", "gradient_mapper", "reducer"),
}


def test_no_other_file_looks_into_hooks() -> None:
    folder = Path(zennit_drsa.__file__).parent
    for file in folder.rglob("*.py"):
        if file.name == "_zennit.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
                raise AssertionError(f"{file.name}:{node.lineno} uses .{node.attr}; go through _zennit.py")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zennit."):
                names = {alias.name for alias in node.names}
                inner = names & {"ParamMod", "Stabilizer", "RemovableHandle", "RemovableHandleList"}
                assert not inner, f"{file.name}:{node.lineno} imports {inner}; go through _zennit.py"
