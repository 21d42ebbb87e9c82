"""Examples run, and show what the documentation says of them."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_generate() -> None:
    """Finer formats are nearer to the bf16 cache, and all are near."""
    errors = runpy.run_path(str(EXAMPLES / "generate.py"))["main"]()
    assert 0 < errors["int8"] < errors["e4m3"] < errors["e5m2"] < 0.02
