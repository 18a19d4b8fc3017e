"""The paper's tables and figures of section 5 and Notes D–G, on a network and a folder of photographs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drsa_audit import Network, load_network
from drsa_audit.wrappers import NAMES as BACKENDS
from drsa_core import concept_vectors

from .backends import Backend, with_gamma, with_upper_gamma
from .checks import check_by_ablation, check_stability, compare_gammas
from .classes import ClassImages, class_folders, find_classes
from .experiment import Evaluation, Experiment, OutOfTime, Record
from .figures import draw_figures
from .jobs import LEARNED, LINES, SINGLE, Job, labelled_job, learned_job, of_concepts, random_job, single_job
from .tables import write_tables

STAGES = ("main", "layers", "subspaces", "dims", "attribution", "ablation", "stability")
#: Also a stage, but one that comes before all others: it tells which γ to take.
GAMMA_STAGE = "gamma"
#: IBD with concept vectors of the classes of the photographs, where no other labels are at hand.
CLASS_VECTORS = "ibd-classes"
#: Whose concepts are learned: those of each class, or one set of all classes in train, which may be others
#: than those in val.
PER_CLASS, COMMON = "class", "common"
ATTRIBUTIONS = ("noise", "gxi", "ig", "shapley", "lrp")


def about(text: str, kind: type, choices: Sequence[str] | None = None) -> dict[str, Any]:
    """What a setting is, for forms and command lines: `help`, `type` of one entry, `choices`."""
    return {"help": text, "type": kind, "choices": choices}


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """What decides a benchmark; the `metadata` of each field says what it is.

    Examples
    --------
    >>> from study.benchmark import BenchmarkSettings, run_benchmark
    >>> settings = BenchmarkSettings(data=Path("photographs"), out=Path("bench"))
    >>> settings.quick().train_images < settings.train_images  # for run_benchmark(settings.quick())
    True
    """

    data: Path = field(metadata=about("folder with train/<index>_<name>/ and val/<index>_<name>/", Path))
    out: Path = field(metadata=about("folder for results; the same one continues a run", Path))
    model: str = field(
        default="efficientnet_lite0",
        metadata=about("vgg16, resnet18, any of timm, FILE.safetensors or module:factory", str),
    )
    weights: Path | None = field(
        default=None, metadata=about("state dict; default: the published weights", Path)
    )
    layer: str | None = field(
        default=None, metadata=about("default: blocks.4, features.22 (Conv4_3), layer4 or stages.2", str)
    )
    backend: str = field(default="lrp", metadata=about("attribution method", str, tuple(BACKENDS)))
    classes: tuple[str, ...] | None = field(
        default=None, metadata=about("indices or folder names; default: all", str)
    )
    concepts: str = field(
        default=PER_CLASS,
        metadata=about(
            "learned for each class, or one set for the classes in train", str, (PER_CLASS, COMMON)
        ),
    )
    subspaces: int = field(default=4, metadata=about("K of the main tables", int))
    stages: tuple[str, ...] = field(
        default=STAGES, metadata=about("what to run", str, (*STAGES, GAMMA_STAGE))
    )
    train_images: int = field(default=500, metadata=about("per class, at most", int))
    positions: int = field(default=20, metadata=about("pairs per training image", int))
    val_images: int = field(default=50, metadata=about("per class, at most", int))
    ablation_images: int | None = field(
        default=None, metadata=about("per class in the ablations; default: as many", int)
    )
    dims: tuple[int, ...] = field(default=(1, 2, 4, 8, 16, 32), metadata=about("d of the curves", int))
    ks: tuple[int, ...] = field(default=(2, 4, 8, 16), metadata=about("K of the ablation", int))
    layers: tuple[str, ...] = field(default=(), metadata=about("further layers for the ablation", str))
    attributions: tuple[str, ...] = field(
        default=ATTRIBUTIONS, metadata=about("to compare in one step", str, ATTRIBUTIONS)
    )
    seeds: int = field(default=3, metadata=about("random subspaces", int))
    samples: int | None = field(
        default=None,
        metadata=about("permutations of shapley (default 25) and steps on the input of ig (default 10)", int),
    )
    gamma: float | None = field(
        default=None, metadata=about("another γ of LRP below the layer; not for VGGs and NFNets", float)
    )
    gammas: tuple[float, ...] = field(
        default=(0.1, 0.25, 1.0), metadata=about("to compare on training images in the stage gamma", float)
    )
    upper_gamma: float | None = field(
        default=None,
        metadata=about("another γ of LRP above the layer; 0 in the paper's rules for VGG16", float),
    )
    schedule: str = field(
        default="squares", metadata=about("patches per step: squares, 'square totals', single", str)
    )
    fill: str = field(
        default="telea", metadata=about("of removed patches", str, ("telea", "mean", "blur", "constant"))
    )
    netdissect: Path | None = field(
        default=None, metadata=about("NetDissect tally of this layer (CSV)", Path)
    )
    ibd: Path | None = field(
        default=None, metadata=about("IBD concept vectors of this layer (.npy, one in each row)", Path)
    )
    batch_size: int = field(default=4, metadata=about("images explained at a time", int))
    seed: int = field(default=0, metadata=about("of positions and fits", int))
    max_minutes: float | None = field(
        default=None, metadata=about("stop before the next job after so many minutes", float)
    )
    methods: tuple[str, ...] | None = field(
        default=None,
        metadata=about(f"e.g. prca drsa; default: all but {', '.join((*LINES, CLASS_VECTORS))}", str),
    )

    def among(self, names: Sequence[str]) -> list[str]:
        """Those of the names that are asked for by `methods`."""
        return [name for name in names if self.methods is None or name in self.methods]

    def quick(self) -> BenchmarkSettings:
        """The same with a few images, one seed, and the main stage only."""
        samples = self.samples or (2 if self.backend == "shapley" else None)
        n_train, n_val = min(self.train_images, 6), min(self.val_images, 2)
        return replace(
            self, train_images=n_train, val_images=n_val, seeds=1, stages=("main",), samples=samples
        )

    def about(self) -> dict[str, Any]:
        """What a reader of the tables should know; no paths, which differ from machine to machine."""
        chosen = {
            name: value for name, value in asdict(self).items() if name not in ("data", "out", "weights")
        }
        chosen |= {"model": self.model.rpartition("/")[2], "data": self.data.name}
        for name in ("netdissect", "ibd"):
            chosen[name] = None if chosen[name] is None else chosen[name].name
        return chosen

    def of_numbers(self) -> dict[str, str]:
        """What decides the numbers: a run goes on in a folder only if these are as they were."""
        ignored = {"out", "max_minutes", "stages", "batch_size", "layers", "ks", "dims", "seeds"}
        ignored |= {"attributions", "methods", "gammas"}
        # Folders from before there were these settings stay readable.
        if self.gamma is None:
            ignored.add("gamma")
        if self.concepts == PER_CLASS:
            ignored.add("concepts")
        return {name: str(value) for name, value in sorted(asdict(self).items()) if name not in ignored}


def run_benchmark(settings: BenchmarkSettings, say: Callable[[str], None] = print) -> list[Record]:
    """Learn, explain and evaluate; write OUT/tables.md, .csv and .json and OUT/figures, of all in the folder.

    Each class gets subspaces from its training images, or all get one common set: random ones, Max-Rel, PCA
    and PRCA for one subspace; random ones, DSA and DRSA for K. Their maps are evaluated on the validation
    images by patch flipping (AUPC), total relevance, separability and peakness. A run that was interrupted
    goes on where it ended.

    Parameters
    ----------
    settings : BenchmarkSettings
    say : function
        What lines about the progress are given to.

    Returns
    -------
    list of dict
        One record for each method and class that is asked for; those that there are, if time ran out.
    """
    begin = time.monotonic()
    network = load_network(settings.model, settings.weights)
    if settings.gamma is not None:
        network = with_gamma(network, settings.gamma)
    layer = network.layer_or(settings.layer)
    classes, learned_from = _classes(settings)
    experiment = Experiment(
        network,
        settings.out,
        settings.of_numbers()
        | ({"learned_from": str([c.name for c in learned_from])} if learned_from else {}),
        Evaluation(settings.schedule, settings.fill),
        settings.positions,
        settings.seed,
        settings.batch_size,
        None if settings.max_minutes is None else begin + 60 * settings.max_minutes,
        say,
        learned_from,
    )
    # A class that is learned from and evaluated has both kinds of photographs.
    all_images = {c.name: c for c in (*learned_from, *classes)}.values()
    experiment.check_network()
    experiment.check_photographs(list(all_images))
    counts = ", ".join(f"{c.name} ({len(c.train)} + {len(c.val)})" for c in all_images)
    say(f"{settings.model}, {layer}, {settings.backend}; training + validation images: {counts}")
    try:
        records = _run_stages(settings, experiment, network, layer, classes)
    except OutOfTime:
        say("out of time; the same command goes on from here")
        records = experiment.finished()
    if experiment.unreadable:
        say(f"{len(experiment.unreadable)} unreadable photographs skipped: {sorted(experiment.unreadable)}")
    everything = experiment.finished()  # also what earlier runs into this folder were asked for
    if everything:
        say(write_tables(everything, settings.out, layer, settings.subspaces, settings.about()))
        for file in draw_figures(everything, settings.out, layer, settings.subspaces):
            say(f"wrote {file}")
    say(f"{len(records)} evaluations after {time.monotonic() - begin:.0f} s")
    return records


def _classes(settings: BenchmarkSettings) -> tuple[list[ClassImages], list[ClassImages]]:
    """Classes to evaluate, and those that one common set of concepts is learned from."""
    if settings.concepts == PER_CLASS:
        n_train, n_val = settings.train_images, settings.val_images
        return find_classes(settings.data, settings.classes, n_train, n_val), []
    asked_for = {*settings.stages, *(settings.methods or ())}
    of_one_class = sorted(asked_for & {"stability", GAMMA_STAGE, CLASS_VECTORS})
    if of_one_class:
        raise ValueError(f"with common concepts there is no {', '.join(of_one_class)}; leave it out")
    learned_from = [
        ClassImages(c.index, c.name, c.files[: settings.train_images], [])
        for c in class_folders(settings.data / "train")
    ]
    train = {c.name: c.train for c in learned_from}
    classes = [
        ClassImages(c.index, c.name, train.get(c.name, []), c.files[: settings.val_images])
        for c in class_folders(settings.data / "val", settings.classes)
    ]
    return classes, learned_from


def _run_stages(
    settings: BenchmarkSettings,
    experiment: Experiment,
    network: Network,
    layer: str,
    classes: Sequence[ClassImages],
) -> list[Record]:
    records: list[Record] = []
    if CLASS_VECTORS in (settings.methods or ()) and not _vectors_file(settings).exists():
        _fit_class_vectors(settings, experiment, network, layer, classes)
    n_ablation = settings.ablation_images or settings.val_images
    fewer = [replace(c, val=c.val[:n_ablation]) for c in classes]
    for stage, where, jobs in _plan(settings, layer):
        if stage in settings.stages:
            rules = _rules(settings, network, where)
            backend = Backend(settings.backend, rules, where, settings.samples)
            records += experiment.run(stage, where, backend, classes if stage == "main" else fewer, jobs)
    if "attribution" in settings.stages:
        rules = _rules(settings, network, layer)
        records += experiment.run_attributions(settings.attributions, classes, settings.samples, rules)
    backend = Backend(settings.backend, _rules(settings, network, layer), layer, settings.samples)
    concepts = [job for job in _main_jobs(settings) if of_concepts(job).dims is None]
    if "ablation" in settings.stages:
        records += check_by_ablation(experiment, layer, backend, classes, concepts)
    if "stability" in settings.stages:
        learned = [job for job in concepts if job.readings[0].method in (*LEARNED, *LINES)]
        records += check_stability(experiment, layer, backend, classes, learned, settings.seed)
    if GAMMA_STAGE in settings.stages:
        records += compare_gammas(experiment, layer, fewer, settings.gammas, settings.upper_gamma)
    return records


def _vectors_file(settings: BenchmarkSettings) -> Path:
    return settings.out / "class_vectors.npy"


def _fit_class_vectors(
    settings: BenchmarkSettings,
    experiment: Experiment,
    network: Network,
    layer: str,
    classes: Sequence[ClassImages],
) -> None:
    """Concept vectors of IBD where the only labels are those of the classes."""
    if len(classes) < 3:
        raise ValueError("vectors of two classes point in opposite directions; give photographs of three")
    backend = Backend(settings.backend, _rules(settings, network, layer), layer, settings.samples)
    pairs = [experiment.pairs(layer, backend, images) for images in classes]
    labels = torch.arange(len(pairs)).repeat_interleave(torch.tensor([len(part) for part in pairs]))
    np.save(_vectors_file(settings), concept_vectors(torch.cat([p.a for p in pairs]), labels).numpy())


def _rules(settings: BenchmarkSettings, network: Network, layer: str) -> Network:
    if settings.upper_gamma is None:
        return network
    return with_upper_gamma(network, layer, settings.upper_gamma)


def _plan(settings: BenchmarkSettings, layer: str) -> Iterator[tuple[str, str, list[Job]]]:
    """Stage, layer and jobs, in the order in which they are run."""

    def learned(k: int) -> list[Job]:
        return [learned_job(method, k, settings.seed) for method in settings.among(LEARNED)]

    yield "main", layer, _main_jobs(settings)
    for k in settings.ks:
        if k != settings.subspaces:
            yield "subspaces", layer, learned(k)
    for other in settings.layers:
        yield "layers", other, learned(settings.subspaces)
    for method in settings.among(("prca", "pca", "max-rel", "random")):
        yield "dims", layer, [single_job(method, sorted(set(settings.dims)), 0)]


def _main_jobs(settings: BenchmarkSettings) -> list[Job]:
    """Jobs of Tables 1, 2, F.1 and F.2; the best first, in case time runs out."""
    jobs = [learned_job("drsa", settings.subspaces, settings.seed, with_whole=True)]
    jobs += [single_job(method, [1], 0) for method in reversed(SINGLE)]
    jobs += [learned_job(method, settings.subspaces, settings.seed) for method in ("dsa", "drsa-balanced")]
    jobs += [random_job(settings.subspaces, seed) for seed in range(settings.seeds)]
    for method, file in (("netdissect", settings.netdissect), ("ibd", settings.ibd)):
        if file is not None:
            jobs.append(labelled_job(method, file, settings.subspaces))
    if CLASS_VECTORS in (settings.methods or ()):
        jobs.append(labelled_job(CLASS_VECTORS, _vectors_file(settings), settings.subspaces))
    jobs = [job for job in jobs if settings.among([job.readings[0].method])]
    jobs += [  # only where they are asked for
        learned_job(method, settings.subspaces, settings.seed)
        for method in LINES
        if method in (settings.methods or ())
    ]
    unknown = set(settings.methods or ()) - {job.readings[0].method for job in jobs}
    if unknown:
        raise ValueError(f"there is no method {', '.join(sorted(unknown))} for these settings")
    return jobs
