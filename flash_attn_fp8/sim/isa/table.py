"""The instruction table: what an opcode means, found by the longest run of its leading parts.

An opcode such as `fma.rn.ftz.f32` is a *stem* (`fma`), modifiers (`rn`, `ftz`) and types (`f32`).
A module of this package registers, by stem, one of:

`@lane("fma", "f16 f32", modifiers=ROUNDING | FTZ | SAT)`
    A pure function of one lane's sources, one *operation* a type (`fma.f32`). It receives what the
    type says (see `bits.py`: integers, or the float's value) and its result is brought to the
    result's type by the generated dispatcher. A handler is plain Python that numba compiles.
`@macro("setp")`
    `macro(ctx, instruction)` that puts together several operations with `ctx.emit`.
`@warp("mbarrier.try_wait")`
    `binder(ctx, instruction) -> handler`, called once when a kernel is decoded; the engine stops at
    the instruction and the scheduler calls `handler(warp, mask)`, with bit l of `mask` set where
    lane l executes it (its guard holds). `warp.registers` is `uint64[rows, 32]`; a handler writes
    the columns of `mask` only (`lanes(mask)` is a boolean index). What the handler returns is
    between it and the scheduler. A special register that changes while a warp runs is bound under
    its name, `@warp("%clock64")`, with the `mov` that reads it as the instruction.

The binder's `ctx` (`decode.Context`) has
    `row(operand, type)`  the row of a register, immediate, special register or symbol's address
                          (constants get rows of their own, filled when a warp is created); `type`
                          says how wide an immediate is and checks a register's width;
    `rows(vector, type)`  the rows of `{a, b}`, of a b128 register both of its rows, in order;
    `destination(operand, type)`  the same for results; of `_`, a row that nothing reads;
    `suffixes`            the parts of the opcode after the stem;
    `entry`, `parameters` the kernel, its parameters by name;
    `fail(message)`       raises `Unmodelled` with the PTX line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from flash_attn_fp8.sim.isa.bits import device

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context
    from flash_attn_fp8.sim.ptx.program import Instruction

_Function = TypeVar("_Function", bound=Callable[..., Any])
Handler = Callable[[Any, int], Any]
Binder = Callable[["Context", "Instruction"], Handler]
Macro = Callable[["Context", "Instruction"], None]

# Width of a register that holds the type, in bits.
WIDTH: Mapping[str, int] = MappingProxyType(
    {
        "pred": 1,
        **{f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)},
        "b128": 128,
        "f16": 16,
        "bf16": 16,
        "f32": 32,
        "tf32": 32,
        "f64": 64,
        "s16x2": 32,
        "u16x2": 32,
        "f16x2": 32,
        "bf16x2": 32,
        "f32x2": 64,
        "e4m3x2": 16,
        "e5m2x2": 16,
        "ue8m0x2": 16,
        "e2m1x2": 8,
        "e2m3x2": 16,
        "e3m2x2": 16,
    }
)

# Two of these side by side; an operation of the packed type is one on each half.
PACKED: Mapping[str, str] = MappingProxyType(
    {"s16x2": "s16", "u16x2": "u16", "f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}
)

# Bits of a micro-operation's `mode`: what its opcode's modifiers say, for handlers and for the
# conversions of sources and results around them.
ROUNDING_MASK = 7
RN, RZ, RM, RP, RNA = range(5)
FTZ = 1 << 3  # flush subnormal f32 to zero
FTZ_HALF = 1 << 4  # the same of f16, in f16 instructions; `cvt.ftz.f32.f16` leaves f16 alone
SAT = 1 << 5
RELU = 1 << 6
NAN = 1 << 7
XORSIGN = 1 << 8
SATFINITE = 1 << 9
SELECTOR_SHIFT = 10  # the rest: which of a family (comparison, mode of prmt, ...)

ROUNDINGS: Mapping[str, int] = MappingProxyType({"rn": RN, "rz": RZ, "rm": RM, "rp": RP})
_MODIFIERS: Mapping[str, int] = MappingProxyType(
    {
        **ROUNDINGS,
        "ftz": FTZ,
        "sat": SAT,
        "relu": RELU,
        "NaN": NAN,
        "satfinite": SATFINITE,
        "xorsign": XORSIGN,
        "abs": 0,  # .xorsign.abs, always together
        "approx": 0,
        "uni": 0,
    }
)


def modifiers(names: str) -> Mapping[str, int]:
    """The named modifiers' bits: `modifiers("rn rz ftz")`; "ftz16" is ftz of f16."""
    return {
        name.removesuffix("16"): FTZ_HALF if name == "ftz16" else _MODIFIERS[name]
        for name in names.split()
    }


