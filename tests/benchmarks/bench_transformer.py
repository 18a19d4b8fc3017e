"""LRP on a ViT: one map beside a plain gradient, and K maps at a block beside one map."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from drsa_audit import load_network
from drsa_core import RandomSubspaces, Subspaces
from measures import seconds_in_turn
from torch import Tensor, nn
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor, TransformerGamma


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_small_patch16_224", help="of timm (default: %(default)s)")
    parser.add_argument(
        "--weights", help="a .safetensors file that names its model, instead of random weights"
    )
    parser.add_argument("--size", type=int, default=224, help="side of the image (default: %(default)s)")
    parser.add_argument("--layer", default="blocks.5", help="block to split (default: %(default)s)")
    parser.add_argument("--concepts", type=int, default=4, help="number K (default: %(default)s)")
    parser.add_argument("--images", type=int, default=1, help="in the batch (default: %(default)s)")
    parser.add_argument("--gamma", type=float, nargs="*", default=[0.0, 0.1], help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model: Any
    if options.weights:
        network = load_network(options.weights)
        model, options.size, options.model = network.model, network.size, Path(options.weights).stem
    else:
        model = timm.create_model(options.model, pretrained=False, img_size=options.size).eval()
        nn.init.normal_(model.head.weight, std=0.05)  # timm's initial head is zero in some models
    x = torch.rand(options.images, 3, options.size, options.size) * 2 - 1
    solver = RandomSubspaces(options.concepts, random_state=0)
    subspaces: Subspaces = solver.fit(torch.randn(2, model.embed_dim)).subspaces_

    def start(output: Tensor) -> Tensor:
        return output.detach() * nn.functional.one_hot(output.detach().argmax(1), output.shape[1])

    def gradient() -> Tensor:
        return Gradient(model)(x, start)[1]

    def one_map(composite: TransformerGamma) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with Gradient(model, composite) as attributor:
                return attributor(x, start)[1]

        return run

    def all_maps(composite: TransformerGamma) -> Callable[[], Tensor]:
        inner = Gradient(model, composite)
        attributor = DisentangledAttributor(inner, options.layer, subspaces, channel_dim=-1)

        def run() -> Tensor:
            with attributor:
                return attributor(x, start)[1]

        return run

    settings = [(reading, gamma) for reading in ("constant", "attnlrp") for gamma in options.gamma]
    runs: dict[str, Callable[[], Tensor]] = {"gradient": gradient}
    for reading, gamma in settings:
        composite = TransformerGamma(gamma, reading)
        runs |= {f"one {reading} {gamma}": one_map(composite), f"K {reading} {gamma}": all_maps(composite)}
    seconds = {k: statistics.median(v) for k, v in seconds_in_turn(runs, options.repeats).items()}
    where = f"{options.images} image(s) of {options.size}×{options.size}, {options.layer}"
    print(
        f"{options.model}, {where}, {torch.get_num_threads()} thread(s), median of {options.repeats}; ",
        end="",
    )
    print(f"a plain gradient takes {seconds['gradient']:.3f} s\n")
    print(f"| attention | γ | one map | × gradient | K = {options.concepts} maps | × one map |")
    print("|---|---|---|---|---|---|")
    for reading, gamma in settings:
        one, all_k = seconds[f"one {reading} {gamma}"], seconds[f"K {reading} {gamma}"]
        numbers = f"{one:.3f} | {one / seconds['gradient']:.2f} | {all_k:.3f} | {all_k / one:.2f}"
        print(f"| {reading} | {gamma:g} | {numbers} |")


if __name__ == "__main__":
    main()
