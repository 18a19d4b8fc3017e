"""The paper's tables and figures of section 5 and Notes D–G, on your network and your photographs.

Photographs lie in FOLDER/train/<index>_<name>/ and FOLDER/val/<index>_<name>/. Each class gets subspaces from
its training images: random ones, Max-Rel, PCA and PRCA for one subspace; random ones, DSA and DRSA for K.
Their maps are evaluated on the validation images by patch flipping (AUPC), total relevance, separability and
peakness. Tables go to OUT/tables.md, .csv and .json, figures to OUT/figures.

    python examples/benchmark.py --data photographs --out bench
    python examples/benchmark.py --data photographs --out quick --quick     # minutes, few images

A run that was interrupted goes on where it ended when it is started again with the same arguments. Other
methods and stages are added to the folder; settings that would change its numbers are refused.
"""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from study.benchmark import BenchmarkSettings, run_benchmark


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in fields(BenchmarkSettings):
        about, default = field.metadata, field.default
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=about["type"],
            choices=about["choices"],
            nargs="*" if "tuple" in str(field.type) else None,
            required=default is MISSING,
            default=argparse.SUPPRESS,
            help=about["help"] + ("" if default in (MISSING, None, ()) else f" (default: {shown})"),
        )
    parser.add_argument("--quick", action="store_true", help="a few images, one seed, main stage only")
    given = vars(parser.parse_args())
    quick = given.pop("quick")
    chosen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    settings = BenchmarkSettings(**chosen)
    run_benchmark(settings.quick() if quick else settings, partial(print, flush=True))


if __name__ == "__main__":
    main()
