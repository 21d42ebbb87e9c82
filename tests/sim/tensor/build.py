"""A cluster made by hand, and independent models: addresses and numbers one element at a time."""

from __future__ import annotations

import math
import struct

import numpy as np

from flash_attn_fp8.sim.launch import Launch
from flash_attn_fp8.sim.memory import (
    SHARED_RESERVED,
    Checks,
    GlobalMemory,
    SharedMemory,
    TensorMemory,
)
from flash_attn_fp8.sim.order import Actors
from flash_attn_fp8.sim.schedule import RoundRobin, Schedule
from flash_attn_fp8.sim.state import ALL_LANES, Cluster, Cta, Pending, RegisterPool, Warp


def cluster(
    ctas: int = 1, warps: int = 4, rows: int = 256, smem: int = 200 * 1024,
    checks: Checks = Checks(), schedule: Schedule | None = None,  # noqa: B008
) -> Cluster:  # fmt: skip
    """CTAs of `warps` warps with `rows` register rows and no code."""
    launch = Launch(
        grid=(ctas, 1, 1), block=(32 * warps, 1, 1), cluster=(ctas, 1, 1), params=(), buffers=()
    )
    made = Cluster([], GlobalMemory(()), checks, Actors(), Pending(schedule or RoundRobin()), {})
    for rank in range(ctas):
        cta = Cta(
            index=(rank, 0, 0),
            rank=rank,
            cluster=made,
            shared=SharedMemory(f"shared {rank}", smem, checks, made.actors),
            tensor=TensorMemory(f"tensor {rank}", checks, made.actors),
            params=np.zeros(0, np.uint8),
            launch=launch,
            pool=RegisterPool(),
        )
        made.ctas.append(cta)
        for index in range(warps):
            cta.warps.append(
                Warp(
                    index=index,
                    cta=cta,
                    code=None,  # type: ignore[arg-type]
                    registers=np.zeros((rows, 32), np.uint64),
                    counts=np.zeros(0, np.int64),
                    pcs=np.zeros(32, np.int64),
                    existing=ALL_LANES,
                    local=np.zeros((32, 0), np.uint8),
                    launch_registers=0,
                )
            )
    return made


def fill_shared(cta: Cta, data: np.ndarray) -> None:
    """Put bytes at `SHARED_RESERVED`, as if they had been there before the kernel."""
    cta.shared.data[SHARED_RESERVED : SHARED_RESERVED + data.size] = data
    cta.shared._written[:] = 1


def allocate_all(cta: Cta) -> None:
    cta.tensor.allocate(0, 512)


# ------------------------------------------------------------------------------ the models

SPANS = {"none": 16, "32": 32, "64": 64, "128": 128, "128/32": 128}
CODES_SM100 = {"none": 0, "128/32": 1, "128": 2, "64": 4, "32": 6}
CODES_SM90 = {"none": 0, "128": 1, "64": 2, "32": 3}


def descriptor_sm100(start: int, leading: int, stride: int, swizzle: str) -> int:
    return (
        start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | CODES_SM100[swizzle] << 61
    )


def descriptor_sm90(start: int, leading: int, stride: int, swizzle: str) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | CODES_SM90[swizzle] << 62


def bit(value: int, place: int) -> int:
    return value >> place & 1


def swizzled(address: int, swizzle: str) -> int:
    """Bit by bit, as the absolute address is permuted."""
    pairs = {
        "none": [],
        "32": [(4, 7)],
        "64": [(4, 7), (5, 8)],
        "128": [(4, 7), (5, 8), (6, 9)],
        "128/32": [(5, 7), (6, 8)],
    }[swizzle]
    for low, high in pairs:
        address ^= bit(address, high) << low
    return address


def element_address(
    start: int, leading: int, stride: int, swizzle: str, mn_major: bool, row: int, k: int, size: int
) -> int:
    """Where element (row, k) of a matrix of elements of `size` bytes begins."""
    span = SPANS[swizzle]
    if not mn_major:
        group, within, at = row // 8, row % 8, k * size
        if swizzle == "none":
            return start + group * stride + within * 16 + at // 16 * leading + at % 16
        return swizzled(start + group * stride + within * span + at, swizzle)
    deep = 4 if swizzle == "128/32" else 8
    group, within, at = k // deep, k % deep, row * size
    if swizzle == "none":
        return start + at // 16 * stride + group * leading + within * 16 + at % 16
    address = start + at // span * leading + group * stride + within * span + at % span
    return swizzled(address, swizzle)


SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def number(code: bytes, kind: str) -> float:
    """The value of one element."""
    if kind == "f16":
        return struct.unpack("<e", code)[0]
    if kind == "bf16":
        return struct.unpack("<f", b"\0\0" + code)[0]
    if kind == "tf32":
        low = struct.unpack("<I", code)[0] // 8192 * 8192
        return struct.unpack("<f", struct.pack("<I", low))[0]
    if kind == "s8":
        return float(struct.unpack("<b", code)[0])
    byte = code[0]
    if kind == "u8":
        return float(byte)
    sign = -1.0 if byte & 0x80 else 1.0
    if kind == "e5m2":  # the upper half of an f16
        return struct.unpack("<e", b"\0" + code)[0]
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def f32(value: float) -> int:
    """Bits of the nearest f32; the tensor core has one NaN."""
    if math.isnan(value):
        return 0x7FFFFFFF
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32))


def random_bytes(rng: np.random.Generator, kind: str, nbytes: int) -> np.ndarray:
    """Elements whose products are summed exactly by float64: no rounding but the last."""
    if kind == "fp8":  # finite as e4m3 and as e5m2
        return rng.integers(0, 256, nbytes, dtype=np.uint8) & 0xBF
    if kind in ("e4m3", "s8", "u8"):
        data = rng.integers(0, 256, nbytes, dtype=np.uint8)
        if kind == "e4m3":
            data[data & 0x7F == 0x7F] = 0
        return data
    values = rng.standard_normal(nbytes // SIZES[kind])
    if kind == "e5m2":
        return values.astype("<f2").view(np.uint8)[1::2].copy().repeat(2)[:nbytes]
    if kind == "f16":
        return values.astype("<f2").view(np.uint8)
    words = values.astype("<f4").view("<u4")
    if kind == "bf16":
        return (words >> 16).astype("<u2").view(np.uint8)
    return words.view(np.uint8)
