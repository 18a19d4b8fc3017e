"""Every Python snippet of the README and of the documentation runs, page by page, in order."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("timm")
pytest.importorskip("matplotlib")
pytest.importorskip("cv2")
from .names import folders_of_images, names, small_vgg

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


WITH_SNIPPETS = [page for page in PAGES if snippets(page)]


def here(code: str) -> str:
    """The snippet with small pictures, for a test that takes seconds."""
    return code.replace("224, 224", "64, 64")


def test_pages_with_snippets_are_found() -> None:
    assert PAGES[0] in WITH_SNIPPETS
    assert len(WITH_SNIPPETS) >= 5


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders_of_images(tmp_path)
    # Nothing is downloaded here: a small network with random weights and the same names of layers.
    monkeypatch.setattr("torchvision.models.vgg16", lambda weights: small_vgg())
    # Pages that begin with imports bring all that they use; others go on with what a reader has by then.
    first = snippets(page)[0].lstrip()
    space = {} if first.startswith(("import ", "from ")) else names()
    for number, code in enumerate(snippets(page), 1):
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(number)
            # Random weights: what warnings say of the explanations is true, and of no interest here.
            warnings.simplefilter("ignore", UserWarning)
            exec(compile(here(code), f"{page.name}, snippet {number}", "exec"), space)
