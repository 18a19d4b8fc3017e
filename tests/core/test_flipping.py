"""Patch flipping: hand-computed curves, the union rule, and bad input."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core.evaluation import (
    FILLS,
    Preprocessing,
    check_maps,
    patch_flipping,
    patch_grid,
    removal_counts,
    removal_ranks,
)
from torch import Tensor, nn

from tests.model_state import model_state

IDENTITY = (0.0, 1.0)  # inputs are pixels; the network's zero is black


def contributions(*rows: list[float], size: int = 4) -> Tensor:
    """Weights (1, H, W) of a linear model that gives each patch of ones the value in `rows`."""
    values = torch.tensor(rows, dtype=torch.float64)
    return values.repeat_interleave(size, 0).repeat_interleave(size, 1)[None] / size**2


class Linear(nn.Module):
    """f(x) = (w·x, −w·x)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.weight).flatten(1).sum(1)
        return torch.stack([score, -score], 1)


def flip(weight: Tensor, maps: Tensor, target: int = 0, **options):
    inputs = torch.ones(len(maps), *weight.shape, dtype=torch.float64)
    options = {"patch_size": 4, "fill": "constant", "schedule": "single", **options}
    return patch_flipping(Linear(weight).eval(), inputs, maps, target, IDENTITY, **options)


# ---------------------------------------------------------------------- the curve and its area


def test_linear_model_with_two_patches() -> None:
    weight = contributions([2.0, 1.0])
    right, wrong = flip(weight, weight[None]), flip(weight, -weight[None])
    assert right.share.tolist() == [0, 0.5, 1]
    torch.testing.assert_close(right.scores, torch.tensor([[3.0, 1, 0]], dtype=torch.float64))
    assert flip(weight, weight[None], target=1).scores.tolist() == [[0, 0, 0]]  # −f, rectified
    by_function = flip(weight, weight[None], target=lambda output: output[:, 0])  # type: ignore[arg-type]
    assert torch.equal(by_function.scores, right.scores)
    # ½ (3 + 1)/2 + ½ (1 + 0)/2 and, with the less relevant patch first, ½ (3 + 2)/2 + ½ (2 + 0)/2
    assert right.aupc.item() == pytest.approx(1.25, abs=1e-12)
    assert wrong.aupc.item() == pytest.approx(1.75, abs=1e-12)


def test_nine_patches_go_in_squares() -> None:
    weight = contributions([5.0, 1, 4], [2, 9, 3], [6, 8, 7])
    curves = flip(weight, weight[None], schedule="squares")
    # 1, then 4 more, then the rest: 45, 45 − 9, 36 − (8 + 7 + 6 + 5), 0
    assert (curves.share * 9).tolist() == pytest.approx([0, 1, 5, 9])
    torch.testing.assert_close(curves.scores, torch.tensor([[45.0, 36, 10, 0]], dtype=torch.float64))
    assert curves.aupc.item() == pytest.approx(1 / 9 * 40.5 + 4 / 9 * 23 + 4 / 9 * 5, abs=1e-12)
    torch.testing.assert_close(curves.removed, curves.share[None])


