"""The GEMM of `gemm.ptx` on small matrices: launches, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flash_attn_fp8.sim.launch import Launch
from flash_attn_fp8.sim.machine import Machine, Run
from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.tensormap import TensorMap, encode
from tests.sim.programs import aligned, buffer

TEXT = (Path(__file__).parent / "gemm.ptx").read_text(encoding="utf-8")
BARRIERS = 1024 + 90112
NAMES = {
    **{BARRIERS + 8 * i: f"full[{i}]" for i in range(3)},
    **{BARRIERS + 24 + 8 * i: f"empty[{i}]" for i in range(3)},
    **{BARRIERS + 48 + 8 * i: f"accumulator full[{i}]" for i in range(2)},
    **{BARRIERS + 64 + 8 * i: f"accumulator empty[{i}]" for i in range(2)},
}


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of bf16, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Problem:
    """Matrices of small integers, so that every sum is exact and the result has one right value.

    `params` may be changed before `run`; A is M x K and B is N x K.
    """

    m: int = 256
    n: int = 128
    k: int = 256

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.a, self.b = aligned((self.m, self.k), "u2"), aligned((self.n, self.k), "u2")
        self.c = aligned((self.m, self.n), "u2")
        self.bias = aligned((self.n,), "f4")
        self.row_max = aligned((self.m, self.n // 64), "f4")
        for x in (self.a, self.b):
            x[:] = to_bf16(rng.integers(-3, 4, x.shape))
        self.bias[:] = rng.integers(-9, 10, self.n)
        self.maps = {
            "a": tensor_map(self.a, (64, 128), "128B"),
            "b": tensor_map(self.b, (64, 64), "128B"),
            "c": tensor_map(self.c, (64, 128), "none"),
        }
        self.buffers = [
            buffer("A", self.a, False),
            buffer("B", self.b, False),
            buffer("C", self.c),
            buffer("bias", self.bias, False),
            buffer("row_max", self.row_max),
        ]

    def launch(self, grid: int) -> Launch:
        tiles = (self.m // 128, self.n // 64)
        scalars = (tiles[0] * tiles[1], tiles[1], self.k // 64)
        return Launch(
            grid=(grid, 1, 1),
            block=(192, 1, 1),
            dynamic_smem=90112 + 128,
            params=(
                *(encode(m) for m in self.maps.values()),
                *(x.ctypes.data.to_bytes(8, "little") for x in (self.bias, self.row_max)),
                *(x.to_bytes(4, "little") for x in scalars),
            ),
            buffers=tuple(self.buffers),
        )

    def run(self, text: str = TEXT, machine: Machine | None = None, grid: int = 1) -> Run:
        machine = machine or Machine(barrier_names=NAMES, instruction_limit=200_000)
        return machine.launch(parse(text), "gemm", self.launch(grid))

    def wrong(self) -> int:
        """Elements of the results that are not right."""
        exact = from_bf16(self.a) @ from_bf16(self.b).T + self.bias
        largest = exact.reshape(self.m, -1, 64).max(2)
        return int((self.c != to_bf16(exact)).sum() + (self.row_max != largest).sum())


def tensor_map(array: np.ndarray, box: tuple[int, int], swizzle: str) -> TensorMap:
    """The map of a row-major bf16 matrix."""
    return TensorMap(
        address=array.ctypes.data,
        type="bf16",
        dims=array.shape[::-1],
        strides=(array.strides[0],),
        box=box,
        element_strides=(1, 1),
        swizzle=swizzle,
    )
