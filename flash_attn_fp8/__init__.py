"""Flash-attention forward in fp8 for NVIDIA Blackwell, and its numerics anywhere.

`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_combine` are called like flash-attn-4's,
`flash_attn_with_kvcache` like FA3's; `quantize` makes their inputs, `explain` says what a call
would run and why, and `simulate` runs its kernels on a simulated device. Importing this loads no
compiler and needs no GPU.
"""

from importlib.metadata import PackageNotFoundError, version

from flash_attn_fp8.api import _flash_attn_fwd, flash_attn_func, flash_attn_varlen_func
from flash_attn_fp8.combine import flash_attn_combine
from flash_attn_fp8.errors import FlashAttnFp8Error, InvalidArguments, Unsupported
from flash_attn_fp8.explain import explain
from flash_attn_fp8.kvcache import flash_attn_with_kvcache
from flash_attn_fp8.policy import POLICIES, Fp8Policy, policy_for
from flash_attn_fp8.precompile import precompile
from flash_attn_fp8.quantize import Quantized, quantize
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
    "Quantized",
    "Unsupported",
    "__version__",
    "_flash_attn_fwd",
    "accuracy_report",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "policy_for",
    "precompile",
    "quantize",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name == "accuracy_report":
        from flash_attn_fp8.accuracy import accuracy_report

        return accuracy_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
