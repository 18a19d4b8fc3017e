"""Shapley and other perturbation methods against exact enumeration, and against Captum output by output."""

from __future__ import annotations

import math
import warnings
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import FeatureAblation, KernelShap, Lime, Occlusion, ShapleyValues, ShapleyValueSampling
from torch import Tensor

from captum_drsa import DisentangledAttribution, ShapleyContext, patch_mask
from tests.captum_adapter.networks import Mlp, conv_net, images, subspaces

pytestmark = pytest.mark.filterwarnings("ignore:You are providing multiple inputs for Lime")


def shapley(value, n_players: int) -> list[Tensor]:
    """Shapley values by Eq. (Note A): Σ_S |S|! (d−1−|S|)! / d! · [v(S ∪ i) − v(S)]."""
    values = []
    for i in range(n_players):
        others = [j for j in range(n_players) if j != i]
        total: Tensor = value(()) * 0
        for size in range(n_players):
            weight = math.factorial(size) * math.factorial(n_players - 1 - size) / math.factorial(n_players)
            for coalition in combinations(others, size):
                total = total + weight * (value((*coalition, i)) - value(coalition))
        values.append(total)
    return values


def only(x: Tensor, players: tuple[int, ...]) -> Tensor:
    kept = torch.zeros_like(x)
    kept[list(players)] = x[list(players)]
    return kept


@pytest.fixture
def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp(n_inputs=6, n_features=5).eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def exact(mlp: Mlp, x: Tensor, target: int) -> tuple[Tensor, Tensor]:
    """Context and K maps of Note B for one example, by enumeration of 5 features and of 6 inputs."""
    u = subspaces(5, 2, torch.float64)
    with torch.no_grad():
        a = mlp.phi(x)
        relevance = torch.stack(shapley(lambda s: mlp.g(only(a, s))[target], 5))
        c = torch.where(a != 0, relevance / torch.where(a != 0, a, 1), 0)
        maps = torch.stack(
            [
                torch.stack(shapley(lambda s, b=block: (b.T @ mlp.phi(only(x, s))) @ (b.T @ c), 6))
                for block in u.blocks
            ]
        )
    return c, maps


def test_shapley_values_are_the_enumerated_ones(mlp: Mlp, x: Tensor) -> None:
    u = subspaces(5, 2, torch.float64)

    def enumerated(request):
        contexts = torch.stack([exact(mlp, row, 1)[0] for row in x])
        return mlp.phi(x).detach(), contexts

    da = DisentangledAttribution(ShapleyValues(mlp), "lower", u, context_method=enumerated)
    maps = da.attribute(x, target=1)
    expected = torch.stack([exact(mlp, row, 1)[1] for row in x])
    # Captum adds up Shapley values in float32.
    torch.testing.assert_close(maps.double(), expected, rtol=1e-5, atol=1e-6)


def test_sampled_context_and_maps_reach_the_enumerated_ones(mlp: Mlp, x: Tensor) -> None:
    torch.manual_seed(0)
    u = subspaces(5, 2, torch.float64)
    context = ShapleyContext(n_samples=2000, perturbations_per_eval=50)
    da = DisentangledAttribution(ShapleyValueSampling(mlp), "lower", u, context_method=context)
    _, c = da.context(x, 1)
    expected_c = torch.stack([exact(mlp, row, 1)[0] for row in x])
    # 2000 permutations: a standard error of about 2 % of the spread of one contribution.
    assert (c - expected_c).abs().max() <= 0.05 * expected_c.abs().max()
    maps = da.attribute(x, target=1, n_samples=2000, perturbations_per_eval=50).double()
    expected = torch.stack([exact(mlp, row, 1)[1] for row in x])
    assert (maps - expected).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize("method", [ShapleyValueSampling, ShapleyValues])
def test_totals_are_exact_for_every_sample(method, mlp: Mlp, x: Tensor) -> None:
    """Each permutation conserves by itself, so Note B.3 holds to rounding, not only in the mean."""
    u = subspaces(5, 2, torch.float64)
    da = DisentangledAttribution(method(mlp), "lower", u, context_method="gradient")
    options: dict[str, Any] = {"n_samples": 2} if method is ShapleyValueSampling else {}
    maps = da.attribute(x, target=1, baselines=0.5, **options)
    torch.testing.assert_close(
        maps.sum(2).double(), da.exact_totals(x, 1, baselines=0.5), rtol=1e-5, atol=1e-6
    )


