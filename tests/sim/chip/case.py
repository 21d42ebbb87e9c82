"""A PTX program with its launch and arguments: what the chip and the simulator both execute."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

import numpy as np
import numpy.typing as npt

from flash_attn_fp8.sim.tensormap import TensorMap, encode

Bytes = npt.NDArray[np.uint8]

_PTX = Path(__file__).with_name("ptx")
# Where a tensor map that a digest covers is taken to point; the real address differs by run.
_NOMINAL = 1 << 32

# Bounded, so that a copy which never completes is an error and no hang.
_WAIT = """{
    .reg .pred again, over;
    .reg .b32 tries;
    mov.b32 tries, 0;
POLL:
    mbarrier.try_wait.parity.shared::cta.b64 over, [BARRIER], PARITY;
    @over bra ARRIVED;
    add.u32 tries, tries, 1;
    setp.lt.u32 again, tries, 10000;
    @again bra POLL;
    trap;
ARRIVED:
    }"""


def wait(barrier: str, parity: int | str = 0) -> str:
    """PTX that waits for the end of an mbarrier's phase."""
    return _WAIT.replace("BARRIER", barrier).replace("PARITY", str(parity))


@dataclass(frozen=True, eq=False)
class Array:
    """A buffer in global memory, passed by its address. `output`: what is compared afterwards."""

    data: Bytes
    output: bool = False


@dataclass(frozen=True)
class Map:
    """A tensor map, passed by value, of the array argument number `of`."""

    map: TensorMap
    of: int

    def at(self, address: int) -> bytes:
        """The map's bytes with the array at `address`."""
        return encode(replace(self.map, address=address))


@dataclass(frozen=True)
class Word:
    """A number of 4 or 8 bytes."""

    value: int
    nbytes: int = 4

    @property
    def raw(self) -> bytes:
        return self.value.to_bytes(self.nbytes, "little")


Argument = Array | Map | Word


@dataclass(frozen=True, eq=False)
class Case:
    """`kernel` of `ptx`, launched once. `faults`: neither side may get through."""

    name: str
    ptx: str
    arguments: tuple[Argument, ...]
    threads: int = 32
    ctas: int = 1
    cluster: int = 1
    smem: int = 0
    faults: bool = False

    @property
    def digest(self) -> str:
        """Of everything that decides the results: a recording with another digest is stale."""
        found = hashlib.sha256(self.ptx.encode())
        found.update(repr((self.threads, self.ctas, self.cluster, self.smem)).encode())
        for argument in self.arguments:
            if isinstance(argument, Array):
                found.update(argument.data.tobytes())
            else:
                found.update(argument.at(_NOMINAL) if isinstance(argument, Map) else argument.raw)
        return found.hexdigest()[:16]


def recorded(text: str, threads: int) -> tuple[str, int]:
    """A program with its `record`s written out, and how many there are.

    `record x;` stores a 32-bit register, `recordp p;` a predicate, in the next row of uint32
    [rows, threads] at %rd15, which points to the thread's column. `observe;` records what waits for
    either parity at the mbarrier [%r0] say.
    """
    rows = 0

    def store(line: str) -> str:
        nonlocal rows
        word = line.split()[-1].rstrip(";")
        if line.lstrip().startswith("observe"):
            test = "mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r0], PARITY;\nrecordp %p3;"
            both = [test.replace("PARITY", parity) for parity in "01"]
            return "\n".join(store(part) for part in "\n".join(both).splitlines())
        if not line.lstrip().startswith(("record ", "recordp ")):
            return line
        rows += 1
        into = f"st.global.u32 [%rd15+{4 * threads * (rows - 1)}], "
        if line.lstrip().startswith("record "):
            return f"    {into}{word};"
        return f"    {{ .reg .b32 seen; selp.u32 seen, 1, 0, {word}; {into}seen; }}"

    lines = [store(line) if line.strip() else line for line in text.splitlines()]
    return "\n".join(lines) + "\n", rows


def render(file: str, **values: object) -> str:
    """The program `ptx/<file>.ptx` with its `$placeholders` filled in."""
    text = (_PTX / f"{file}.ptx").read_text()
    return Template(text).substitute({key: str(value) for key, value in values.items()})


def random_bytes(seed: str, count: int) -> Bytes:
    """Bytes that no version of numpy changes: SplitMix64 of a counter."""
    start = np.uint64(zlib.crc32(seed.encode()))
    x = np.arange(1, -(-count // 8) + 1, dtype=np.uint64) + (start << np.uint64(32))
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.uint8)[:count].copy()


def random_words(seed: str, count: int) -> npt.NDArray[np.uint32]:
    """uint32[count]."""
    return random_bytes(seed, 4 * count).view(np.uint32)


def choose(seed: str, count: int, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
    """`count` of the values, with repetition."""
    among = np.asarray(values)
    return among[random_words(seed, count) % len(among)]


def array(data: npt.NDArray[np.generic]) -> Array:
    """An input."""
    return Array(np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def output(nbytes: int, initial: npt.NDArray[np.generic] | None = None) -> Array:
    """A result, holding 0xCD until it is written, or the initial contents."""
    if initial is None:
        return Array(np.full(nbytes, 0xCD, np.uint8), True)
    return Array(np.ascontiguousarray(initial).reshape(-1).view(np.uint8).copy(), True)


def results(case: Case, arrays: list[Bytes]) -> list[Bytes]:
    """Of a run's arrays (all of them, in order) those that are outputs."""
    outputs = [a.output for a in case.arguments if isinstance(a, Array)]
    return [data for data, wanted in zip(arrays, outputs, strict=True) if wanted]
