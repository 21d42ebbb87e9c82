"""Specs to callables: compiled kernels, each made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute

from flash_attn_fp8.compiler.signatures import forward_signature
from flash_attn_fp8.kernels.sm100.forward import Sm100Forward
from flash_attn_fp8.specs import Sm100Spec

OPTIONS = "--enable-tvm-ffi"


def compile_kernel(spec: Sm100Spec) -> Callable[..., Any]:
    """The kernel of a spec for the architecture that CuTe DSL compiles for now."""
    tensors, scalars = forward_signature(spec)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel: Callable[..., Any] = cute.compile(
        Sm100Forward(spec), tensors, scalars, stream, options=OPTIONS
    )
    return kernel
