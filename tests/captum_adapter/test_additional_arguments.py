"""Additional arguments of the forward function: one row for each example, or the same for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import (
    DeepLift,
    FeatureAblation,
    InputXGradient,
    IntegratedGradients,
    LayerIntegratedGradients,
    NoiseTunnel,
)
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.closeness import assert_same


class Weighted(nn.Module):
    """Scores times weights that are the same for all examples (D,), or one for each example (N, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        scores: Tensor = self.net(x)[:, :2] * weights
        return scores


@pytest.mark.parametrize("method", [InputXGradient, IntegratedGradients, FeatureAblation])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("weights", [torch.tensor([1.0, 3.0]), torch.tensor(2.0)], ids=["vector", "scalar"])
@pytest.mark.parametrize("target", [0, 1])
def test_additional_arguments_without_a_batch_axis(method, n: int, weights: Tensor, target: int) -> None:
    """Where there are two examples, the vector is as long as the batch.

    Of output 0 the first example has the right score also if it gets its "row" of the vector alone.
    """
    model, x = Weighted(), images(n)
    direct = DisentangledAttribution(method(model), "net.features.4", subspaces(8), "integrated_gradients")
    bound = DisentangledAttribution(
        method(lambda x: model(x, weights)), model.net.features[4], subspaces(8), "integrated_gradients"
    )
    found = direct.attribute(x, target=target, additional_forward_args=weights)
    assert_same(found, bound.attribute(x, target=target))


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("finish", [lambda z: 1e-7 * z, lambda z: (z * 3 + z.new_tensor([12, 0])).softmax(1)])
def test_additional_arguments_without_a_batch_axis_where_scores_are_small_or_sure(
    finish, target: int
) -> None:
    """Whatever the examples get, their scores differ by less than 1e-5."""

    class Finished(Weighted):
        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            scores: Tensor = finish(super().forward(x, weights))
            return scores

    model, x, weights = Finished(), images(2), torch.tensor([1.0, 3.0])
    direct = DisentangledAttribution(InputXGradient(model), "net.features.4", subspaces(8), "shapley")
    bound = DisentangledAttribution(
        InputXGradient(lambda x: model(x, weights)), model.net.features[4], subspaces(8), "shapley"
    )
    torch.manual_seed(0)
    found = direct.attribute(x, target=target, additional_forward_args=weights)
    torch.manual_seed(0)
    assert_same(found, bound.attribute(x, target=target))


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
    ids=["integrated_gradients", "ablation", "deep_lift", "noise_tunnel"],
)
@pytest.mark.parametrize("target", [1, lambda output: output[:, 1]], ids=["index", "function"])
def test_the_whole_map_with_an_argument_that_is_the_same_for_all(method, options, target) -> None:
    """Captum repeats it with the inputs, so that the sum was that of several sets."""
    model, x, members = OverSet(), torch.rand(3, 6), torch.rand(7, 8)
    da = DisentangledAttribution(method(model), "act", subspaces(8), "gradient")
    explanation = da.explain(x, target, additional_forward_args=members, **options)
    if explanation.whole is not None:
        # Above the layer the network is linear, so that the maps add up to the whole.
        assert_same(explanation.maps.sum(1), explanation.whole)
    assert "forward" not in vars(model)


def test_contexts_of_a_layer_attributor_with_an_argument_that_is_the_same_for_all() -> None:
    model, x, members = OverSet(), torch.rand(3, 6), torch.rand(7, 8)

    def context(method: Any) -> Tensor:
        da = DisentangledAttribution(InputXGradient(model), "act", subspaces(8), method)
        a, c = da.context(x, 1, additional_forward_args=members)
        return torch.where(a != 0, c, 0)

    assert_same(context(LayerIntegratedGradients(model, model.act)), context("gradient"))


class Scaled(OverSet):
    """Activations times a number of each example; one row alone is rounded otherwise than several."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.act(self.below(x)) * scale[:, None]
        scores: Tensor = self.head(hidden) * (1 + 1e-6 * (len(hidden) == 1))
        return scores


@pytest.mark.parametrize("n", [1, 2, 5])
def test_equal_rows_of_additional_arguments_belong_to_the_examples(n: int) -> None:
    """If they were the same for all, an example alone would have n scores: the right one, n times."""
    model, x, ones = Scaled(), torch.rand(n, 6), torch.ones(n)
    da = DisentangledAttribution(
        IntegratedGradients(model), "act", subspaces(8), context_method="integrated_gradients"
    )
    maps = da.attribute(x, target=1, additional_forward_args=ones, n_steps=3)
    alone = da.attribute(x[:1], target=1, additional_forward_args=ones[:1], n_steps=3)
    assert_same(maps[:1], alone)


def test_additional_arguments_whose_first_and_last_rows_are_the_same() -> None:
    """Only the second example tells that its row is not its own: it would be scaled by 3."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            scores: Tensor = self.net(x) * scale[0]
            return scores

    model, x, scale = Scaled(), images(3), torch.tensor([1.0, 3.0, 1.0])
    direct = DisentangledAttribution(IntegratedGradients(model), "net.features.4", subspaces(8))
    bound = DisentangledAttribution(
        IntegratedGradients(lambda x: model(x, scale)), model.net.features[4], subspaces(8)
    )
    found = direct.attribute(x, target=1, additional_forward_args=scale)
    assert_same(found, bound.attribute(x, target=1))


def test_additional_arguments_of_inference_mode() -> None:
    da = DisentangledAttribution(IntegratedGradients(Weighted()), "net.features.4", subspaces(8))
    expected = da.attribute(images(2), target=1, additional_forward_args=torch.tensor([[1.0], [3.0]]))
    with torch.inference_mode():
        weights = torch.tensor([[1.0], [3.0]])
        assert_same(da.attribute(images(2), target=1, additional_forward_args=weights), expected)


def test_additional_arguments_with_a_batch_axis() -> None:
    model, x, weights = Weighted(), images(2), torch.tensor([[1.0], [3.0]])
    da = DisentangledAttribution(IntegratedGradients(model), "net.features.4", subspaces(8))
    maps = da.attribute(x, target=1, additional_forward_args=weights)
    for i in range(2):
        alone = da.attribute(x[i : i + 1], target=1, additional_forward_args=weights[i : i + 1])
        assert_same(maps[i : i + 1], alone)


def test_additional_arguments_that_mix_examples_are_named() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            scores: Tensor = self.net(x) * weights.mean() * len(x)
            return scores

    da = DisentangledAttribution(InputXGradient(Mixing()), "net.features.4", subspaces(8))
    with pytest.raises(ValueError, match=r"additional_forward_args \[0\].*2.*bind what is the same"):
        da.attribute(images(2), target=1, additional_forward_args=torch.tensor([1.0, 2.0]))
