"""Sums of products: in fp32 as on SM100, or with the few bits of SM90's fp8 tensor cores.

Hopper's `wgmma` of fp8 makes integers of the 32 products of an instruction and of the accumulator,
in a unit 13 bits below the largest exponent among them; what is smaller is cut off, toward zero. A
product's exponent is the sum of its factors', a subnormal's that of the smallest normal number. The
sum is cut off to 13 fraction bits again. `sim/hopper.py` has the same, compiled by numba; here it
is once more because the emulation needs neither numba nor the CPU.
`tests/sm90/test_accumulation.py` holds one to the other.

Measured on an H200 (docs/numerics.md): q = 0, V = 0.75 gives 0.668, 0.25, 0.0625 at 8k, 32k, 128k
keys in kernels that accumulate there throughout.

A row's accumulator depends on the row's own keys and where they lie, not on which tiles its
neighbours make the block visit: an instruction all of whose P are zero leaves the row as it was,
and promotion goes by absolute positions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flash_attn_fp8.formats import Format
from flash_attn_fp8.plan import KEYS_PER_MMA, TiledSpec

_FRACTION_BITS = 13
_LEAST = 2.0**-100  # of an exponent: below those of all products, and its unit is a number
# Products that are in memory at once, in fp32: about what a core's cache holds, or a GPU's.
_PRODUCTS_AT_ONCE, _ON_GPU = 1 << 18, 1 << 24


class Accumulator(Protocol):
    """O before normalisation, (n, hk, g, r, dv) in fp32."""

    def rescale(self, factor: Tensor) -> None: ...

    def add(self, p: Tensor, v: Tensor, start: int) -> None:
        """Add P (n, hk, g, r, s) times finite V (n, hk, s, dv) of a tile, its keys from `start`."""

    def add_terms(self, terms: Tensor) -> None:
        """Add what `nonfinite.terms` found."""

    def value(self) -> Tensor: ...


def accumulator_for(
    spec: TiledSpec, v_format: Format, shape: tuple[int, ...], device: torch.device
) -> Accumulator:
    """A zeroed accumulator of the kind that the spec mirrors."""
    zeros = torch.zeros(shape, device=device)
    if spec.accumulator == "sm90_fp8":
        return _Sm90Fp8(zeros, spec, v_format)
    return _Fp32(zeros)


class _Fp32:
    def __init__(self, zeros: Tensor) -> None:
        self._acc = zeros

    def rescale(self, factor: Tensor) -> None:
        self._acc = self._acc * factor[..., None]

    def add(self, p: Tensor, v: Tensor, start: int) -> None:
        self._acc = self._acc + torch.einsum("nhgrs,nhsd->nhgrd", p.double(), v.double()).float()

    def add_terms(self, terms: Tensor) -> None:
        self._acc = self._acc + terms

    def value(self) -> Tensor:
        return self._acc


class _Sm90Fp8:
    """A narrow accumulator, moved into an fp32 one every `promote_every` keys (None: never).

    The keys between two multiples of `promote_every` share the narrow one, which a tile leaves
    behind only where the next tile can go on with it; `_stretch` has, for each row, the number of
    the stretch that it holds. The fp32 one is rescaled as it is added to, by one FMA: `_factor` is
    what it is still to be multiplied by.
    """

    def __init__(self, zeros: Tensor, spec: TiledSpec, v_format: Format) -> None:
        self._promoted, self._narrow = zeros, zeros.clone()
        self._every, self._tile_n = spec.policy.promote_every, spec.tile_n
        self._formats = spec.policy.format, v_format
        self._factor = torch.ones_like(zeros[..., :1])
        self._stretch = torch.zeros_like(zeros[..., 0], dtype=torch.int64)

    def rescale(self, factor: Tensor) -> None:
        self._promoted = self._promoted * self._factor
        self._factor = factor[..., None]
        self._narrow = self._narrow * self._factor

    def add(self, p: Tensor, v: Tensor, start: int) -> None:
        v = v.float().transpose(-1, -2)
        some = torch.zeros_like(self._stretch, dtype=torch.bool)
        for lo in range(0, p.shape[-1], KEYS_PER_MMA):
            keys = slice(lo, lo + KEYS_PER_MMA)
            adds = (p[..., keys] != 0).any(-1)
            some = some | adds
            if self._every is not None:
                stretch = (start + lo) // self._every
                self._promote(adds & (self._stretch != stretch))
                self._stretch = torch.where(adds, stretch, self._stretch)
            total = _wgmma(p[..., keys], v[..., keys], self._narrow, self._formats)
            self._narrow = torch.where(adds[..., None], total, self._narrow)
        if self._every is not None:
            self._promote(some & (self._stretch != (start - self._tile_n) // self._every))

    def _promote(self, rows: Tensor) -> None:
        """Empty the narrow accumulator of some rows."""
        rows = rows[..., None]
        self._promoted = torch.where(rows, self.value(), self._promoted)
        self._factor = torch.where(rows, 1.0, self._factor)
        self._narrow = torch.where(rows, 0.0, self._narrow)

    def add_terms(self, terms: Tensor) -> None:
        self._promoted = fma(self._promoted, self._factor, terms)
        self._factor = torch.ones_like(self._factor)

    def value(self) -> Tensor:
        return fma(self._promoted, self._factor, self._narrow)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c of fp32 tensors, rounded once, but for sums that fp64 cannot hold either."""
    return (a.double() * b.double() + c.double()).float()


