"""Gradient methods against literal transcriptions of Note B."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import (
    DeepLift,
    DeepLiftShap,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    LayerGradientXActivation,
    NoiseTunnel,
    Saliency,
)
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, GradientContext
from tests.captum_adapter.networks import TwoInputs, conv_net, images, subspaces

# DeepLift announces its hooks on every call.
pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:Input Tensor")


@pytest.mark.parametrize("baseline", [None, 0.3, "tensor", "one"])
def test_integrated_gradients_total_is_exact(baseline: object) -> None:
    """Σ_p R_pk = (φ(x) − φ(x̃))ᵀ U_kU_kᵀ c (Note B.3), for each k."""
    model, x, u = conv_net(), images(), subspaces(8)
    baselines: Any = {"tensor": images(seed=5), "one": images(1, seed=6)}.get(str(baseline), baseline)
    da = DisentangledAttribution(IntegratedGradients(model), "features.4", u)
    maps, delta = da.attribute(
        x, target=[1, 3], n_steps=200, baselines=baselines, return_convergence_delta=True
    )
    a, c = da.context(x, [1, 3])
    reference = torch.zeros_like(x) + (0 if baselines is None else baselines)
    difference = a - model.features(reference).detach()
    expected = torch.stack([(difference * u.project(c, k)).sum((1, 2, 3)) for k in range(3)], dim=1)
    total = maps.flatten(2).sum(2)
    torch.testing.assert_close(da.exact_totals(x, [1, 3], baselines), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(delta, total - expected, rtol=1e-3, atol=1e-6)
    # What is left is the error of 200 steps along a path with kinks.
    assert (total - expected).abs().max() <= 0.02 * expected.abs().max()


def test_delta_is_captums_for_one_concept_below_a_linear_head() -> None:
    """With one complete block and y linear in a, R̂ is y up to a constant: the deltas of Captum come back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, b = torch.randn(4, 6), torch.randn(4, 6)
    for method in (IntegratedGradients(model), DeepLift(model)):
        options: dict[str, Any] = {"n_steps": 3} if isinstance(method, IntegratedGradients) else {}
        _, expected = method.attribute(x, b, target=1, return_convergence_delta=True, **options)
        _, delta = DisentangledAttribution(method, "1", subspaces(8, 1)).attribute(
            x, baselines=b, target=1, return_convergence_delta=True, **options
        )
        torch.testing.assert_close(delta[:, 0], expected.to(delta), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (IntegratedGradients, {"n_steps": 4}),
        (IntegratedGradients, {"n_steps": 5, "internal_batch_size": 3, "baselines": 0.2}),
        (lambda m: IntegratedGradients(m, multiply_by_inputs=False), {"n_steps": 4}),
        (InputXGradient, {}),
        (Saliency, {}),
        (Saliency, {"abs": False}),
        (GradientShap, {"baselines": images(4, seed=7), "n_samples": 3, "stdevs": 0.1}),
        (GradientShap, {"baselines": lambda x: x[:1] * 0.1, "n_samples": 2}),
        (DeepLift, {}),
        (DeepLift, {"baselines": images(2, seed=8)}),
        (DeepLiftShap, {"baselines": images(3, seed=8)}),
        (lambda m: NoiseTunnel(InputXGradient(m)), {"nt_samples": 3, "stdevs": 0.2}),
        (
            lambda m: NoiseTunnel(IntegratedGradients(m)),
            {"nt_samples": 2, "n_steps": 3, "nt_type": "vargrad"},
        ),
        (lambda m: NoiseTunnel(Saliency(m)), {"nt_samples": 4, "nt_samples_batch_size": 3}),
        (lambda m: NoiseTunnel(DeepLift(m)), {"nt_samples": 2}),
    ],
)
def test_joint_maps_are_captums_maps_of_the_relevance_model(build, options) -> None:
    """K maps from one forward pass are what Captum gives for each R̂_k written out as a network of its own."""

    class Explained(nn.Module):
        def __init__(self, features: nn.Module, readout: torch.Tensor) -> None:
            super().__init__()
            self.features, self.readout = features, readout  # readout (N, D, H, W) = U_kU_kᵀc

        def forward(self, x: torch.Tensor, row: torch.Tensor):
            return (self.features(x) * self.readout[row]).sum((1, 2, 3))

    def seeded(run):
        import numpy as np

        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  GradientShap draws from it
        return run().detach()

    model, x, u = conv_net(), images(), subspaces(8)
    da = DisentangledAttribution(build(model), "features.4", u)
    _, c = da.context(x, [0, 4])
    maps = seeded(lambda: da.attribute(x, target=[0, 4], **options))
    assert maps.shape == (2, 3, 3, 12, 12)
    for k in range(3):
        method = build(Explained(model.features, u.project(c, k)))
        expected = seeded(
            lambda m=method: m.attribute(x, additional_forward_args=(torch.arange(2),), **options)
        )
        assert (maps[:, k] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_deep_lift_notices_a_module_that_runs_twice() -> None:
    """As without the wrapper: its rule needs one input and one output of each module."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.relu, self.head = (
                nn.Linear(4, 6),
                nn.Linear(6, 6),
                nn.ReLU(),
                nn.Linear(6, 2),
            )

        def forward(self, x: torch.Tensor):
            return self.head(self.two(self.relu(self.one(self.relu(x)))))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(2, 4)
    for method in (DeepLift(model), DisentangledAttribution(DeepLift(model), "two", subspaces(6))):
        with pytest.raises(RuntimeError, match="used more than once"):
            method.attribute(x, target=1)


def test_noise_tunnel_around_the_split_attributor() -> None:
    """Every noisy sample gets its own context; the maps are averaged, delta is (N · samples, K)."""
    model, x, u = conv_net(), images(), subspaces(8)
    da = DisentangledAttribution(IntegratedGradients(model), "features.4", u)
    tunnel = NoiseTunnel(da)
    torch.manual_seed(0)
    maps, delta = tunnel.attribute(
        x, target=1, nt_samples=2, stdevs=0.1, n_steps=4, return_convergence_delta=True
    )
    torch.manual_seed(0)
    noisy = x.repeat_interleave(2, dim=0) + torch.normal(0, torch.tensor(0.1).repeat(4, 3, 12, 12))
    by_hand, delta_by_hand = da.attribute(noisy, target=1, n_steps=4, return_convergence_delta=True)
    torch.testing.assert_close(maps, by_hand.unflatten(0, (2, 2)).mean(1))
    torch.testing.assert_close(delta, delta_by_hand)


@pytest.mark.parametrize(
    ("method", "context", "options", "below"),
    [
        (InputXGradient, None, {}, 1),
        (Saliency, "gradient", {}, 1),
        (InputXGradient, LayerGradientXActivation, {}, 3),  # a and what goes around, its relevance, step 2
        (GradientShap, None, {"baselines": images(1) * 0}, 2),
    ],
)
@pytest.mark.parametrize("n_subspaces", [1, 4])
def test_one_forward_pass_for_all_concepts(
    method, context, options: dict[str, Any], below: int, n_subspaces: int
) -> None:
    """Passes do not grow with K; methods that look at the input alone share the one of step 1."""
    model = conv_net()
    choice = context(model, model.features[4]) if callable(context) else context
    da = DisentangledAttribution(method(model), "features.4", subspaces(8, n_subspaces), choice)
    runs = {"below": 0, "above": 0}
    model.features[0].register_forward_hook(lambda *_: runs.update(below=runs["below"] + 1))
    model.classifier.register_forward_hook(lambda *_: runs.update(above=runs["above"] + 1))
    da.attribute(images(), target=1, **options)
    assert runs == {"below": below, "above": 2 if below == 3 else 1}


@pytest.mark.parametrize("method", [InputXGradient, Saliency])
def test_one_pass_gives_what_two_steps_give(method) -> None:
    """The shared forward pass changes nothing, for tuples of inputs and further arguments too."""
    torch.manual_seed(0)
    model = TwoInputs().double().eval()
    inputs = (torch.randn(3, 4).double(), torch.randn(3, 3).double())
    u, step_1 = subspaces(6, dtype=torch.float64), GradientContext()
    one = DisentangledAttribution(method(model), "layer", u)
    two = DisentangledAttribution(method(model), "layer", u, context_method=lambda request: step_1(request))
    options: dict[str, Any] = {
        "target": [0, 2, 1],
        "additional_forward_args": (torch.tensor([1.0, -2.0, 0.5]).double(), 2),
    }
    for got, expected in zip(one.attribute(inputs, **options), two.attribute(inputs, **options), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


class Product(nn.Module):
    """The activation depends on which baselines of the two inputs come together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(3, 6)
        self.layer, self.out = nn.Tanh(), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, y: Tensor):
        return self.out(self.layer(self.one(x) * self.two(y)))


