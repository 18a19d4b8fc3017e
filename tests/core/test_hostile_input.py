"""Hostile input to the core's functions: right, or one clear error; NaN never passes unseen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import Pairs, plot
from drsa_core.evaluation import (
    bootstrap_interval,
    class_means,
    delta_aupc,
    explain_func,
    patch_flipping,
    patch_grid,
    patch_relevance,
    removal_counts,
    removal_ranks,
    summarise,
    top_images,
)
from study.clever_hans import (
    SpRAy,
    confusion_matrix,
    deep_feature_reweighting,
    poison,
    ranks,
    roc_curve,
    train_last_layer,
)
from study.manipulation import is_suspicious, manipulation_score, map_errors
from study.matching import match_concepts
from study.plots import confusion_matrices, relevance_scatter
from study.synthetic import PlantedConcepts
from torch import nn

NAN = torch.tensor([0.1, torch.nan])
VALUES, CLASSES = [1.0, 2.0, 3.0, 10.0], [4, 4, 4, 7]
MASKED: Any = np.ma.masked_array([0, 1, 0, 1], [False, True, False, False])


# ---------------------------------------------------------------------- labels of statistics


@pytest.mark.parametrize(
    "classes",
    [
        torch.tensor(CLASSES),
        torch.tensor(CLASSES, dtype=torch.uint8),
        np.array(CLASSES),
        [torch.tensor(label) for label in CLASSES],
        [np.int64(label) for label in CLASSES],
        [np.array(label) for label in CLASSES],
        tuple(CLASSES),
    ],
    ids=lambda classes: f"{type(classes).__name__} of {type(next(iter(classes))).__name__}",
)
def test_labels_of_every_kind_are_the_same_classes(classes) -> None:
    assert summarise(VALUES, classes) == summarise(VALUES, CLASSES)
    assert summarise(VALUES, classes).n_classes == 2
    assert class_means(torch.tensor(VALUES), classes) == {4: 2.0, 7: 10.0}
    assert delta_aupc(VALUES, [0.0, 0.0, 0.0, 9.0], classes) == {4: 2.0, 7: 1.0}
    assert bootstrap_interval(np.array(VALUES), classes) == bootstrap_interval(VALUES, CLASSES)
    figure = plot.flipping_curves([0.0, 1.0], {"x": torch.ones(4, 2)}, classes=classes)
    assert len(figure.axes[0].collections) == 1  # a band: more than one class


def test_a_series_of_pandas_is_read_by_its_values() -> None:
    series = pytest.importorskip("pandas").Series(CLASSES, index=[9, 8, 7, 6])
    assert class_means(VALUES, series) == {4: 2.0, 7: 10.0}


def test_strings_and_booleans_are_classes() -> None:
    assert class_means(VALUES, np.array(["cat", "cat", "cat", "dog"])) == {"cat": 2.0, "dog": 10.0}
    assert class_means(VALUES, torch.tensor([True, True, True, False])) == {True: 2.0, False: 10.0}


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        (torch.tensor([[4, 4], [4, 7]]), ValueError, r"one label for each instance, got \[4, 4\] at index 0"),
        (torch.tensor(4), ValueError, r"classes must have shape \(N,\), got 4"),
        (
            torch.tensor([4.0, math.nan, 4.0, 7.0]),
            ValueError,
            "got nan at index 1",
        ),
        ([4, 4, float("nan"), 7], ValueError, "got nan at index 2"),
        ([[4], [4], [4], [7]], ValueError, r"one label for each instance, got \[4\] at index 0"),
        (MASKED, TypeError, "classes must not be a masked array"),
        ([4, 4], ValueError, "one number for each of the 2 instances"),
        ([], ValueError, "one number for each of the 0 instances"),
    ],
)
def test_labels_that_are_none(classes, error: type[Exception], message: str) -> None:
    for function in (class_means, summarise, bootstrap_interval):
        with pytest.raises(error, match=message):
            function(VALUES, classes)


def test_scores_that_are_none() -> None:
    with pytest.raises(
        ValueError, match=r"disentangled must be one number for each of the 4 instances.*\(3,\)"
    ):
        delta_aupc(VALUES, VALUES[:3], CLASSES)
    with pytest.raises(ValueError, match="whole has 1 NaN or Inf"):
        delta_aupc([math.inf, *VALUES[1:]], VALUES, CLASSES)
    with pytest.raises(TypeError, match="values must not be a masked array"):
        summarise(np.ma.masked_array(VALUES, [True, False, False, False]), CLASSES)
    with pytest.raises(ValueError, match="level must be a finite number"):
        summarise(VALUES, CLASSES, level=math.nan)
    with pytest.raises(ValueError, match="random_state, if not None, must be an integer"):
        summarise(VALUES, CLASSES, random_state=1.5)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- NaN and wrong shapes


MAPS = torch.full((1, 2, 1, 4, 4), torch.nan)
REFUSED: dict[str, tuple[Any, str]] = {
    "is_suspicious(NaN)": (lambda: is_suspicious(NAN, torch.rand(9)), "scores has 1 NaN"),
    "is_suspicious(trusted NaN)": (lambda: is_suspicious(torch.rand(9), NAN), "trusted has 1 NaN"),
    "is_suspicious(0-d)": (lambda: is_suspicious(torch.tensor(0.1), torch.rand(9)), "shape"),
    "is_suspicious(columns)": (lambda: is_suspicious(torch.rand(9), torch.rand(9, 2)), "shape"),
    "ranks(NaN)": (lambda: ranks(NAN[None], 0), "outputs has 1 NaN"),
    "ranks(0.9)": (lambda: ranks(torch.rand(2, 3), 0.9), "target must be an integer"),  # type: ignore[arg-type]
    "removal_ranks(NaN)": (lambda: removal_ranks(NAN[None, None]), "relevance has 1 NaN"),
    "patch_relevance(NaN)": (lambda: patch_relevance(MAPS, patch_grid(4, 4, 2)), "NaN"),
    "patch_relevance(grid)": (
        lambda: patch_relevance(MAPS.nan_to_num(), patch_grid(6, 6, 2)),
        "grid must be",
    ),
    "removal_counts(0)": (lambda: removal_counts(0), "n_patches must be an integer of at least 1"),
    "removal_counts(floats)": (lambda: removal_counts(2, [1.5, 2.0]), "schedule"),  # type: ignore[list-item]
    "top_images(NaN)": (lambda: top_images(NAN[None]), "relevance has 1 NaN"),
    "manipulation_score(NaN)": (lambda: manipulation_score(MAPS), "maps has 32 NaN"),
    "match_concepts(NaN)": (
        lambda: match_concepts(NAN[:, None], torch.tensor([0, 1])),
        "relevance has 1 NaN",
    ),
    "match_concepts(float labels)": (lambda: match_concepts(torch.rand(2, 1), torch.rand(2)), "2 integers"),
    "poison(float labels)": (
        lambda: poison(torch.zeros(2, 1, 1, 1), torch.zeros(2), [torch.neg], 0.5, 0),
        "labels must be 2 integers",
    ),
    "poison(NaN)": (
        lambda: poison(NAN.view(2, 1, 1, 1), torch.tensor([0, 1]), [torch.neg], 0.5, 0),
        "images has 1 NaN",
    ),
    "train_last_layer(NaN)": (
        lambda: train_last_layer(NAN[:, None], torch.tensor([0, 1]), 2),
        "features has 1",
    ),
    "weight_decay NaN": (
        lambda: train_last_layer(torch.rand(2, 1), torch.tensor([0, 1]), 2, math.nan),
        "weight_decay must be a finite number",
    ),
    "roc_curve(NaN)": (lambda: roc_curve(NAN, torch.tensor([0, 1])), "scores has 1 NaN"),
    "scatter of 0.5": (
        lambda: relevance_scatter(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]), (0, 1, 0.5)),  # type: ignore[arg-type]
        "every entry of concepts",
    ),
    "confusion matrix of NaN": (
        lambda: confusion_matrices({"x": torch.full((2, 2), torch.nan)}),
        "the matrix 'x' has 4 NaN",
    ),
    "history of NaN": (
        lambda: plot.training_curves({"x": {"y": [1.0, math.nan]}}),
        "history of 'x', 'y' has 1",
    ),
    "gains of NaN": (lambda: plot.delta_aupc_bars({"x": {"y": math.nan}}), "gains of 'x' has 1 NaN"),
    "fill of NaN": (
        lambda: patch_flipping(
            lambda x: x.flatten(1),
            torch.rand(1, 1, 4, 4),
            torch.rand(1, 1, 4, 4),
            0,
            (0.0, 1.0),
            patch_size=2,
            fill=lambda image, mask, neutral: image * np.nan,
        ),
        "fill returned NaN or Inf for image 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: roc_curve(torch.rand(4), MASKED),
        lambda: confusion_matrix(MASKED, torch.zeros(4, dtype=torch.long), 2),
        lambda: match_concepts(torch.rand(4, 2), MASKED),
        lambda: train_last_layer(torch.rand(4, 2), MASKED, 2),
        lambda: poison(torch.rand(4, 1, 1, 1), MASKED, [torch.neg], 0.5, 0),
        lambda: patch_flipping(
            lambda x: x.flatten(1), torch.rand(4, 1, 4, 4), torch.rand(4, 1, 4, 4), MASKED, (0.0, 1.0)
        ),
    ],
)
def test_masked_arrays_are_refused(call) -> None:
    """torch would take the hidden values for real ones."""
    with pytest.raises(TypeError, match="must not be a masked array"):
        call()


@pytest.mark.parametrize("labels", [["cat", "dog"], [None, None], [[0], [0, 1]]], ids=str)
def test_labels_that_are_no_numbers(labels: Any) -> None:
    with pytest.raises(TypeError, match="labels must be 2 integers, one for each row of relevance"):
        match_concepts(torch.rand(2, 2), labels)


# ---------------------------------------------------------------------- numbers of NumPy, and 0-d ones


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int16])
def test_unsigned_numbers_of_images_and_classes(dtype: Any) -> None:
    numbers = np.array([0, 1, 1, 0], dtype=dtype)
    assert Pairs(torch.rand(4, 2), torch.rand(4, 2), numbers).image.tolist() == [0, 1, 1, 0]
    assert confusion_matrix(numbers, numbers, 2).tolist() == [[2, 0], [0, 2]]  # type: ignore[arg-type]
    assert match_concepts(torch.rand(4, 2), numbers).classes == (0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [np.int64, np.array, torch.tensor])
def test_integers_of_every_kind(whole) -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(8, 1, 8, 8, generator=generator), torch.arange(8) % 2
    marks: list[Any] = [torch.neg, torch.ones_like]
    for found, expected in zip(
        poison(images, labels, marks, 0.5, whole(0), random_state=whole(3)),
        poison(images, labels, marks, 0.5, 0, random_state=3),
        strict=True,
    ):
        assert torch.equal(found, expected)
    found_clusters = SpRAy(whole(2), whole(2), whole(3), whole(50), whole(0)).fit(images)
    assert torch.equal(found_clusters.centres_, SpRAy(2, 2, 3, 50, 0).fit(images).centres_)
    assert torch.equal(confusion_matrix(labels, labels, whole(2)), 4 * torch.eye(2, dtype=torch.long))
    assert ranks(torch.eye(3), whole(1)).tolist() == [2, 1, 2]
    assert summarise(VALUES, CLASSES, n_resamples=whole(10), random_state=whole(1)) == summarise(
        VALUES, CLASSES, n_resamples=10, random_state=1
    )
    assert removal_counts(whole(5)) == [0, 1, 5]
    assert patch_grid(whole(4), whole(4), whole(2)).max() == 3
    assert top_images(torch.eye(3), whole(1)).tolist() == [[0], [1], [2]]
    scenes = PlantedConcepts(size=whole(36)).sample(whole(2), generator, label=whole(1))
    assert scenes.labels.tolist() == [1, 1]
    layer = train_last_layer(torch.eye(2), torch.tensor([0, 1]), whole(2), max_iter=whole(50))
    assert layer.weight.shape == (2, 2)
    maps = explain_func(lambda model, x, y: torch.stack([x, 2 * x], 1), whole(1))(
        nn.Identity(), images, labels
    )
    np.testing.assert_array_equal(maps, 2 * images.numpy())


@pytest.mark.parametrize("real", [np.float32, np.float64, np.array, torch.tensor])
def test_numbers_of_every_kind(real) -> None:
    generator = torch.Generator().manual_seed(0)
    relevance, labels = torch.rand(8, 2, generator=generator), torch.arange(8) % 2
    found, expected = (match_concepts(relevance, labels, of(0.5), of(0.75)) for of in (real, float))
    assert torch.equal(found.class_quantiles, expected.class_quantiles)
    scores = torch.rand(20, generator=generator)
    assert torch.equal(is_suspicious(scores, scores, real(0.5)), is_suspicious(scores, scores, 0.5))
    assert is_suspicious(scores, scores, real(0.5)).sum() == 10
    assert summarise(VALUES, CLASSES, level=real(0.5)) == summarise(VALUES, CLASSES, level=0.5)
    layer, decay = deep_feature_reweighting(
        relevance, labels, relevance, labels, 2, weight_decays=[real(0.5), real(1.0)]
    )
    assert decay in (0.5, 1.0)
    assert torch.isfinite(layer.weight).all()
    images = torch.rand(4, 1, 2, 2, generator=generator)
    assert poison(images, labels[:4], [torch.neg], real(0.5), 0, 0)[1].sum() == 1
    assert PlantedConcepts(noise=real(0.5)).noise == 0.5


# ---------------------------------------------------------------------- maps of any scale


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e25])
def test_maps_of_any_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    maps, other = torch.randn(2, 3, 8, 8, generator=generator)
    expected = map_errors(maps, other, maps)
    found = map_errors(maps * scale, other * scale, maps * scale)
    # Correlations ignore the scale; 1e-6 is the rounding of maps · scale.
    torch.testing.assert_close(
        found.correlation_to_original, expected.correlation_to_original, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(found.correlation_to_target, torch.ones(3), rtol=0, atol=1e-6)
    spray = SpRAy(2, pool=2, random_state=0)
    torch.testing.assert_close(spray.features(maps * scale), spray.features(maps), rtol=0, atol=1e-6)
    pair = torch.stack([maps, other], 1)
    torch.testing.assert_close(manipulation_score(pair * scale), manipulation_score(pair), rtol=1e-5, atol=0)
    image = torch.rand(1, 8, 8, generator=generator)
    limits = [
        plot.concept_maps(image, drawn).axes[1].images[0].get_clim()[1]
        for drawn in (pair[0] * scale, pair[0])
    ]
    assert limits[0] / limits[1] == pytest.approx(scale, rel=1e-5, abs=0)


def test_errors_of_maps_keep_their_range() -> None:
    maps = torch.full((1, 2, 2), 1e-30)
    # 1e-60 has no place in float32: the errors are in float64.
    assert float(map_errors(maps, -maps, maps).to_original) == pytest.approx(4e-60, rel=1e-6, abs=0)
