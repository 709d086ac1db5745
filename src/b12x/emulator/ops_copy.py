"""cp.async, cp.async.bulk and cp.async.bulk.tensor (PTX ISA 9.7.9.25 to 9.7.9.27)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ops_async, tma
from .access import address
from .async_ import BulkCopy, ThreadArrive, ThreadCopies, thread_ids
from .decode import TYPES, Decoder, Mods, Op, Source, decoder
from .errors import Misaligned
from .machine import Cta, Group
from .memory import RANK_SHIFT, check_alignment
from .ops_sync import find, mbarrier_address
from .parse import Address, Imm, Instr

Array = NDArray[Any]
Lane = Callable[[Group], Array]


@decoder("cp")
def cp(d: Decoder, ins: Instr, mods: Mods) -> Op:
    reduce = mods.flag("reduce")
    if not mods.flag("async") or (reduce and "bulk" not in mods.left):
        raise d.fail("cp without .async")
    if mods.flag("bulk"):
        if reduce:
            if "tensor" in mods.left:
                raise d.fail("reductions through tensor maps")
            return ops_async.bulk_reduction(d, ins, mods)
        return bulk(d, ins, mods)
    if mods.flag("commit_group"):
        return d.effect(ins, lambda g: g.cta.copies.commit_threads(thread_ids(g)))
    if mods.flag("wait_all"):
        return d.effect(ins, lambda g: g.cta.copies.wait_threads(thread_ids(g), None))
    if mods.flag("wait_group"):
        (n,) = d.operands(1)
        if not isinstance(n, Imm):
            raise d.fail("group count")
        keep = n.value
        return d.effect(ins, lambda g: g.cta.copies.wait_threads(thread_ids(g), keep))
    if mods.flag("mbarrier"):
        return arrive_on(d, ins, mods)
    return thread_copy(d, ins, mods)


def thread_copy(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """cp.async (9.7.9.25.1): 4, 8 or 16 bytes a thread, the tail filled with zeros."""
    cache = mods.choice("ca", "cg")
    space = mods.choice("shared", "shared::cta")
    if not space or not mods.flag("global"):
        raise d.fail("spaces")
    hint = mods.flag("L2::cache_hint")
    mods.flag("L2::64B", "L2::128B", "L2::256B")
    operands = list(ins.operands)
    if hint:
        d.src(operands.pop(), TYPES["u64"])
    dst, r1 = address(d, operands[0], space)
    src, r2 = address(d, operands[1], "global")
    if not isinstance(operands[2], Imm) or operands[2].value not in (4, 8, 16) or len(operands) > 4:
        raise d.fail("copy size")
    size = d.touches(space, operands[2].value)
    if cache == "cg" and size != 16:
        raise d.fail(".cg copies 16 bytes")
    valid: Source | None = None
    ignore: Source | None = None
    if len(operands) == 4:
        is_pred = getattr(operands[3], "type", "") == "pred" or hasattr(operands[3], "reg")
        if is_pred:
            ignore = d.src(operands[3], TYPES["pred"])
        else:
            valid = d.src(operands[3], TYPES["u32"])
    extra = tuple(s.rid for s in (valid, ignore) if s is not None)
    site: list[Any] = []

    def run(g: Group) -> None:
        cta = g.cta
        to, frm = g.pick(dst(g)), g.pick(src(g))
        check_alignment(g, ins, to, size)
        check_alignment(g, ins, frm, size)
        offset = cta.shared.offsets(g, ins, to, size).astype(np.int64)
        count: Array = np.full(to.size, size)
        if valid is not None:
            count = np.minimum(g.pick(valid.get(g)).astype(np.int64), size)
        if ignore is not None:
            count = np.where(g.pick(ignore.get(g)), 0, count)
        parts = []
        for need in np.unique(count):  # only the bytes that are read have to exist
            if need:
                lanes = np.flatnonzero(count == need)
                for region, where, at in cta.memory.resolve(g, ins, frm[lanes], int(need), False, site):
                    parts.append((region, lanes if where is None else lanes[where], at))
        cta.copies.issue_threads(g, ThreadCopies(ins, thread_ids(g), count, offset, parts, size, count))

    return d.effect(ins, run, (*r1, *r2, *extra), "address")


def arrive_on(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """cp.async.mbarrier.arrive (9.7.13.15.16)."""
    mods.flag("arrive")
    noinc = mods.flag("noinc")
    space = mods.choice("shared", "shared::cta")
    mods.type("b64")
    (a,) = d.operands(1)
    addr, srcs = mbarrier_address(d, a, space)

    def run(g: Group) -> None:
        addresses, threads = g.pick(addr(g)), thread_ids(g)
        for value in np.unique(addresses).tolist():
            _, barrier = find(g, ins, value)
            mine = threads[addresses == value]
            if not noinc:
                barrier.pending += mine.size
            g.cta.copies.issue_arrive(g, ThreadArrive(ins, mine, barrier, np.ones(mine.size, np.int64)))

    return d.effect(ins, run, srcs, "address")


def bulk(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """The cp.async.bulk family (9.7.9.25.4 to 9.7.9.26)."""
    if mods.flag("commit_group"):

        def commit(g: Group) -> None:
            for t in thread_ids(g).tolist():
                g.cta.copies.commit_bulk(t)

        return d.effect(ins, commit)
    if mods.flag("wait_group"):
        read = mods.flag("read")
        (n,) = d.operands(1)
        if not isinstance(n, Imm):
            raise d.fail("group count")
        keep = n.value

        def wait(g: Group) -> None:
            for t in thread_ids(g).tolist():
                g.cta.copies.wait_bulk(t, keep, read)

        return d.effect(ins, wait)
    if mods.flag("tensor"):
        return tensor(d, ins, mods)
    prefetch = mods.flag("prefetch")
    hint = mods.flag("L2::cache_hint")
    multicast = mods.flag("multicast::cluster")
    group = mods.flag("bulk_group")
    counted = mods.flag("mbarrier::complete_tx::bytes")
    mods.flag("L2")
    order = [m for m in mods.left if m in ("shared::cluster", "shared::cta", "global")]
    mods.flag("shared::cluster", "shared::cta", "global")
    operands = list(ins.operands)
    if hint:
        d.src(operands.pop(), TYPES["u64"])
    if prefetch:
        addr, srcs = address(d, operands[0], "global")
        amount = d.src(operands[1], TYPES["u32"])

        def check(g: Group) -> None:
            for a, n in zip(g.pick(addr(g)).tolist(), g.pick(amount.get(g)).tolist(), strict=True):
                g.cta.memory.range(g, ins, a, n, False)

        return d.effect(ins, check, (*srcs, amount.rid), "address")
    if len(order) != 2:
        raise d.fail("state spaces")
    d.copies_global |= order[1] == "global"
    to_space, from_space = order
    dst, r1 = address(d, operands[0], to_space)
    src, r2 = address(d, operands[1], from_space)
    size = d.src(operands[2], TYPES["u32"])
    rest = operands[3:]
    rids = [*r1, *r2, size.rid]
    bar: Lane | None = None
    masks: Source | None = None
    if to_space.startswith("shared"):
        if not counted or group:
            raise d.fail("completion mechanism")
        bar, r3 = mbarrier_address(d, rest.pop(0), "shared::cluster")
        rids += r3
        if multicast:
            masks = d.src(rest.pop(0), TYPES["u16"])
            rids.append(masks.rid)
    elif not group or counted:
        raise d.fail("completion mechanism")
    if rest:
        raise d.fail("operands")
    get_bar = bar

    def run(g: Group) -> None:
        a, b, n = g.pick(dst(g)), g.pick(src(g)), g.pick(size.get(g))
        bars = g.pick(get_bar(g)).tolist() if get_bar is not None else [0] * a.size
        targets = g.pick(masks.get(g)).tolist() if masks is not None else [None] * a.size
        for lane, thread in enumerate(thread_ids(g).tolist()):
            issue(g, thread, int(a[lane]), int(b[lane]), int(n[lane]), bars[lane], targets[lane])

    def issue(g: Group, thread: int, to: int, frm: int, count: int, bar_addr: int, target: int | None) -> None:
        for what, value in (("destination", to), ("source", frm), ("size", count)):
            if value & 15:
                raise Misaligned(f"{g.where(ins)}: {what} {value:#x} of a bulk copy is not a multiple of 16")
        read = tma.reader(g, ins, from_space, frm, count, thread)
        clock = tma.issue_clock(g, thread)
        if get_bar is None:
            cta, place = g.cta, g.where(ins)
            region, offset = cta.memory.range(g, ins, to, count, True)
            tma.poison_global(g.cta, region, offset, count)
            tma.reads_shared(g, ins, frm, count, thread)
            g.cta.copies.issue_bulk(
                BulkCopy(
                    ins, read, lambda data: tma.write_global(cta, place, region, offset, data), count, thread=thread
                )
            )
            return
        for cta, low, barrier in destinations(g, ins, to, bar_addr, target):
            at = cta.shared.range(g, ins, low, count)
            cta.copies_into(g, ins, at, count)
            if from_space != "global":
                tma.reads_shared(g, ins, frm, count, thread, barrier)
            tma.writes_shared(g, ins, cta, at, count, thread, barrier)
            g.cta.copies.issue_bulk(
                BulkCopy(ins, read, tma.shared_writer(cta, at), count, barrier, target=(cta, at, count), clock=clock)
            )

    return d.effect(ins, run, tuple(rids), "address")


def destinations(g: Group, ins: Instr, to: int, bar_addr: int, target: int | None) -> list[tuple[Cta, int, Any]]:
    """(CTA, shared address, mbarrier) of a copy, for each CTA of a multicast."""
    low, low_bar = to & ((1 << RANK_SHIFT) - 1), bar_addr & ((1 << RANK_SHIFT) - 1)
    if target is None:
        cta = g.cta.peer(g, ins, to >> RANK_SHIFT)
        _, barrier = find(g, ins, bar_addr)
        return [(cta, low, barrier)]
    out = []
    for rank in range(16):
        if target >> rank & 1:
            cta = g.cta.peer(g, ins, rank + 1)
            _, barrier = find(g, ins, low_bar | (rank + 1) << RANK_SHIFT)
            out.append((cta, low, barrier))
    return out


def tensor(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """cp.async.bulk.tensor (9.7.9.26.5.2): tiles of a tensor map."""
    prefetch = mods.flag("prefetch")
    dims = int(mods.choice("1d", "2d", "3d", "4d", "5d", default="0d")[0])
    hint = mods.flag("L2::cache_hint")
    multicast = mods.flag("multicast::cluster")
    mods.flag("tile")
    group = mods.flag("bulk_group")
    counted = mods.flag("mbarrier::complete_tx::bytes")
    order = [m for m in mods.left if m in ("shared::cluster", "shared::cta", "global")]
    mods.flag("shared::cluster", "shared::cta", "global", "L2")
    operands = list(ins.operands)
    if hint:
        d.src(operands.pop(), TYPES["u64"])
    load = prefetch or (len(order) == 2 and order[1] == "global")
    if not dims or (not prefetch and (len(order) != 2 or counted != load or group == load)):
        raise d.fail("form is not supported")
    where = operands.pop(0 if prefetch or not load else 1)
    if not isinstance(where, Address) or len(where.coords) != dims or where.offset:
        raise d.fail("tensor coordinates")
    table = d.src(where.base, TYPES["u64"])
    coords = [d.src(c, TYPES["s32"]) for c in where.coords]
    rids = [table.rid, *(c.rid for c in coords)]
    if prefetch:
        return d.effect(ins, lambda g: None, tuple(rids), "coordinate")
    d.copies_global |= load
    shared_space = order[0] if load else order[1]
    shared, r1 = address(d, operands.pop(0), shared_space)
    rids += r1
    bar: Lane | None = None
    masks: Source | None = None
    if load:
        bar, r2 = mbarrier_address(d, operands.pop(0), "shared::cluster")
        rids += r2
        if multicast:
            masks = d.src(operands.pop(0), TYPES["u16"])
            rids.append(masks.rid)
    if operands:
        raise d.fail("operands")

    def run(g: Group) -> None:
        maps, places = g.pick(table.get(g)).tolist(), g.pick(shared(g)).tolist()
        at = [g.pick(c.get(g)).tolist() for c in coords]
        bars = g.pick(bar(g)).tolist() if bar is not None else [0] * len(maps)
        targets = g.pick(masks.get(g)).tolist() if masks is not None else [None] * len(maps)
        seen: set[Any] = set()
        for lane, thread in enumerate(thread_ids(g).tolist()):
            position = tuple(c[lane] for c in at)
            box = tma.box_of(g, ins, maps[lane], position)
            if not load:
                key = (maps[lane], position, places[lane])
                offset = box.shared_offset(g, ins, g.cta, places[lane])
                # equal stores of several lanes write the same bytes: one moves the data, each has its group
                tma.store(g, ins, box, offset, thread, first=key not in seen)
                seen.add(key)
                continue
            for cta, low, barrier in destinations(g, ins, places[lane], bars[lane], targets[lane]):
                tma.load(g, ins, box, cta, low, barrier, thread)

    return d.effect(ins, run, tuple(rids), "coordinate")
