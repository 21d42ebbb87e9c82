"""What the documentation shows is what happens: examples run, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import flash_attn_fp8

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where the standard library has none

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("tests/**/*.md")])
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(flash_attn_fp8.__path__, "flash_attn_fp8.")
    if not name.endswith("__main__")
]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")


def test_readme_examples() -> None:
    """The README's session prints what it says."""
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    """Examples in docstrings print what they say."""
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_public_functions_have_examples() -> None:
    """Every public function shows a call."""
    functions = [n for n in flash_attn_fp8.__all__ if n.islower() and not n.startswith("_")]
    assert functions
    without = [n for n in functions if ">>>" not in (getattr(flash_attn_fp8, n).__doc__ or "")]
    assert not without


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and pictures of a page exist."""
    missing = [to for to in LINK.findall(page.read_text()) if not (page.parent / to).exists()]
    assert not missing


def _layers_of_the_design() -> list[set[str]]:
    """The lines of the module list of DESIGN, each the names before its description."""
    section = (ROOT / "docs" / "DESIGN.md").read_text("utf-8").partition("\n## Modules")[2]
    lines = section.split("```")[1].strip().splitlines()
    return [set(line.partition("  ")[0].split(", ")) for line in lines]


def _layers_of_the_contract() -> list[set[str]]:
    """The layers that `lint-imports` checks, without the modules that are not written yet."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    (layers,) = [c["layers"] for c in settings["contracts"] if c["type"] == "layers"]
    written = [{n for n in layer.split(" | ") if not n.startswith("(")} for layer in layers]
    return [layer for layer in written if layer]


def test_the_design_lists_the_modules_that_there_are() -> None:
    modules = {name for _, name, _ in pkgutil.iter_modules(flash_attn_fp8.__path__)}
    assert set().union(*_layers_of_the_design()) == modules


def test_the_design_has_the_layers_of_the_contract() -> None:
    assert _layers_of_the_design() == _layers_of_the_contract()
