"""What a call asks for: a frozen `Problem`, made of traits (which kernel) and sizes (how much).

`checks.py` makes one from a call. Invariant: sizes never choose a kernel; two calls with equal
traits compile to the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from flash_attn_fp8.formats import Format
from flash_attn_fp8.policy import Fp8Policy

Selection = Literal["tokens", "pages"]
# "tile": of a tile of keys and KV head, which no call has: `WidenSpec`'s kernel makes it.
Granularity = Literal["tensor", "head", "batch_head", "token_head", "tile"]


class Descale(NamedTuple):
    """Granularity of one operand's scale; q's may be per query head or per KV head."""

    granularity: Granularity
    per_query_head: bool = False

    @property
    def per_token(self) -> bool:
        return self.granularity == "token_head"

    @property
    def per_tile(self) -> bool:
        return self.granularity == "tile"


@dataclass(frozen=True)
class Traits:
    """What distinguishes kernels. `policy` says how P is made.

    With `selection` of each (sequence, KV head) only chosen tokens, or pages, are keys;
    `selection_lens`: their number is a tensor.
    """

    q_format: str
    kv_format: str
    out_format: str
    head_dim: int
    head_dim_v: int
    q_layout: Literal["dense", "varlen"]
    kv_layout: Literal["dense", "varlen", "paged"]
    q_heads_per_kv_head: int
    seqused_q: bool
    seqused_k: bool
    bounded_left: bool
    bounded_right: bool
    softcap: bool
    sink: bool
    q_descale: Descale | None
    k_descale: Descale | None
    v_descale: Descale | None
    output_scale: bool
    lse: bool
    policy: Fp8Policy
    selection: Selection | None = None
    selection_lens: bool = False

    @property
    def p_format(self) -> Format:
        return self.policy.format

    @property
    def v_scale_in_exponent(self) -> bool:
        """Whether V has a scale for each token: they are folded into the exponent."""
        return bool(self.v_descale and self.v_descale.per_token)

    @property
    def policy_in_force(self) -> Fp8Policy:
        """`policy` with the row sum that counts, for people to read."""
        return self.policy.replace(row_sum="exact") if self.exact_row_sum else self.policy

    @property
    def exact_row_sum(self) -> bool:
        """Whether the output is normalised by the fp32 sum of the unrounded P.

        Always so with V's scales in the exponent: a key with a small V scale flushes in P, rightly
        for P·V, while its share of the row sum may be anything.
        """
        return self.policy.row_sum == "exact" or self.v_scale_in_exponent


@dataclass(frozen=True)
class Sizes:
    """Extents and values; `seqlen_q` and `seqlen_k` are upper bounds over the batch.

    `seqlen_k` is the capacity of one sequence's keys (pages x page size where paged). A window
    of None is unbounded; causal calls have window_right 0. `total_q`, `total_k` are the lengths of
    the packed axes of varlen tensors; `num_pages` of a paged pool; `selected` the keys that may be
    chosen of a sequence.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_kv: int
    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    total_q: int | None = None
    total_k: int | None = None
    num_pages: int | None = None
    page_size: int | None = None
    selected: int | None = None


# Keys per split where the caller asks for batch-invariant results and leaves the number of splits
# to us: a constant, so that a row's bits depend on nothing but its own keys.
DETERMINISTIC_KEYS_PER_SPLIT = 2048


@dataclass(frozen=True)
class Request:
    """How the caller wants it executed; resolved by the plan."""

    num_splits: int = 1
    seqlen_k_per_split: int | None = None
    pack_gqa: bool | None = None
    deterministic: bool = False
    disable_scheduler_metadata: bool = False
    policy_given: bool = False
    impl: str | None = None

    @property
    def keys_per_split(self) -> int | None:
        """Keys in each part where the number of parts follows from them; None where it is given."""
        if self.seqlen_k_per_split is not None:
            return self.seqlen_k_per_split
        return DETERMINISTIC_KEYS_PER_SPLIT if self.deterministic and not self.num_splits else None


@dataclass(frozen=True)
class Problem:
    """A checked call: traits, sizes and the caller's wishes about execution."""

    traits: Traits
    sizes: Sizes
    request: Request

    @property
    def keys(self) -> int:
        """Keys of a sequence that a row can see at the most: what splits divide."""
        return self.sizes.seqlen_k if self.sizes.selected is None else self.sizes.selected

    @property
    def out_shape(self) -> tuple[int, ...]:
        s = self.sizes
        rows = (s.batch, s.seqlen_q) if s.total_q is None else (s.total_q,)
        return (*rows, s.nheads, self.traits.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        s = self.sizes
        return (s.batch, s.nheads, s.seqlen_q) if s.total_q is None else (s.nheads, s.total_q)
