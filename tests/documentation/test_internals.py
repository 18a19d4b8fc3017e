"""The page on internals names everything that is private to another library and used here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared/drsa_core", "shared/drsa_audit", "zennit_drsa", "captum_drsa")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _nodes() -> Iterator[ast.AST]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def foreign_names() -> set[str]:
    """Private names that are read somewhere and defined nowhere in these packages."""
    used, own = set(), set()
    for node in _nodes():
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()) if _is_private(name):
                used.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls")):
                own.add(name)
            case (
                ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name))
            ):
                own.add(name)
            case ast.Assign(targets=targets):
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                used |= {n.name for n in names if _is_private(n.name) or "._" in module}
    return used - own


def test_the_page_names_what_is_private_to_others():
    found = foreign_names()
    assert {"_run_forward", "_version", "_forward_hooks"} <= found  # the search itself works
    page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    assert sorted(name for name in found if f"{name}`" not in page) == []
