"""Targets, inputs, arguments in Captum's order, and what Captum asks of an attributor."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    FeatureAblation,
    InputXGradient,
    IntegratedGradients,
    KernelShap,
    LayerDeepLift,
    LayerIntegratedGradients,
    NoiseTunnel,
    Occlusion,
    Saliency,
    ShapleyValueSampling,
)
from drsa_core import Subspaces
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, ShapleyContext
from tests.captum_adapter.networks import Tokens, TwoInputs, conv_net, images, subspaces
from tests.closeness import assert_same

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting forward, backward hooks", "ignore:Input Tensor", "ignore:You are providing multiple"
)


def split(method, layer="features.4", n_features=8, **options) -> DisentangledAttribution:
    return DisentangledAttribution(method, layer, subspaces(n_features), **options)


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize("method", [InputXGradient, LRP, IntegratedGradients, ShapleyValueSampling])
@pytest.mark.parametrize(
    "target",
    [
        torch.tensor(3),
        torch.tensor([3]),
        [3],
        [3, 3],
        [-2, 3],
        np.int64(3),
        np.array([3, 3]),
        torch.tensor([[3], [3]]),
        (3,),
        [(3,), (3,)],
        lambda y: y[:, 3],
    ],
)
def test_every_form_of_target(method, target: Any) -> None:
    context = ShapleyContext(2) if method is ShapleyValueSampling else None
    da = split(method(conv_net()), context_method=context)
    torch.manual_seed(0)
    expected = da.concept_relevance(images(), 3)
    torch.manual_seed(0)
    torch.testing.assert_close(da.concept_relevance(images(), target), expected)


def test_targets_of_each_example() -> None:
    da = split(IntegratedGradients(conv_net()))
    both = da.attribute(images(), target=[1, 4], n_steps=3)
    for n, target in enumerate((1, 4)):
        alone = da.attribute(images()[n : n + 1], target=target, n_steps=3)
        torch.testing.assert_close(both[n : n + 1], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [InputXGradient, IntegratedGradients, LRP, DeepLift, KernelShap])
@pytest.mark.parametrize("target", [[-4, -2], np.array([1, 3]), torch.tensor([[1], [3]])])
def test_whole_maps_of_targets_that_captum_does_not_take(method, target: Any) -> None:
    da = split(method(conv_net()), context_method=None if method is LRP else "gradient")
    found: list[Any] = []
    for given in (target, [1, 3]):
        torch.manual_seed(0)
        found.append(da.explain(images(), given).whole)
    assert_same(*found)


@pytest.mark.parametrize(
    "method", [InputXGradient, DeepLift, Occlusion, lambda m: NoiseTunnel(InputXGradient(m)), LRP]
)
def test_whole_maps_are_captums(method) -> None:
    model, x = conv_net(), images()
    options: dict[str, Any] = {"sliding_window_shapes": (3, 4, 4)} if method is Occlusion else {}
    options = {"stdevs": 0.0} if isinstance(method(model), NoiseTunnel) else options
    expected = method(model).attribute(x.clone().requires_grad_(), target=[2, 0], **options)
    da = split(method(model), context_method=None if method is LRP else "gradient")
    whole: Any = da.explain(x, [2, 0], **options).whole
    assert_same(whole, expected)
    # A function of the output, also inside of a tunnel; Captum's LRP would begin otherwise.
    of_function: Any = da.explain(x, lambda y: -y[:, 2], **options).whole
    assert of_function is None if method is LRP else torch.allclose(of_function[0], -expected[0], atol=1e-6)


def test_outputs_with_more_axes() -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()

        def forward(self, x: Tensor):
            return self.net(x)[:, None] * torch.tensor([[1.0], [2.0]])  # (N, 2, 5)

    da = split(InputXGradient(Grid()), "net.features.4")
    torch.testing.assert_close(
        da.attribute(images(), target=(1, 3)), 2 * da.attribute(images(), target=(0, 3))
    )
    mixed = da.attribute(images(), target=[(1, 3), (0, 2)])
    torch.testing.assert_close(mixed[1], da.attribute(images(), target=(0, 2))[1])


def test_one_score_per_example_needs_no_target() -> None:
    model = conv_net()
    expected = split(InputXGradient(model)).attribute(images(), target=2)
    for forward in (lambda x: model(x)[:, 2], lambda x: model(x)[0, 2]):
        n = 2 if forward(images()).ndim else 1
        da = DisentangledAttribution(InputXGradient(forward), model.features[4], subspaces(8))
        torch.testing.assert_close(da.attribute(images()[:n]), expected[:n])


# ---------------------------------------------------------------------- inputs and arguments


@pytest.mark.parametrize(
    ("method", "args", "keywords"),
    [
        (IntegratedGradients, (0.1, 3, None, 4), {"baselines": 0.1, "target": 3, "n_steps": 4}),
        (InputXGradient, (3,), {"target": 3}),
        (Saliency, (3, False), {"target": 3, "abs": False}),
        (LRP, (3, None, True), {"target": 3, "return_convergence_delta": True}),
        (Occlusion, ((3, 4, 4), 4, None, 3), {"sliding_window_shapes": (3, 4, 4), "strides": 4, "target": 3}),
    ],
)
def test_arguments_in_the_order_of_the_wrapped_method(method, args: Any, keywords: dict[str, Any]) -> None:
    da = split(method(conv_net()), context_method="gradient" if method is Occlusion else None)
    found, expected = da.attribute(images(), *args), da.attribute(images(), **keywords)
    torch.testing.assert_close(found, expected)
    first = next(iter(keywords))
    for wrong in ((*args, *range(20)), args):
        with pytest.raises(TypeError, match=f"after the inputs {method.__name__} takes .*, once each"):
            da.attribute(images(), *wrong, **({first: keywords[first]} if wrong is args else {}))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (InputXGradient, {}),
        (
            IntegratedGradients,
            {"n_steps": 40, "internal_batch_size": 9, "baselines": (0.1, torch.ones(1, 3))},
        ),
        (DeepLift, {}),
        (ShapleyValueSampling, {"n_samples": 2}),
        (FeatureAblation, {}),
    ],
)
def test_tuples_of_inputs_and_further_arguments(method, options) -> None:
    torch.manual_seed(0)
    model = TwoInputs().eval()
    inputs, scale = (torch.randn(2, 4), torch.randn(2, 3)), torch.tensor([1.0, 3.0])
    da = split(method(model), "layer", 6, context_method="gradient")
    maps = da.attribute(inputs, target=1, additional_forward_args=(scale, 2), **options)
    assert isinstance(maps, tuple)
    assert [m.shape for m in maps] == [(2, 3, 4), (2, 3, 3)]
    total = da.exact_totals(inputs, 1, options.get("baselines"), (scale, 2))
    if method is not InputXGradient and method is not FeatureAblation:
        attributed = sum(m.sum(2) for m in maps)
        # 40 steps along a path with kinks; the others are exact.
        tolerance = 0.03 if method is IntegratedGradients else 1e-5
        assert (attributed - total).abs().max() <= tolerance * total.abs().max()
    for n in range(2 if method is not ShapleyValueSampling else 0):  # the argument of each goes with it
        alone = da.attribute(
            tuple(t[n : n + 1] for t in inputs),
            target=1,
            additional_forward_args=(scale[n : n + 1], 2),
            **options,
        )
        torch.testing.assert_close(maps[0][n : n + 1], alone[0], rtol=1e-4, atol=1e-6)


class OverSet(nn.Module):
    """Scores times the sum over a set (M, 8), which is the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Without a bias: the activation of the baseline 0 is 0.
        self.below, self.act, self.head = nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 5)

    def forward(self, x: Tensor, members: Tensor) -> Tensor:
        scores: Tensor = self.head(self.act(self.below(x)) * members.sum(0))
        return scores


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (IntegratedGradients, {"n_steps": 5}),
        (FeatureAblation, {"perturbations_per_eval": 3}),
        (DeepLift, {}),
        (lambda model: NoiseTunnel(InputXGradient(model)), {"nt_samples": 4, "stdevs": 0.0}),
    ],
)
@pytest.mark.parametrize("target", [1, lambda output: output[:, 1]], ids=["index", "function"])
def test_tensors_without_a_row_for_each_example_are_the_same_for_all(method, options, target) -> None:
    """Captum itself repeats them with the inputs, so that the sum would be that of several sets."""
    model, x, members = OverSet(), torch.rand(3, 6), torch.rand(7, 8)
    explanation = split(method(model), "act", context_method="gradient").explain(
        x, target, additional_forward_args=members, **options
    )
    bound = DisentangledAttribution(InputXGradient(lambda x: model(x, members)), model.act, subspaces(8))
    assert_same(explanation.score, model(x, members)[:, 1])
    assert explanation.whole is not None
    # Above the layer the network is linear, so that the maps add up to the whole.
    assert_same(explanation.maps.sum(1), explanation.whole)
    assert_same(explanation.concept_relevance, bound.concept_relevance(x, 1))


