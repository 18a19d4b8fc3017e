"""A transformer inside of a model of one's own: its head is explained too, and what it loses is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import literal
from .models import perturbed, pictures, small

from drsa_core import Subspaces  # isort: skip
from zennit.attribution import Gradient  # isort: skip
from zennit_drsa import DisentangledAttributor, TransformerGamma, doctor  # isort: skip


def with_head(*head: nn.Module) -> nn.Sequential:
    """A ViT whose class token goes into a head."""
    torch.manual_seed(2)
    return nn.Sequential(small(num_classes=0), *(perturbed(part) for part in head)).eval()


def written_out(head: Any, features: Tensor, target: int, gamma: float) -> Tensor:
    """Relevance of the features under layer norm, linear, GELU, linear: GELU passes it on."""
    norm, first, activation, second = head
    y, of_norm = literal.norm(norm, features)
    z, of_first = literal.linear(y, first.weight, first.bias, gamma)
    scores, of_second = literal.linear(activation(z), second.weight, second.bias, gamma)
    start = torch.zeros_like(scores)
    start[:, target] = scores[:, target]
    result: Tensor = of_norm(of_first(of_second(start)))
    return result


@pytest.mark.parametrize("gamma", [0.0, 0.3])
def test_norms_and_activations_of_a_head_carry_relevance(gamma):
    model, x = with_head(nn.LayerNorm(12), nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 5)), pictures()
    a, c = DisentangledAttributor(Gradient(model, TransformerGamma(gamma)), "0").context(x, 3)
    with torch.no_grad():
        expected = written_out(model[1:], a, 3, gamma)
    assert float((a * c - expected).abs().max()) <= 1e-9 * float(expected.abs().max())
    assert doctor(model, TransformerGamma(gamma), x, verbose=False).ok


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_batch_norm_carries_relevance(synchronised, inside):
    """As in linear probes: a norm without weights before the last layer, in timm's head or behind it."""
    norm: Any = nn.BatchNorm1d(12, affine=False)
    last, x = nn.Linear(12, 5), pictures()
    head: Any = perturbed(nn.Sequential(norm, last))
    norm.running_mean.normal_(std=0.3)
    norm.running_var.uniform_(0.2, 3)
    if synchronised:
        head = nn.SyncBatchNorm.convert_sync_batchnorm(head)
    model = nn.Sequential(small(num_classes=0), nn.Identity() if inside else head).eval()
    if inside:
        model[0].head = head
    attributor = DisentangledAttributor(Gradient(model, TransformerGamma(0.0)), "0.fc_norm")
    a, c = attributor.context(x, 3)
    with torch.no_grad():
        y = (a - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
        of_norm = y * last.weight[3]  # LRP-0 of the last layer, from the score
        expected = a / (norm.running_var + norm.eps).sqrt() / y * of_norm
    assert float((a * c - expected).abs().max()) <= 1e-9 * float(expected.abs().max())
    assert doctor(model, TransformerGamma(0.0), x, verbose=False).ok
    head[0].train()
    with (
        pytest.raises(ValueError, match=r"statistics of the batch.*model\.eval\(\)"),
        pytest.warns(UserWarning, match="training"),
    ):
        attributor.context(x, 3)


def test_what_a_module_without_a_rule_loses_is_not_called_biases():
    model, x = with_head(nn.Linear(12, 5), nn.Softmax(dim=1)), pictures()
    concepts = Subspaces(torch.eye(12, dtype=torch.float64), [6, 6])
    attributor = DisentangledAttributor(
        Gradient(model, TransformerGamma()), "0.blocks.0", concepts, channel_dim=-1
    )
    # The gradient of softmax sends p_3 · p_3 (δ_3j − p_j) to the logits j, which sums to nothing.
    assert attributor.explain(x, 3).certificate().unaccounted == pytest.approx(1, abs=1e-9)
