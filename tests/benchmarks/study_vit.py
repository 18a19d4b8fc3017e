"""Patch flipping of LRP and concept maps on a real ViT: which γ and reading of attention, and against what.

Stages: `tune` tries γ and both readings on training photographs; `one` compares maps of whole methods on
validation photographs; `concepts` compares subspaces at a block there; `table` prints what there is. Each
photograph has a file of results in OUT, and what is there is not computed again. Photographs take turns
over the classes, the first of each class first, so that a run that is cut short is no selection.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from captum.attr import InputXGradient, IntegratedGradients
from drsa_audit import load_network
from drsa_core import DRSA, DSA, PCA, PRCA, MaxRel, Pairs, RandomSubspaces, Solver, Subspaces, learn_subspaces
from drsa_core.evaluation import class_means, patch_flipping, summarise
from PIL import Image
from study.classes import ClassFolder, class_folders
from torch import Tensor, nn
from torchvision import transforms
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor, TransformerGamma, collect

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
READINGS = ("constant", "attnlrp")
GAMMAS = (0.0, 0.01, 0.05, 0.1, 0.25)
PATCH = 14  # that of the network: 16 × 16 patches
SCHEDULE = (6, 26, 64, 128, 256)  # 2 %, 10 %, 25 %, 50 % and all of the 256 patches
POSITIONS = 50
TO_INPUT = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)


@dataclass(frozen=True)
class Photo:
    """A photograph: its file, its class's folder, its rank in that folder and the output of its class."""

    file: Path
    folder: str
    rank: int
    output: int

    def load(self) -> Tensor:
        """The network's input, shape (1, 3, 224, 224)."""
        with Image.open(self.file) as image:
            return TO_INPUT(image.convert("RGB"))[None]


