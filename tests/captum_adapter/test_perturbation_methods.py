"""Shapley and other perturbation methods against exact enumeration, and against Captum output by output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import FeatureAblation, KernelShap, Lime, Occlusion, ShapleyValues, ShapleyValueSampling
from torch import Tensor

from captum_drsa import DisentangledAttribution, patch_mask
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.closeness import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:You are providing multiple inputs for Lime")


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


def test_feature_masks_of_fewer_axes_are_for_all_examples() -> None:
    """With as many examples as rows of pixels, the rows of a mask (H, W) were taken for examples."""
    model, x, mask = conv_net(), images(12), torch.arange(144).reshape(12, 12) // 36
    da = DisentangledAttribution(FeatureAblation(model), "features.4", subspaces(8), "gradient")
    found = da.attribute(x, target=1, feature_mask=mask)
    assert_same(found, da.attribute(x, target=1, feature_mask=mask[None, None]))


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
