"""Cases on the simulator."""

from __future__ import annotations

import functools

import numpy as np

from flash_attn_fp8.sim.launch import Launch
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.ptx.program import Program
from tests.sim.chip.case import Array, Bytes, Case, Map, results
from tests.sim.programs import aligned, buffer

_parsed = functools.lru_cache(maxsize=64)(parse)


def run(case: Case) -> list[Bytes]:
    """The outputs that the simulator computes."""
    arrays: list[Bytes] = []
    for argument in case.arguments:
        if isinstance(argument, Array):
            arrays.append(aligned(argument.data.shape, np.uint8, 256))
            arrays[-1][:] = argument.data
    addresses = iter([a.ctypes.data for a in arrays])
    params = []
    for argument in case.arguments:
        if isinstance(argument, Array):
            params.append(next(addresses).to_bytes(8, "little"))
        elif isinstance(argument, Map):
            params.append(argument.at(_address(case, arrays, argument.of)))
        else:
            params.append(argument.raw)
    launch = Launch(
        grid=(case.ctas, 1, 1),
        block=(case.threads, 1, 1),
        cluster=(case.cluster, 1, 1),
        dynamic_smem=case.smem,
        params=tuple(params),
        buffers=tuple(buffer(f"array {i}", a) for i, a in enumerate(arrays)),
    )
    program: Program = _parsed(case.ptx)
    Machine("sm_90a").launch(program, "kernel", launch)
    return results(case, arrays)


def _address(case: Case, arrays: list[Bytes], argument: int) -> int:
    """Where the array lies that is argument number `argument`."""
    before = sum(isinstance(a, Array) for a in case.arguments[:argument])
    return int(arrays[before].ctypes.data)
