"""Blocks back to any layout: the counterpart of `blocks.py`."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from flash_attn_fp8.call import Operands
from flash_attn_fp8.formats import FORMATS, saturating_cast
from flash_attn_fp8.problem import Problem
from flash_attn_fp8.reference.blocks import Block, Lengths


class Output:
    """Where blocks put their rows: `out` and `lse` in any layout, without a synchronisation.

    Rows that no block writes (past seqused_q, outside cu_seqlens_q) hold 0 and -inf. Packed
    outputs are gathered in buffers with one row more, where the rows that do not exist go.
    """

    def __init__(self, o: Operands, problem: Problem, out: Tensor, lse: Tensor | None) -> None:
        self._out, self._lse = out, lse
        self._format = FORMATS[problem.traits.out_format]
        self._scale = o.output_scale
        self._group = problem.traits.q_heads_per_kv_head
        self._starts = Lengths.of(o, problem).q_start
        self._packed = problem.traits.q_layout == "varlen"
        if self._packed:
            total, heads, dv = out.shape
            self._rows = torch.zeros(total + 1, heads, dv, dtype=out.dtype, device=out.device)
            self._lse_rows = torch.full((total + 1, heads), float("-inf"), device=out.device)
        else:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))

    def store(self, block: Block, o: Tensor, lse: Tensor) -> None:
        """Write o (n, hk, g, r, dv) and lse (n, hk, g, r) of a block's existing rows."""
        if self._scale is not None:
            o = o / self._scale
        o = saturating_cast(o, self._format) if self._format.is_fp8 else o.to(self._format.dtype)
        o = rearrange(o, "n hk g r d -> n r (hk g) d")
        lse = rearrange(lse.float(), "n hk g r -> n r (hk g)")
        heads = slice(block.heads_kv.start * self._group, block.heads_kv.stop * self._group)
        slot = torch.arange(block.rows_used.shape[1], device=o.device) + block.row_start
        used = block.rows_used
        if self._packed:
            row = self._starts[block.sequences][:, None] + slot
            row = torch.where(used, row, self._out.shape[0])
            _bytes(self._rows)[:, heads][row] = _bytes(o)
            self._lse_rows[:, heads][row] = lse
            return
        used = used[..., None]
        index = (block.sequences[:, None], slot)
        _bytes(self._out)[..., heads, :][index] = torch.where(used[..., None], _bytes(o), 0)
        if self._lse is not None:
            self._lse.transpose(1, 2)[..., heads][index] = torch.where(used, lse, float("-inf"))

    def finish(self) -> None:
        """Copy packed rows to their place; call once, after the last block."""
        if self._packed:
            _bytes(self._out).copy_(_bytes(self._rows[:-1]))
            if self._lse is not None:
                self._lse.copy_(self._lse_rows[:-1].T)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x
