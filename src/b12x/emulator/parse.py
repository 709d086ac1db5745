"""PTX text to statements: scopes, registers, labels, parameters and module-level variables.

Covers the syntax of the PTX ISA, sections 4 (Syntax), 5 (State spaces, types and variables) and 11 (Directives), as far
as compilers emit it. What an instruction means is the decoder's business; here it stays an opcode with operands.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .errors import ParseError, UnsupportedInstruction

TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16, "pred": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    """One declared register; ``uid`` is unique within its entry."""

    name: str
    type: str
    uid: int


@dataclass(frozen=True)
class Imm:
    """A literal: an int, or the bits of a floating-point literal with its width."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A named variable or parameter plus a byte offset."""

    name: str
    space: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    """A branch target, resolved to a statement index."""

    name: str
    index: int


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; ``coords`` holds the ``{...}`` of a tensor copy's address."""

    base: Reg | Symbol | Imm
    offset: int = 0
    coords: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``d|p``."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """``!p``."""

    reg: Reg


@dataclass(frozen=True)
class Sink:
    """``_``."""


Operand = Reg | Imm | Special | Symbol | Label | Address | Vector | Pair | Not | Sink


@dataclass(frozen=True)
class Line:
    """A place in the kernel's source, from ``.loc``; ``files`` is filled by the module's ``.file`` directives."""

    files: dict[int, str]
    file: int
    line: int

    def __str__(self) -> str:
        return f"{self.files.get(self.file, f'file {self.file}')}:{self.line}"


@dataclass(frozen=True)
class Instr:
    opcode: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    guard_neg: bool
    line: int
    text: str
    loc: Line | None = None

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.mods))

    @property
    def source(self) -> str:
        """The source line in brackets, if the PTX tells it."""
        return f" ({self.loc})" if self.loc is not None else ""


@dataclass(frozen=True)
class ParamDecl:
    """One kernel parameter: its declaration text, its size and place in the parameter block."""

    name: str
    text: str
    type: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A module- or entry-level variable; ``data`` is the initialiser of a .global or .const one."""

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""
    extern: bool = False


@dataclass
class Entry:
    """One ``.entry``: parameters, statically declared shared memory, block directives and instructions."""

    name: str
    params: tuple[ParamDecl, ...]
    line: int
    static_shared: int = 0  # bytes of statically declared shared memory
    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    reqnctapercluster: tuple[int, int, int] | None = None
    instrs: list[Instr] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: list[Reg] = field(default_factory=list)
    tables: dict[str, tuple[Label, ...]] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass(frozen=True)
class _Statement:
    text: str
    line: int


_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_NUMBER = re.compile(
    r"[+-]?(0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d*|\d+U?)$"
)
_IDENT = r"[A-Za-z_$%][A-Za-z0-9_$.]*"
_NAME = re.compile(rf"({_IDENT})\s*(?:([+-])\s*(\w+))?")
_ADDRESS = re.compile(rf"({_IDENT}|[+-]?\w+)\s*(?:([+-])\s*([+-]?\w+))?")
_NUMBERED = re.compile(r"(.*?)(\d+)$")
_INSTRUCTION = re.compile(
    rf"(?:@(!?)\s*({_IDENT})\s+)?([a-z][a-z0-9_]*)((?:\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)*)\s*(.*)$"
)


def _strip_comments(text: str) -> str:
    return _TOKEN.sub(lambda m: "\n" * m.group().count("\n"), text)


_BREAK = re.compile(r"[;{}]|(?<!:):(?!:)")
_LABEL = re.compile(rf"{_IDENT}\s*$")
_DEBUG = re.compile(r"\s*(\.(?:loc|file)\b[^\n;]*);?[^\n]*")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')