class TwoPatches(nn.Module):
    """f = 2 min(p₀, ½) + max(0, p₁ − ½), with p the means of the two patches; it saturates on the first."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x[..., :4].mean((1, 2, 3)), x[..., 4:].mean((1, 2, 3))
        return (2 * first.clamp(max=0.5) + (second - 0.5).relu())[:, None]


def test_two_patch_network_with_two_concepts() -> None:
    # Two images; p = (1, 1) and (¼, 1), so that f = 1.5 and 1.
    x = torch.ones(2, 1, 4, 8)
    x[1, ..., :4] = 0.25
    maps = torch.zeros(2, 2, 1, 4, 8)
    maps[:, 0, ..., :4], maps[:, 1, ..., 4:] = 1.0, 0.5  # concept 1 is patch 0, concept 2 is patch 1
    options: dict[str, Any] = {"patch_size": 4, "fill": "constant", "schedule": "single"}
    both = patch_flipping(TwoPatches().eval(), x, maps, 0, IDENTITY, **options)
    # The union is everything after the first step; the second step changes nothing.
    assert both.scores.tolist() == [[1.5, 0, 0], [1, 0, 0]]
    assert both.removed.tolist() == [[0, 1, 1], [0, 1, 1]]
    assert both.aupc.tolist() == [0.375, 0.25]
    assert both.aupc_of_removed.tolist() == [0.75, 0.5]
    one = patch_flipping(TwoPatches().eval(), x, maps.sum(1), [0, 0], IDENTITY, **options)
    assert one.scores.tolist() == [[1.5, 0.5, 0], [1, 0.5, 0]]
    assert one.aupc.tolist() == [0.5 + 0.125, 0.375 + 0.125]


def test_every_colour_channel_is_removed() -> None:
    weight = torch.eye(3, dtype=torch.float64)[:, :, None, None] * contributions([2.0, 1.0])[None]
    inputs = torch.ones(1, 3, 4, 8, dtype=torch.float64)
    for channel in range(3):
        maps = torch.zeros_like(inputs)
        maps[:, 1] = contributions([2.0, 1.0])  # the explanation looks at green only
        model = Linear(weight[channel].expand(3, 4, 8)).eval()
        curves = patch_flipping(model, inputs, maps, 0, IDENTITY, patch_size=4, fill="constant")
        torch.testing.assert_close(curves.scores, torch.tensor([[3.0, 1, 0]], dtype=torch.float64))


def test_batches_and_order_of_images_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(5, 3, 32, 32, generator=generator)
    maps = torch.randn(5, 2, 3, 32, 32, generator=generator)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(7)).eval().double()
    inputs, maps = inputs.double(), maps.double()
    model(inputs)
    target = torch.tensor([0, 1, 2, 3, 4])
    reference = patch_flipping(model, inputs, maps, target, IDENTITY, patch_size=8, batch_size=64)
    for batch_size in (1, 7):
        again = patch_flipping(model, inputs, maps, target, IDENTITY, patch_size=8, batch_size=batch_size)
        torch.testing.assert_close(again.scores, reference.scores, rtol=0, atol=1e-12)
    backwards = patch_flipping(model, inputs.flip(0), maps.flip(0), target.flip(0), IDENTITY, patch_size=8)
    torch.testing.assert_close(backwards.aupc.flip(0), reference.aupc, rtol=0, atol=1e-12)
    # A literal loop: after each step remove what any concept has removed so far.
    for n in range(5):
        for step, count in enumerate(removal_counts(16)):
            gone = set()
            for k in range(2):
                sums = [
                    (-float(maps[n, k, :, r : r + 8, c : c + 8].sum()), 4 * (r // 8) + c // 8)
                    for r, c in itertools.product(range(0, 32, 8), repeat=2)
                ]
                gone |= {patch for _, patch in sorted(sums)[:count]}
            mask = np.kron(np.isin(np.arange(16), list(gone)).reshape(4, 4), np.ones((8, 8))).astype(bool)
            filled = FILLS["telea"](inputs[n].numpy(), mask, np.zeros(3)) if gone else inputs[n].numpy()
            image = np.where(mask, filled, inputs[n].numpy())
            score = model(torch.from_numpy(image)[None])[0, target[n]].clamp(min=0).detach()
            assert float(score) == pytest.approx(float(reference.scores[n, step]), abs=1e-6)


# ---------------------------------------------------------------------- which patches, and when


def test_union_rule_on_a_two_concept_explanation() -> None:
    """As in the paper's Figure 6: two concepts on a grid, and what is gone after the first three steps."""
    first = torch.tensor([[9, 8, 1, 0], [7, 6, 2, 0], [5, 3, 0, 0], [4, 0, 0, 0]], dtype=torch.float64)
    second = torch.tensor([[0, 0, 0, 4], [0, 0, 3, 5], [0, 2, 6, 7], [0, 1, 8, 9]], dtype=torch.float64)
    ranks = removal_ranks(torch.stack([first, second]).reshape(1, 2, 16)).reshape(4, 4)
    counts = removal_counts(16)
    assert counts == [0, 1, 5, 14, 16]
    expected = {
        1: ["X...", "....", "....", "...X"],
        2: ["XX..", "XX.X", "X.XX", "..XX"],
        # Both have named 14 of 16; the ones each leaves out are removed by the other.
        3: ["XXXX", "XXXX", "XXXX", "XXXX"],
    }
    for step, rows in expected.items():
        assert ["".join("X" if gone else "." for gone in row) for row in ranks < counts[step]] == rows
    assert removal_counts(16, "square totals") == [0, 1, 4, 9, 16]
    rows = ["".join("X" if gone else "." for gone in row) for row in ranks < 4]
    assert rows == ["XX..", "XX..", "..XX", "..XX"]


