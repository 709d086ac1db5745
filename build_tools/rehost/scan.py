"""Finds the instructions of a PTX module, with their places in the text.

The rest of the text (directives, labels, scopes, comments) is only skipped, so a rewriter replaces the instructions
that it knows and leaves every other byte alone. Statements may share a line or span several, braces open a scope at the
start of a statement and a vector inside one, inline assembly repeats names (PTX ISA 4, Syntax).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import RehostError

_NAME = r"[A-Za-z_$%][\w$]*"
_SKIP = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/|[{};])+", re.S)
_LABEL = re.compile(rf"{_NAME}\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(?:version|target|address_size|file|loc)\b[^\n]*")
_KERNEL = re.compile(r"\.(?:visible\s+|weak\s+|extern\s+)?(?:entry|func)\b[^{;]*[{;]", re.S)
_INSTRUCTION = re.compile(
    rf"(?:@(?P<negate>!?)\s*(?P<guard>{_NAME})\s+)?(?P<opcode>[a-z]\w*)(?P<mods>(?:\.\w+(?:::\w+)*)*)\s*(?P<operands>.*)",
    re.S,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``start`` and ``end`` span it in the text, guard and semicolon included."""

    opcode: str
    mods: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    negated: bool
    line: int
    start: int
    end: int

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.mods))

    def has(self, *mods: str) -> bool:
        """Whether all these modifiers are present."""
        return all(mod in self.mods for mod in mods)


def instructions(ptx: str) -> Iterator[Instruction]:
    """The instructions of a module in order; RehostError where the text cannot be followed."""
    at, end, line, counted = 0, len(ptx), 1, 0
    while True:
        skipped = _SKIP.match(ptx, at)
        at = skipped.end() if skipped else at
        if at >= end:
            return
        line, counted = line + ptx.count("\n", counted, at), at
        if ptx[at] == ".":
            at = _directive(ptx, at, line)
            continue
        label = _LABEL.match(ptx, at)
        if label:
            at = label.end()
            continue
        stop = ptx.find(";", at)
        if stop < 0:
            raise RehostError(f"line {line}: statement without ';' at the end of the text")
        yield _instruction(ptx[at:stop], line, at, stop + 1)
        at = stop + 1


def split(text: str) -> tuple[str, ...]:
    """Parts between commas that stand outside braces, brackets and parentheses."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return (*parts, last) if parts or last else ()


def vector(operand: str) -> tuple[str, ...]:
    """Elements of ``{a, b}``; a plain operand is a vector of one."""
    if operand.startswith("{") and operand.endswith("}"):
        return split(operand[1:-1])
    return (operand,)


def _directive(ptx: str, at: int, line: int) -> int:
    for pattern in (_LINE_DIRECTIVE, _KERNEL):
        found = pattern.match(ptx, at)
        if found:
            return found.end()
    if ptx.startswith(".section", at):
        raise RehostError(f"line {line}: debug sections are not supported; use an artifact without line info")
    stop = ptx.find(";", at)
    following = re.compile(r"\n\s*[.{]|[{]").search(ptx, at + 1)
    # Performance directives of an entry (.reqntid, .maxnreg) stand between its parameters and its brace, without ';'.
    if following and (stop < 0 or following.start() < stop) and "=" not in ptx[at : following.start()]:
        return following.start()
    if stop < 0:
        raise RehostError(f"line {line}: directive without an end")
    return stop + 1


def _instruction(text: str, line: int, start: int, end: int) -> Instruction:
    found = _INSTRUCTION.fullmatch(_COMMENT.sub(" ", text).strip())
    if found is None:
        raise RehostError(f"line {line}: not an instruction: {text.strip()!r}")
    return Instruction(
        opcode=found["opcode"],
        mods=tuple(found["mods"].split(".")[1:]),
        operands=split(found["operands"]),
        guard=found["guard"] or "",
        negated=bool(found["negate"]),
        line=line,
        start=start,
        end=end,
    )
