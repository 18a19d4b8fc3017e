"""Showcase 1: scores, ROC, SpRAy, reweighting, poisoning (section 6.1, Note J.1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from study.clever_hans import (
    SpRAy,
    auroc,
    confusion_matrix,
    deep_feature_reweighting,
    poison,
    ranks,
    rectified_relevance,
    roc_curve,
    train_last_layer,
)
from torch import Tensor, nn

metrics = pytest.importorskip("sklearn.metrics")
linear_model = pytest.importorskip("sklearn.linear_model")
cluster = pytest.importorskip("sklearn.cluster")


# ---------------------------------------------------------------------- detection


def test_pixels_are_rectified_after_their_channels_are_summed() -> None:
    maps = torch.zeros(1, 2, 3, 1, 2)
    maps[0, 0, :, 0, 0] = torch.tensor([3.0, -1.0, 0.5])  # a pixel of relevance 2.5
    maps[0, 0, :, 0, 1] = torch.tensor([1.0, -4.0, 0.0])  # and one of −3
    maps[0, 1, 0, 0, 0] = -1.0
    torch.testing.assert_close(rectified_relevance(maps), torch.tensor([[2.5, 0.0]]))
    torch.testing.assert_close(rectified_relevance(maps.sum(2)), torch.tensor([[2.5, 0.0]]))
    totals = torch.tensor([[2.0, -3.0]])
    torch.testing.assert_close(rectified_relevance(totals), torch.tensor([[2.0, 0.0]]))
    with pytest.raises(ValueError, match=r"\(N, K\), \(N, K, H, W\) or .* got \(2,\)"):
        rectified_relevance(torch.zeros(2))
    with pytest.raises(ValueError, match="1 NaN or Inf"):
        rectified_relevance(torch.tensor([[torch.nan]]))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_roc_agrees_with_scikit_learn_and_with_counting_pairs(seed: int, ties: bool) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, 60)
    labels[:2] = 0, 1
    scores = generator.normal(size=60) + labels
    scores = np.round(scores) if ties else scores
    curve = roc_curve(scores, labels)
    false_positive, true_positive, thresholds = metrics.roc_curve(labels, scores, drop_intermediate=False)
    # Counts divided by counts in float64: equal up to rounding of one division.
    np.testing.assert_allclose(curve.false_positive_rate, false_positive, rtol=0, atol=1e-15)
    np.testing.assert_allclose(curve.true_positive_rate, true_positive, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    np.testing.assert_allclose(curve.auroc, metrics.roc_auc_score(labels, scores), rtol=0, atol=1e-14)
    wins = [
        (p > n) + 0.5 * (p == n) for p in scores[labels == 1] for n in scores[labels == 0]
    ]  # the chance that a positive outscores a negative
    np.testing.assert_allclose(auroc(scores, labels), np.mean(wins), rtol=0, atol=1e-14)
    np.testing.assert_allclose(auroc(-scores, labels), 1 - np.mean(wins), rtol=0, atol=1e-14)


def test_roc_by_hand_and_bad_input() -> None:
    curve = roc_curve(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([True, False, True, False]))
    assert curve.false_positive_rate.tolist() == [0.0, 0.0, 0.5, 1.0]
    assert curve.true_positive_rate.tolist() == [0.0, 0.5, 1.0, 1.0]
    assert curve.auroc == 0.875  # of four pairs three are won and one is a tie
    with pytest.raises(ValueError, match="2 positives and 0 negatives"):
        auroc(torch.rand(2), torch.ones(2))
    with pytest.raises(ValueError, match="take one column"):
        auroc(torch.rand(4, 2), torch.ones(4))
    with pytest.raises(ValueError, match="bool, or 0 and 1"):
        auroc(torch.rand(2), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="NaN"):
        auroc(torch.tensor([0.0, torch.nan]), torch.tensor([0, 1]))


def blobs(n_images: int, seed: int) -> Tensor:
    """Maps with relevance in one of two corners, in noise."""
    generator = torch.Generator().manual_seed(seed)
    maps = 0.1 * torch.randn(n_images, 3, 16, 16, generator=generator)
    maps[::2, :, :8, :8] += 1
    maps[1::2, :, 8:, 8:] += 1
    return maps


def test_spray_features_are_pooled_rectified_and_normalised() -> None:
    maps = torch.zeros(2, 1, 4, 4)
    maps[0, 0, :2, :2] = torch.tensor([[1.0, 2.0], [-1.0, 1.0]])  # sum 3
    maps[0, 0, 2:, 2:] = 1.0  # sum 4
    maps[0, 0, :2, 2:] = -5.0
    features = SpRAy(pool=2).features(maps)
    torch.testing.assert_close(features[0], torch.tensor([0.6, 0.0, 0.0, 0.8]).double())
    assert not features[1].any()  # no relevance, and no NaN


def test_spray_sees_the_edge_of_maps_that_its_squares_do_not_divide() -> None:
    maps = torch.zeros(1, 5, 5)
    maps[0, :, 4] = 3.0  # squares of 2 × 1, 2 × 1 and 1 × 1 pixels: sums 6, 6, 3
    maps[0, 4, 0] = 6.0
    expected = torch.tensor([0, 0, 6, 0, 0, 6, 6, 0, 3]).double()
    torch.testing.assert_close(SpRAy(pool=2).features(maps)[0], expected / expected.norm())


def test_spray_finds_the_clusters_that_scikit_learn_finds() -> None:
    maps = blobs(30, 0)
    spray = SpRAy(2, pool=4, random_state=0).fit(maps)
    assert auroc(spray.labels_.double(), torch.arange(30) % 2) in (0.0, 1.0)
    reference = cluster.KMeans(2, n_init=5, random_state=0).fit(spray.features(maps).numpy())
    # Both end in the same partition, whose inertia is a sum of 30 squares.
    np.testing.assert_allclose(spray.inertia_, reference.inertia_, rtol=1e-10)
    order = [int(i) for i in reference.predict(spray.centres_.numpy())]
    held_out = blobs(8, 1)
    expected = reference.transform(spray.features(held_out).numpy())[:, order]
    np.testing.assert_allclose(spray.distances(held_out), expected, rtol=0, atol=1e-10)


def test_spray_labels_are_those_of_its_centres() -> None:
    maps = torch.randn(40, 16, 16, generator=torch.Generator().manual_seed(0))
    for max_iter in (1, 2, 3):  # too few to converge
        spray = SpRAy(3, pool=4, max_iter=max_iter, random_state=0).fit(maps)
        nearest, labels = spray.distances(maps).min(1)
        assert torch.equal(spray.labels_, labels)
        assert spray.inertia_ == pytest.approx(float(nearest.square().sum()))


# ---------------------------------------------------------------------- reweighting, poisoning, measures


def labelled(n_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n_samples,), generator=generator)
    features = torch.randn(n_samples, 4, generator=generator)
    features[torch.arange(n_samples), labels] += 1
    return features, labels


@pytest.mark.parametrize("decay", [0.1, 10.0])
def test_last_layer_is_the_minimum_that_scikit_learn_finds(decay: float) -> None:
    features, labels = labelled(80, 0)
    state = torch.get_rng_state()
    layer = train_last_layer(features, labels, 3, decay)
    assert torch.equal(state, torch.get_rng_state())
    reference = linear_model.LogisticRegression(C=1 / decay, tol=1e-10, max_iter=10_000)
    reference.fit(features.double().numpy(), labels.numpy())
    # The minimum is flat along biases + constant, where scikit-learn's start at 0 stays as ours does.
    np.testing.assert_allclose(layer.weight.detach(), reference.coef_, atol=2e-4)
    bias = reference.intercept_ - reference.intercept_.mean()
    np.testing.assert_allclose(layer.bias.detach() - layer.bias.detach().mean(), bias, atol=2e-4)
    # The gradient of the stated loss vanishes.
    layer = layer.double()
    loss = nn.functional.cross_entropy(layer(features.double()), labels, reduction="sum")
    (loss + decay / 2 * layer.weight.square().sum()).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().max() < 1e-3


def test_weight_decay_is_chosen_on_held_out_data() -> None:
    features, labels = labelled(60, 1)
    held_out, truth = labelled(60, 2)
    layer, decay = deep_feature_reweighting(features, labels, held_out, truth, 3, [1.0, 1e4, 10.0])
    accuracies = {}
    for candidate in (1.0, 10.0, 1e4):
        trained = train_last_layer(features, labels, 3, candidate)
        accuracies[candidate] = float((trained(held_out).argmax(1) == truth).float().mean())
    assert accuracies[decay] == max(accuracies.values())
    assert decay == max(d for d, value in accuracies.items() if value == accuracies[decay])
    assert torch.equal(layer.weight, train_last_layer(features, labels, 3, decay).weight)
    with pytest.raises(ValueError, match="between 0 and n_classes − 1 = 1, got 0 … 2"):
        train_last_layer(features, labels, 2)
    with pytest.raises(ValueError, match="60 integers"):
        train_last_layer(features, labels[:3], 3)
    with pytest.raises(ValueError, match="at least one number"):
        deep_feature_reweighting(features, labels, held_out, truth, 3, [])


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_poison_marks_the_asked_share_of_other_classes(rate: float, expected: int) -> None:
    data, labels = torch.zeros(12, 1, 2, 2), torch.tensor([0, 1, 2] * 4)
    marks = [lambda image: image + 1, lambda image: image + 2]
    images, poisoned = poison(data, labels, marks, rate, spare=0, random_state=0)
    assert int(poisoned.sum()) == expected
    assert not poisoned[labels == 0].any()
    assert not data.any()  # the user's images stay
    assert torch.equal(images.amax((1, 2, 3)) > 0, poisoned)
    again, _ = poison(data, labels, marks, rate, spare=0, random_state=0)
    assert torch.equal(images, again)
    if rate == 1:
        assert set(images[poisoned].flatten().tolist()) == {1.0, 2.0}


def test_poison_confusion_and_ranks_name_mistakes_and_count_right() -> None:
    with pytest.raises(ValueError, match=r"25 % is 0\.25"):
        poison(torch.zeros(2, 1, 1, 1), torch.zeros(2, dtype=torch.long), [torch.neg], 25, 0)
    with pytest.raises(ValueError, match="at least one function"):
        poison(torch.zeros(2, 1, 1, 1), torch.zeros(2, dtype=torch.long), [], 0.5, 0)
    labels, predicted = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 1, 1])
    matrix = confusion_matrix(labels, predicted, 3)
    assert matrix.tolist() == metrics.confusion_matrix(labels, predicted).tolist()
    assert matrix.tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]
    with pytest.raises(ValueError, match="predicted must be integers between 0 and n_classes − 1 = 1"):
        confusion_matrix(torch.tensor([0]), torch.tensor([2]), 2)
    outputs = torch.tensor([[0.0, 3.0, 2.0], [5.0, 1.0, 5.0]])
    assert ranks(outputs, 2).tolist() == [2, 1]
    assert ranks(outputs, 0).tolist() == [3, 1]
    with pytest.raises(ValueError, match="more than target = 3"):
        ranks(outputs, 3)
