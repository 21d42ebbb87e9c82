"""The fp8 sweep of the ecosystem, written once: which cases, and the sample that CI runs.

The axes are those of flash-attention's fp8 tests (PR #2717: seqlens 64/128 to 4096/4096, head dims
64 to 256, causal, sink, MHA/GQA/MQA, pack_gqa, num_splits), for both fp8 formats, with windows,
uneven lengths, one-token queries and unequal head dims added. Executors join by name (`--impl`).
"""

from __future__ import annotations

import itertools
import random
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

    def __str__(self) -> str:
        (sq, sk), (d, dv) = self.seqlens, self.head_dims
        extras = [self.mask, *(["sink"] if self.sink else []), self.heads]
        extras += ["pack"] if self.pack_gqa else []
        return f"{self.fmt}-{sq}x{sk}-d{d}.{dv}-{'-'.join(extras)}-splits{self.num_splits}"

    @property
    def batch(self) -> int:
        """Two sequences where that is cheap, so that a batch offset that is wrong shows."""
        return 2 if self.seqlens[0] * self.seqlens[1] <= 1 << 18 else 1

    @property
    def window(self) -> tuple[int | None, int | None]:
        """A window narrower than the keys, reaching past the diagonal."""
        return (self.seqlens[1] // 3, 5) if self.mask == "window" else (None, None)

    def as_row(self) -> dict[str, object]:
        return asdict(self)


def full() -> list[Case]:
    """Every case, the cheap ones first, so that an interrupted sweep has covered most."""
    axes = itertools.product(
        ("e4m3", "e5m2"), SEQLENS, HEAD_DIMS, MASKS, (False, True), HEADS, (False, True), (1, 3)
    )
    cases = [Case(*point) for point in axes]
    return sorted(cases, key=lambda case: case.seqlens[0] * case.seqlens[1])


def sample(seed: int = 0) -> list[Case]:
    """Cases that cover every pair of values of any two axes at least once; the same every time."""
    shuffled = full()
    random.Random(seed).shuffle(shuffled)
    # Pairs that only long cases could add are left to shorter ones where there are any.
    shuffled.sort(key=lambda case: max(case.seqlens) > 1024)
    seen: set[tuple[object, ...]] = set()
    chosen = []
    for case in shuffled:
        pairs = set(itertools.combinations(_values(case), 2))
        if not pairs <= seen:
            seen |= pairs
            chosen.append(case)
    return chosen


def _values(case: Case) -> list[tuple[str, object]]:
    return [(f.name, getattr(case, f.name)) for f in fields(case)]
