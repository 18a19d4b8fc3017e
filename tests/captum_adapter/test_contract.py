"""What is relied on of Captum's private parts; all of it is in `_captum.py`.

A Captum release that moves something fails here first, with the name of what moved.
"""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path
from typing import Any

import captum
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
from captum.attr._utils.lrp_rules import EpsilonRule, GammaRule, IdentityRule
from drsa_core.layer import Request
from drsa_core.model_state import restored
from torch import Tensor, nn

import captum_drsa
from captum_drsa import _captum
from tests.model_state import model_state

VERSION = f"Captum {captum.__version__}"


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def points() -> Tensor:
    return torch.rand(5, 3, generator=torch.Generator().manual_seed(1)).double()


def request(model: nn.Module, target: Any = 1) -> Request:
    return Request(model, model[1], "1", (points(),), target)  # type: ignore[index]


def test_baselines_are_drawn_with_or_without_the_inputs() -> None:
    x = points()
    assert _captum.draw_baselines(None, (x,))[0] == 0
    assert torch.equal(_captum.draw_baselines(lambda: x, (x,))[0], x)
    assert torch.equal(_captum.draw_baselines(lambda inputs: inputs + 1, (x,))[0], x + 1)
    assert torch.equal(_captum.draw_baselines(lambda inputs: inputs, (x, x + 1))[1], x + 1)


def test_noise_tunnel_asks_for_what_the_mark_gives() -> None:
    class Marked(InputXGradient):  # type: ignore[misc]
        @_captum.logged
        def attribute(self, inputs: Any, target: Any = None) -> Any:
            return super().attribute(inputs, target)

    averaged = NoiseTunnel(Marked(network())).attribute(points(), target=1, nt_samples=2, stdevs=0.0)
    torch.testing.assert_close(averaged, InputXGradient(network()).attribute(points(), target=1))


def test_rules_are_attributes_of_modules() -> None:
    model = network()
    model[0].rule = EpsilonRule()
    assert _captum.rules_on(model) == [("0", model[0].rule)]
    before = model[0].weight.data_ptr()
    EpsilonRule()._manipulate_weights(model[0], None, None)
    assert model[0].weight.data_ptr() == before
    assert IdentityRule._manipulate_weights is EpsilonRule._manipulate_weights
    assert GammaRule._manipulate_weights is not EpsilonRule._manipulate_weights


def test_the_rules_in_force_give_the_attributions_of_lrp() -> None:
    x, model = points().requires_grad_(), network()
    expected, before = LRP(network()).attribute(points(), target=1), model_state(model)
    with restored(model, attributes=_captum.ATTRIBUTES):
        output, activation = _captum.lrp_rules_in_force(LRP(model), request(model))
        start = output * torch.tensor([0.0, 1.0])
        (relevance,) = torch.autograd.grad(model(x + 0), x, start)
    torch.testing.assert_close(relevance, expected)
    torch.testing.assert_close(output, model(points()))
    torch.testing.assert_close(activation, model[:2](points()))
    assert model_state(model) == before


def test_methods_explain_a_network_with_the_targets_of_its_request() -> None:
    x, model = points(), network()
    for method in (DeepLift(model), LRP(model), NoiseTunnel(DeepLift(model))):
        options: dict[str, Any] = {"stdevs": 0.0} if isinstance(method, NoiseTunnel) else {}
        before = {key: id(value) for key, value in vars(method).items()}
        scores = _captum.Network(request(model, [0, 1, 1, 0, 1]))
        copied = _captum.for_network(method, scores)
        found = copied.attribute(x, additional_forward_args=scores.additional_args, **options)
        assert {key: id(value) for key, value in vars(method).items()} == before
        expected = method.attribute(x, target=[0, 1, 1, 0, 1], **options)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(scores(x, torch.arange(5)), model(x)[range(5), [0, 1, 1, 0, 1]])


def test_layer_methods_have_these_parts() -> None:
    """What a layer method hands on to its counterpart for inputs."""
    model = network()
    for method in (LayerIntegratedGradients, LayerGradientXActivation, LayerDeepLift):
        assert method(model, model[0], multiply_by_inputs=False).layer is model[0]
        assert not method(model, model[0], multiply_by_inputs=False).multiplies_by_inputs
    assert isinstance(LayerDeepLift(model, model[0]).eps, float)
    names = set(signature(LayerFeatureAblation.attribute).parameters)
    assert {"layer_baselines", "layer_mask"} <= names, f"{VERSION}: LayerFeatureAblation has other keywords"
    assert "attribute_to_layer_input" in signature(LayerIntegratedGradients.attribute).parameters


def test_no_other_file_imports_private_parts() -> None:
    for file in Path(captum_drsa.__file__).parent.rglob("*.py"):
        if file.name == "_captum.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("captum"):
                parts = (node.module or "").split(".") + [alias.name for alias in node.names]
                private = [part for part in parts if part.startswith("_")]
                assert not private, f"{file.name}:{node.lineno} imports {private}; go through _captum.py"
