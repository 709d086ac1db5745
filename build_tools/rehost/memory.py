"""Expansions of memory instructions: 256-bit global accesses, matrix loads and stores of elements below 16 bits."""

from __future__ import annotations

import re

from .body import Body
from .errors import RehostError
from .scan import Instruction, vector

_WIDE = ("v8", "v4")
_EVICTION = ("L2::evict_last", "L2::evict_first", "L2::evict_normal")
_ADDRESS = re.compile(r"\[\s*([\w$%.]+)\s*(?:\+\s*(-?\w+))?\s*\]")


def is_wide(ins: Instruction) -> bool:
    """Whether a global load or store is of 256 bits."""
    return "v8" in ins.mods or (ins.has("v4") and ins.mods[-1] in ("b64", "u64", "s64", "f64"))


def load_wide(ins: Instruction, body: Body) -> None:
    """256-bit ``ld`` (PTX ISA 9.7.9.8): two of 128 bits. Their L2 eviction priority exists for 256 bits only."""
    name, kind, count = _half(ins)
    registers = vector(ins.operands[0])
    loaded = []
    for half in range(2):
        values = [body.new(kind) for _ in range(count)]
        body.add(f"{name} {{{', '.join(values)}}}, {_address(ins, ins.operands[1], 16 * half)}{_rest(ins)}")
        loaded += values
    for register, value in zip(registers, loaded, strict=True):
        if register != "_":
            body.add(f"mov.{kind} {register}, {value}")


def store_wide(ins: Instruction, body: Body) -> None:
    """256-bit ``st`` (PTX ISA 9.7.9.12): two of 128 bits; an element ``_`` is not written."""
    name, _, count = _half(ins)
    size = 16 // count
    values = vector(ins.operands[1])
    for half in range(2):
        part = values[count * half : count * half + count]
        if "_" not in part:
            body.add(f"{name} {_address(ins, ins.operands[0], 16 * half)}, {{{', '.join(part)}}}{_rest(ins)}")
            continue
        single = name.replace(f".v{count}.", ".")
        for i, value in enumerate(part):
            if value != "_":
                body.add(f"{single} {_address(ins, ins.operands[0], 16 * half + size * i)}, {value}{_rest(ins)}")


def is_small_load(ins: Instruction) -> bool:
    """Whether ``ldmatrix`` is of a shape with elements below 16 bits."""
    return "m8n8" not in ins.mods


def load_matrix(ins: Instruction, body: Body) -> None:
    """``ldmatrix`` of m8n16 and m16n16 (PTX ISA 9.7.14.5.15).

    Rows are 16 bytes in every format, so Hopper's 8x8 load of 16-bit elements with the same addresses brings them: row
    g, bytes 4t.. to lane ``4 g + t``. The rest is a shuffle between lanes.
    """
    registers = vector(ins.operands[0])
    bits = 4 if ins.has("b4x16_p64") else 6 if ins.has("b6x16_p32") else 8
    spaces = [mod for mod in ins.mods if mod.startswith("shared")]
    count = len(registers)
    rows = [body.new() for _ in range(count)]
    name = ".".join(["ldmatrix.sync.aligned.m8n8", f"x{count}", *spaces, "b16"])
    body.add(f"{name} {{{', '.join(rows)}}}, {ins.operands[1]}")
    lane = body.lane()
    if ins.has("m8n16"):
        results = [_unpacked(body, word, lane, bits) for word in rows]
    elif ins.has("m16n16", "trans"):
        results = []
        for i in range(0, count, 2):
            results += _transposed(body, rows[i], rows[i + 1], lane, bits)
    else:
        raise RehostError(f"line {ins.line}: no expansion for {ins.name}")
    for register, value in zip(registers, results, strict=True):
        body.add(f"mov.b32 {register}, {value}")


def is_byte_store(ins: Instruction) -> bool:
    """Whether ``stmatrix`` is of bytes."""
    return ins.mods[-1] == "b8"


