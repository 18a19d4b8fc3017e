"""Sphinx configuration. `make -C docs html` builds the site; every warning is an error."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

project = "captum-zennit-drsa"
author = "the captum-zennit-drsa developers"
release = version_of("captum-zennit-drsa")
version = ".".join(release.split(".")[:2])

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_static"]
# The type `torch.device` of a parameter is read as an attribute `device` of several classes.
suppress_warnings = ["ref.python"]
default_role = "code"  # `name` in docstrings
html_theme = "furo"
html_title = "captum-zennit-drsa"
html_static_path = ["_static"]
html_css_files = ["figures.css"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks keep the outputs that they were committed with; a test runs them

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

NOTEBOOKS = Path(__file__).parent.parent / "examples"


def copy_notebooks(app: Sphinx) -> None:
    """Notebooks live beside the examples; Sphinx reads only what lies below its own folder."""
    folder = Path(app.srcdir) / "notebooks"
    folder.mkdir(exist_ok=True)
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        shutil.copyfile(file, folder / file.name)


def escape(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings are read in editors too: there, |x| and (N, *input) need no backslashes."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = line.split("`")  # every other part is code
            parts[::2] = [re.sub(r"\||(?<= )\*(?=\w+\))", r"\\\g<0>", part) for part in parts[::2]]
            lines[number] = "`".join(parts)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("autodoc-process-docstring", escape, priority=600)  # after napoleon
