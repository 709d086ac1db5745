"""Asynchronous stores and reductions: st.async, red.async and cp.reduce.async.bulk (PTX ISA 9.7.9.12, 9.7.13.7,
9.7.9.25.4.2). They take effect when bulk copies do. The reductions are atomic, so only their sources can race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import tma
from .access import address
from .async_ import BulkCopy, thread_ids
from .decode import TYPES, Decoder, Mods, Op, Source, Type
from .errors import Misaligned
from .machine import Group
from .memory import RANK_SHIFT, Space, check_alignment
from .ops_memory import combine, items_of
from .ops_sync import find, mbarrier_address
from .parse import Instr

Array = NDArray[Any]
REDUCTIONS = ("and", "or", "xor", "add", "inc", "dec", "min", "max")


def to_peer(d: Decoder, ins: Instr, mods: Mods, reduce: bool) -> Op:
    """st.async and red.async: a value of each thread to shared memory of a CTA of the cluster; an mbarrier there counts
    its bytes."""
    mods.flag("relaxed" if reduce else "weak", "cluster")
    if not (mods.flag("shared::cluster") and mods.flag("mbarrier::complete_tx::bytes")):
        raise d.fail("form is not supported")
    op = mods.choice(*REDUCTIONS) if reduce else ""
    vec = 1 if reduce else int(mods.choice("v2", "v4", default="v1")[1:])
    t = mods.type("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
    if reduce and (not op or t.kind == "f"):
        raise d.fail("operation")
    dst, value, bar = d.operands(3)
    addr, r1 = address(d, dst, "shared::cluster")
    barrier_of, r2 = mbarrier_address(d, bar, "shared::cluster")
    srcs = [d.src(o, TYPES[f"b{t.bits}"]) for o in items_of(value)]
    if len(srcs) != vec:
        raise d.fail("vector length")
    size = d.touches("shared", t.bits // 8 * vec)
    fn = combine(d, op, t) if reduce else None

    def run(g: Group) -> None:
        places, bars = g.pick(addr(g)), g.pick(barrier_of(g))
        check_alignment(g, ins, places, size)
        values = np.stack([g.pick(s.get(g)) for s in srcs], axis=1)
        for lane, thread in enumerate(thread_ids(g).tolist()):
            cta = g.cta.peer(g, ins, int(places[lane]) >> RANK_SHIFT)
            _, barrier = find(g, ins, int(bars[lane]))
            at = cta.shared.range(g, ins, int(places[lane]) & ((1 << RANK_SHIFT) - 1), size)
            data = np.ascontiguousarray(values[lane]).view(np.uint8), None
            clock = tma.issue_clock(g, thread)
            if fn is None:
                tma.writes_shared(g, ins, cta, at, size, thread, barrier)
                write, target = tma.shared_writer(cta, at), (cta, at, size)
            else:
                write, target = reducer(cta.shared, at, t, fn), None
            copy = BulkCopy(ins, lambda: None, write, size, barrier, target=target, clock=clock)
            copy.data, copy.was_read = data, True
            g.cta.copies.issue_bulk(copy)

    return d.effect(ins, run, (*r1, *r2, *(s.rid for s in srcs)), "operand")


def reducer(space: Space, offset: int, t: Type, fn: Callable[[Array, Array, Array], Array]) -> Callable[[Any], None]:
    """Combines data with what a range of memory holds at that time."""

    def write(data: tuple[Array, Array | None]) -> None:
        part = slice(offset, offset + data[0].size)
        old, new = space.buf[part].view(t.dtype), data[0].view(t.dtype)
        space.buf[part] = np.ascontiguousarray(np.asarray(fn(old, new, new), t.dtype)).view(np.uint8)
        if space.shadow is not None and data[1] is not None:
            space.shadow[part] |= data[1]

    return write


def bulk_reduction(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """cp.reduce.async.bulk: shared memory of the CTA to global memory (by group) or to a peer (by mbarrier)."""
    hint = mods.flag("L2::cache_hint")
    group = mods.flag("bulk_group")
    counted = mods.flag("mbarrier::complete_tx::bytes")
    order = [m for m in mods.left if m in ("shared::cluster", "shared::cta", "global")]
    mods.flag("shared::cluster", "shared::cta", "global")
    op = mods.choice(*REDUCTIONS)
    mods.flag("noftz")
    t = mods.type("f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")
    if order not in (["global", "shared::cta"], ["shared::cluster", "shared::cta"]) or not op:
        raise d.fail("form is not supported")
    to_global = order[0] == "global"
    floating = ("add", "min", "max") if t.name in ("f16", "bf16") else ("add",)
    if group != to_global or counted == to_global or (t.kind in ("f", "bf") and (not to_global or op not in floating)):
        raise d.fail("form is not supported")
    packed = TYPES[f"{t.name}x2"] if t.name in ("f16", "bf16") else t
    fn = combine(d, op, packed)
    operands = list(ins.operands)
    if hint:
        d.src(operands.pop(), TYPES["u64"])
    if len(operands) != (3 if to_global else 4):
        raise d.fail("operands")
    dst, r1 = address(d, operands[0], order[0])
    src, r2 = address(d, operands[1], order[1])
    size: Source = d.src(operands[2], TYPES["u32"])
    barrier_of, r3 = (None, ()) if to_global else mbarrier_address(d, operands[3], "shared::cluster")

    def run(g: Group) -> None:
        places, sources, sizes = g.pick(dst(g)).tolist(), g.pick(src(g)).tolist(), g.pick(size.get(g)).tolist()
        bars = g.pick(barrier_of(g)).tolist() if barrier_of is not None else [None] * len(places)
        for lane, thread in enumerate(thread_ids(g).tolist()):
            issue(g, thread, places[lane], sources[lane], sizes[lane], bars[lane])

    def issue(g: Group, thread: int, to: int, frm: int, count: int, bar: int | None) -> None:
        for what, value in (("destination", to), ("source", frm), ("size", count)):
            if value & 15:
                raise Misaligned(f"{g.where(ins)}: {what} {value:#x} of a bulk copy is not a multiple of 16")
        read = tma.reader(g, ins, "shared::cta", frm, count, thread)
        if bar is None:
            tma.reads_shared(g, ins, frm, count, thread)
            region, offset = g.cta.memory.range(g, ins, to, count, True)
            add, cta, where = reducer(region, offset, t, fn), g.cta, g.where(ins)

            def write(data: tuple[Array, Array | None]) -> None:
                tma.check_written(cta, where, region, offset, data[1])
                add((data[0], None))

            g.cta.copies.issue_bulk(BulkCopy(ins, read, write, count, thread=thread))
            return
        peer = g.cta.peer(g, ins, to >> RANK_SHIFT)
        _, barrier = find(g, ins, bar)
        at = peer.shared.range(g, ins, to & ((1 << RANK_SHIFT) - 1), count)
        tma.reads_shared(g, ins, frm, count, thread, barrier)
        clock = tma.issue_clock(g, thread)
        g.cta.copies.issue_bulk(BulkCopy(ins, read, reducer(peer.shared, at, t, fn), count, barrier, clock=clock))

    return d.effect(ins, run, (*r1, *r2, size.rid, *r3), "address")
