"""Checks of a selection: which keys of each sequence and KV head are read."""

from __future__ import annotations

import torch

from flash_attn_fp8.call import Operands, Options, describe, literal
from flash_attn_fp8.errors import Refusal
from flash_attn_fp8.problem import Selection


def check_selection(o: Operands, refusal: Refusal) -> None:
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


def check_select_pages(o: Operands, options: Options, refusal: Refusal) -> None:
    """Append the faults of `select_pages`."""
    if not isinstance(options.select_pages, bool):
        refusal.invalid.append(f"select_pages={literal(options.select_pages)} must be a bool")
    elif options.select_pages and o.selection is None:
        refusal.invalid.append("select_pages says what selection holds, which is missing")
    elif options.select_pages and o.page_table is None:
        refusal.invalid.append("select_pages needs a page_table, whose columns are selected")


def unit_of_selection(o: Operands, options: Options) -> Selection | None:
    """What the entries of a selection are; None without one."""
    if o.selection is None:
        return None
    return "pages" if options.select_pages is True else "tokens"


def selected_keys(o: Operands, options: Options) -> int | None:
    """How many keys a selection has room for; None without one."""
    if o.selection is None or o.selection.ndim != 3:
        return None
    entries = o.selection.shape[2]
    return entries * o.k.shape[1] if options.select_pages is True else entries