def _statements(text: str, start: int, line: int) -> tuple[list[_Statement], int]:
    """Splits an entry's body, which starts after its ``{``, up to its closing brace.

    A brace opens or closes a scope only where a statement could start; elsewhere it belongs to a vector operand.
    """
    out: list[_Statement] = []
    depth = vector = 0
    begin, first = start, line  # of the current statement, and the line there
    pos = start
    while True:
        debug = _DEBUG.match(text, begin) if pos == begin else None
        if debug:
            out.append(_Statement(" ".join(debug.group(1).split()), first))
            first += text.count("\n", begin, debug.end())
            begin = pos = debug.end()
            continue
        m = _BREAK.search(text, pos)
        if m is None:
            raise ParseError("the entry's closing brace is missing")
        pos = m.end()
        body = text[begin : m.start()].strip()
        lead = begin + len(text[begin : m.start()]) - len(text[begin : m.start()].lstrip())
        at = first + text.count("\n", begin, lead)
        kind = m.group()
        if kind == "{" and body:
            vector += 1
            continue
        if kind == "}" and vector:
            vector -= 1
            continue
        if kind == ":":
            if vector or not _LABEL.match(body):
                continue
            body += ":"
        if kind in ";:":
            if body:
                out.append(_Statement(" ".join(body.split()), at))
        else:
            if body:
                raise ParseError(f"line {at}: statement without ';'")
            if kind == "}" and not depth:
                return out, m.end()
            depth += 1 if kind == "{" else -1
            out.append(_Statement(kind, first + text.count("\n", begin, m.start())))
        first += text.count("\n", begin, pos)
        begin = pos


_SPLIT = {sep: re.compile(rf"[{{}}\[\]()]|{re.escape(sep)}") for sep in ",|"}


def _split(text: str, sep: str = ",") -> list[str]:
    """Splits at separators outside braces and brackets."""
    if sep not in text:
        return [text.strip()] if text.strip() else []
    parts: list[str] = []
    depth = begin = 0
    for m in _SPLIT[sep].finditer(text):
        ch = m.group()
        if ch == sep:
            if depth == 0:
                parts.append(text[begin : m.start()].strip())
                begin = m.end()
        else:
            depth += 1 if ch in "{[(" else -1
    parts.append(text[begin:].strip())
    return parts


def parse_number(text: str) -> Imm | None:
    """A PTX literal (PTX ISA 4.5), or None."""
    text = text.strip()
    if not _NUMBER.match(text):
        return None
    sign = -1 if text.startswith("-") else 1
    body = text.lstrip("+-")
    low = body.lower()
    if low.startswith("0f"):
        bits = int(body[2:], 16)
        return Imm(bits ^ (0x80000000 if sign < 0 else 0), 32)
    if low.startswith("0d"):
        bits = int(body[2:], 16)
        return Imm(bits ^ (1 << 63 if sign < 0 else 0), 64)
    if "." in body:
        return Imm(struct.unpack("<Q", struct.pack("<d", sign * float(body)))[0], 64)
    body = low.rstrip("u")
    base = 16 if body.startswith("0x") else 2 if body.startswith("0b") else 8 if re.match(r"0[0-7]+$", body) else 10
    return Imm(sign * int(body, base))


