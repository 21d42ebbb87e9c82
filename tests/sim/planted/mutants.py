"""Mutants of a PTX text: named edits, and every synchronising instruction left out in turn."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Class of instruction: its opcode. What is neutral in the simulator by design is NOT_JUDGED.
CLASSES = {
    "mbarrier wait": r"mbarrier\.(?:try|test)_wait\b",
    "mbarrier arrive": r"mbarrier\.arrive(?!\.expect_tx)\b",
    "mbarrier expect": r"mbarrier\.(?:arrive\.)?expect_tx\b",
    "mbarrier init": r"mbarrier\.init\b",
    "commit": r"tcgen05\.commit\b",
    "tcgen05.wait::st": r"tcgen05\.wait::st\b",
    "tcgen05.wait::ld": r"tcgen05\.wait::ld\b",
    "tcgen05.fence": r"tcgen05\.fence::",
    "named barrier": r"(?:bar|barrier)(?:\.cta)?\.(?:sync|arrive)\b",
    "warp barrier": r"bar\.warp\.sync\b",
    "cluster barrier": r"barrier\.cluster\.",
    "proxy fence": r"fence\.proxy\.async\b",
    "mbarrier_init fence": r"fence\.mbarrier_init\b",
    "bulk commit_group": r"cp\.async\.bulk\.commit_group\b",
    "bulk wait_group": r"cp\.async\.bulk\.wait_group\b",
    "dealloc": r"tcgen05\.dealloc\b",
}
_STATEMENT = re.compile(r"^(\s*)(?:@!?%?[\w$]+\s+)?([a-z][\w.:]*)\s*([^;]*);")
_PARITY_WAIT = re.compile(r"^(\s*mbarrier\.\w+\.parity[^,]*,[^,]*,\s*)(%[\w$]+)(\s*[,;].*)$")
_WAIT_RESULT = re.compile(r"\s*(%?[\w$]+)\s*,")


@dataclass(frozen=True)
class Removal:
    """A text without one instruction, or with it changed; its other lines keep their numbers."""

    kind: str
    line: int  # from 1
    instruction: str
    text: str


def removals(text: str, kinds: tuple[str, ...] = tuple(CLASSES)) -> list[Removal]:
    """One mutant for each synchronising instruction. A removed wait counts as having succeeded."""
    lines = text.split("\n")
    found = []
    for i, line in enumerate(lines):
        statement = _STATEMENT.match(line)
        if statement is None:
            continue
        for kind in kinds:
            if not re.match(CLASSES[kind], statement[2]):
                continue
            instead = f"// left out: {line.strip()}"
            if kind == "mbarrier wait":
                result = _WAIT_RESULT.match(statement[3])
                assert result is not None, line
                instead = f"setp.eq.u32 {result[1]}, 0, 0; {instead}"
            mutated = [*lines[:i], instead, *lines[i + 1 :]]
            found.append(Removal(kind, i + 1, line.strip(), "\n".join(mutated)))
    return found


def flips(text: str) -> list[Removal]:
    """One mutant for each wait by parity, with the other parity."""
    lines = text.split("\n")
    found = []
    for i, line in enumerate(lines):
        wait = _PARITY_WAIT.match(line)
        if wait is None:
            continue
        before, parity, after = wait.groups()
        instead = f"{{ .reg .b32 flipped; xor.b32 flipped, {parity}, 1; {before}flipped{after} }}"
        mutated = "\n".join([*lines[:i], instead, *lines[i + 1 :]])
        found.append(Removal("flipped parity", i + 1, line.strip(), mutated))
    return found


def section(text: str, name: str) -> str:
    """The part of a text from its line `// @name` to the next such line."""
    parts = re.split(r"^(// @\w+)\n", text, flags=re.MULTILINE)
    at = parts.index(f"// @{name}")
    return parts[at + 1]


def edit(text: str, name: str, old: str, new: str) -> str:
    """`old` of section `name` becomes `new`; it must occur exactly once there."""
    before = section(text, name)
    if before.count(old) != 1:
        raise ValueError(f"section {name} has {old!r} {before.count(old)} times")
    marker = f"// @{name}\n"
    return text.replace(marker + before, marker + before.replace(old, new))


def without(text: str, name: str, old: str) -> str:
    """The statement `old` of section `name` is left out; lines keep their numbers."""
    return edit(text, name, old, f"// left out: {old}")


def line_of(text: str, needle: str, nth: int = 0) -> int:
    """The number, from 1, of the nth line that holds `needle`."""
    return [i for i, line in enumerate(text.split("\n"), 1) if needle in line][nth]
