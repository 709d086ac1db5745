"""Builds the text of one expansion: a scope with registers of its own."""

from __future__ import annotations

from collections.abc import Iterable

from .scan import Instruction

#: Names of local registers start with this, so that they hide none of the kernel's.
PREFIX = "%hop"

FULL_WARP = "0xffffffff"


class Body:
    """Collects instructions and the registers they need.

    Registers are untyped (``.b32``), so that each instruction may read them as its own type. Operands of the original
    instruction are read into locals before anything is written, since its destinations may be among its sources.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lines: list[str] = []

    def new(self, kind: str = "b32") -> str:
        """A fresh register."""
        index = self._counts.get(kind, 0)
        self._counts[kind] = index + 1
        return f"{PREFIX}_{kind}_{index}"

    def add(self, text: str) -> None:
        """Append one instruction, without its semicolon."""
        self._lines.append(f"{text};")

    def op(self, name: str, *sources: str | int, kind: str = "b32") -> str:
        """Append ``name result, sources`` and return the result, a fresh register."""
        result = self.new(kind)
        self.add(f"{name} {result}, {', '.join(str(s) for s in sources)}")
        return result

    def copy(self, source: str, kind: str = "b32") -> str:
        """A local copy of an operand, immediates included."""
        return self.op(f"mov.{kind}", source, kind=kind)

    def copies(self, sources: Iterable[str], kind: str = "b32") -> list[str]:
        return [self.copy(source, kind) for source in sources]

    def lane(self) -> str:
        return self.op("mov.u32", "%laneid")

    def shuffle(self, value: str, lane: str | int) -> str:
        """The value that another lane of the (complete, converged) warp holds."""
        return self.op("shfl.sync.idx.b32", value, lane, 31, FULL_WARP)

    def text(self, instruction: Instruction, label: str) -> str:
        """The scope on one line, so that the line numbers of the module stay; a guard becomes a branch around it."""
        declared = [f".reg .{kind} {PREFIX}_{kind}_<{count}>;" for kind, count in self._counts.items()]
        parts = ["{", *declared]
        if instruction.guard:
            skip = "" if instruction.negated else "!"
            parts.append(f"@{skip}{instruction.guard} bra {label};")
        parts += self._lines
        if instruction.guard:
            parts.append(f"{label}:")
        return " ".join([*parts, "}"])