@pytest.mark.parametrize(("n_first", "n_second"), [(3, 3), (1, 3), (3, 1), (2, None)])
def test_exact_totals_of_distributions_for_several_inputs(n_first: int, n_second: int | None) -> None:
    """GradientShap draws the baselines of each input by themselves: the mean is over all combinations."""
    model = Product().eval()
    first, second = torch.randn(3, 4).double(), torch.randn(3, 3).double()
    baselines = (first[:n_first], 0.5 if n_second is None else second[:n_second])
    u = subspaces(6, dtype=torch.float64)
    da = DisentangledAttribution(GradientShap(model), "layer", u)
    inputs = (first.flip(0) + 0.1, second - 0.2)
    a, c = da.context(inputs, 1)
    totals = []
    for one in first[:n_first]:
        for two in torch.full((1, 3), 0.5).double() if n_second is None else second[:n_second]:
            with torch.no_grad():
                at_baseline = model.layer(model.one(one) * model.two(two))
            totals.append(u.relevance(a - at_baseline, c))
    expected = torch.stack(totals).mean(0)
    torch.testing.assert_close(da.exact_totals(inputs, 1, baselines=baselines), expected)
    np.random.seed(0)  # noqa: NPY002 - Captum draws from the global generator
    _, delta = da.attribute(
        inputs, target=1, baselines=baselines, n_samples=5000, return_convergence_delta=True
    )
    # The mean of 5000 draws; with (1, 3) baselines the delta was as large as the total.
    assert float(delta.abs().max()) < 0.05 * float(expected.abs().max())