class _Scope:
    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.regs: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[int, str]] = {}
        self.labels: dict[str, int] = {}

    def reg(self, name: str, body: _Body) -> Reg | None:
        scope: _Scope | None = self
        while scope:
            if name in scope.regs:
                return scope.regs[name]
            m = _NUMBERED.match(name)
            if m and m.group(1) in scope.ranges:
                count, kind = scope.ranges[m.group(1)]
                if int(m.group(2)) < count and str(int(m.group(2))) == m.group(2):
                    scope.regs[name] = body.new_reg(name, kind)
                    return scope.regs[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class _Body:
    """Turns the statements of one entry into instructions with resolved operands."""

    def __init__(self, entry: Entry, module: dict[str, Variable], files: dict[int, str]) -> None:
        self.entry = entry
        self.module = module
        self.files = files
        self.params = {p.name for p in entry.params}
        self.raw: list[tuple[_Statement, _Scope, Line | None]] = []
        self.tables: list[tuple[str, str, _Scope, int]] = []

    def new_reg(self, name: str, kind: str) -> Reg:
        reg = Reg(name, kind, len(self.entry.registers))
        self.entry.registers.append(reg)
        return reg

    def collect(self, statements: list[_Statement]) -> None:
        scope = _Scope(None)
        loc: Line | None = None
        for st in statements:
            if st.text == "{":
                scope = _Scope(scope)
            elif st.text == "}":
                if scope.parent is None:
                    raise ParseError(f"line {st.line}: unbalanced '}}'")
                scope = scope.parent
            elif st.text.endswith(":") and re.fullmatch(rf"{_IDENT}\s*:", st.text):
                name = st.text[:-1].strip()
                if name in scope.labels:
                    raise ParseError(f"line {st.line}: label {name} declared twice in one scope")
                scope.labels[name] = len(self.raw)
                self.pending_label = name
            elif st.text.startswith(".reg"):
                self.declare(st, scope)
            elif st.text.startswith(".branchtargets"):
                self.tables.append((self.pending_label, st.text[len(".branchtargets") :], scope, st.line))
            elif st.text.startswith((".shared", ".local")):
                var = parse_variable(st.text, st.line)
                self.entry.variables[var.name] = var
            elif st.text.startswith(".loc"):
                m = _LOC.match(st.text)
                loc = Line(self.files, int(m.group(1)), int(m.group(2))) if m else None
            elif st.text.startswith((".pragma", ".file")):
                continue
            elif st.text.startswith("."):
                raise UnsupportedInstruction(f"line {st.line}: directive {st.text.split()[0]} inside an entry")
            else:
                self.raw.append((st, scope, loc))

    def declare(self, st: _Statement, scope: _Scope) -> None:
        m = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", st.text)
        if not m or m.group(1) not in TYPE_BYTES:
            raise UnsupportedInstruction(f"line {st.line}: register declaration {st.text!r}")
        for item in _split(m.group(2)):
            r = re.fullmatch(rf"({_IDENT})\s*<\s*(\d+)\s*>", item)
            if r:
                scope.ranges[r.group(1)] = (int(r.group(2)), m.group(1))
            elif re.fullmatch(_IDENT, item):
                scope.regs[item] = self.new_reg(item, m.group(1))
            else:
                raise UnsupportedInstruction(f"line {st.line}: register declaration {st.text!r}")

    def resolve(self) -> None:
        for st, scope, loc in self.raw:
            self.entry.instrs.append(self.instruction(st, scope, loc))
        for name, text, scope, line in self.tables:
            labels = []
            for item in _split(text):
                index = scope.label(item)
                if index is None:
                    raise ParseError(f"line {line}: undeclared label {item}")
                labels.append(Label(item, index))
            self.entry.tables[name] = tuple(labels)

    def instruction(self, st: _Statement, scope: _Scope, loc: Line | None) -> Instr:
        m = _INSTRUCTION.match(st.text)
        if not m:
            raise UnsupportedInstruction(f"line {st.line}: {st.text!r}")
        if m.group(3) == "call":
            raise UnsupportedInstruction(f"line {st.line}: call: functions are not supported: {st.text!r}")
        guard = None
        if m.group(2):
            guard = scope.reg(m.group(2), self)
            if guard is None:
                raise ParseError(f"line {st.line}: undeclared predicate {m.group(2)}")
        mods = tuple(m.group(4).split(".")[1:])
        operands = tuple(self.operand(t, scope, st.line) for t in _split(m.group(5)))
        return Instr(m.group(3), mods, operands, guard, m.group(1) == "!", st.line, st.text, loc)

    def operand(self, text: str, scope: _Scope, line: int) -> Operand:
        text = text.strip()
        if text == "_":
            return Sink()
        if text.startswith("["):
            return self.address(text, scope, line)
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self.operand(t, scope, line) for t in _split(text[1:-1])))
        if text.startswith("!"):
            inner = self.operand(text[1:], scope, line)
            if isinstance(inner, Reg):
                return Not(inner)
        number = parse_number(text)
        if number is not None:
            return number
        pair = _split(text, "|")
        if len(pair) == 2:
            return Pair(self.operand(pair[0], scope, line), self.operand(pair[1], scope, line))
        m = _NAME.fullmatch(text)
        if m:
            offset = 0
            if m.group(2):
                value = parse_number(m.group(3))
                if value is None:
                    raise ParseError(f"line {line}: operand {text!r}")
                offset = value.value if m.group(2) == "+" else -value.value
            found = self.name(m.group(1), scope, offset)
            if found is not None:
                return found
        raise ParseError(f"line {line}: operand {text!r} is not declared or not understood")

    def name(self, name: str, scope: _Scope, offset: int) -> Operand | None:
        reg = scope.reg(name, self)
        if reg is not None:
            return reg if not offset else None
        if name == "WARP_SZ":
            return Imm(32)
        if name in self.params:
            return Symbol(name, "param", offset)
        var = self.entry.variables.get(name) or self.module.get(name)
        if var is not None:
            return Symbol(name, var.space, offset)
        index = scope.label(name)
        if index is not None:
            return Label(name, index)
        if name.startswith("%"):
            return Special(name[1:])
        return None

    def address(self, text: str, scope: _Scope, line: int) -> Address:
        if not text.endswith("]"):
            raise ParseError(f"line {line}: address {text!r}")
        parts = _split(text[1:-1])
        coords: tuple[Operand, ...] = ()
        if len(parts) == 2 and parts[1].startswith("{"):
            coords = tuple(self.operand(t, scope, line) for t in _split(parts[1][1:-1]))
        elif len(parts) != 1:
            raise UnsupportedInstruction(f"line {line}: address {text!r}")
        m = _ADDRESS.fullmatch(parts[0])
        if not m:
            raise UnsupportedInstruction(f"line {line}: address {text!r}")
        offset = 0
        if m.group(2):
            value = parse_number(m.group(3))
            if value is None:
                raise ParseError(f"line {line}: address {text!r}")
            offset = value.value if m.group(2) == "+" else -value.value
        base = self.operand(m.group(1), scope, line)
        if not isinstance(base, Reg | Symbol | Imm | Label):
            raise UnsupportedInstruction(f"line {line}: address {text!r}")
        if isinstance(base, Label):
            raise ParseError(f"line {line}: {base.name} is a label")
        return Address(base, offset, coords)


