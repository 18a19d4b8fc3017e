"""Clever Hans on real networks: does a concept carry the watermark of ImageNet's cartons? (section 6.1)

The Hanzi watermark (package `imagenet-w`) is put on photographs. DRSA learns concepts of class 478, carton,
from photographs of which half carry it. On other photographs, each without and with watermark, this prints
how well the concept tells the two apart, how much of its map lies on the watermark, and what becomes of the
network when the concept is taken out, against SpRAy and a retrained last layer. A figure shows all of
foolbox's photographs.

Without folders, crops of scikit-image's photographs are learned from: a demonstration. With folders, of every
three photographs one is learned from, one is for choosing settings (`--choose`), and one is reported on.

    python examples/carton_watermark.py --out carton
    python examples/carton_watermark.py --photos imagenet50 pets/val --cartons cartons [--choose]
    python examples/carton_watermark.py --network examples/keras_resnet50.py:network --weights FILE \\
        --layer layer3 --photos imagenet50 pets/val --cartons cartons
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from carton_measures import Mitigation, clarc_model, retrained_row, stroke_mask, watermark_grid
from drsa_audit import Network, load_network, photo_files
from drsa_core import DRSA, Pairs, RandomSubspaces, Subspaces
from drsa_core.refine import ProjectedModel, excess_relevance
from hanzi_watermark import CARTON, add_hanzi, crops, photos_to_learn_from
from photographs import foolbox_files
from study.backends import relevance_at
from study.clever_hans import SpRAy, auroc, rectified_relevance, roc_curve
from study.plots import roc_curves
from torch import Tensor, nn
from tqdm.auto import tqdm
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor


@dataclass(frozen=True)
class Photographs:
    """What is learned from, with which of them are marked, and what is looked at, without watermark."""

    learn: Tensor
    marked: Tensor
    is_carton: Tensor
    others: Tensor
    n_foolbox: int
    cartons: Tensor


@dataclass(frozen=True)
class Layer:
    """Activations and contexts (N, D, H, W) of images at the layer, and the network's outputs."""

    a: Tensor
    c: Tensor
    output: Tensor

    def relevance(self, subspaces: Subspaces) -> Tensor:
        """R_k at each position, shape (N, K, H, W)."""
        return subspaces.relevance(self.a, self.c)


