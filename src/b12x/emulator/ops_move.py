"""Moves, selections and comparisons (PTX ISA 9.7.6, 9.7.7, 9.7.9.1 to 9.7.9.6, 9.7.9.20)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics as num
from .decode import TYPES, Decoder, Mods, Op, Source, Type, decoder, spread
from .machine import Group
from .memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from .ops_float import SINGLE_FLOATS, to_f32
from .ops_int import BIT_TYPES, INT_TYPES
from .parse import Imm, Instr, Pair, Special, Vector

Array = NDArray[Any]
CLOCKS = ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi")


@decoder("mov")
def mov(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """mov (9.7.9.3, 9.7.9.4), also between a vector of parts and one register, and from special registers."""
    t = mods.type(*BIT_TYPES, *INT_TYPES, "f32", "f64")
    dst, a = d.operands(2)
    if isinstance(dst, Vector):
        return unpack(d, ins, t, dst, a)
    if isinstance(a, Vector):
        return pack(d, ins, t, dst, a)
    if isinstance(a, Special) and a.name in CLOCKS:
        return clock(d, ins, t, dst, a.name)
    bits = TYPES["pred" if t.kind == "p" else f"b{t.bits}"]
    src = d.src(a, bits)
    out = d.dst(dst, bits)
    if out.exact and src.exact:
        view, s, o = bits.view, src.row, out.row

        def run(g: Group) -> None:
            regs = getattr(g, view)
            if g.mask is None:
                regs[o][...] = regs[s]
            else:
                np.copyto(regs[o], regs[s], where=g.mask)

        return d.pure(ins, run, (src.rid,), (out,), lambda g: [src.shadow(g)])
    return d.alu(out, [src], lambda a: a, rule=lambda g: [src.shadow(g)])


def unpack(d: Decoder, ins: Instr, t: Type, dst: Vector, a: Any) -> Op:
    part = TYPES[f"b{t.bits // len(dst.items)}"]
    src = d.src(a, TYPES[f"b{t.bits}"])
    outs = [d.dst(o, part) for o in dst.items]
    count = len(outs)

    def split(x: Array) -> list[Array]:
        raw = np.ascontiguousarray(x).view(part.dtype).reshape(*x.shape, count)
        return [raw[..., k] for k in range(count)]

    def run(g: Group) -> None:
        x = src.get(g)
        for k, out in enumerate(outs):
            out.put(g, x.view(part.dtype)[..., k::count])

    return d.pure(ins, run, (src.rid,), outs, lambda g: split(src.shadow(g)))


def pack(d: Decoder, ins: Instr, t: Type, dst: Any, a: Vector) -> Op:
    if t.bits == 128:
        raise d.fail("128-bit registers")
    part = TYPES[f"b{t.bits // len(a.items)}"]
    srcs = [d.src(o, part) for o in a.items]
    whole = TYPES[f"b{t.bits}"]
    out = d.dst(dst, whole)
    count = len(srcs)

    def join(parts: Sequence[Array]) -> Array:
        raw = np.empty((*parts[0].shape, count), part.dtype)
        for k, p in enumerate(parts):
            raw[..., k] = p
        result: Array = raw.view(whole.dtype)[..., 0]
        return result

    def run(g: Group) -> None:
        if g.mask is None and out.exact:
            raw = getattr(g, whole.view)[out.row]
            parts = [s.get(g) for s in srcs]
            if any(s.rid == out.rid for s in srcs):
                raw[...] = join(parts)
                return
            halves = raw.view(part.dtype)
            for k, p in enumerate(parts):
                halves[..., k::count] = p
        else:
            out.put(g, join([s.get(g) for s in srcs]))

    return d.pure(ins, run, tuple(s.rid for s in srcs), (out,), lambda g: [join([s.shadow(g) for s in srcs])])


def clock(d: Decoder, ins: Instr, t: Type, dst: Any, name: str) -> Op:
    out = d.dst(dst, t)
    wall = name.startswith("globaltimer")
    shift = 32 if name.endswith("_hi") else 0

    def run(g: Group) -> None:
        now = (time.time_ns() if wall else time.perf_counter_ns()) >> shift
        out.put(g, np.full((g.n, 32), now & ((1 << t.bits) - 1), t.dtype))

    return d.pure(ins, run, (), (out,), lambda g: [])


@decoder("cvta")
def cvta(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """cvta (9.7.9.20): generic addresses carry the window in their upper byte; global ones are themselves."""
    to = mods.flag("to")
    space = mods.choice("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local", "param::entry")
    t = mods.type("u64")
    dst, a = d.operands(2)
    window = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW}.get(
        space, PARAM_WINDOW if space.startswith("param") else LOCAL_WINDOW if space == "local" else 0
    )
    src = d.src(a, t)
    low = t.dtype((1 << min(56, t.bits)) - 1)

    def fn(x: Array) -> Array:
        if not window:
            return x
        result: Array = x & low if to else x | t.dtype(window)
        return result

    return d.alu(d.dst(dst, t), [src], fn, rule=lambda g: [src.shadow(g)])


@decoder("isspacep")
def isspacep(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """isspacep (9.7.9.19)."""
    space = mods.choice("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local")
    tag = 1 if space.startswith("shared") else {"param": 2, "local": 3}.get(space, 0)
    dst, a = d.operands(2)
    return d.alu(
        d.dst(dst, TYPES["pred"]),
        [d.src(a, TYPES["u64"])],
        lambda x: ((x >> np.uint64(56)) == np.uint64(tag)) & np.bool_(space != "const"),
    )


@decoder("selp")
def selp(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """selp (9.7.6.3)."""
    t = mods.type("b16", "b32", "b64", *INT_TYPES, "f32", "f64")
    bits = TYPES[f"b{t.bits}"]
    dst, a, b, c = d.operands(4)
    sa, sb, sc = d.src(a, t), d.src(b, t), d.src(c, TYPES["pred"])
    sa, sb = (Source(s.rid, bits) for s in (sa, sb))

    def rule(g: Group) -> Sequence[Array]:
        bits = np.where(sc.get(g), sa.shadow(g), sb.shadow(g))
        if sc.rid in g.cta.tainted:
            bits = np.where(g.shadow(sc.rid), ~bits.dtype.type(0), bits)
        return [bits]

    return d.alu(d.dst(dst, bits), [sa, sb, sc], lambda a, b, c: np.where(c, a, b), rule=rule)


@decoder("slct")
def slct(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """slct (9.7.6.4): a where c >= 0, else b."""
    ftz = mods.flag("ftz")
    t = mods.type("b16", "b32", "b64", *INT_TYPES, "f32", "f64")
    tc = mods.type("s32", "f32")
    dst, a, b, c = d.operands(4)
    bits = TYPES[f"b{t.bits}"]
    srcs = [Source(d.src(a, t).rid, bits), Source(d.src(b, t).rid, bits), d.src(c, tc)]
    condition = num.flush if ftz and tc.name == "f32" else lambda c: c
    return d.alu(d.dst(dst, bits), srcs, lambda a, b, c: np.where(condition(c) >= 0, a, b))


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(op: str, t: Type) -> Callable[[Array, Array], Array]:
    """A comparison operator (PTX ISA 9.3.1): ordered ones are false on NaN, unordered ones true."""
    if t.kind in "usp":
        return _COMPARE[_UNSIGNED.get(op, op)]
    if op == "num":
        return lambda a, b: (a == a) & (b == b)
    if op == "nan":
        return lambda a, b: (a != a) | (b != b)
    if op.endswith("u"):
        fn = _COMPARE[op[:-1]]
        return lambda a, b: fn(a, b) | (a != a) | (b != b)
    if op == "ne":
        return lambda a, b: (a != b) & (a == a) & (b == b)
    return _COMPARE[op]


_OPS = (*_COMPARE, *_UNSIGNED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


@decoder("setp")
def setp(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """setp (9.7.6.2, 9.7.7.2)."""
    op = mods.choice(*_OPS)
    combine = mods.choice(*_COMBINE)
    ftz = mods.flag("ftz")
    t = mods.type("b16", "b32", "b64", *INT_TYPES, *SINGLE_FLOATS)
    compare = comparison(op, t)
    operands = d.operands(4 if combine else 3)
    dst = operands[0]
    pred = TYPES["pred"]
    first = d.dst(dst.first if isinstance(dst, Pair) else dst, pred)
    srcs = [d.src(operands[1], t), d.src(operands[2], t)]
    if combine:
        srcs.append(d.src(operands[3], pred))
    packed = t.name.endswith("x2")

    def test(a: Array, b: Array) -> Array:
        if ftz and t.name == "f32":
            a, b = num.flush(a), num.flush(b)
        return compare(to_f32(a, t), to_f32(b, t))

    if not isinstance(dst, Pair):
        if packed:
            raise d.fail("a packed comparison has two results")
        if not combine:
            return d.alu(first, srcs, compare if t.kind != "bf" and not ftz else test, ufunc=t.kind in "us")
        return d.alu(first, srcs, lambda a, b, c: _COMBINE[combine](test(a, b), c))
    second = d.dst(dst.second, pred)

    def run(g: Group) -> None:
        args = [s.get(g) for s in srcs]
        result = test(args[0], args[1])
        one, two = (result[..., ::2], result[..., 1::2]) if packed else (result, ~result)
        if combine:
            one, two = _COMBINE[combine](one, args[2]), _COMBINE[combine](two, args[2])
        first.put(g, one)
        second.put(g, two)

    return d.pure(ins, run, tuple(s.rid for s in srcs), (first, second), spread(srcs, (first, second)))


@decoder("set")
def set_(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """set (9.7.6.1): all ones (or 1.0) where the comparison holds."""
    op = mods.choice(*_OPS)
    ftz = mods.flag("ftz")
    to = mods.type("u32", "s32", "f32", "u16", "s16")
    t = mods.type("b16", "b32", "b64", *INT_TYPES, "f32", "f64", "f16", "bf16")
    compare = comparison(op, t)
    yes = to.dtype(1) if to.kind == "f" else np.array(-1).astype(to.dtype)[()]
    dst, a, b = d.operands(3)

    def fn(a: Array, b: Array) -> Array:
        if ftz and t.name == "f32":
            a, b = num.flush(a), num.flush(b)
        return np.where(compare(to_f32(a, t), to_f32(b, t)), yes, to.dtype(0))

    return d.alu(d.dst(dst, to), [d.src(a, t), d.src(b, t)], fn)


@decoder("prefetch", "prefetchu", "applypriority")
def prefetch(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """prefetch (9.7.9.15): a hint; nothing that the emulator models."""
    mods.flag(
        *{
            "prefetch": (
                "global", "local", "const", "param", "tensormap", "L1", "L2", "L2::evict_last", "L2::evict_normal",
            ),
            "prefetchu": ("L1",),
            "applypriority": ("global", "L2::evict_normal"),
        }[ins.opcode]
    )  # fmt: skip
    return d.effect(ins, lambda g: None)


@decoder("createpolicy")
def createpolicy(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """createpolicy (9.7.9.18): an opaque cache policy."""
    mods.flag("fractional", "range", "global", "cvt", "L2")
    for hint in ("evict_first", "evict_last", "evict_normal", "evict_unchanged"):
        mods.flag(f"L2::{hint}")
    t = mods.type("b64")
    out = d.dst(ins.operands[0], t)
    return d.pure(ins, lambda g: out.put(g, np.zeros((g.n, 32), np.uint64)), (), (out,), lambda g: [])


@decoder("nanosleep", "setmaxnreg", "griddepcontrol", "pmevent")
def hints(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """Instructions without an effect on results here.

    griddepcontrol (9.7.13.13): kernels of a stream run one after another, so that ``wait`` has nothing to wait for and
    an early start of dependents cannot be seen.
    """
    allowed = {
        "nanosleep": {"u32"},
        "setmaxnreg": {"inc", "dec", "sync", "aligned", "u32"},
        "griddepcontrol": {"launch_dependents", "wait"},
        "pmevent": {"mask"},
    }[ins.opcode]
    mods.flag(*allowed)
    for o in ins.operands:
        if not isinstance(o, Imm):
            d.src(o, TYPES["u32"])
    return d.effect(ins, lambda g: None)


@decoder("trap", "brkpt")
def trap(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """trap (9.7.19.4): the kernel gave up."""
    from .errors import EmulatorError

    def run(g: Group) -> None:
        raise EmulatorError(f"{g.where(ins, 0)}: trap")

    return d.effect(ins, run)
