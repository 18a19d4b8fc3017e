"""The site builds without a warning, and its reference holds every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("timm")
pytest.importorskip("furo")
pytest.importorskip("myst_nb")
from sphinx.util.inventory import InventoryFile

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    "drsa_core",
    "drsa_core.evaluation",
    "drsa_core.plot",
    "drsa_core.refine",
    "zennit_drsa",
    "captum_drsa",
    "drsa_audit",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    done = subprocess.run([*command, str(ROOT / "docs"), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_reference_holds_every_public_name(site: Path) -> None:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    documented = {name for kind, found in inventory.items() if kind.startswith("py:") for name in found}
    missing = []
    for package in PUBLIC:
        module = import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            home = f"{getattr(thing, '__module__', package)}.{getattr(thing, '__qualname__', name)}"
            if not {f"{package}.{name}", home} & documented:
                missing.append(f"{package}.{name}")
    assert not missing


def test_every_page_and_picture_is_there(site: Path) -> None:
    pages = [p.relative_to(ROOT / "docs").with_suffix(".html") for p in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not (site / page).is_file()] == []
    assert "vgg16.png" in {picture.name for picture in (site / "_images").iterdir()}


def test_every_picture_has_a_description(site: Path) -> None:
    bare = [
        (page.name, tag)
        for page in site.rglob("*.html")
        if page.parent.name != "notebooks"  # figures there are outputs of cells, with the text around them
        for tag in re.findall(r'<img\b[^>]*src="[^"]*_images/[^>]*>', page.read_text(encoding="utf-8"))
        if not re.search(r'\balt="[^"]{20,}"', tag)
    ]
    assert bare == []
