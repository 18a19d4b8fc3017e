"""Every example in a docstring runs, and prints what it says."""

from __future__ import annotations

import doctest
import warnings
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("timm")
from drsa_core import ConvergenceWarning

from tests.imports.modules import LIBRARY, read_modules

from .names import folders_of_images, names

ROOT = Path(__file__).resolve().parents[2]


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [import_module(module.name) for module in read_modules(ROOT, LIBRARY)]
    # A name that one module takes from another is found in the one that defines it.
    found = [test for module in modules for test in finder.find(module, module.__name__, module)]
    return [test for test in found if test.examples]


EXAMPLES = examples()


def test_no_example_is_skipped() -> None:
    assert len(EXAMPLES) >= 10
    for test in EXAMPLES:
        skipped = [e.source for e in test.examples if doctest.SKIP in e.options]
        assert not skipped, f"{test.name} skips {skipped}"


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_example(test: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders_of_images(tmp_path)
    test.globs = {**names(), **test.globs}
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    with warnings.catch_warnings():
        # Random weights: what the warnings say of the explanations is true, and of no interest here.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", ConvergenceWarning)
        failed = runner.run(test, out=said.append).failed
    assert not failed, "".join(said)
