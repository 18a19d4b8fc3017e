"""Options that several commands share, and how results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ..opening import ModelSettings
    from ..progress import Progress

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Numbers(click.ParamType[list[float]]):
    """One number, or one for each channel: 0.5 or 0.485,0.456,0.406."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[float]:
        """Read them from text."""
        if isinstance(value, list):
            return value
        try:
            found = [float(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} must be one number, or three with commas between them", param, ctx)
        if len(found) not in (1, 3):
            self.fail(f"{value!r} must be one number, or three with commas between them", param, ctx)
        return found * 3 if len(found) == 1 else found


class SubspaceCount(click.ParamType[int | str]):
    """A number of concepts, or "auto"."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        """Read it from text."""
        if value == "auto" or isinstance(value, int):
            return value
        if not str(value).isdigit() or int(value) < 1:
            self.fail(f"{value!r} must be a number of concepts, or auto", param, ctx)
        return int(value)


def combined(*decorators: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Several options as one decorator, in the order in which `--help` shows them."""

    def decorate(function: _Function) -> _Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def as_number(ctx: Any, param: Any, value: str | None) -> int | None:
    """A choice among numbers as a number."""
    return None if value is None else int(value)


folder = click.Path(path_type=Path, file_okay=True)
model_options = combined(
    click.argument("model"),
    click.option("--weights", default="DEFAULT", metavar="DEFAULT|PATH", show_default=True,
                 help="published weights, or a state dict (.safetensors, .pt)"),
    click.option("--size", type=click.IntRange(8), help="side of the inputs  [default: as published]"),
    click.option("--resize", type=click.IntRange(8), help="shorter side before the middle is cut out"),
    click.option("--mean", type=Numbers(), help="of the inputs (pixels − mean) / std; one number or three"),
    click.option("--std", type=Numbers(), help="as --mean"),
    click.option("--channels", "channel_order", type=click.Choice(["RGB", "BGR"]),
                 help="order of the model's channels; Caffe and Keras take BGR  [default: the model's own]"),
    click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, mps"),
)  # fmt: skip
target_option = click.option(
    "--target", required=True, metavar="CLASS", help="the class, by name or by number of the output"
)
work_option = click.option(
    "--work", type=click.Path(path_type=Path), help="folder for what is done  [default: OUT ending in .drsa]"
)
layer_option = click.option(
    "--layer", help="where concepts are found  [default: the suggested one, see `drsa layers`]"
)
backend_options = combined(
    click.option("--backend", type=click.Choice(["lrp", "ig", "gxi", "shapley"]), default="lrp",
                 show_default=True, help="LRP gives way to ig where `drsa doctor` finds it not valid"),
    click.option("--samples", type=click.IntRange(1), help="steps of ig [10], permutations of shapley [25]"),
    click.option("--channel-dim", type=click.Choice(["1", "-1"]), callback=as_number,
                 help="axis of the layer's features: 1 for (N, D, H, W), -1 for (N, H, W, D) and tokens  "
                 "[default: read from the shape]"),
)  # fmt: skip
fit_options = combined(
    click.option("--subspaces", type=SubspaceCount(), default=4, show_default=True, metavar="NUMBER|auto",
                 help="how many concepts; auto: as many as are stable"),
    click.option("--balance", type=click.FloatRange(0, 1), default=1.0, show_default=True,
                 help="how far unequal evidence is levelled before the fit; 0 is the paper's objective"),
    click.option("--positions", type=click.IntRange(1), default=20, show_default=True,
                 help="positions in an image that are learned from"),
    click.option("--train-images", type=click.IntRange(1), default=500, show_default=True, help="at most"),
    click.option("--stability/--no-stability", default=True, show_default=True,
                 help="repeat the fit, to see which concepts come back"),
)  # fmt: skip
run_options = combined(
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
    click.option("--batch-size", type=click.IntRange(1), default=4, show_default=True),
    click.option("--force", is_flag=True, help="go on where the command would refuse"),
)
output_options = combined(
    click.option("--json", "as_json", is_flag=True, help="print the result as JSON on stdout"),
    click.option("--quiet", is_flag=True, help="no progress, even on a terminal"),
)


def model_settings(options: dict[str, Any]) -> ModelSettings:
    """The part of a command's options that says which model; it is taken out of them."""
    from ..opening import ModelSettings

    names = ("model", "weights", "size", "resize", "mean", "std", "channel_order", "device")
    return ModelSettings(**{name: options.pop(name) for name in names})


def make_progress(quiet: bool) -> Progress:
    """Shown on a terminal only, and not at all if quiet."""
    from ..progress import Progress

    return Progress(False if quiet else None)


def show(result: Any, as_json: bool, lines: Sequence[str], progress: Progress | None = None) -> None:
    """Print a result: as JSON, or in lines; notes go to stderr, unless they were shown already."""
    if progress is not None and not progress.shown:
        for note in progress.notes:
            sys.stderr.write(f"note: {note}\n")
    if as_json:
        click.echo(json.dumps(result, indent=1, ensure_ascii=False, default=str))
    else:
        for line in lines:
            click.echo(line)


def read_names(file: Path | None) -> dict[str, str] | list[str] | None:
    """Names of concepts from a JSON file: a list of all, or new names by old ones."""
    if file is None:
        return None
    from ..errors import BadInput
    from ..work import read_json

    names = read_json(file)
    values = list(names.values()) if isinstance(names, dict) else names
    if not isinstance(values, list) or not all(isinstance(name, str) and name.strip() for name in values):
        raise BadInput(f"{file} must hold a list of names, or an object of new names by old ones")
    return names
