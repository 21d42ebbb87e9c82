"""Accumulators of P·V: fp32 as on SM100, or with the few bits of SM90's fp8 tensor cores.

Measured on an H200 (docs/numerics.md): q = 0, V = 0.75 gives 0.668, 0.25, 0.0625 at 8k, 32k, 128k
keys in kernels that accumulate there throughout. That equals, to the digit, aligning the addends of
each instruction to the largest exponent and keeping 13 fraction bits.

A row's accumulator depends on the row's own keys and where they lie, not on which tiles its
neighbours make the block visit: an instruction all of whose P are zero leaves the row as it was,
and promotion goes by absolute positions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flash_attn_fp8.plan import KEYS_PER_MMA, TiledSpec

_FRACTION_BITS = 13


class Accumulator(Protocol):
    """O before normalisation, (n, hk, g, r, dv) in fp32."""

    def rescale(self, factor: Tensor) -> None: ...

    def add(self, p: Tensor, v: Tensor, start: int) -> None:
        """Add P (n, hk, g, r, s) times finite V (n, hk, s, dv) of the keys from `start` on."""

    def add_terms(self, terms: Tensor) -> None:
        """Add what `nonfinite.terms` found."""

    def value(self) -> Tensor: ...


def accumulator_for(spec: TiledSpec, shape: tuple[int, ...], device: torch.device) -> Accumulator:
    """A zeroed accumulator of the kind that the spec mirrors."""
    zeros = torch.zeros(shape, device=device)
    if spec.accumulator == "sm90_fp8":
        return _Sm90Fp8(zeros, spec.policy.promote_every)
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

    The keys between two multiples of `promote_every` share the narrow one; `_stretch` has, for each
    row, the number of the stretch that it holds.
    """

    def __init__(self, zeros: Tensor, promote_every: int | None) -> None:
        self._promoted, self._narrow = zeros, zeros.clone()
        self._every = promote_every
        self._stretch = torch.zeros_like(zeros[..., 0], dtype=torch.int64)

    def rescale(self, factor: Tensor) -> None:
        self._promoted = self._promoted * factor[..., None]
        self._narrow = self._narrow * factor[..., None]

    def add(self, p: Tensor, v: Tensor, start: int) -> None:
        v = v.float()
        for lo in range(0, p.shape[-1], KEYS_PER_MMA):
            keys = slice(lo, lo + KEYS_PER_MMA)
            adds = (p[..., keys] != 0).any(-1)
            if self._every is not None:
                self._promote(adds, (start + lo) // self._every)
            products = torch.einsum("nhgrs,nhsd->nhgrds", p[..., keys], v[:, :, keys])
            total = _aligned_sum(torch.cat([products, self._narrow[..., None]], dim=-1))
            self._narrow = torch.where(adds[..., None], total, self._narrow)

    def _promote(self, adds: Tensor, stretch: int) -> None:
        """Empty the narrow accumulator of the rows that enter another stretch of keys."""
        enters = (adds & (self._stretch != stretch))[..., None]
        self._promoted = torch.where(enters, self._promoted + self._narrow, self._promoted)
        self._narrow = torch.where(enters, 0.0, self._narrow)
        self._stretch = torch.where(adds, stretch, self._stretch)

    def add_terms(self, terms: Tensor) -> None:
        self._promoted = self._promoted + terms

    def value(self) -> Tensor:
        return self._promoted + self._narrow


def _aligned_sum(addends: Tensor) -> Tensor:
    """Sum over the last dimension, each addend cut to 13 bits below the largest's exponent."""
    _, exponent = torch.frexp(addends.abs().amax(-1, keepdim=True))
    quantum = torch.ldexp(torch.ones_like(addends[..., :1]), exponent - 1 - _FRACTION_BITS)
    return ((addends / quantum).trunc() * quantum).sum(-1)
