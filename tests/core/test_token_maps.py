"""Tokens become pictures: prefix tokens dropped and counted, grids found, totals kept, drawn and flipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core import RandomSubspaces, Subspaces
from drsa_core.evaluation import patch_flipping
from drsa_core.token_maps import TokenLayout, arrange, find_layout, spread
from torch import Tensor, nn


def relevance(*positions: int) -> Tensor:
    return torch.randn(2, 3, *positions, generator=torch.Generator().manual_seed(0)).double()


def blocks(n_features: int) -> Subspaces:
    return RandomSubspaces(3, random_state=0).fit(torch.zeros(1, n_features).double()).subspaces_


def test_prefix_tokens_are_dropped_and_counted() -> None:
    values = relevance(1 + 12)
    tokens = arrange(values, TokenLayout(1, (3, 4)))
    for row in range(3):
        for column in range(4):
            assert torch.equal(tokens.maps[:, :, row, column], values[:, :, 1 + 4 * row + column])
    assert tokens.n_prefix == 1
    assert torch.equal(tokens.prefix[:, :, 0], values[:, :, 0])
    expected = values[:, :, 0].abs().sum() / values.abs().sum()
    assert tokens.prefix_share == pytest.approx(float(expected))
    assert f"{float(expected):.1%}" in str(tokens)


@pytest.mark.parametrize(
    ("n_tokens", "options", "n_prefix", "grid"),
    [
        (14, {"n_prefix": 5}, 5, (3, 3)),
        (14, {"grid": (3, 4)}, 2, (3, 4)),
        (14, {"n_prefix": 2, "grid": (2, 6)}, 2, (2, 6)),
    ],
)
def test_the_layout_can_be_overridden(
    n_tokens: int, options: dict[str, Any], n_prefix: int, grid: tuple[int, int]
) -> None:
    tokens = arrange(relevance(n_tokens), TokenLayout(0, (1, n_tokens)), **options)
    assert tokens.n_prefix == n_prefix
    assert tokens.maps.shape[2:] == grid


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"the 7 positions of the layer form no picture .* Give n_prefix"):
        arrange(relevance(7))
    for options in ({"n_prefix": 2, "grid": (2, 2)}, {"grid": (3, 3)}, {"n_prefix": 9}):
        with pytest.raises(ValueError, match="are not the 7 positions"):
            arrange(relevance(7), **options)
    with pytest.raises(ValueError, match="cannot cover"):
        spread(relevance(3, 4), (2, 4))
    with pytest.raises(ValueError, match=r"a layer of vectors \(N, D\) has no positions"):
        arrange(relevance())


@pytest.mark.parametrize(
    ("n_tokens", "size", "expected"),
    [
        (197, (224, 224), TokenLayout(1, (14, 14))),
        (201, (224, 224), TokenLayout(5, (14, 14))),
        (256, (224, 224), TokenLayout(0, (16, 16))),
        (99, (224, 112), TokenLayout(1, (14, 7))),
        (5, (32, 24), None),  # 3 : 4 does not fit into five tokens
        (24 * 24 + 40, (224, 224), None),  # 40 tokens before those of the image: the grid is another one
    ],
)
def test_the_largest_grid_of_the_shape_of_the_image(
    n_tokens: int, size: tuple[int, int], expected: TokenLayout | None
) -> None:
    assert find_layout(None, torch.zeros(1, 3, *size), n_tokens) == expected


def test_sentences_form_no_picture() -> None:
    assert find_layout(None, torch.zeros(1, 9, dtype=torch.long), 9) is None
    assert find_layout(None, (torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)), 9) is None


def test_timm_says_what_its_tokens_are() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=(32, 48),
        depth=1,
        reg_tokens=4,
        num_classes=3,
        embed_dim=12,
        num_heads=2,
    )
    wrapped = nn.Sequential(nn.Identity(), model)
    # The largest square of 11 tokens would be 3 × 3.
    assert find_layout(wrapped, torch.zeros(1, 3, 32, 48), 11) == TokenLayout(5, (2, 3))
    assert find_layout(wrapped, torch.zeros(1, 3, 48, 48), 14) == TokenLayout(5, (3, 3))  # another size


@pytest.mark.parametrize(
    ("size", "grid"), [((64, 64), (4, 4)), ((32, 128), (2, 8)), ((128, 32), (8, 2)), ((32, 32), (2, 2))]
)
def test_images_of_any_size_have_the_grid_of_their_shape(
    size: tuple[int, int], grid: tuple[int, int]
) -> None:
    """2 × 8 tokens are as many as 4 × 4, and 2 × 2 with five before them as many as 3 × 3."""
    vit = pytest.importorskip("timm").models.vision_transformer.VisionTransformer
    model = vit(
        64, 16, num_classes=3, embed_dim=12, depth=1, num_heads=2, reg_tokens=4, dynamic_img_size=True
    )
    x = torch.zeros(1, 3, *size)
    n_tokens = model.forward_features(x).shape[1]
    assert find_layout(model, x, n_tokens) == TokenLayout(5, grid)
    # The model may be given images of its own size by what is around it.
    assert find_layout(model, torch.zeros(1, 3, 300, 200), 21) == TokenLayout(5, (4, 4))


class Vit(nn.Module):
    """Patches of 4 × 4 as tokens, a class token before them, one block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = self.block(torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1))
        scores: Tensor = self.head(tokens.mean(1))
        return scores


