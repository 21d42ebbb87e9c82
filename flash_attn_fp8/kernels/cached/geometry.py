"""Sizes of the cache kernel: rings of key tiles, and who reads what. No compiler needed."""

from __future__ import annotations

from dataclasses import dataclass

from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.specs import WARP, CacheSpec

CHUNK = 16  # bytes of one asynchronous copy
_LANES_OF_ROW = 4  # that share a row of K, and a row of scores
_LANES_OF_COLUMN = 8  # that share a row of V: each has an eighth of its columns
NUMBERS_OF_KEY = 3  # 32-bit numbers of a key in shared memory: K's scale, V's scale, its index


@dataclass(frozen=True)
class Operand:
    """K or V in a ring: `width` elements a row, of `element` bytes, of which `lanes` read a share.

    A lane reads vectors of `vector` bytes: of K a fourth of each block of 4 vectors, of V an
    eighth of the row (a warpgroup's lane a 32nd, which may be less than a vector). Chunks of 16
    bytes are permuted within a row so that the eight lanes whose reads go together meet no bank
    twice.
    """

    width: int
    element: int
    lanes: int

    @property
    def row_bytes(self) -> int:
        return self.width * self.element

    @property
    def chunks(self) -> int:
        return self.row_bytes // CHUNK

    @property
    def share(self) -> int:
        """Bytes of a row that a lane reads."""
        return self.row_bytes // self.lanes

    @property
    def vector(self) -> int:
        return next(size for size in (16, 8, 4) if self.share % size == 0)

    @property
    def words(self) -> int:
        """32-bit words of a vector."""
        return self.vector // 4

    @property
    def vectors(self) -> int:
        """Vectors that a lane reads of a row."""
        return self.share // self.vector

    @property
    def swizzled(self) -> bool:
        return self.chunks % 8 == 0


@dataclass(frozen=True)
class CacheGeometry:
    """What the spec implies."""

    spec: CacheSpec

    @property
    def element(self) -> int:
        """Bytes of an element of the cache."""
        return FORMATS[self.spec.traits.kv_format].bits // 8

    @property
    def head_dim_v(self) -> int:
        return self.spec.traits.head_dim_v

    @property
    def k(self) -> Operand:
        return Operand(self.spec.traits.head_dim, self.element, _LANES_OF_ROW)

    @property
    def v(self) -> Operand:
        return Operand(self.head_dim_v, self.element, _LANES_OF_COLUMN)

    @property
    def mma_format(self) -> str:
        """What the tensor core multiplies: 8-bit codes as fp16, 16-bit numbers as they are."""
        return "fp16" if self.element == 1 else self.spec.traits.kv_format

    @property
    def k_steps(self) -> int:
        """MMAs along the head dim."""
        return self.spec.traits.head_dim // 16

    @property
    def n_tiles(self) -> int:
        """Score MMAs along a warp's keys."""
        return self.spec.tile.n_block // 8

    @property
    def v_tiles(self) -> int:
        """Output MMAs along the head dim of V; column j of each lane's eighth is in number j."""
        return self.head_dim_v // 8

    @property
    def group_threads(self) -> int:
        """Threads that share a ring."""
        return WARP * self.spec.tile.m_warps

    @property
    def threads(self) -> int:
        return self.group_threads * self.spec.tile.key_warps

    @property
    def v_start(self) -> int:
        """Where V is in a key tile, behind K."""
        return self.spec.tile.n_block * self.k.row_bytes

    @property
    def numbers_start(self) -> int:
        """Where numbers of keys are in a key tile."""
        return self.v_start + self.spec.tile.n_block * self.v.row_bytes

    @property
    def tile_bytes(self) -> int:
        """A key tile in a ring."""
        return self.numbers_start + self.spec.tile.n_block * 4 * NUMBERS_OF_KEY

    @property
    def slots(self) -> int:
        """Key tiles in all rings."""
        return self.spec.tile.stages * self.spec.tile.key_warps

    @property
    def scales_per_token(self) -> tuple[bool, bool]:
        """Whether K has a scale for each key, and V."""
        traits = self.spec.traits
        kinds = traits.k_descale, traits.v_descale
        return tuple(kind is not None and kind.per_token for kind in kinds)  # type: ignore[return-value]

    @property
    def ring_bytes(self) -> int:
        return self.tile_bytes * self.spec.tile.stages

    @property
    def rings_bytes(self) -> int:
        """Of all groups; the merge of their results uses the same memory."""
        return self.ring_bytes * self.spec.tile.key_warps

    @property
    def q_in_shared_memory(self) -> bool:
        """Whether query fragments are read anew for each key tile; else they are in registers."""
        return self.q_registers + self.o_registers > 128

    @property
    def q_registers(self) -> int:
        return 4 * self.k_steps * self.spec.tile.m_tiles

    @property
    def o_registers(self) -> int:
        return 4 * self.v_tiles * self.spec.tile.m_tiles

    @property
    def q_bytes(self) -> int:
        if not self.q_in_shared_memory:
            return 0
        return 4 * WARP * self.q_registers * self.spec.tile.m_warps

    @property
    def shared_bytes(self) -> int:
        return self.rings_bytes + self.q_bytes

    @property
    def v_tiles_at_once(self) -> int:
        """Output tiles that a round of the merge exchanges: as many as the rings have room for."""
        tile = self.spec.tile
        one = 4 * 4 * WARP * tile.m_tiles * tile.m_warps * tile.key_warps
        free = self.rings_bytes - 2 * 4 * 2 * WARP * tile.m_tiles * tile.m_warps * tile.key_warps
        counts = range(self.v_tiles, 0, -1)
        return next(
            n for n in counts
            if self.v_tiles % n == 0 and n % tile.key_warps == 0 and n * one <= free
        )  # fmt: skip
