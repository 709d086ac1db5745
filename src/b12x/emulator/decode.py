"""From parsed instructions to callables over groups of warps.

Each opcode has one decoder, registered with :func:`decoder`. It consumes the modifiers and operands of an instruction
and returns an :class:`Op`; whatever it does not consume is an :class:`UnsupportedInstruction`. Registers, immediates,
special registers and parameters are all rows of the register file, so an operation is a numpy call on row views.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ParseError, UnsupportedInstruction
from .machine import PRED, VIEWS, W16, W32, W64, Group
from .memory import SHARED_BASE
from .parse import Entry, Imm, Instr, Label, Not, Operand, Reg, Sink, Special, Symbol, Variable

Array = NDArray[Any]
Run = Callable[[Group], None]


@dataclass(frozen=True)
class Type:
    """A PTX type: ``view`` names the register view of its own width ('' where no register has that width)."""

    name: str
    bits: int
    kind: str
    view: str
    dtype: Any


TYPES = {
    t.name: t
    for t in (
        Type("pred", 1, "p", "p", np.bool_),
        Type("b8", 8, "u", "", np.uint8),
        Type("u8", 8, "u", "", np.uint8),
        Type("s8", 8, "s", "", np.int8),
        Type("b16", 16, "u", "u16", np.uint16),
        Type("u16", 16, "u", "u16", np.uint16),
        Type("s16", 16, "s", "s16", np.int16),
        Type("f16", 16, "f", "f16", np.float16),
        Type("bf16", 16, "bf", "u16", np.uint16),
        Type("b32", 32, "u", "u32", np.uint32),
        Type("u32", 32, "u", "u32", np.uint32),
        Type("s32", 32, "s", "s32", np.int32),
        Type("f32", 32, "f", "f32", np.float32),
        Type("u16x2", 32, "u", "u16x2", np.uint16),
        Type("s16x2", 32, "s", "s16x2", np.int16),
        Type("f16x2", 32, "f", "f16x2", np.float16),
        Type("bf16x2", 32, "bf", "u16x2", np.uint16),
        Type("b64", 64, "u", "u64", np.uint64),
        Type("u64", 64, "u", "u64", np.uint64),
        Type("s64", 64, "s", "s64", np.int64),
        Type("f64", 64, "f", "f64", np.float64),
        Type("f32x2", 64, "f", "f32x2", np.float32),
        Type("b128", 128, "u", "", np.uint64),
    )
}
#: Special registers (PTX ISA 10) that hold one value for a thread's whole life.
SPECIALS = frozenset(
    [
        f"{name}.{axis}"
        for axis in "xyz"
        for name in ("tid", "ntid", "ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid")
    ]
    + [f"{name}.{axis}" for axis in "xyz" for name in ("clusterid", "nclusterid")]
    + ["laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "cluster_ctarank", "cluster_nctarank"]
    + [f"lanemask_{name}" for name in ("eq", "le", "lt", "ge", "gt")]
    + ["is_explicit_cluster", "dynamic_smem_size", "total_smem_size", "aggr_smem_size"]
)
_CLASS_OF_BITS = {1: PRED, 8: W16, 16: W16, 32: W32, 64: W64}
_UNSIGNED_VIEW = {PRED: "p", W16: "u16", W32: "u32", W64: "u64"}
_FULL = {PRED: True, W16: np.uint16(0xFFFF), W32: np.uint32(0xFFFFFFFF), W64: np.uint64(2**64 - 1)}
_BITS = {PRED: 1, W16: 16, W32: 32, W64: 64}


class Source:
    """A readable operand: a register-file row seen as a type."""

    def __init__(self, rid: int, type_: Type, negate: bool = False) -> None:
        self.rid = rid
        self.row = rid >> 2
        self.type = type_
        cls = rid & 3
        self.exact = not negate and bool(type_.view) and VIEWS[type_.view][0] == cls
        self.get: Callable[[Group], Array]
        row, view, dtype = self.row, type_.view, type_.dtype
        if negate:
            self.get = lambda g: ~g.p[row]
        elif self.exact:
            self.get = lambda g: getattr(g, view)[row]
        else:
            raw = _UNSIGNED_VIEW[cls]
            unsigned = np.dtype(f"u{max(type_.bits // 8, 1)}")
            self.get = lambda g: getattr(g, raw)[row].astype(unsigned).view(dtype)

    def shadow(self, g: Group) -> Array:
        """Tainted bits, as wide as the type."""
        bits = g.shadow(self.rid)
        if self.type.bits == 1 or bits.dtype.itemsize * 8 == self.type.bits:
            return bits
        return bits.astype(np.dtype(f"u{self.type.bits // 8}"))


class Dest:
    """A writable operand; narrower results are extended to the register by the type's signedness."""

    def __init__(self, rid: int, type_: Type) -> None:
        self.rid = rid
        self.row = rid >> 2
        self.type = type_
        self.cls = rid & 3
        row, view = self.row, type_.view
        self.exact = bool(view) and VIEWS[view][0] == self.cls
        self.put: Callable[[Group, Any], None]
        if self.exact:
            self.put = lambda g, value: g.put(getattr(g, view)[row], value)
        else:
            wide = {W16: "s16", W32: "s32", W64: "s64"}[self.cls] if type_.kind == "s" else _UNSIGNED_VIEW[self.cls]
            dtype = VIEWS[wide][1]
            narrow = type_.dtype if type_.kind == "s" else np.dtype(f"u{type_.bits // 8}")

            def put(g: Group, value: Any) -> None:
                value = np.asarray(value)
                if value.dtype != narrow:
                    value = value.view(narrow) if value.dtype.itemsize == narrow.itemsize else value.astype(narrow)
                g.put(getattr(g, wide)[row], value.astype(dtype))

            narrow = np.dtype(narrow)
            self.put = put

    def widen(self, bits: Array) -> Array:
        """Tainted bits of a result, extended to the register as the value would be."""
        if self.cls == PRED:
            result: Array = bits != 0
            return result
        target = np.dtype(f"u{_BITS[self.cls] // 8}")
        if self.type.kind == "s" and bits.dtype.itemsize < target.itemsize:
            signed = bits.view(np.dtype(f"i{bits.dtype.itemsize}"))
            return signed.astype(np.dtype(f"i{target.itemsize}")).view(target)
        return bits.astype(target)


