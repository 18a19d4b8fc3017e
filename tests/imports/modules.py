"""Which module imports which, read from the source: nothing is imported for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY = ("drsa_core", "captum_drsa", "zennit_drsa", "drsa_audit")


@dataclass(frozen=True)
class Module:
    """A module: dotted name, number of lines, and dotted names of all modules that it imports anywhere."""

    name: str
    lines: int
    imports: frozenset[str]

    @property
    def package(self) -> str:
        """The name up to the first dot."""
        return self.name.partition(".")[0]

    def imports_of(self, *packages: str) -> list[str]:
        """Its imports that lie in one of these packages."""
        return sorted(name for name in self.imports if name.partition(".")[0] in packages)


def read_modules(root: Path, packages: tuple[str, ...] = LIBRARY) -> list[Module]:
    """The modules of packages that lie in a repository, or in the folder `shared` of it."""
    files: dict[str, Path] = {}
    for place in (root, root / "shared"):
        for package in packages:
            for file in sorted((place / package).rglob("*.py")):
                parts = file.relative_to(place).with_suffix("").parts
                files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return [
        Module(name, len(text.splitlines()), frozenset(_imports(ast.parse(text), name, file, files)))
        for name, file in sorted(files.items())
        for text in [file.read_text()]
    ]


def _imports(tree: ast.AST, name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):  # also inside functions and under TYPE_CHECKING
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner in known else source
