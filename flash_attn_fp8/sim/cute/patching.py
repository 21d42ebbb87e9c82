"""Changes to other people's modules that are undone, in reverse order, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

_ABSENT = object()


class Patches:
    """A stack of undo steps; leaving the context runs them, also after a half-done entry."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> Patches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def undo(self, step: Callable[[], object]) -> None:
        """Runs `step` on exit."""
        self._undo.callback(step)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name`; an attribute that was inherited or absent is deleted afterwards."""
        # vars, not getattr: a class's staticmethod or property must come back as itself.
        before = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT

        def restore() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self.undo(restore)

    def environment(self, name: str, value: str | None) -> None:
        """Sets (or, with None, removes) an environment variable."""
        before = os.environ.get(name)

        def put(text: str | None) -> None:
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text

        put(value)
        self.undo(lambda: put(before))
