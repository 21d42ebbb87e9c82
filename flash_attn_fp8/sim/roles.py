"""What warps are for: names that a caller gives, and groups that show in what they executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

Roles = Mapping[str, Iterable[int]]

_MAX_WARPS = 32  # of a CTA
_SHARED = 0.9  # flash-attn-4's forward: 0.96 and more within a role, 0.4 and less between two


def role_of(roles: Roles) -> dict[int, str]:
    """The role of each warp that has one.

    Raises:
        ValueError: a warp has two, or cannot exist.
    """
    found: dict[int, str] = {}
    for role, warps in roles.items():
        for warp in warps:
            if not 0 <= warp < _MAX_WARPS:
                raise ValueError(f"role {role!r} names warp {warp}; a CTA has at most {_MAX_WARPS}")
            if warp in found:
                raise ValueError(f"warp {warp} has two roles, {found[warp]!r} and {role!r}")
            found[warp] = role
    return found


def check_roles(role_of_warp: Mapping[int, str], threads: int) -> None:
    """A launch of so many threads a CTA has all the warps that roles name, or `ValueError`."""
    warps = -(-threads // 32)
    missing = {w: role for w, role in role_of_warp.items() if w >= warps}
    if missing:
        warp, role = min(missing.items())
        raise ValueError(f"role {role!r} names warp {warp}; the launch has {warps} warps a CTA")


def alike(executed: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Warps in groups that executed the same code: `executed` counts by (warp, instruction).

    A warp joins the first group whose first warp shares `_SHARED` of what either executed, however
    often. Not all of it: one warp of a role initialises barriers for the others, and one that had
    to wait takes a branch that others do not. One whose guard was false counts as executed, so
    these are basic blocks, weighed by their length.
    """
    groups: list[list[int]] = []
    ran = executed != 0
    for warp, mine in enumerate(ran):
        for group in groups:
            first = ran[group[0]]
            if np.count_nonzero(mine & first) >= _SHARED * np.count_nonzero(mine | first):
                group.append(warp)
                break
        else:
            groups.append([warp])
    return [tuple(group) for group in groups]
