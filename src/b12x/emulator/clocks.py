"""Vector clocks: which accesses of other warps, and which asynchronous copies, a warp is ordered after.

PTX ISA 8 (memory consistency model). Every warp has a clock that ticks when it releases (arrives at a barrier,
fences); asynchronous copies have a clock for each mbarrier or thread group that they complete on. A *stamp* is a clock
value in the upper half of a 64-bit word, with all lanes in the lower half; an access is recorded as its clock with the
lanes that made it, so it is at most the stamp of its clock.

Lanes of one warp are ordered by ``bar.warp.sync`` and CTA barriers alone: a warp's entry in its own clock is the stamp
of its last such point. A lane that releases by itself passes on its own later accesses (``part`` and ``lanes``), not
those of the other lanes. Where clocks cannot tell, order is assumed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ALL_LANES = 0xFFFFFFFF
TICK = np.uint64(1 << 32)
LOW = np.uint64(ALL_LANES)
#: Slots for asynchronous copies that a cluster starts with; more are made when needed.
ROOM = 24


def fit(array: Array, size: int) -> Array:
    """A vector padded with zeros."""
    return array if array.size >= size else np.concatenate([array, np.zeros(size - array.size, array.dtype)])


class Clock:
    """What a barrier, an mbarrier phase or a flag passes on to those who wait for it."""

    __slots__ = ("fenced", "lanes", "order", "part")

    def __init__(self, size: int, warps: int) -> None:
        self.order: Array = np.zeros(size, np.uint64)
        self.fenced: Array = np.zeros(size, np.uint64)
        self.part: Array = np.zeros(warps, np.uint64)
        self.lanes: Array = np.zeros(warps, np.uint32)

    def join(self, other: Clock) -> None:
        size = max(self.order.size, other.order.size)
        self.order = np.maximum(fit(self.order, size), fit(other.order, size))
        self.fenced = np.maximum(fit(self.fenced, size), fit(other.fenced, size))
        blend(self.order, self.part, self.lanes, other.part, other.lanes)

    def plus(self, other: Clock | None) -> Clock:
        """The union with another clock, which it may change."""
        if other is None:
            other = Clock(self.order.size, self.part.size)
        other.join(self)
        return other


def blend(order: Array, part: Array, lanes: Array, more: Array, their_lanes: Array) -> None:
    """Adds what single lanes released; entries that ``order`` has caught up with are dropped."""
    if more.any() or part.any():
        known = order[: part.size]
        lanes[...] = np.where(part > known, lanes, 0) | np.where(more > known, their_lanes, 0)
        np.maximum(part, more, out=part)


class Clocks:
    """The clocks of all warps of a cluster. Agents are the warps, CTA by CTA, and then the slots of copies."""

    def __init__(self, ctas: int, warps: int) -> None:
        self.per_cta = warps
        self.warps = n = ctas * warps
        self.size = n + ROOM
        self.used = n
        self.order: Array = np.zeros((n, self.size), np.uint64)
        self.fenced: Array = np.zeros((n, self.size), np.uint64)
        self.part: Array = np.zeros((n, n), np.uint64)
        self.lanes: Array = np.zeros((n, n), np.uint32)
        self.now: Array = np.full(n, TICK | LOW)
        self.touched: Array = np.zeros(n, np.uint64)  # stamp of each warp's last access
        self.snapshots: dict[int, Clock] = {}  # what a fence of each warp released, for relaxed operations after it
        self.slots: dict[Any, int] = {}
        self.top: Array = np.zeros(self.size, np.uint64)  # last stamp handed out for each slot
        self.base: Array = np.zeros(self.size, np.uint64)  # the same when the CTA started
        self.generic: Array = np.ones(self.size, bool)  # whether an agent writes through the generic proxy

    def start(self) -> None:
        """A new CTA (or cluster) in the place of one that has ended: everything that went before is ordered."""
        self.base = self.top.copy()
        self.order[:] = self.top
        self.order[:, : self.warps] = self.now
        self.fenced[:] = self.order
        self.now += TICK
        self.part[:] = 0
        self.lanes[:] = 0
        self.touched[:] = 0
        self.snapshots.clear()

    def slot(self, key: Any, generic: bool) -> int:
        """The agent that stands for the copies which complete together under ``key``."""
        found = self.slots.get(key)
        if found is None:
            if self.used == self.size:
                self.grow()
            found = self.slots[key] = self.used
            self.used += 1
            self.generic[found] = generic
            self.top[found] = self.base[found] = LOW
        return found

    def grow(self) -> None:
        extra = self.size
        self.size += extra
        for name in ("order", "fenced"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros((self.warps, extra), np.uint64)], axis=1))
        self.top, self.base = fit(self.top, self.size), fit(self.base, self.size)
        self.generic = np.concatenate([self.generic, np.ones(extra, bool)])

    def new(self) -> Clock:
        return Clock(self.size, self.warps)

    def release(self, clock: Clock, warp: int, lanes: int, full: bool) -> None:
        """What ``lanes`` of a warp know goes into a clock; ``full`` says that these are all its living lanes."""
        clock.order = fit(clock.order, self.size)
        clock.fenced = fit(clock.fenced, self.size)
        np.maximum(clock.order, self.order[warp], out=clock.order)
        np.maximum(clock.fenced, self.fenced[warp], out=clock.fenced)
        now = self.now[warp]
        blend(clock.order, clock.part, clock.lanes, self.part[warp], self.lanes[warp])
        if full or self.touched[warp] <= self.order[warp, warp]:  # the other lanes did nothing since they were together
            clock.order[warp] = now
        else:
            if clock.part[warp] <= clock.order[warp]:
                clock.lanes[warp] = 0
            clock.part[warp] = now
            clock.lanes[warp] |= np.uint32(lanes)
        self.now[warp] = now + TICK

    def acquire(self, warp: int, clock: Clock) -> None:
        size = clock.order.size
        for mine, theirs in ((self.order, clock.order), (self.fenced, clock.fenced)):
            np.maximum(mine[warp, :size], theirs, out=mine[warp, :size])
        blend(self.order[warp], self.part[warp], self.lanes[warp], clock.part, clock.lanes)

    def warp_sync(self, warp: int) -> None:
        """All lanes of a warp are together."""
        self.order[warp, warp] = self.now[warp]
        self.now[warp] += TICK

    def fence(self, warp: int, lanes: int, full: bool) -> None:
        """A memory fence: relaxed operations that follow release what is known here."""
        clock = self.snapshots[warp] = self.new()
        self.release(clock, warp, lanes, full)

    def fence_proxy(self, warp: int) -> None:
        """fence.proxy.async: the ordinary accesses known here come before asynchronous ones that follow."""
        np.maximum(self.fenced[warp], self.order[warp], out=self.fenced[warp])
        part = self.fenced[warp, : self.warps]
        np.maximum(part, self.part[warp], out=part)
        self.fenced[warp, warp] = self.now[warp]
        self.now[warp] += TICK

    def reached(self, warp: int, slot: int, stamp: np.uint64) -> None:
        """A warp has waited for a slot's copies up to a stamp."""
        if self.order[warp, slot] < stamp:
            self.order[warp, slot] = stamp
