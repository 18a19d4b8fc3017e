"""K maps on an NFNet with a shared forward graph, beside one map and K maps by repetition."""

from __future__ import annotations

import argparse
import statistics
import time

import timm
import torch
from drsa_core import RandomSubspaces, Subspaces
from measures import seconds_in_turn
from torch import Tensor, nn
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor, DisentangledComposite, NFNetGamma


def perturb(model: nn.Module) -> nn.Module:
    """Open the residual branches, which timm's initial skip gains of zero shut."""
    for name, parameter in model.named_parameters():
        if name.endswith("skipinit_gain"):
            nn.init.constant_(parameter, 0.5)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dm_nfnet_f0", help="a timm NFNet (default: %(default)s)")
    parser.add_argument("--size", type=int, default=192, help="side of the image (default: %(default)s)")
    parser.add_argument("--layer", default="stages.2", help="layer to split (default: %(default)s)")
    parser.add_argument("--concepts", type=int, default=4, help="number K (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of one thread, not wall-clock time")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu else options.threads)
    torch.manual_seed(0)
    model = perturb(timm.create_model(options.model, pretrained=False).eval())
    x = torch.rand(1, 3, options.size, options.size) * 2 - 1
    composite = NFNetGamma(-1.0, 1.0)
    n_features = width(model, options.layer, x)
    solver = RandomSubspaces(options.concepts, random_state=0)
    subspaces: Subspaces = solver.fit(torch.randn(2, n_features)).subspaces_

    def start(output: Tensor) -> Tensor:
        return output * nn.functional.one_hot(output.detach().argmax(1), output.shape[1])

    def one_map() -> Tensor:
        with Gradient(model, composite) as attributor:
            return attributor(x, start)[1]

    def shared() -> Tensor:
        with DisentangledAttributor(Gradient(model, composite), options.layer, subspaces) as attributor:
            return attributor(x, start)[1]

    def repetition() -> Tensor:
        maps = []
        for k in range(options.concepts):
            with Gradient(model, DisentangledComposite(composite, options.layer, subspaces, k)) as attributor:
                maps.append(attributor(x, start)[1])
        return torch.stack(maps, 1)

    difference = (shared() - repetition()).abs().max() / repetition().abs().max()
    runs = {"one map": one_map, f"K = {options.concepts} maps": shared, "K maps by repetition": repetition}
    clock = time.process_time if options.cpu else time.perf_counter
    seconds = seconds_in_turn(runs, options.repeats, clock=clock)
    threads = torch.get_num_threads()
    setting = f"{options.model}, {options.size}×{options.size}, {options.layer}, {threads} thread(s)"
    setting += ", CPU seconds" if options.cpu else ""
    print(f"{setting}, median of {options.repeats}; both ways differ by {difference:.0e} of the maximum\n")
    print("| way | seconds | × one map |")
    print("|---|---|---|")
    base = statistics.median(seconds["one map"])
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.2f} | {statistics.median(values) / base:.2f} |")


def width(model: nn.Module, layer: str, x: Tensor) -> int:
    """Channels of a layer's output."""
    found: list[int] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda *args: found.append(args[2].shape[1]))
    with torch.no_grad():
        model(x)
    handle.remove()
    return found[0]


if __name__ == "__main__":
    main()
