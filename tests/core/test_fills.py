"""What replaces removed patches, and how pixels become inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drsa_core.evaluation import FILLS, Preprocessing, patch_flipping

from .test_flipping import Linear, contributions, flip


def test_telea_continues_what_surrounds_a_hole_and_keeps_the_rest() -> None:
    image = np.full((3, 16, 16), 0.2)
    image[0], image[:, 4:8, 4:8] = 0.6, 1.0
    mask = np.zeros((16, 16), dtype=bool)
    mask[4:8, 4:8] = True
    expected = np.array([0.6, 0.2, 0.2])[:, None, None] * np.ones((3, 16, 16))
    # OpenCV rounds inside: up to 2 of 255 steps away, where the hole itself was 102 steps away or more.
    np.testing.assert_allclose(FILLS["telea"](image, mask, np.zeros(3)), expected, atol=2.01 / 255)
    np.testing.assert_allclose(FILLS["telea"](image[:1], mask, np.zeros(1)), expected[:1], atol=2.01 / 255)


def test_nothing_of_an_image_that_is_removed_altogether_comes_back() -> None:
    """OpenCV returns an image that is masked everywhere as it came."""
    image, neutral = np.random.default_rng(0).random((3, 8, 8)), np.array([0.1, 0.2, 0.3])
    for name in ("telea", "mean", "constant"):
        filled = FILLS[name](image, np.ones((8, 8), dtype=bool), neutral)
        np.testing.assert_allclose(filled, neutral[:, None, None] * np.ones((3, 8, 8)))


def test_mean_and_blur() -> None:
    image, mask = np.zeros((1, 4, 4)), np.zeros((4, 4), dtype=bool)
    image[0, :, 2:], mask[:, 3] = [[0.5, 1.0]], True
    assert FILLS["mean"](image, mask, np.zeros(1))[0, 0, 3] == pytest.approx(0.5 / 3)
    large, hole = np.full((3, 1024, 1024), 0.9, dtype=np.float32), np.eye(1024, dtype=bool)
    assert FILLS["mean"](large, hole, np.zeros(3))[:, 0, 0] == pytest.approx(0.9, abs=1e-5)
    blurred = FILLS["blur"](image, mask, np.zeros(1))
    assert blurred.std() < 0.1 * image.std()
    assert image.min() < blurred.min() <= blurred.max() < image.max()


@pytest.mark.parametrize(
    ("fill", "scores"),
    [
        # Pixels are all 1, neutral is 0: what is left fills a hole with 1, an empty image becomes neutral.
        ("telea", [3.0, 3, 0]),
        ("mean", [3.0, 3, 0]),
        ("blur", [3.0, 3, 3]),
        ("constant", [3.0, 1, 0]),
        (lambda image, mask, neutral: 0.5 * image, [3.0, 2, 1.5]),
    ],
)
def test_fills_by_name_and_as_functions(fill, scores: list[float]) -> None:
    weight = contributions([2.0, 1.0])
    curves = flip(weight, weight[None], fill=fill)
    # 1e-6: pixels are filled in float32.
    torch.testing.assert_close(curves.scores, torch.tensor([scores], dtype=torch.float64), rtol=0, atol=1e-6)


def test_mean_and_std_or_functions_which_may_write_into_what_they_get() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
    shift, scale = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std))
    inputs = (torch.rand(2, 3, 8, 8, generator=generator, dtype=torch.float64) - shift) / scale
    maps, before = torch.randn(2, 3, 8, 8, generator=generator), inputs.clone()
    model = Linear(torch.randn(3, 8, 8, generator=generator, dtype=torch.float64)).eval()

    def careless_constant(image, mask, neutral):
        image[:, mask] = neutral[:, None]
        mask[:], neutral[:] = False, 0.9
        return image

    constant = patch_flipping(model, inputs, maps, 0, (mean, std), patch_size=4, fill="constant")
    functions = Preprocessing(lambda x: x.mul_(scale).add_(shift), lambda x: x.sub_(shift).div_(scale))
    careless = patch_flipping(model, inputs, maps, 0, functions, patch_size=4, fill=careless_constant)
    assert torch.equal(inputs, before)
    torch.testing.assert_close(careless.scores, constant.scores, rtol=0, atol=1e-12)
    # Nothing left: the network sees 0.
    torch.testing.assert_close(constant.scores[:, -1], torch.zeros(2, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(constant.scores[:, 0], model(inputs)[:, 0].clamp(min=0), rtol=0, atol=1e-12)
    bgr = Preprocessing.from_mean_std(mean, std, "BGR")
    torch.testing.assert_close(bgr.to_pixels(inputs), (inputs * scale + shift).flip(1))
    torch.testing.assert_close(bgr.to_inputs(bgr.to_pixels(inputs)), inputs)