def test_context_of_feature_maps() -> None:
    """c_j = R_j / Σ a_j at every position of map j, 0 for a dead map (Note B.2)."""
    model, x = conv_net(), images(1)
    with torch.no_grad():
        model.get_parameter("features.3.weight")[2] = 0
        model.get_parameter("features.3.bias")[2] = -1  # map 2 is dead
    da = DisentangledAttribution(
        ShapleyValueSampling(model), "features.4", subspaces(8), ShapleyContext(n_samples=2)
    )
    a, c = da.context(x, 3)
    assert torch.equal(c, c[:, :, :1, :1].expand_as(c))
    assert not c[:, 2].any()
    # The Shapley values of the maps add up to y(a) − y(0) for any number of permutations.
    with torch.no_grad():
        at_a, at_0 = (model.classifier(model.top(t).flatten(1))[0, 3] for t in (a.clone(), a * 0))
    torch.testing.assert_close((a * c).sum(), at_a - at_0, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("layout", "dim"), [("maps", 1), ("tokens", -1), ("tokens", 2)])
def test_context_is_the_mean_over_the_permutations(layout: str, dim: int) -> None:
    """R_j is what map j adds to y when it joins those before it; the permutations are Captum's own draws."""
    torch.manual_seed(0)
    upper = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5 * 6, 9), torch.nn.Softplus())
    model = torch.nn.Sequential(torch.nn.ReLU(), *upper, torch.nn.Linear(9, 3))
    x = torch.rand(1, 5, 2, 3) + 0.1 if layout == "maps" else torch.rand(1, 6, 5) + 0.1
    da = DisentangledAttribution(
        ShapleyValueSampling(model), "0", subspaces(5), ShapleyContext(n_samples=4), channel_dim=dim
    )
    torch.manual_seed(7)
    a, c = da.context(x, 2)
    torch.manual_seed(7)
    maps, relevance = x.movedim(dim, 0), torch.zeros(5)
    for _ in range(4):
        coalition = torch.zeros_like(maps)
        for j in torch.randperm(5).tolist():
            with torch.no_grad():
                before = model(coalition.movedim(0, dim))[0, 2]
                coalition[j] = maps[j]
                relevance[j] += (model(coalition.movedim(0, dim))[0, 2] - before) / 4
    expected = relevance / maps.flatten(1).sum(1)
    assert torch.equal(a, x)
    torch.testing.assert_close(
        c.movedim(dim, 0).flatten(1), expected[:, None].expand(5, 6), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("per_run", "below"), [(None, 3 + 4), (4, 6 + 4)])
def test_lower_part_is_shared_in_step_1(per_run: int | None, below: int) -> None:
    """3 permutations of 8 maps: by default 3 runs of the upper part, or 6 runs of 4.

    Four more measure what goes around the layer, find a, try
    whether the lower part can be shared (with 3 activations), and score the empty set.
    """
    model = conv_net()
    rows = {"below": 0, "above": 0}
    model.features[0].register_forward_hook(lambda _, __, y: rows.update(below=rows["below"] + len(y)))
    model.classifier.register_forward_hook(lambda _, __, y: rows.update(above=rows["above"] + len(y)))
    context = ShapleyContext(n_samples=3, perturbations_per_eval=per_run)
    DisentangledAttribution(ShapleyValueSampling(model), "features.4", None, context).context(images(1), 1)
    assert rows == {"below": below, "above": 3 * 8 + 1 + 1 + 3 + 1}


def test_contexts_of_maps_that_cancel_are_warned_about() -> None:
    """R_j / Σ a_j explodes where Σ a_j is near zero though a_j is not: layers before the ReLU."""
    model, x = conv_net(), images(1)
    method, context = ShapleyValueSampling(model), ShapleyContext(n_samples=2)

    def centre(module: object, args: object, output: Tensor) -> Tensor:
        return output - output.mean((2, 3), keepdim=True) + 1e-4

    handle = model.get_submodule("features.3").register_forward_hook(centre)
    with pytest.warns(UserWarning, match=r"100% of the relevance at layer 'features.3'"):
        DisentangledAttribution(method, "features.3", subspaces(8), context).context(x, 3)
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DisentangledAttribution(method, "features.4", subspaces(8), context).context(x, 3)


