"""A static model of an SM100 attention kernel: from two simulated runs and the cubin to cycles.

The unit is a *score tile*, 128 query rows x 128 keys, on the SM that computes it: kernels that hold
one query tile, two, or pairs of CTAs then compare directly. Two runs that differ only in the number
of keys give what a further score tile costs, free of prologue and epilogue. The simulator counts
PTX; what a warp issues is SASS, so each role's loop is also read from the cubin, and blocks of it
that are not executed in every round are weighted by the counts of the simulator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch

from benchmarks import sass
from flash_attn_fp8 import sim
from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.launch import CapturedLaunch

TILE = 128
ROWS = 512  # queries of a run: enough for pairs of CTAs with two query tiles each
KEYS = (512, 1024)  # of the two runs
SM_COUNT = 2

# The constants. MUFU: 16 lanes a clock and SM (CUDA programming guide, throughput of native
# arithmetic instructions, compute capability 10.0; FACTS.md), 4 a sub-partition. Fp32 FFMA, FADD,
# FMUL: 128; two results an instruction, FFMA2 and its like: 64; integer, compare, min/max, select,
# conversions from fp32: 64. Tensor core: the two fp8 MMAs of a 128x128x128 tile take 512 cycles
# (FACTS.md), twice that in 16 bits. Shared memory: 128 bytes a clock and SM (the issue, FACTS.md).
MAC_PER_CLOCK = {"f8f6f4": 8192, "f16": 4096}
SHARED_BYTES_PER_CLOCK = 128
SUB_PARTITIONS = 4
CONSTANTS = {
    "issue": "1 warp instruction a clock and sub-partition",
    "MUFU (and conversions between widths of integers and floats)": "16 lanes a clock and SM: "
    "8 cycles a warp instruction; CUDA programming guide, FACTS.md",
    "FADD, FMUL, FFMA": "128 lanes a clock and SM: 1 cycle; CUDA programming guide",
    "FADD2, FMUL2, FFMA2, HADD2, HFMA2, IMAD": "64 lanes a clock and SM: 2 cycles on the FMA pipe",
    "FMNMX, FMNMX3, FSEL, SEL, ISETP, PRMT, LOP3, IADD3, MOV, F2FP, ...": "64 lanes a clock and "
    "SM: 2 cycles on the ALU pipe; CUDA programming guide, FACTS.md (3.08 cycles a code)",
    "tensor core": "8192 fp8 or 4096 16-bit multiply-adds a clock and SM (FACTS.md: the two fp8 "
    "MMAs of a 128x128x128 tile take 512 cycles)",
    "shared memory": "128 bytes a clock and SM; operands of MMAs, TMA writes and generic accesses "
    "share it (FACTS.md, issue 4)",
    "tensor memory": "bytes only: no public figure to hold against them",
}

_MMA = re.compile(r"tcgen05\.mma kind::(\w+) (\d+)x(\d+)x(\d+)")
_MMA_ROW = 32  # bytes of an operand's row that one instruction reads (K)
_MAXIMA = TILE // 4  # a softmax loop has more comparisons, of two or three scores each
_COLUMNS = re.compile(r"\.x(\d+)")


@dataclass(frozen=True)
class Case:
    """A configuration that both kernels are measured in."""

    format: str
    head_dim: int
    causal: bool

    @property
    def element(self) -> int:
        return 2 if self.format == "bf16" else 1

    @property
    def tile_bytes(self) -> int:
        """Of a tile of K and of V together."""
        return 2 * TILE * self.head_dim * self.element

    @property
    def fields(self) -> dict[str, str | int]:
        """As the cases of result rows have it."""
        mask = "causal" if self.causal else "full"
        return {"format": self.format, "head_dim": self.head_dim, "mask": mask}

    def __str__(self) -> str:
        return f"{self.format} hd{self.head_dim} {self.fields['mask']}"


@dataclass(frozen=True)
class Execution:
    """A launch, and what the simulator counted of it."""

    keys: int
    launch: CapturedLaunch
    run: Run


Forward = Callable[..., object]  # (q, k, v, causal) -> what keeps the outputs alive


def execute(forward: Forward, case: Case, keys: int) -> Execution:
    """One head of ROWS queries and `keys` keys on the simulated device."""
    dtype = torch.bfloat16 if case.format == "bf16" else torch.float8_e4m3fn
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[CapturedLaunch, Run]] = []
    unchecked = sim.Checks(False, False, False, False, False)
    with sim.device(
        "sm_100a",
        on_launch=lambda launch: found.append((launch, device.execute(launch))),
        sm_count=SM_COUNT,
        checks=unchecked,
    ) as device:
        tensors = [
            torch.randn(1, rows, 1, case.head_dim, generator=generator).to(dtype).clone()
            for rows in (ROWS, keys, keys)
        ]
        forward(*tensors, case.causal)
    if len(found) != 1:
        raise RuntimeError(f"{case}: {len(found)} launches, expected one kernel")
    return Execution(keys, *found[0])


@dataclass(frozen=True)
class RoleLoop:
    """A role's loop in SASS, for one score tile: classes, and cycles of each pipe for one warp."""

    classes: Mapping[str, float]
    pipes: Mapping[str, float]

    @property
    def bound(self) -> tuple[str, float]:
        return sass.bound(self.pipes)


