"""Functions compiled ahead of time, run on the simulated device.

What CuTe DSL exports for a GPU is an object file whose host code calls the CUDA runtime by name.
Here it is linked with a table of addresses instead of the DSL's runtime library: each runtime
function that the object lacks is defined as a jump through its place in the table, and `load` fills
the table with the stand-in runtime's functions. So the library on disk holds no address of any
process, and its host code and its cubin are, byte for byte, what a GPU would be given.

    with exporting():                                    # inside or outside of `sim.device`
        compiled = cute.compile(..., no_jit_engine=True, options="... --keep-ptx --keep-cubin")
        compiled.export_to_c("kernel.o", function_name="kernel")
    link(Path("kernel.o"), Path("kernel.so"), "gcc")
    kernel = load(Path("kernel.so"), "kernel", image, runtime, names)   # in any process, later
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import cubin
from .arguments import replace_tensors
from .dsl import calling, exporting, ffi_tensor
from .runtime import RUNTIME, Image, StandInError
from .splice import RUNTIME_SYMBOL

__all__ = ["Image", "connect", "exporting", "link", "load"]

_NAMES, _TABLE = "flash_attn_fp8_sim_names", "flash_attn_fp8_sim_table"
_SYMBOL = struct.Struct("<IBBHQQ")  # of ELF: name, info, other, section, value, size
_UNDEFINED, _GLOBAL = 0, 1

# All arguments of the runtime's functions are integers or pointers, ten at most. On x86-64 and on
# AArch64 a call with more of them than the callee takes is one with as many, so the jump need not
# know their number.
_JUMP = """
__attribute__((visibility("hidden"))) int {name}(
    long a, long b, long c, long d, long e, long f, long g, long h, long i, long j)
{{
    runtime_function to = (runtime_function){table}[{number}];
    return to ? to(a, b, c, d, e, f, g, h, i, j) : 0;
}}
"""


def link(object_file: Path, library: Path, compiler: str) -> None:
    """Makes a library of an exported object, whose calls into the CUDA runtime go to a table.

    Raises:
        OSError: the C compiler cannot be run or fails.
    """
    names = [name for name in _undefined(object_file.read_bytes()) if RUNTIME_SYMBOL.match(name)]
    source = library.with_suffix(".jumps.c")
    source.write_text(_jumps(names), encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", *map(str, (library, source, object_file))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        source.unlink()
    if done.returncode:
        raise OSError(f"{compiler} cannot link {object_file}: {done.stderr.strip()}")


def _jumps(names: Sequence[str]) -> str:
    jumps = (_JUMP.format(name=n, table=_TABLE, number=i) for i, n in enumerate(names))
    return "\n".join(
        [
            "typedef int (*runtime_function)(long, long, long, long, long, long, long, long, long,",
            "                                long);",
            f'const char {_NAMES}[] = "{" ".join(names)}";',
            f"void *{_TABLE}[{len(names) + 1}];",
            *jumps,
        ]
    )


def _undefined(elf: bytes) -> list[str]:
    """The symbols that an object file expects from others, in order."""
    tables = {section.name: section.content for section in cubin.sections(elf)}
    strings, found = tables.get(".strtab", b""), []
    for name, info, _, section, _, _ in _SYMBOL.iter_unpack(tables.get(".symtab", b"")):
        if section == _UNDEFINED and info >> 4 == _GLOBAL:
            found.append(strings[name : strings.index(b"\0", name)].decode())
    return sorted(found)


def load(
    library: Path, function: str, image: Image, runtime: Path, names: Sequence[str]
) -> Callable[..., None]:
    """The function of a library that `link` made, to be called inside `sim.device`.

    `image` has the PTX and the cubin that the object was exported with; `runtime` is the DSL's
    runtime library, which has what of the host code's calls is not CUDA's; `names` are those of the
    function's parameters, for findings to speak of.
    """
    compiled = connect(library, function, runtime, RUNTIME.address_of)
    RUNTIME.add_image(image)

    def call(*arguments: Any) -> None:
        session = RUNTIME.session
        if session is None:
            raise StandInError("a function for the simulated device is called outside `sim.device`")
        presented = [replace_tensors(argument, ffi_tensor) for argument in arguments]
        with calling(session.memory, list(zip(names, arguments, strict=False))):
            compiled(*presented)

    return call


def connect(
    library: Path, function: str, runtime: Path, address_of: Callable[[str], int | None]
) -> Callable[..., Any]:
    """The function of a library, whose calls into the CUDA runtime go where `address_of` says."""
    import tvm_ffi

    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    module = tvm_ffi.load_module(str(library))
    handle = ctypes.CDLL(str(library))  # the same one, since a library is loaded once
    symbols = ctypes.c_char_p(ctypes.addressof(ctypes.c_char.in_dll(handle, _NAMES))).value or b""
    wanted = symbols.decode().split()
    table = (ctypes.c_void_p * (len(wanted) + 1)).in_dll(handle, _TABLE)
    for number, name in enumerate(wanted):
        table[number] = address_of(name)
    compiled: Callable[..., Any] = module[function]
    return compiled
