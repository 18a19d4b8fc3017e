"""A virtual environment with what `pip install captum-zennit-drsa` brings without extras, and pytest.

    python .ci/core_only.py FOLDER

Nothing is downloaded: the packages are links to those of the environment that runs this script.
"""

from __future__ import annotations

import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def needed(names: list[str]) -> dict[str, Distribution]:
    """These distributions and all that they require, without extras."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    found = needed(["captum-zennit-drsa", "pytest", "pytest-xdist", "hypothesis"])
    del found["captum-zennit-drsa"]  # which is tested as it lies in the tree
    for one in found.values():
        for top in {file.parts[0] for file in one.files or () if file.parts[0] != ".."}:
            source, link = Path(str(one.locate_file(top))), site / top
            if source.exists() and not link.exists():
                link.symlink_to(source)


if __name__ == "__main__":
    main()
