"""`NFNetGamma` against a literal transcription of Note K, on every family."""

from __future__ import annotations

import pytest
import torch

from .note_k import NoteK
from .zoo import HIGH, LOW, NFNETS, explain, image, nfnet, perturb

from zennit_drsa import NFNetGamma  # isort: skip


@pytest.mark.parametrize("name", NFNETS)
def test_agrees_with_a_literal_transcription(name):
    model = nfnet(name).double()
    x = image(48, n=2).double()
    expected_logits, expected = NoteK(model, LOW, HIGH, gamma=0.1)(x, target=3)
    logits, relevance = explain(model, NFNetGamma(LOW, HIGH, 0.1), x)
    # Float64, and sums in another order: what is left is rounding.
    assert (logits - expected_logits).abs().max() <= 1e-10 * expected_logits.abs().max()
    assert (relevance - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert expected.abs().max() > 1e-6


@pytest.mark.parametrize("gamma", [0, 0.01, 1.0])
@pytest.mark.parametrize("threshold", [1e-3, 0.1])
def test_agrees_for_other_gammas_and_where_many_denominators_drop_out(gamma, threshold):
    model = nfnet("dm_nfnet_f0").double()
    perturb(model, seed=3, negative_gains=True)
    x = image(40, seed=5).double()
    _, expected = NoteK(model, LOW, HIGH, gamma, threshold)(x, target=1)
    _, relevance = explain(model, NFNetGamma(LOW, HIGH, gamma, threshold=threshold), x, target=1)
    assert (relevance - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_dilated_network_with_same_padded_average_pooling():
    model = nfnet("dm_nfnet_f0", output_stride=8).double()
    assert any(type(module).__name__ == "AvgPool2dSame" for module in model.modules())
    x = image(40).double()
    _, expected = NoteK(model, LOW, HIGH, 0.1)(x, target=3)
    _, relevance = explain(model, NFNetGamma(LOW, HIGH), x)
    assert (relevance - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_a_batch_is_explained_as_its_images_are():
    model = nfnet("nf_regnet_b0").double()
    x = image(32, n=3).double()
    _, together = explain(model, NFNetGamma(LOW, HIGH), x)
    alone = torch.cat([explain(model, NFNetGamma(LOW, HIGH), x[i : i + 1])[1] for i in range(3)])
    assert (together - alone).abs().max() <= 1e-12 * alone.abs().max()