class Masked(nn.Module):
    """Halves its mask, in place or not; the mask may come in a dictionary. Overwrites its input, too."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.act, self.head = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)
        self.in_place = in_place
        self.eval()

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        mask = mask["mask"] if isinstance(mask, dict) else mask
        mask, x = (mask.mul_(0.5), x.sub_(0.1)) if self.in_place else (mask * 0.5, x - 0.1)
        scores: Tensor = self.head(self.act(self.below(x * mask)))
        return scores


@pytest.mark.filterwarnings("ignore:.*sits on zero")
@pytest.mark.parametrize("target", [1, lambda output: output[:, 1] - output[:, 2]], ids=["index", "function"])
@pytest.mark.parametrize("mask", [torch.tensor([[1.0], [2.0], [3.0]]), torch.full((6,), 2.0)])
@pytest.mark.parametrize(
    "method",
    [
        LRP,
        DeepLift,
        FeatureAblation,
        InputXGradient,
        IntegratedGradients,
        KernelShap,
        ShapleyValueSampling,
        lambda m: NoiseTunnel(InputXGradient(m)),
        lambda m: LayerIntegratedGradients(m, m.below),
    ],
)
def test_models_that_overwrite_what_they_get(method, mask: Tensor, target: Any) -> None:
    """Each forward pass has its own inputs and arguments."""
    x = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) + 0.1
    results = []
    for in_place in (True, False):
        model, given, x_given = Masked(in_place), mask.clone(), x.clone()
        torch.manual_seed(0)
        found = split(method(model), "act").explain(x_given, target, additional_forward_args=given)
        assert torch.equal(given, mask)
        assert torch.equal(x_given, x)
        results.append([found.maps, found.score, found.concept_relevance, found.whole])
    for here, there in zip(*results, strict=True):
        assert here is there is None or torch.equal(here, there)
    if method is InputXGradient:
        by_layer = LayerDeepLift(model, model.act)
        contexts = [
            split(InputXGradient(Masked(in_place)), "act", context_method="lrp").context(x, 1, {"mask": mask})
            for in_place in (True, False)
        ]
        assert_same(contexts[0][1], contexts[1][1])
        split(InputXGradient(model), "act", context_method=by_layer).context(x, 1, mask)


def test_tokens_with_features_last() -> None:
    torch.manual_seed(0)
    model, x = Tokens().eval(), torch.randn(2, 7, 5)
    for method, options in ((InputXGradient(model), {}), (ShapleyValueSampling(model), {"n_samples": 1})):
        da = split(method, "layer", channel_dim=-1)
        assert da.attribute(x, target=1, **options).shape == (2, 3, 7, 5)
        assert da.concept_relevance(x, 1).shape == (2, 3)
    whole = InputXGradient(model).attribute(x.clone().requires_grad_(), target=1)
    parts = split(InputXGradient(model), "layer", channel_dim=-1)
    torch.testing.assert_close(parts.attribute(x, target=1).sum(1), whole.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [InputXGradient, IntegratedGradients, LRP, DeepLift, Occlusion])
def test_under_no_grad_in_inference_mode_and_with_frozen_weights(method) -> None:
    model, x = conv_net(), images()
    da = split(method(model), context_method=None if method is LRP else "gradient")
    options: dict[str, Any] = {"sliding_window_shapes": (3, 6, 6)} if method is Occlusion else {}
    expected = da.attribute(x, target=1, **options)
    with torch.inference_mode():
        assert_same(da.attribute(x.clone(), target=1, **options), expected)
    model.requires_grad_(False)
    with torch.no_grad():
        assert_same(da.attribute(x, target=1, **options), expected)


def test_a_tuple_of_one_input_is_that_input() -> None:
    """The layout of tokens was unknown then, and `token_maps` an error."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor):
            return self.head(self.block(self.embed(x).flatten(2).transpose(1, 2)).relu().mean(1))

    da = split(InputXGradient(Patches()), "block", channel_dim=-1)
    expected = da.explain(images(), 1)
    torch.testing.assert_close(da.explain((images(),), 1).token_maps, expected.token_maps)
    assert expected.token_maps.shape == (2, 3, 3, 3)


