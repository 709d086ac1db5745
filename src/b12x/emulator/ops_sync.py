"""Barriers and mbarriers (PTX ISA 9.7.13.1 to 9.7.13.3, 9.7.13.15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access import SHARED_SPACES, address
from .async_ import thread_ids
from .clocks import ALL_LANES
from .decode import TYPES, Decoder, Mods, Op, Source, decoder
from .errors import BarrierError
from .machine import Cta, Group, MBarrier
from .memory import RANK_SHIFT, check_alignment
from .ops_warp import control
from .parse import Address, Imm, Instr, Operand, Reg
from .races import BITS

Array = NDArray[Any]


@decoder("bar", "barrier")
def bar(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """bar/barrier (9.7.13.1), barrier.cluster (9.7.13.3), bar.warp.sync (9.7.13.2)."""
    if ins.opcode == "barrier" and mods.flag("cluster"):
        return cluster_barrier(d, ins, mods)
    if ins.opcode == "bar" and mods.flag("warp"):
        mods.flag("sync")
        (mask,) = d.operands(1)
        src = d.src(mask, TYPES["b32"])
        return control(ins, "warpsync", src, (src.rid,))
    mods.flag("cta")
    action = mods.choice("sync", "arrive", "red")
    if ins.opcode == "barrier":
        mods.flag("aligned")
    operands = list(ins.operands)
    reduction = ""
    dst = pred = None
    if action == "red":
        reduction = mods.choice("popc", "and", "or")
        t = mods.type("u32", "pred")
        dst = d.dst(operands.pop(0), t)
        pred = d.src(operands.pop(), TYPES["pred"])
    if not action or len(operands) not in (1, 2) or (action == "arrive" and len(operands) != 2):
        raise d.fail("barrier form")
    u32 = TYPES["u32"]
    number = d.src(operands[0], u32)
    count = d.src(operands[1], u32) if len(operands) == 2 else None
    srcs = [number.rid] + ([count.rid] if count else []) + ([pred.rid] if pred else [])
    return control(
        ins, "bar", (action, number, count, reduction, dst, pred), tuple(srcs), (dst.rid,) if dst is not None else ()
    )


@decoder("membar", "fence")
def fence(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """membar/fence (9.7.13.4): ordinary accesses happen in order here, so only the race detector listens."""
    d.operands(0)
    if ins.opcode == "membar":
        mods.flag("cta", "gl", "sys")
        kind = "memory"
    elif mods.flag("proxy"):
        kind = mods.choice("async", "alias", "async::generic")
        spaces = {m for m in ("global", "shared::cta", "shared::cluster") if mods.flag(m)}
        if not kind or (kind == "alias" and spaces):
            raise d.fail("proxy fence form is not supported")
        if kind == "async::generic":  # between asynchronous copies and later ordinary accesses: taken for granted
            mods.flag("acquire", "release", "cluster")
            mods.flag("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        if kind == "async" and spaces == {"global"}:
            kind = "async.global"
    elif mods.flag("mbarrier_init"):
        if not (mods.flag("release") and mods.flag("cluster")):
            raise d.fail("fence form is not supported")
        kind = "mbarrier_init"
    else:
        kind = "memory" if mods.choice("sc", "acq_rel", "acquire", "release") else ""
        if not kind or not mods.choice("cta", "cluster", "gpu", "sys"):
            raise d.fail("fence form is not supported")
        mods.flag("sync_restrict::shared::cta", "sync_restrict::shared::cluster")

    def run(g: Group) -> None:
        races, stores = g.cta.races, g.cta.memory.stores
        if stores is not None and kind in ("async", "async.global"):
            stores.fence(g)
        if races is not None:
            for k, warp in enumerate(g.warps):
                races.fence(g, kind, warp, ALL_LANES if g.mask is None else int((BITS * g.mask[k]).sum()))

    return d.effect(ins, run)


def cluster_barrier(d: Decoder, ins: Instr, mods: Mods) -> Op:
    action = mods.choice("arrive", "wait")
    relaxed = mods.flag("relaxed")
    mods.flag("release", "acquire", "aligned")
    d.operands(0)
    return control(ins, "cluster", (action, relaxed))


def mbarrier_address(d: Decoder, operand: Operand, space: str) -> tuple[Callable[[Group], Array], tuple[int, ...]]:
    """32-bit shared address of an mbarrier; generic addresses have to lie in the shared window."""
    if space or (isinstance(operand, Address) and isinstance(operand.base, Reg) and operand.base.type[1:] == "32"):
        return address(d, operand, space or "shared")
    get, srcs = address(d, operand, "")
    return (lambda g: (get(g) & np.uint64(0xFFFFFFFF)).astype(np.uint32)), srcs


def find(g: Group, ins: Instr, addr: int) -> tuple[Cta, MBarrier]:
    """The initialised mbarrier at a shared address (own or peer)."""
    cta = g.cta.peer(g, ins, addr >> RANK_SHIFT)
    low = addr & ((1 << RANK_SHIFT) - 1)
    barrier = cta.mbarriers.get(low)
    if barrier is None:
        raise BarrierError(f"{g.where(ins)}: no initialised mbarrier at shared address {low:#x}")
    return cta, barrier


def arrive(g: Group, ins: Instr, addr: int, cta: Cta, barrier: MBarrier, count: int) -> None:
    """``count`` arrivals; more than the phase waits for is an error."""
    if count > barrier.pending:
        raise BarrierError(
            f"{g.where(ins)}: {count} arrivals on the mbarrier at {addr:#x}, whose phase {barrier.phase} waits for "
            f"{barrier.pending} of {barrier.expected}"
        )
    barrier.pending -= count
    barrier.settle()
    cta.events += 1


#: An mbarrier state holds the phase, and above this bit the arrivals that were pending before.
PENDING_SHIFT = 40


@decoder("mbarrier")
def mbarrier(d: Decoder, ins: Instr, mods: Mods) -> Op:
    """mbarrier.init, inval, expect_tx, complete_tx, arrive, arrive_drop, test_wait, try_wait, pending_count."""
    action = mods.choice(
        "init", "inval", "expect_tx", "complete_tx", "arrive", "arrive_drop", "test_wait", "try_wait", "pending_count"
    )
    expect = action in ("arrive", "arrive_drop") and mods.flag("expect_tx")
    parity = mods.flag("parity")
    incomplete = mods.flag("noComplete")
    if incomplete and (expect or action not in ("arrive", "arrive_drop")):
        raise d.fail(".noComplete")
    relaxed = mods.flag("relaxed")
    mods.flag("release", "acquire", "cta", "cluster")
    space = mods.choice(*SHARED_SPACES)
    mods.type("b64")
    operands = list(ins.operands)
    u32, u64 = TYPES["u32"], TYPES["u64"]
    if action in ("test_wait", "try_wait"):
        return wait(d, ins, operands, parity, space, relaxed)
    if action == "pending_count":
        dst, a = d.operands(2)
        return d.alu(d.dst(dst, u32), [d.src(a, u64)], lambda x: (x >> np.uint64(PENDING_SHIFT)).astype(np.uint32))
    state = None
    if action in ("arrive", "arrive_drop") and not isinstance(operands[0], Address):
        state = d.dst(operands.pop(0), u64)
    addr, srcs = mbarrier_address(d, operands.pop(0), space)
    value = d.src(operands.pop(0), u32) if operands else Source(d.constant(2, 1), u32)
    if operands or (action == "inval" and ins.operands[1:]):
        raise d.fail("operands")

    def one(g: Group, a: int, amount: int, lanes: Array) -> int:
        """Acts for active lanes with the same operands; returns the phase before."""
        times = lanes.size
        if action == "init":
            g.cta.init_mbarrier(g, ins, a, amount, lanes)
            return 0
        if action == "inval":
            g.cta.end_mbarrier(g, ins, a, lanes)
            return 0
        cta, barrier = find(g, ins, a)
        phase = barrier.phase | barrier.pending << PENDING_SHIFT
        if incomplete and times * amount >= barrier.pending:
            raise BarrierError(
                f"{g.where(ins)}: arrive.noComplete completes the phase of the mbarrier at {a:#x}, which waits for "
                f"{barrier.pending} arrivals"
            )
        races = g.cta.races
        if races is not None:
            threads = thread_ids(g)[lanes]
            for warp in np.unique(threads >> 5).tolist():
                bits = sum(1 << int(t & 31) for t in threads[threads >> 5 == warp])
                races.initialised(g, ins, cta, barrier.address, warp, bits)
                if action in ("arrive", "arrive_drop"):
                    races.arrive(g, barrier, warp, bits, relaxed)
        if action == "expect_tx" or expect:
            barrier.tx += amount * times
        if action == "complete_tx":
            barrier.tx -= amount * times
            barrier.settle()
            cta.events += 1
        elif action == "arrive_drop":
            drop = times if expect else amount * times
            barrier.expected -= drop
            arrive(g, ins, a, cta, barrier, drop)
        elif action == "arrive":
            arrive(g, ins, a, cta, barrier, times if expect else amount * times)
        return phase

    def run(g: Group) -> None:
        addresses, amounts = g.pick(addr(g)), g.pick(value.get(g))
        check_alignment(g, ins, addresses, 8)
        seen: dict[tuple[int, int], list[int]] = {}
        for k, pair in enumerate(zip(addresses.tolist(), amounts.tolist(), strict=True)):
            seen.setdefault(pair, []).append(k)
        phases = {a: one(g, a, v, np.array(lanes)) for (a, v), lanes in seen.items()}
        if state is not None:
            result = np.array([phases[a] for a in addresses.tolist()], np.uint64)
            full = np.zeros((g.n, 32), np.uint64)
            full[g.active()] = result
            state.put(g, full)

    op = d.effect(ins, run, (*srcs, value.rid), "mbarrier operand")
    op.dsts = () if state is None else (state.rid,)
    return op


def wait(d: Decoder, ins: Instr, operands: list[Operand], parity: bool, space: str, relaxed: bool) -> Op:
    """test_wait/try_wait: a block of its own, so that the scheduler can park the warp."""
    pred = d.dst(operands.pop(0), TYPES["pred"])
    addr, srcs = mbarrier_address(d, operands.pop(0), space)
    expected = d.src(operands.pop(0), TYPES["u32" if parity else "u64"])
    if operands:
        hint = operands.pop(0)
        if not isinstance(hint, Imm):
            d.src(hint, TYPES["u32"])
    if operands:
        raise d.fail("operands")
    data = pred, addr, expected, parity, relaxed
    return control(ins, "wait", data, (*srcs, expected.rid), (pred.rid,), leader=True)
