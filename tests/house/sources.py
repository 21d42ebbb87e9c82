"""The project's own Python files, read and parsed once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its path from the root, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text, self.path)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function, nested ones too, as `(Class.method, node)`."""
        yield from _functions(self.tree, "")


@cache
def _parse(text: str, path: str) -> ast.Module:
    return ast.parse(text, path)


def _functions(node: ast.AST, inside: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, Function | ast.ClassDef):
            name = f"{inside}.{child.name}".lstrip(".")
        if isinstance(child, Function):
            yield name, child
        yield from _functions(child, name)


@cache
def sources(folder: str) -> tuple[Source, ...]:
    """Every .py file below one of the project's folders, in order."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return tuple(Source(f.relative_to(ROOT).as_posix(), f.read_text("utf-8")) for f in files)
