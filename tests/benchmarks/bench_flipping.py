"""Patch flipping on EfficientNet-Lite0: time per evaluation against the bare network, and against Quantus.

    python tests/benchmarks/bench_flipping.py                  # fills, and ours against the bare network
    python tests/benchmarks/bench_flipping.py --quantus        # Quantus' RegionPerturbation in the same run

The photographs are crops of scikit-image's cat, the maps smooth noise: time hardly depends on them. The
bare network runs on images that are ready, at each batch size and in both memory formats; the fastest is the
yardstick. Against Quantus: 8 photographs, mean fill, one patch a step, as it does it; both runs in slices of
a second or less, as the speed of a machine may change within minutes, or with --in-turn one whole run after
the other. "× bare" is against the fastest of all bare passes of the round. Times of patch flipping include
everything, the copy of the network too. Run it on an idle machine, or with --cpu: then times are CPU seconds
of one thread, which other programs disturb less (without slices).
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from drsa_audit import Network, load_network
from drsa_core.evaluation import explain_func, patch_flipping
from drsa_core.evaluation.folding import fold_batch_norms
from photographs import package_photos, random_crops
from slices import Runner, alternate
from torch import Tensor, nn

TARGET = 285
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}


def smooth_noise(inputs: Tensor, n_concepts: int) -> Tensor:
    """Maps (N, K, 3, H, W)."""
    noise = torch.randn(len(inputs), n_concepts, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    maps = nn.functional.interpolate(noise.flatten(0, 1), inputs.shape[2:], mode="bilinear")
    return maps.unflatten(0, (len(inputs), n_concepts))


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Time of one run."""
    begin = clock()
    run()
    return clock() - begin


