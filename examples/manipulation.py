"""Manipulated explanations: an image whose LRP map turns into another one, and what PRCA still sees in it.

Images of one class are perturbed, hardly visibly, until their LRP map resembles the map of another image
while the output stays (section 6.3 and Note J.3 of the paper). PRCA then splits the manipulated map into the
class's most relevant direction and the residual. Everything comes with packages. `--network lite0` is
EfficientNet-Lite0 with real weights: crops of scikit-image's cat, target photographs from foolbox, or folders
of your own; an iteration takes seconds. Other names are networks as of `drsa`, with --weights, e.g. a VGG16.
`--network planted` is the small network of `known_concepts.py`, trained on the spot: many images in a minute.

    python examples/manipulation.py --network planted --count 16 --iterations 150 --lr 0.01
    python examples/manipulation.py --figure manipulation.png
    python examples/manipulation.py --train data/train/281_tabby --photos data/val/281_tabby --count 8
    python examples/manipulation.py --network vgg16 --layer features.22 --train … --photos … --targets …
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import known_concepts
import torch
from drsa_audit import load_network, photo_files, relevance_at, with_upper_gamma
from drsa_audit.package_photos import foolbox_files, package_photos, random_crops
from drsa_core import PRCA, Subspaces
from drsa_core.plot import manipulated_map
from drsa_core.showcases.double_backward import constant_weights
from drsa_core.showcases.manipulation import (
    Manipulation,
    is_suspicious,
    manipulate,
    manipulation_score,
    map_errors,
)
from drsa_core.showcases.synthetic import PlantedConcepts
from drsa_core.target import gradient_at_output
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.core import Composite

from zennit_drsa import DisentangledAttributor


class DifferentiableMap:
    """A Zennit map as a function of the input with its true gradient, for any model and composite.

    Two things matter. Relevance starts as the output itself, not as a constant, and rules keep the graph of
    what they compute: the ratios by which a layer shares out relevance are differentiated as well. And the
    rules replace gradients in every backward pass, so they are switched off as soon as the map is there:
    the second pass is an ordinary one.
    """

    def __init__(self, model: nn.Module, composite: Composite, target: int) -> None:
        self.model, self.composite, self.target = model, composite, target
        self._constant = constant_weights(model)

    def __enter__(self) -> Self:
        self._constant.__enter__()
        self.composite.register(self.model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.composite.remove()
        self._constant.__exit__(kind, error, trace)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (N, n_classes) and maps (N, H, W) of images (N, C, H, W) that require gradients."""
        for hook in self.composite.hook_refs:
            hook.active = True
        output = self.model(x)
        relevance = output * gradient_at_output(output, self.target)
        (result,) = torch.autograd.grad(output, x, relevance, create_graph=True)
        for hook in self.composite.hook_refs:
            hook.active = False
        return output, result.sum(1)


@dataclass(frozen=True)
class Case:
    """A network with images of one class, to learn from and to manipulate, and others for target maps."""

    model: nn.Module
    composite: Callable[[], Composite]
    layer: str
    target: int
    train: Tensor
    photos: Tensor
    others: Tensor
    bounds: tuple[Tensor, Tensor]

    def picture(self, x: Tensor) -> Tensor:
        """An image with values in [0, 1]."""
        low, high = self.bounds
        return (x - low) / (high - low)

    @property
    def span(self) -> Tensor:
        """What a pixel's way from 0 to 1 is in units of the inputs, shape (C, 1, 1)."""
        return self.bounds[1] - self.bounds[0]

    def maps(self, x: Tensor, target: int, subspaces: Subspaces | None = None) -> Tensor:
        """Maps (N, H, W) of an output, or (N, K, H, W) of its parts in K subspaces."""
        gradient = Gradient(self.model, self.composite())
        if subspaces is None:
            return gradient(x, relevance_at(target))[1].detach().sum(1)
        attributor = DisentangledAttributor(gradient, self.layer, subspaces)
        return attributor.explain(x, target, whole=False).maps.sum(2)


