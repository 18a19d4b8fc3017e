"""Writes docs/reproduction.md: the paper's tables on networks at hand, and a verdict on each of its claims.

Tables come from docs/results/*.json, small summaries of what `examples/benchmark.py` and
`examples/known_concepts.py --json` found. The words are in docs/results/template.txt, with places for
tables and single numbers, which are looked up in the same files: no number is written by hand.

    python examples/reproduction.py                                # write the page again
    python examples/reproduction.py --add vgg16_pets OUT [OUT …]   # from result folders; then write the page
    python examples/reproduction.py --check                        # is the page up to date?
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drsa_core.evaluation import summarise
from study.experiment import IDENTITY, read_records
from study.summary import summarise_records
from study.tables import LEGENDS, TITLES, cell, difference, name_of, ordered, render

DOCS = Path(__file__).resolve().parents[1] / "docs"
KNOWN = "known_concepts"
#: Names of the methods in the table of known concepts.
OF_KNOWN = {
    "drsa": "DRSA",
    "drsa-balanced": "DRSA, balance 1",
    "dsa": "DSA",
    "prca": "PRCA 1–4",
    "pca": "PCA 1–4",
    "random": "random",
    "drsa-lines": "DRSA, d = 1 each",
    "nmf": "NMF (CRAFT)",
    "ica": "ICA",
    "kmeans": "k-means (ACE)",
    "dictionary": "sparse dictionary",
    "channels": "channels (CRP)",
}
TEMPLATE = "template.txt"
HEAD = "<!-- Written by examples/reproduction.py from docs/results: change these, not this page. -->\n\n"


def summary_of(folders: list[Path], same_images: bool) -> dict[str, Any]:
    """One summary of one or more result folders of the same network; settings are those of the first."""
    about = json.loads((folders[0] / "settings.json").read_text())
    records = [record for folder in folders for record in read_records(folder)]
    # What two folders have would be averaged, though it may be of different settings.
    counts = Counter(tuple(record[name] for name in IDENTITY) for record in records)
    if twice := [place for place, n in counts.items() if n > 1]:
        raise SystemExit(f"more than one of the folders has {' '.join(map(str, twice[0]))}; give one of them")
    # Attribution methods in one step know no layer.
    of_layer = ("main", "gamma", "ablation", "stability")
    layer = next((record["layer"] for record in records if record["stage"] in of_layer), "")
    shown = ("backend", "positions", "train_images", "fill", "schedule", "gamma", "upper_gamma")
    kept = {name: about[name] for name in shown if about.get(name) not in (None, "None")}
    kept["model"] = about["model"].rpartition("/")[2]
    found = summarise_records(records, layer, int(about["subspaces"]), kept, same_images)
    del found["times"]  # of a busy machine
    return found


def known_summaries(known: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Mean and standard error over networks of the share inside the right mask, and concepts covered."""
    rows = {}
    for method, name in OF_KNOWN.items():
        if name in known["scores"]:
            scores = [score for score, _ in known["scores"][name]]
            summary = summarise(scores, list(range(len(scores))))
            covered = sum(count for _, count in known["scores"][name]) / len(scores)
            rows[method] = {"mean": summary.mean, "error": summary.standard_error, "covered": covered}
    return rows


def number_of(place: str, results: dict[str, Any]) -> str:
    """The number of a place in the template.

    "file table method metric"; with "ours:other" as method it is the paired difference; with "@place" after
    the method, it is that place of a grid; "known_concepts method" is the share inside the right mask.
    """
    words = place.split()
    try:
        if words[0].startswith(KNOWN):
            return cell(known_summaries(results[words[0]])[words[1]])
        file, table, method, metric = words
        method, _, where = method.partition("@")
        found = results[file]["grids" if where else "tables"][table]
        _, is_difference, other = method.partition(":")
        of_method = found["differences"][other] if is_difference else found["rows"][method]
        value = (of_method[where] if where else of_method)[metric]
        return difference(value) if is_difference else cell(value)
    except (KeyError, ValueError) as error:
        raise ValueError(f"there is no number for {place!r} in the summaries: {error!r}") from error


def known_table(known: dict[str, Any]) -> str:
    """Share of positive relevance inside the right mask, for each method."""
    lines = ["| | share inside the right mask ↑ | concepts covered, of 4 ↑ |", "|---|---|---|"]
    for method, row in known_summaries(known).items():
        lines.append(f"| {OF_KNOWN[method]} | {cell(row)} | {row['covered']:.1f} |")
    return "\n".join(lines)


def compared_table(places: Sequence[str], results: dict[str, Any]) -> str:
    """Methods in rows; known concepts and what each network says in columns.

    Parameters
    ----------
    places : sequence of str
        "file:title:metric,metric" of each network; files may have maps or checks without maps.
    results : dict
    """
    known, columns, titles = known_summaries(results[KNOWN]), [], ["known concepts: share ↑"]
    for place in places:
        file, title, metrics = place.split(":")
        tables = results[file]["tables"]
        rows = (tables.get("many") or tables["checks"])["rows"]
        columns += [(rows, metric) for metric in metrics.split(",")]
        titles += [f"{title}: {TITLES[metric]}" for metric in metrics.split(",")]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for method in ordered({method for rows, _ in columns for method in rows} - {"whole"}):
        cells = [cell(known[method]) if method in known else ""]
        found = [(rows.get(method, {}), metric) for rows, metric in columns]
        cells += [cell(row[metric]) if metric in row else "" for row, metric in found]
        lines.append(f"| {name_of(method)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", " ".join(LEGENDS.values())])


def page(template: str, results: dict[str, Any]) -> str:
    """The template with its tables, {{kind …}}, and numbers, [[…]]."""

    def table(match: re.Match[str]) -> str:
        kind, *words = match[1].split(" ")
        if kind == "compared":
            return compared_table(words, results)
        if kind == "known":
            return known_table(results[words[0]])
        if kind == "tables":
            return render(results[words[0]], with_times=False).strip()
        raise ValueError(f"the template has a table of the unknown kind {kind!r}")

    filled = re.sub(r"\{\{(.+?)\}\}", table, template)
    return HEAD + re.sub(r"\[\[(.+?)\]\]", lambda match: number_of(match[1], results), filled)


def read_results(folder: Path) -> dict[str, Any]:
    """Name ↦ content of docs/results/*.json."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", nargs="+", metavar=("NAME", "OUT"), help="a summary of result folders")
    parser.add_argument(
        "--same-images", action="store_true", help="with --add: only images that all methods of K have"
    )
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    parser.add_argument("--docs", type=Path, default=DOCS, help="default: the project's")
    options = parser.parse_args()
    if options.add:
        name, *folders = options.add
        if not folders:
            parser.error("--add needs a name and at least one result folder")
        summary = summary_of([Path(folder) for folder in folders], options.same_images)
        (options.docs / "results" / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    folder, file = options.docs / "results", options.docs / "reproduction.md"
    text = page((folder / TEMPLATE).read_text(), read_results(folder))
    if options.check:
        if not file.exists() or file.read_text() != text:
            raise SystemExit(f"{file} is not what docs/results gives; run examples/reproduction.py")
    else:
        file.write_text(text)
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
