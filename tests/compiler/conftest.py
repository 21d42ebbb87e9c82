"""Skips without CuTe DSL; a cache of its own for each test, and kernels that cost little."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_attn_fp8.compiler import bundle, cache
from flash_attn_fp8.specs import CombineSpec

if importlib.util.find_spec("cutlass") is None:
    collect_ignore_glob = ["test_*.py"]

ARCH = "sm_100a"
# The kernel that compiles fastest.
SMALL = CombineSpec("bf16", 64, varlen=False, lse=False, output_scale=False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, on disk and in memory; the folder of its entries."""
    monkeypatch.setenv("FLASH_ATTN_FP8_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASH_ATTN_FP8_BUNDLE", raising=False)
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setattr(bundle, "_registered", {})
    bundle._load_named.cache_clear()
    yield tmp_path / "cache" / "kernels"
    bundle._load_named.cache_clear()


class Builder:
    """Stands for the compiler: what it makes is a text, and it counts."""

    def __init__(self) -> None:
        self.exported = self.compiled = self.loaded = 0
        self.unloadable = 0

    def export(self, spec: object, key: object, new: Path, compiler: str) -> None:
        self.exported += 1
        (new / "kernel.so").write_text(f"code of {spec}")

    def load(self, entry: Path, key: object) -> object:
        self.loaded += 1
        if self.unloadable:
            self.unloadable -= 1
            raise RuntimeError("it does not load")
        text = (entry / "kernel.so").read_text()
        return lambda: text

    def compile(self, spec: object) -> object:
        self.compiled += 1
        return lambda: f"in memory {spec}"


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    found = Builder()
    monkeypatch.setattr(cache, "_export", found.export)
    monkeypatch.setattr(cache, "_load", found.load)
    monkeypatch.setattr(cache, "_compile", found.compile)
    return found
