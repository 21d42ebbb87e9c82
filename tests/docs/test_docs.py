"""What the documentation shows is what happens: examples run, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import flash_attn_fp8

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