Rule = Callable[[Group], Sequence[Array]]


@dataclass
class Op:
    """One decoded instruction. ``run`` assumes that nothing is tainted; ``checked`` also moves taint."""

    ins: Instr
    run: Run
    checked: Run
    srcs: tuple[int, ...] = ()
    dsts: tuple[int, ...] = ()
    kind: str = ""  # empty: stays inside a basic block
    data: Any = None
    leader: bool = False
    guard: int | None = None  # predicate of an op that ends a block (bra and exit look after theirs themselves)
    converge: int | None = None  # register id of the member mask whose lanes execute it together
    pure: bool = True  # writes registers only
    mma: Any = None  # operands of a matrix multiply, so that independent ones can run as one


@dataclass
class Code:
    """A decoded entry."""

    entry: Entry
    ops: list[Op]
    rows: tuple[int, int, int, int]
    constants: dict[int, Any]
    launch_values: dict[int, tuple[str, Any]]
    static_bytes: int
    dynamic_offset: int
    dynamic_align: int
    undefined: tuple[int, ...]
    registers: dict[int, str]
    shared: dict[str, int]  # offsets of the variables in shared memory
    copies_global: bool  # whether asynchronous copies through another proxy read global memory
    local_bytes: int  # of each thread
    granule: int  # bytes of the narrowest access to shared memory
    ends: list[int] = field(default_factory=list)
    steps: dict[int, list[Op]] = field(default_factory=dict)


class Mods:
    """The modifiers of an instruction, consumed by its decoder."""

    def __init__(self, ins: Instr) -> None:
        self.ins = ins
        self.left = list(ins.mods)

    def flag(self, *names: str) -> bool:
        """Consumes a modifier if present."""
        found = False
        for name in names:
            if name in self.left:
                self.left.remove(name)
                found = True
        return found

    def choice(self, *names: str, default: str = "") -> str:
        """Consumes the first of several alternative modifiers."""
        for name in self.left:
            if name in names:
                self.left.remove(name)
                return name
        return default

    def type(self, *names: str) -> Type:
        """Consumes the next type, which must be one of ``names`` if any are given."""
        for i, name in enumerate(self.left):
            if name in TYPES and (not names or name in names):
                del self.left[i]
                return TYPES[name]
        raise UnsupportedInstruction(f"line {self.ins.line}: {self.ins.name}: type not supported")

    def done(self) -> None:
        if self.left:
            raise UnsupportedInstruction(
                f"line {self.ins.line}: modifier {'.' + '.'.join(self.left)} of {self.ins.name} is not supported"
            )


DecoderFunction = Callable[["Decoder", Instr, Mods], Op]
DECODERS: dict[str, DecoderFunction] = {}


