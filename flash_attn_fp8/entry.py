"""From a public function's arguments to a `Call`: what the public modules share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from flash_attn_fp8.call import Call, describe
from flash_attn_fp8.ops import forward

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
Result = tuple[Tensor, Tensor | None]
Window = tuple[int | None, int | None]


def public(describe_call: Callable[P, Call]) -> Callable[P, Result]:
    """Turn a description of a call into a function that executes it."""

    @functools.wraps(describe_call)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        return forward(describe_call(*args, **kwargs))

    return _finish(run, describe_call, "tuple[Tensor, Tensor | None]")


def public_as_fa3(describe_call: Callable[P, Call]) -> Callable[P, Tensor | Result]:
    """Like `public`, with FA3's results: out alone unless the LSE was asked for."""

    @functools.wraps(describe_call)
    def run(*args: P.args, **kwargs: P.kwargs) -> Tensor | Result:
        out, lse = forward(describe_call(*args, **kwargs))
        return out if lse is None else (out, lse)

    return _finish(run, describe_call, "Tensor | tuple[Tensor, Tensor]")


def _finish(run: F, describe_call: Callable[P, Call], returns: str) -> F:
    """Attach the description, and the signature that readers of help() should see."""
    run.describe_call = describe_call  # type: ignore[attr-defined]
    signature = inspect.signature(describe_call).replace(return_annotation=returns)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def bounds(window_size: object) -> Window:
    """(left, right); anything but a pair is handed on as text, for the checks to refuse."""
    if isinstance(window_size, (tuple, list)) and len(window_size) == 2:
        return window_size[0], window_size[1]
    return f"{_short(window_size)} is no pair", None  # type: ignore[return-value]


REMEDY = {
    "qv": "MLA's second query is not supported; concatenate heads, or use flash_attn.cute",
    "gather_kv_indices": "selecting cells is not supported yet",
    "score_mod": "not supported yet; softcap, window_size and learnable_sink are",
    "mask_mod": "not supported yet; causal and window_size are",
    "aux_tensors": "only score_mod and mask_mod read it, which are not supported yet",
    "aux_scalars": "only score_mod and mask_mod read it, which are not supported yet",
    "block_sparse_tensors": "block sparsity is not supported",
    "score_mod_bwd": "this package is forward only",
    "block_sparse_tensors_bwd": "this package is forward only",
    "gather_bwd_recompute_p": "this package is forward only",
    "gather_bwd_token_chunk": "this package is forward only",
    "scheduler_metadata": "plans need no metadata tensors here; leave it out",
    "tile_mn": "tiles are chosen by the plan",
    "mma_pv_is_rs": "chosen by the plan",
    "intra_wg_overlap": "chosen by the plan",
    "num_threads": "chosen by the plan",
    "_arch": "the architecture is the tensors'; explain(..., target=) plans for another",
    "k": "appending in the same call is not supported yet; write the cache first",
    "v": "appending in the same call is not supported yet; write the cache first",
    "rotary_cos": "rotary embedding is not supported; rotate q and k first",
    "rotary_sin": "rotary embedding is not supported; rotate q and k first",
    "rotary_seqlens": "rotary embedding is not supported; rotate q and k first",
    "rotary_interleaved": "rotary embedding is not supported; rotate q and k first",
    "cu_seqlens_k_new": "appending in the same call is not supported yet; write the cache first",
    "cache_batch_idx": "selects sequences of an unpaged cache; drop page_table",
    "cache_leftpad": "not supported; pass a page_table or slices that start at the first key",
    "attention_chunk": "not supported; use window_size",
    "sm_margin": "not supported",
}


def refused(neutral: object = None, **arguments: object) -> tuple[str, ...]:
    """A reason for each argument that is not at its neutral value."""
    return tuple(
        f"{name}={_short(value)}: {REMEDY[name]}"
        for name, value in arguments.items()
        if value is not neutral and not (type(value) is type(neutral) and value == neutral)
    )


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return describe(value)
    text = repr(value)
    return text if len(text) < 60 else f"<{type(value).__name__}>"
