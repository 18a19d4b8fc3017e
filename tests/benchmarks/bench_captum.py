"""What K concept maps cost with Captum, against one map, side by side in one run.

Prints a Markdown table. Times are medians over `--repeats`, taken in turn; the model is torchvision's VGG16
with random weights (the cost does not depend on them), the layer Conv4_3 after ReLU (`features.22`).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from captum.attr import (
    LRP,
    Attribution,
    DeepLift,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    Saliency,
    ShapleyValueSampling,
)
from drsa_core import RandomSubspaces, Subspaces
from drsa_core.contexts import ContextMethod
from measures import operations, peak_memory, print_peak_memory, seconds_in_turn
from torch import Tensor
from torch.nn import functional
from torchvision.models import VGG, vgg16

from captum_drsa import DisentangledAttribution, ShapleyContext, patch_mask

LAYER = "features.22"
TARGET = 430


def subspaces(n_subspaces: int) -> Subspaces:
    return RandomSubspaces(n_subspaces, random_state=0).fit(torch.zeros(1, 512)).subspaces_


def medians(runs: dict[str, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[str, float]:
    """Median seconds of each run."""
    return {name: median(times) for name, times in seconds_in_turn(runs, repeats, warm_up).items()}


def row(what: str, base: str, seconds: float, base_seconds: float, bound: str) -> None:
    print(
        f"| {what} | {seconds:.2f} | {base} | {base_seconds:.2f} | {seconds / base_seconds:.2f} | {bound} |"
    )


def known(activation: Tensor, context: Tensor) -> ContextMethod:
    """A context method that costs nothing, to time step 2 alone."""
    return lambda request: (activation, context)


def integrated_gradients(model: VGG, x: Tensor, n_steps: int, batch: int, repeats: int) -> None:
    method, four = IntegratedGradients(model), subspaces(4)
    both = DisentangledAttribution(method, LAYER, four)
    pair = both.context(x, TARGET)
    second = DisentangledAttribution(method, LAYER, four, context_method=known(*pair))
    options: dict[str, Any] = {"target": TARGET, "n_steps": n_steps, "internal_batch_size": batch}
    runs: dict[str, Callable[[], object]] = {
        "one": lambda: method.attribute(x, **options),
        "second": lambda: second.attribute(x, **options),
        "both": lambda: both.attribute(x, **options),
    }
    seconds = medians(runs, repeats)
    counts = {name: operations(run) for name, run in runs.items()}
    base = f"one IG map, {n_steps} steps"
    for name, what in (("second", "step 2"), ("both", "with step 1")):
        bound = f"≤ 2.5; operations {counts[name] / counts['one']:.2f}"
        row(f"IG, K=4, {n_steps} steps, {what}", base, seconds[name], seconds["one"], bound)


def gradient_methods(model: VGG, x: Tensor, repeats: int) -> None:
    """Both steps of the other gradient methods: their context is one gradient."""
    methods: dict[Attribution, dict[str, Any]] = {
        InputXGradient(model): {},
        Saliency(model): {},
        DeepLift(model): {},
        GradientShap(model): {"baselines": x * 0},
    }
    for method, options in methods.items():
        split = DisentangledAttribution(method, LAYER, subspaces(4))
        images = x.clone().requires_grad_()  # Captum warns otherwise
        runs: dict[str, Callable[[], object]] = {
            "one": partial(method.attribute, images, target=TARGET, **options),
            "both": partial(split.attribute, images, target=TARGET, **options),
        }
        seconds = medians(runs, repeats)
        counts = {name: operations(run) for name, run in runs.items()}
        bound = f"≤ 2.8; operations {counts['both'] / counts['one']:.2f}"
        name = method.get_name()
        row(f"{name}, K=4, both steps", f"one {name} map", seconds["both"], seconds["one"], bound)


def lrp(model: VGG, x: Tensor, repeats: int) -> None:
    method = LRP(model)
    split = DisentangledAttribution(method, LAYER, subspaces(4))
    seconds = medians(
        {
            "one": lambda: method.attribute(x, target=TARGET),
            "both": lambda: split.attribute(x, target=TARGET),
        },
        repeats,
    )
    row("LRP, K=4", "one LRP map", seconds["both"], seconds["one"], "≤ 3")


def shapley(model: VGG, x: Tensor, permutations: int, batch: int, repeats: int) -> None:
    method = ShapleyValueSampling(model)
    mask = patch_mask(x, 16)
    n_patches = int(mask.max()) + 1
    pair = DisentangledAttribution(method, LAYER, context_method="gradient").context(x, TARGET)
    split = {
        k: DisentangledAttribution(method, LAYER, subspaces(k), context_method=known(*pair)) for k in (1, 4)
    }

    def runs(n_samples: int) -> dict[str, Callable[[], object]]:
        options: dict[str, Any] = {
            "target": TARGET,
            "feature_mask": mask,
            "n_samples": n_samples,
            "perturbations_per_eval": batch,
        }
        first = DisentangledAttribution(method, LAYER, context_method=ShapleyContext(n_samples))
        return {
            "standard map": lambda: method.attribute(x, **options),
            "K=1": lambda: split[1].attribute(x, **options),
            "K=4": lambda: split[4].attribute(x, **options),
            "context": lambda: first.context(x, TARGET),
        }

    seconds = medians(runs(permutations), repeats, warm_up=False)
    # Permutations cost the same, so that it is enough to count in one of them.
    counts = {name: operations(run) for name, run in runs(1).items()}
    by_count = f"operations {(counts['K=4'] + counts['context']) / counts['standard map']:.2f}"
    what = f"{n_patches} patches, {permutations} permutations"
    row(f"Shapley, K=4, {what}, step 2", "one concept, step 2", seconds["K=4"], seconds["K=1"], "≤ 1.1")
    whole = {k: seconds[f"K={k}"] + seconds["context"] for k in (1, 4)}
    row(f"Shapley, K=4, {what}, both steps", "one concept, both steps", whole[4], whole[1], "≤ 1.1")
    row(f"Shapley, K=4, {what}, step 2", "one standard map", seconds["K=4"], seconds["standard map"], "")
    row(f"Shapley, K=4, {what}, both steps", "one standard map", whole[4], seconds["standard map"], by_count)
    milliseconds = {name: value / (n_patches * permutations) * 1e3 for name, value in seconds.items()}
    print(
        f"\nShapley, per evaluation of a patch: standard map {milliseconds['standard map']:.1f} ms, "
        f"one concept {milliseconds['K=1']:.1f} ms, K=4 {milliseconds['K=4']:.1f} ms; "
        f"step 1, per evaluation of a feature map: {seconds['context'] / (512 * permutations) * 1e3:.1f} ms."
    )


def memory(size: int, batch: int) -> None:
    """Peak memory against K and the number of steps, with `batch` images per evaluation."""
    print("\n| peak memory, MB | one map | K=1 | K=4 | K=16 |\n|---|---|---|---|---|")
    settings = [("ig", n_steps) for n_steps in (4, 40)] + [("shapley", 1)]
    for method, n_steps in settings:
        arguments = ["--size", str(size), "--batch", str(batch), "--measure", method, str(n_steps)]
        peaks = " | ".join(f"{peak_memory(__file__, [*arguments, str(k)]):.0f}" for k in (0, 1, 4, 16))
        what = f"IG, {n_steps} steps" if method == "ig" else "Shapley, 1 permutation"
        print(f"| {what}, {batch} images per evaluation | {peaks} |", flush=True)


def run_once(model: VGG, x: Tensor, method: str, n_steps: int, n_subspaces: int, batch: int) -> None:
    """Step 2 of one method, for one map if `n_subspaces` is 0."""
    wrapped: Attribution
    options: dict[str, Any]
    if method == "ig":
        wrapped = IntegratedGradients(model)
        options = {"n_steps": n_steps, "internal_batch_size": batch}
    else:
        wrapped = ShapleyValueSampling(model)
        options = {"n_samples": n_steps, "perturbations_per_eval": batch, "feature_mask": patch_mask(x, 16)}
    if n_subspaces:
        wrapped = DisentangledAttribution(wrapped, LAYER, subspaces(n_subspaces), context_method="gradient")
    wrapped.attribute(x, target=TARGET, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="height and width of the image")
    parser.add_argument("--steps", type=int, nargs="+", default=[10], help="steps of Integrated Gradients")
    parser.add_argument("--batch", type=int, default=10, help="images per evaluation")
    parser.add_argument("--repeats", type=int, default=3)
    parts = ["ig", "gradient", "lrp", "shapley", "memory"]
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    parser.add_argument(
        "--full",
        action="store_true",
        help="Shapley with the paper's 25 permutations in both steps, once: takes tens of minutes on a CPU. "
        "Default: 1 permutation in each step, and the cost of an evaluation",
    )
    parser.add_argument("--measure", nargs=3, metavar=("METHOD", "STEPS", "K"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = vgg16(weights=None).eval()
    x = functional.interpolate(torch.randn(1, 3, 14, 14), size=(args.size, args.size), mode="bilinear")
    if args.measure:
        method, n_steps, n_subspaces = args.measure
        run_once(model, x, method, int(n_steps), int(n_subspaces), args.batch)
        print_peak_memory()
        return
    print(f"VGG16, {LAYER}, 1 × 3 × {args.size} × {args.size}, {torch.get_num_threads()} threads\n")
    print("| what | s | against | s | ratio | bound |\n|---|---|---|---|---|---|")
    if "ig" in args.only:
        for n_steps in args.steps:
            integrated_gradients(model, x, n_steps, args.batch, args.repeats)
    if "gradient" in args.only:
        gradient_methods(model, x, args.repeats)
    if "lrp" in args.only:
        lrp(model, x, args.repeats)
    if "shapley" in args.only:
        permutations = 25 if args.full else 1
        shapley(model, x, permutations, args.batch, 1 if args.full else args.repeats)
    if "memory" in args.only:
        memory(args.size, args.batch)


if __name__ == "__main__":
    main()