def test_a_224_image_takes_8_steps_or_14() -> None:
    assert removal_counts(196) == [0, 1, 5, 14, 30, 55, 91, 140, 196]
    assert removal_counts(196, "square totals") == [tau**2 for tau in range(15)]
    assert removal_counts(3, "single") == [0, 1, 2, 3]
    assert removal_counts(10, [4, 10]) == [0, 4, 10]
    # Ties go in the order of the patches.
    assert removal_ranks(torch.tensor([[[1.0, 2, 1, 2, 1]]])).tolist() == [[2, 0, 3, 1, 4]]


def test_patches_at_the_edge_are_smaller_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match="4 × 4 do not divide an image of 6 × 9"):
        grid = patch_grid(6, 9, 4)
    assert grid[:, 0].tolist() == [0, 0, 0, 0, 3, 3]
    assert grid[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


# ---------------------------------------------------------------------- bad input


def test_four_axes_are_one_map_or_refused() -> None:
    inputs, maps = torch.rand(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    assert torch.equal(check_maps(maps, inputs), maps[:, None])
    assert torch.equal(check_maps(maps[:, None], inputs), maps[:, None])
    assert check_maps(maps[:, :, None], inputs).shape == (2, 3, 1, 8, 8)
    assert check_maps(maps[:, :, :4, :4], inputs).shape == (2, 3, 1, 8, 8)  # of positions
    assert check_maps(maps[:, :1], inputs).shape == check_maps(maps[:, :1]).shape == (2, 1, 1, 8, 8)
    for wrong, given in ((maps[:, :2], inputs), (maps, None)):
        with pytest.raises(ValueError, match=r"give maps\[:, None\] for one map"):
            check_maps(wrong, given)


FLAT = contributions([2.0, 1.0])
BAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "NaN": (FLAT[None] * torch.nan, {}),
    "of the inputs": (FLAT[None, ..., :4].repeat(2, 1, 1, 1), {}),
    r"\(N, K, C, H, W\)": (torch.zeros(4, 8), {}),
    "does not fit the model's output": (FLAT[None], {"target": 2}),
    "2 entries": (FLAT[None], {"target": [0, 1]}),
    "one of telea, mean, blur, constant": (FLAT[None], {"fill": "snow"}),
    "finite pixels": (FLAT[None], {"fill": lambda image, mask, neutral: image * np.nan}),
    "one of squares, square totals, single": (FLAT[None], {"schedule": "cubes"}),
    "end with all 2": (FLAT[None], {"schedule": [2, 1, 2]}),
    "patch_size": (FLAT[None], {"patch_size": 5}),
    "batch_size": (FLAT[None], {"batch_size": 0}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message: str) -> None:
    maps, options = BAD[message]
    with pytest.raises(ValueError, match=message):
        flip(FLAT, maps, **options)


def test_models_and_pixels_that_do_not_fit_are_named() -> None:
    x, maps = torch.ones(1, 1, 4, 8), FLAT[None]
    with pytest.raises(TypeError, match="integers"):
        flip(FLAT, maps, target=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="torch tensor, got ndarray"):
        check_maps(maps.numpy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected maps of K = 4 concepts, got K = 1"):
        check_maps(maps[:, None], n_subspaces=4)
    with pytest.raises(ValueError, match=r"pixels must lie in \[0, 1\], but .* go from 3 to 3"):
        patch_flipping(Linear(FLAT).eval(), x, maps, 0, (2.0, 1.0), patch_size=4)
    with pytest.raises(ValueError, match="std positive"):
        Preprocessing.from_mean_std(0.0, 0.0)
    with pytest.raises(ValueError, match="in training mode"):
        patch_flipping(Linear(FLAT), x, maps, 0, IDENTITY, patch_size=4)
    with pytest.raises(ValueError, match="one row for each"):
        patch_flipping(
            lambda x: x.sum(), x.repeat(2, 1, 1, 1), maps.repeat(2, 1, 1, 1), 0, IDENTITY, patch_size=4
        )
    with pytest.raises(ValueError, match="the model's output has"):
        patch_flipping(lambda x: torch.full((len(x), 1), torch.nan), x, maps, 0, IDENTITY, patch_size=4)


def test_outputs_that_depend_on_the_batch_are_refused() -> None:
    """The statistics of the user's model would change, too."""
    torch.manual_seed(0)
    norm, head = nn.BatchNorm2d(2), nn.Linear(24, 2)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Flatten(), head).eval()
    inputs, maps = torch.rand(2, 1, 4, 8), torch.rand(2, 1, 4, 8)
    norm.train()
    before = model.get_buffer("1.running_mean").clone()
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm2d\) is in training mode"):
        patch_flipping(model, inputs, maps, 0, IDENTITY, patch_size=4)
    assert torch.equal(model.get_buffer("1.running_mean"), before)
    # A layer that does the same in either mode, such as a head that was put in after eval(), does no harm.
    model.eval()
    head.train()
    assert patch_flipping(model, inputs, maps, 0, IDENTITY, patch_size=4).aupc.shape == (2,)
    norm.running_mean = norm.running_var = None
    with pytest.raises(ValueError, match="statistics of the batch; give batch_size=1"):
        patch_flipping(model, inputs, maps, 0, IDENTITY, patch_size=4)
    alone = patch_flipping(model, inputs, maps, 0, IDENTITY, patch_size=4, batch_size=1)
    with torch.no_grad():
        expected = torch.cat([model(image[None])[:, 0].clamp(min=0) for image in inputs])
    torch.testing.assert_close(alone.scores[:, 0], expected.double())


# ---------------------------------------------------------------------- the network that is run


class Network(nn.Module):
    """Convolution, batch norm, and then something that may take channels-last in another way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm, self.kind = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), kind
        self.head = nn.Linear(4 * 16 * 16, 2)
        if kind == "standardised":
            self.convolution = Standardised(3, 4, 3, padding=1)
        nn.init.constant_(self.norm.weight, 3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm(self.convolution(x))
        if self.kind == "strides":  # wrong in channels-last, and no error
            a = a.as_strided((a.shape[0], 4 * 16 * 16), (4 * 16 * 16, 1))
        else:
            a = a.view(a.shape[0], -1) if self.kind == "view" else a.flatten(1)
        output: Tensor = self.head(a) + 3
        return output


class Standardised(nn.Conv2d):
    """Scales its weight before it uses it: what is folded into the weight is undone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight / self.weight.norm(), self.bias, padding=1)


