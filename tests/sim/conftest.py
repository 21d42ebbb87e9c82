"""The compiled loop, and flash-attn-4 where it is installed."""

import importlib.util
import sys
import types

import pytest

from flash_attn_fp8.sim import engine

# Before tests are timed: the first time it takes a while.
engine.warm_up()


@pytest.fixture(scope="session")
def fa4():
    """flash-attn-4's module of entry points.

    One of its dependencies imports triton, for benchmarks; where that is not installed (it comes
    with torch for GPUs), an empty stand-in does, and only while the import lasts.
    """
    if importlib.util.find_spec("triton") is not None:
        return pytest.importorskip("flash_attn.cute.interface")
    import torch._dynamo  # noqa: F401  before the stand-in: it looks into a triton that is there

    triton = types.ModuleType("triton")
    triton.runtime = types.SimpleNamespace(cache=types.SimpleNamespace(FileCacheManager=object))
    sys.modules["triton"] = triton
    try:
        return pytest.importorskip("flash_attn.cute.interface")
    finally:
        del sys.modules["triton"]
