"""Showcase 2: the class–concept table and prototypes (section 6.2, Eq. 13)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from study.matching import match_concepts
from torch import Tensor


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([7, 3, 5]).repeat(20)
    relevance = torch.randn(60, 4, generator=generator).abs()
    relevance[labels == 3, 0] += 5
    relevance[labels == 5, 0] += 5  # S1 is shared by two classes out of three
    relevance[labels == 7, 2] += 5
    return relevance, labels


def test_table_is_the_inequality_written_out() -> None:
    relevance, labels = example()
    for alpha, beta in ((0.75, 0.85), (0.5, 0.6)):
        table = match_concepts(relevance, labels, alpha, beta)
        assert table.classes == (3, 5, 7)
        for row, label in enumerate(table.classes):
            for k in range(4):
                left = np.quantile(relevance[labels == label, k].numpy(), alpha)
                right = np.quantile(relevance[:, k].numpy(), beta)
                assert bool(table.specific[row, k]) == (left > right)
                np.testing.assert_allclose(table.class_quantiles[row, k], left, rtol=1e-6)
                np.testing.assert_allclose(table.overall_quantiles[k], right, rtol=1e-6)


def test_planted_concepts_are_found() -> None:
    relevance, labels = example()
    table = match_concepts(relevance, labels, 0.5, 0.6)
    assert table.concepts_of(7) == [2]
    assert table.classes_of(0) == [3, 5]
    assert 0 in table.shared
    assert 2 not in table.shared
    lines = table.to_text(["dog", "cat", "fish"]).splitlines()
    assert lines[0].split() == ["S1", "S2", "S3", "S4"]
    assert lines[3].startswith("fish")
    assert "*" in lines[3]
    assert lines[4].startswith("Q0.6 of all")


def test_prototypes_are_max_min_over_the_concepts_of_the_class() -> None:
    relevance, labels = example()
    table = match_concepts(relevance, labels, 0.5, 0.6)
    found = table.prototypes(relevance, labels)
    for label in table.classes:
        concepts = table.concepts_of(label)
        if not concepts:
            assert label not in found
            continue
        candidates = [n for n in range(len(labels)) if int(labels[n]) == label]
        assert found[label] == max(candidates, key=lambda n: min(relevance[n, k] for k in concepts))


def test_a_class_without_concepts_has_no_prototype() -> None:
    relevance = torch.tensor([[1.0], [2.0], [0.0], [0.0]])
    table = match_concepts(relevance, torch.tensor([0, 0, 1, 1]), 0.5, 0.6)
    assert table.concepts_of(1) == []
    assert table.prototypes(relevance, torch.tensor([0, 0, 1, 1])) == {0: 1}


def test_mistakes_are_named() -> None:
    relevance, labels = example()
    with pytest.raises(ValueError, match="alpha < beta"):
        match_concepts(relevance, labels, 0.9, 0.8)
    with pytest.raises(ValueError, match="only class 3"):
        match_concepts(relevance[labels == 3], labels[labels == 3])
    with pytest.raises(ValueError, match=r"class 4 is not in the table; the classes are \(3, 5, 7\)"):
        match_concepts(relevance, labels).concepts_of(4)
