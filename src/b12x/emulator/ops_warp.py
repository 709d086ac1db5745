"""Warp-wide exchange and control flow (PTX ISA 9.7.9.6, 9.7.12, 9.7.13.7 to 9.7.13.14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics as num
from .decode import TYPES, Decoder, Mods, Op, Run, Source, decoder, spread
from .machine import Group
from .parse import Imm, Instr, Label, Pair, Sink, Symbol

Array = NDArray[Any]
LANES = np.arange(32, dtype=np.uint32)


def _nothing(g: Group) -> None:
    pass


def control(
    ins: Instr, kind: str, data: Any, srcs: tuple[int, ...] = (), dsts: tuple[int, ...] = (), **more: Any
) -> Op:
    """An op that ends a basic block; the scheduler acts on ``kind`` and ``data``."""
    return Op(ins, _nothing, _nothing, srcs, dsts, kind=kind, data=data, pure=False, **more)


@decoder("bra")
def bra(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """bra (9.7.12.3)."""
    mods.flag("uni")
    (target,) = d.operands(1)
    guard = None if ins.guard is None else d.reg(ins.guard)
    return control(ins, "bra", (guard, d.label(target)), () if guard is None else (guard,))


@decoder("brx")
def brx(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """brx.idx (9.7.12.4): a branch through a table of labels."""
    mods.flag("idx", "uni")
    index, table = d.operands(2)
    if not isinstance(table, Label | Symbol) or table.name not in d.entry.tables or ins.guard is not None:
        raise d.fail("branch table")
    src = d.src(index, TYPES["u32"])
    targets = [t.index for t in d.entry.tables[table.name]]
    return control(ins, "brx", (src, targets), (src.rid,))


@decoder("ret", "exit")
def leave(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """ret/exit (9.7.12.6, 9.7.19.3): the active lanes end."""
    if ins.opcode == "ret":
        mods.flag("uni")
    d.operands(0)
    guard = None if ins.guard is None else d.reg(ins.guard)
    return control(ins, "exit", guard, () if guard is None else (guard,))


def members(d: Decoder, operand: Any) -> Source:
    return d.src(operand, TYPES["b32"])


def participants(g: Group, mask: Source) -> Array:
    """Active lanes that are named in the member mask."""
    named = (mask.get(g) >> LANES) & np.uint32(1) != 0
    result: Array = named if g.mask is None else named & g.mask
    return result


@decoder("shfl")
def shfl(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """shfl.sync (9.7.9.6)."""
    if not mods.flag("sync"):
        raise d.fail("without .sync")
    mode = mods.choice("up", "down", "bfly", "idx")
    t = mods.type("b32")
    dst, a, b, c, mask = d.operands(5)
    out = d.dst(dst.first if isinstance(dst, Pair) else dst, t)
    pred = d.dst(dst.second, TYPES["pred"]) if isinstance(dst, Pair) else None
    sa, sb, sc, sm = d.src(a, t), d.src(b, TYPES["u32"]), d.src(c, TYPES["u32"]), members(d, mask)

    def lanes(g: Group, b: Array, c: Array) -> tuple[Array, Array]:
        """(source lane, in range) of every lane."""
        clamp, segment = c & np.uint32(31), (c >> np.uint32(8)) & np.uint32(31)
        b = (b & np.uint32(31)).astype(np.int32)
        last = ((LANES & segment) | (clamp & ~segment)).astype(np.int32)
        first = (LANES & segment).astype(np.int32)
        lane = LANES.astype(np.int32)
        if mode == "up":
            j = lane - b
            ok = j >= last
        elif mode == "down":
            j = lane + b
            ok = j <= last
        elif mode == "bfly":
            j = lane ^ b
            ok = j <= last
        else:
            j = first | (b & ~segment.astype(np.int32))
            ok = j <= last
        return np.where(ok, j, lane), ok

    fixed: tuple[Array, Array] | None = None
    if isinstance(b, Imm) and isinstance(c, Imm):
        j, ok = lanes(None, np.full(32, b.value & 0xFFFFFFFF, np.uint32), np.full(32, c.value, np.uint32))  # type: ignore[arg-type]
        fixed = j, ok

    def run(g: Group) -> None:
        x = sa.get(g)
        if fixed is not None:
            moved, valid = x[:, fixed[0]], fixed[1]
        else:
            j, valid = lanes(g, sb.get(g), sc.get(g))
            moved = np.take_along_axis(x, j.astype(np.intp), axis=1)
        out.put(g, moved)
        if pred is not None:
            pred.put(g, np.broadcast_to(valid, (g.n, 32)))

    def rule(g: Group) -> Sequence[Array]:
        j, _ = lanes(g, sb.get(g), sc.get(g))
        bits = np.take_along_axis(sa.shadow(g), j.astype(np.intp), axis=1)
        lost = (sb.shadow(g) | sc.shadow(g)) != 0
        if g.mask is not None:  # reading a lane that does not take part is undefined
            lost = lost | ~np.take_along_axis(g.mask, j.astype(np.intp), axis=1)
        bits = np.where(lost, np.uint32(0xFFFFFFFF), bits)
        return [bits] if pred is None else [bits, lost]

    dests = [out] if pred is None else [out, pred]
    op = d.pure(ins, run, (sa.rid, sb.rid, sc.rid), dests, rule)
    moved_run, moved_checked = op.run, op.checked

    def alone(inner: Run) -> Run:
        def go(g: Group) -> None:
            inner(g)
            if g.mask is not None:
                j, _ = lanes(g, sb.get(g), sc.get(g))
                lost = g.mask & ~np.take_along_axis(g.mask, j.astype(np.intp), axis=1)
                if lost.any():
                    bits = np.where(lost, np.uint32(0xFFFFFFFF), g.shadow(out.rid))
                    g.cta.set_shadow(g, out.rid, bits, f"a shfl from an inactive lane at PTX line {ins.line}")

        return go

    op.run, op.checked = alone(moved_run), alone(moved_checked)
    op.converge = sm.rid
    return op


@decoder("vote")
def vote(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """vote.sync (9.7.13.9)."""
    if not mods.flag("sync"):
        raise d.fail("without .sync")
    mode = mods.choice("all", "any", "uni", "ballot")
    mods.flag("pred")
    dst, a, mask = d.operands(3)
    if mode == "ballot":
        mods.type("b32")
    sa, sm = d.src(a, TYPES["pred"]), members(d, mask)
    out = d.dst(dst, TYPES["b32" if mode == "ballot" else "pred"])

    def run(g: Group) -> None:
        x, who = sa.get(g), participants(g, sm)
        yes: Array = np.logical_and(x, who)
        value: Array
        if mode == "ballot":
            value = (yes.astype(np.uint32) << LANES).sum(axis=1, dtype=np.uint32)
        elif mode == "any":
            value = np.logical_or.reduce(yes, axis=1)
        elif mode == "all":
            value = np.logical_and.reduce(yes == who, axis=1)
        else:
            value = np.logical_and.reduce(yes == who, axis=1) | ~np.logical_or.reduce(yes, axis=1)
        out.put(g, np.broadcast_to(value[:, None], (g.n, 32)))

    op = d.pure(ins, run, (sa.rid,), (out,), _whole_warp(sa, out))
    op.converge = sm.rid
    return op


def _whole_warp(src: Source, out: Any) -> Any:
    """A tainted lane taints the result of the whole warp."""
    one = spread([src], [out])

    def rule(g: Group) -> Sequence[Array]:
        (bits,) = one(g)
        if g.mask is not None:
            bits = np.where(g.mask, bits, bits ^ bits)
        hit = (bits != 0).any(axis=1, keepdims=True)
        full = bits.dtype.type(True) if bits.dtype == bool else ~bits.dtype.type(0)
        return [np.where(np.broadcast_to(hit, bits.shape), full, full ^ full)]

    return rule


@decoder("elect")
def elect(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """elect.sync (9.7.13.14): the lowest member lane leads."""
    if not mods.flag("sync"):
        raise d.fail("without .sync")
    dst, mask = d.operands(2)
    if not isinstance(dst, Pair):
        raise d.fail("destination")
    out = None if isinstance(dst.first, Sink) else d.dst(dst.first, TYPES["b32"])
    pred, sm = d.dst(dst.second, TYPES["pred"]), members(d, mask)

    def run(g: Group) -> None:
        who = participants(g, sm)
        leader = np.argmax(who, axis=1).astype(np.uint32)[:, None]
        if out is not None:
            out.put(g, np.broadcast_to(leader, (g.n, 32)))
        pred.put(g, leader == LANES)

    dests = [pred] if out is None else [out, pred]
    op = d.pure(ins, run, (), dests, lambda g: [])
    op.converge = sm.rid
    return op


@decoder("activemask")
def activemask(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """activemask (9.7.13.11)."""
    t = mods.type("b32")
    (dst,) = d.operands(1)
    out = d.dst(dst, t)

    def run(g: Group) -> None:
        bits = (g.active().astype(np.uint32) << LANES).sum(axis=1, dtype=np.uint32)
        out.put(g, np.broadcast_to(bits[:, None], (g.n, 32)))

    return d.pure(ins, run, (), (out,), lambda g: [])


@decoder("match")
def match(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """match.sync (9.7.13.10)."""
    if not mods.flag("sync"):
        raise d.fail("without .sync")
    mode = mods.choice("any", "all")
    t = mods.type("b32", "b64")
    dst, a, mask = d.operands(3)
    sa, sm = d.src(a, t), members(d, mask)
    out = d.dst(dst.first if isinstance(dst, Pair) else dst, TYPES["b32"])
    pred = d.dst(dst.second, TYPES["pred"]) if isinstance(dst, Pair) else None

    def run(g: Group) -> None:
        x, who = sa.get(g), participants(g, sm)
        equal = (x[:, :, None] == x[:, None, :]) & who[:, None, :]
        bits = (equal.astype(np.uint32) << LANES).sum(axis=2, dtype=np.uint32)
        if mode == "all":
            everyone = (who.astype(np.uint32) << LANES).sum(axis=1, dtype=np.uint32)[:, None]
            same = bits == everyone
            bits = np.where(same, everyone, np.uint32(0))
            if pred is not None:
                pred.put(g, same)
        out.put(g, bits)

    dests = [out] if pred is None else [out, pred]

    def rule(g: Group) -> Sequence[Array]:
        return [_whole_warp(sa, x)(g)[0] for x in dests]

    op = d.pure(ins, run, (sa.rid,), dests, rule)
    op.converge = sm.rid
    return op


@decoder("redux")
def redux(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """redux.sync (9.7.13.12)."""
    if not mods.flag("sync"):
        raise d.fail("without .sync")
    op_name = mods.choice("add", "min", "max", "and", "or", "xor")
    absolute, nan = mods.flag("abs"), mods.flag("NaN")
    t = mods.type("u32", "s32", "b32", "f32")
    dst, a, mask = d.operands(3)
    sa, sm = d.src(a, t), members(d, mask)
    out = d.dst(dst, t)
    functions = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    if t.kind == "f" and op_name not in ("min", "max"):
        raise d.fail("operation")

    def fold(values: Array) -> Any:
        if t.kind == "f":
            values = np.abs(values) if absolute else values
            pick = num.minimum if op_name == "min" else num.maximum
            total = values[:1]
            for v in values[1:]:
                total = pick(total, np.asarray([v]), nan)
            return total[0] if total[0] == total[0] else np.uint32(0x7FFFFFFF).view(np.float32)
        return functions[op_name].reduce(values, dtype=t.dtype)

    def run(g: Group) -> None:
        x, who = sa.get(g), participants(g, sm)
        result = np.zeros((g.n, 32), t.dtype)
        for w in range(g.n):
            if who[w].any():
                result[w] = fold(x[w][who[w]])
        out.put(g, result)

    op = d.pure(ins, run, (sa.rid,), (out,), _whole_warp(sa, out))
    op.converge = sm.rid
    return op
