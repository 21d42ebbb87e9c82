"""What a refusal looks like: one exception that carries every reason at once.

A reason names the argument, the value that was found and what to use instead. `Refusal` collects
reasons while a call is checked; `Refusal.error` turns them into one exception:

* `InvalidArguments`: the call is wrong (a `ValueError` and a `TypeError`, so that either handler
  catches it).
* `Unsupported`: the call is right and this package cannot do it (a `NotImplementedError`).

A call with reasons of both kinds raises `InvalidArguments`; all reasons are listed either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class FlashAttnFp8Error(Exception):
    """Base of every exception of this package, made of a message and perhaps its reasons.

    It has no `__init__`, so that Dynamo can trace a refusal and show what it says.
    """

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence per fault."""
        reasons: tuple[str, ...] = self.args[1] if len(self.args) > 1 else self.args
        return reasons

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidArguments(FlashAttnFp8Error, ValueError, TypeError):
    """The arguments contradict each other or the documented shapes, dtypes or values."""


class Unsupported(FlashAttnFp8Error, NotImplementedError):
    """The arguments are legal and this version has no way to execute them."""


@dataclass
class Refusal:
    """Reasons against one call, collected before anything is allocated.

    `names` has what the caller calls an argument where that is not the field's name.
    """

    invalid: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    shows_in_text: bool = True  # whether the text of the call has all that the reasons speak of
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, argument: str) -> str:
        return self.names.get(argument, argument)

    @property
    def reasons(self) -> tuple[str, ...]:
        return (*self.invalid, *self.unsupported)

    def error(self, call: str, repro: str | None = None) -> FlashAttnFp8Error:
        """The exception for the reasons collected so far; `call` describes the arguments."""
        kind = InvalidArguments if self.invalid else Unsupported
        lines = [call, *(f"  {i}. {reason}" for i, reason in enumerate(self.reasons, 1))]
        lines.append("Nothing was allocated, compiled or written.")
        if repro:
            lines.append(f"Reproduce: {repro}")
        return kind("\n".join(lines), self.reasons)