def narrow_scores(q: Tensor, k: Tensor, formats: tuple[Format, Format]) -> Tensor:
    """q (n, hk, g, r, d) times k (n, hk, s, d), as SM90's tensor cores add up fp8."""
    q, k = q.float(), k.float()
    scores = torch.zeros((*q.shape[:-1], k.shape[-2]), device=q.device)
    for lo in range(0, q.shape[-1], KEYS_PER_MMA):
        channels = slice(lo, lo + KEYS_PER_MMA)
        scores = _wgmma(q[..., channels], k[..., channels], scores, formats)
    # Infinities have no unit; their sum is IEEE's.
    exact = torch.einsum("nhgrd,nhsd->nhgrs", q, k)
    return torch.where(exact.isfinite(), scores, exact)


def _wgmma(a: Tensor, b: Tensor, c: Tensor, formats: tuple[Format, Format]) -> Tensor:
    """a (n, hk, g, r, k) times b (n, hk, m, k), plus c (n, hk, g, r, m), of one instruction."""
    # The reduction comes first, so that the innermost dimension is a long one.
    a = a.flatten(2, 3).movedim(-1, 0).contiguous()[..., None]  # (k, n, hk, g r, 1)
    b = b.movedim(-1, 0).contiguous()[..., None, :]  # (k, n, hk, 1, m)
    leading = _leading(a, formats[0]), _leading(b, formats[1])
    at_once = _PRODUCTS_AT_ONCE if a.device.type == "cpu" else _ON_GPU
    rows = max(1, at_once // max(1, b.numel()))
    starts = c.flatten(2, 3)
    sums = []
    for lo in range(0, starts.shape[2], rows):
        some, start = slice(lo, lo + rows), starts[:, :, lo : lo + rows]
        largest = (leading[0][..., some, :] * leading[1]).amax(0)
        largest = torch.maximum(largest, _power_of_two(start))
        units = 2.0**_FRACTION_BITS / largest.clamp(min=_LEAST)
        total = (a[..., some, :] * b).mul_(units).trunc_().sum(0) + (start * units).trunc()
        sums.append(_cut(total / units))
    return torch.cat(sums, dim=2).view_as(c) if sums else c


def _leading(x: Tensor, fmt: Format) -> Tensor:
    """2 to the exponent of each number as the tensor core sees it; of zeros, 0."""
    smallest = 2.0 ** (1 - fmt.exponent_bias)
    return torch.where(x == 0, 0.0, _power_of_two(x).clamp(min=smallest))


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two up to |x|, fp32; of zeros and subnormals, 0."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _cut(x: Tensor) -> Tensor:
    """x without the fraction bits, of fp32's 23, that the tensor core drops."""
    dropped = (1 << (23 - _FRACTION_BITS)) - 1
    return (x.view(torch.int32) & ~dropped).view(torch.float32)
