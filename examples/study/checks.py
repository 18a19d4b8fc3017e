"""Stages of the benchmark beside maps: does the output follow R_k, do concepts come back, which γ is best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from drsa_audit.wrappers import repeatable
from drsa_core import Pairs, Subspaces
from drsa_core.evaluation import compare_ablations
from drsa_core.stability import match

from .backends import Backend, with_gamma, with_upper_gamma
from .classes import ClassImages
from .experiment import Experiment, Record, write_json
from .jobs import Job, learned_job, of_concepts

#: Times that the training images are halved.
N_SPLITS = 2


def check_by_ablation(
    experiment: Experiment, layer: str, backend: Backend, classes: Sequence[ClassImages], jobs: Sequence[Job]
) -> list[Record]:
    """R_k of each validation image and the drop of the output without the concept, for K concepts.

    All methods of a class share the contexts and the pass below the layer.
    """
    records: list[Record] = []
    for images in classes:
        files = {job.name: _file(experiment, "ablation", layer, images, job) for job in jobs}
        missing = [job for job in jobs if not files[job.name].exists()]
        if missing:
            experiment.check_time()
            inputs, names = experiment.inputs(images.val)
            target = experiment.network.output_of(images.index)
            found = [
                _grouped(experiment.subspaces(layer, backend, images, job), of_concepts(job).groups)
                for job in missing
            ]
            with repeatable():
                results = compare_ablations(backend.explainer(), inputs, target, found)
            for job, result in zip(missing, results, strict=True):
                about = _about("ablation", layer, images, job) | {"files": names}
                values = {"relevance": result.relevance.tolist(), "drop": result.drop.tolist()}
                write_json(files[job.name], [about | values])
                experiment.say(
                    f"ablation {layer} {images.name} {job.name}: correlation {result.correlation:.3f}, "
                    f"within images {result.correlation_within_images:.3f}"
                )
        records += [record for file in files.values() for record in json.loads(file.read_text())]
    return records


def check_stability(
    experiment: Experiment,
    layer: str,
    backend: Backend,
    classes: Sequence[ClassImages],
    jobs: Sequence[Job],
    seed: int = 0,
) -> list[Record]:
    """Do the concepts come back? Two fits on halves of the training images, with other starts.

    Concepts of the two are matched one to one by the correlation of their positive relevance at all pairs, as
    in `drsa_core.stability`, which is for DRSA alone.
    """
    records: list[Record] = []
    for job in jobs:
        for images in classes:
            file = _file(experiment, "stability", layer, images, job)
            if not file.exists():
                experiment.check_time()
                pairs = experiment.pairs(layer, backend, images)
                index = [_agreement(pairs, job, seed + split) for split in range(N_SPLITS)]
                write_json(file, [_about("stability", layer, images, job) | {"index": index}])
                experiment.say(f"stability {layer} {images.name} {job.name}: {index}")
            records += json.loads(file.read_text())
    return records


def compare_gammas(
    experiment: Experiment,
    layer: str,
    classes: Sequence[ClassImages],
    gammas: Sequence[float],
    upper_gamma: float | None = None,
) -> list[Record]:
    """Patch flipping of standard maps for each γ, on training images: as many as there are to validate.

    `upper_gamma` is the γ above the layer, if it is another than that of the network's rules.
    """
    records: list[Record] = []
    for gamma in gammas:
        network = with_gamma(experiment.network, gamma)
        if upper_gamma is not None:
            network = with_upper_gamma(network, layer, upper_gamma)
        backend = Backend("lrp", network, layer)
        for images in classes:
            file = experiment.out / "results" / "gamma" / layer / images.name / f"{gamma:g}.json"
            if not file.exists():
                experiment.check_time()
                inputs, names = experiment.inputs(images.train[: len(images.val)])
                target = experiment.network.output_of(images.index)
                maps = torch.cat([backend.attribute(x, target) for x in inputs.split(experiment.batch_size)])
                scores = experiment.evaluate(inputs, maps[:, None].float(), target)
                about: Record = {
                    "stage": "gamma",
                    "layer": layer,
                    "class": images.name,
                    "method": f"γ = {gamma:g}",
                }
                about |= {"n_subspaces": 1, "dims": None, "seed": 0, "files": names, "blocks": 1}
                write_json(file, [about | {"explain_seconds": 0.0} | scores])
                mean = sum(scores["aupc"]) / len(names)
                experiment.say(f"gamma {gamma:g} {images.name}, training images: AUPC {mean:.3f}")
            records += json.loads(file.read_text())
    return records


def _agreement(pairs: Pairs, job: Job, seed: int) -> list[float]:
    """Correlation of the positive relevance of the K matched concepts of fits on two halves of the images."""
    reading = of_concepts(job)
    numbers = torch.unique(pairs.image)
    shuffled = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))]
    relevances = []
    for i, half in enumerate(shuffled.tensor_split(2)):
        rows = torch.isin(pairs.image, half)
        again = learned_job(reading.method, reading.n_subspaces, 2 * seed + i)  # other starts, too
        fitted = again.fit(Pairs(pairs.a[rows], pairs.c[rows], pairs.image[rows]))
        relevances.append(fitted.relevance(pairs.a, pairs.c))
    correlation: list[float] = match(*relevances)[1].tolist()
    return correlation


def _grouped(fine: Subspaces, groups: Sequence[Sequence[int]]) -> Subspaces:
    """One block for each group of blocks."""
    joined = fine.select([block for group in groups for block in group])
    return Subspaces(joined.basis, [sum(fine.dims[i] for i in group) for group in groups], dual=joined.dual)


def _file(experiment: Experiment, stage: str, layer: str, images: ClassImages, job: Job) -> Path:
    return experiment.out / "results" / stage / layer / images.name / f"{job.name}.json"


def _about(stage: str, layer: str, images: ClassImages, job: Job) -> Record:
    reading = of_concepts(job)
    about = {"stage": stage, "layer": layer, "class": images.name, "seed": job.seed, "dims": None}
    return about | {"method": reading.method, "n_subspaces": reading.n_subspaces}
