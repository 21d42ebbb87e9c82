"""Specs to files: kernels compiled ahead of time, for a GPU or for the simulated one."""

from __future__ import annotations

import gc
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cutlass._mlir import ir

from flash_attn_fp8.compiler import link
from flash_attn_fp8.compiler.build import compile_kernel
from flash_attn_fp8.compiler.key import Key
from flash_attn_fp8.specs import Spec

# The least that a machine of the architecture has.
_ANY_CPU = {
    "x86_64": {"target-cpu": "x86-64", "target-features": "+sse2"},
    "aarch64": {"target-cpu": "generic", "target-features": "+neon"},
}


def export(spec: Spec, key: Key, folder: Path, compiler: str) -> None:
    """Compiles a kernel and puts its library into `folder`; for simulation also PTX and cubin."""
    # The DSL keeps what it dumps under names as long as a signature.
    with tempfile.TemporaryDirectory(prefix="flash_attn_fp8-") as scratch, _without_collections():
        object_file = Path(scratch) / "kernel.o"
        if key.linkage == "gpu":
            kernel = compile_kernel(spec, f"--gpu-arch {key.arch}", no_jit_engine=True)
            _export(kernel, key, object_file)
            link.link(object_file, folder / link.LIBRARY, compiler)
            return
        from flash_attn_fp8.sim.cute import aot

        options = f"--gpu-arch {key.arch} --keep-ptx --keep-cubin --dump-dir {scratch}"
        with aot.exporting():
            kernel = compile_kernel(spec, options, no_jit_engine=True)
            _export(kernel, key, object_file)
        aot.link(object_file, folder / link.LIBRARY, compiler)
        (folder / link.PTX).write_text(kernel.__ptx__, encoding="utf-8")
        (folder / link.CUBIN).write_bytes(kernel.__cubin__)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps the garbage collector off tracing, which makes objects that live to its end.

    6 to 8 % of a compilation's CPU time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _export(kernel: Any, key: Key, object_file: Path) -> None:
    _make_portable(kernel.ir_module)
    kernel.export_to_c(str(object_file), function_name=key.function)


def _make_portable(module: Any) -> None:
    """Has the host code compiled for any CPU, not for the one here (AVX and all) as by default."""
    features = _ANY_CPU.get(platform.machine(), {})
    with module.context, ir.Location.unknown():
        attributes = [
            ir.ArrayAttr.get([ir.StringAttr.get(text) for text in pair])
            for pair in features.items()
        ]
        for op in module.body.operations:
            function = op.operation
            if function.name == "llvm.func" and len(function.regions[0].blocks):
                function.attributes["passthrough"] = ir.ArrayAttr.get(attributes)