class Study:
    """The network, the photographs and the folder of results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        network = load_network(str(options.weights))
        self.model: Any = network.model  # timm's attributes are not declared
        self.output_of = network.output_of
        self._remembered: dict[str, Tensor] = {}

    def photos(self, part: str, n_photos: int) -> list[Photo]:
        """The first photographs of each class, by turns."""
        folders: list[ClassFolder] = class_folders(self.options.pets / part)
        return [
            Photo(folder.files[rank], folder.name, rank, self.output_of(folder.index))
            for rank in range(n_photos)
            for folder in folders
            if rank < len(folder.files)
        ]

    def run(
        self, stage: str, photos: Sequence[Photo], methods: Mapping[str, Callable[[Photo], Tensor]]
    ) -> None:
        """Evaluate the maps of each method on each photograph."""
        for photo in photos:
            file = self.options.out / stage / f"{photo.folder}-{photo.file.stem}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            results = json.loads(file.read_text()) if file.exists() else {}
            x = photo.load()
            for name, explain in methods.items():
                if name not in results:
                    begin = time.process_time()
                    maps = explain(photo)
                    between = time.process_time()
                    results[name] = self._flip(x, maps, photo.output)
                    results[name]["seconds"] = [between - begin, time.process_time() - between]
                    file.write_text(json.dumps(results, indent=1))
            shown = ", ".join(f"{name} {results[name]['aupc']:.2f}" for name in methods)
            print(f"{time.strftime('%H:%M:%S')} {stage} {file.stem}: {shown}", flush=True)

    def _flip(self, x: Tensor, maps: Tensor, output: int) -> dict[str, Any]:
        curves = patch_flipping(
            self._outputs, x, maps, output, (MEAN, STD), patch_size=PATCH, schedule=SCHEDULE
        )
        return {"aupc": float(curves.aupc), "scores": curves.scores[0].tolist()}

    def _outputs(self, x: Tensor) -> Tensor:
        """The model, which is not run again on the whole and on the empty image."""
        keys = [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest() for image in x]
        new = [i for i, key in enumerate(keys) if key not in self._remembered]
        if new:
            for i, output in zip(new, self.model(x[new]), strict=True):
                self._remembered[keys[i]] = output
        return torch.stack([self._remembered[key] for key in keys])

    # ------------------------------------------------------------------ one map

    def lrp(self, gamma: float, reading: str) -> Callable[[Photo], Tensor]:
        """Maps by LRP."""
        composite = TransformerGamma(gamma, reading)

        def explain(photo: Photo) -> Tensor:
            with Gradient(self.model, composite) as attributor:
                return attributor(photo.load(), _start(photo.output))[1]

        return explain

    def captum(self, method: Any, **keywords: Any) -> Callable[[Photo], Tensor]:
        """Maps by a method of Captum."""
        return lambda photo: (
            method(self.model).attribute(photo.load(), target=photo.output, **keywords).float()
        )

    # ------------------------------------------------------------------ concepts

    def concepts(self) -> dict[str, Callable[[Photo], Tensor]]:
        """Maps of subspaces that were learned from training photographs of the photograph's class."""
        options = self.options
        composite = TransformerGamma(options.gamma, options.reading, layer=options.layer)
        attributor = DisentangledAttributor(Gradient(self.model, composite), options.layer, channel_dim=-1)

        def maps_of(subspaces_of: Callable[[Photo], Subspaces]) -> Callable[[Photo], Tensor]:
            def explain(photo: Photo) -> Tensor:
                attributor.subspaces = subspaces_of(photo)
                with attributor:
                    return attributor(photo.load(), _start(photo.output))[1]

            return explain

        def first(name: str, solver: Solver) -> Callable[[Photo], Subspaces]:
            def subspaces_of(photo: Photo) -> Subspaces:
                return self._fitted(photo, name, solver).select([0])

            return subspaces_of

        def drawn(photo: Photo, **keywords: Any) -> Subspaces:  # others for each photograph
            solver = RandomSubspaces(random_state=photo.rank, **keywords)
            return solver.fit(torch.zeros(2, self.model.embed_dim)).subspaces_

        return {
            "PRCA d=1": maps_of(first("prca", PRCA(1))),
            "PCA d=1": maps_of(first("pca", PCA(1))),
            "Max-Rel d=1": maps_of(first("max_rel", MaxRel(1))),
            "random d=1": maps_of(lambda photo: drawn(photo, dims=[1])),
            "DRSA K=4": maps_of(lambda photo: self._fitted(photo, "drsa", DRSA(4, random_state=0))),
            "DRSA balance=1 K=4": maps_of(
                lambda photo: self._fitted(photo, "drsa_balanced", DRSA(4, balance=1.0, random_state=0))
            ),
            "DSA K=4": maps_of(lambda photo: self._fitted(photo, "dsa", DSA(4, random_state=0))),
            "random K=4": maps_of(lambda photo: drawn(photo, n_subspaces=4)),
        }

    def _fitted(self, photo: Photo, name: str, solver: Solver) -> Subspaces:
        options = self.options
        folder = options.out / "subspaces" / f"{options.layer}-{options.reading}" / photo.folder
        file = folder / f"{name}.safetensors"
        if not file.exists():
            begin = time.process_time()
            learn_subspaces(solver, self._pairs(photo, folder / "pairs.safetensors")).save(file)
            print(f"{photo.folder}: {name} learned in {time.process_time() - begin:.0f} s", flush=True)
        return Subspaces.load(file)

    def _pairs(self, photo: Photo, file: Path) -> Pairs:
        options = self.options
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            photos = [p for p in self.photos("train", options.n_pairs) if p.folder == photo.folder]
            composite = TransformerGamma(
                0.0, options.reading
            )  # what is below the layer has no say in contexts
            collect(
                self.model,
                composite,
                options.layer,
                (p.load() for p in photos),
                photo.output,
                POSITIONS,
                channel_dim=-1,
                random_state=0,
                skip_tokens=self.model.num_prefix_tokens,
            ).with_provenance(None).save(file)
        return Pairs.load(file)


def print_tables(out: Path, reference: str | None) -> None:
    """Mean AUPC of all stages, over the photographs that all methods of a stage have."""
    for stage in ("tune", "one", "concepts"):
        found = {file.stem: json.loads(file.read_text()) for file in sorted((out / stage).glob("*.json"))}
        for line in _table(stage, found, reference):
            print(line)


