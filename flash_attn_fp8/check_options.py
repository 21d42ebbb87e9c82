"""Checks of what is no tensor: scalars, flags and windows.

A compiler traces `check_options` before the custom op, whose schema would convert what it can (1 to
True, True to 1) and refuse the rest in its own words. So no tensor is looked at here, and numbers,
which may be symbolic, are only compared.
"""

from __future__ import annotations

import torch

from flash_attn_fp8.call import Options, describe, literal
from flash_attn_fp8.errors import Refusal
from flash_attn_fp8.formats import FP32, OUT_FORMATS
from flash_attn_fp8.policy import Fp8Policy

IMPLS = ("cute", "sim", "tiled", "reference")
MAX_SPLITS = 256  # as FA3 and FA4: the combine kernel's limit
SPLIT_MULTIPLE = 128  # keys; a split ends on a tile so that its bits do not depend on the next
MAX_LENGTH = 2**31 - 1  # lengths are int32

# A window bound from here on is unlimited: positions minus bounds then fit in int32, and whether a
# kernel has a bound does not depend on the lengths.
UNLIMITED = 2**30

_MIN_SCALE = 2.0**-150  # rounds to 0 in fp32, as everything below does
# s / c and c log2(e) of an fp32 score s near 1 are normal numbers for softcaps c in this range.
_MIN_SOFTCAP, _MAX_SOFTCAP = 2.0**-126, 2.0**126


def check_options(options: Options, refusal: Refusal) -> tuple[int | None, int | None]:
    """Append the faults of the options by themselves; (left, right) of the window as understood."""
    _check_splits(options, refusal)
    if options.impl is not None and options.impl not in IMPLS:
        refusal.invalid.append(
            f"impl={literal(options.impl)} is not one of None, {', '.join(map(repr, IMPLS))}"
        )
    window = _window(options, refusal)
    _check_scores(options, refusal)
    _check_flags(options, refusal)
    _check_types(options, refusal)
    for name in ("max_seqlen_q", "max_seqlen_k", "min_seqlen_k"):
        value = getattr(options, name)
        if value is not None and not (is_int(value) and 0 <= value <= MAX_LENGTH):
            refusal.invalid.append(
                f"{name}={literal(value)} must be an int from 0 to {MAX_LENGTH} (a tensor would "
                f"cost a synchronisation)"
            )
    return window


def _check_splits(options: Options, refusal: Refusal) -> None:
    num_splits, per_split = options.num_splits, options.seqlen_k_per_split
    if not (is_int(num_splits) and 0 <= num_splits <= MAX_SPLITS):
        refusal.invalid.append(
            f"num_splits={literal(num_splits)} must be an int from 0 (chosen for you) to "
            f"{MAX_SPLITS}"
        )
    if per_split is None:
        return
    if not (is_int(per_split) and 0 < per_split <= MAX_LENGTH and per_split % SPLIT_MULTIPLE == 0):
        refusal.invalid.append(
            f"seqlen_k_per_split={literal(per_split)} must be a positive multiple of "
            f"{SPLIT_MULTIPLE} below 2^31"
        )
    elif num_splits not in (0, 1):
        refusal.invalid.append(
            f"num_splits={literal(num_splits)} and seqlen_k_per_split={per_split} exclude each "
            f"other"
        )


def _window(options: Options, refusal: Refusal) -> tuple[int | None, int | None]:
    """(left, right) with None for unbounded and a right bound of 0 for causal calls."""
    left, right = options.window_left, options.window_right
    for side, value in (("left", left), ("right", right)):
        if isinstance(value, str):  # see `entry.bounds`
            refusal.invalid.append(f"window_size: {value}; write (left, right)")
            return None, None
        if value is not None and not is_int(value):
            refusal.invalid.append(f"window_size {side}={literal(value)} must be an int or None")
            return None, None
    left_is_minus_1, right_is_minus_1 = _is_minus_1(left), _is_minus_1(right)
    if left_is_minus_1 != right_is_minus_1 and options.causal is not True:
        refusal.invalid.append(
            f"window_size=({left}, {right}) with causal=False: -1 means 'unlimited' in FA2 and FA3 "
            f"and 'up to the key before the query' in FA4; write None for unlimited, or causal=True"
        )
        return None, None
    left = None if left_is_minus_1 or _is_unlimited(left) else left
    right = None if right_is_minus_1 or _is_unlimited(right) else right
    for side, value in (("left", left), ("right", right)):
        if value is not None and value < 0:
            refusal.invalid.append(
                f"window_size {side}={value}: negative bounds mean 'unlimited' in FA2 and FA3 and "
                f"an offset in FA4; write None for unlimited, or a bound >= 0"
            )
    return left, (0 if options.causal is True else right)