# ---------------------------------------------------------------------- what Captum asks of an attributor


def test_what_captum_asks_of_an_attributor() -> None:
    model = conv_net()
    for method in (
        IntegratedGradients(model, False),
        IntegratedGradients(model),
        LRP(model),
        Saliency(model),
    ):
        da = split(method)
        assert da.multiplies_by_inputs == method.multiplies_by_inputs
        assert da.has_convergence_delta() == method.has_convergence_delta()
        assert da.forward_func is model
    assert not split(NoiseTunnel(IntegratedGradients(model))).has_convergence_delta()


def test_progress_of_both_steps(capsys: pytest.CaptureFixture[str]) -> None:
    da = split(ShapleyValueSampling(conv_net()), context_method=ShapleyContext(1))
    da.attribute(images(1, 6), target=1, n_samples=1, show_progress=True)
    assert capsys.readouterr().err.count("100%") >= 2


@pytest.mark.parametrize("method", [InputXGradient, Saliency, DeepLift, LRP, IntegratedGradients])
def test_captum_does_not_complain_about_inputs_that_are_our_own_copies(method) -> None:
    x, model = images(), conv_net()
    context = LayerDeepLift(model, model.features[4]) if method is InputXGradient else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = split(method(model), context_method=context).explain(x, 3)
    assert not [str(w.message) for w in caught if "did not already require gradients" in str(w.message)]
    assert found.whole is not None
    assert not found.whole.requires_grad
    assert not x.requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda da: pickle.loads(pickle.dumps(da))])
