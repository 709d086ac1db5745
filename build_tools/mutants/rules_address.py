"""Faults of addresses and bounds: comparisons, constants, strides, alignment, width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..rehost.scan import Instruction, vector
from .kernel import Change, Kernel, bits, number, render, with_operand

_NEIGHBOUR = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi"}
_MOVES_ADDRESSES = frozenset({"add", "cvta", "mad", "mov", "or", "shl", "sub", "xor"})
_SYMBOL_OF_SHARED = re.compile(r"\.shared\b[^;\[]*?([A-Za-z_$][\w$]*)\s*\[")


def off_by_one(kernel: Kernel) -> Iterator[Change]:
    """A comparison of integers includes its bound, or does not, or its constant is one more or less.

    Sign tests that only correct the rounding of a signed division are left alone: they tell negative numbers from
    others, zero divides exactly, and indices and sizes are not negative.
    """
    for ins in kernel.instructions:
        if ins.opcode != "setp" or len(ins.operands) != 3 or _rounds_division(kernel, ins) or "f32" in ins.mods:
            continue
        compared, constant = ins.mods[0], number(ins.operands[2])
        changed = []
        if compared in _NEIGHBOUR:
            changed.append(replace(ins, mods=(_NEIGHBOUR[compared], *ins.mods[1:])))
        if constant is not None:
            lowest = 0 if ins.mods[-1].startswith("u") else constant - 1
            others = [other for other in (constant + 1, constant - 1) if other >= lowest]
            changed += [replace(ins, operands=(*ins.operands[:2], str(other))) for other in others]
        for other in changed:
            if kernel.truth(ins) is None or kernel.truth(ins) is not kernel.truth(other):
                yield kernel.replace(ins, render(other))


def misalign(kernel: Kernel) -> Iterator[Change]:
    """An access of more than 4 bytes starts 4 or 8 bytes further."""
    for ins in kernel.instructions:
        size, places = _access(ins)
        for index in places:
            for delta in (4, 8):
                if delta < size:
                    yield kernel.replace(ins, with_operand(ins, index, _moved(ins.operands[index], delta)))


def change_offset(kernel: Kernel) -> Iterator[Change]:
    """A constant in a shared address is 16 bytes more or less (8 where it is no multiple of 16)."""
    shared = _closure(kernel, _shared_symbols(kernel))
    for ins in kernel.instructions:
        if ins.opcode not in ("add", "mad") or not set(kernel.writes(ins)) & shared:
            continue
        last = len(ins.operands) - 1
        constant = number(ins.operands[last])
        if constant:
            unit = 8 if constant % 16 else 16
            for other in (constant + unit, constant - unit):
                yield kernel.replace(ins, with_operand(ins, last, str(other)))


def change_stride(kernel: Kernel) -> Iterator[Change]:
    """A constant that something is multiplied by, or the shift that does so, is larger or smaller by its lowest bit."""
    for ins in kernel.instructions:
        if ins.opcode not in ("mul", "mad", "shl") or bits(ins) not in (32, 64) or "f32" in ins.mods:
            continue
        for index in (1, 2):
            constant = number(ins.operands[index])
            if not constant:
                continue
            unit = 1 if ins.opcode == "shl" else constant & -constant
            for other in (constant + unit, constant - unit):
                if other:
                    yield kernel.replace(ins, with_operand(ins, index, str(other)))


def narrow_address(kernel: Kernel) -> Iterator[Change]:
    """A 64-bit address loses its upper half.

    Only sums that hold a pointer are cut: to see an offset cut, a tensor of more than 4 GiB would have to be passed.
    """
    pointers = {
        register
        for ins in kernel.instructions
        if ins.opcode == "ld" and ins.has("param") and bits(ins) == 64
        for register in kernel.writes(ins)
    }
    held = _closure(kernel, pointers)
    for ins in kernel.instructions:
        if ins.opcode in ("add", "mad", "sub") and bits(ins) == 64 and set(kernel.writes(ins)) & held:
            (register,) = kernel.writes(ins)
            yield kernel.after(ins, f"and.b64 {register}, {register}, 4294967295;")


def _rounds_division(kernel: Kernel, ins: Instruction) -> bool:
    """Whether a comparison is the sign test in what the compiler makes of a division that rounds down or up."""
    if number(ins.operands[2]) not in (0, -1) or not ins.mods[-1].startswith("s"):
        return False
    readers = kernel.readers(kernel.writes(ins)[0])
    return bool(readers) and all(
        reader.name == "and.pred" and all(user.opcode == "selp" for user in kernel.readers(kernel.writes(reader)[0]))
        for reader in readers
    )


def _access(ins: Instruction) -> tuple[int, tuple[int, ...]]:
    """Bytes of an access, and the operands that are addresses of this size; (0, ()) for other instructions."""
    places = tuple(k for k, operand in enumerate(ins.operands) if operand.startswith("["))
    if ins.opcode in ("ld", "st") and not ins.has("param"):
        count = next((int(mod[1:]) for mod in ins.mods if re.fullmatch(r"v[248]", mod)), 1)
        return count * bits(ins) // 8, places
    if ins.opcode in ("ldmatrix", "stmatrix"):
        return 16, places
    if ins.opcode != "cp" or not ins.has("async") or len(places) < 2:
        return 0, ()
    if not ins.has("bulk"):
        return number(ins.operands[2]) or 0, places[:2]
    addresses = places[:1] if ins.has("tensor") else places[:2]
    return 16, tuple(
        k for k in addresses if len(vector(ins.operands[k].strip("[]"))) == 1 and "," not in ins.operands[k]
    )


def _moved(address: str, delta: int) -> str:
    """``[register + offset]`` a few bytes further."""
    base, _, offset = address.strip("[] ").partition("+")
    return f"[{base.strip()}+{int(offset or '0', 0) + delta}]"


def _shared_symbols(kernel: Kernel) -> set[str]:
    return {match[1] for match in _SYMBOL_OF_SHARED.finditer(kernel.ptx)}


def _closure(kernel: Kernel, start: Iterable[str]) -> set[str]:
    """Registers whose value is one of ``start`` plus something."""
    found, waiting = set(start), list(start)
    while waiting:
        name = waiting.pop()
        for reader in kernel.readers(name):
            if reader.opcode in _MOVES_ADDRESSES and (reader.opcode != "mad" or name in reader.operands[3]):
                new = set(kernel.writes(reader)) - found
                found |= new
                waiting += new
    return found
