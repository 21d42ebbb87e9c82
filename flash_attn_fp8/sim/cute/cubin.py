"""What the bridge needs from a compiled kernel's container: the cubin itself, and a number.

A fatbin is a 16-byte header and entries, each with its own header; a cubin is an ELF file. The
layout of the fatbin's headers was found by looking at fatbins that CuTe DSL made from known cubins.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_FATBIN_MAGIC = 0xBA55ED50
_ELF_MAGIC = b"\x7fELF"
_NOBITS, _SYMBOL_BYTES = 8, 24  # of ELF
_SIZED, _REGISTER_COUNT = 4, 0x2F  # of .nv.info: a record with a payload; EIATTR_REGCOUNT


class CubinError(ValueError):
    """A binary that is not laid out as expected."""


@dataclass(frozen=True)
class Section:
    """A section of an ELF file."""

    name: str
    content: bytes


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
    """All sections of a cubin; one without bytes in the file has its size in zeros."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + entry * i) for i in range(count)]
    names = headers[names_at][4]

    def section(name: int, kind: int, _flags: int, _address: int, at: int, nbytes: int) -> Section:
        content = bytes(nbytes) if kind == _NOBITS else cubin[at : at + nbytes]
        return Section(_text(cubin, names + name), content)

    return tuple(section(*header) for header in headers)


def _text(blob: bytes, at: int) -> str:
    return blob[at : blob.index(b"\0", at)].decode()


def has_kernel(cubin: bytes, entry: str) -> bool:
    """Whether `entry` is a kernel of this cubin."""
    return any(section.name == f".text.{entry}" for section in sections(cubin))


def launch_registers(cubin: bytes, entry: str) -> int:
    """Registers of a thread at launch.

    From the kernel's register-count record in `.nv.info`, which says what `cuobjdump
    --dump-resource-usage` says. (The top byte of the text section's `sh_info`, where older cubins
    have it, is 0 in those of CuTe DSL 4.8.1.)
    """
    named = {section.name: section.content for section in sections(cubin)}
    symbols, strings = named.get(".symtab", b""), named.get(".strtab", b"")
    for attribute, payload in _info_records(named.get(".nv.info", b"")):
        if attribute == _REGISTER_COUNT:
            symbol, count = struct.unpack("<II", payload)
            (name,) = struct.unpack_from("<I", symbols, _SYMBOL_BYTES * symbol)
            if _text(strings, name) == entry:
                return int(count)
    raise CubinError(f"the cubin's .nv.info has no register count for {entry}")


def _info_records(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of the records that have a payload."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, nbytes = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            yield attribute, info[at : at + nbytes]
            at += nbytes
