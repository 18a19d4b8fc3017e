"""Inputs and models that once gave wrong numbers or obscure errors: now right, or one clear sentence."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    FeatureAblation,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    KernelShap,
    LayerGradientXActivation,
    NoiseTunnel,
    Saliency,
    ShapleyValueSampling,
)
from drsa_core import RelevanceLossWarning, Subspaces
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, collect
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.closeness import assert_same


class InPlace(nn.Module):
    """Overwrites its input before anything else."""

    def __init__(self, is_in_place: bool) -> None:
        super().__init__()
        self.net, self.is_in_place = conv_net(), is_in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2).sub_(1) if self.is_in_place else x * 2 - 1
        scores: Tensor = self.net(x)
        return scores


@pytest.mark.parametrize(
    "method", [InputXGradient, Saliency, IntegratedGradients, DeepLift, FeatureAblation, LRP]
)
def test_models_that_work_in_place_on_their_input(method) -> None:
    x = images()
    given = x.clone()
    context = None if method is LRP else "gradient"

    def maps(model: nn.Module) -> Tensor:
        da = DisentangledAttribution(method(model), "net.features.4", subspaces(8), context)
        result: Tensor = da.attribute(given, target=1)
        return result

    in_place = maps(InPlace(True))
    assert torch.equal(given, x)
    torch.testing.assert_close(in_place, maps(InPlace(False)))


def test_a_layer_attributor_of_another_model_or_layer_is_refused() -> None:
    model, other = conv_net(), conv_net()
    for attributor in (
        LayerGradientXActivation(other, other.features[4]),
        LayerGradientXActivation(model, model.features[3]),
    ):
        with pytest.raises(ValueError, match="made for another model or layer"):
            DisentangledAttribution(InputXGradient(model), "features.4", subspaces(8), attributor)


@pytest.mark.filterwarnings("ignore:You are providing multiple inputs", "ignore:Setting forward, backward")
@pytest.mark.parametrize("method", [InputXGradient, IntegratedGradients, LRP, DeepLift, KernelShap])
@pytest.mark.parametrize(
    "target",
    [[-4, -2], np.int64(1), np.array([1, 3]), [1], torch.tensor([[1], [3]]), torch.tensor([-4, 3])],
    ids=["negative", "numpy", "array", "one", "column", "mixed"],
)
def test_whole_maps_of_targets_that_captum_does_not_take(method, target: Any) -> None:
    model, x = conv_net(), images()
    da = DisentangledAttribution(
        method(model), "features.4", subspaces(8), None if method is LRP else "gradient"
    )
    plain = [1, 3] if torch.as_tensor(target).numel() > 1 else 1
    torch.manual_seed(0)
    found = da.explain(x, target)
    torch.manual_seed(0)
    expected = da.explain(x, plain)
    assert found.whole is not None
    assert expected.whole is not None
    assert_same(found.whole, expected.whole)
    if method is InputXGradient:
        by_layer = LayerGradientXActivation(model, model.features[4])
        da = DisentangledAttribution(method(model), "features.4", subspaces(8), by_layer)
        assert_same(da.attribute(x, target=target), da.attribute(x, target=plain))


def test_whole_maps_of_a_function_inside_a_noise_tunnel() -> None:
    """The method inside the tunnel has to be told what is explained: the whole map had the wrong sign."""
    model, x = nn.Sequential(conv_net(), nn.Linear(5, 1)).eval(), images()
    da = DisentangledAttribution(NoiseTunnel(InputXGradient(model)), "0.features.4", subspaces(8))
    found = da.explain(x, lambda y: -y[:, 0], nt_samples=2, stdevs=0.0).whole
    # Without noise the mean of two samples is each of them, up to rounding.
    torch.testing.assert_close(found, -InputXGradient(model).attribute(x.clone().requires_grad_(), target=0))
    several = DisentangledAttribution(NoiseTunnel(InputXGradient(conv_net())), "features.4", subspaces(8))
    assert several.explain(x, lambda y: y[:, 1] - y[:, 2], nt_samples=2).whole is not None


def test_feature_masks_of_fewer_axes_are_for_all_examples() -> None:
    """With as many examples as rows of pixels, the rows of a mask (H, W) were taken for examples."""
    model, x, mask = conv_net(), images(12), torch.arange(144).reshape(12, 12) // 36
    da = DisentangledAttribution(FeatureAblation(model), "features.4", subspaces(8), "gradient")
    found = da.attribute(x, target=1, feature_mask=mask)
    assert_same(found, da.attribute(x, target=1, feature_mask=mask[None, None]))


@pytest.mark.parametrize("n_arguments", [1, 2, 3])
def test_custom_attribution_functions_get_the_shapes_of_captum(n_arguments: int) -> None:
    model, x, baseline = conv_net(), images(), torch.zeros(2, 3, 12, 12)
    seen: list[tuple[int, ...]] = []

    def note(*parts: tuple[Tensor, ...]) -> None:
        seen.extend(tuple(tensor.shape) for part in parts for tensor in part)

    def one(multipliers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        note(multipliers)
        return multipliers

    def two(multipliers: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        note(multipliers, inputs)
        return tuple(m * x for m, x in zip(multipliers, inputs, strict=True))

    def three(
        multipliers: tuple[Tensor, ...], inputs: tuple[Tensor, ...], baselines: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        note(multipliers, inputs, baselines)
        parts = zip(multipliers, inputs, baselines, strict=True)
        return tuple(m * (x - b) for m, x, b in parts)

    da = DisentangledAttribution(DeepLift(model), "features.4", subspaces(8))
    function = {1: one, 2: two, 3: three}[n_arguments]
    maps = da.attribute(x, target=1, baselines=baseline, custom_attribution_func=function)
    assert set(seen) == {(2, 3, 12, 12)}
    if n_arguments > 1:  # with a baseline of 0 these are what DeepLift does by itself
        torch.testing.assert_close(maps, da.attribute(x, target=1, baselines=baseline))


@pytest.mark.parametrize("channel_dim", [0, -4])
def test_the_axis_of_the_examples_is_refused(channel_dim: int) -> None:
    da = DisentangledAttribution(
        InputXGradient(conv_net()), "features.4", subspaces(8), channel_dim=channel_dim
    )
    with pytest.raises(ValueError, match="is the axis of the examples"):
        da.attribute(images(), target=1)


def token_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(8 * 4, 5)).eval()


def test_tokens_that_would_be_split_are_warned_about() -> None:
    model, x = token_net(), torch.randn(2, 4, 6)
    with pytest.warns(UserWarning, match=r"looks like 4 tokens of 8 features.*channel_dim=-1"):
        collect(InputXGradient(model), "1", [x], 1)
    pairs = collect(InputXGradient(model), "1", [x], 1, channel_dim=-1)
    assert pairs.a.shape == (8, 8)


def test_concept_relevance_is_never_nan() -> None:
    da = DisentangledAttribution(InputXGradient(conv_net()), "features.4", subspaces(8))
    with pytest.raises(ValueError, match="NaN or Inf"):
        da.concept_relevance(images() * float("nan"), 1)


def test_layers_that_are_bypassed_are_warned_about() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 1), Block(), nn.Flatten(), nn.Linear(4 * 144, 5)).eval()
    x, split = images(), Subspaces(torch.eye(4), [2, 2])
    for method in (InputXGradient, IntegratedGradients, DeepLift, FeatureAblation, GradientShap):
        options: dict[str, Any] = {"baselines": x * 0} if method is GradientShap else {}
        options |= (
            {"feature_mask": torch.zeros(1, 1, 12, 12, dtype=torch.long)}
            if (method is FeatureAblation)
            else {}
        )
        with pytest.warns(RelevanceLossWarning, match=r"\d\d\.\d% of what reaches the input goes around"):
            DisentangledAttribution(method(model), "1.inner", split).attribute(x, target=1, **options)
    # The share is that of the gradient, and the maps plus what goes around are the whole.
    around = InputXGradient(lambda x: model[3](model[2](model[0](x) + model[1].inner(model[0](x)).detach())))
    with pytest.warns(RelevanceLossWarning):
        maps = DisentangledAttribution(InputXGradient(model), "1.inner", split).attribute(x, target=1)
    whole = InputXGradient(model).attribute(x.clone(), target=1)
    torch.testing.assert_close(maps.sum(1) + around.attribute(x.clone(), target=1), whole)


def test_the_block_around_a_bypass_is_not_warned_about(recwarn) -> None:
    DisentangledAttribution(InputXGradient(conv_net()), "features.4", subspaces(8)).attribute(
        images(), target=1
    )
    assert not [warning for warning in recwarn if issubclass(warning.category, RelevanceLossWarning)]


def training_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(800, 5)
    ).train()


@pytest.mark.parametrize("is_function", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("what", ["attribute", "collect", "concept_relevance"])
def test_training_mode_is_warned_about_and_statistics_stay(is_function: bool, what: str) -> None:
    model = training_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forward: Any = (lambda x: model(x)) if is_function else model
    da = DisentangledAttribution(InputXGradient(forward), model[2], subspaces(8))
    given: Any = [images()] if what == "collect" else images()
    with pytest.warns(UserWarning, match=r"BatchNorm2d\)? is in training mode"):
        getattr(da, what)(given, target=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_feature_masks_of_their_own_for_each_example() -> None:
    model, x = conv_net(), images()
    pixels = torch.arange(144).reshape(1, 12, 12)
    mask = torch.stack([pixels // 36, pixels % 4])
    for method in (FeatureAblation, ShapleyValueSampling):
        da = DisentangledAttribution(method(model), "features.4", subspaces(8), "gradient")
        options: dict[str, Any] = {} if method is FeatureAblation else {"n_samples": 2}
        torch.manual_seed(1)
        maps = da.attribute(x, target=1, feature_mask=mask, **options)
        assert maps.shape == (2, 3, 3, 12, 12)
        if method is FeatureAblation:
            for i in range(2):
                alone = da.attribute(x[i : i + 1], target=1, feature_mask=mask[i : i + 1])
                assert_same(maps[i : i + 1], alone)
        else:
            total = da.exact_totals(x, 1)
            torch.testing.assert_close((maps * 1.0).sum((2, 3, 4)) / (36 * 3), total, rtol=1e-3, atol=1e-5)


def test_outputs_without_axes() -> None:
    model = conv_net()
    da = DisentangledAttribution(
        InputXGradient(lambda x: model(x)[:, 1].sum()), model.features[4], subspaces(8)
    )
    expected = DisentangledAttribution(InputXGradient(model), "features.4", subspaces(8))
    assert_same(da.attribute(images(1)), expected.attribute(images(1), target=1))
    with pytest.raises(ValueError, match=r"one row for each of the 2 examples, got shape \(\)"):
        da.attribute(images(2))


def test_vectors_have_relevances_and_deltas() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    x = torch.randn(2, 6, dtype=torch.float64)
    for method in (IntegratedGradients, LRP, DeepLift):
        da = DisentangledAttribution(method(model), "1", subspaces(8))
        a, c = da.context(x, 1)
        expected = torch.stack(
            [(a @ u * (c @ u)).sum(1) for u in subspaces(8).to(dtype=torch.float64).blocks], 1
        )
        torch.testing.assert_close(da.concept_relevance(x, 1), expected)
        maps, delta = da.attribute(x, target=1, return_convergence_delta=True)
        assert delta.shape == (2, 3)
        if method is not LRP:
            torch.testing.assert_close(maps.sum(2) - da.exact_totals(x, 1), delta)


def test_baselines_of_a_total_may_be_a_function() -> None:
    model, x = conv_net(), images()
    da = DisentangledAttribution(GradientShap(model), "features.4", subspaces(8))
    drawn = torch.randn(3, 3, 12, 12)
    torch.testing.assert_close(
        da.exact_totals(x, 1, baselines=lambda: drawn), da.exact_totals(x, 1, baselines=drawn)
    )


def test_a_model_of_a_fixed_batch_size_says_what_to_do() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.net(x).reshape(2, 5)
            return scores

    da = DisentangledAttribution(IntegratedGradients(Fixed()), "net.features.4", subspaces(8))
    with pytest.raises(RuntimeError, match="shape") as error:
        da.attribute(images(2), target=1)
    assert any("takes any number of examples" in note for note in error.value.__notes__)
    gradient = DisentangledAttribution(InputXGradient(Fixed()), "net.features.4", subspaces(8))
    assert gradient.attribute(images(2), target=1).shape == (2, 3, 3, 12, 12)


def test_numbers_of_numpy() -> None:
    model = conv_net()
    plain = collect(InputXGradient(model), "features.4", [images()], 1, positions=3, random_state=3)
    one, three = cast(Any, np.int64(1)), cast(Any, np.int64(3))
    numpy = collect(InputXGradient(model), "features.4", [images()], one, positions=three, random_state=three)
    assert torch.equal(plain.a, numpy.a)
    for targets in (np.array([1, 1, 1]), [1], torch.tensor([1, 0, 2])):
        with pytest.raises(ValueError, match="entries, but the loader gave 2 images"):
            collect(InputXGradient(model), "features.4", [images()], targets)


def test_targets_of_their_own_for_each_image() -> None:
    method = InputXGradient(conv_net())
    options: dict[str, Any] = {"positions": 3, "random_state": 0}
    labels = collect(method, "features.4", [(images(), torch.tensor([1, 2]))], "label", **options)
    listed = collect(method, "features.4", [images()], [1, 2], **options)
    one = collect(method, "features.4", [images()], 1, **options)
    assert torch.equal(labels.c, listed.c)
    assert torch.equal(one.c[:3], listed.c[:3])
    assert not torch.equal(one.c[3:], listed.c[3:])
    # Positions depend on the image alone, not on the batches.
    singles = collect(method, "features.4", [images()[:1], images()[1:]], 1, **options)
    assert_same(singles.a, one.a)


@pytest.mark.parametrize("inputs", [images().numpy(), [images()], "x"], ids=["numpy", "list", "str"])
def test_inputs_that_are_not_tensors(inputs) -> None:
    da = DisentangledAttribution(InputXGradient(conv_net()), "features.4", subspaces(8))
    with pytest.raises(TypeError, match=r"become tensors with torch\.as_tensor"):
        da.attribute(inputs, target=1)


def test_loaders_that_are_none() -> None:
    da = DisentangledAttribution(InputXGradient(conv_net()), "features.4")
    with pytest.raises(TypeError, match=r"got one tensor of shape .* pass \[x\]"):
        da.fit(images(), 1)
    with pytest.raises(ValueError, match="no images"):
        da.fit([images()[:0]], 1)
    pairs = da.collect([images()[:0], images()], 1, positions=2, random_state=0)
    assert torch.equal(pairs.a, da.collect([images()], 1, positions=2, random_state=0).a)


@pytest.mark.parametrize("method", [FeatureAblation, KernelShap])
def test_a_seed_gives_the_same_maps(method) -> None:
    da = DisentangledAttribution(method(conv_net()), "features.4", subspaces(8), "gradient")
    mask = torch.arange(144).reshape(1, 1, 12, 12) // 36
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(da.attribute(images(1), target=1, feature_mask=mask))
    assert_same(runs[0], runs[1])