def parse_variable(text: str, line: int) -> Variable:
    """A variable declaration (PTX ISA 5.4) of the .shared, .local, .global or .const space."""
    m = re.match(
        rf"((?:\.\w+\s+)*?)\.(shared|local|global|const)\s+((?:\.\w+(?:\s+\d+)?\s+)*?)\.(\w+)\s+({_IDENT})"
        r"\s*((?:\[\s*\d*\s*\]\s*)*)(?:=\s*(.*))?$",
        text.strip(),
        re.S,
    )
    if not m or m.group(4) not in TYPE_BYTES:
        raise UnsupportedInstruction(f"line {line}: variable declaration {text.strip()!r}")
    unit = TYPE_BYTES[m.group(4)]
    align_m = re.search(r"\.align\s+(\d+)", m.group(3))
    align = int(align_m.group(1)) if align_m else unit
    dims = [int(d) if d.strip() else 0 for d in re.findall(r"\[\s*(\d*)\s*\]", m.group(6))]
    data = b""
    if m.group(7):
        words = []
        for item in re.findall(r"[^{},\s]+", m.group(7)):
            number = parse_number(item)
            if number is None:
                raise UnsupportedInstruction(f"line {line}: initialiser {item!r}")
            words.append((number.value & ((1 << (8 * unit)) - 1)).to_bytes(unit, "little"))
        data = b"".join(words)
    size = unit
    for d in dims:
        size *= d
    return Variable(m.group(5), m.group(2), align, max(size, len(data)), data, ".extern" in m.group(1))


