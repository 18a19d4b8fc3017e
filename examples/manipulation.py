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

With several folders of --train and of --photos, one for each class, every class gets a PRCA of its own, and
the targets are photographs of the other classes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import known_concepts
import torch
from drsa_audit import Network, load_network, photo_files
from drsa_core import PRCA, Subspaces
from drsa_core.targets import gradient_at_output
from manipulation_measures import Outcome, report, summary
from photographs import foolbox_files, package_photos, random_crops
from study.backends import relevance_at, with_upper_gamma
from study.double_backward import constant_weights
from study.manipulation import Manipulation, manipulate, manipulation_score
from study.plots import manipulated_map
from study.synthetic import PlantedConcepts
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
    """A network with images of one class, to learn from and to manipulate, and others for target maps.

    `other(n)`, of shape (1, C, H, W), is the n-th image whose map may be a target; after the last one they
    begin anew.
    """

    model: nn.Module
    composite: Callable[[], Composite]
    layer: str
    target: int
    train: Tensor
    photos: Tensor
    other: Callable[[int], Tensor]
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
        return torch.cat([attributor.explain(part, target, whole=False).maps.sum(2) for part in x.split(8)])

    def targets(self) -> tuple[Tensor, Tensor]:
        """For each photograph another image and its map: the next one whose total has the same sign.

        A map whose total is of the other sign cannot be scaled to the photograph's. There are such maps, as
        biases keep relevance.
        """
        images, maps, n = [], [], 0
        for x in self.photos.split(1):
            total = float(self.maps(x, self.target).sum())
            for _ in range(100):
                image, n = self.other(n), n + 1
                with torch.no_grad():
                    label = int(self.model(image).argmax(1))
                map = self.maps(image, label)
                if float(map.sum()) * total > 0:
                    break
            else:
                raise SystemExit("no target map among 100 has a total of the photograph's sign")
            images.append(image)
            maps.append(map)
        print(f"targets for {len(images)} images, {n - len(images)} left out for the sign of their total")
        return torch.cat(images), torch.cat(maps)


def photographs(options: argparse.Namespace) -> Iterator[Case]:
    """A network for photographs, with one case for each class."""
    name = "efficientnet_lite0" if options.network == "lite0" else options.network
    network, size = load_network(name, options.weights), options.size
    model = network.model.requires_grad_(False)
    low, high = (network.preprocessing.to_inputs(torch.full((1, 3, 1, 1), v))[0] for v in (0.0, 1.0))
    bounds = low.clone(), high.clone()
    layer = network.layer_or(options.layer)
    if options.upper_gamma is not None:
        network = with_upper_gamma(network, layer, options.upper_gamma)
    cat = package_photos()["cat"]()
    for number in range(len(options.train or [None])):
        if options.train:
            train = network.load(photo_files(options.train[number]), size)
        else:
            crops = random_crops(cat, options.crops)
            train = torch.stack([network.to_input(crop, size) for crop in crops])
        if options.photos:
            photos = network.load(photo_files(options.photos[number]), size)
        else:  # the photograph itself, and crops that are not learned from
            crops = [cat, *random_crops(cat, options.crops + 20)[options.crops :]]
            photos = torch.stack([network.to_input(crop, size) for crop in crops])
        with torch.no_grad():
            target = int(model(train).argmax(1).mode().values)
            photos = photos[model(photos).argmax(1) == target][: options.count]
        if not len(photos):
            raise SystemExit(f"none of the photographs is predicted as class {target}")
        files = _target_files(options, number)
        yield Case(
            model,
            lambda: network.composite(None),
            layer,
            target,
            train,
            photos,
            partial(_loaded, network, files, size),
            bounds,
        )


def _loaded(network: Network, files: list[Path], size: int, n: int) -> Tensor:
    return network.load([files[n % len(files)]], size)


def _target_files(options: argparse.Namespace, number: int) -> list[Path]:
    """Photographs whose maps may be targets for class `number`, in random order if they are of classes."""
    if options.targets:
        return [file for folder in options.targets for file in photo_files(folder)]
    others = [folder for folder in options.photos or () if folder != options.photos[number]]
    files = [file for folder in others for file in photo_files(folder)]
    random.Random(options.seed).shuffle(files)
    return files or list(foolbox_files())


def planted(options: argparse.Namespace) -> Iterator[Case]:
    """The network of planted concepts; targets are scenes of the class that shares the fewest patterns."""
    task = PlantedConcepts()
    model, accuracy = known_concepts.train(task, options.seed, "mean", options.steps)
    print(f"accuracy of the network: {accuracy:.3f}")
    generator = torch.Generator().manual_seed(1000 + options.seed)
    train, photos = (task.sample(n, generator, label=0).images for n in (200, options.count))
    others = task.sample(options.count, generator, label=len(task.classes) - 1).images
    layer = options.layer or known_concepts.LAYER
    bounds = -torch.ones(1, 1, 1), torch.ones(1, 1, 1)
    yield Case(
        model,
        known_concepts.composite,
        layer,
        0,
        train,
        photos,
        lambda n: others[n % len(others)][None],
        bounds,
    )