@pytest.mark.parametrize(
    ("kind", "folded", "last"),
    [("plain", True, True), ("view", True, False), ("strides", True, False), ("standardised", False, True)],
)
def test_the_faster_network_changes_nothing(
    kind: str, folded: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run folded and in channels-last where outputs stay the same, and the model stays as it was."""
    generator = torch.Generator().manual_seed(1)
    x, maps = (torch.rand(6, 3, 16, 16, generator=generator) for _ in range(2))
    model, options = Network(kind), {"patch_size": 4, "schedule": "single", "fill": "mean"}
    before = model_state(model)
    with torch.no_grad():
        first = model(x)[:, 1].clamp(min=0).double()
    norms, formats = [], []
    norm, convolution = nn.functional.batch_norm, nn.functional.conv2d

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        norms.append(1)
        return norm(*args, **kwargs)

    def watched(image: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        formats.append(image.is_contiguous(memory_format=torch.channels_last))
        return convolution(image, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "batch_norm", counted)
    monkeypatch.setattr(nn.functional, "conv2d", watched)
    found, again = (patch_flipping(model, x, maps, 1, IDENTITY, **options) for _ in range(2))  # type: ignore[arg-type]
    assert (len(norms) < 12) == folded  # the model itself has run on one image, to compare
    assert formats[-1] == last
    assert torch.equal(found.scores, again.scores)
    assert model_state(model) == before
    torch.testing.assert_close(found.scores[:, 0], first, rtol=1e-5, atol=1e-5)
    by_function = patch_flipping(model.forward, x, maps, 1, IDENTITY, batch_size=7, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found.scores, by_function.scores, rtol=1e-5, atol=1e-5)
    assert float(by_function.scores.std()) > 1e-3
