"""Other people's kernels, for comparison: imported in one place."""

import importlib
import importlib.util
import sys
import types
import warnings
from types import ModuleType


def flash_attn_4() -> ModuleType:
    """flash-attn-4's module of entry points (`flash_attn.cute.interface`).

    One of its dependencies imports triton, for benchmarks; where that is not installed (it comes
    with torch for GPUs), an empty stand-in does, and only while the import lasts.

    Raises:
        ImportError: flash-attn-4 is not installed: pip install flash-attn-4
    """
    with warnings.catch_warnings():  # of what it imports: not its caller's
        warnings.simplefilter("ignore")
        return _imported("flash_attn.cute.interface")


def _imported(name: str) -> ModuleType:
    if name in sys.modules or importlib.util.find_spec("triton") is not None:
        return importlib.import_module(name)
    import torch._dynamo  # noqa: F401  before the stand-in: it looks into a triton that is there

    triton = types.ModuleType("triton")
    triton.runtime = types.SimpleNamespace(  # type: ignore[attr-defined]
        cache=types.SimpleNamespace(FileCacheManager=object)
    )
    sys.modules["triton"] = triton
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["triton"]