def _parameters(text: str, line: int) -> tuple[ParamDecl, ...]:
    out: list[ParamDecl] = []
    offset = 0
    for raw in _split(text):
        m = re.match(rf"\.param\s+(.*?)({_IDENT})\s*(?:\[\s*(\d+)\s*\])?$", raw, re.S)
        kind = re.search(r"\.(\w+)", re.sub(r"\.align\s+\d+|\.ptr|\.global|\.shared", "", m.group(1))) if m else None
        if not m or not kind or kind.group(1) not in TYPE_BYTES:
            raise UnsupportedInstruction(f"line {line}: parameter {raw!r}")
        unit = TYPE_BYTES[kind.group(1)]
        size = unit * int(m.group(3) or 1)
        align_m = re.match(r"\s*\.align\s+(\d+)", m.group(1))  # the one after .ptr is the pointee's
        align = int(align_m.group(1)) if align_m else unit
        offset = -(-offset // align) * align
        decl = " ".join(m.group(1).split()) + (f"[{m.group(3)}]" if m.group(3) else "")
        out.append(ParamDecl(m.group(2), decl, kind.group(1), size, align, offset))
        offset += size
    return tuple(out)


def parse_module(text: str) -> tuple[dict[str, Entry], dict[str, Variable]]:
    """All entries and module-level variables of a PTX file."""
    text = _strip_comments(text)
    entries: dict[str, Entry] = {}
    variables: dict[str, Variable] = {}
    files = {int(number): name for number, name in _FILE.findall(text)}
    pos = 0
    head = re.compile(r"\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([A-Za-z_$%][\w$]*)\s*(?:\((.*?)\))?([^{;]*)\{", re.S)
    while True:
        while pos < len(text) and text[pos].isspace():
            pos += 1
        if pos >= len(text):
            break
        line = text.count("\n", 0, pos) + 1
        m = head.match(text, pos)
        if m:
            entry = Entry(m.group(1), _parameters(m.group(2) or "", line), line)
            _directives(entry, m.group(3), line)
            body = _Body(entry, variables, files)
            statements, pos = _statements(text, m.end(), text.count("\n", 0, m.end()) + 1)
            body.collect(statements)
            body.resolve()
            entries[entry.name] = entry
            continue
        m = re.compile(r"\.(version|target|address_size|file|section)[^\n]*").match(text, pos)
        if m:
            if m.group(1) == "section":
                end = text.find("}", pos)
                pos = len(text) if end < 0 else end + 1
            else:
                pos = m.end()
            continue
        m = re.compile(r"((?:\.(?:visible|extern|weak|common)\s+)*\.(?:shared|global|const)\b[^;]*);", re.S).match(
            text, pos
        )
        if m:
            var = parse_variable(m.group(1), line)
            variables[var.name] = var
            pos = m.end()
            continue
        word = text[pos : text.find("\n", pos) if "\n" in text[pos:] else len(text)]
        raise UnsupportedInstruction(f"line {line}: {word.strip()!r} at module level")
    if not entries:
        raise ParseError("no .entry in the PTX")
    return entries, variables


def _directives(entry: Entry, text: str, line: int) -> None:
    for name, args in re.findall(r"\.(\w+)((?:\s*\d+\s*,?)*)", text):
        numbers = [int(v) for v in re.findall(r"\d+", args)]
        if name in ("reqntid", "maxntid", "reqnctapercluster"):
            x, y, z = [*numbers, 1, 1, 1][:3]
            setattr(entry, name, (x, y, z))
        elif name not in ("minnctapersm", "maxnreg", "explicitcluster", "blocksareclusters", "maxclusterrank"):
            raise UnsupportedInstruction(f"line {line}: entry directive .{name}")
