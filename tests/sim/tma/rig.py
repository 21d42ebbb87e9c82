"""A cluster made by hand, and a way to run instructions on it one by one, without the engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flash_attn_fp8.sim.barriers import Mbarrier, Wait
from flash_attn_fp8.sim.decode import Code, decode
from flash_attn_fp8.sim.errors import Deadlock
from flash_attn_fp8.sim.isa import bulk, control, cp_async, memory, tma  # noqa: F401  they register
from flash_attn_fp8.sim.launch import Buffer, Launch
from flash_attn_fp8.sim.memory import Checks, GlobalMemory, SharedMemory, TensorMemory
from flash_attn_fp8.sim.order import Actors
from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.schedule import RoundRobin, Schedule
from flash_attn_fp8.sim.state import Cluster, Cta, Pending, RegisterPool, Warp

SHARED_BYTES = 64 * 1024
BARRIER = 0x400  # the first mbarrier of every CTA
DATA = 0x1000  # where tests put their data

_MODULE = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel()
{{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<32>;
{body}
}}
"""


class Late:
    """A schedule whose asynchronous operations complete only when somebody waits."""

    name = "late"

    def delay(self) -> int:
        return 1 << 30


class Rig:
    """`ctas` CTAs of `warps` warps over the arrays as global memory."""

    def __init__(
        self,
        *arrays: np.ndarray,
        ctas: int = 1,
        warps: int = 1,
        schedule: Schedule | None = None,
        params: bytes = b"",
        checks: Checks | None = None,
    ) -> None:
        self.arrays = arrays
        buffers = tuple(Buffer(f"a{i}", a.ctypes.data, a.nbytes) for i, a in enumerate(arrays))
        launch = Launch(grid=(ctas, 1, 1), block=(32 * warps, 1, 1), params=(), buffers=buffers)
        checks = checks or Checks()
        self.cluster = Cluster(
            [], GlobalMemory(buffers), checks, Actors(), Pending(schedule or RoundRobin()), {}
        )
        for rank in range(ctas):
            cta = Cta(
                index=(rank, 0, 0),
                rank=rank,
                cluster=self.cluster,
                shared=SharedMemory(f"shared {rank}", SHARED_BYTES, checks, self.cluster.actors),
                tensor=TensorMemory(f"tensor {rank}", checks, self.cluster.actors),
                params=np.frombuffer(params, np.uint8),
                launch=launch,
                pool=RegisterPool(),
            )
            self.cluster.ctas.append(cta)
            cta.warps += [_warp(cta, i) for i in range(warps)]
            cta.init_mbarrier(BARRIER, 1)

    @property
    def shared(self) -> np.ndarray:
        """The bytes of the first CTA's shared memory."""
        return self.cluster.ctas[0].shared.data

    def warp(self, index: int = 0, rank: int = 0) -> Warp:
        return self.cluster.ctas[rank].warps[index]

    def barrier(self, rank: int = 0) -> Mbarrier:
        return self.cluster.ctas[rank].mbarriers[BARRIER]

    def write(self, offset: int, values: np.ndarray, w: Warp | None = None) -> None:
        """Store bytes as a warp's generic accesses."""
        w = w or self.warp()
        units = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 16)
        w.cta.shared.write(offset + 16 * np.arange(len(units)), units, w.access())

    def read(self, offset: int, nbytes: int, w: Warp | None = None) -> np.ndarray:
        w = w or self.warp()
        offsets = offset + 16 * np.arange(nbytes // 16)
        return w.cta.shared.read(offsets, 16, w.access()).ravel()

    def wait_barrier(self, nbytes: int, w: Warp | None = None, rank: int = 0) -> None:
        """Arrive at the rank's mbarrier expecting bytes, and wait for the phase."""
        w, barrier = w or self.warp(), self.barrier(rank)
        phase = barrier.phase
        barrier.expect_tx(nbytes, w.name)
        barrier.arrive(1, w.release(), w.name)
        while barrier.phase == phase:
            if not self.cluster.pending.deliver_next():
                raise Deadlock(barrier.missing())
        w.acquire(barrier.completed)

    def run(self, body: str, w: Warp | None = None, mask: int = 1, **values: int) -> Warp:
        """Run PTX whose every instruction has a handler; `r3=7` sets %r3 in all lanes."""
        w = w or self.warp()
        code = decode(parse(_MODULE.format(body=body)).entries["kernel"])
        w.registers = code.registers(lambda _: 0)
        _set_registers(w, code, values)
        for handler in code.handlers:
            while handler is not None:
                result = handler(w, mask)
                if result is None:
                    break
                assert isinstance(result, Wait)
                while not result.ready():
                    if not self.cluster.pending.deliver_next():
                        raise Deadlock(result.describe())
        return w


def _set_registers(w: Warp, code: Code, values: Mapping[str, int | np.ndarray]) -> None:
    for name, value in values.items():
        if f"%{name}" not in code.rows:
            raise ValueError(f"%{name} does not occur")
        value = value if isinstance(value, np.ndarray) else np.full(32, value % (1 << 64), object)
        width = 1 << (32 if name.startswith("r") and not name.startswith("rd") else 64)
        w.registers[code.rows[f"%{name}"]] = np.array([int(v) % width for v in value], np.uint64)


def _warp(cta: Cta, index: int) -> Warp:
    return Warp(
        index=index,
        cta=cta,
        code=None,  # type: ignore[arg-type]
        registers=np.zeros((1, 32), np.uint64),
        counts=np.zeros(1, np.int64),
        pcs=np.zeros(32, np.int32),
        existing=0xFFFFFFFF,
        local=np.zeros((32, 0), np.uint8),
        launch_registers=0,
    )


def aligned(nbytes: int, seed: int | None = 0, align: int = 128) -> np.ndarray:
    """Random bytes (zeros if `seed` is None) at a multiple of `align`."""
    raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    out = raw[start : start + nbytes]
    if seed is not None:
        out[:] = np.random.default_rng(seed).integers(0, 256, nbytes)
    return out