def photographs(options: argparse.Namespace) -> Case:
    """A network for photographs."""
    name = "efficientnet_lite0" if options.network == "lite0" else options.network
    network, size = load_network(name, options.weights), options.size
    model = network.model.requires_grad_(False)
    if options.train:
        train, photos = (network.load(photo_files(f), size) for f in (options.train, options.photos))
    else:
        cat = package_photos()["cat"]()
        every = (cat, *random_crops(cat, options.crops + 20))
        crops = torch.stack([network.to_input(crop, size) for crop in every])
        # The photograph itself, and crops that are not learned from, are manipulated.
        train, photos = crops[1 : options.crops + 1], torch.cat([crops[:1], crops[options.crops + 1 :]])
    with torch.no_grad():
        target = int(model(train).argmax(1).mode().values)
        photos = photos[model(photos).argmax(1) == target][: options.count]
    if not len(photos):
        raise SystemExit(f"none of the photographs is predicted as class {target}")
    files = photo_files(options.targets) if options.targets else list(foolbox_files())
    others = network.load([files[n % len(files)] for n in range(len(photos))], size)
    low, high = (network.preprocessing.to_inputs(torch.full((1, 3, 1, 1), v))[0] for v in (0.0, 1.0))
    bounds = low.clone(), high.clone()
    layer = network.layer_or(options.layer)
    if options.upper_gamma is not None:
        network = with_upper_gamma(network, layer, options.upper_gamma)
    return Case(model, lambda: network.composite(None), layer, target, train, photos, others, bounds)


def planted(options: argparse.Namespace) -> Case:
    """The network of planted concepts; targets are scenes of the class that shares the fewest patterns."""
    task = PlantedConcepts()
    model, accuracy = known_concepts.train(task, options.seed, "mean", options.steps)
    print(f"accuracy of the network: {accuracy:.3f}")
    generator = torch.Generator().manual_seed(1000 + options.seed)
    train, photos = (task.sample(n, generator, label=0).images for n in (200, options.count))
    others = task.sample(options.count, generator, label=len(task.classes) - 1).images
    layer = options.layer or known_concepts.LAYER
    bounds = -torch.ones(1, 1, 1), torch.ones(1, 1, 1)
    return Case(model, known_concepts.composite, layer, 0, train, photos, others, bounds)


