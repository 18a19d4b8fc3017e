"""The command `drsa`. Its dependencies beyond the core's come with the extra `audit`."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("click", "jinja2", "captum", "zennit", "timm", "torchvision", "PIL", "cv2")


def main() -> None:
    """Entry point of the command line; says in one line what is missing, if something is."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"drsa: {', '.join(missing)} not installed; pip install 'captum-zennit-drsa[audit]' brings all "
            "that the command needs\n"
        )
        sys.exit(2)
    from .cli import cli

    cli(prog_name="drsa")
