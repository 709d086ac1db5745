"""Faults of data: scales, fragments, predicates, missing zeros and stores, swapped halves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from ..rehost.scan import Instruction, vector
from .kernel import Change, Kernel, joined, number, render, with_operand

_ZEROS = frozenset({"0", "0f00000000", "0F00000000", "0x0", "0d0000000000000000"})
#: Operands of a block-scaled MMA: D, A, B, C, scales of A, their selectors, scales of B, theirs.
_A, _B, _SCALE_A, _SELECT_A, _SCALE_B, _SELECT_B = 1, 2, 4, 5, 6, 7
#: How many lanes of a quad the thread selector of an operand tells apart.
_THREADS = {_SELECT_A: 2, _SELECT_B: 4}


def swap_scales(kernel: Kernel) -> Iterator[Change]:
    """The scale words of A and B change places in an MMA."""
    for ins in kernel.instructions:
        if ins.opcode == "mma" and ins.has("block_scale"):
            operands = list(ins.operands)
            operands[_SCALE_A], operands[_SCALE_B] = operands[_SCALE_B], operands[_SCALE_A]
            yield kernel.replace(ins, render(ins, operands=operands))


def shift_selector(kernel: Kernel) -> Iterator[Change]:
    """An MMA takes its scales from the next lane of the quad."""
    for ins in kernel.instructions:
        if ins.opcode != "mma" or not ins.has("block_scale"):
            continue
        for index, threads in _THREADS.items():
            byte, thread = vector(ins.operands[index])
            lane = number(thread)
            if lane is not None:
                yield kernel.replace(ins, with_operand(ins, index, joined([byte, str((lane + 1) % threads)])))


def swap_fragment(kernel: Kernel) -> Iterator[Change]:
    """Two registers of a fragment change places: of A or B in an MMA, or of what ldmatrix loads."""
    for ins in kernel.instructions:
        places = {"mma": (_A, _B), "ldmatrix": (0,), "stmatrix": (1,)}.get(ins.opcode, ())
        for index in places:
            elements = vector(ins.operands[index])
            for i, j in combinations(range(len(elements)), 2):
                swapped = list(elements)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                yield kernel.replace(ins, with_operand(ins, index, joined(swapped)))


def shift_lane(kernel: Kernel) -> Iterator[Change]:
    """A shuffle reads the neighbouring lane, a byte permutation the neighbouring byte.

    Left alone is the shuffle that tells the compiler that the number of a warp is the same in all its lanes.
    """
    for ins in kernel.instructions:
        if ins.opcode not in ("shfl", "prmt") or len(ins.operands) < 4 or _same_in_warp(kernel, ins.operands[1]):
            continue
        index = 2 if ins.opcode == "shfl" else 3
        value = number(ins.operands[index])
        if value is not None:
            yield kernel.replace(ins, with_operand(ins, index, str(value ^ 1)))


def swap_cvt(kernel: Kernel) -> Iterator[Change]:
    """The two values that a conversion packs change places."""
    for ins in kernel.instructions:
        if ins.opcode == "cvt" and len(ins.operands) >= 3:
            dst, a, b, *rest = ins.operands
            yield kernel.replace(ins, render(ins, operands=[dst, b, a, *rest]))


def swap_halves(kernel: Kernel) -> Iterator[Change]:
    """The halves of a register change places where it is taken apart or put together."""
    for ins in kernel.instructions:
        for index, operand in enumerate(ins.operands if ins.opcode == "mov" else ()):
            elements = vector(operand)
            if len(elements) == 2 and "_" not in elements:
                yield kernel.replace(ins, with_operand(ins, index, joined(reversed(elements))))


def flip_guard(kernel: Kernel) -> Iterator[Change]:
    """A guarded instruction runs where it should not, and the other way round."""
    for ins in kernel.instructions:
        if ins.guard:
            yield kernel.replace(ins, render(ins, negated=not ins.negated))


def flip_select(kernel: Kernel) -> Iterator[Change]:
    """A selection takes the other value."""
    for ins in kernel.instructions:
        if ins.opcode == "selp":
            dst, a, b, predicate = ins.operands
            yield kernel.replace(ins, render(ins, operands=[dst, b, a, predicate]))


def drop_zero(kernel: Kernel) -> Iterator[Change]:
    """A register is not set to zero: an accumulator, a counter, or what stands for data outside a tensor.

    Left alone is a register that was set to zero right before.
    """
    for ins in kernel.instructions:
        if _sets_zero(kernel, ins):
            before = (other for other in kernel.passed(ins) if set(kernel.writes(ins)) & set(kernel.writes(other)))
            earlier = next(before, None)
            if earlier is None or earlier.guard or not _sets_zero(kernel, earlier):
                yield kernel.replace(ins, "")


def drop_store(kernel: Kernel) -> Iterator[Change]:
    """A store goes away."""
    for ins in kernel.instructions:
        if ins.opcode in ("st", "stmatrix"):
            yield kernel.replace(ins, "")


def drop_copy(kernel: Kernel) -> Iterator[Change]:
    """An asynchronous copy goes away."""
    for ins in kernel.instructions:
        if ins.opcode == "cp" and any(operand.startswith("[") for operand in ins.operands) and not ins.has("arrive"):
            yield kernel.replace(ins, "")


def _same_in_warp(kernel: Kernel, register: str) -> bool:
    """Whether a register is the x index of the thread divided by the size of a warp."""
    threads = {writer.operands[0] for writer in kernel.instructions if writer.operands[1:] == ("%tid.x",)}
    return any(
        writer.opcode == "shr" and writer.operands[1] in threads and writer.operands[2] == "5"
        for writer in kernel.writers(register)
    )


def _sets_zero(kernel: Kernel, ins: Instruction) -> bool:
    if ins.opcode != "mov" or len(ins.operands) != 2:
        return False
    return all(part in _ZEROS or _is_zero(kernel, part) for part in vector(ins.operands[1]))


def _is_zero(kernel: Kernel, register: str) -> bool:
    """Whether all that a register is ever set to is zero."""
    writers = kernel.writers(register)
    return bool(writers) and all(
        writer.opcode == "mov" and set(vector(writer.operands[1])) <= _ZEROS and kernel.writes(writer) == (register,)
        for writer in writers
    )