def explained(backend: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Vit().double().eval()
    x = torch.rand(2, 3, 12, 12, dtype=torch.float64)
    wrapper: Any
    if backend == "captum":
        attr = pytest.importorskip("captum.attr")
        from captum_drsa import DisentangledAttribution

        wrapper = DisentangledAttribution(attr.InputXGradient(model), "block", blocks(8), channel_dim=-1)
    else:
        attribution = pytest.importorskip("zennit.attribution")
        from zennit_drsa import DisentangledAttributor

        wrapper = DisentangledAttributor(attribution.Gradient(model), "block", blocks(8), channel_dim=-1)
    return wrapper, x


@pytest.mark.parametrize("backend", ["captum", "zennit"])
def test_both_wrappers_fill_token_maps(backend: str) -> None:
    wrapper, x = explained(backend)
    explanation = wrapper.explain(x, 1)
    a, c = wrapper.context(x, 1)
    # R_k at each token, written out.
    u = blocks(8).basis.split(blocks(8).dims, dim=1)
    expected = torch.stack([((a @ block) * (c @ block)).sum(2) for block in u], dim=1)
    torch.testing.assert_close(explanation.position_relevance, expected)
    assert explanation.token_maps.shape == (2, 3, 3, 3)
    torch.testing.assert_close(explanation.token_maps.flatten(2), expected[:, :, 1:])
    assert explanation.tokens().n_prefix == 1
    torch.testing.assert_close(explanation.position_relevance.sum(2), explanation.concept_relevance)
    assert explanation.tokens(n_prefix=2, grid=(2, 4)).maps.shape == (2, 3, 2, 4)


@pytest.mark.parametrize("backend", ["captum", "zennit"])
def test_convolutions_and_vectors(backend: str) -> None:
    wrapper, x = explained(backend)
    name = type(wrapper).__name__
    make = {"DisentangledAttribution": "attribution_method", "DisentangledAttributor": "attributor"}[name]
    at_patches = type(wrapper)(getattr(wrapper, make), "patches", blocks(8)).explain(x, 1)
    assert at_patches.token_maps.shape == (2, 3, 3, 3)
    assert at_patches.tokens().n_prefix == 0
    at_head = type(wrapper)(getattr(wrapper, make), "head", blocks(3)).explain(x, 1)
    assert at_head.position_relevance.shape == (2, 3)
    with pytest.raises(ValueError, match="has no positions"):
        _ = at_head.token_maps


@pytest.mark.parametrize("size", [(12, 12), (13, 10), (3, 4)])
def test_spreading_keeps_totals_and_places(size: tuple[int, int]) -> None:
    values = relevance(3, 4)
    over = spread(values, size)
    assert over.shape == (2, 3, *size)
    torch.testing.assert_close(over.sum((2, 3)), values.sum((2, 3)))
    # Each position keeps its own total, in the pixels whose centres lie in it.
    rows = [int((i + 0.5) * 3 / size[0]) for i in range(size[0])]
    columns = [int((j + 0.5) * 4 / size[1]) for j in range(size[1])]
    sums = torch.zeros_like(values)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            sums[:, :, row, column] += over[:, :, i, j]
    torch.testing.assert_close(sums, values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_relevance_is_not_lost_in_half_precision(dtype: torch.dtype) -> None:
    values = (1e-5 * relevance(4, 4)).to(dtype)
    over = spread(values, (64, 64))
    # A position covers 16 × 16 pixels: its share is exact.
    torch.testing.assert_close(over[:, :, ::16, ::16] * 256, values.float(), rtol=0, atol=0)


def test_patch_flipping_takes_token_maps() -> None:
    pytest.importorskip("cv2")
    wrapper, x = explained("captum")
    maps = wrapper.explain(x, 1).token_maps
    arguments: dict[str, Any] = {"patch_size": 4, "fill": "mean"}

    def model(x: Tensor) -> Tensor:
        return wrapper.forward_func(x) + 5  # scores below 0 count as 0

    curves = patch_flipping(model, x, maps, 1, (0.0, 1.0), **arguments)
    pixels = spread(maps, (12, 12))[:, :, None].expand(-1, -1, 3, -1, -1) / 3
    expected = patch_flipping(model, x, pixels, 1, (0.0, 1.0), **arguments)
    torch.testing.assert_close(curves.scores, expected.scores)
    assert not torch.allclose(
        patch_flipping(model, x, maps.flip(3), 1, (0.0, 1.0), **arguments).scores, expected.scores
    )
