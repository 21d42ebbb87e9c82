"""Sizes of the SM100 forward kernel: tiles, buffers, tensor memory, registers. No compiler needed.

Everything that two roles must agree on is computed here, once, from the spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from flash_attn_fp8.kernels.forward.geometry import ForwardGeometry
from flash_attn_fp8.specs import TILE, WARP, Sm100Spec

# CUDA programming guide, technical specifications of compute capability 10.0.
SHARED_MEMORY = 227 * 1024
TMEM_COLUMNS = 512

THREADS = 16 * WARP

# Warps of each role.
SOFTMAX_WARPS = 4  # a tile of 128 rows, a row per thread
CORRECTION_WARPS = 4
CORRECTION_WARP = 8  # the first
MMA_WARP = 12
LOAD_WARP = 13
TAIL_WARP = 14
SCALE_WARP = 15
ROLES = (
    {warp: f"softmax {warp // SOFTMAX_WARPS}" for warp in range(CORRECTION_WARP)}
    | dict.fromkeys(range(CORRECTION_WARP, MMA_WARP), "correction")
    | {MMA_WARP: "mma", LOAD_WARP: "load", TAIL_WARP: "tail", SCALE_WARP: "scales"}
)


# Of the 64 pairs of exponentials of a row's tile, those that the FMA pipe makes: the exponential
# unit takes 16 cycles a pair and warp, the FMA pipe 14 (docs/kernel_sm100.md has the balance).
_PAIRS_BY_FMA = 20
_PAIRS_BY_FMA_BESIDE_CODES = 14

# Two score tiles are in flight: one per query tile, or of successive key tiles.
S_SLOTS = 2

VECTOR = 16  # bytes of a global store: the most that a thread can make at once

_MISCELLANY = 10 * 1024  # barriers, row scales, per-token scales, ones, alignment
SUM_COLUMNS = 16  # of P times ones: the least that an MMA of 128 rows takes
_STAGING_ROW = 128  # bytes of an output row that are staged at once, at the most


@dataclass(frozen=True)
class Registers:
    """Registers a thread of each warpgroup, of 128 at launch: the four add up to 512 at most."""

    softmax: int
    correction: int
    others: int
    idle: int  # a second softmax warpgroup without a query tile


_TWO_TILES = Registers(softmax=192, correction=80, others=48, idle=24)
_ONE_TILE = Registers(softmax=232, correction=128, others=128, idle=24)


@dataclass(frozen=True)
class Geometry(ForwardGeometry):
    """What the spec implies."""

    spec: Sm100Spec

    tile_m: ClassVar[int] = TILE
    tile_n: ClassVar[int] = TILE

    @property
    def q_stage(self) -> int:
        """Query tiles that a CTA works on at once: two where tensor memory holds two outputs."""
        return 2 if S_SLOTS * TILE + 2 * self.head_dim_v <= TMEM_COLUMNS else 1

    @property
    def registers(self) -> Registers:
        return _TWO_TILES if self.q_stage == 2 else _ONE_TILE

    @property
    def makes_codes(self) -> bool:
        """Whether P's codes come straight from the scores, without an exponential."""
        return self.spec.traits.policy.exp2 == "code"

    @property
    def sums_exponentials(self) -> bool:
        """Whether the fp32 sum of a row is wanted: by the LSE, by splits, or by the policy."""
        return self.spec.traits.exact_row_sum or self.spec.writes_lse

    @property
    def sums_by_mma(self) -> bool:
        """Whether P times columns of ones sums up P as it was rounded.

        With codes alone, where tensor memory has columns for it beside two outputs: there the
        tensor core has time for it, too (docs/kernel_sm100.md counts both ways).
        """
        fits = self.q_stage == 2 and self.sum_column(2) <= TMEM_COLUMNS
        return self.makes_codes and not self.sums_exponentials and fits

    @property
    def sums_in_registers(self) -> bool:
        """Whether threads sum up P as it was rounded."""
        return not (self.sums_by_mma or self.spec.traits.exact_row_sum)

    @property
    def pairs_by_fma(self) -> int:
        """Pairs of a row's exponentials that the FMA pipe makes; fewer beside codes."""
        return _PAIRS_BY_FMA_BESIDE_CODES if self.makes_codes else _PAIRS_BY_FMA

    @property
    def keys_at_once(self) -> int:
        """Keys whose P is made and stored together.

        Scores that give both a code and an exponential stay in registers for longer: fewer of them.
        """
        return TILE // 4 if self.makes_codes and self.sums_exponentials else TILE // 2

    @property
    def lookahead(self) -> int:
        """Key tiles whose scores are asked for before the first P·V."""
        return S_SLOTS // self.q_stage

    def slot_and_use(self, tile, stage):  # type: ignore[no-untyped-def]
        """Slot of a score tile, and which use of it: key tile number `tile` of query tile `stage`.

        Both may be values of the device.
        """
        return (stage, tile) if self.q_stage == 2 else (tile % S_SLOTS, tile // S_SLOTS)

    @property
    def ctas(self) -> int:
        """CTAs that work together."""
        return 2 if self.spec.pair else 1

    @property
    def k_rows(self) -> int:
        """Keys of a K tile that a CTA holds."""
        return TILE // self.ctas

    @property
    def v_columns(self) -> int:
        """Columns of a V tile that a CTA holds."""
        return self.head_dim_v // self.ctas

    @property
    def q_bytes(self) -> int:
        return TILE * self.head_dim * self.element

    @property
    def kv_bytes(self) -> int:
        """Of a tile of K or V, or of a CTA's half of it."""
        return max(self.k_rows * self.head_dim, TILE * self.v_columns) * self.element

    @property
    def staging_bytes(self) -> int:
        """Each correction warp turns 32 pieces of rows from row-per-thread to coalesced."""
        return CORRECTION_WARPS * WARP * _STAGING_ROW

    @property
    def staging_columns(self) -> int:
        """Output columns that are staged at once."""
        return gcd(_STAGING_ROW // 4, self.head_dim_v)

    @property
    def q_slots(self) -> int:
        """Query tiles in shared memory: two generations where they leave room for four K/V tiles.

        Then the next work's queries arrive while this one's are in use.
        """
        double = 2 * self.q_stage * self.q_bytes
        roomy = self._left_for_kv(double) >= 4 * self.kv_bytes
        return 2 * self.q_stage if roomy else self.q_stage

    @property
    def kv_slots(self) -> int:
        """Tiles of K or V, or halves of them, in shared memory."""
        return min(self._left_for_kv(self.q_slots * self.q_bytes) // self.kv_bytes, 8 * self.ctas)

    def _left_for_kv(self, q: int) -> int:
        return SHARED_MEMORY - _MISCELLANY - self.staging_bytes - q

    def s_column(self, slot: int) -> int:
        """First tensor memory column of a score tile; P lies over it."""
        return slot * TILE

    def o_column(self, stage: int) -> int:
        """First tensor memory column of an output tile."""
        return S_SLOTS * TILE + stage * self.head_dim_v

    def sum_column(self, stage: int) -> int:
        """First tensor memory column of the sums of an output tile's rows."""
        return self.o_column(self.q_stage) + stage * SUM_COLUMNS

    @property
    def cleans_tail(self) -> bool:
        """Whether V rows past a sequence's end can hold anything: then they are zeroed.

        P is 0 there, but 0 * NaN is not. TMA fills with zeros what lies past a dense tensor.
        """
        return self.spec.traits.kv_layout != "dense" or self.spec.traits.seqused_k
