"""`drsa report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import options


@click.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="the HTML file")
@click.option(
    "--names",
    type=click.Path(path_type=Path),
    help="JSON file with names of the concepts, e.g. as the report saves it",
)
@options.output_options
def report(work: Path, out: Path, names: Path | None, as_json: bool, quiet: bool) -> None:
    """Write the report of a finished audit again, with other names; the subspaces get them too.

    WORK is the folder beside the report that `drsa audit` has written.

    \b
    drsa report report.drsa --names names.json --out report.html
    """  # fmt: skip
    from ..auditing import rename_concepts
    from ..report import write_report
    from ..work import check_out

    check_out(out)
    given: Any = options.read_names(names)
    found = rename_concepts(work, given)
    write_report(work, out)
    result = {"report": str(out), "names": list(found.names)}
    options.show(result, as_json, [f"wrote {out} with the concepts {', '.join(found.names)}"])