def store_matrix(ins: Instruction, body: Body) -> None:
    """``stmatrix.m16n8.trans.b8`` (PTX ISA 9.7.14.5.16): shuffled to rows of 16 bytes, then stored as 16-bit elements.

    Byte ``a + 2 b`` of lane ``4 g + t`` goes to row ``2 t + a``, byte ``g + 8 b``.
    """
    lane = body.lane()
    row, quarter = body.op("shr.u32", lane, 2), body.op("and.b32", lane, 3)
    first = body.op("mad.lo.u32", body.op("and.b32", lane, 1), 16, body.op("shr.u32", row, 1))
    byte = body.op("mad.lo.u32", body.op("shr.u32", quarter, 1), 2, body.op("and.b32", row, 1))
    shift = body.op("shl.b32", byte, 3)
    rows = []
    for word in body.copies(vector(ins.operands[1])):
        taken = []
        for k in range(4):
            source = body.op("add.u32", first, 4 * k)
            taken.append(body.op("shr.u32", body.shuffle(word, source), shift))
        rows.append(_bytes(body, taken))
    spaces = [mod for mod in ins.mods if mod.startswith("shared")]
    name = ".".join(["stmatrix.sync.aligned.m8n8", f"x{len(rows)}", *spaces, "b16"])
    body.add(f"{name} {ins.operands[0]}, {{{', '.join(rows)}}}")


def _unpacked(body: Body, word: str, lane: str, bits: int) -> str:
    """Elements 4t to 4t+3 of a packed row, one a byte (m8n16)."""
    quarter = body.op("and.b32", lane, 3)
    at = body.op("mul.lo.u32", quarter, 4 * bits)
    field = _field(body, word, body.op("and.b32", lane, 28), at)
    mask = (1 << bits) - 1
    return _bytes(body, [body.op("and.b32", body.op("shr.u32", field, bits * k), mask) for k in range(4)])


def _transposed(body: Body, upper: str, lower: str, lane: str, bits: int) -> list[str]:
    """Two registers of a 16x16 matrix, from its rows 0 to 7 and 8 to 15: rows 4t to 4t+3 of columns g and g+8."""
    group = body.op("shr.u32", lane, 2)
    # Rows 4t.. lie in one of the two registers, at lanes 16 (t & 1) + 4 k.
    first = body.op("shl.b32", body.op("and.b32", lane, 1), 4)
    in_lower = body.op("setp.ne.u32", body.op("and.b32", lane, 2), 0, kind="pred")
    mask = (1 << bits) - 1
    results = []
    for column in (0, 8):
        at = body.op("mul.lo.u32", body.op("add.u32", group, column), bits)
        taken = []
        for k in range(4):
            source = body.op("add.u32", first, 4 * k)
            fields = [_field(body, word, source, at) for word in (upper, lower)]
            taken.append(body.op("and.b32", body.op("selp.b32", fields[1], fields[0], in_lower), mask))
        results.append(_bytes(body, taken))
    return results


def _field(body: Body, word: str, first: str, at: str) -> str:
    """32 bits from bit ``at`` of the 128 in lanes ``first`` to ``first + 3``; bits past the end are arbitrary."""
    source = body.op("add.u32", first, body.op("shr.u32", at, 5))
    low = body.shuffle(word, source)
    high = body.shuffle(word, body.op("min.u32", body.op("add.u32", source, 1), 31))
    return body.op("shf.r.wrap.b32", low, high, at)


def _bytes(body: Body, values: list[str]) -> str:
    """The low bytes of four registers in one."""
    low = body.op("prmt.b32", values[0], values[1], "0x0040")
    high = body.op("prmt.b32", values[2], values[3], "0x0040")
    return body.op("prmt.b32", low, high, "0x5410")


def _half(ins: Instruction) -> tuple[str, str, int]:
    """Name of the 128-bit form, its element type without interpretation, its elements."""
    count = 4 if "v8" in ins.mods else 2
    mods = [f"v{count}" if mod in _WIDE else mod for mod in ins.mods if mod not in _EVICTION]
    return ".".join((ins.opcode, *mods)), "b32" if count == 4 else "b64", count


def _address(ins: Instruction, operand: str, offset: int) -> str:
    found = _ADDRESS.fullmatch(operand)
    if found is None:
        raise RehostError(f"line {ins.line}: {ins.name}: address {operand!r} is of a form that cannot be split")
    return f"[{found[1]}+{int(found[2] or '0', 0) + offset}]"


def _rest(ins: Instruction) -> str:
    return "".join(f", {operand}" for operand in ins.operands[2:])
