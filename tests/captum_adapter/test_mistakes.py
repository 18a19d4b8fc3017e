"""Mistakes of the user are named, with what to do, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    FeatureAblation,
    GradientShap,
    GuidedBackprop,
    InputXGradient,
    IntegratedGradients,
    LayerConductance,
    LayerDeepLift,
    LayerDeepLiftShap,
    LayerIntegratedGradients,
    LayerLRP,
    NoiseTunnel,
    Saliency,
    ShapleyValueSampling,
)
from drsa_core import RelevanceLossWarning, Subspaces
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, IntegratedGradientsContext, ShapleyContext, collect
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.model_state import model_state

pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:Input Tensor")


def split(method, layer="features.4", n_features=8, **options) -> DisentangledAttribution:
    return DisentangledAttribution(method, layer, subspaces(n_features), **options)


# ---------------------------------------------------------------------- when the wrapper is made


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
        with pytest.raises(TypeError, match=r"cannot be split into concepts.*IntegratedGradients"):
            split(method)


def test_layers_that_do_not_belong() -> None:
    model = conv_net()
    with pytest.raises(ValueError, match="not a module of this ConvNet"):
        split(InputXGradient(model), conv_net().features[4])
    with pytest.raises(ValueError, match="did you mean"):
        split(InputXGradient(model), "feature.4")
    with pytest.raises(ValueError, match="give the layer as a module"):
        split(InputXGradient(lambda x: model(x)), "features.4")
    other = split(InputXGradient(lambda x: model(x)), conv_net().features[4])
    with pytest.raises(ValueError, match="was not run in the forward pass"):
        other.attribute(images(), target=1)


@pytest.mark.parametrize("choice", ["shap", 3, ShapleyContext, IntegratedGradientsContext, LayerDeepLift])
def test_context_methods_that_are_none(choice: Any) -> None:
    with pytest.raises(ValueError, match="context_method must be one of"):
        split(InputXGradient(conv_net()), context_method=choice)


def test_models_that_cannot_be_hooked() -> None:
    with torch.inference_mode():
        made_there = conv_net()
    with pytest.raises(TypeError, match=r"torch.inference_mode\(\)"):
        split(InputXGradient(made_there))
    with pytest.raises(TypeError, match="TorchScript"):
        split(InputXGradient(torch.jit.trace(conv_net(), images())))


# ---------------------------------------------------------------------- when it is used


def test_subspaces_that_do_not_fit() -> None:
    model = conv_net()
    before = model_state(model)
    for method in (InputXGradient, LRP, IntegratedGradients):
        for use in ("attribute", "explain", "concept_relevance"):
            with pytest.raises(ValueError, match=r"have D = 7 features, but layer .* \(2, 8, 6, 6\)"):
                getattr(split(method(model), n_features=7), use)(images(), target=1)
    with pytest.raises(TypeError, match=r"must be a drsa_core\.Subspaces"):
        DisentangledAttribution(InputXGradient(model), "features.4", torch.eye(8))  # type: ignore[arg-type]
    da = DisentangledAttribution(InputXGradient(model), "features.4")
    for call in (da.attribute, da.explain, da.concept_relevance, da.exact_totals):
        with pytest.raises(ValueError, match="call fit"):
            call(images(), target=1)
    assert model_state(model) == before


@pytest.mark.parametrize("method", [InputXGradient, LRP, IntegratedGradients, ShapleyValueSampling])
@pytest.mark.parametrize("channel_dim", [4, 0, -4])
def test_channel_dim_that_is_no_axis_of_features(method, channel_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"channel_dim={channel_dim} .* \(2, 8, 6, 6\); use 1 for"):
        split(method(conv_net()), channel_dim=channel_dim).attribute(images(), target=1)


class Detached(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.lower, self.layer, self.side = nn.Linear(4, 6), nn.ReLU(), nn.Linear(4, 6)
        self.head, self.where = nn.Linear(6, 2), where

    def forward(self, x: Tensor):
        below = self.lower(x)
        a = self.layer(below.detach() if self.where == "below" else below)
        return self.head(
            a.detach() if self.where == "above" else self.side(x) if self.where == "aside" else a
        )


@pytest.mark.parametrize("method", [InputXGradient, IntegratedGradients, LRP])
@pytest.mark.parametrize("where", ["above", "aside", "below"])
def test_layers_without_a_gradient_path(method, where: str) -> None:
    expected = "to every input" if where == "below" else "no gradient flows from the explained score"
    with pytest.raises(ValueError, match=expected):
        split(method(Detached(where)), "layer", 6).attribute(torch.randn(2, 4), target=1)


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
        with pytest.raises(TypeError, match=r"must return one .* tensor .* got tuple"):
            split(method(Twice()), "recurrent", 4).attribute(torch.randn(2, 4), target=1)


@pytest.mark.parametrize("method", [InputXGradient, LRP, IntegratedGradients, ShapleyValueSampling])
@pytest.mark.parametrize("target", [17, [1, 17], (1, 2), [1, 2, 3], None, lambda y: y[:, :2]])
def test_targets_that_do_not_fit(method, target) -> None:
    model = conv_net()
    before = model_state(model)
    with pytest.raises(ValueError, match="target"):
        split(method(model)).attribute(images(), target=target)
    assert model_state(model) == before


def test_inputs_that_do_not_fit() -> None:
    model, whole_numbers = conv_net(), torch.ones(2, 3, 12, 12, dtype=torch.long)
    for method in (InputXGradient(model), LRP(model), NoiseTunnel(Saliency(model))):
        with pytest.raises(TypeError, match="needs floating-point inputs"):
            split(method).attribute(whole_numbers, target=1)
    wrong: Any
    for wrong in (images().numpy(), [images()], "x"):
        with pytest.raises(TypeError, match=r"become tensors with torch\.as_tensor"):
            split(InputXGradient(model)).attribute(wrong, target=1)
    with pytest.raises(ValueError, match="same number of examples"):
        split(InputXGradient(model)).attribute((images(2), images(3)), target=1)
    for use in ("attribute", "concept_relevance"):
        with pytest.raises(ValueError, match="NaN or Inf"):
            getattr(split(InputXGradient(model)), use)(images() * float("nan"), target=1)
    for method in (InputXGradient, LRP):
        with pytest.raises(TypeError, match="n_steps"):
            split(method(model)).attribute(images(), target=1, n_steps=3)


@pytest.mark.parametrize(
    "model", [lambda y: y.sum(), lambda y: y[:1], lambda y: y.T], ids=["sum", "one row", "turned"]
)
def test_models_that_give_no_row_for_each_example(model) -> None:
    net = conv_net()
    da = DisentangledAttribution(InputXGradient(lambda x: model(net(x))), net.features[4], subspaces(8))
    with pytest.raises(ValueError, match="one row for each of the 2 examples, got shape"):
        da.attribute(images(2), target=1)


@pytest.mark.parametrize("kind", [IntegratedGradients, DeepLift, GradientShap])
def test_baselines_of_another_shape_are_named_by_their_shapes(kind) -> None:
    method, x = split(kind(conv_net())), images(3)
    wrong = [x[:, :, :4], torch.tensor(0.0)] + [x[:2]] * (kind is not GradientShap)
    for baselines in wrong:
        with pytest.raises(ValueError, match=r"baselines of an input \(3, 3, 12, 12\)") as caught:
            method.attribute(x, target=1, baselines=baselines)
        assert f"got {tuple(baselines.shape)}" in str(caught.value)
    for right in (x, x[:1], images(5) if kind is GradientShap else 0.5):
        assert method.attribute(x, target=1, baselines=right).shape == (3, 3, 3, 12, 12)
    tunnel = split(NoiseTunnel(IntegratedGradients(conv_net())))
    options: dict[str, Any] = {"nt_samples": 2, "n_steps": 2, "draw_baseline_from_distrib": True}
    assert tunnel.attribute(x, target=1, baselines=images(5), **options).shape == (3, 3, 3, 12, 12)


def test_delta_where_there_is_none() -> None:
    model = conv_net()
    for method in (Saliency(model), ShapleyValueSampling(model), NoiseTunnel(IntegratedGradients(model))):
        with pytest.raises(ValueError, match=r"no convergence delta.*certificate\(\)"):
            split(method).attribute(images(), target=1, return_convergence_delta=True)
    # What the message advises is true.
    assert NoiseTunnel(split(IntegratedGradients(model))).has_convergence_delta()


def test_loaders_that_are_none() -> None:
    method = InputXGradient(conv_net())
    with pytest.raises(ValueError, match="no images"):
        collect(method, "features.4", [], target=1)
    with pytest.raises(TypeError, match="must give tensors"):
        collect(method, "features.4", ["image.jpg"], target=1)
    with pytest.raises(TypeError, match=r"got one tensor .*pass \[x\]"):
        collect(method, "features.4", images(), 1)
    for targets in ([1], np.array([1, 1, 1]), torch.tensor([1, 0, 2])):
        with pytest.raises(ValueError, match=r"entries, but the loader gave 2"):
            collect(method, "features.4", [images()], targets)


# ---------------------------------------------------------------------- warnings


def test_tokens_that_would_be_split_are_warned_about() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(8 * 4, 5)).eval()
    x = torch.randn(2, 4, 6)
    with pytest.warns(UserWarning, match=r"looks like tokens of 8 features.*channel_dim=-1"):
        collect(InputXGradient(model), "1", [x], 1)
    assert collect(InputXGradient(model), "1", [x], 1, channel_dim=-1).a.shape == (8, 8)


def test_layers_that_are_bypassed_are_warned_about(recwarn) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 1), Block(), nn.Flatten(), nn.Linear(4 * 144, 5)).eval()
    x, halves = images(), Subspaces(torch.eye(4), [2, 2])
    for method in (InputXGradient, IntegratedGradients, DeepLift, FeatureAblation, GradientShap):
        options: dict[str, Any] = {"baselines": x * 0} if method is GradientShap else {}
        if method is FeatureAblation:
            options = {"feature_mask": torch.zeros(1, 1, 12, 12, dtype=torch.long)}
        with pytest.warns(RelevanceLossWarning, match=r"\d\d\.\d% of what reaches the input goes around"):
            DisentangledAttribution(method(model), "1.inner", halves).attribute(x, target=1, **options)
    # The maps plus what goes around are the whole.
    around = InputXGradient(lambda x: model[3](model[2](model[0](x) + model[1].inner(model[0](x)).detach())))
    with pytest.warns(RelevanceLossWarning):
        maps = DisentangledAttribution(InputXGradient(model), "1.inner", halves).attribute(x, target=1)
    whole = InputXGradient(model).attribute(x.clone(), target=1)
    torch.testing.assert_close(maps.sum(1) + around.attribute(x.clone(), target=1), whole)
    recwarn.clear()
    DisentangledAttribution(InputXGradient(model), "1", halves).attribute(x, target=1)
    assert not [warning for warning in recwarn if issubclass(warning.category, RelevanceLossWarning)]
