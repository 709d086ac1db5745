"""Faults of synchronisation: barriers, mbarriers, groups of copies, fences, and the ring of stages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..rehost.scan import Instruction
from .kernel import Change, Kernel, number, render, with_operand

_COPY_UNIT = 16
#: Name of the local label or register in text that a rule adds, which hides none of the kernel's.
_OWN = "b12x_fault"


def drop_barrier(kernel: Kernel) -> Iterator[Change]:
    """A barrier of the CTA, of named warps, of a cluster or of one warp goes away."""
    for ins in kernel.instructions:
        if ins.opcode in ("bar", "barrier") and not ins.has("red"):
            yield kernel.replace(ins, "")


def skip_wait(kernel: Kernel) -> Iterator[Change]:
    """A wait for an mbarrier passes at once."""
    for ins in _waits(kernel):
        yield kernel.replace(ins, render(ins, name="setp.eq.u32", operands=[ins.operands[0], "0", "0"]))


def wrong_parity(kernel: Kernel) -> Iterator[Change]:
    """A wait takes the other phase of its mbarrier: a stage is filled before it is free, or read before it is full."""
    for ins in _waits(kernel):
        if ins.has("parity"):
            yield kernel.replace(ins, _changed_source(ins, 2, "xor.b32", 1))


def drop_commit(kernel: Kernel) -> Iterator[Change]:
    """Asynchronous copies are not committed to a group."""
    for ins in kernel.instructions:
        if ins.opcode == "cp" and "commit_group" in ins.mods:
            yield kernel.replace(ins, "")


def drop_group_wait(kernel: Kernel) -> Iterator[Change]:
    """Groups of asynchronous copies, or the grid before this one, are not waited for."""
    for ins in kernel.instructions:
        groups = ins.opcode == "cp" and {"wait_group", "wait_all"} & set(ins.mods)
        if groups or (ins.opcode == "griddepcontrol" and ins.has("wait")):
            yield kernel.replace(ins, "")


def drop_fence(kernel: Kernel) -> Iterator[Change]:
    """A fence goes away: between ordinary and asynchronous accesses, after mbarrier.init, or of memory."""
    for ins in kernel.instructions:
        if ins.opcode in ("fence", "membar"):
            yield kernel.replace(ins, "")


def drop_expect(kernel: Kernel) -> Iterator[Change]:
    """An mbarrier is not told of the bytes that copies will bring."""
    for ins in _expects(kernel):
        name = ins.name.replace(".expect_tx", "")
        operands = ins.operands[:-1]
        yield kernel.replace(ins, render(ins, name=name, operands=operands) if ins.has("arrive") else "")


def change_expect(kernel: Kernel) -> Iterator[Change]:
    """An mbarrier expects 16 bytes more, or fewer, than come."""
    for ins in _expects(kernel):
        for delta in (_COPY_UNIT, -_COPY_UNIT):
            yield kernel.replace(ins, _changed_source(ins, len(ins.operands) - 1, "add.s32", delta))


def drop_arrive(kernel: Kernel) -> Iterator[Change]:
    """A thread does not arrive at an mbarrier."""
    for ins in kernel.instructions:
        if _arrives(ins):
            yield kernel.replace(ins, "")


def change_arrivals(kernel: Kernel) -> Iterator[Change]:
    """An mbarrier counts one arrival more, or fewer, than there are."""
    for ins in kernel.instructions:
        if ins.opcode == "mbarrier" and ins.has("init"):
            for delta in (1, -1):
                yield kernel.replace(ins, _changed_source(ins, 1, "add.s32", delta))


def change_ring(kernel: Kernel) -> Iterator[Change]:
    """A counter of stages wraps one stage later, or earlier.

    The wrap is a comparison of the next stage with a constant whose predicate selects between that stage and 0.
    """
    for ins in kernel.instructions:
        if ins.opcode != "setp" or not {"eq", "ne", "ge", "lt"} & set(ins.mods) or len(ins.operands) != 3:
            continue
        length = number(ins.operands[2])
        if length is None or length < 2 or not _selects_start(kernel, ins):
            continue
        for other in (length + 1, length - 1):
            yield kernel.replace(ins, with_operand(ins, 2, str(other)))


def early_release(kernel: Kernel) -> Iterator[Change]:
    """A stage is given back right after the wait for it, before it is read.

    The arrive moves up behind the last wait before it, with the branch around it and what computes its address, where
    nothing in between writes what these read.
    """
    order = kernel.instructions
    for at, ins in enumerate(order):
        if not _arrives(ins) or ins.opcode != "mbarrier":
            continue
        first = _start_of_arrive(kernel, at)
        waits = [
            k for k in range(first) if order[k].opcode == "mbarrier" and {"try_wait", "test_wait"} & set(order[k].mods)
        ]
        if not waits:
            continue
        target = next(k for k in range(waits[-1] + 1, len(order)) if order[k].opcode != "bra")
        if target >= first:
            continue
        between = {register for moved in order[target:first] for register in kernel.writes(moved)}
        inside = order[first : at + 1]
        own = {register for moved in inside for register in kernel.writes(moved)}
        if between & ({register for moved in inside for register in kernel.reads(moved)} - own):
            continue
        region = kernel.ptx[order[first].start : ins.end]
        if order[first].opcode == "bra":
            region = region.replace(order[first].operands[0], _OWN, 1) + f" {_OWN}:"
        moved_text = f"{{ {region} }} "
        yield kernel.change(
            ins,
            f"(moved up before) {kernel.statement(order[target])}",
            (order[target].start, order[target].start, moved_text),
            (order[first].start, ins.end, ""),
        )


def _waits(kernel: Kernel) -> Iterator[Instruction]:
    for ins in kernel.instructions:
        if ins.opcode == "mbarrier" and {"try_wait", "test_wait"} & set(ins.mods):
            yield ins


def _expects(kernel: Kernel) -> Iterator[Instruction]:
    for ins in kernel.instructions:
        if ins.opcode == "mbarrier" and ins.has("expect_tx"):
            yield ins


def _arrives(ins: Instruction) -> bool:
    if ins.opcode == "cp":
        return ins.has("mbarrier", "arrive")
    return ins.opcode == "mbarrier" and bool({"arrive", "arrive_drop"} & set(ins.mods)) and not ins.has("expect_tx")


def _changed_source(ins: Instruction, index: int, operation: str, value: int) -> str:
    """The instruction with one 32-bit source changed, in a scope with a register of its own."""
    change = f"{operation} {_OWN}, {ins.operands[index]}, {value};"
    return f"{{ .reg .b32 {_OWN}; {change} {with_operand(ins, index, _OWN)} }}"


def _selects_start(kernel: Kernel, ins: Instruction) -> bool:
    return any(
        reader.opcode == "selp" and {reader.operands[1], reader.operands[2]} == {"0", ins.operands[1]}
        for reader in kernel.readers(kernel.writes(ins)[0])
    )


def _start_of_arrive(kernel: Kernel, at: int) -> int:
    """Index of the branch that skips only what leads to an arrive; the arrive's own where there is none."""
    order = kernel.instructions
    following = kernel.ptx[order[at].end :]
    label = re.match(r"(?:\s|//[^\n]*)*([\w$]+)\s*:", following)
    for k in range(at - 1, max(at - 5, -1), -1):
        if order[k].opcode == "bra":
            return k if label and order[k].guard and order[k].operands == (label[1],) else at
    return at
