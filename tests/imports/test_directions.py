"""The directions of imports that keep the house in order (design: "One data flow")."""

from __future__ import annotations

from pathlib import Path

import pytest

from .modules import LIBRARY, Module, read_modules

ROOT = Path(__file__).resolve().parents[2]
MODULES = {package: [m for m in read_modules(ROOT) if m.package == package] for package in LIBRARY}

# What each package may not import: of the library, and of Captum, Zennit and timm.
FORBIDDEN = {
    "drsa_core": ("captum_drsa", "zennit_drsa", "drsa_audit", "captum", "zennit", "timm"),
    "captum_drsa": ("zennit_drsa", "drsa_audit", "zennit"),
    "zennit_drsa": ("captum_drsa", "drsa_audit", "captum"),
    "drsa_audit": (),
}
# The NFNet canonizer is the one module of the core that knows Zennit and timm.
NFNET_CANONIZER = ("nfnet", "nfnet_canonizer")


def is_exempt(module: Module, imported: str) -> bool:
    is_canonizer = module.package == "drsa_core" and module.name.rpartition(".")[2] in NFNET_CANONIZER
    return is_canonizer and imported.partition(".")[0] in ("zennit", "timm")


@pytest.mark.parametrize("package", LIBRARY)
def test_imports_go_down_only(package: str) -> None:
    assert MODULES[package], f"no modules of {package} were found"
    wrong = [
        f"{module.name} imports {imported}"
        for module in MODULES[package]
        for imported in module.imports_of(*FORBIDDEN[package])
        if not is_exempt(module, imported)
    ]
    assert not wrong


def test_only_examples_and_tests_stand_above_the_audit() -> None:
    assert all(not m.imports_of("drsa_audit") for p in LIBRARY if p != "drsa_audit" for m in MODULES[p])
    assert {p for m in MODULES["drsa_audit"] for p in LIBRARY if m.imports_of(p)} == set(LIBRARY)


def test_the_library_imports_neither_examples_nor_tests() -> None:
    names = {file.stem for file in (ROOT / "examples").glob("*.py")} | {"examples", "tests", "shared"}
    wrong = {m.name: found for p in LIBRARY for m in MODULES[p] if (found := m.imports_of(*names))}
    assert not wrong


def test_imports_are_read_wherever_they_stand(tmp_path) -> None:
    package = tmp_path / "shared" / "drsa_core" / "layer"
    package.mkdir(parents=True)
    (tmp_path / "shared" / "drsa_core" / "__init__.py").write_text("from .pairs import Pairs\n")
    (tmp_path / "shared" / "drsa_core" / "pairs.py").write_text("import torch.nn as nn\n")
    (package / "__init__.py").write_text("from . import cut\nfrom ..pairs import Pairs\n")
    (package / "cut.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from captum_drsa.lrp import LRPPass\n"
        "def f():\n    import zennit.core\n    from .. import pairs\n"
    )
    found = {module.name: module.imports for module in read_modules(tmp_path)}
    assert found == {
        "drsa_core": {"drsa_core.pairs"},
        "drsa_core.pairs": {"torch.nn"},
        "drsa_core.layer": {"drsa_core.layer.cut", "drsa_core.pairs"},
        "drsa_core.layer.cut": {"typing", "captum_drsa.lrp", "zennit.core", "drsa_core.pairs"},
    }