def summary(name: str, maps: Tensor, result: Manipulation) -> None:
    """One row: errors relative to the mean square of the original map, and correlations."""
    errors = map_errors(maps, result.original_map, result.target_map)
    scale = result.original_map.square().mean((1, 2))
    cells = []
    for values in (errors.to_original / scale, errors.to_target / scale):
        spread = float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0
        cells.append(f"{float(values.mean()):.2f} ± {spread:.2f}")
    cells += [
        f"{float(v.mean()):.2f}" for v in (errors.correlation_to_original, errors.correlation_to_target)
    ]
    print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, help="photographs of one class, to learn PRCA from")
    parser.add_argument("--photos", type=Path, help="photographs of that class, to manipulate")
    parser.add_argument("--targets", type=Path, help="photographs whose maps are the targets")
    parser.add_argument("--count", type=int, default=1, help="images to manipulate (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=40, help="steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.004, help="step size (default: %(default)s)")
    parser.add_argument(
        "--betas",
        type=float,
        nargs=2,
        default=(10.0, 100.0),
        metavar=("FIRST", "LAST"),
        help="of softplus, which takes the place of ReLU; large for small activations (default: 10 100)",
    )
    parser.add_argument(
        "--max-change", type=float, default=16 / 255, help="of a value in 0…1 (default: 16/255)"
    )
    parser.add_argument("--size", type=int, default=160, help="height and width (default: %(default)s)")
    parser.add_argument("--layer", help="layer of PRCA (default: blocks.4, or stage3 of `planted`)")
    parser.add_argument(
        "--pool", type=int, default=8, help="pixels that the score averages (default: %(default)s)"
    )
    parser.add_argument("--crops", type=int, default=24, help="crops to learn from (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("manipulation.png"), help="default: %(default)s")
    parser.add_argument(
        "--network", default="lite0", help="lite0, planted, or one as of drsa (default: %(default)s)"
    )
    parser.add_argument("--weights", type=Path, help="of another network")
    parser.add_argument("--upper-gamma", type=float, help="γ of LRP above the layer, if it is to be another")
    parser.add_argument("--steps", type=int, default=250, help="training of `planted` (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of `planted` (default: %(default)s)")
    options = parser.parse_args()
    if bool(options.train) != bool(options.photos):
        parser.error("--train and --photos belong together")
    case = planted(options) if options.network == "planted" else photographs(options)
    print(f"class {case.target}: {len(case.train)} images to learn from, {len(case.photos)} to manipulate")

    attributor = DisentangledAttributor(Gradient(case.model, case.composite()), case.layer)
    pairs = attributor.collect(case.train.split(8), case.target, random_state=0)
    results = []
    # Networks for photographs one image at a time: a batch of second derivatives takes gigabytes.
    at_once = 64 if options.network == "planted" else 1
    subspaces = PRCA(1).fit(pairs).subspaces_
    for x, other in zip(case.photos.split(at_once), case.others.split(at_once), strict=True):
        with torch.no_grad():
            label = int(case.model(other).argmax(1).mode().values)
        goal = case.maps(other, label)
        with DifferentiableMap(case.model, case.composite(), case.target) as explain:
            done = manipulate(
                case.model,
                explain,
                x,
                goal,
                n_iter=options.iterations,
                lr=options.lr,
                betas=(options.betas[0], options.betas[1]),
                bounds=case.bounds,
                max_change=options.max_change * case.span,
            )
        results.append(done)
        if at_once == 1:  # a run that is cut short has said something
            begun, ended = (float(done.history[i, 0]) for i in (0, -1))
            print(f"photograph {len(results)}: loss of the smooth network's map {begun:.2f} → {ended:.2f}")
            parts = case.maps(done.image, case.target, subspaces)
            for name, maps in (("whole", done.map), ("PRCA-1", parts[:, 0]), ("residual", parts[:, 1])):
                summary(name, maps, done)
            sys.stdout.flush()
    result = Manipulation(
        *(torch.cat([getattr(r, name) for r in results]) for name in Manipulation.__dataclass_fields__)
    )

    before, after = (
        torch.cat([case.maps(part, case.target, subspaces) for part in x.split(8)])
        for x in (case.photos, result.image)
    )
    print("\n| map | error to original | to target | correlation to original | to target |")
    print("|---|---|---|---|---|")
    summary("untouched, whole", result.original_map, result)
    summary("untouched, PRCA-1", before[:, 0], result)
    summary("manipulated, whole", result.map, result)
    summary("manipulated, PRCA-1", after[:, 0], result)
    summary("manipulated, residual of PRCA-1", after[:, 1], result)
    for d in (4, 16):
        larger = PRCA(d).fit(pairs).subspaces_
        parts = torch.cat([case.maps(part, case.target, larger) for part in result.image.split(8)])
        summary(f"manipulated, PRCA-{d}", parts[:, 0], result)
    print("(errors are relative to the mean square of the original map; ± one standard error)\n")

    change = ((result.image - case.photos).abs() / case.span).amax((1, 2, 3))
    probability = [o.softmax(1)[:, case.target].mean() for o in (result.original_output, result.output)]
    totals = [m.sum((1, 2)) for m in (result.original_map, result.map)]
    print(f"largest change of a pixel: {float(change.max()):.3f} of the range")
    print(f"mean probability of the class: {float(probability[0]):.3f} → {float(probability[1]):.3f}")
    print(f"mean total relevance: {float(totals[0].mean()):.3f} → {float(totals[1].mean()):.3f}")
    scores = [manipulation_score(maps, options.pool) for maps in (before, after)]
    for name, values in zip(("untouched", "manipulated"), scores, strict=True):
        print(f"manipulation_score, {name}: {float(values.mean()):.2g} (up to {float(values.max()):.2g})")
    if len(change) > 1:
        above = (scores[1][:, None] > scores[0]).float() + 0.5 * (scores[1][:, None] == scores[0]).float()
        print(f"AUROC of manipulation_score: {float(above.mean()):.2f}")
    known = torch.cat([case.maps(x, case.target, subspaces) for x in case.train[:64].split(8)])
    trusted = manipulation_score(known, options.pool)
    flagged = [int(is_suspicious(values, trusted).sum()) for values in scores]
    print(f"flagged of {len(change)}: {flagged[0]} untouched, {flagged[1]} manipulated images")

    first, second, third = (case.picture(t[0]) for t in (case.photos, result.image, case.others))
    figure = manipulated_map(
        (first, second, third), result.target_map[0], before[0], after[0], max(1, options.pool // 2)
    )
    figure.savefig(options.figure, dpi=80)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
