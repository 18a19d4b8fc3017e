"""The paper's tables and figures of section 5 and Notes D–G, on your network and your photographs.

Photographs lie in FOLDER/train/<index>_<name>/ and FOLDER/val/<index>_<name>/. Each class gets subspaces from
its training images: random ones, Max-Rel, PCA and PRCA for one subspace; random ones, DSA and DRSA for K.
Their maps are evaluated on the validation images by patch flipping (AUPC), total relevance, separability and
peakness. Tables go to OUT/tables.md, .csv and .json, figures to OUT/figures.

    python examples/benchmark.py --data photographs --out bench
    python examples/benchmark.py --data photographs --out bench --quick     # minutes, few images

A run that was interrupted goes on where it ended when it is started again with the same arguments.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmark_parts.backends import make_backend
from benchmark_parts.data import ClassImages, find_classes
from benchmark_parts.experiment import Evaluation, Experiment, OutOfTime, Record
from benchmark_parts.figures import draw_figures
from benchmark_parts.methods import SINGLE, Job, labelled_job, learned_job, random_job, single_job
from benchmark_parts.networks import Network, load_network, with_upper_gamma
from benchmark_parts.tables import write_tables

STAGES = ("main", "layers", "subspaces", "dims", "attribution")
ATTRIBUTIONS = ["noise", "gxi", "ig", "shapley", "lrp"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model", default="efficientnet_lite0", help="or vgg16, resnet18, any of timm (default: %(default)s)"
    )
    add("--weights", type=Path, help="state dict; default: the published weights")
    add("--layer", help="default: blocks.4, features.22 (Conv4_3), layer4 or stages.2, by model")
    add("--backend", choices=["lrp", "ig", "gxi", "shapley"], default="lrp", help="(default: %(default)s)")
    add("--data", type=Path, required=True, help="folder with train and val")
    add("--classes", nargs="+", help="indices or folder names; default: all")
    add("--subspaces", type=int, default=4, help="K of the main tables (default: %(default)s)")
    add("--out", type=Path, required=True, help="folder for results; the same one continues a run")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="default: all")
    add("--train-images", type=int, default=500, help="per class, at most (default: %(default)s)")
    add("--positions", type=int, default=20, help="pairs per training image (default: %(default)s)")
    add("--val-images", type=int, default=50, help="per class, at most (default: %(default)s)")
    add("--ablation-images", type=int, help="per class in the ablations; default: as many")
    add(
        "--dims",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        help="d of the curves (default: %(default)s)",
    )
    add("--ks", type=int, nargs="+", default=[2, 4, 8, 16], help="K of the ablation (default: %(default)s)")
    add("--layers", nargs="*", default=[], help="further layers for the ablation")
    add(
        "--attributions", nargs="+", choices=ATTRIBUTIONS, default=ATTRIBUTIONS, help="to compare in one step"
    )
    add("--seeds", type=int, default=3, help="random subspaces (default: %(default)s)")
    add("--samples", type=int, help="permutations (shapley, default 25) or steps on the input (ig, 10)")
    add(
        "--upper-gamma", type=float, help="another γ of LRP above the layer; 0 in the paper's rules for VGG16"
    )
    add("--schedule", default="squares", help="patches per step: squares, 'square totals', single")
    add(
        "--fill",
        default="telea",
        choices=["telea", "mean", "blur", "constant"],
        help="(default: %(default)s)",
    )
    add("--netdissect", type=Path, help="NetDissect tally of this layer (CSV)")
    add("--ibd", type=Path, help="IBD concept vectors of this layer (.npy, one in each row)")
    add("--batch-size", type=int, default=4, help="images explained at a time (default: %(default)s)")
    add("--seed", type=int, default=0, help="of positions and fits (default: %(default)s)")
    add("--max-minutes", type=float, help="stop before the next job after so many minutes")
    add("--methods", nargs="+", help="of the main stage, e.g. prca drsa; default: all")
    add("--quick", action="store_true", help="a few images, one seed, main stage only")
    options = parser.parse_args()
    if options.quick:
        options.train_images, options.val_images = min(options.train_images, 6), min(options.val_images, 2)
        options.seeds, options.stages = 1, ["main"]
        options.samples = options.samples or {"shapley": 2}.get(options.backend)
    return options


def main_jobs(options: argparse.Namespace) -> list[Job]:
    """Jobs of Tables 1, 2, F.1 and F.2; the best first, in case time runs out."""
    jobs = [learned_job("drsa", options.subspaces, options.seed, with_whole=True)]
    jobs += [single_job(method, [1], 0) for method in reversed(SINGLE)]
    jobs += [learned_job("dsa", options.subspaces, options.seed)]
    jobs += [random_job(options.subspaces, seed) for seed in range(options.seeds)]
    for method in ("netdissect", "ibd"):
        if file := getattr(options, method):
            jobs.append(labelled_job(method, file, options.subspaces))
    return [job for job in jobs if options.methods is None or job.readings[0].method in options.methods]


def run(options: argparse.Namespace, experiment: Experiment, network: Network) -> list[Record]:
    """All stages; what there is when time runs out."""
    layer = options.layer or network.layer
    found = find_classes(options.data, options.classes, options.train_images, options.val_images)
    n_ablation = options.ablation_images or options.val_images
    fewer = [ClassImages(c.index, c.name, c.train, c.val[:n_ablation]) for c in found]
    counts = ", ".join(f"{c.name} ({len(c.train)} + {len(c.val)})" for c in found)
    print(f"{options.model}, {layer}, {options.backend}; training + validation images: {counts}", flush=True)

    def pair(k: int) -> list[Job]:
        return [learned_job(method, k, options.seed) for method in ("drsa", "dsa")]

    plan: list[tuple[str, str, list[ClassImages], list[Job]]] = [("main", layer, found, main_jobs(options))]
    plan += [("subspaces", layer, fewer, pair(k)) for k in options.ks if k != options.subspaces]
    plan += [("layers", other, fewer, pair(options.subspaces)) for other in options.layers]
    dims = sorted(set(options.dims))
    curves = [single_job(method, dims, 0) for method in ("prca", "pca", "max-rel", "random")]
    plan += [("dims", layer, fewer, [job]) for job in curves]
    records: list[Record] = []
    try:
        for stage, where, classes, jobs in plan:
            if stage in options.stages:
                rules = network
                if options.upper_gamma is not None:
                    rules = with_upper_gamma(network, where, options.upper_gamma)
                backend = make_backend(options.backend, rules, where, options.samples)
                records += experiment.run(stage, where, backend, classes, jobs)
        if "attribution" in options.stages:
            records += experiment.run_attributions(options.attributions, found, options.samples)
    except OutOfTime:
        print("out of time; the same command goes on from here")
        return experiment.finished()
    return records


def main() -> None:
    options = parse()
    begin = time.monotonic()
    network = load_network(options.model, options.weights)
    ignored = {"out", "max_minutes", "stages", "batch_size", "layers", "ks", "dims", "quick", "seeds"}
    ignored |= {"attributions", "methods"}
    settings = {k: str(v) for k, v in sorted(vars(options).items()) if k not in ignored}
    deadline = None if options.max_minutes is None else begin + 60 * options.max_minutes
    experiment = Experiment(
        network,
        options.out,
        settings,
        Evaluation(options.schedule, options.fill),
        options.positions,
        options.seed,
        options.batch_size,
        deadline,
    )
    records = run(options, experiment, network)
    if experiment.unreadable:
        print(f"{len(experiment.unreadable)} unreadable photographs skipped: {sorted(experiment.unreadable)}")
    if records:
        main_layer = options.layer or network.layer
        print(write_tables(records, options.out, main_layer, options.subspaces))
        for file in draw_figures(records, options.out, main_layer, options.subspaces):
            print(f"wrote {file}")
    print(f"{len(records)} evaluations after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
