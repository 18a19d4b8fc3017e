"""Mistakes of the user are named, with what to do, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    GradientShap,
    GuidedBackprop,
    InputXGradient,
    IntegratedGradients,
    InternalInfluence,
    LayerConductance,
    LayerDeepLift,
    LayerDeepLiftShap,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    LayerLRP,
    NoiseTunnel,
    Saliency,
    ShapleyValueSampling,
)
from torch import Tensor, nn

from captum_drsa import (
    DisentangledAttribution,
    IntegratedGradientsContext,
    LayerAttributionContext,
    ShapleyContext,
)
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.model_state import model_state

pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:Input Tensor")


def split(method, layer="features.4", n_features=8, **options) -> DisentangledAttribution:
    return DisentangledAttribution(method, layer, subspaces(n_features), **options)


def test_methods_that_cannot_be_wrapped() -> None:
    model = conv_net()
    for method in (
        GuidedBackprop(model),
        LayerLRP(model, model.top[0]),
        LayerConductance(model, model.features[0]),
        LayerDeepLiftShap(model, model.features[0]),  # not what its parent class LayerDeepLift does
        NoiseTunnel(LayerIntegratedGradients(model, model.features[0])),
        NoiseTunnel(LRP(model)),
        NoiseTunnel(ShapleyValueSampling(model)),
        model,
    ):
        with pytest.raises(
            TypeError, match=r"cannot be split into concepts\. These can: IntegratedGradients"
        ):
            split(method)


def test_layers_that_do_not_belong() -> None:
    model = conv_net()
    with pytest.raises(ValueError, match="not a module of this ConvNet"):
        split(InputXGradient(model), conv_net().features[4])
    with pytest.raises(ValueError, match="did you mean"):
        split(InputXGradient(model), "feature.4")
    with pytest.raises(ValueError, match="give the layer as a module"):
        split(InputXGradient(lambda x: model(x)), "features.4")
    other = DisentangledAttribution(InputXGradient(lambda x: model(x)), conv_net().features[4], subspaces(8))
    with pytest.raises(ValueError, match="was not run in the forward pass"):
        other.attribute(images(), target=1)


def test_subspaces_that_do_not_fit() -> None:
    model = conv_net()
    before = model_state(model)
    for method in (InputXGradient, LRP, IntegratedGradients):
        with pytest.raises(ValueError, match=r"have D = 7 features, but layer .* \(2, 8, 6, 6\)"):
            split(method(model), n_features=7).attribute(images(), target=1)
    with pytest.raises(TypeError, match=r"must be a drsa_core\.Subspaces"):
        DisentangledAttribution(InputXGradient(model), "features.4", torch.eye(8))  # type: ignore[arg-type]
    assert model_state(model) == before


@pytest.mark.parametrize("method", [InputXGradient, LRP, IntegratedGradients, ShapleyValueSampling])
def test_channel_dim_that_is_no_axis(method) -> None:
    with pytest.raises(ValueError, match=r"channel_dim=4 is not an axis .* shape \(2, 8, 6, 6\); use 1 for"):
        split(method(conv_net()), channel_dim=4).attribute(images(), target=1)


def test_before_fit() -> None:
    da = DisentangledAttribution(InputXGradient(conv_net()), "features.4")
    for call in (da.attribute, da.concept_relevance, da.exact_totals):
        with pytest.raises(ValueError, match="call fit"):
            call(images(), target=1)


class Detached(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.lower, self.layer, self.side, self.head = (
            nn.Linear(4, 6),
            nn.ReLU(),
            nn.Linear(4, 6),
            nn.Linear(6, 2),
        )
        self.where = where

    def forward(self, x: Tensor):
        below = self.lower(x)
        a = self.layer(below.detach() if self.where == "below" else below)
        return self.head(
            a.detach() if self.where == "above" else self.side(x) if self.where == "aside" else a
        )


@pytest.mark.parametrize("method", [InputXGradient, IntegratedGradients, LRP])
@pytest.mark.parametrize("where", ["above", "aside", "below"])
def test_layers_without_a_gradient_path(method, where: str) -> None:
    da = split(method(Detached(where)), "layer", 6)
    expected = "to every input" if where == "below" else "no gradient flows from the explained score"
    with pytest.raises(ValueError, match=expected):
        da.attribute(torch.randn(2, 4), target=1)


def test_layers_that_run_twice_or_return_no_tensor() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.recurrent = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor):
            return self.layer(self.layer(x)) + self.recurrent(x[:, None])[0][:, 0]

    for method in (InputXGradient, IntegratedGradients):
        with pytest.raises(ValueError, match="runs more than once"):
            split(method(Twice()), "layer", 4).attribute(torch.randn(2, 4), target=1)
        with pytest.raises(TypeError, match="must return one tensor"):
            split(method(Twice()), "recurrent", 4).attribute(torch.randn(2, 4), target=1)


@pytest.mark.parametrize("method", [InputXGradient, LRP, IntegratedGradients, ShapleyValueSampling])
@pytest.mark.parametrize("target", [17, [1, 17], torch.tensor([1, 2, 3]), (1, 2), [1, 2, 3], None])
def test_targets_out_of_range(method, target) -> None:
    model = conv_net()
    before = model_state(model)
    with pytest.raises(ValueError, match="target"):
        split(method(model)).attribute(images(), target=target)
    assert model_state(model) == before


def test_bad_callable_target() -> None:
    with pytest.raises(ValueError, match="one score for each of the 2 rows"):
        split(InputXGradient(conv_net())).attribute(images(), target=lambda y: y[:, :2])


def test_bad_inputs() -> None:
    model = conv_net()
    for method in (InputXGradient(model), LRP(model), NoiseTunnel(Saliency(model))):
        with pytest.raises(TypeError, match="needs floating-point inputs"):
            split(method).attribute(torch.ones(2, 3, 12, 12, dtype=torch.long), target=1)
    with pytest.raises(TypeError, match="inputs must be a tensor"):
        split(InputXGradient(model)).attribute([images()], target=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same number of examples"):
        split(InputXGradient(model)).attribute((images(2), images(3)), target=1)
    with pytest.raises(ValueError, match="NaN or Inf"):
        split(InputXGradient(model)).attribute(images() * float("nan"), target=1)
    with pytest.raises(ValueError, match="context_method must be one of"):
        split(InputXGradient(model), context_method="shap")
    with pytest.raises(TypeError):
        split(InputXGradient(model)).attribute(images(), target=1, n_steps=3)


def test_delta_where_there_is_none() -> None:
    model = conv_net()
    for method in (Saliency(model), ShapleyValueSampling(model), NoiseTunnel(IntegratedGradients(model))):
        with pytest.raises(ValueError, match="has no convergence delta"):
            split(method).attribute(images(), target=1, return_convergence_delta=True)


def test_advice_about_a_delta_is_true() -> None:
    model = conv_net()
    with pytest.raises(ValueError, match=r"explain\(\.\.\.\)\.certificate\(\)") as caught:
        split(InputXGradient(model)).attribute(images(), target=1, return_convergence_delta=True)
    assert "NoiseTunnel" not in str(caught.value)
    assert not NoiseTunnel(split(InputXGradient(model))).has_convergence_delta()
    with pytest.raises(ValueError, match=r"NoiseTunnel\(DisentangledAttribution\(IntegratedGradients"):
        split(NoiseTunnel(IntegratedGradients(model))).attribute(
            images(), target=1, return_convergence_delta=True
        )
    assert NoiseTunnel(split(IntegratedGradients(model))).has_convergence_delta()


def test_an_unknown_keyword_of_lrp_is_named_without_private_names() -> None:
    with pytest.raises(TypeError, match="LRP takes no keyword 'n_steps' here; it knows verbose"):
        split(LRP(conv_net())).attribute(images(), target=1, n_steps=3)


@pytest.mark.parametrize("kind", [IntegratedGradients, DeepLift])
def test_baselines_of_another_shape_are_named_by_their_shapes(kind) -> None:
    method, x = split(kind(conv_net())), images(3)
    for wrong in (x[:2], x[:, :, :4], torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"baselines of an input \(3, 3, 12, 12\)") as caught:
            method.attribute(x, target=1, baselines=wrong)
        assert f"got {tuple(wrong.shape)}" in str(caught.value)
    with pytest.raises(ValueError, match="one for each of the 1 inputs, got 2"):
        method.attribute(x, target=1, baselines=(0.0, 1.0))
    for right in (x, x[:1], 0.5):
        assert method.attribute(x, target=1, baselines=right).shape == (3, 3, 3, 12, 12)
    stretched = torch.zeros(1, 3, 1, 1)
    if kind is DeepLift:  # it joins inputs and baselines
        with pytest.raises(ValueError, match=r"or \(1, 3, 12, 12\), got \(1, 3, 1, 1\)"):
            method.attribute(x, target=1, baselines=stretched)
    else:
        assert method.attribute(x, target=1, baselines=stretched).shape == (3, 3, 3, 12, 12)


def test_a_distribution_of_baselines_may_have_any_number_of_rows() -> None:
    x = images(3)
    shap = split(GradientShap(conv_net()))
    assert shap.attribute(x, target=1, baselines=images(5), n_samples=2).shape == (3, 3, 3, 12, 12)
    with pytest.raises(ValueError, match=r"\(n, 3, 12, 12\) with any n, got \(5, 3, 12, 4\)"):
        shap.attribute(x, target=1, baselines=images(5)[..., :4], n_samples=2)
    tunnel = split(NoiseTunnel(IntegratedGradients(conv_net())))
    options: dict[str, Any] = {"nt_samples": 2, "n_steps": 2, "draw_baseline_from_distrib": True}
    assert tunnel.attribute(x, target=1, baselines=images(5), **options).shape == (3, 3, 3, 12, 12)


@pytest.mark.parametrize(
    "attributor",
    [
        lambda model, layer: LayerGradientXActivation(model, layer, multiply_by_inputs=False),
        lambda model, layer: LayerIntegratedGradients(model, layer, multiply_by_inputs=False),
        InternalInfluence,
    ],
)
def test_layer_attributors_without_relevance_give_no_contexts(attributor) -> None:
    """Contexts are c = R ⊘ a; of gradients they would be ∂y/∂a ⊘ a."""
    model = conv_net()
    for choice in (lambda a: a, LayerAttributionContext):
        with pytest.raises(ValueError, match="gives no relevance R here"):
            split(InputXGradient(model), context_method=choice(attributor(model, model.features[4])))


def test_layer_attributors_of_a_layer_that_runs_twice() -> None:
    """Relevance of its last run was divided by the activation of its first."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(6, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 3))
    for attributor in (LayerGradientXActivation, LayerDeepLift, LayerConductance):
        da = split(IntegratedGradients(model), relu, context_method=attributor(model, relu))
        with pytest.raises(ValueError, match="layer '1' runs more than once in a forward pass"):
            da.context(torch.randn(2, 6), 1)


@pytest.mark.parametrize("choice", [ShapleyContext, IntegratedGradientsContext, LayerDeepLift])
def test_a_class_as_context_method(choice) -> None:
    """It was called with what is to be explained, and failed there."""
    with pytest.raises(ValueError, match=r"a context object such as ShapleyContext\(n_samples=100\)"):
        split(InputXGradient(conv_net()), context_method=choice)
