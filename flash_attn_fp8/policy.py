"""How P, the tile of probabilities, is put into a narrow format: the one source of its constants.

Units: log2. With s the score times log2 e, m the running row maximum (possibly stale) and
`max_offset` the shift,

    P = 2 ** (s - m + max_offset).

With a rescale threshold t the maximum may lag behind the true one by up to t, so P reaches
2 ** (max_offset + t). The conversion to an 8-bit format saturates silently while the fp32 row sum
does not; so a policy whose max_offset + rescale_threshold exceeds log2 of the format's largest
value gives attention that is silently wrong (flash-attention issue #2716). `Fp8Policy` refuses it.

At the other end P flushes to zero below 2 ** flush_log2 of the format, that is, probabilities
below 2 ** `Fp8Policy.tail_log2` of the row's largest vanish. Both ends decide the accuracy;
`docs/numerics.md` has the evidence for the defaults below.

Softmax, correction, epilogue, combine, LSE, the emulation and the docs read these fields; no other
module holds a second constant.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

import torch

from flash_attn_fp8.errors import InvalidArguments
from flash_attn_fp8.formats import BF16, E4M3, E5M2, FORMATS, FP16, Format, dtype_name, format_of

LOG2E, LN2 = math.log2(math.e), math.log(2)  # natural logarithms to log2 units, and back


RowSum = Literal["exact", "quantized"]
Exp2 = Literal["exact", "code", "code_quadratic"]

_P_FORMATS = (E4M3, E5M2, FP16, BF16)


@dataclass(frozen=True)
class Fp8Policy:
    """How P is scaled, rounded, summed and accumulated. Frozen, hashable, printable.

    Args:
        p_format: format of P in the product P·V: "e4m3", "e5m2" (or "fp16", "bf16" where q has
            16 bits; the same softmax runs there).
        max_offset: shift of P in log2 units, >= 0.
        rescale_threshold: how far, in log2 units, the running maximum may lag before the
            accumulator is rescaled, >= 0. 0 rescales whenever the maximum grows.
        row_sum: what normalises the output: the fp32 sum of P ("exact") or of P as it was rounded
            ("quantized", more accurate on peaked rows). The LSE, the weights of splits, and rows
            whose V has per-token scales under fp8 P always take the fp32 sum: a policy given for
            such a call must say "exact".
        exp2: how P's code is made: "exact" (exponential, then rounding), "code" (the code straight
            from one fused multiply-add) or "code_quadratic" (with a correction of the fraction;
            emulated only). The last two need an fp8 `p_format`, and V's scales not per token.
        promote_every: keys after which, at the latest, P·V moves to an fp32 accumulator on tensor
            cores that accumulate with fewer bits (SM90 in fp8, whose kernel does so once a tile of
            128 or 256 keys); None never does. Without effect where the tensor core accumulates in
            fp32 (`explain` says which one a plan has).

    `allow_saturation` is no argument: only `breaking_the_budget` makes a policy that has it.

    Raises:
        InvalidArguments: a field is out of range, or max_offset + rescale_threshold exceeds
            log2 of the largest value of `p_format`.
    """

    p_format: str
    max_offset: float
    rescale_threshold: float
    row_sum: RowSum = "quantized"
    exp2: Exp2 = "exact"
    promote_every: int | None = 128
    allow_saturation: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._settle([*self._field_faults(), *self._budget_faults()])

    def _settle(self, faults: list[str]) -> None:
        if faults:
            raise InvalidArguments("Fp8Policy: " + "; ".join(faults), tuple(faults))
        # One representation for equal policies (4 and 4.0): the policy is part of compile keys.
        object.__setattr__(self, "max_offset", float(self.max_offset))
        object.__setattr__(self, "rescale_threshold", float(self.rescale_threshold))

    def _field_faults(self) -> list[str]:
        faults = []
        names = [f.name for f in _P_FORMATS]
        if self.p_format not in names:
            faults.append(f"p_format={self.p_format!r} is not one of {', '.join(names)}")
        for name in ("max_offset", "rescale_threshold"):
            value = getattr(self, name)
            if not _is_log2(value):
                faults.append(f"{name}={value!r} must be a finite number >= 0 (log2 units)")
        if self.row_sum not in get_args(RowSum):
            faults.append(f"row_sum={self.row_sum!r} is not one of {', '.join(get_args(RowSum))}")
        if self.exp2 not in get_args(Exp2):
            faults.append(f"exp2={self.exp2!r} is not one of {', '.join(get_args(Exp2))}")
        elif self.exp2 != "exact" and self.p_format not in (E4M3.name, E5M2.name):
            faults.append(f"exp2={self.exp2!r} makes fp8 codes; p_format is {self.p_format!r}")
        promote = self.promote_every
        if promote is not None and (
            isinstance(promote, bool)
            or not isinstance(promote, int)
            or promote <= 0
            or promote % 32
        ):
            faults.append(
                f"promote_every={promote!r} must be None or a positive multiple of 32 keys"
            )
        return faults

    def _budget_faults(self) -> list[str]:
        if self.p_format not in [f.name for f in _P_FORMATS]:
            return []
        if not (_is_log2(self.max_offset) and _is_log2(self.rescale_threshold)):
            return []
        top, limit = self.max_offset + self.rescale_threshold, self.format.log2_max
        if top <= limit:
            return []
        return [
            f"max_offset {self.max_offset:g} + rescale_threshold {self.rescale_threshold:g} = "
            f"{top:g} exceeds log2({self.format.max:g}) = {limit:.3f} of {self.p_format}: the "
            f"largest probabilities would saturate while the row sum does not. Lower either by "
            f"{top - limit:.3f}, or see Fp8Policy.breaking_the_budget for experiments"
        ]

    @classmethod
    def breaking_the_budget(
        cls, p_format: str, max_offset: float, rescale_threshold: float, **more: object
    ) -> Fp8Policy:
        """A policy that may saturate P. FOR EXPERIMENTS ONLY: its attention is silently wrong.

        It exists to reproduce published faults. Policies made here say UNSAFE wherever they print.

        Raises:
            InvalidArguments: a field is out of range.
        """
        policy = cls(p_format, 0, 0, **more)  # type: ignore[arg-type]
        wanted = {"max_offset": max_offset, "rescale_threshold": rescale_threshold}
        for name, value in {**wanted, "allow_saturation": True}.items():
            object.__setattr__(policy, name, value)
        policy._settle(policy._field_faults())
        return policy

    @property
    def format(self) -> Format:
        """The format of P, with its limits."""
        return FORMATS[self.p_format]

    @property
    def code_excess_log2(self) -> float:
        """log2 of how much larger P's linear codes are than P itself, in the mean.

        The code round(M log2 P), M to an octave, stands for (1 + f / M) 2**e where log2 P is about
        e + f / M. Over logarithms that are spread evenly, so that each f has a share of 1 / M and
        2**-log2 P is to be integrated half a code to either side,

            mean = sum_f (1 + f / M) 2**(-f / M) * (2**(1 / 2M) - 2**(-1 / 2M)) / ln 2.

        It cancels between P V and the sum of the rounded P; where other terms enter the sum, they
        are to be multiplied by 2**code_excess_log2. The other codes have none.
        """
        if self.exp2 != "code":
            return 0.0
        m = 2**self.format.mantissa_bits
        at_nodes = sum((1 + f / m) * 2.0 ** (-f / m) for f in range(m))
        return math.log2(at_nodes * (2.0 ** (0.5 / m) - 2.0 ** (-0.5 / m)) / LN2)

    @property
    def headroom_log2(self) -> float:
        """log2 distance between the largest P and the format's largest value; >= 0 if safe."""
        return self.format.log2_max - (self.max_offset + self.rescale_threshold)

    @property
    def tail_log2(self) -> float:
        """Probabilities at or below 2**tail_log2 of the row's largest become zero in P."""
        lowest = self.format.flush_log2
        if self.exp2 != "exact":
            # The code of a subnormal is no logarithm; half a code rounds to 0.
            lowest = 0.5 / 2**self.format.mantissa_bits - self.format.exponent_bias
        return lowest - self.max_offset

    def replace(self, **changes: object) -> Fp8Policy:
        """A copy with some fields changed; checked like a new one. What is UNSAFE remains so."""
        if not self.allow_saturation:
            return replace(self, **changes)  # type: ignore[arg-type]
        return Fp8Policy.breaking_the_budget(**self._arguments() | changes)  # type: ignore[arg-type]

    def _arguments(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def __repr__(self) -> str:
        unsafe = "UNSAFE " if self.allow_saturation else ""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{unsafe}Fp8Policy({arguments})"

    def __str__(self) -> str:
        unsafe = "UNSAFE " if self.allow_saturation else ""
        return (
            f"{unsafe}{self.p_format} max_offset={_exact(self.max_offset)} "
            f"rescale_threshold={_exact(self.rescale_threshold)} row_sum={self.row_sum} "
            f"exp2={self.exp2} promote_every={self.promote_every}"
        )

    @classmethod
    def parse(cls, text: str) -> Fp8Policy:
        """The policy that `str(policy)` printed. Fields left out take their defaults."""
        words = text.split()
        unsafe = bool(words) and words[0] == "UNSAFE"
        known = [f.name for f in fields(cls) if f.init]
        given: dict[str, object] = {}
        try:
            given["p_format"], *pairs = words[1:] if unsafe else words
            for pair in pairs:
                name, value = pair.split("=")
                if name in given or name not in known:
                    raise ValueError(name)
                given[name] = _parse_field(name, value)
            return (cls.breaking_the_budget if unsafe else cls)(**given)  # type: ignore[arg-type]
        except (ValueError, TypeError) as fault:
            if isinstance(fault, InvalidArguments):
                raise
            raise InvalidArguments(
                f"{text!r} is not a policy; write for example "
                f"'e4m3 max_offset=8 rescale_threshold=0.75'"
            ) from fault


def _is_log2(x: object) -> bool:
    """Whether x can be an offset or a threshold."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return False
    return 0 <= x <= sys.float_info.max


def _exact(x: float) -> str:
    """The short form of a number where it is the number, else all its digits."""
    short = f"{x:g}"
    return short if float(short) == x else repr(x)


def _parse_field(name: str, value: str) -> object:
    if name in ("max_offset", "rescale_threshold"):
        return float(value)
    if name == "promote_every":
        return None if value == "None" else int(value)
    return value


# Named policies of each format. "default" was chosen by the evidence in docs/numerics.md;
# "reference_fix" is the pair that flash-attention PR #2717 settled on. "sm90" is the default there:
# its kernel adds P V to O in fp32 once a tile, which rescales for nothing, and codes by FMA take a
# third of the time of exponentials (docs/kernel_sm90.md).
POLICIES: dict[str, dict[str, Fp8Policy]] = {
    "e4m3": {
        "default": Fp8Policy("e4m3", max_offset=8, rescale_threshold=0.75),
        "reference_fix": Fp8Policy("e4m3", max_offset=4, rescale_threshold=4, row_sum="exact"),
        "eager_rescale": Fp8Policy("e4m3", max_offset=8, rescale_threshold=0),
        "balanced": Fp8Policy("e4m3", max_offset=6, rescale_threshold=2.75),
        "sm90": Fp8Policy("e4m3", 8.75, rescale_threshold=0, exp2="code", promote_every=256),
    },
    "e5m2": {
        "default": Fp8Policy("e5m2", max_offset=11, rescale_threshold=4),
        "reference_fix": Fp8Policy("e5m2", max_offset=8, rescale_threshold=4, row_sum="exact"),
        "sm90": Fp8Policy("e5m2", 15.75, rescale_threshold=0, exp2="code", promote_every=256),
    },
    # bf16 needs no shift: its range covers any probability that fp32 can tell from zero. fp16 is
    # shifted as far up as a threshold of 8 leaves room for: P is zero below 2**-32 of the largest.
    "bf16": {"default": Fp8Policy("bf16", 0, 8, row_sum="exact", promote_every=None)},
    "fp16": {"default": Fp8Policy("fp16", 7, 8, row_sum="exact", promote_every=None)},
}


def policy_for(dtype: torch.dtype | str, name: str = "default") -> Fp8Policy:
    """The named policy for P in `dtype` (a torch dtype or a format's name).

    Names for e4m3: "default", "reference_fix", "eager_rescale", "balanced", "sm90" (what a call
    without a policy takes on SM90); for e5m2: "default", "reference_fix", "sm90"; for bf16 and
    fp16: "default".

    Raises:
        InvalidArguments: no policy of that name, or no policies for that dtype.

    Example:
        >>> print(policy_for("e5m2"))
        e5m2 max_offset=11 rescale_threshold=4 row_sum=quantized exp2=exact promote_every=128
    """
    fmt = format_of(dtype) if isinstance(dtype, torch.dtype) else FORMATS.get(dtype)
    if fmt is None or fmt.name not in POLICIES:
        shown = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
        raise InvalidArguments(f"no policies for P in {shown}; P can be {', '.join(POLICIES)}")
    named = POLICIES[fmt.name]
    if name not in named:
        raise InvalidArguments(
            f"{fmt.name} has no policy {name!r}; it has {', '.join(named)}. Any Fp8Policy can be "
            f"passed as well"
        )
    return named[name]
