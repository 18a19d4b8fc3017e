"""Manipulated explanations: an image whose LRP map turns into another one, and what PRCA still sees in it.

EfficientNet-Lite0 with real weights. Photographs of one class are perturbed, hardly visibly, until their
LRP map resembles the map of another photograph while the output stays (section 6.3 and Note J.3 of the
paper). PRCA then splits the manipulated map into the class's most relevant direction and the residual.
Everything comes with packages: crops of scikit-image's cat, target photographs from foolbox; or give
folders of photographs of your own.

    python examples/manipulation.py --figure manipulation.png
    python examples/manipulation.py --train data/train/281_tabby --photos data/val/281_tabby --count 8
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import foolbox
import torch
from drsa_core import PRCA, Subspaces
from drsa_core.double_backward import constant_weights
from drsa_core.manipulation import Manipulation, manipulate, manipulation_score, map_errors
from drsa_core.plot import manipulated_map
from efficientnet_lite0 import HIGH, LOW, composite_for, load_model, load_photo
from quickstart import cat
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.core import Composite

from zennit_drsa import DisentangledAttributor, collect


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
        relevance = output * nn.functional.one_hot(torch.tensor(self.target), output.shape[1])
        (result,) = torch.autograd.grad(output, x, relevance, create_graph=True)
        for hook in self.composite.hook_refs:
            hook.active = False
        return output, result.sum(1)


def one_hot_output(target: int) -> Callable[[Tensor], Tensor]:
    """Relevance of one output, as Zennit's attributors take it."""
    return lambda output: output * nn.functional.one_hot(torch.tensor(target), output.shape[1])


def decompose(model: nn.Module, x: Tensor, target: int, layer: str, subspaces: Subspaces) -> Tensor:
    """Maps of the PRCA subspace and of the residual, shape (N, 2, H, W)."""
    attributor = DisentangledAttributor(Gradient(model, composite_for(x[:1])), layer, subspaces)
    with attributor:
        return attributor(x, one_hot_output(target))[1].detach().sum(2)


def whole_map(model: nn.Module, x: Tensor) -> Tensor:
    """LRP map of the predicted class of one image, shape (H, W)."""
    gradient = Gradient(model, composite_for(x))
    with gradient, torch.no_grad():
        target = int(model(x).argmax())
    with gradient:
        return gradient(x, one_hot_output(target))[1].detach().sum(1)[0]


def pictures(folder: Path) -> list[Path]:
    """Photographs in a folder, in order."""
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in {".jpg", ".jpeg", ".png"})


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
    parser.add_argument("--count", type=int, default=4, help="images to manipulate (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=60, help="steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.004, help="step size (default: %(default)s)")
    parser.add_argument(
        "--max-change", type=float, default=16 / 255, help="of a value in 0…1 (default: 16/255)"
    )
    parser.add_argument("--size", type=int, default=160, help="height and width (default: %(default)s)")
    parser.add_argument("--layer", default="blocks.4", help="layer of PRCA (default: %(default)s)")
    parser.add_argument("--crops", type=int, default=24, help="crops to learn from (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("manipulation.png"), help="default: %(default)s")
    options = parser.parse_args()
    if bool(options.train) != bool(options.photos):
        parser.error("--train and --photos belong together")

    model, size = load_model().requires_grad_(False), options.size
    if options.train:
        train = torch.stack([load_photo(file, size) for file in pictures(options.train)])
        photos = torch.stack([load_photo(file, size) for file in pictures(options.photos)])
    else:
        crops = cat(options.crops + 2 * options.count)[1]
        crops = nn.functional.interpolate(crops, (size, size), mode="area")
        train, photos = crops[: options.crops], crops[options.crops :]
    with torch.no_grad():
        train_labels, labels = model(train).argmax(1), model(photos).argmax(1)
    target = int(train_labels.mode().values)
    photos = photos[labels == target][: options.count]
    if not len(photos):
        parser.error(f"none of the photographs is predicted as class {target}")
    folder = options.targets or Path(foolbox.__file__).parent / "data"
    files = [f for f in pictures(folder) if options.targets or f.name.startswith("imagenet")]
    others = torch.stack([load_photo(file, size) for file in files[: len(photos)]])
    print(f"class {target}: {len(train)} images to learn from, {len(photos)} to manipulate, of {size} pixels")

    a, c = collect(model, composite_for(train[:1]), options.layer, train.split(4), target, random_state=0)
    prca = PRCA(1).fit(a, c)
    results = []
    for i in range(len(photos)):
        goal = whole_map(model, others[i : i + 1])[None]
        with DifferentiableMap(model, composite_for(photos[:1]), target) as explain:
            x = photos[i : i + 1]
            done = manipulate(
                model,
                explain,
                x,
                goal,
                n_iter=options.iterations,
                lr=options.lr,
                bounds=(LOW, HIGH),
                max_change=options.max_change * 2,
            )
        results.append(done)
    result = Manipulation(
        *(torch.cat([getattr(r, name) for r in results]) for name in Manipulation.__dataclass_fields__)
    )

    before = decompose(model, photos, target, options.layer, prca.subspaces_)
    after = decompose(model, result.image, target, options.layer, prca.subspaces_)
    print("\n| map | error to original | to target | correlation to original | to target |")
    print("|---|---|---|---|---|")
    summary("manipulated, whole", result.map, result)
    summary("manipulated, PRCA-1", after[:, 0], result)
    for d in (4, 16):
        subspaces = PRCA(d).fit(a, c).subspaces_
        part = decompose(model, result.image, target, options.layer, subspaces)[:, 0]
        summary(f"manipulated, PRCA-{d}", part, result)
    summary("manipulated, residual of PRCA-1", after[:, 1], result)
    summary("untouched, PRCA-1", before[:, 0], result)
    summary("untouched, whole", result.original_map, result)
    print("(errors are relative to the mean square of the original map; ± one standard error)")

    change = (result.image - photos).abs().amax((1, 2, 3)) / 2
    probability = [o.softmax(1)[:, target] for o in (result.original_output, result.output)]
    print(f"\nlargest change of a pixel: {float(change.max()):.3f} of the range")
    changes = ", ".join(f"{p:.2f} → {q:.2f}" for p, q in zip(*probability, strict=True))
    print(f"probability of the class: {changes}")
    totals = [m.sum((1, 2)) for m in (result.original_map, result.map)]
    print("total relevance:", ", ".join(f"{p:.3f} → {q:.3f}" for p, q in zip(*totals, strict=True)))
    scores = [manipulation_score(maps) for maps in (before, after)]
    for name, values in zip(("untouched", "manipulated"), scores, strict=True):
        print(f"manipulation_score, {name}:", ", ".join(f"{s:.2f}" for s in values))
    wins = (scores[1][:, None] > scores[0][None]).float().mean()
    print(f"AUROC of manipulation_score: {float(wins):.2f}")

    first, second, third = ((t[0] * 128 + 127) / 255 for t in (photos, result.image, others))
    figure = manipulated_map((first, second, third), result.target_map[0], before[0], after[0], pool=4)
    figure.savefig(options.figure, dpi=80)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
