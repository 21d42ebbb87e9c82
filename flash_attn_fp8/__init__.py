"""Flash-attention forward in fp8 for NVIDIA Blackwell, and its numerics anywhere.

`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_combine` are called like flash-attn-4's,
`flash_attn_with_kvcache` like FA3's; `quantize` makes their inputs, `explain` says what a call
would run and why, and `simulate` runs its kernels on a simulated device. Importing this loads no
compiler, and nothing else before a name is used: the simulator, for one, is to be had without
torch. It needs no GPU.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_attn_fp8.accuracy import accuracy_report
    from flash_attn_fp8.api import _flash_attn_fwd, flash_attn_func, flash_attn_varlen_func
    from flash_attn_fp8.combine import flash_attn_combine
    from flash_attn_fp8.errors import FlashAttnFp8Error, InvalidArguments, Unsupported
    from flash_attn_fp8.explanation import explain
    from flash_attn_fp8.kv_cache import QuantizedKVCache, append_kv
    from flash_attn_fp8.kv_worth import KVCacheShare, KVError, kv_cache_share, kv_error
    from flash_attn_fp8.kvcache import flash_attn_with_kvcache
    from flash_attn_fp8.policy import POLICIES, Fp8Policy, policy_for
    from flash_attn_fp8.precompilation import precompile
    from flash_attn_fp8.quantization import Quantized, quantize
    from flash_attn_fp8.simulation import simulate

try:
    __version__ = version("flash-attn-fp8")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "POLICIES",
    "FlashAttnFp8Error",
    "Fp8Policy",
    "InvalidArguments",
    "KVCacheShare",
    "KVError",
    "Quantized",
    "QuantizedKVCache",
    "Unsupported",
    "__version__",
    "_flash_attn_fwd",
    "accuracy_report",
    "append_kv",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "kv_cache_share",
    "kv_error",
    "policy_for",
    "precompile",
    "quantize",
    "simulate",
]

# Where a name is at home. No module has the name of something in here: importing the module would
# put it in that one's place.
_HOME = {
    "POLICIES": "policy",
    "FlashAttnFp8Error": "errors",
    "Fp8Policy": "policy",
    "InvalidArguments": "errors",
    "KVCacheShare": "kv_worth",
    "KVError": "kv_worth",
    "Quantized": "quantization",
    "QuantizedKVCache": "kv_cache",
    "Unsupported": "errors",
    "_flash_attn_fwd": "api",
    "accuracy_report": "accuracy",
    "append_kv": "kv_cache",
    "explain": "explanation",
    "flash_attn_combine": "combine",
    "flash_attn_func": "api",
    "flash_attn_varlen_func": "api",
    "flash_attn_with_kvcache": "kvcache",
    "kv_cache_share": "kv_worth",
    "kv_error": "kv_worth",
    "policy_for": "policy",
    "precompile": "precompilation",
    "quantize": "quantization",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # from now on as quick as any other name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