def thirds(folders: list[Path], part: int, limit: int) -> list[Path]:
    """Every third photograph of each folder, of at most `limit` that lie evenly in it."""
    found = []
    for folder in folders:
        files = photo_files(folder)
        files = files[:: -(-len(files) // limit)]
        if len(files) < 3:
            raise SystemExit(f"{folder} must give three photographs, one for each part, got {len(files)}")
        found += files[part::3]
    return found


def photographs(network: Network, options: argparse.Namespace) -> Photographs:
    """The photographs of a run: of folders, or of packages."""
    if options.photos:
        files = thirds(options.photos, 0, options.limit)
        cartons = thirds([options.cartons], 0, options.limit_cartons) if options.cartons else []
        learn = network.load(files + cartons)
        is_carton = torch.arange(len(learn)) >= len(files)
    else:
        learn = crops(photos_to_learn_from(network), options.crops, options.seed)
        is_carton = torch.zeros(len(learn), dtype=torch.bool)
    part = 1 if options.choose else 2
    # foolbox's photographs are never chosen on.
    foolbox = [] if options.choose else list(foolbox_files())[: options.limit]
    others = network.load(foolbox + thirds(options.photos, part, options.limit))
    folder = [options.cartons] if options.cartons else []
    cartons_left = network.load(thirds(folder, part, options.limit_cartons)) if folder else others[:0]
    marked = torch.arange(len(learn)) % 2 == 0
    learn[marked] = add_hanzi(network, learn[marked])
    return Photographs(learn, marked, is_carton, others, len(foolbox), cartons_left)


def at_layer(attributor: DisentangledAttributor, model: nn.Module, x: Tensor, name: str) -> Layer:
    """One LRP pass for each image."""
    if not len(x):
        return Layer(torch.empty(0), torch.empty(0), torch.empty(0))
    parts = []
    for batch in tqdm(x.split(4), desc=name, unit="batch"):
        a, c = attributor.context(batch, CARTON)
        with torch.no_grad():
            parts.append((a.detach(), c.detach(), model(batch)))
    return Layer(*(torch.cat(values).contiguous() for values in zip(*parts, strict=True)))


def pairs_of(layer: Layer, positions: int, seed: int) -> Pairs:
    """Pairs at random positions of each image."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(layer.a[0, 0].numel(), generator=generator)[:positions] for _ in layer.a]
    a, c = (
        torch.cat([one.flatten(1).T[row] for one, row in zip(values, rows, strict=True)])
        for values in (layer.a, layer.c)
    )
    return Pairs(a, c)


def watermark_concept(relevance: Tensor, marked: Tensor) -> int:
    """The concept that tells the marked images of those learned from, by rectified relevance (Note J.1)."""
    scores = rectified_relevance(relevance)
    return max(range(scores.shape[1]), key=lambda k: auroc(scores[:, k], marked))


def settings(learned: Layer, marked: Tensor, both: Layer, seed: int) -> None:
    """Print AUROC for several K and balance: what settings are chosen by, on photographs of their own."""
    has_mark = torch.arange(len(both.a)) >= len(both.a) // 2
    print("   K  balance  AUROC of the concept")
    pairs = pairs_of(learned, 20, seed)
    for n_concepts in (4, 8):
        for balance in (0.0, 1.0):
            subspaces = DRSA(n_concepts, balance=balance, random_state=seed).fit(pairs).subspaces_
            k = watermark_concept(learned.relevance(subspaces), marked)
            area = auroc(rectified_relevance(both.relevance(subspaces))[:, k], has_mark)
            print(f"  {n_concepts:2d} {balance:8.1f} {area:8.3f}", flush=True)


def detection(
    subspaces: Subspaces,
    concept: int,
    both: Layer,
    learned_maps: Tensor | None,
    maps: Tensor | None,
    options: argparse.Namespace,
) -> None:
    """Print and draw how well scores tell marked photographs; `maps` are whole ones (N, 3, H, W), or None."""
    has_mark = torch.arange(len(both.a)) >= len(both.a) // 2
    curves = {
        f"DRSA S{concept + 1}": rectified_relevance(both.relevance(subspaces))[:, concept],
        "logit of carton": both.output[:, CARTON],
    }
    if learned_maps is not None and maps is not None:
        curves["whole map"] = rectified_relevance(maps[:, None])[:, 0]
        spray = SpRAy(subspaces.n_subspaces, random_state=options.seed).fit(learned_maps)
        distances = spray.distances(maps)
        # As in Note J.1 a cluster may stand for either kind; the best cluster and sign count, in SpRAy's
        # favour.
        signed = torch.cat([distances, -distances], dim=1)
        curves["SpRAy, best cluster"] = max(signed.T, key=lambda score: auroc(score, has_mark))
    print(f"AUROC on {len(both.a) // 2} photographs without and with watermark")
    for name, score in curves.items():
        print(f"  {name:<22} {auroc(score, has_mark):.3f}")
    by_chance = []
    for seed in range(5):
        random = RandomSubspaces(subspaces.n_subspaces, random_state=seed)
        other = random.fit(both.a[:, :, 0, 0], both.c[:, :, 0, 0]).subspaces_
        scores = rectified_relevance(both.relevance(other))
        by_chance += [auroc(score, has_mark) for score in scores.T]
    mean, best = sum(by_chance) / len(by_chance), max(by_chance)
    print(f"  random subspaces       {mean:.3f} on average of {len(by_chance)}, the best {best:.3f}")
    drawn = {name: roc_curve(score, has_mark) for name, score in curves.items()}
    figure = roc_curves(drawn, "which photographs carry the watermark?")
    figure.savefig(options.out / "roc.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="efficientnet_lite0", help="as of drsa (default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="of the network, a .safetensors file")
    parser.add_argument("--layer", default="blocks.4", help="layer to split (default: %(default)s)")
    parser.add_argument("--concepts", type=int, default=8, help="K (default: %(default)s)")
    parser.add_argument("--balance", type=float, default=1.0, help="of DRSA (default: %(default)s)")
    parser.add_argument(
        "--quantile", type=float, default=0.99, help="of `ProjectedModel` (default: %(default)s)"
    )
    parser.add_argument("--photos", type=Path, nargs="+", default=[], help="folders of photographs")
    parser.add_argument("--cartons", type=Path, help="folder of photographs of cartons")
    parser.add_argument(
        "--limit", type=int, default=50, help="photographs of each folder (default: %(default)s)"
    )
    parser.add_argument("--limit-cartons", type=int, default=1000, help="the same for cartons")
    parser.add_argument("--crops", type=int, default=40, help="without folders (default: %(default)s)")
    parser.add_argument("--choose", action="store_true", help="only print AUROC for several settings")
    parser.add_argument("--no-maps", dest="maps", action="store_false", help="leave out what needs heatmaps")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("carton"), help="folder for the figures")
    options = parser.parse_args()
    if options.choose and not options.photos:
        parser.error("--choose needs --photos: those of packages are reported on")
    if min(options.limit, options.limit_cartons) < 1:
        parser.error("--limit and --limit-cartons must be at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()

    network = load_network(options.network, options.weights)
    model, data = network.model, photographs(network, options)
    gradient = Gradient(model, network.composite(options.layer))
    attributor = DisentangledAttributor(gradient, options.layer)
    print(
        f"{len(data.learn)} photographs to learn from, {int(data.is_carton.sum())} of them cartons, half "
        f"with watermark; {len(data.others)} to look at, and {len(data.cartons)} cartons"
    )
    n = len(data.others)
    both_x = torch.cat([data.others, add_hanzi(network, data.others)])
    learned = at_layer(attributor, model, data.learn, "to learn from")
    both = at_layer(attributor, model, both_x, "to look at")
    if options.choose:
        settings(learned, data.marked, both, options.seed)
        return

    solver = DRSA(options.concepts, balance=options.balance, random_state=options.seed)
    subspaces = solver.fit(pairs_of(learned, 20, options.seed)).subspaces_
    relevance = learned.relevance(subspaces)
    concept = watermark_concept(relevance, data.marked)
    print(f"concept of the watermark, chosen on the photographs learned from: S{concept + 1}")
    learned_maps = maps = None
    if options.maps:

        def whole_maps(x: Tensor, name: str) -> Tensor:
            batches = tqdm(x.split(8), desc=name, unit="batch")
            return torch.cat([gradient(part, relevance_at(CARTON))[1].detach() for part in batches])

        learned_maps, maps = whole_maps(data.learn, "maps, learned"), whole_maps(both_x, "maps")
    detection(subspaces, concept, both, learned_maps, maps, options)
    if maps is not None:
        one = DisentangledAttributor(gradient, options.layer, subspaces.select([concept]), residual=True)
        split = tqdm(both_x[n:].split(4), desc="concept maps", unit="batch")
        parts = torch.cat([one(part, relevance_at(CARTON))[1].detach().sum(2) for part in split])
        watermark_grid(
            network,
            both_x[n:],
            maps[n:].sum(1),
            parts,
            stroke_mask(network),
            data.n_foolbox,
            options.out / "grid.png",
        )

    # Taking the concept out. References are the photographs without watermark, cartons left out.
    cartons = at_layer(attributor, model, data.cartons, "cartons")
    references = ~data.marked & ~data.is_carton
    mitigation = Mitigation(both.output, cartons.output)
    mitigation.row("original", both.output, cartons.output)
    totals = relevance.sum((2, 3))[:, [concept]]
    groups = {"E over all": totals.mean(0), "E over those without watermark": totals[~data.marked].mean(0)}
    for name, usual in groups.items():
        changed = []
        for layer in (both, cartons):
            output = layer.output.clone()
            if len(output):
                excess = excess_relevance(layer.relevance(subspaces).sum((2, 3))[:, [concept]], usual)
                output[:, CARTON] -= excess[:, 0]
            changed.append(output)
        mitigation.row(f"f − max(0, R − E[R]), {name}", *changed)

    def run(candidate: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            images = (both_x, data.cartons)
            return [
                torch.cat([candidate(part) for part in x.split(16)]) if len(x) else x.flatten(1)
                for x in images
            ]

    context = learned.c.mean((0, 2, 3))
    reference = learned.a[references].movedim(1, -1).flatten(0, 2)
    for name, quantile in (("gated", options.quantile), ("everywhere", 0.0)):
        projected = ProjectedModel(
            model, options.layer, subspaces, [concept], context, reference, quantile=quantile
        )
        mitigation.row(f"projection of S{concept + 1}, {name}", *run(projected))
        if name == "gated":
            gated = projected
    if learned_maps is not None:
        for name, quantile in (("everywhere", 0.0), ("gated", options.quantile)):
            clarc = clarc_model(
                model, options.layer, learned.a, learned_maps, data.marked, reference, quantile, options
            )
            mitigation.row(f"SpRAy + projection, {name}", *run(clarc))
    if data.is_carton.any():
        images = torch.cat([data.learn, both_x, data.cartons])
        sizes = [len(data.learn), len(both_x), len(data.cartons)]
        mitigation.row("retrained row of carton", *retrained_row(model, images, sizes, data.is_carton))
    if options.cartons:
        every = network.load(photo_files(options.cartons))
        with torch.no_grad():
            called = [
                int(sum((candidate(part).argmax(1) == CARTON).sum() for part in every.split(16)))
                for candidate in (model, gated)
            ]
        print(
            f"of all {len(every)} cartons, also those learned from, {called[0]} are called so by the network "
            f"as it is, {called[1]} after the gated projection"
        )
    shift = both.output[n:, CARTON] - both.output[:n, CARTON]
    in_relevance = both.relevance(subspaces).sum((2, 3))[:, concept]
    print(
        f"the watermark adds {float(shift.mean()):.2f} to the logit of carton and "
        f"{float((in_relevance[n:] - in_relevance[:n]).mean()):.2f} to R of the concept (means)"
    )
    print(f"done after {time.perf_counter() - begin:.0f} s, figures in {options.out}")


if __name__ == "__main__":
    main()