@dataclass
class Measured:
    """A kernel in one case: the two runs, and what follows of them."""

    case: Case
    short: Execution
    long: Execution
    roles: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self.roles = _roles(self.long.run)

    @property
    def tiles(self) -> int:
        """Score tiles that the longer run has more of."""
        return ROWS // TILE * ((self.long.keys - self.short.keys) // TILE)

    # ------------------------------------------------------------------------ the simulator's

    @cached_property
    def ptx(self) -> dict[str, Counter[str]]:
        """By role: PTX warp instructions of all its warps in the further score tiles, by class."""
        opcode = {i.line: i.opcode for i in self.long.run.entry.instructions}
        more = Counter(self.long.run.instructions)
        more.subtract(self.short.run.instructions)
        found: dict[str, Counter[str]] = {}
        for (line, warp), count in more.items():
            role = found.setdefault(self.roles[warp], Counter())
            role[_ptx_class(opcode[line])] += count
        return found

    def per_tile(self, role: str, kind: str | None = None) -> float:
        """PTX warp instructions of a role for a score tile; of one class, or all."""
        counts = self.ptx.get(role, Counter())
        return (counts.total() if kind is None else counts[kind]) / self.tiles

    @cached_property
    def _traffic(self) -> Counter[str]:
        more = Counter(self.long.run.traffic)
        more.subtract(self.short.run.traffic)
        return more

    def _traffic_per_tile(self, *kinds: str) -> float:
        return sum(self._traffic[kind] for kind in kinds) / self.tiles

    @property
    def shared_bytes(self) -> dict[str, float]:
        """Bytes through shared memory for a score tile, by who moves them."""
        tma = [k for k in self._traffic if k.startswith("bulk") and "shared" in k]
        return {
            "MMA operands": self._traffic_per_tile("shared bytes read by tcgen05.mma"),
            "TMA": self._traffic_per_tile(*tma),
            "generic": self._traffic_per_tile("shared bytes read", "shared bytes written"),
        }

    @property
    def shared_cycles(self) -> float:
        return sum(self.shared_bytes.values()) / SHARED_BYTES_PER_CLOCK

    @property
    def tensor_memory_bytes(self) -> dict[str, float]:
        """Bytes through tensor memory for a score tile, without the accumulators' own."""
        operands = sum(n * (m + width) * _MMA_ROW for n, (_, m, width, _) in self._mmas)
        in_shared = self._traffic["shared bytes read by tcgen05.mma"]
        return {
            "loads": self._traffic_per_tile("tensor memory bytes loaded"),
            "stores": self._traffic_per_tile("tensor memory bytes stored"),
            "MMA operands": (operands - in_shared) / self.tiles,
        }

    @property
    def _mmas(self) -> list[tuple[int, tuple[str, int, int, int]]]:
        found = []
        for name, count in self._traffic.items():
            if shape := _MMA.fullmatch(name):
                kind, *extents = shape.groups()
                m, n, k = map(int, extents)
                found.append((count, (kind, m, n, k)))
        return found

    @property
    def tensor_cycles(self) -> float:
        """Of one SM's tensor core for a score tile; a pair of CTAs has two, and twice the rows."""
        cycles = sum(c * m * n * k / MAC_PER_CLOCK[kind] for c, (kind, m, n, k) in self._mmas)
        return cycles / self.tiles

    def loaded(self, query_tiles: int) -> float:
        """Bytes of K and V by TMA over those of the tiles: 1 if nothing is redundant.

        A tile is to be loaded once for all rows of a cluster, whose CTAs hold so many query tiles.
        """
        key_tiles = (self.long.keys - self.short.keys) // TILE
        clusters = ROWS / (TILE * query_tiles * prod(self.long.launch.cluster))
        copied = self._traffic["bulk tensor bytes global to shared"]
        return copied / (self.case.tile_bytes * key_tiles * clusters)

    @property
    def mbarriers(self) -> float:
        """Initialised by each CTA."""
        inits = sum(row.executed for row in self.long.run.rows() if "mbarrier.init" in row.opcode)
        return inits / prod(self.long.launch.grid)

    # ------------------------------------------------------------------------------ the cubin's

    @cached_property
    def resources(self) -> dict[str, int]:
        found = sass.resources(self.long.launch.cubin)
        found["dynamic shared memory"] = self.long.launch.dynamic_smem
        return found

    @cached_property
    def spills(self) -> dict[str, int]:
        """LDL and STL in the SASS, by the role whose loop over its work they are in."""
        opcodes = {
            loop.header: [i.opcode for n in loop.blocks for i in self._blocks[n].instructions]
            for loop in sass.loops(self._blocks)  # of one header there is one loop
        }
        found: Counter[str] = Counter()
        for header, count in sass.spills(self._blocks).items():
            found["no loop" if header is None else _role_of_sass(opcodes[header])] += count
        return dict(found)

    @cached_property
    def registers(self) -> dict[str, int]:
        """A thread's, by role, as `setmaxnreg` leaves them."""
        line_of = {i.line: i for i in self.long.run.entry.instructions}
        found: dict[str, int] = {}
        for line, warp in self.long.run.instructions:
            if line_of[line].opcode.startswith("setmaxnreg"):
                (count,) = re.findall(r"\b(\d+)\s*;", line_of[line].text)
                found[self.roles[warp]] = int(count)
        return found

    @cached_property
    def _blocks(self) -> list[sass.Block]:
        text = sass.printed("nvdisasm", cubin=self.long.launch.cubin)
        return sass.functions(text)[self.long.launch.entry]

    def loop(self, role: str) -> RoleLoop:
        """A role's loop in SASS for one score tile; all of a role's warps run the same one."""
        return self._loops[role]

    @cached_property
    def _loops(self) -> dict[str, RoleLoop]:
        def columns(opcode: str) -> Callable[[sass.Instruction], int]:
            return lambda i: int(_COLUMNS.findall(i.opcode)[-1]) if i.stem == opcode else 0

        def is_a(*stems: str) -> Callable[[sass.Instruction], int]:
            return lambda i: i.stem.startswith(stems)

        def exponentials(i: sass.Instruction) -> int:
            return i.opcode.startswith("MUFU.EX2")

        # Codes of P are made without them, but no row without its maximum.
        softmax = {"FMNMX": _MAXIMA, "LDTM": 1}

        head_dim = self.case.head_dim
        a_warp = 1 / SUB_PARTITIONS  # of four that share a tile
        exp2 = self.per_tile("softmax", "ex2") * a_warp
        stores = self.per_tile("correction", "tcgen05.st") * a_warp
        mmas, copies = (
            self.per_tile("MMA", "tcgen05.mma"), self.per_tile("load", "cp.async.bulk"),
        )  # fmt: skip
        return {
            "softmax": self._loop(softmax, columns("LDTM"), TILE, exponentials, exp2),
            "correction": self._loop(
                {"FMUL2": 16, "STTM": 1, "LDTM": 1}, columns("LDTM"), head_dim, is_a("STTM"), stores
            ),
            # What is conditional in these two is taken in the middle of a sequence.
            "MMA": self._loop({"UTC": 4}, is_a("UTCQMMA", "UTCHMMA"), mmas, None, 0),
            "load": self._loop({"UTMALDG": 1}, is_a("UTMALDG"), copies, None, 0),
        }

    def _loop(
        self,
        holds: Mapping[str, int],
        amount: Callable[[sass.Instruction], int],
        amount_of_a_tile: float,
        evidence: Callable[[sass.Instruction], int] | None,
        evidence_of_a_tile: float,
    ) -> RoleLoop:
        """The loop that `holds` these, as it is for one tile.

        A round handles as many tiles as its `amount` is worth. Conditional blocks count by the
        share of rounds that the `evidence` shows: how often the simulator saw it, against how
        often they and the rest of the round would give it. Without evidence they count in full.
        """
        loop = sass.loop_with(self._blocks, holds)
        if loop is None or not amount_of_a_tile:
            raise LookupError(f"{self.case}: no loop with {dict(holds)} in the SASS")
        always = sass.always_executed(self._blocks, loop)
        sometimes = [i for block in sass.conditional(self._blocks, loop) for i in block]
        tiles = sum(map(amount, always + sometimes)) / amount_of_a_tile
        share = 1.0
        if evidence is not None:
            there = sum(map(evidence, sometimes))
            seen = evidence_of_a_tile * tiles - sum(map(evidence, always))
            share = min(1.0, max(0.0, seen / there)) if there else 0.0

        def of_a_tile(count: Callable[..., Mapping[str, int]]) -> dict[str, float]:
            total: Counter[str] = Counter()
            for instructions, weight in ((always, 1.0), (sometimes, share)):
                for name, n in count(instructions).items():
                    total[name] += n * weight / tiles  # type: ignore[assignment]
            return dict(total)

        return RoleLoop(of_a_tile(sass.classes), of_a_tile(sass.pipes))

    @property
    def exp2_in_sass(self) -> float:
        """MUFU.EX2 of the softmax loop for one warp and tile; the simulator's is `exp2_in_ptx`."""
        return self.loop("softmax").classes.get("MUFU.EX2", 0.0)

    @property
    def exp2_in_ptx(self) -> float:
        return self.per_tile("softmax", "ex2") / SUB_PARTITIONS

    @property
    def sub_partition(self) -> dict[str, float]:
        """Cycles of each pipe for a score tile: its softmax warp and its correction warp."""
        roles = [self.loop(role).pipes for role in ("softmax", "correction")]
        return {pipe: sum(role[pipe] for role in roles) for pipe in ("issue", *sass.PIPES)}

    @property
    def bound(self) -> tuple[str, float]:
        """What an SM is busy with longest for a score tile."""
        pipe, cycles = sass.bound(self.sub_partition)
        return sass.bound(
            {pipe: cycles, "tensor core": self.tensor_cycles, "shared memory": self.shared_cycles}
        )


