"""Run `drsa` in this process, and see what it says and leaves."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result
from drsa_audit.cli import cli


def drsa(*words: str | Path | int) -> Result:
    """The result of a command, as `exit_code`, `stdout` and `stderr`."""
    return CliRunner().invoke(cli, [str(word) for word in words], prog_name="drsa")


def succeeded(*words: str | Path | int) -> Result:
    """As `drsa`, for a command that must succeed."""
    result = drsa(*words)
    assert result.exit_code == 0, f"{result.stderr}{result.exception!r}"
    return result


def refused(*words: str | Path | int) -> str:
    """The one line that a command with bad input writes to stderr, and nothing to stdout."""
    result = drsa(*words)
    assert result.exit_code == 2, f"{result.exit_code}: {result.stderr}{result.exception!r}"
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("drsa: ")
    return line


def files_in(folder: Path) -> list[Path]:
    """All files in a folder and below it."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
