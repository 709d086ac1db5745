"""A kernel's PTX as a list of instructions with what each reads and writes, and single changes to it."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..rehost.scan import Instruction, instructions, vector

#: Instructions whose first operand is not a destination, though it may be a register.
_NO_DESTINATION = frozenset({"bar", "barrier", "bra", "brx", "call", "exit", "nanosleep", "ret", "setmaxnreg"})
_REGISTER = re.compile(r"%?[A-Za-z_][\w$]*")
_COMMENT = re.compile(r"//[^\n]*")
_LABEL = re.compile(r"[\w$]\s*:")
_SCOPES = re.compile(r"[{}]|\.reg\s+\.\w+\s+([^;]*);")
_JUMPS = frozenset({"bra", "brx", "call", "exit", "ret"})
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")

#: A span of the text and what takes its place.
Edit = tuple[int, int, str]


@dataclass(frozen=True)
class Change:
    """One change of a kernel. ``before`` and ``after`` show it, ``after`` is empty where a statement is dropped.

    ``nth`` counts the statements of the kernel that read like ``before``, from 1.
    """

    line: int
    nth: int
    before: str
    after: str
    edits: tuple[Edit, ...]


class Kernel:
    """The scanned text of a PTX module with one entry (RehostError where it cannot be followed)."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.instructions = tuple(instructions(ptx))

    def statement(self, ins: Instruction) -> str:
        """An instruction as it stands in the text, on one line."""
        return collapse(self.ptx[ins.start : ins.end])

    def replace(self, ins: Instruction, text: str) -> Change:
        """The change of one instruction to other text; an empty one drops it."""
        return self.change(ins, text, (ins.start, ins.end, text))

    def after(self, ins: Instruction, text: str) -> Change:
        """The change that puts more text after an instruction."""
        return self.change(ins, f"{self.statement(ins)} {text}", (ins.end, ins.end, f" {text}"))

    def change(self, ins: Instruction, after: str, *edits: Edit) -> Change:
        return Change(ins.line, self._nth[ins.start], self.statement(ins), collapse(after), edits)

    def reads(self, ins: Instruction) -> tuple[str, ...]:
        """Registers that an instruction reads, its guard included; a local name is followed by its scope."""
        sources = ins.operands[1:] if self.writes(ins) else ins.operands
        return self._scoped(ins, [*_registers(sources), *([ins.guard] if ins.guard else [])])

    def writes(self, ins: Instruction) -> tuple[str, ...]:
        """Registers that an instruction writes, likewise."""
        if ins.opcode in _NO_DESTINATION or not ins.operands or ins.operands[0].startswith("["):
            return ()
        return self._scoped(ins, _registers(ins.operands[:1]))

    def readers(self, register: str) -> Sequence[Instruction]:
        return self._uses[0].get(register, ())

    def writers(self, register: str) -> Sequence[Instruction]:
        return self._uses[1].get(register, ())

    def matters(self, ins: Instruction) -> bool:
        """Whether anything may come of what an instruction writes; one without results is taken to matter."""
        written = self.writes(ins)
        return not written or any(
            self.readers(name) and not self._discarded(name) and not self._overwritten(ins, name) for name in written
        )

    def passed(self, ins: Instruction) -> Iterator[Instruction]:
        """What surely ran before an instruction without a branch into the middle, the nearest first."""
        at = self._index[ins.start]
        while at > 0 and self.instructions[at].start not in self._labelled:
            at -= 1
            if self.instructions[at].opcode in _JUMPS and not self.instructions[at].guard:
                return
            yield self.instructions[at]

    def truth(self, ins: Instruction) -> bool | None:
        """What a comparison of constants gives; None where it is none."""
        if ins.opcode != "setp" or len(ins.operands) != 3 or ins.mods[0] not in _COMPARE or "f32" in ins.mods:
            return None
        a, b = (self._constant(ins, operand) for operand in ins.operands[1:])
        return None if a is None or b is None else _COMPARE[ins.mods[0]](a, b)

    def apply(self, change: Change) -> str:
        """The text of the changed kernel."""
        parts, done = [], 0
        for start, end, text in sorted(change.edits):
            parts += [self.ptx[done:start], text]
            done = end
        return "".join([*parts, self.ptx[done:]])

    def _scoped(self, ins: Instruction, names: Iterable[str]) -> tuple[str, ...]:
        local = self._locals[ins.start]
        return tuple(dict.fromkeys(local.get(name, name) for name in names))

    def _constant(self, ins: Instruction, operand: str) -> int | None:
        """The one number that an operand can be, None where that is not plain."""
        if (value := number(operand)) is not None:
            return value
        (register,) = self._scoped(ins, [operand])
        values = {number(writer.operands[1]) if writer.opcode == "mov" else None for writer in self.writers(register)}
        return values.pop() if len(values) == 1 else None

    def _discarded(self, register: str) -> bool:
        """Whether a register is only packed into others, which are taken apart again without a use of this part."""
        for pack in self.readers(register):
            parts = vector(pack.operands[-1]) if pack.opcode == "mov" else ()
            if len(parts) < 2:
                return False
            places = [k for k, part in enumerate(parts) if self._scoped(pack, [part]) == (register,)]
            for unpack in self.readers(self.writes(pack)[0]):
                taken = vector(unpack.operands[0])
                if unpack.opcode != "mov" or len(taken) != len(parts):
                    return False
                if any(self.readers(self._scoped(unpack, [taken[k]])[0]) for k in places):
                    return False
        return True

    def _overwritten(self, ins: Instruction, register: str) -> bool:
        """Whether a register is surely written again, before it is read, in the basic block of an instruction."""
        truths: dict[str, bool | None] = {}
        for other in self._blocks[ins.start]:
            if other.start > ins.start and register in self.reads(other):
                return False
            if other.start > ins.start and register in self.writes(other):
                happens = truths.get(self._scoped(other, [other.guard])[0])
                if not other.guard or happens is None:
                    return not other.guard
                if happens is not other.negated:
                    return True
            for written in self.writes(other):
                truths[written] = None if other.guard else self.truth(other)
        return False

    @cached_property
    def _locals(self) -> dict[int, dict[str, str]]:
        """For each instruction, by where it starts, the names that scopes around it declare, with their scopes."""
        found: dict[int, dict[str, str]] = {}
        scopes: list[dict[str, str]] = []
        end = 0
        for ins in self.instructions:
            for token in _SCOPES.finditer(_COMMENT.sub("", self.ptx[end : ins.start])):
                if token[0] == "{":
                    scopes.append(dict(scopes[-1]) if scopes else {})
                elif token[0] == "}":
                    scopes.pop()
                elif len(scopes) > 1:  # the entry's own registers need no mark
                    scopes[-1].update({name: f"{name} in {ins.start}" for name in _REGISTER.findall(token[1])})
            found[ins.start] = scopes[-1] if scopes else {}
            end = ins.end
        return found

    @cached_property
    def _labelled(self) -> frozenset[int]:
        """Where the instructions start that a branch may come to."""
        ends = [0, *(ins.end for ins in self.instructions)]
        gaps = [self.ptx[end : ins.start] for end, ins in zip(ends, self.instructions, strict=False)]
        pairs = zip(gaps, self.instructions, strict=True)
        return frozenset(ins.start for gap, ins in pairs if _LABEL.search(_COMMENT.sub("", gap)))

    @cached_property
    def _blocks(self) -> dict[int, list[Instruction]]:
        """The basic block of each instruction, by where that starts."""
        found: dict[int, list[Instruction]] = {}
        block: list[Instruction] = []
        for ins in self.instructions:
            if ins.start in self._labelled or (block and block[-1].opcode in _JUMPS):
                block = []
            block.append(ins)
            found[ins.start] = block
        return found

    @cached_property
    def _index(self) -> dict[int, int]:
        return {ins.start: k for k, ins in enumerate(self.instructions)}

    @cached_property
    def _uses(self) -> tuple[dict[str, list[Instruction]], dict[str, list[Instruction]]]:
        read: defaultdict[str, list[Instruction]] = defaultdict(list)
        written: defaultdict[str, list[Instruction]] = defaultdict(list)
        for ins in self.instructions:
            for register in self.reads(ins):
                read[register].append(ins)
            for register in self.writes(ins):
                written[register].append(ins)
        return dict(read), dict(written)

    @cached_property
    def _nth(self) -> dict[int, int]:
        seen: defaultdict[str, int] = defaultdict(int)
        out = {}
        for ins in self.instructions:
            text = self.statement(ins)
            seen[text] += 1
            out[ins.start] = seen[text]
        return out


