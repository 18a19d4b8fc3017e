"""The steps from files to what a report shows: pairs, concepts, maps, relevance, patch flipping, ablation.

Each keeps its results in the work folder of the session, batch by batch, and goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drsa_core import (
    DRSA,
    DSA,
    PCA,
    Explanation,
    Pairs,
    PairStore,
    RandomSubspaces,
    Stability,
    Subspaces,
    choose_k,
    learn_subspaces,
    stability,
)
from drsa_core.evaluation import concept_ablation, patch_flipping
from drsa_core.storage import read_json, write_json, write_tensors
from torch import Tensor

from .progress import BadInput
from .results import KIND, Explained
from .session import Session, metadata_of, to_inputs
from .settings import FitSettings
from .work import Work
from .wrappers import SeededBatches, entries_of_patch, options_of, repeatable

AUTO = "auto"
#: Numbers of concepts that "auto" tries.
TRIED = range(2, 17)
#: Images that a test of stability needs at least.
FEWEST_IMAGES = 5
#: Other ways to find as many subspaces, which a good one should surpass.
OTHERS: dict[str, Callable[[int, int, Pairs], Subspaces]] = {
    "DSA": lambda k, seed, pairs: DSA(k, random_state=seed).fit(pairs).subspaces_,
    # `PCA(k)` is one subspace of k dimensions, and the rest: the k first components are k subspaces.
    "PCA": lambda k, seed, pairs: Subspaces(PCA().fit(pairs).basis_[:, :k], [1] * k),
    "random": lambda k, seed, pairs: RandomSubspaces(k, random_state=seed).fit(pairs).subspaces_,
}


@dataclass(frozen=True)
class Learned:
    """The concepts, and what is known of them, as JSON."""

    subspaces: Subspaces
    history: list[float]  # objective along the fit
    # `index`, `is_stable`, `beats_chance`, `threshold`, `null_mean`; None if it was not tested.
    stability: dict[str, Any] | None = None
    # Why there are so many; None if the user said how many.
    choice: dict[str, Any] | None = None


def collect(session: Session, work: Work, inputs: Tensor, positions: int, key: dict[str, Any]) -> Pairs:
    """Pairs (a, c) at random positions of each image; batches that are in the folder are not done again."""
    settings, folder = session.settings, work.place("pairs", key)
    batches = SeededBatches(list(inputs.split(settings.batch_size)), settings.seed)
    notes = work.place("pairs", key, ".notes.json")
    what = f"Collecting pairs from {len(inputs)} images"
    with (
        session.step("pairs", what, session.seconds(len(inputs)), notes),
        repeatable(settings.seed),
    ):
        return session.wrapper().collect(
            batches,
            session.target.output,
            positions,
            settings.seed,
            store=PairStore(folder),
            skip_tokens=session.layer.n_prefix,
        )


def learn(session: Session, work: Work, pairs: Pairs, settings: FitSettings, key: dict[str, Any]) -> Learned:
    """The concepts of the class: learned once, and then read."""
    file, about = work.place("learned", key, ".safetensors"), work.place("learned", key, ".json")
    what = f"Learning concepts from {len(pairs)} pairs"
    with session.step("concepts", what, notes=work.place("learned", key, ".notes.json")):
        if not (file.exists() and about.exists()):
            found = _learn(session, pairs, settings)
            named = metadata_of(session.network, session.target, settings.model_name)
            found.subspaces.with_metadata(**named).save(file)
            known = {"history": found.history, "stability": found.stability, "choice": found.choice}
            write_json(about, known)
        return Learned(Subspaces.load(file), **read_json(about))


def explain(
    session: Session, work: Work, files: list[Path], subspaces: Subspaces, name: str, key: dict[str, Any]
) -> Explained:
    """Concept maps of images, batch by batch into a folder of the work folder."""
    inputs, pixels, names = session.read(files)
    folder, size = work.place(name, key), session.settings.batch_size
    folder.mkdir(parents=True, exist_ok=True)
    seconds = session.seconds(len(inputs), subspaces.n_subspaces)
    what = f"Explaining {len(inputs)} images"
    with session.step("maps", what, seconds, work.place(name, key, ".notes.json")):
        session.check_use(subspaces)  # maps that lie here already were made by force, perhaps
        for start in session.progress.bar(range(0, len(inputs), size), "batch"):
            file, part = folder / f"{start:06d}.safetensors", slice(start, start + size)
            if not file.exists():
                found = explain_batch(session, inputs[part], subspaces)
                tensors = _as_tensors(session, inputs[part], pixels[part], found)
                header = {"names": names[part], "certificate": found.certificate().as_dict()}
                write_tensors(file, tensors, *KIND, header)
    return Explained.load(folder, len(inputs))


def explain_batch(session: Session, inputs: Tensor, subspaces: Subspaces) -> Explanation:
    """The explanation of a batch of inputs."""
    options = options_of(session.method, inputs, session.settings.samples)
    with repeatable():
        return session.wrapper(subspaces).explain(_leaf(session, inputs), session.target.output, **options)


def relevance_of(session: Session, inputs: Tensor, subspaces: Subspaces, what: str) -> Tensor:
    """R_k of images at the layer, shape (N, K), for the explained class."""
    parts = []
    with session.step("relevance", f"Concepts of {len(inputs)} {what}", session.seconds(len(inputs))):
        for batch in session.progress.bar(inputs.split(session.settings.batch_size), "batch"):
            with repeatable():
                wrapper = session.wrapper(subspaces)
                found = wrapper.concept_relevance(_leaf(session, batch), session.target.output)
            parts.append(found.detach().cpu())
    return torch.cat(parts)


def flip_patches(session: Session, work: Work, explained: Explained, key: dict[str, Any]) -> Any:
    """Curves of patch flipping by the concepts together, the whole map and a random order, as JSON."""
    patch = max(1, session.network.size // 14)
    key = {**key, "patch": patch}
    generator = torch.Generator().manual_seed(session.settings.seed)
    at_random = torch.rand(len(explained), 1, *explained.whole.shape[1:], generator=generator)
    orders = {"concepts": explained.maps, "one map": explained.whole[:, None], "random": at_random}
    inputs = to_inputs(session.network, explained.pixels)

    def flip(maps: Tensor) -> dict[str, Any]:
        found = patch_flipping(
            session.network.model,
            inputs,
            # The relevance of a pixel is shared by its channels, as patches only see the sum.
            maps[:, :, None].expand(-1, -1, inputs.shape[1], -1, -1) / inputs.shape[1],
            session.target.output,
            session.network.preprocessing,
            patch_size=patch,
            batch_size=8,
            progress=session.progress.shown,
        )
        share, score = (values.mean(0).tolist() for values in (found.removed, found.scores))
        return {"share": share, "score": score, "aupc": float(found.aupc_of_removed.mean())}

    seconds = session.forward * len(explained) * len(orders) * 11
    what = f"Removing patches of {len(explained)} images"
    with session.step("flipping", what, seconds, work.place("flipping", key, ".notes.json")):
        curves = {
            name: work.remembered(f"flipping-{name.replace(' ', '-')}", key, lambda maps=maps: flip(maps))  # type: ignore[misc]
            for name, maps in orders.items()
        }
    return {"patch_size": patch, "curves": curves}


def ablate(
    session: Session,
    work: Work,
    explained: Explained,
    subspaces: Subspaces,
    pairs: Pairs | None,
    key: dict[str, Any],
) -> Any:
    """What the score loses with each concept, against its relevance, as JSON; also for other subspaces.

    Others are learned from the pairs, if there are any, and compared where a context costs little (LRP and
    gradients). A correlation that is not defined, such as that of one concept within an image, is None.
    """
    seed, size = session.settings.seed, session.settings.batch_size
    target, inputs = session.target.output, to_inputs(session.network, explained.pixels)

    def run() -> dict[str, Any]:
        wrapper = session.wrapper(subspaces)
        compared = {}
        if pairs is not None and session.method in ("lrp", "gxi"):
            compared = {name: find(subspaces.n_subspaces, seed, pairs) for name, find in OTHERS.items()}
        with repeatable():
            found, *others = (
                concept_ablation(wrapper, inputs, target, own, batch_size=size)
                for own in (None, *compared.values())
            )
        return {
            "relevance": found.relevance.tolist(),
            "drop": found.drop.tolist(),
            "correlation": _or_none(found.correlation),
            "within_images": _or_none(found.correlation_within_images),
            "others": dict(zip(compared, (_or_none(o.correlation) for o in others), strict=True)),
        }

    seconds = session.forward * len(explained) * 4 * (6 + subspaces.n_subspaces)
    what = f"Taking concepts out of {len(explained)} images"
    with session.step("ablation", what, seconds, work.place("ablation", key, ".notes.json")):
        return work.remembered("ablation", key, run)


def _learn(session: Session, pairs: Pairs, settings: FitSettings) -> Learned:
    """Learn K concepts, or as many as are stable."""
    n_images, n_features = len(torch.unique(pairs.image)), pairs.a.shape[1]
    k, seed, shown = settings.subspaces, settings.seed, session.progress.shown
    solver = DRSA(balance=settings.balance)
    if k == AUTO:
        if n_images < FEWEST_IMAGES:
            raise BadInput(f"--subspaces auto needs at least {FEWEST_IMAGES} images to learn from")
        tried = [k for k in TRIED if k <= n_features // 2]
        choice = choose_k(pairs, tried, solver=solver, random_state=seed, progress=shown)
        best = choice.stability
        if best is None:
            best = max(choice.candidates, key=lambda c: float(c.index.min()) - c.threshold)
            session.progress.note(
                f"no number of concepts from {tried[0]} to {tried[-1]} gives concepts that are all stable; "
                f"shown are the {best.n_subspaces} that come closest"
            )
        return _learned(
            best,
            {
                "best": best.n_subspaces,
                "is_chosen": choice.n_subspaces is not None,
                "n_subspaces": [c.n_subspaces for c in choice.candidates],
                "index": [float(c.index.min()) for c in choice.candidates],
                "threshold": [c.threshold for c in choice.candidates],
                "overlap": [c.overlap for c in choice.candidates],
                "held_out": [c.held_out_objective for c in choice.candidates],
                "null_objective": [c.null_objective for c in choice.candidates],
                "splits": [list(split.parent) for split in choice.splits],
            },
        )
    if not isinstance(k, int) or not 1 <= k <= n_features:
        raise BadInput(f"--subspaces must be 'auto' or a number from 1 to {n_features}, got {k}")
    if settings.stability and n_images >= FEWEST_IMAGES:
        return _learned(stability(pairs, k, solver=solver, random_state=seed, progress=shown), None)
    if settings.stability:
        session.progress.note(f"with {n_images} images it cannot be tested whether concepts are stable")
    solver = DRSA(k, balance=settings.balance, random_state=seed, progress=shown)
    return Learned(learn_subspaces(solver, pairs), [float(value) for value in solver.history_])


def _learned(found: Stability, choice: dict[str, Any] | None) -> Learned:
    about = {
        "index": found.index.tolist(),
        "is_stable": [bool(stable) for stable in found.is_stable],
        "beats_chance": bool(found.beats_chance),
        "threshold": found.threshold,
        "null_mean": float(found.null.mean()),
    }
    history = found.subspaces.metadata.get("history", [])
    return Learned(found.subspaces, [float(value) for value in history], about, choice)


def _as_tensors(session: Session, inputs: Tensor, pixels: Tensor, found: Explanation) -> dict[str, Tensor]:
    """What is kept of an explained batch."""
    target, entries = session.target.output, entries_of_patch(session.method, inputs)
    with torch.no_grad():
        outputs = session.network.model(inputs.clone()).cpu()
    whole = found.maps.sum(1) if found.whole is None else found.whole
    return {
        "pixels": (pixels * 255).round().to(torch.uint8),
        "maps": (found.maps.detach() / entries).sum(2).float().cpu(),
        "whole": (whole.detach() / entries).sum(1).float().cpu(),
        "relevance": found.concept_relevance.detach().float().cpu(),
        "score": found.score.detach().float().cpu(),
        # One output, a logit for or against the class, say, has no rank.
        "rank": (1 + (outputs > outputs[:, target, None]).sum(1)) * (outputs.shape[1] > 1),
        "predicted": outputs.argmax(1),
    }


def _leaf(session: Session, inputs: Tensor) -> Tensor:
    return inputs.clone().requires_grad_(session.method == "gxi")


def _or_none(value: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value
