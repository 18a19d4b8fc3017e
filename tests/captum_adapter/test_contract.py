"""What is relied on of Captum's private parts, one test for each; all of it is in `_captum.py`.

A Captum release that moves something fails here first, with the name of what moved.
"""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path
from typing import Any

import captum
import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    InputXGradient,
    LayerDeepLift,
    LayerFeatureAblation,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    NoiseTunnel,
)
from captum.attr._core.deep_lift import SUPPORTED_NON_LINEAR, nonlinear
from captum.attr._utils.lrp_rules import EpsilonRule, GammaRule, IdentityRule, PropagationRule
from torch import Tensor, nn

import captum_drsa
from captum_drsa import _captum

VERSION = f"Captum {captum.__version__}"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def points() -> Tensor:
    return torch.rand(5, 3, generator=torch.Generator().manual_seed(1)).double()


def test_a_forward_function_without_arguments_is_called_without() -> None:
    assert _captum.call_forward(lambda: torch.tensor([1.0]), (torch.ones(1),), None).tolist() == [1.0]
    assert _captum.call_forward(lambda x: 2 * x, (torch.ones(1),), None).tolist() == [2.0]
    assert _captum.call_forward(lambda x, y: x + y, (torch.ones(1),), 3).tolist() == [4.0]


def test_baselines_are_drawn_with_or_without_the_inputs() -> None:
    x = points()
    assert _captum.draw_baselines(None, (x,))[0] == 0
    assert torch.equal(_captum.draw_baselines(lambda: x, (x,))[0], x)
    assert torch.equal(_captum.draw_baselines(lambda inputs: inputs[0] + 1, (x,))[0], x + 1)


def test_noise_tunnel_asks_for_what_the_mark_gives() -> None:
    class Marked(InputXGradient):  # type: ignore[misc]
        @_captum.logged
        def attribute(self, inputs: Any, target: Any = None) -> Any:
            return super().attribute(inputs, target)

    x = points()
    averaged = NoiseTunnel(Marked(network())).attribute(x, target=1, nt_samples=2, stdevs=0.0)
    torch.testing.assert_close(averaged, InputXGradient(network()).attribute(x, target=1))


def test_rules_are_attributes_of_modules() -> None:
    model = network()
    model[0].rule = EpsilonRule()
    assert isinstance(model[0].rule, PropagationRule)
    assert _captum.rules_on(model) == [("0", model[0].rule)]


def test_rules_that_leave_weights_alone_share_the_method_that_does_nothing() -> None:
    layer = nn.Linear(3, 4)
    before = layer.weight.data_ptr()
    EpsilonRule()._manipulate_weights(layer, None, None)
    assert layer.weight.data_ptr() == before
    assert IdentityRule._manipulate_weights is EpsilonRule._manipulate_weights
    assert GammaRule._manipulate_weights is not EpsilonRule._manipulate_weights


def test_the_two_passes_of_lrp_have_these_names() -> None:
    for name in (
        "_get_layers",
        "_check_and_attach_rules",
        "_compute_output_and_change_weights",
        "_register_forward_hooks",
        "_forward_fn_wrapper",
    ):
        assert callable(getattr(LRP, name, None)), f"{VERSION}: LRP.{name} is gone"


def test_the_two_passes_of_lrp_give_its_attributions() -> None:
    x, model = points(), network()
    expected = LRP(network()).attribute(x, target=1)
    hooks = _captum.RuleHooks(LRP(model))
    assert torch.equal(hooks.first_pass((x,), ()), network()(x))
    hooks.register()
    point = x.clone().requires_grad_()
    output = hooks.second_pass((point,), ())
    start = network()(x).detach() * torch.tensor([0.0, 1.0])
    (relevance,) = torch.autograd.grad(output, point, start)
    torch.testing.assert_close(relevance, expected)


def test_lrp_keeps_its_working_state_under_these_names() -> None:
    method = LRP(network())
    assert hasattr(method, "model")
    for name in ("layers", "forward_handles", "backward_handles"):
        assert isinstance(getattr(method, name), list), f"{VERSION}: LRP.{name} is gone"


def test_deep_lift_has_these_parts() -> None:
    method = DeepLift(network())
    assert isinstance(method.eps, float)
    assert callable(method._backward_hook), f"{VERSION}: DeepLift._backward_hook is gone"
    assert method.forward_handles == []
    assert method.backward_handles == []
    assert SUPPORTED_NON_LINEAR[nn.ReLU] is nonlinear, f"{VERSION} has another rule for ReLU"
    assert SUPPORTED_NON_LINEAR[nn.Softmax] is not nonlinear


def test_a_copy_of_deep_lift_gives_what_deep_lift_gives() -> None:
    x, model = points(), network()
    expected = DeepLift(model).attribute(x, x.flip(0), target=1)
    copied = _captum.deep_lift_copy(DeepLift(model), model)
    torch.testing.assert_close(copied.attribute(x, x.flip(0), target=1), expected)


@pytest.mark.parametrize("takes", [1, 2, 3])
def test_deep_lift_reads_how_many_arguments_a_custom_function_takes(takes: int) -> None:
    x, reference = points(), points().flip(0)
    functions: dict[int, Any] = {
        1: lambda multipliers: tuple(2 * m for m in multipliers),
        2: lambda multipliers, inputs: tuple(m * i for m, i in zip(multipliers, inputs, strict=True)),
        3: lambda m, inputs, baselines: tuple(
            a * (i - b) for a, i, b in zip(m, inputs, baselines, strict=True)
        ),
    }
    result = DeepLift(network()).attribute(x, reference, target=1, custom_attribution_func=functions[takes])
    assert result.shape == x.shape
    one = (torch.ones(5, 1, 3),)
    further = [one] * (takes - 1)
    assert _captum.by_concept(functions[takes])(one, *further)[0].shape == (5, 1, 3)


def test_layer_methods_have_these_parts() -> None:
    """What a layer method hands on to its counterpart for inputs."""
    model = network()
    for method in (LayerIntegratedGradients, LayerGradientXActivation, LayerDeepLift):
        assert method(model, model[0], multiply_by_inputs=False).layer is model[0]
        assert not method(model, model[0], multiply_by_inputs=False).multiplies_by_inputs
    assert isinstance(LayerDeepLift(model, model[0]).eps, float)
    names = set(signature(LayerFeatureAblation.attribute).parameters)
    assert {"layer_baselines", "layer_mask"} <= names, f"{VERSION}: LayerFeatureAblation has other keywords"
    for method in (LayerIntegratedGradients, LayerDeepLift):
        assert {"attribute_to_layer_input", "grad_kwargs"} <= set(signature(method.attribute).parameters)


def test_no_other_file_imports_private_parts() -> None:
    for file in Path(captum_drsa.__file__).parent.rglob("*.py"):
        if file.name == "_captum.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("captum"):
                parts = (node.module or "").split(".") + [alias.name for alias in node.names]
                private = [part for part in parts if part.startswith("_")]
                assert not private, f"{file.name}:{node.lineno} imports {private}; go through _captum.py"