def manipulated(case: Case, options: argparse.Namespace) -> Outcome:
    """Manipulate the photographs of a case, and split their maps by PRCA."""
    print(f"class {case.target}: {len(case.train)} images to learn from, {len(case.photos)} to manipulate")
    attributor = DisentangledAttributor(Gradient(case.model, case.composite()), case.layer)
    pairs = attributor.collect(
        case.train.split(8), case.target, positions=options.positions, random_state=options.seed
    )
    subspaces = PRCA(1).fit(pairs).subspaces_
    others, goals = case.targets()
    results = []
    for x, goal in zip(case.photos.split(options.batch), goals.split(options.batch), strict=True):
        with DifferentiableMap(case.model, case.composite(), case.target) as explain:
            done = manipulate(
                case.model,
                explain,
                x,
                goal,
                n_iter=options.iterations,
                lr=options.lr,
                betas=options.betas and (options.betas[0], options.betas[1]),
                bounds=case.bounds,
                max_change=options.max_change * case.span,
            )
        results.append(done)
        if len(x) < len(case.photos):  # a run that is cut short has said something
            parts = case.maps(done.image, case.target, subspaces)
            for name, maps in (("whole", done.map), ("PRCA-1", parts[:, 0]), ("residual", parts[:, 1])):
                summary(name, maps, [done])
            sys.stdout.flush()
    result = Manipulation(
        *(torch.cat([getattr(r, name) for r in results]) for name in Manipulation.__dataclass_fields__)
    )
    larger = {d: PRCA(d).fit(pairs).subspaces_ for d in (4, 16)}
    return Outcome(
        case.target,
        case.photos,
        others,
        case.span,
        result,
        case.maps(case.photos, case.target, subspaces),
        case.maps(result.image, case.target, subspaces),
        {d: case.maps(result.image, case.target, larger[d])[:, :1] for d in larger},
        manipulation_score(case.maps(case.train[:64], case.target, subspaces), options.pool),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--train", type=Path, nargs="+", help="photographs to learn PRCA from, a folder for each class"
    )
    parser.add_argument("--photos", type=Path, nargs="+", help="photographs of these classes, to manipulate")
    parser.add_argument("--targets", type=Path, nargs="+", help="photographs whose maps are the targets")
    parser.add_argument(
        "--count", type=int, default=1, help="images of a class to manipulate (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, help="images at once (default: 1, with `planted` 64)")
    parser.add_argument("--iterations", type=int, default=40, help="steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.004, help="step size (default: %(default)s)")
    parser.add_argument(
        "--betas",
        type=float,
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="of softplus in the place of ReLU, such as 10 100 (default: the network as it is)",
    )
    parser.add_argument(
        "--max-change", type=float, default=16 / 255, help="of a value in 0…1 (default: 16/255)"
    )
    parser.add_argument("--size", type=int, default=160, help="height and width (default: %(default)s)")
    parser.add_argument("--layer", help="layer of PRCA (default: blocks.4, or stage3 of `planted`)")
    parser.add_argument(
        "--positions", type=int, default=20, help="of an image, to learn from (default: %(default)s)"
    )
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
    parser.add_argument("--seed", type=int, default=0, help="of positions, targets and `planted`")
    options = parser.parse_args()
    if options.photos and len(options.train or ()) != len(options.photos):
        parser.error("--photos needs as many folders of --train, one for each class")
    if len(options.train or ()) > 1 and not options.photos:
        parser.error("--train of several classes needs --photos of them")
    of_photographs = ("train", "photos", "targets", "weights", "upper_gamma")
    ignored = [name for name in of_photographs if getattr(options, name) is not None]
    if options.network == "planted" and ignored:
        option = ignored[0].replace("_", "-")
        parser.error(f"--network planted has its own images and rules, without --{option}")
    if options.batch is None:
        # A batch of second derivatives of a network for photographs takes gigabytes.
        options.batch = 64 if options.network == "planted" else 1
    cases = planted(options) if options.network == "planted" else photographs(options)
    first = next(cases)
    outcomes = [manipulated(first, options), *(manipulated(case, options) for case in cases)]
    report(outcomes, options.pool)

    shown = outcomes[0]
    photo, image, other = (first.picture(x[0]) for x in (shown.photos, shown.result.image, shown.others))
    figure = manipulated_map(
        (photo, image, other),
        shown.result.target_map[0],
        shown.before[0],
        shown.after[0],
        max(1, options.pool // 2),
    )
    figure.savefig(options.figure, dpi=80)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
