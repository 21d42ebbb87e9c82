"""What the bridge needs from a compiled kernel's container: the cubin itself, and three numbers.

A fatbin is a 16-byte header and entries, each with its own header; a cubin is an ELF file. The
layout of the fatbin's headers was found by looking at fatbins that CuTe DSL made from known cubins.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from dataclasses import dataclass

_FATBIN_MAGIC = 0xBA55ED50
_ELF_MAGIC = b"\x7fELF"


class CubinError(ValueError):
    """A binary that is not laid out as expected."""


@dataclass(frozen=True)
class Section:
    """A section of an ELF file: its name, its size and `sh_info`."""

    name: str
    nbytes: int
    info: int


def digest(cubin: bytes) -> str:
    """The key under which a cubin and its PTX find each other."""
    return hashlib.sha256(cubin).hexdigest()


def cubins_at(address: int) -> tuple[bytes, ...]:
    """The cubins in the fatbin (or the bare cubin) that starts at `address` of this process."""
    if ctypes.string_at(address, 4) == _ELF_MAGIC:
        return (ctypes.string_at(address, _elf_size(ctypes.string_at(address, 64))),)
    magic, _, header, nbytes = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
    if magic != _FATBIN_MAGIC:
        raise CubinError(
            f"the library's image starts with {magic:#010x}; expected a fatbin "
            f"({_FATBIN_MAGIC:#010x}) or an ELF file"
        )
    return cubins_in_fatbin(ctypes.string_at(address, header + nbytes))


def cubins_in_fatbin(fatbin: bytes) -> tuple[bytes, ...]:
    """Every ELF entry of a fatbin."""
    _, _, offset, nbytes = struct.unpack_from("<IHHQ", fatbin)
    end = offset + nbytes
    found = []
    while offset + 16 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", fatbin, offset)
        entry = fatbin[offset + header : offset + header + size]
        if entry[:4] == _ELF_MAGIC:
            found.append(entry[: _elf_size(entry)])
        elif kind == 2:
            raise CubinError(
                "the fatbin holds a cubin that is not a plain ELF file (compressed?); compile "
                "without a fatbin compression option"
            )
        offset += header + size
    return tuple(found)


def _elf_size(elf: bytes) -> int:
    """Bytes of an ELF file whose section headers come last, or whose program headers do."""
    program, section = struct.unpack_from("<QQ", elf, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", elf, 54)
    return max(int(program + program_size * programs), int(section + section_size * sections))


def sections(cubin: bytes) -> tuple[Section, ...]:
    """All sections of a cubin."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQII", cubin, start + entry * i) for i in range(count)]
    names = headers[names_at][4]

    def text(at: int) -> str:
        return cubin[names + at : cubin.index(b"\0", names + at)].decode()

    return tuple(Section(text(h[0]), h[5], h[7]) for h in headers)


def launch_registers(cubin: bytes, entry: str) -> int:
    """Registers of a thread at launch: the top byte of the text section's `sh_info`."""
    for section in sections(cubin):
        if section.name == f".text.{entry}":
            return section.info >> 24
    raise CubinError(f"the cubin has no section .text.{entry}")


def static_smem(cubin: bytes, entry: str) -> int:
    """Bytes of shared memory that the kernel declares itself."""
    return sum(s.nbytes for s in sections(cubin) if s.name == f".nv.shared.{entry}")