def render(
    ins: Instruction,
    *,
    name: str | None = None,
    operands: Iterable[str] | None = None,
    negated: bool | None = None,
) -> str:
    """The text of an instruction with some parts changed."""
    flag = ins.negated if negated is None else negated
    guard = f"@{'!' if flag else ''}{ins.guard} " if ins.guard else ""
    parts = (ins.name if name is None else name, ", ".join(ins.operands if operands is None else operands))
    return f"{guard}{' '.join(part for part in parts if part)};"


def with_operand(ins: Instruction, index: int, text: str) -> str:
    """The text of an instruction with one operand changed."""
    return render(ins, operands=[*ins.operands[:index], text, *ins.operands[index + 1 :]])


def joined(elements: Iterable[str]) -> str:
    return f"{{{', '.join(elements)}}}"


def number(operand: str) -> int | None:
    """The value of an integer literal, None for anything else."""
    return int(operand.rstrip("U"), 0) if _NUMBER.fullmatch(operand) else None


def bits(ins: Instruction) -> int:
    """Width of the last type among an instruction's modifiers; 0 where there is none."""
    sized = [mod for mod in ins.mods if re.fullmatch(r"[busf](?:8|16|32|64|128)", mod)]
    return int(sized[-1][1:]) if sized else 0


def collapse(text: str) -> str:
    return " ".join(text.split())


def _registers(operands: Iterable[str]) -> list[str]:
    found = []
    for operand in operands:
        for element in vector(operand):
            if number(element.strip("[]{} ")) is None and not element.startswith(("0f", "0d", "0F", "0D")):
                found += [name for name in _REGISTER.findall(element) if name != "_"]
    return found
