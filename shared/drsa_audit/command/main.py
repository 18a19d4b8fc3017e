"""The group of commands, and what becomes of errors: one line on stderr, and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import click

from ..errors import BadInput, one_line
from .audit import audit
from .codes import BAD_INPUT, FAULT, INTERRUPTED, OK
from .doctor import doctor
from .evaluate import evaluate
from .explain import explain
from .fit import fit
from .layers import layers
from .report import report


class Group(click.Group):
    """Commands whose errors are one line on stderr."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help where no command is given; `main` would make one line of error of click's own."""
        return super().parse_args(ctx, args or ["--help"])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; the exit code says what happened."""
        try:
            # Commands return nothing; an exit code comes from `click.exceptions.Exit`.
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except (click.Abort, KeyboardInterrupt):
            _say("interrupted; nothing is half-written, and the same command goes on from here")
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            hint = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "drsa"
            _say(f"{error.format_message()} (see {hint} --help)")
            sys.exit(BAD_INPUT)
        # A ValueError or TypeError of the library names what a user can put right.
        except (BadInput, ValueError, TypeError, OSError, ImportError) as error:
            if os.environ.get("DRSA_TRACEBACK"):
                traceback.print_exc()
            _say(error)
            sys.exit(BAD_INPUT)
        except Exception as error:
            if os.environ.get("DRSA_TRACEBACK"):
                traceback.print_exc()
            _say(f"a fault of the program: {type(error).__name__}: {error}; DRSA_TRACEBACK=1 shows where")
            sys.exit(FAULT)
        sys.exit(code or OK)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="captum-zennit-drsa", prog_name="drsa")
def cli() -> None:
    """Which concepts does a model use for a class, and can the answer be trusted?

    \b
    drsa audit efficientnet_lite0 --train train --test val --target tabby --out report.html

    \b
    Exit codes: 0 done; 2 bad input, named in one line on stderr; 3 `drsa doctor` finds LRP not valid;
    130 interrupted, the same command goes on; 1 a fault of the program (DRSA_TRACEBACK=1 shows where).
    """


for command in (audit, layers, doctor, fit, explain, evaluate, report):
    cli.add_command(command)


def _say(text: object) -> None:
    sys.stderr.write(f"drsa: {one_line(text)}\n")
