"""One forward call as two records: its tensors (`Operands`) and everything else (`Options`).

Every public function of `api.py` describes its arguments as a `Call`; checking, planning and
executing take that one object.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_fp8.formats import dtype_name
from flash_attn_fp8.policy import Fp8Policy


class Operands(NamedTuple):
    """The tensors of a call. Names and shapes are those of the public functions.

    As described by a caller, output_scale may be a number, seqused_k of a cache one int for all,
    and page_table a cache_batch_idx, (batch,); `with_tensors` makes tensors of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    learnable_sink: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    output_scale: Tensor | None = None
    selection: Tensor | None = None
    selection_lens: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None


class Options(NamedTuple):
    """Everything of a call that is not a tensor. Equal options mean equal requests.

    A tuple, not a dataclass: one is made and hashed in every call, on the way to a kernel.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    min_seqlen_k: int | None = None
    num_splits: int = 1
    seqlen_k_per_split: int | None = None
    pack_gqa: bool | None = None
    deterministic: bool = False
    disable_scheduler_metadata: bool = False
    return_lse: bool = False
    out_dtype: torch.dtype | None = None
    fp8_policy: Fp8Policy | str | None = None
    impl: str | None = None
    select_pages: bool = False


class Call(NamedTuple):
    """A described, unchecked call.

    `refused` holds arguments that no version executes yet, `names` what the function calls the
    fields of the two records where that differs.
    """

    function: str
    operands: Operands
    options: Options
    refused: tuple[str, ...] = ()
    names: Mapping[str, str] = MappingProxyType({})

    def with_tensors(self) -> Call:
        """A checked call with the tensors that executors read in place of numbers."""
        o = self.operands
        scale: object = o.output_scale
        if scale is not None and not isinstance(scale, Tensor):
            filled = torch.full((), scale, dtype=torch.float32, device=o.q.device)  # type: ignore[call-overload]
            o = o._replace(output_scale=filled)
        length: object = o.seqused_k
        if length is not None and not isinstance(length, Tensor):
            batch = o.q.shape[0] if o.cu_seqlens_q is None else o.cu_seqlens_q.shape[0] - 1
            filled = torch.full((batch,), length, dtype=torch.int32, device=o.q.device)  # type: ignore[call-overload]
            o = o._replace(seqused_k=filled)
        if o.page_table is not None and o.page_table.ndim == 1:
            # A batched cache is a pool whose pages are whole sequences.
            o = o._replace(page_table=o.page_table[:, None])
        return self if o is self.operands else self._replace(operands=o)

    def __str__(self) -> str:
        """`function(q=e4m3[2, 128, 8, 64], ..., causal=True)`; also what `explain` parses."""
        shown = [
            f"{self.names.get(name, name)}="
            f"{literal(value) if isinstance(value, (int, float)) else describe(value)}"
            for name, value in self.operands._asdict().items()
            if value is not None
        ]
        default = Options()
        shown += [
            f"{self.names.get(name, name)}={literal(value)}"
            for name, value in self.options._asdict().items()
            if not _is_default(value, getattr(default, name))
        ]
        shown += [reason.rpartition(": ")[0] for reason in self.refused]
        return f"{self.function}({', '.join(shown)})"


def _is_default(value: object, default: object) -> bool:
    """Equality that no tensor or array passed by mistake can make ambiguous."""
    return value is default or (type(value) is type(default) and bool(value == default))


def literal(value: object) -> str:
    """A value as a literal that `explain.parse_call` reads back."""
    if isinstance(value, Tensor):
        return describe(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Fp8Policy):
        return repr(str(value))
    if isinstance(value, float):
        return repr(float(value))  # a NumPy float is one too, and prints as a call
    return repr(value)


def describe(x: object) -> str:
    """`e4m3[2, 128, 8, 64]`, with strides in braces where the tensor is not contiguous."""
    if not isinstance(x, Tensor):
        return f"{type(x).__name__} {x!r}"
    text = f"{dtype_name(x.dtype)}{list(x.shape)}"
    return text if x.is_contiguous() else f"{text}{{{', '.join(map(str, x.stride()))}}}"
