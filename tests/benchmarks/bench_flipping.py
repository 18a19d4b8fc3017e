"""Seconds per image of patch flipping on EfficientNet-Lite0, inpainting and network apart.

The 20 photographs are crops of scikit-image's cat, the maps smooth noise: time hardly depends on them.

    python tests/benchmarks/bench_flipping.py
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from drsa_audit import load_network
from drsa_audit.package_photos import package_photos, random_crops
from drsa_core.evaluation import patch_flipping


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--concepts", type=int, nargs="+", default=[1, 4], help="default: %(default)s")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--fill", default="telea", help="default: %(default)s")
    options = parser.parse_args()
    network = load_network("efficientnet_lite0")
    crops = random_crops(package_photos()["cat"](), options.images)
    inputs = torch.stack([network.to_input(crop) for crop in crops]).contiguous(
        memory_format=torch.channels_last
    )
    print(f"{len(inputs)} images, {options.fill}, {torch.get_num_threads()} threads for the network")
    print("| K | workers | seconds per image | inpainting | network |\n|---|---|---|---|---|")
    for k in options.concepts:
        noise = torch.randn(len(inputs), k, 3, 28, 28, generator=torch.Generator().manual_seed(0))
        maps = torch.nn.functional.interpolate(noise.flatten(0, 1), (224, 224), mode="bilinear")
        maps = maps.unflatten(0, (len(inputs), k))
        for workers in sorted(set(options.workers)):
            begin = time.perf_counter()
            curves = patch_flipping(
                network.model,
                inputs,
                maps,
                285,
                network.preprocessing,
                fill=options.fill,
                workers=workers,
                batch_size=8,
            )
            seconds = [time.perf_counter() - begin, curves.fill_seconds, curves.network_seconds]
            print(
                f"| {k} | {workers} | {' | '.join(f'{s / len(inputs):.3f}' for s in seconds)} |", flush=True
            )


if __name__ == "__main__":
    main()