@pytest.mark.parametrize("method", [IntegratedGradients, LRP, ShapleyValueSampling, "embedding"])
def test_wrappers_can_be_copied_and_pickled(method, copied) -> None:
    model = conv_net()
    if method == "embedding":
        da, options = split(LayerIntegratedGradients(model, model.features[0])), {"n_steps": 3}
    else:
        context = ShapleyContext(1) if method is ShapleyValueSampling else None
        da, options = split(method(model), context_method=context), {}
    other = copied(da)
    assert other.layer is not da.layer
    torch.manual_seed(0)
    expected = da.attribute(images(1, 6), target=1, **options)
    torch.manual_seed(0)
    assert_same(other.attribute(images(1, 6), target=1, **options), expected)


def test_dual_subspaces() -> None:
    """Non-orthogonal concepts (Note I): R_k = (U_kᵀa)ᵀ(V_kᵀc), and the parts still add up."""
    torch.manual_seed(0)
    basis = torch.eye(8) + 0.2 * torch.randn(8, 8)
    u = Subspaces(basis, [3, 5], dual=torch.linalg.inv(basis).T)
    model, x = conv_net(), images()
    whole = InputXGradient(model).attribute(x.clone().requires_grad_(), target=1).detach()
    da = DisentangledAttribution(InputXGradient(model), "features.4", u)
    torch.testing.assert_close(da.attribute(x, target=1).sum(1), whole, rtol=1e-4, atol=1e-5)
    a, c = da.context(x, 1)
    difference = (a - model.features(x * 0)).detach()
    totals = [(difference * u.project_context(c, k)).sum((1, 2, 3)) for k in range(2)]
    torch.testing.assert_close(da.exact_totals(x, 1), torch.stack(totals, dim=1), rtol=1e-4, atol=1e-6)
