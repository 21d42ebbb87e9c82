"""Exported kernels as shared libraries: linked once, loaded without the compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from flash_attn_fp8.errors import Unsupported

LIBRARY, PTX, CUBIN = "kernel.so", "kernel.ptx", "kernel.cubin"  # the files of an entry
RUNTIME = "libcute_dsl_runtime.so"
# Where the DSL's runtime library is. cu12 comes with the DSL; cu13 comes beside it, by an extra,
# and then it is what was asked for.
_RUNTIME_WHEELS = ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12")


def c_compiler() -> str | None:
    """The C compiler that links; None where there is none, and kernels stay in memory."""
    return shutil.which("gcc") or shutil.which("cc")


def require_c_compiler() -> str:
    """The C compiler.

    Raises:
        Unsupported: there is none.
    """
    found = c_compiler()
    if found is None:
        raise Unsupported("no gcc is in PATH, and kernels are linked with it; install gcc")
    return found


def runtime_library() -> Path:
    """The DSL's runtime library, whose functions the host code of a kernel calls.

    Raises:
        Unsupported: it is not installed.
    """
    found = _runtime()
    if found is None:
        wanted = " or ".join(_RUNTIME_WHEELS)
        raise Unsupported(f"{RUNTIME} is not installed; install nvidia-cutlass-dsl ({wanted})")
    return found[1]


def runtime_wheel() -> str:
    """The name and version of the wheel that the runtime library is from; empty without one."""
    found = _runtime()
    return "" if found is None else f"{found[0]} {metadata.version(found[0])}"


@cache
def _runtime() -> tuple[str, Path] | None:
    for wheel in _RUNTIME_WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == RUNTIME and "stubs" not in file.parts:
                return wheel, Path(str(file.locate()))
    return None


def link(object_file: Path, library: Path, compiler: str) -> None:
    """Makes a shared library of an exported kernel.

    Raises:
        OSError: the C compiler cannot be run or fails.
    """
    command = [compiler, "-shared", "-o", str(library), str(object_file), str(runtime_library())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{compiler} cannot link {object_file}: {done.stderr.strip()}")


def load(library: Path, function: str, runtime: Path) -> Callable[..., Any]:
    """A kernel of a shared library, ready to be called; needs no compiler.

    Raises:
        OSError, RuntimeError, AttributeError: it is no library of this kernel that loads here.
    """
    import tvm_ffi

    # Global, since the library finds the functions that it calls by their names alone.
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    kernel: Callable[..., Any] = tvm_ffi.load_module(str(library))[function]
    return kernel