MASK = patch_mask(images(), 4)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (ShapleyValueSampling, {"n_samples": 2, "feature_mask": MASK}),
        (ShapleyValueSampling, {"n_samples": 2, "feature_mask": MASK, "perturbations_per_eval": 4}),
        (ShapleyValueSampling, {"n_samples": 1, "feature_mask": MASK, "baselines": images(2, seed=4)}),
        (ShapleyValues, {"feature_mask": patch_mask(images(), 6)}),
        (FeatureAblation, {"feature_mask": MASK}),
        (FeatureAblation, {"feature_mask": MASK, "perturbations_per_eval": 3, "baselines": 0.1}),
        (Occlusion, {"sliding_window_shapes": (3, 4, 4), "strides": (3, 2, 2)}),
        (Occlusion, {"sliding_window_shapes": (3, 4, 4), "strides": 4, "perturbations_per_eval": 2}),
        (KernelShap, {"n_samples": 12, "feature_mask": MASK, "perturbations_per_eval": 5}),
        (Lime, {"n_samples": 12, "feature_mask": MASK}),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_joint_maps_are_captums_maps_of_each_concept(method, options, n: int) -> None:
    """All K from one run are what Captum gives for each R̂_k alone, with the same random numbers."""
    if method in (KernelShap, Lime):
        pytest.importorskip("sklearn")
    if n == 1 and isinstance(options.get("baselines"), Tensor):
        options = {**options, "baselines": options["baselines"][:1]}
    model, x, u = conv_net(), images(n), subspaces(8)
    da = DisentangledAttribution(method(model), "features.4", u, context_method="gradient")
    _, c = da.context(x, 2)
    c = c * 1000  # Lime's Lasso sets small coefficients to 0
    da = DisentangledAttribution(
        method(model), "features.4", u, context_method=lambda r: (r.activation().detach(), c)
    )
    torch.manual_seed(0)
    maps = da.attribute(x, target=2, **options)
    after = torch.get_rng_state()
    assert maps.shape == (n, 3, 3, 12, 12)
    assert maps.any()
    for k in range(3):
        readout = u.project(c, k)
        torch.manual_seed(0)
        single = method(lambda x, row, r=readout: (model.features(x) * r[row]).sum((1, 2, 3)))
        with torch.no_grad():
            expected = single.attribute(x, additional_forward_args=(torch.arange(n),), **options)
        # KernelShap solves a system with weights of 1e6: single precision leaves about 1e-3.
        tolerance = 2e-3 if method is KernelShap else 1e-4
        assert (maps[:, k] - expected).abs().max() <= tolerance * expected.abs().max()
    # The random numbers used are those of one run, not of K.
    assert torch.equal(after, torch.get_rng_state())


def test_perturbations_that_draw_from_elsewhere() -> None:
    """Lime with a NumPy generator: each concept meets perturbations of its own, and is fitted to those."""
    pytest.importorskip("sklearn")
    model, x, u = conv_net(), images(1), subspaces(8)
    c = 1000 * torch.rand(1, 8, 6, 6, generator=torch.Generator().manual_seed(3))

    def lime(forward, generator: np.random.Generator) -> Lime:
        def perturb(original: Tensor, **kwargs: Any) -> Tensor:
            return torch.tensor(generator.integers(0, 2, (1, kwargs["num_interp_features"])))

        return Lime(forward, perturb_func=perturb)

    da = DisentangledAttribution(
        lime(model, np.random.default_rng(0)),
        "features.4",
        u,
        context_method=lambda request: (request.activation().detach(), c),
    )
    maps = da.attribute(x, target=2, feature_mask=MASK, n_samples=12)
    generator = np.random.default_rng(0)  # runs on from concept to concept
    for k in range(3):
        readout = u.project(c, k)
        single = lime(lambda x, r=readout: (model.features(x) * r).sum((1, 2, 3)), generator)
        with torch.no_grad():
            expected = single.attribute(x, feature_mask=MASK, n_samples=12)
        assert expected.any()
        assert (maps[:, k] - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("method", [ShapleyValueSampling, FeatureAblation, KernelShap])
def test_number_of_forward_passes_does_not_depend_on_k(method) -> None:
    if method is KernelShap:
        pytest.importorskip("sklearn")
    model, x = conv_net(), images(1)
    counts = []
    for n_subspaces in (1, 4):
        u = subspaces(8, n_subspaces)
        da = DisentangledAttribution(method(model), "features.4", u, context_method="gradient")
        runs = {"below": 0, "above": 0}
        handles = [
            model.features[0].register_forward_hook(lambda *_, r=runs: r.update(below=r["below"] + 1)),
            model.classifier.register_forward_hook(lambda *_, r=runs: r.update(above=r["above"] + 1)),
        ]
        options: dict[str, Any] = {} if method is FeatureAblation else {"n_samples": 3}
        da.attribute(x, target=1, feature_mask=MASK, **options)
        for handle in handles:
            handle.remove()
        assert runs["above"] == 1  # step 1
        counts.append(runs["below"])
    assert counts[0] == counts[1] > 3


def test_integer_inputs_of_perturbation_methods() -> None:
    """Token numbers can be ablated; only gradients need floating-point inputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 4),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 6),
        torch.nn.ReLU(),
        torch.nn.Linear(6, 2),
    )
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    da = DisentangledAttribution(FeatureAblation(model), "3", subspaces(6))
    assert da.attribute(tokens, target=1).shape == (2, 3, 3)
