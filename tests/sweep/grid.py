"""The fp8 sweep of the ecosystem, written once: which cases, and the samples that CI runs.

The axes are those of flash-attention's fp8 tests (seqlens 64/128 to 4096/4096, head dims 64 to
256, causal, sink, MHA/GQA/MQA, pack_gqa, num_splits), for both fp8 formats, with windows, uneven
lengths, one-token queries and unequal head dims added. Executors join by name (`--impl`).

Kernels are compiled for each spec and simulated in minutes an hour of emulation, so they have a
grid of their own, `proof`, in an order that compiles each spec once for a range of lengths.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

SEQLENS = (
    (1, 129),
    (1, 1024),
    (3, 799),
    (64, 128),
    (113, 203),
    (128, 128),
    (217, 128),
    (256, 512),
    (1023, 1024),
    (1024, 1024),
    (2048, 2048),
    (4096, 4096),
)
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
MASKS = ("full", "causal", "window")

# The grid of flash-attention PR #2717: `test_flash_attn_output` with dtype e4m3 has 7 pairs of
# lengths x 5 head dims x causal x sink x MHA/GQA/MQA = 420 cases, each with every pack_gqa and
# num_splits (378 of them run there: its head dim 256 has no sink). The PR names the first and the
# last pair of lengths; the five between are taken from that test's list.
FIX_SEQLENS = (
    (64, 128),
    (128, 128),
    (113, 203),
    (256, 512),
    (1023, 1024),
    (2048, 2048),
    (4096, 4096),
)
FIX_HEAD_DIMS = tuple((d, d) for d in (64, 96, 128, 192, 256))
PACKS_AND_SPLITS = tuple(itertools.product((False, True), (1, 3)))

# Beyond it: layouts, and pages of every size that kernels read.
LAYOUTS = (
    ("dense", 0), ("varlen", 0),
    ("paged", 8), ("paged", 16), ("paged", 32), ("paged", 64), ("paged", 128), ("paged", 256),
)  # fmt: skip
SHORT = tuple(pair for pair in SEQLENS if max(pair) <= 1024 and pair[0] <= 256)


@dataclass(frozen=True)
class Case:
    """One point of the sweep."""

    fmt: str
    seqlens: tuple[int, int]
    head_dims: tuple[int, int]
    mask: str
    sink: bool
    heads: str
    pack_gqa: bool
    num_splits: int
    layout: str = "dense"
    page_size: int = 0  # of the paged layout

    def __str__(self) -> str:
        (sq, sk), (d, dv) = self.seqlens, self.head_dims
        extras = [self.mask, *(["sink"] if self.sink else []), self.heads]
        extras += ["pack"] if self.pack_gqa else []
        extras += [] if self.layout == "dense" else [f"{self.layout}{self.page_size or ''}"]
        return f"{self.fmt}-{sq}x{sk}-d{d}.{dv}-{'-'.join(extras)}-splits{self.num_splits}"

    @property
    def batch(self) -> int:
        """Two sequences where that is cheap, so that a batch offset that is wrong shows."""
        return 2 if self.seqlens[0] * self.seqlens[1] <= 1 << 18 else 1

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Rows and keys of each sequence of a packed or paged case; the last one has no keys."""
        sq, sk = self.seqlens
        return [(sq, sk), (sq // 2 + 1, sk // 3 + 1), (2, 0)]

    @property
    def window(self) -> tuple[int | None, int | None]:
        """A window narrower than the keys, reaching past the diagonal."""
        return (self.seqlens[1] // 3, 5) if self.mask == "window" else (None, None)

    @property
    def spec(self) -> tuple[object, ...]:
        """What is compiled for a case: all of it but lengths and what no kernel looks at."""
        packed = self.pack_gqa and self.heads != "mha"
        return (
            self.fmt, self.head_dims, self.layout, self.page_size, self.mask, self.sink,
            self.heads, packed, self.num_splits > 1,
        )  # fmt: skip

    def shared(self) -> Case:
        """The case that has the same inputs and exact results as all that differ in execution."""
        return _with(self, pack_gqa=False, num_splits=1)

    def as_row(self) -> dict[str, object]:
        return asdict(self)


def full() -> list[Case]:
    """Every dense case, the cheap ones first, so that an interrupted sweep has covered most."""
    axes = itertools.product(
        ("e4m3", "e5m2"), SEQLENS, HEAD_DIMS, MASKS, (False, True), HEADS, (False, True), (1, 3)
    )
    cases = [Case(*point) for point in axes]
    return sorted(cases, key=_cost)


def sample(seed: int = 0) -> list[Case]:
    """Cases that cover every pair of values of any two axes at least once; the same every time."""
    shuffled = full()
    random.Random(seed).shuffle(shuffled)
    # Pairs that only long cases could add are left to shorter ones where there are any.
    shuffled.sort(key=lambda case: max(case.seqlens) > 1024)
    seen: set[tuple[object, ...]] = set()
    chosen = []
    for case in shuffled:
        pairs = _pairs(case)
        if not pairs <= seen:
            seen |= pairs
            chosen.append(case)
    return chosen


# --------------------------------------------------------------------------------------- kernels


def reference_fix() -> list[Case]:
    """The 420 cases of PR #2717, each with every pack_gqa and num_splits; one of them from 2048 on.

    Which one goes round, so that the long ones together have all of them.
    """
    points = itertools.product(FIX_SEQLENS, FIX_HEAD_DIMS, ("full", "causal"), (False, True), HEADS)
    cases = []
    for number, point in enumerate(points):
        ways = PACKS_AND_SPLITS
        if max(point[0]) >= 2048:
            ways = (ways[number % len(ways)],)
        cases += [Case("e4m3", *point, *way) for way in ways]
    return cases


def beyond(seed: int = 0) -> list[Case]:
    """What the reference fix's grid has not: every pair of values of any two of our axes.

    e5m2, packed and paged sequences, windows, unequal head dims, uneven lengths, one query.
    """
    return _cover(_axes(SHORT, LAYOUTS), seed)


def proof() -> list[Case]:
    """`reference_fix` and `beyond`: cheap lengths first, and of those, spec by spec."""
    return in_compile_order([*reference_fix(), *beyond()])


def kernel_sample(seed: int = 0) -> list[Case]:
    """At least 60 cases of few specs that cover every pair of values of any two axes of the sweep.

    First specs that cover all pairs without lengths, with one page size each; then for each spec
    the lengths that add most pairs.
    """
    layouts = (("dense", 0), ("varlen", 0), ("paged", 16))
    specs = _cover(_axes(SHORT[:1], layouts), seed)
    sizes = itertools.cycle(size for layout, size in LAYOUTS if layout == "paged")
    chosen: list[Case] = []
    seen: set[tuple[object, ...]] = set()
    for spec in specs:
        size = next(sizes) if spec.layout == "paged" else 0
        variants = [_with(spec, seqlens=pair, page_size=size) for pair in SHORT]
        for _ in range(LENGTHS_PER_SPEC):
            best = max(variants, key=lambda case: len(_pairs(case) - seen))
            variants.remove(best)
            seen |= _pairs(best)
            chosen.append(best)
    return in_compile_order(chosen)


LENGTHS_PER_SPEC = 3


def in_compile_order(cases: Iterable[Case]) -> list[Case]:
    """Cheap lengths first; of those that cost alike, the cases of one spec together."""
    cases = list(dict.fromkeys(cases))
    return sorted(cases, key=lambda case: (_band(case), str(case.spec), _cost(case)))


def _band(case: Case) -> int:
    return sum(_cost(case) > limit for limit in (1 << 18, 1 << 21, 1 << 23))


def _cost(case: Case) -> int:
    return case.seqlens[0] * case.seqlens[1]


def _axes(
    seqlens: Sequence[tuple[int, int]], layouts: Sequence[tuple[str, int]]
) -> tuple[Sequence[object], ...]:
    """The values of each axis; the last one is of pairs, a layout and its page size."""
    flags = (False, True)
    return (
        ("e4m3", "e5m2"), seqlens, HEAD_DIMS, MASKS, flags, tuple(HEADS), flags, (1, 3), layouts,
    )  # fmt: skip


def _cover(axes: Sequence[Sequence[object]], seed: int) -> list[Case]:
    """Cases until every pair of values is covered; each the best of many drawn."""
    rng = random.Random(seed)
    missing = set().union(*map(_pairs, _every_pair_once(axes)))
    chosen: list[Case] = []
    while missing:
        drawn = [_case(map(rng.choice, axes)) for _ in range(DRAWN)]
        best = max(drawn, key=lambda case: len(_pairs(case) & missing))
        if missing & _pairs(best):
            missing -= _pairs(best)
            chosen.append(best)
    return chosen


DRAWN = 100


def _every_pair_once(axes: Sequence[Sequence[object]]) -> Iterator[Case]:
    first = [axis[0] for axis in axes]
    for i, j in itertools.combinations(range(len(axes)), 2):
        for one, other in itertools.product(axes[i], axes[j]):
            yield _case([one if n == i else other if n == j else x for n, x in enumerate(first)])


def _case(values: Iterable[object]) -> Case:
    *others, layout = values
    return Case(*others, *layout)  # type: ignore[misc]


def _with(case: Case, **changes: object) -> Case:
    return Case(**{**{f.name: getattr(case, f.name) for f in fields(case)}, **changes})  # type: ignore[arg-type]


def _pairs(case: Case) -> set[tuple[object, ...]]:
    return set(itertools.combinations([(f.name, getattr(case, f.name)) for f in fields(case)], 2))


GRIDS = {
    "full": full,
    "sample": sample,
    "reference-fix": reference_fix,
    "beyond": beyond,
    "proof": proof,
    "kernel-sample": kernel_sample,
}