def decoder(*opcodes: str) -> Callable[[DecoderFunction], DecoderFunction]:
    """Registers the decoder of one or more opcodes."""

    def register(fn: DecoderFunction) -> DecoderFunction:
        for opcode in opcodes:
            DECODERS[opcode] = fn
        return fn

    return register


class Decoder:
    """Decodes one entry; hands out register-file rows for registers, literals and launch values."""

    def __init__(self, entry: Entry, module: dict[str, Variable]) -> None:
        self.entry = entry
        self.module = module
        self.counts = [0, 0, 0, 0]
        self.regs: dict[int, int] = {}
        self.constants: dict[int, Any] = {}
        self.launch_values: dict[int, tuple[str, Any]] = {}
        self._const_rid: dict[tuple[int, Any], int] = {}
        self._launch_rid: dict[tuple[int, str, Any], int] = {}
        self.names: dict[int, str] = {}
        self.shared: dict[str, int] = {}
        self.granule = 8  # an mbarrier
        self.copies_global = False
        self.ins: Instr
        self._layout_shared()

    def _layout_shared(self) -> None:
        offset = 0
        dynamic = 16
        variables = {**self.module, **self.entry.variables}
        for var in variables.values():
            if var.space == "shared" and not var.extern:
                offset = -(-offset // var.align) * var.align
                self.shared[var.name] = offset
                offset += var.size
        self.static_bytes = offset
        for var in variables.values():
            if var.space == "shared" and var.extern:
                dynamic = max(dynamic, var.align)
        self.dynamic_align = dynamic
        self.dynamic_offset = -(-offset // dynamic) * dynamic
        for var in variables.values():
            if var.space == "shared" and var.extern:
                self.shared[var.name] = self.dynamic_offset
        self.local: dict[str, int] = {}
        self.local_bytes = 0
        for var in variables.values():
            if var.space == "local":
                self.local[var.name] = -(-self.local_bytes // var.align) * var.align
                self.local_bytes = self.local[var.name] + var.size
        self.local_bytes = -(-self.local_bytes // 32) * 32

    def fail(self, why: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(f"line {self.ins.line}: {self.ins.text!r}: {why}")

    def touches(self, space: str, size: int) -> int:
        """Notes the width of an access that may be to shared memory; returns it."""
        if space == "" or space.startswith("shared"):
            self.granule = min(self.granule, size)
        return size

    def new_row(self, cls: int) -> int:
        rid = self.counts[cls] * 4 + cls
        self.counts[cls] += 1
        return rid

    def reg(self, reg: Reg) -> int:
        rid = self.regs.get(reg.uid)
        if rid is None:
            bits = TYPES[reg.type].bits
            if bits not in _CLASS_OF_BITS:
                raise self.fail(f".{reg.type} registers are not supported")
            rid = self.regs[reg.uid] = self.new_row(_CLASS_OF_BITS[bits])
            self.names[rid] = reg.name
        return rid

    def constant(self, cls: int, value: int) -> int:
        key = (cls, value)
        if key not in self._const_rid:
            self._const_rid[key] = self.new_row(cls)
            self.constants[self._const_rid[key]] = value
        return self._const_rid[key]

    def launch_value(self, cls: int, kind: str, what: Any) -> int:
        """A row that the launch fills: a special register, a parameter, a variable's address."""
        key = (cls, kind, what)
        if key not in self._launch_rid:
            self._launch_rid[key] = self.new_row(cls)
            self.launch_values[self._launch_rid[key]] = (kind, what)
        return self._launch_rid[key]

    def src(self, operand: Operand, type_: Type) -> Source:
        """A source operand read as ``type_``."""
        cls = _CLASS_OF_BITS[type_.bits]
        if isinstance(operand, Reg):
            rid = self.reg(operand)
            if (_BITS[rid & 3] < type_.bits and type_.bits != 8) or ((rid & 3) == PRED) != (type_.kind == "p"):
                raise self.fail(f"register {operand.name} does not hold a .{type_.name}")
            return Source(rid, type_)
        if isinstance(operand, Not) and type_.kind == "p":
            return Source(self.reg(operand.reg), type_, negate=True)
        if isinstance(operand, Imm):
            return Source(self.constant(cls, self.literal(operand, type_)), type_)
        if isinstance(operand, Special):
            if operand.name not in SPECIALS:
                raise self.fail(f"special register %{operand.name} is not supported")
            return Source(self.launch_value(cls, "special", operand.name), type_)
        if isinstance(operand, Symbol):
            return Source(self.address_of(operand, cls), type_)
        raise self.fail("operand form is not supported")

    def literal(self, imm: Imm, type_: Type) -> int:
        """The bits of a literal as ``type_``."""
        value = imm.value
        if imm.float_bits:
            if type_.kind not in ("f", "bf") or imm.float_bits == type_.bits:
                return value & ((1 << type_.bits) - 1)
            number = struct.unpack("<f", struct.pack("<I", value))[0] if imm.float_bits == 32 else None
            if number is None:
                number = struct.unpack("<d", struct.pack("<Q", value))[0]
            code = {"f32": "<f", "f64": "<d"}.get(type_.name)
            if code is None:
                raise self.fail(f"literal as .{type_.name}")
            return int.from_bytes(struct.pack(code, number), "little")
        if type_.kind == "p":
            return int(value != 0)
        return value & ((1 << type_.bits) - 1)

    def address_of(self, symbol: Symbol, cls: int) -> int:
        if symbol.space == "shared":
            return self.constant(cls, SHARED_BASE + self.shared[symbol.name] + symbol.offset)
        if symbol.space == "param":
            return self.constant(cls, self.param(symbol))
        if symbol.space in ("global", "const"):
            return self.launch_value(cls, "variable", (symbol.name, symbol.offset))
        if symbol.space == "local":
            return self.constant(cls, self.local[symbol.name] + symbol.offset)
        raise self.fail(f".{symbol.space} variables are not supported")

    def param(self, symbol: Symbol) -> int:
        """Offset of a parameter in the parameter block."""
        for p in self.entry.params:
            if p.name == symbol.name:
                return p.offset + symbol.offset
        raise self.fail(f"unknown parameter {symbol.name}")

    def dst(self, operand: Operand, type_: Type) -> Dest:
        """A destination operand written as ``type_``; ``_`` goes to a row that nobody reads."""
        if isinstance(operand, Sink):
            return Dest(self.new_row(_CLASS_OF_BITS[type_.bits]), type_)
        if not isinstance(operand, Reg):
            raise self.fail("destination form is not supported")
        rid = self.reg(operand)
        if _BITS[rid & 3] < type_.bits or ((rid & 3) == PRED) != (type_.kind == "p"):
            raise self.fail(f"register {operand.name} cannot hold a .{type_.name}")
        return Dest(rid, type_)

    def label(self, operand: Operand) -> int:
        if not isinstance(operand, Label):
            raise self.fail("branch target is not a label")
        return operand.index

    def operands(self, *counts: int) -> tuple[Operand, ...]:
        if len(self.ins.operands) not in counts:
            raise self.fail("number of operands is not supported")
        return self.ins.operands

    def alu(
        self,
        dst: Dest,
        srcs: Sequence[Source],
        fn: Callable[..., Any],
        *,
        ufunc: bool = False,
        rule: Rule | None = None,
    ) -> Op:
        """A register-to-register operation. ``ufunc`` says that ``fn`` takes an ``out`` array."""
        ins = self.ins
        if ufunc and dst.exact and all(s.exact for s in srcs):
            run = _direct(fn, dst, srcs)
        else:
            gets, put = [s.get for s in srcs], dst.put
            if len(gets) == 1:
                get0 = gets[0]

                def run(g: Group) -> None:
                    put(g, fn(get0(g)))
            else:

                def run(g: Group) -> None:
                    put(g, fn(*[get(g) for get in gets]))

        rids = tuple(s.rid for s in srcs)
        return self.pure(ins, run, rids, (dst,), rule or spread(srcs, (dst,)))

    def pure(self, ins: Instr, run: Run, srcs: tuple[int, ...], dsts: Sequence[Dest], rule: Rule) -> Op:
        """An op that only writes registers; ``rule`` gives the tainted bits of each destination."""
        rids = tuple(d.rid for d in dsts)
        pairs = tuple(zip(dsts, rids, strict=True))

        def checked(g: Group) -> None:
            cta = g.cta
            tainted = cta.tainted
            first = next((s for s in srcs if s in tainted), None)
            if first is None:
                run(g)
                for rid in rids:
                    if rid in tainted:
                        cta.clear_shadow(g, rid)
                return
            origin = cta.origin[first]
            bits = rule(g)
            run(g)
            for (dst, rid), b in zip(pairs, bits, strict=True):
                cta.set_shadow(g, rid, dst.widen(b), origin)

        return Op(ins, run, checked, srcs, rids)

    def effect(self, ins: Instr, run: Run, srcs: tuple[int, ...] = (), what: str = "operand", **more: Any) -> Op:
        """An op with side effects whose register operands must not be tainted."""

        def checked(g: Group) -> None:
            g.cta.refuse(g, ins, srcs, what)
            run(g)

        return Op(ins, run, checked, srcs, pure=False, **more)


def _direct(fn: Callable[..., Any], dst: Dest, srcs: Sequence[Source]) -> Run:
    d, view = dst.row, dst.type.view
    rows = [s.row for s in srcs]
    views = [s.type.view for s in srcs]
    same = all(v == view for v in views)
    if len(srcs) == 2 and same:
        a, b = rows

        def run(g: Group) -> None:
            regs = getattr(g, view)
            if g.mask is None:
                fn(regs[a], regs[b], out=regs[d])
            else:
                g.put(regs[d], fn(regs[a], regs[b]))
    else:
        pairs = list(zip(views, rows, strict=True))

        def run(g: Group) -> None:
            args = [getattr(g, v)[r] for v, r in pairs]
            if g.mask is None:
                fn(*args, out=getattr(g, view)[d])
            else:
                g.put(getattr(g, view)[d], fn(*args))

    return run


def spread(srcs: Sequence[Source], dsts: Sequence[Dest]) -> Rule:
    """The default: a lane with any tainted source bit gets wholly tainted results."""

    def rule(g: Group) -> Sequence[Array]:
        hit: Array = np.zeros((g.n, 32), bool)
        for s in srcs:
            if s.rid in g.cta.tainted:
                hit |= g.shadow(s.rid) != 0
        return [np.where(hit, _FULL[d.cls], _FULL[d.cls] ^ _FULL[d.cls]) for d in dsts]

    return rule


def guarded(d: Decoder, op: Op) -> Op:
    """Wraps an op in its guard predicate (PTX ISA 9.3)."""
    ins = op.ins
    assert ins.guard is not None
    rid = d.reg(ins.guard)
    row, neg = rid >> 2, ins.guard_neg

    def wrap(inner: Run, check: bool) -> Run:
        def run(g: Group) -> None:
            mask = ~g.p[row] if neg else g.p[row]
            old = g.mask
            suspect = None
            if check and rid in g.cta.tainted:
                bad = g.active() & g.shadow(rid)
                if bad.any():
                    if not op.pure:
                        g.cta.refuse(g, ins, (rid,), "guard predicate")
                    suspect = bad
            mask = mask.copy() if old is None else mask & old
            origin = g.cta.origin.get(rid, "") if suspect is not None else ""
            if mask.any():
                g.mask = None if mask.all() else mask
                try:
                    inner(g)
                finally:
                    g.mask = old
            if suspect is not None:
                g.mask = suspect
                for dst in op.dsts:
                    g.cta.set_shadow(g, dst, _FULL[dst & 3], origin)
                g.mask = old

        return run

    return Op(
        ins,
        wrap(op.run, False),
        wrap(op.checked, True),
        (*op.srcs, rid),
        op.dsts,
        leader=op.leader,
        converge=op.converge,
        pure=op.pure,
    )


def decode(entry: Entry, module: dict[str, Variable]) -> Code:
    """Decodes every instruction of an entry and lays out its basic blocks."""
    from . import blocks, opcodes  # noqa: F401  (opcodes registers the decoders)

    d = Decoder(entry, module)
    ops: list[Op] = []
    for ins in entry.instrs:
        d.ins = ins
        fn = DECODERS.get(ins.opcode)
        if fn is None:
            raise UnsupportedInstruction(f"line {ins.line}: opcode {ins.name} is not supported: {ins.text!r}")
        mods = Mods(ins)
        try:
            op = fn(d, ins, mods)
        except (IndexError, KeyError, AttributeError, TypeError) as err:
            raise UnsupportedInstruction(f"line {ins.line}: {ins.text!r}: operand form is not supported") from err
        mods.done()
        if ins.guard is not None and op.kind not in ("bra", "exit"):
            if op.kind:
                op.guard = d.reg(ins.guard)
                op.srcs = (*op.srcs, op.guard)
            else:
                op = guarded(d, op)
        ops.append(op)
    if not ops:
        raise ParseError(f"entry {entry.name} has no instructions")
    entry.static_shared = d.static_bytes
    rows = (d.counts[0], d.counts[1], d.counts[2], d.counts[3])
    code = Code(
        entry,
        ops,
        rows,
        d.constants,
        d.launch_values,
        d.static_bytes,
        d.dynamic_offset,
        d.dynamic_align,
        (),
        d.names,
        d.shared,
        d.copies_global,
        d.local_bytes,
        d.granule,
    )
    blocks.lay_out(code)
    return code