def _table(stage: str, found: Mapping[str, Mapping[str, Any]], reference: str | None) -> Iterator[str]:
    if not found:
        return
    methods = max((list(of_photo) for of_photo in found.values()), key=len)
    complete = {name: r for name, r in found.items() if all(m in r for m in methods)}
    classes = [name.rpartition("-")[0] for name in complete]
    yield f"\n{stage}: {len(complete)} photographs of {len(set(classes))} classes\n"
    against = reference if reference in methods else methods[0]
    yield f"| maps | AUPC | minus {against} | " + " | ".join(sorted(set(classes))) + " |"
    yield "|---" * (3 + len(set(classes))) + "|"
    values = {m: [r[m]["aupc"] for r in complete.values()] for m in methods}
    for method in methods:
        mine = values[method]
        gaps = [a - b for a, b in zip(mine, values[against], strict=True)]
        means = class_means(mine, classes)
        cells = [
            str(summarise(mine, classes)),
            str(summarise(gaps, classes)),
            *(f"{means[name]:.2f}" for name in sorted(means)),
        ]
        yield f"| {method} | " + " | ".join(cells) + " |"


def name_of_ig(steps: int) -> str:
    """Ten steps are the default, and have no number in their name."""
    return "IG" if steps == 10 else f"IG {steps} steps"


def _start(output: int) -> Callable[[Tensor], Tensor]:
    """Relevance at the outputs: that of the class, as it is."""

    def start(logits: Tensor) -> Tensor:
        return logits.detach() * nn.functional.one_hot(torch.tensor([output]), logits.shape[1])

    return start


def _noise(photo: Photo) -> Tensor:
    seed = 1000 * photo.output + photo.rank
    return torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("stage", choices=("tune", "one", "concepts", "table"))
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument(
        "--weights",
        type=Path,
        default=DATA / "weights" / "vit_small_pets.safetensors",
        help="a ViT with patches of 14 pixels at 224",
    )
    parser.add_argument("--pets", type=Path, default=DATA / "pets", help="folder with train and val")
    parser.add_argument("--photos", type=int, default=20, help="per class")
    parser.add_argument("--first", type=int, default=0, help="rank in its class of the first photograph")
    parser.add_argument("--gamma", type=float, default=0.05, help="γ that `tune` chose")
    parser.add_argument("--reading", choices=READINGS, default="attnlrp", help="of attention, for `concepts`")
    parser.add_argument("--ig-steps", type=int, default=10, help="steps of Integrated Gradients, for `one`")
    parser.add_argument("--reference", help="maps that others are compared with, for `table`; the first ones")
    parser.add_argument("--layer", default="blocks.5", help="for `concepts`")
    parser.add_argument(
        "--n-pairs", type=int, default=20, help="training photographs per class to learn from"
    )
    options = parser.parse_args()
    if options.stage == "table":
        print_tables(options.out, options.reference)
        return
    torch.set_num_threads(1)
    study = Study(options)
    part = "train" if options.stage == "tune" else "val"
    photos = [p for p in study.photos(part, options.photos) if p.rank >= options.first]
    if options.stage == "tune":
        settings = [(reading, gamma) for gamma in GAMMAS for reading in READINGS]
        study.run("tune", photos, {f"{r} γ={g:g}": study.lrp(g, r) for r, g in settings})
    elif options.stage == "one":
        settings = [(reading, g) for g in sorted({0.0, options.gamma}) for reading in READINGS]
        methods: dict[str, Callable[[Photo], Tensor]] = {
            name_of_ig(options.ig_steps): study.captum(IntegratedGradients, n_steps=options.ig_steps),
            "Gradient×Input": study.captum(InputXGradient),
            "random": _noise,
        }
        study.run("one", photos, {f"{r} γ={g:g}": study.lrp(g, r) for r, g in settings} | methods)
    else:
        study.run("concepts", photos, study.concepts())


if __name__ == "__main__":
    main()
