"""Specs to callables: compiled kernels, each made once."""

from __future__ import annotations

import warnings
from typing import Any

import cutlass.cute as cute
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning

from flash_attn_fp8.compiler.signatures import (
    append_signature,
    cache_signature,
    combine_signature,
    forward_signature,
    transpose_signature,
    widen_signature,
)
from flash_attn_fp8.kernels.append import Append
from flash_attn_fp8.kernels.cached.forward import CacheForward
from flash_attn_fp8.kernels.combine import Combine
from flash_attn_fp8.kernels.sm90.forward import Sm90Forward
from flash_attn_fp8.kernels.sm90.transpose import Transpose
from flash_attn_fp8.kernels.sm90.widen import Widen
from flash_attn_fp8.kernels.sm100.forward import Sm100Forward
from flash_attn_fp8.specs import (
    AppendSpec,
    CacheSpec,
    Sm90Spec,
    Sm100Spec,
    Spec,
    TransposeSpec,
    WidenSpec,
)

OPTIONS = "--enable-tvm-ffi"


def compile_kernel(spec: Spec, options: str = "", **how: Any) -> Any:
    """The kernel of a spec, for the architecture that CuTe DSL compiles for or options name."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel: Any
    arguments: tuple[Any, ...]
    if isinstance(spec, Sm100Spec):
        kernel, arguments = Sm100Forward(spec), forward_signature(spec)
    elif isinstance(spec, Sm90Spec):
        kernel, arguments = Sm90Forward(spec), forward_signature(spec)
    elif isinstance(spec, TransposeSpec):
        kernel, arguments = Transpose(spec), transpose_signature(spec)
    elif isinstance(spec, WidenSpec):
        kernel, arguments = Widen(spec), (widen_signature(spec),)
    elif isinstance(spec, CacheSpec):
        kernel, arguments = CacheForward(spec), cache_signature(spec)
    elif isinstance(spec, AppendSpec):
        kernel, arguments = Append(spec), (append_signature(spec),)
    else:
        kernel, arguments = Combine(spec), (combine_signature(spec),)
    with warnings.catch_warnings():
        # Long loops are unrolled on purpose; who turns warnings into errors shall compile, too.
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        return cute.compile(kernel, *arguments, stream, options=f"{OPTIONS} {options}", **how)
