"""Skips without CuTe DSL; flash-attn-4 where it is installed."""

import sys
import types

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")


@pytest.fixture(scope="session")
def fa4():
    """flash-attn-4's module of entry points.

    One of its dependencies imports triton, for benchmarks; where that is not installed (it comes
    with torch for GPUs), an empty stand-in does, and only while the import lasts.
    """
    pytest.importorskip("flash_attn.cute.cache_utils" if "triton" in sys.modules else "flash_attn")
    import torch._dynamo  # noqa: F401  before the stand-in: it looks into a triton that is there

    try:
        import triton  # noqa: F401
    except ImportError:
        stub = types.ModuleType("triton")
        stub.runtime = types.SimpleNamespace(cache=types.SimpleNamespace(FileCacheManager=object))
        sys.modules["triton"] = stub
        try:
            interface = pytest.importorskip("flash_attn.cute.interface")
        finally:
            del sys.modules["triton"]
        return interface
    return pytest.importorskip("flash_attn.cute.interface")
