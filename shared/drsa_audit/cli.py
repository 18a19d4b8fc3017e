"""The commands of `drsa`: options made from the settings, results on stdout, errors in one line."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .progress import BadInput, Progress, one_line
from .settings import AuditSettings, EvaluateSettings, ExplainSettings, FitSettings, ModelSettings

if TYPE_CHECKING:
    from drsa_core import ClassIndex

BAD_INPUT, NOT_VALID = 2, 3


as_json = click.option("--json", "json_wanted", is_flag=True, help="print the result as JSON on stdout")
path = click.Path(path_type=Path)


class Group(click.Group):
    """Commands whose errors are one line on stderr."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help where no command is given; `main` would make one line of error of click's own."""
        return super().parse_args(ctx, args or ["--help"])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; the exit code says what happened."""
        try:
            # Commands return nothing; an exit code comes from `click.exceptions.Exit`.
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}) or 0)
        except (click.Abort, KeyboardInterrupt):
            text, code = "interrupted; nothing is half-written, and the same command goes on from here", 130
        except click.ClickException as error:
            hint = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "drsa"
            text, code = f"{error.format_message()} (see {hint} --help)", BAD_INPUT
        except Exception as error:
            if os.environ.get("DRSA_TRACEBACK"):
                traceback.print_exc()
            text, code = str(error), BAD_INPUT
            # A ValueError or TypeError of the library names what a user can put right.
            usual = isinstance(error, ValueError | TypeError | OSError | ImportError)
            if not usual and "another writer" not in text:
                text = f"a fault of the program: {type(error).__name__}: {text}; DRSA_TRACEBACK=1 shows where"
                code = 1
        sys.stderr.write(f"drsa: {one_line(text)}\n")
        sys.exit(code)


def _numbers(text: str | None) -> list[float] | None:
    """One number, or one for each channel: 0.5 or 0.485,0.456,0.406."""
    if text is None:
        return None
    parts = text.split(",")
    try:
        found = [float(part) for part in parts * (3 if len(parts) == 1 else 1)]
    except ValueError:
        found = []
    if len(found) != 3:
        raise click.BadParameter(f"{text!r} must be one number, or three with commas between them")
    return found


def _count(text: str | int) -> int | str:
    """A number of concepts, or "auto"."""
    if text == "auto":
        return "auto"
    if not str(text).isdigit() or int(text) < 1:
        raise click.BadParameter(f"{text!r} must be a number of concepts, or auto")
    return int(text)


def options_of(settings: type[ModelSettings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a command from the fields of its settings, which it gets as its first argument."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @as_json
        @click.option("--quiet", is_flag=True, help="no progress, even on a terminal")
        @wraps(function)
        def command(quiet: bool, **given: Any) -> None:
            chosen = settings(**{field.name: given.pop(field.name) for field in fields(settings)})
            function(chosen, progress=Progress(False if quiet else None), **given)

        for field in reversed(fields(settings)):
            decorator = click.argument("model") if field.name == "model" else _option(field)
            command = decorator(command)
        return command

    return decorate


def _option(field: Field[Any]) -> Any:
    about, kind = field.metadata, str(field.type)
    name = field.name.replace("_", "-")
    flag = f"--{name}/--no-{name}" if field.default is True else about.get("name", f"--{name}")
    is_path = kind.startswith("Path") or about.get("metavar") == "PATH"
    types: dict[str, Any] = {"numbers": _numbers, "count": _count}
    choose: Any = types.get(about.get("parse", ""), path if is_path else None)
    if "choices" in about:
        choose = click.Choice(about["choices"])
    elif "within" in about:
        choose = click.FloatRange(*about["within"])
    elif kind.startswith("int") and choose is None:
        choose = click.IntRange(about["least"]) if "least" in about else click.INT
    default: dict[str, Any] = {"required": True}
    if field.default is not MISSING:
        default = {"default": field.default, "show_default": field.default is not None}
    return click.option(
        flag,
        field.name,
        type=None if kind == "bool" else choose,
        is_flag=kind == "bool",
        metavar=about.get("metavar"),
        help=about["help"],
        **default,
    )


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="captum-zennit-drsa", prog_name="drsa")
def cli() -> None:
    """Which concepts does a model use for a class, and can the answer be trusted?

    \b
    drsa audit efficientnet_lite0 --train train --test test --target tabby --out report.html

    \b
    Exit codes: 0 done; 2 bad input, named in one line on stderr; 3 `drsa doctor` finds LRP not valid;
    130 interrupted, the same command goes on; 1 a fault of the program (DRSA_TRACEBACK=1 shows where).
    """


@cli.command()
@options_of(AuditSettings)
def audit(settings: AuditSettings, json_wanted: bool, progress: Progress) -> None:
    """From two folders of images to a report.

    MODEL is the name of a torchvision or timm model, a .safetensors file that names its architecture, or
    module:factory of your own. Folders hold images of the class, or class folders such as
    235_german_shepherd.

    \b
    drsa audit efficientnet_lite0 --train pets/train --test pets/val \\
        --target german_shepherd --out report.html
    drsa audit my_package.models:load --weights model.pt --train train --test test \\
        --target 3 --subspaces auto --out report.html

    Finished parts lie in the folder beside the report: after Ctrl-C the same command goes on.
    """
    names = _read_names(settings.names)
    from .auditing import run_audit

    result = run_audit(replace(settings, names=names), progress)
    summary = result.summary()
    lines = [summary["verdict"]]
    lines += [f"LOOK HERE FIRST: {text}" for text in summary["look_first"]]
    lines += [f"- {text}" for text in summary["facts"]]
    lines += [f"! {text}" for text in summary["be_careful"]]
    _show(summary, json_wanted, [*lines, f"wrote {result.report} (work in {result.work})"])


@cli.command()
@click.option("--depth", type=click.IntRange(1), default=2, show_default=True, help="of the tree")
@options_of(ModelSettings)
def layers(settings: ModelSettings, depth: int, json_wanted: bool, **_: Any) -> None:
    """The layers of a model with the shapes of their outputs, and the one that suits concepts.

    \b
    drsa layers resnet50
    drsa layers my_package.models:load --size 64 --depth 4
    """
    import torch

    from .layers import as_tree, inspect_layers, suggested_layer
    from .networks import count_outputs, open_network

    network = open_network(settings)
    example = torch.zeros(1, 3, network.size, network.size, device=network.device)
    n_outputs = count_outputs(network, example)
    found = inspect_layers(network.model, example, network.layer)
    best = suggested_layer(found)
    shown = [
        {"name": info.name, "kind": info.kind, "shape": info.shape, "parameters": info.n_parameters}
        for info in found
        if info.name
    ]
    size = [3, network.size, network.size]
    name = None if best is None else best.name
    suggested = "no layer is suggested" if best is None else f"suggested: --layer {name}"
    last = f"input {'×'.join(map(str, size))}, {n_outputs} outputs; {suggested}"
    result = {"outputs": n_outputs, "input": size, "suggested": name, "layers": shown}
    _show(result, json_wanted, [as_tree(found, depth), "", last])


@cli.command()
@click.option("--images", type=path, help="folder of images  [default: noise]")
@click.option("--layer", help="where concepts are to be found: rules differ above and below it")
@click.option("--table", is_flag=True, help="print the relevance of every layer")
@options_of(ModelSettings)
def doctor(
    settings: ModelSettings, images: Path | None, layer: str | None, table: bool, json_wanted: bool, **_: Any
) -> None:
    """Is LRP valid on this model, and with which rules? Exit code 3 if it is not.

    \b
    drsa doctor resnet50 --images photographs
    drsa doctor vit_small_patch16_224 --json
    """
    import torch

    from .folders import check_folder
    from .images import photo_files
    from .layers import find_concept_layer
    from .networks import count_outputs, open_network
    from .session import read_first, to_inputs
    from .wrappers import choose_method

    network = open_network(settings)
    if images is None:
        generator = torch.Generator().manual_seed(0)
        inputs = to_inputs(network, torch.rand(2, 3, network.size, network.size, generator=generator))
    else:
        check_folder(images)
        inputs = read_first(network, photo_files(images), 2)
    count_outputs(network, inputs)
    with torch.no_grad():
        target = int(network.model(inputs[:1].clone())[0].argmax())
    try:  # the rules that `drsa fit` would take
        layer = find_concept_layer(network, layer, inputs[:1]).name
    except BadInput:
        if layer is not None:
            raise
    choice = choose_method("lrp", network, inputs, target, layer=layer)
    found = choice.examination
    lines = [choice.reason]
    if found is not None:
        lines += [f"- {finding}" for finding in found["findings"]]
        lines += [f"suggestion: {found['suggestion']}"] if found["suggestion"] else []
        if table:
            lines += ["layer\tmodule\trule\treceived\thanded down"]
            for row in found["layers"]:
                numbers = f"{row['received']:.4g}\t{row['handed_down']:.4g}"
                lines.append(f"{row['name']}\t{row['kind']}\t{row['rule']}\t{numbers}")
    about = {"backend": choice.backend, "reason": choice.reason, "doctor": found}
    _show({"valid": not choice.is_other, **about}, json_wanted, lines)
    if choice.is_other:
        raise click.exceptions.Exit(NOT_VALID)


@cli.command()
@options_of(FitSettings)
def fit(settings: FitSettings, json_wanted: bool, progress: Progress) -> None:
    """Learn the concepts of a class, and save them; with `--target all`, of every class folder.

    \b
    drsa fit efficientnet_lite0 --train pets/train --target german_shepherd \\
        --subspaces auto --out shepherd.safetensors

    For all classes, OUT is a folder, and several processes or GPUs may share the work:

    \b
    torchrun --nproc-per-node 4 --no-python drsa fit efficientnet_lite0 \\
        --train pets/train --target all --out pets_concepts
    """
    from .all_classes import ALL, check_alone, run_fit_all
    from .auditing import run_fit

    check_alone(settings)
    if settings.target == ALL:
        index = run_fit_all(settings, progress)
        if int(os.environ.get("RANK", "0")) == 0:
            _show_all(index, json_wanted, progress)
        return
    learned = run_fit(settings, progress)
    names, made, found = learned.subspaces.names, learned.subspaces.provenance, learned.stability
    lines = [f"wrote {settings.out}: {len(names)} concepts"]
    if made is not None:
        lines.append(f"at layer {made.layer}, by {made.method}")
    if found is not None:
        listed = ", ".join(
            f"{name} {index:.2f}{'' if stable else ' (not stable)'}"
            for name, index, stable in zip(names, found["index"], found["is_stable"], strict=True)
        )
        lines.append(f"stability: {listed}; {found['threshold']:.2f} is needed")
    result = {"subspaces": str(settings.out), "names": list(names), "stability": found}
    _show({**result, "choice": learned.choice, "seconds": progress.seconds}, json_wanted, lines, progress)


def _show_all(index: ClassIndex, json_wanted: bool, progress: Progress) -> None:
    classes: dict[str, str] = {}
    for label, entry in index.classes.items():
        name = entry.get("name", str(label))
        # Different classes may have one name, as two of ImageNet's do.
        classes[f"{name} ({label})" if name in classes else name] = entry["file"]
    failed = {str(label): why for label, why in index.failed.items()}
    lines = [f"wrote {index.folder}: concepts of {len(classes)} classes"]
    lines += [f"{name}: {file}" for name, file in classes.items()]
    lines += [f"class {label} failed: {why}" for label, why in failed.items()]
    result = {"folder": str(index.folder), "classes": classes, "failed": failed}
    _show({**result, "seconds": progress.seconds}, json_wanted, lines, progress)


@cli.command()
@options_of(ExplainSettings)
def explain(settings: ExplainSettings, json_wanted: bool, progress: Progress) -> None:
    """Concept maps of images: one picture for each, R_k as CSV, and the maps as .safetensors.

    \b
    drsa explain efficientnet_lite0 --subspaces shepherd.safetensors --images new --out maps
    """  # fmt: skip
    from .auditing import run_explain

    result = run_explain(settings, progress)
    lines = [f"wrote {result['images']} pictures, relevance.csv and maps to {result['out']}"]
    lines += [f"{name}: {share:.0%} of the evidence" for name, share in result["shares"].items()]
    _show(result, json_wanted, lines, progress)


@cli.command()
@options_of(EvaluateSettings)
def evaluate(settings: EvaluateSettings, json_wanted: bool, progress: Progress) -> None:
    """How good the concepts are on other images: patch flipping, ablation, what adds up to what.

    \b
    drsa evaluate efficientnet_lite0 --subspaces shepherd.safetensors --test pets/val \\
        --out evaluation.json
    """  # fmt: skip
    from .auditing import run_evaluate
    from .findings import correlation_text

    result = run_evaluate(settings, progress)
    areas = [f"{name} {curve['aupc']:.3g}" for name, curve in result["flipping"]["curves"].items()]
    lines = [
        f"area under the flipping curve (lower is better): {', '.join(areas)}",
        f"correlation of relevance and effect: {correlation_text(result['ablation']['correlation'])}",
        f"wrote {settings.out}",
    ]
    _show(result, json_wanted, lines, progress)


@cli.command()
@click.argument("work", type=path)
@click.option("--out", required=True, type=path, help="the HTML file")
@click.option("--names", type=path, help="JSON file with names of the concepts, as the report saves it")
@as_json
@click.option("--quiet", is_flag=True, expose_value=False, help="no progress, even on a terminal")
def report(work: Path, out: Path, names: Path | None, json_wanted: bool) -> None:
    """Write the report of a finished audit again, with other names; the subspaces get them too.

    WORK is the folder beside the report that `drsa audit` has written.

    \b
    drsa report report.drsa --names names.json --out report.html
    """  # fmt: skip
    from .auditing import rename_concepts
    from .report import write_report
    from .work import check_out

    check_out(out)
    found = rename_concepts(work, _read_names(names))
    write_report(work, out)
    line = f"wrote {out} with the concepts {', '.join(found.names)}"
    _show({"report": str(out), "names": list(found.names)}, json_wanted, [line])


def _show(result: Any, json_wanted: bool, lines: Sequence[str], progress: Progress | None = None) -> None:
    """Print a result: as JSON, or in lines; notes go to stderr, unless they were shown already."""
    if progress is not None and not progress.shown:
        for note in progress.notes:
            sys.stderr.write(f"note: {note}\n")
    text = json.dumps(result, indent=1, ensure_ascii=False, default=str) if json_wanted else "\n".join(lines)
    click.echo(text)


def _read_names(file: Any) -> dict[str, str] | list[str] | None:
    """Names of concepts from a JSON file: a list of all, or new names by old ones."""
    if file is None:
        return None
    from drsa_core.storage import read_json

    names = read_json(file)
    values = list(names.values()) if isinstance(names, dict) else names
    if not isinstance(values, list) or not all(isinstance(name, str) and name.strip() for name in values):
        raise BadInput(f"{file} must hold a list of names, or an object of new names by old ones")
    return names
