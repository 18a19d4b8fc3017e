"""Folders of random photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def random_photos(folder: Path, classes: list[str], n_train: int, n_val: int, size: int = 32) -> Path:
    generator = np.random.default_rng(0)
    for part, n in (("train", n_train), ("val", n_val)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for i in range(n):
                pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i:02}.png")
    return folder
