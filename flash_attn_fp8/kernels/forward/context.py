"""What every role of a forward kernel is handed.

Frozen: CuTe DSL carries what a branch or a loop may change as run-time values, and takes an object
whose method is called there to be changed, unless its class is a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import Int32

from flash_attn_fp8.kernels.fill import Unwritten
from flash_attn_fp8.kernels.forward.geometry import ForwardGeometry
from flash_attn_fp8.kernels.forward.operands import Scalars, Tensors
from flash_attn_fp8.kernels.forward.schedule import Schedule
from flash_attn_fp8.problem import Traits


@dataclass(frozen=True)
class Context:
    """Tensors, buffers, barriers; the units of work of this CTA: `first`, and what follows.

    `following(index, count)` is the number of the unit after unit `index`, which was the `count`th.
    `buffers` and `barriers` are the kernel's own records; token scales have their place in both.
    """

    geometry: ForwardGeometry
    out_dtype: Any
    tensors: Tensors
    scalars: Scalars
    schedule: Schedule
    buffers: Any
    barriers: Any
    first: Int32
    following: Callable[[Int32, Int32], Int32]

    @property
    def traits(self) -> Traits:
        return self.geometry.spec.traits

    @property
    def unwritten(self) -> Unwritten:
        """Output rows of no unit of work: where fewer rows are in use, only those have units."""
        t, spec = self.tensors, self.geometry.spec
        covered = self.schedule.m_blocks * self.geometry.unit_tokens
        return Unwritten(
            out=t.out,
            lse=t.lse,
            starts=t.cu_seqlens_q,
            covered=covered if spec.traits.seqused_q else None,
            parts=self.scalars.num_splits if spec.split else None,
            dtype=self.out_dtype,
        )
