"""Batch size and memory format of `collect`, `concept_relevance` and K maps with Zennit.

    python tests/benchmarks/bench_formats.py                        # EfficientNet-Lite0
    python tests/benchmarks/bench_formats.py --network torchvision.models:resnet50 --layer layer3 --cpu

Time hardly depends on weights and images, so that those of the factory and noise will do. Prints milliseconds
for an image, the best of `--repeats` for each batch size and format, in turn. With --cpu times are CPU
seconds of one thread, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from drsa_audit import Network, load_network
from drsa_core import RandomSubspaces
from measures import seconds_in_turn
from torch import Tensor
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor

FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
TARGET = 3


def steps(network: Network, layer: str, images: Tensor) -> dict[str, Callable[[Tensor], object]]:
    """What is timed, each a function of a batch."""
    attributor = DisentangledAttributor(Gradient(network.model, network.composite(layer)), layer)
    collect = partial(attributor.collect, target=TARGET, positions=20, random_state=0)
    attributor.subspaces = RandomSubspaces(4, random_state=0).fit(collect([images[:1]])).subspaces_
    return {
        "`collect`": lambda x: collect([x]),
        "`concept_relevance`": lambda x: attributor.concept_relevance(x, TARGET),
        "4 maps": lambda x: attributor.explain(x, TARGET, whole=False).maps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="efficientnet_lite0", help="default: %(default)s")
    parser.add_argument("--layer", help="default: one of each family")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8], help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of one thread, not wall-clock time")
    options = parser.parse_args()
    if options.cpu:
        torch.set_num_threads(1)
    clock = time.process_time if options.cpu else time.perf_counter
    network = load_network(options.network)
    network.model.to(memory_format=torch.contiguous_format)  # as a user has it
    layer = network.layer_or(options.layer)
    images = torch.rand(max(options.sizes), 3, network.size, network.size)
    print(
        f"{options.network}, {layer}, ms an image\n\n| | batch | {' | '.join(FORMATS)} |\n|---|---|---|---|"
    )
    for what, run in steps(network, layer, images).items():
        for size in options.sizes:
            batches = {form: images[:size].contiguous(memory_format=FORMATS[form]) for form in FORMATS}
            runs = {form: partial(run, batch) for form, batch in batches.items()}
            found = seconds_in_turn(runs, options.repeats, clock=clock)
            row = " | ".join(f"{1e3 * min(found[form]) / size:.1f}" for form in FORMATS)
            print(f"| {what} | {size} | {row} |", flush=True)


if __name__ == "__main__":
    main()