def selector(names: str) -> Mapping[str, int]:
    """Modifiers of which one picks the member of a family, numbered in order."""
    return {name: number << SELECTOR_SHIFT for number, name in enumerate(names.split())}


@dataclass(frozen=True)
class Operation:
    """One case of the compiled dispatcher; `name` is its stem and types, `fma.f32`.

    `takes_mode`: the handler's last argument is the mode bits. `hot`: the dispatcher has a loop
    over a full warp for it. `fast`: gives the same result where mode is 0, on float32 as such.
    """

    name: str
    handler: Callable[..., Any]
    result: str
    sources: tuple[str, ...]
    takes_mode: bool
    hot: bool = False
    fast: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Signature:
    """An opcode's types: the operation that does it, and the types of its result and sources."""

    operation: str
    result: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """What may follow a lane stem: types, and modifiers with their bits."""

    stem: str
    types: Mapping[tuple[str, ...], Signature]
    modifiers: Mapping[str, int]
    requires: tuple[frozenset[str], ...]


OPERATIONS: dict[str, Operation] = {}
FORMS: dict[str, list[Form]] = {}
MACROS: dict[str, Macro] = {}
BINDERS: dict[str, Binder] = {}


def _resolve(template: str, types: tuple[str, ...]) -> str:
    """`T` is the first type, `U` the second, `2T` the first at twice its width; else itself."""
    if template == "T":
        return types[0]
    if template == "U":
        return types[1]
    if template == "2T":
        return f"{types[0][0]}{2 * WIDTH[types[0]]}"
    return template


def lane(
    stem: str,
    types: str,
    sources: str,
    *,
    result: str = "T",
    modifiers: Mapping[str, int] = MappingProxyType({}),
    requires: tuple[str, ...] = (),
    takes_mode: bool = False,
    hot: str = "",
    fast: Callable[..., Any] | None = None,
) -> Callable[[_Function], _Function]:
    """Register a handler for `stem` at each of `types`.

    `types` is like "f32 f64"; "f32,bf16" is a pair of types, and "u32=s32" says that for u32 the
    operation of s32 does ("f32=fma.f32": that of another stem). `sources` and `result` name types,
    with T, U and 2T as in `_resolve`. `requires` lists groups of modifiers ("rn rz"), of each of
    which the opcode must have one; `hot` the types that get a loop over a full warp. A stem that
    begins with `_` is for macros alone.
    """

    def register(handler: _Function) -> _Function:
        signatures = {}
        for kind in types.split():
            own, _, other = kind.partition("=")
            parts = tuple(own.split(","))
            name = other if "." in other else f"{stem}.{other or own.replace(',', '.')}"
            signature = Signature(
                name,
                _resolve(result, parts),
                tuple(_resolve(source, parts) for source in sources.split()),
            )
            signatures[parts] = signature
            if other:
                continue
            if name in OPERATIONS:
                raise ValueError(f"operation {name} is registered twice")
            OPERATIONS[name] = Operation(
                name,
                device(handler),
                signature.result,
                signature.sources,
                takes_mode,
                own in hot.split(),
                fast,
            )
        groups = tuple(frozenset(group.split()) for group in requires)
        FORMS.setdefault(stem, []).append(Form(stem, signatures, modifiers, groups))
        return handler

    return register


def _register(table: dict[str, Any], stems: tuple[str, ...]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for stem in stems:
            if stem in MACROS or stem in BINDERS:
                raise ValueError(f"{stem} is registered twice")
            table[stem] = function
        return function

    return register


def macro(*stems: str) -> Callable[[Macro], Macro]:
    """Register a macro for each of `stems`."""
    return _register(MACROS, stems)


def warp(*stems: str) -> Callable[[Binder], Binder]:
    """Register a binder for each of `stems`."""
    return _register(BINDERS, stems)


def find_stem(parts: tuple[str, ...]) -> str | None:
    """The longest registered stem that begins `parts`."""
    if parts[0].startswith("_"):
        return None
    for length in range(len(parts), 0, -1):
        stem = ".".join(parts[:length])
        if stem in FORMS or stem in MACROS or stem in BINDERS:
            return stem
    return None


def lanes(mask: int) -> npt.NDArray[np.bool_]:
    """`bool[32]`: which lanes a mask holds."""
    return np.asarray((np.uint32(mask) >> np.arange(32, dtype=np.uint32)) & 1, dtype=np.bool_)
