"""Checks of a selection: which keys of each sequence and KV head are read."""

from __future__ import annotations

from typing import get_args

import torch

from flash_attn_fp8.call import Operands, Options, describe, literal
from flash_attn_fp8.errors import Refusal
from flash_attn_fp8.problem import Selection


def check_selection(o: Operands, kv_layout: str, refusal: Refusal) -> None:
    """Append the faults of `selection` and `selection_lens`, whose batch is checked elsewhere."""
    if o.selection is None:
        if o.selection_lens is not None:
            refusal.invalid.append("selection_lens says how long selection is, which is missing")
        return
    nheads_kv = o.k.shape[-2]
    named = (("selection", o.selection, 3), ("selection_lens", o.selection_lens, 2))
    for name, t, rank in named:
        if t is None:
            continue
        if t.dtype != torch.int32:
            refusal.invalid.append(f"{name}={describe(t)} must be int32: {name}.int()")
        if t.ndim != rank or t.shape[1] != nheads_kv:
            shape = "(batch, nheads_kv, entries)" if rank == 3 else "(batch, nheads_kv)"
            refusal.invalid.append(
                f"{name}={describe(t)} must be {shape} with nheads_kv {nheads_kv}"
            )
    if kv_layout == "varlen":
        refusal.invalid.append(
            "selection needs a cache, batched or paged: packed keys (cu_seqlens_k) have none"
        )


def check_selection_unit(options: Options, has_pages: bool, refusal: Refusal) -> None:
    """Append the faults of `selection_unit`."""
    units = get_args(Selection)
    if options.selection_unit not in units:
        refusal.invalid.append(
            f"selection_unit={literal(options.selection_unit)} is not one of "
            f"{', '.join(map(repr, units))}"
        )
    elif options.selection_unit == "pages" and not has_pages:
        refusal.invalid.append("selection_unit='pages' needs a page_table, whose columns they are")


def selected_keys(o: Operands, options: Options) -> int | None:
    """How many keys a selection has room for; None without one."""
    if o.selection is None or o.selection.ndim != 3:
        return None
    entries = o.selection.shape[2]
    return entries * o.k.shape[1] if options.selection_unit == "pages" else entries
