"""Small PTX programs for tests: a template, launches over numpy arrays, and a runner."""

from __future__ import annotations

import numpy as np

from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.launch import Buffer, Launch
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.ptx.parse import parse

_MODULE = """
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel({params})
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<32>;
    .reg .b16 %h<32>;
    .reg .b32 %r<512>;
    .reg .b64 %rd<64>;
{body}
    ret;
}}
"""


def module(body: str, *, params: int, threads: int, target: str = "sm_100a") -> str:
    """A module with `kernel`, whose 64-bit parameters are `a0`, `a1`, ..."""
    declared = ", ".join(f".param .u64 a{i}" for i in range(params))
    return _MODULE.format(target=target, params=declared, threads=threads, body=body)


def aligned(shape: tuple[int, ...], dtype: type, align: int = 128) -> np.ndarray:
    """Zeros whose address is a multiple of `align`."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def buffer(name: str, array: np.ndarray, writable: bool = True) -> Buffer:
    return Buffer(name, array.ctypes.data, array.nbytes, writable)


def run(
    body: str,
    *arrays: np.ndarray,
    warps: int = 1,
    grid: int = 1,
    cluster: int = 1,
    smem: int = 65536,
    machine: Machine | None = None,
) -> Run:
    """Run `body` with the arrays' addresses as parameters."""
    machine = machine or Machine()
    text = module(body, params=len(arrays), threads=32 * warps, target=machine.target.name)
    launch = Launch(
        grid=(grid, 1, 1),
        block=(32 * warps, 1, 1),
        params=tuple(a.ctypes.data.to_bytes(8, "little") for a in arrays),
        buffers=tuple(buffer(f"a{i}", a) for i, a in enumerate(arrays)),
        cluster=(cluster, 1, 1),
        dynamic_smem=smem,
    )
    return machine.launch(parse(text), "kernel", launch)