def _is_minus_1(bound: int | None) -> bool:
    # As a branch, since a bound may be symbolic, and so would its comparison be.
    return bound is not None and (True if bound == -1 else False)  # noqa: SIM210


def _is_unlimited(bound: int | None) -> bool:
    return bound is not None and (True if bound >= UNLIMITED else False)  # noqa: SIM210


def clamped(bound: int | None) -> int | None:
    """A window bound that fits in the op's schema, with the same meaning."""
    return UNLIMITED if _is_unlimited(bound) else bound


def check_window_of_lengths(options: Options, lengths: tuple[int, int], refusal: Refusal) -> None:
    """Refuse a bound that is taken for unlimited and would not be, in sequences this long."""
    for side, bound in (("left", options.window_left), ("right", options.window_right)):
        if is_int(bound) and _is_unlimited(bound) and any(n > UNLIMITED for n in lengths):
            refusal.invalid.append(
                f"window_size {side}={bound} means 'unlimited', as every bound from 2^30 on, which "
                f"it is not for {max(lengths)} rows; write None for unlimited, or a smaller bound"
            )


def _check_scores(options: Options, refusal: Refusal) -> None:
    scale, softcap = options.softmax_scale, options.softcap
    if scale is not None:
        if not is_number(scale):
            refusal.invalid.append(
                f"softmax_scale={literal(scale)} must be a Python number: float(softmax_scale)"
            )
        elif not scale > 0 or scale == float("inf"):  # `not`: NaN
            refusal.invalid.append(
                f"softmax_scale={literal(scale)} must be a positive finite number "
                f"(negate q for a negative one)"
            )
        elif not _MIN_SCALE < scale <= FP32.max:
            refusal.invalid.append(
                f"softmax_scale={literal(scale)} is {'0' if scale < 1 else 'infinite'} in fp32; "
                f"scale q, or its descale, instead"
            )
    if not is_number(softcap):
        refusal.invalid.append(
            f"softcap={literal(softcap)} must be a Python number: float(softcap)"
        )
    elif not (softcap >= 0 and softcap != float("inf")):
        refusal.invalid.append(
            f"softcap={literal(softcap)} must be a finite number >= 0; 0 means none"
        )
    elif softcap and not _MIN_SOFTCAP <= softcap <= _MAX_SOFTCAP:
        refusal.invalid.append(
            f"softcap={literal(softcap)} must be from 2^-126 to 2^126, so that fp32 holds "
            f"scores over it; 0 means none"
        )


def _check_flags(options: Options, refusal: Refusal) -> None:
    for name in ("causal", "deterministic", "disable_scheduler_metadata", "return_lse"):
        if not isinstance(getattr(options, name), bool):
            refusal.invalid.append(
                f"{refusal.name(name)}={literal(getattr(options, name))} must be True or False"
            )
    if not (options.pack_gqa is None or isinstance(options.pack_gqa, bool)):
        refusal.invalid.append(f"pack_gqa={literal(options.pack_gqa)} must be True, False or None")


def _check_types(options: Options, refusal: Refusal) -> None:
    """The types of what other checks look into."""
    dtype, policy = options.out_dtype, options.fp8_policy
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        refusal.invalid.append(
            f"out_dtype={literal(dtype)} must be a torch.dtype: that of "
            f"{', '.join(f.name for f in OUT_FORMATS)}"
        )
    if not (policy is None or isinstance(policy, (str, Fp8Policy))):
        refusal.invalid.append(
            f"fp8_policy={literal(policy)} must be an Fp8Policy, a name such as 'default', or None"
        )


def takes_number(name: str, value: object, refusal: Refusal) -> bool:
    """Whether an operand may be the number `value`: an output_scale, or a cache's one length."""
    if name == "output_scale":
        return is_number(value)
    return name == "seqused_k" and refusal.name(name) != name and is_int(value)


def check_number(name: str, value: object, refusal: Refusal) -> None:
    """Check an operand that is no tensor."""
    shown = refusal.name(name)
    if not takes_number(name, value, refusal):
        either = "a number or " if takes_number(name, 1, refusal) else ""
        refusal.invalid.append(f"{shown} must be {either}a torch.Tensor, got {describe(value)}")
    elif name == "output_scale" and not _MIN_SCALE < value <= FP32.max:  # type: ignore[operator]
        refusal.invalid.append(
            f"output_scale={literal(value)} must be positive and finite in fp32: real / stored"
        )
    elif name == "seqused_k" and not 0 <= value <= MAX_LENGTH:  # type: ignore[operator]
        refusal.invalid.append(f"{shown}={value} must be from 0 to the cache's room")


def is_number(x: object) -> bool:
    """Whether x is an int or float, perhaps symbolic; True and False are none."""
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def is_int(x: object) -> bool:
    """Whether x is an int, perhaps symbolic; True and False are none."""
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)
