"""Time and memory of K concept maps with Zennit, against one map with the same composite, in one run.

Run on an otherwise idle machine: python tests/benchmarks/bench_zennit.py. Prints a Markdown table.
Memory is the peak resident set (VmHWM, Linux) of a process of its own for each figure, weights and libraries
included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from drsa_core import RandomSubspaces
from measures import operations, peak_memory, print_peak_memory, seconds_in_turn
from torch import Tensor, nn
from torchvision.models import vgg16
from zennit.attribution import Gradient
from zennit.composites import (
    BetaSmooth,
    DeconvNet,
    EpsilonAlpha2Beta1,
    EpsilonGammaBox,
    EpsilonPlus,
    EpsilonPlusFlat,
    ExcitationBackprop,
    GuidedBackprop,
    LayerMapComposite,
    SpecialFirstLayerMapComposite,
    layer_map_base,
)
from zennit.core import Composite, Hook
from zennit.rules import Epsilon, Gamma, ZBox
from zennit.types import Convolution, Linear, MaxPool

from zennit_drsa import DisentangledAttributor, VGGGamma

LAYER = "features.22"  # Conv4_3 after ReLU
N_FEATURES = 512
LOW, HIGH = -2.2, 2.7


class ZennitGamma(SpecialFirstLayerMapComposite):  # type: ignore[misc]
    """VGGGamma's γ with Zennit's own rules: what the paper's settings cost without this package.

    Where γ = 0, `Gamma` takes five modified forward passes and `Epsilon` one, for the same LRP-0.
    """

    def __init__(self, zero: Hook) -> None:
        self.gammas = [*(Gamma(gamma, stabilizer=1e-9) for gamma in (0.5, 0.5, 0.25, 0.1)), zero]
        first_map = [(Convolution, ZBox(LOW, HIGH, stabilizer=1e-9))]
        layer_map = [*layer_map_base(1e-9), (Linear, zero)]
        super().__init__(layer_map, first_map)

    def mapping(self, ctx: dict[str, int], name: str, module: nn.Module) -> object:
        if isinstance(module, MaxPool):
            ctx["pools"] = ctx.get("pools", 0) + 1
        if isinstance(module, Convolution) and ctx.get("first_layer_visited"):
            return self.gammas[ctx.get("pools", 0)]
        return super().mapping(ctx, name, module)


COMPOSITES: dict[str, Callable[[], Composite]] = {
    "EpsilonGammaBox": lambda: EpsilonGammaBox(low=LOW, high=HIGH),
    "EpsilonPlus": EpsilonPlus,
    "EpsilonPlusFlat": EpsilonPlusFlat,
    "EpsilonAlpha2Beta1": EpsilonAlpha2Beta1,
    "ExcitationBackprop": ExcitationBackprop,
    "Epsilon everywhere": lambda: LayerMapComposite([*layer_map_base(), (Linear, Epsilon())]),
    "GuidedBackprop": GuidedBackprop,
    "DeconvNet": DeconvNet,
    "BetaSmooth": BetaSmooth,
    "VGGGamma": VGGGamma,
    "Zennit's Gamma": lambda: ZennitGamma(Gamma(0.0, stabilizer=1e-9)),
    "Zennit's Gamma, Epsilon where γ = 0": lambda: ZennitGamma(Epsilon(1e-9)),
}


def one_map(model: nn.Module, composite: str) -> Callable[[Tensor], object]:
    attributor = Gradient(model, COMPOSITES[composite]())
    return lambda input: attributor(input, lambda output: output.detach())


def k_maps(model: nn.Module, composite: str, n_subspaces: int) -> Callable[[Tensor], object]:
    subspaces = RandomSubspaces(n_subspaces, random_state=0).fit(torch.zeros(1, N_FEATURES)).subspaces_
    wrapped = Gradient(model, COMPOSITES[composite]())
    attributor = DisentangledAttributor(wrapped, LAYER, subspaces)
    return lambda input: attributor(input, lambda output: output.detach())


def best_seconds(functions: list[Callable[[Tensor], object]], input: Tensor, repeats: int) -> list[float]:
    """Best time of each."""
    runs = {str(i): partial(function, input) for i, function in enumerate(functions)}
    return [min(times) for times in seconds_in_turn(runs, repeats).values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=224, help="height and width of the input")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each, best taken")
    parser.add_argument("--composites", nargs="+", choices=COMPOSITES, default=list(COMPOSITES)[:-2])
    parser.add_argument("--growth", action="store_true", help="also K = 1 … 16 and batches of 1 … 4")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--only-growth", action="store_true", help="nothing but the growth")
    parser.add_argument("--measure", nargs=3, metavar=("COMPOSITE", "K", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = vgg16(weights=None).eval()

    if options.measure:
        composite, n_subspaces, batch = options.measure[0], int(options.measure[1]), int(options.measure[2])
        run = k_maps(model, composite, n_subspaces) if n_subspaces else one_map(model, composite)
        for _ in range(3):
            run(torch.randn(batch, 3, options.size, options.size))
        print_peak_memory()
        return

    input = torch.randn(1, 3, options.size, options.size)
    if not options.only_growth:
        compare(model, input, options)
    if options.growth or options.only_growth:
        growth(model, input)


def compare(model: nn.Module, input: Tensor, options: argparse.Namespace) -> None:
    """K = 4 maps against one map, for each composite; "operations" is the ratio of what they compute."""
    print(f"VGG16, {LAYER}, {options.size}×{options.size}, {torch.get_num_threads()} threads, best of "
          f"{options.repeats}\n")  # fmt: skip
    columns = ["composite", "one map [s]", "K=4 maps [s]", "ratio", "operations"]
    columns += [] if options.no_memory else ["one [MB]", "K=4 [MB]", "ratio"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name in options.composites:
        functions = [one_map(model, name), k_maps(model, name, 4)]
        one, four = best_seconds(functions, input, options.repeats)
        few, many = (operations(partial(function, input)) for function in functions)
        row = f"| {name} | {one:.2f} | {four:.2f} | {four / one:.2f} | {many / few:.2f} |"
        if not options.no_memory:
            size = ["--size", str(options.size)]
            memory = [peak_memory(__file__, [*size, "--measure", name, k, "1"]) for k in ("0", "4")]
            row += f" {memory[0]:.0f} | {memory[1]:.0f} | {memory[1] / memory[0]:.2f} |"
        print(row, flush=True)
    baselines = list(COMPOSITES)[-2:]
    functions = [k_maps(model, "VGGGamma", 4), *(one_map(model, name) for name in baselines)]
    four, *times = best_seconds(functions, input, options.repeats)
    print()
    for name, zennit in zip(baselines, times, strict=True):
        print(f"VGGGamma, K=4 maps: {four:.2f} s = {four / zennit:.2f} × ONE map with {name}, {zennit:.2f} s")


def growth(model: nn.Module, input: Tensor) -> None:
    """Time with the number of concepts and the batch size."""
    print("\n| composite | batch | one map [s] | " + " | ".join(f"K={k}" for k in (1, 2, 4, 8, 16)) + " |")
    print("|---" * 8 + "|")
    for name in ("VGGGamma", "EpsilonPlus"):
        for batch in (1, 2, 4):
            functions = [one_map(model, name), *(k_maps(model, name, k) for k in (1, 2, 4, 8, 16))]
            times = best_seconds(functions, input.expand(batch, -1, -1, -1).clone(), 1)
            ratios = " | ".join(f"{t:.2f} s ({t / times[0]:.2f}×)" for t in times[1:])
            print(f"| {name} | {batch} | {times[0]:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
