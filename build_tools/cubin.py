"""A reader for the parts of a cubin (a CUDA ELF file) that the build checks.

Field meanings were established against cuobjdump, ``ptxas -v`` and the driver's function attributes; the tests repeat
the comparison where those tools are at hand. Only little-endian ELF64 of ABI version 8 is read, which is what ptxas 13
writes: another version would be misread rather than refused by a laxer reader.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

from .errors import BuildError

_ELF_CLASS_64_LITTLE = b"\x7fELF\x02\x01\x01"
_EM_CUDA = 190
_ABI_VERSION = 8
_STT_FUNC = 2
_STO_ENTRY = 0x10

# .nv.info records: format byte, attribute byte, then a 16-bit value or, in format 4, a 16-bit size and a payload.
_FORMAT_SIZED = 4
_REGCOUNT = 0x2F
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
# .nv.compat uses the same records; this one is 1 for targets with the "a" suffix.
_ACCELERATOR_TARGET = 0x09


@dataclass(frozen=True)
class Cubin:
    """What a cubin says about itself.

    ``static_smem`` excludes the first KiB of shared memory that the system reserves (it lies outside the limit of
    101,376 bytes). ``local_bytes`` is the local memory a thread uses: spills, local arrays and call frames.
    """

    arch: str
    entries: tuple[str, ...]
    registers: int
    static_smem: int
    local_bytes: int
    ptxas: str


class _Section(NamedTuple):
    name: str
    offset: int
    size: int
    link: int
    no_bits: bool


class _Symbol(NamedTuple):
    name: str
    value: int
    size: int
    is_entry: bool


def read_cubin(data: bytes) -> Cubin:
    """Read a cubin; raises BuildError when it is not one this reader knows or is cut short."""
    if data[:7] != _ELF_CLASS_64_LITTLE or len(data) < 64:
        raise BuildError(f"not a cubin: starts with {data[:8]!r}, expected a little-endian ELF64 file")
    machine, abi_version = struct.unpack_from("<H", data, 18)[0], data[8]
    if machine != _EM_CUDA or abi_version != _ABI_VERSION:
        raise BuildError(
            f"ELF machine {machine}, ABI version {abi_version}; expected machine {_EM_CUDA} (CUDA), ABI version "
            f"{_ABI_VERSION} as ptxas 13 writes it"
        )
    try:
        return _read(data)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BuildError(f"cubin of {len(data)} bytes is cut short or damaged: {error}") from error


def _read(data: bytes) -> Cubin:
    sections = _sections(data)
    symbols = _symbols(data, sections)
    entries = tuple(sorted(s.name for s in symbols if s.is_entry))
    registers = local = 0
    for attribute, payload in _records(data, sections.get(".nv.info")):
        if attribute not in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
            continue
        # Functions that an entry calls have records of their own and count towards what a thread uses.
        value = struct.unpack_from("<I", payload, 4)[0]
        if attribute == _REGCOUNT:
            registers = max(registers, value)
        else:
            local = max(local, value)
    local = max([local, *(s.size for n, s in sections.items() if n.startswith(".nv.local."))])
    reserved = max([0, *(s.value for s in symbols if s.name == ".nv.reservedSmem.cap")])
    shared = max(
        [0, *(s.size - reserved for n, s in sections.items() if n.startswith(".nv.shared.") and n[11:] in entries)]
    )
    return Cubin(
        arch=_arch(data, sections),
        entries=entries,
        registers=registers,
        static_smem=shared,
        local_bytes=local,
        ptxas=_ptxas_version(data, sections),
    )


def _sections(data: bytes) -> dict[str, _Section]:
    table, size, count, names_index = (
        struct.unpack_from("<Q", data, 40)[0],
        *struct.unpack_from("<HHH", data, 58),
    )
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    names = raw[names_index][4]
    found = {}
    for name_offset, kind, _, _, offset, length, link, *_ in raw:
        no_bits = kind == 8
        if not no_bits and offset + length > len(data):
            raise IndexError(f"a section ends at byte {offset + length}")
        name = _string(data, names + name_offset)
        found[name] = _Section(name, offset, length, link, no_bits)
    return found


def _symbols(data: bytes, sections: dict[str, _Section]) -> list[_Symbol]:
    table, strings = sections[".symtab"], sections[".strtab"]
    found = []
    for offset in range(table.offset, table.offset + table.size, 24):
        name, info, other, _, value, size = struct.unpack_from("<IBBHQQ", data, offset)
        is_entry = info & 0xF == _STT_FUNC and other & _STO_ENTRY != 0
        found.append(_Symbol(_string(data, strings.offset + name), value, size, is_entry))
    return found


def _records(data: bytes, section: _Section | None) -> list[tuple[int, bytes]]:
    if section is None:
        return []
    found, at, end = [], section.offset, section.offset + section.size
    while at < end:
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        size = value if kind == _FORMAT_SIZED else 0
        payload = data[at + 4 : at + 4 + size] if size else struct.pack("<H", value)
        found.append((attribute, payload))
        at += 4 + size
    return found


def _arch(data: bytes, sections: dict[str, _Section]) -> str:
    number = struct.unpack_from("<I", data, 48)[0] >> 8 & 0xFF
    accelerated = any(
        attribute == _ACCELERATOR_TARGET and payload[0] == 1
        for attribute, payload in _records(data, sections.get(".nv.compat"))
    )
    return f"sm_{number}{'a' if accelerated else ''}"


def _ptxas_version(data: bytes, sections: dict[str, _Section]) -> str:
    """The version in the tool note: ``13.4.59`` of ``Cuda compilation tools, release 13.4, V13.4.59``."""
    note = sections.get(".note.nv.tkinfo")
    found = re.search(rb"\bV(\d+(?:\.\d+)+)", data[note.offset : note.offset + note.size]) if note else None
    return found[1].decode() if found else "unknown"


def _string(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()