def bare(
    model: nn.Module,
    inputs: Tensor,
    sizes: list[int],
    repeats: int,
    clock: Callable[[], float],
    quiet: bool = False,
) -> float:
    """Table of milliseconds per image of the network alone; returns the least."""
    if not quiet:
        print("\n| batch | contiguous, ms | channels-last, ms |\n|---|---|---|")
    least = float("inf")
    with torch.no_grad():
        for size in sizes:
            batch = inputs.repeat(-(-size // len(inputs)), 1, 1, 1)[:size]
            row = []
            for memory_format in FORMATS.values():
                images = batch.contiguous(memory_format=memory_format)
                times = [seconds(partial(model, images), clock) for _ in range(repeats + 1)]
                row.append(1e3 * min(times[1:]) / size)
            if not quiet:
                print(f"| {size} | {row[0]:.2f} | {row[1]:.2f} |", flush=True)
            least = min(least, *row)
    return least


def with_quantus(model: nn.Module, inputs: Tensor, maps: Tensor, clock: Callable[[], float]) -> float:
    """Milliseconds per evaluation of Quantus' RegionPerturbation, one patch a step, mean fill."""
    import quantus

    metric = quantus.RegionPerturbation(
        patch_size=16,
        regions_evaluation=196,
        perturb_baseline="mean",
        normalise=False,
        disable_warnings=True,
        display_progressbar=False,
    )
    targets = torch.full((len(inputs),), TARGET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spent = seconds(
            lambda: metric(
                model=model,
                x_batch=inputs.numpy(),
                y_batch=targets.numpy(),
                explain_func=explain_func(lambda *_: maps),
                softmax=False,
                channel_first=True,
                batch_size=len(inputs),
            ),
            clock,
        )
    return 1e3 * spent / (197 * len(inputs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--concepts", type=int, nargs="+", default=[1, 4], help="default: %(default)s")
    parser.add_argument("--fills", nargs="+", default=["telea", "mean"], help="default: %(default)s")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="of the bare runs")
    parser.add_argument("--repeats", type=int, default=5, help="of the bare runs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of ours, bare and Quantus")
    parser.add_argument("--only-rounds", action="store_true", help="nothing else")
    parser.add_argument("--quantus", action="store_true", help="also Quantus, side by side")
    parser.add_argument("--keep-memory", action="store_true", help="an allocator that returns no memory")
    parser.add_argument("--in-turn", action="store_true", help="one whole run after the other, not in slices")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of one thread, not wall-clock time")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    if options.cpu:
        torch.set_num_threads(1)
    network, inputs = network_and_images(options.images)
    print(f"{len(inputs)} images, {torch.get_num_threads()} threads for the network")
    maps = smooth_noise(inputs, max(options.concepts))
    if not options.only_rounds:
        least = bare(network.model, inputs, options.sizes, options.repeats, clock)
        folded = fold_batch_norms(network.model)
        if folded is not None:
            print("\nwith batch norms folded:")
            bare(folded, inputs, options.sizes, options.repeats, clock)
        print("\n| fill | K | evaluations | ms each | the network in it | × the fastest bare pass |")
        print("|---|---|---|---|---|---|")
        for fill, k in itertools.product(options.fills, options.concepts):
            ours, inside, rows = flipped(network, inputs, maps[:, :k], fill, "squares", clock)
            ratio = ours / least
            print(f"| {fill} | {k} | {rows} | {ours:.2f} | {inside:.2f} | {ratio:.2f} |", flush=True)
    if options.quantus and not options.cpu and not options.in_turn:
        in_slices(len(inputs), options.rounds, options.keep_memory)
    else:
        in_turn(network, inputs, maps[:, :1], options, clock)


def in_slices(n_images: int, rounds: int, keep_memory: bool) -> None:
    """Whole runs of ours and of Quantus at the same time, a second or half of one each in turn.

    With `keep_memory` glibc's allocator is told to keep its blocks, for all alike. That favours Quantus: its
    large batches else get new pages of memory in every pass.
    """
    if keep_memory:
        os.environ |= {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
    pairs = [Runner(0.5, one_run, "ours", n_images), Runner(1.0, one_run, "Quantus", n_images)]
    alone = Runner(60, one_run, "bare", n_images)
    passes: list[float] = []

    def measure() -> None:
        alternate([alone])
        passes.append(alone.result)

    print("\nmean fill, one patch a step, ms an evaluation; ours and Quantus in slices of 0.5 and 1 s")
    print("| round | fastest bare passes | ours | × bare | Quantus | × ours |\n|---|---|---|---|---|---|")
    try:
        for number in range(rounds):
            passes.clear()
            spent = alternate(pairs, measure, every=14)
            ours, theirs = (1e3 * total / (197 * n_images) for total in spent)
            row = ", ".join(f"{found:.2f}" for found in passes)
            print(
                f"| {number + 1} | {row} | {ours:.2f} | {ours / min(passes):.2f} | {theirs:.2f} | "
                f"{theirs / ours:.2f} |",
                flush=True,
            )
    finally:
        for runner in (*pairs, alone):
            runner.close()


def in_turn(
    network: Network, inputs: Tensor, maps: Tensor, options: argparse.Namespace, clock: Callable[[], float]
) -> None:
    """Whole runs one after the other, between which the speed of a machine may change."""
    print("\nmean fill, one patch a step, ms an evaluation; one whole run after the other")
    print("| round | fastest bare passes | ours | × bare | Quantus | × ours |\n|---|---|---|---|---|---|")
    for number in range(options.rounds):
        before = bare(network.model, inputs, [4, 8, 16], options.repeats, clock, quiet=True)
        ours, _, _ = flipped(network, inputs, maps, "mean", "single", clock)
        between = bare(network.model, inputs, [4, 8, 16], options.repeats, clock, quiet=True)
        theirs = with_quantus(network.model, inputs, maps, clock) if options.quantus else float("nan")
        least = min(before, between)
        print(
            f"| {number + 1} | {before:.2f}, {between:.2f} | {ours:.2f} | {ours / least:.2f} | "
            f"{theirs:.2f} | {theirs / ours:.2f} |",
            flush=True,
        )


def one_run(whose: str, n_images: int) -> Callable[[], object]:
    """Ours, Quantus' or the bare network's, with a network of its own that has run before."""
    network, inputs = network_and_images(n_images)
    maps = smooth_noise(inputs, 1)
    with torch.no_grad():
        network.model(inputs)
    if whose == "bare":
        return partial(bare, network.model, inputs, [4, 8, 16], 5, time.perf_counter, quiet=True)
    if whose == "Quantus":
        import quantus  # noqa: F401  (so that the import is not timed)

        return partial(with_quantus, network.model, inputs, maps, time.perf_counter)
    return partial(flipped, network, inputs, maps, "mean", "single", time.perf_counter)


def network_and_images(n_images: int) -> tuple[Network, Tensor]:
    """EfficientNet-Lite0, and photographs as it takes them."""
    network = load_network("efficientnet_lite0")
    # As a user has it; in channels-last, as loaded here, every input would be taken for one.
    network.model.to(memory_format=torch.contiguous_format)
    crops = random_crops(package_photos()["cat"](), n_images)
    return network, torch.stack([network.to_input(crop) for crop in crops]).contiguous()


def flipped(
    network: Network, inputs: Tensor, maps: Tensor, fill: str, schedule: str, clock: Callable[[], float]
) -> tuple[float, float, int]:
    """Milliseconds per evaluation in all and in the network alone, and the evaluations."""
    begin = clock()
    curves = patch_flipping(
        network.model, inputs, maps, TARGET, network.preprocessing, fill=fill, schedule=schedule
    )
    spent = clock() - begin
    rows = len(inputs) + int((curves.removed.diff() > 0).sum())  # steps that remove nothing new are not run
    return 1e3 * spent / rows, 1e3 * curves.network_seconds / rows, rows


if __name__ == "__main__":
    main()
