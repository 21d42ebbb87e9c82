"""Mbarriers of the SM90 forward kernel, by name (`forward/rings.py` says how they count)."""

from __future__ import annotations

from dataclasses import dataclass

from flash_attn_fp8.kernels.forward.geometry import TOKEN_SCALE_SLOTS
from flash_attn_fp8.kernels.forward.rings import Ring, Signal
from flash_attn_fp8.kernels.sm90.geometry import UNIT_SLOTS, Geometry

_WARPS = 4  # of a warpgroup


@dataclass(frozen=True)
class Barriers:
    """All of them. A warpgroup arrives with each of its warps."""

    q: Ring  # load -> each consumer: a slot a warpgroup
    k: Ring  # load -> consumers
    v: Ring  # load -> consumers
    token_scales: Ring  # scales -> consumers: what belongs to each key of a tile
    units: Ring  # load -> all others with units of work: which one is next
    tail_asked: Signal  # consumers -> tail: a unit's first V tile is there
    tail_clean: Signal  # tail -> consumers: what lies past the sequence in it is 0

    @classmethod
    def of(cls, smem, geometry: Geometry) -> Barriers:
        consumers = _WARPS * geometry.q_stage
        return cls(
            q=Ring.of(smem, geometry.q_stage, 1, _WARPS),
            k=Ring.of(smem, geometry.stages, 1, consumers),
            v=Ring.of(smem, geometry.stages, 1, consumers),
            token_scales=Ring.of(smem, TOKEN_SCALE_SLOTS, 1, consumers),
            units=Ring.of(smem, UNIT_SLOTS, 1, geometry.listeners),
            tail_asked=Signal.of(smem, 1, consumers),
            tail_clean=Signal.of(smem, 1, 1),
        )

    def init(self) -> None:
        """By one thread, before the CTA synchronises."""
        for group in vars(self).values():
            group.init()
