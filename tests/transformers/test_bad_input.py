"""What `TransformerCanonizer` refuses, by name, and a family that is one table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.model_state import model_state

from .models import pictures, small, timm, vit

from drsa_core import Subspaces  # isort: skip
from zennit.attribution import Gradient  # isort: skip
from zennit_drsa import DisentangledAttributor, TransformerCanonizer, TransformerGamma, doctor  # isort: skip
from zennit_drsa.transformers import FAMILIES, Family  # isort: skip
from zennit_drsa.transformers.parts import sums  # isort: skip


def refused(model: nn.Module, message: str) -> None:
    before = model_state(model)
    with pytest.raises(ValueError, match=message):
        TransformerCanonizer().apply(model)
    assert model_state(model) == before


def test_a_model_that_is_not_known():
    refused(
        nn.Sequential(nn.Linear(3, 2)), r"no transformer in this Sequential.*supported are.*timm's Vision"
    )
    assert not TransformerGamma.suits(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 1), "TransformerDecoder"),
        (lambda: nn.Sequential(nn.TransformerDecoderLayer(8, 2)), "0 is a TransformerDecoderLayer"),
    ],
)
def test_cross_attention_and_decoders(build, named):
    refused(build(), rf"{named}: cross-attention and causal decoders are not supported")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attn_layer": "diff"}, r"blocks\.0\.attn is a DiffAttention"),
        ({"block_fn": vit.DiffParallelScalingBlock}, r"blocks\.0 is a DiffParallelScalingBlock"),
        ({"global_pool": "prr"}, r"attn_pool is a AttentionPoolPrr"),
        ({"mlp_layer": timm.layers.GatedMlp}, r"blocks\.0\.mlp is a GatedMlp"),
    ],
)
def test_parts_that_are_not_known(options, named):
    refused(small(**options), rf"{named}, for which TransformerCanonizer knows no canonical form; of timm's")


def test_a_block_or_network_of_ones_own():
    class Block(vit.Block):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x) * 2
            return result

    class Twisted(vit.VisionTransformer):  # type: ignore[misc]
        pass

    class VisionTransformer(vit.VisionTransformer):  # type: ignore[misc]
        """As in the code of MAE: timm's name, and a sum with the position embeddings that has no rule."""

        def forward_features(self, x: Tensor, **_: object) -> Tensor:
            tokens = torch.cat((self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)), dim=1)
            result: Tensor = self.norm(self.blocks(tokens + self.pos_embed))
            return result

    size = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2}
    refused(small(block_fn=Block), r"blocks\.0 is a Block")
    refused(VisionTransformer(**size), "the model is a VisionTransformer, for which .* no canonical form")
    refused(Twisted(**size), "Twisted changes timm's")


def test_causal_attention():
    model = small()
    with TransformerGamma().context(model), pytest.raises(ValueError, match="causal decoder"):
        model(pictures(), is_causal=True)


def test_masks_are_part_of_the_logits():
    model, x = small(), pictures()
    mask = torch.rand(17, 17, generator=torch.Generator().manual_seed(0)) > 0.3
    mask.fill_diagonal_(True)
    additive = torch.zeros(17, 17, dtype=torch.float64).masked_fill_(~mask, float("-inf"))
    for given in (mask, additive):
        expected = model(x, attn_mask=given)
        with TransformerGamma(0.0, "attnlrp").context(model):
            found = model(x.requires_grad_(), attn_mask=given)
            (relevance,) = torch.autograd.grad(found, x, found.detach())
        assert torch.allclose(found, expected, rtol=1e-10)
        assert torch.isfinite(relevance).all()


def test_arguments():
    with pytest.raises(ValueError, match=r"attention must be 'constant'.*'attnlrp'.*got 'flash'"):
        TransformerGamma(attention="flash")
    with pytest.raises(ValueError, match="gamma must be finite"):
        TransformerGamma(-1.0)
    with pytest.raises(ValueError, match="low= with high="):
        TransformerGamma(low=0.0)
    with pytest.raises(ValueError, match=r"gamma_above=0\.1 needs the concept layer"):
        TransformerGamma(gamma_above=0.1)
    model = small()
    before = model_state(model)
    with pytest.raises(ValueError, match=r"gamma names blocks\.7"):
        TransformerGamma({"": 0.1, "blocks.7": 0.0}).register(model)
    assert model_state(model) == before


@pytest.mark.parametrize(
    ("dim", "error"), [(0, "no axis of features"), (3, "no axis of features"), (1, "D = 12")]
)
def test_a_channel_dim_that_is_wrong(dim, error):
    subspaces = Subspaces(torch.eye(12, dtype=torch.float64), [6, 6])
    attributor = DisentangledAttributor(
        Gradient(small(), TransformerGamma()), "blocks.0", subspaces, channel_dim=dim
    )
    with pytest.raises(ValueError, match=error):
        attributor.explain(pictures(), 3)


def test_an_error_in_between_leaves_the_model_as_it_was():
    model, x = small(), pictures()
    before = model_state(model)
    model.head.register_forward_hook(lambda *args: 1 / 0)
    hooked = model_state(model)
    with pytest.raises(ZeroDivisionError), TransformerGamma().context(model):
        model(x)
    assert model_state(model) == hooked
    model.head._forward_hooks.clear()
    assert model_state(model) == before


SKIPPING = Family(
    name="skipping networks",
    library="tests",
    is_network=lambda module: isinstance(module, Skipping),
    forms={"Skipping": sums},
)


class Skipping(nn.Module):
    """x + linear(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.linear(x)
        return result


SKIPPING = Family(
    name="skipping networks",
    library="tests",
    is_network=lambda module: isinstance(module, Skipping),
    forms={"Skipping": sums},
)


def test_a_family_is_one_table():
    torch.manual_seed(0)
    model, x = Skipping().eval(), torch.rand(2, 4)
    refused(model, "no transformer in this Skipping")
    FAMILIES.append(SKIPPING)
    try:
        assert doctor(model, TransformerGamma(), x, verbose=False).ok
        refused(nn.Linear(2, 2), "skipping networks")
    finally:
        FAMILIES.remove(SKIPPING)