def _roles(run: Run) -> dict[int, str]:
    """Warps by what they do, whatever their numbers."""
    does: dict[int, Counter[str]] = {}
    for row in run.rows():
        does.setdefault(row.who, Counter())[_ptx_class(row.opcode)] += row.executed

    def role(counts: Counter[str]) -> str:
        if counts["tcgen05.mma"]:
            return "MMA"
        if counts["max"] + counts["ex2"] > TILE:
            return "softmax"
        if counts["tcgen05.ld"]:
            return "correction"
        return "load" if counts["cp.async.bulk"] else "other"

    return {warp: role(counts) for warp, counts in does.items()}


def _role_of_sass(opcodes: list[str]) -> str:
    def some(*starts: str) -> int:
        return sum(opcode.startswith(starts) for opcode in opcodes)

    if some("UTCQMMA", "UTCHMMA"):
        return "MMA"
    if some("FMNMX") >= _MAXIMA:
        return "softmax"
    if some("LDTM"):
        return "correction"
    return "load" if some("UTMALDG") else "other"


def _ptx_class(opcode: str) -> str:
    """Coarse: `fma.f32x2`, `ex2`, `tcgen05.ld`, `cvt e4m3x2`."""
    parts = opcode.split(".")
    if parts[0] in ("tcgen05", "mbarrier", "fence"):
        return ".".join(parts[:2])
    if parts[0] == "cp":
        return ".".join(parts[:3])
    if parts[0] == "cvt":
        return f"cvt {parts[-2]}"
    return f"{parts[0]}.f32x2" if parts[-1] == "f32x2" else parts[0]
