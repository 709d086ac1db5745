"""Races on shared memory, and proxy fences that are missing.

Every granule of shared memory (the smallest width that the program accesses) keeps its last write, and the last read of
every agent; an access that is not ordered after them by the clocks is reported whatever the schedule was. Reads by
asynchronous copies also need a proxy fence after ordinary writes (PTX ISA 8.8, 9.7.13.4). Accesses that are atomic or
strong (``.relaxed``, ``.acquire``, ``.volatile``, ...) do not race with each other, and pass on clocks. Warps that
write what is there already do not race.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .clocks import LOW, TICK, Clock, Clocks
from .errors import EmulatorError, MissingProxyFence, SharedRace
from .memory import SHARED_BASE

if TYPE_CHECKING:
    from .decode import Code
    from .machine import Cta, Fragment, Group, MBarrier
    from .parse import Instr

Array = NDArray[Any]
LANES = np.arange(32)
BITS = (np.uint64(1) << LANES.astype(np.uint64)).astype(np.uint64)


class Marks:
    """For every agent and granule the last access of one sort: its clock with its lanes, and its instruction."""

    def __init__(self, agents: int, granules: int) -> None:
        self.granules = granules
        self.mark: Array = np.zeros((agents, granules), np.uint64)
        self.site: Array = np.zeros((agents, granules), np.int32)

    def fit(self, agents: int) -> None:
        extra = agents - self.mark.shape[0]
        if extra > 0:
            self.mark = np.concatenate([self.mark, np.zeros((extra, self.granules), np.uint64)])
            self.site = np.concatenate([self.site, np.zeros((extra, self.granules), np.int32)])


class Cells:
    """What was last done to the shared memory of one CTA."""

    def __init__(self, agents: int, granules: int) -> None:
        self.writer: Array = np.zeros(granules, np.int32)
        self.mark: Array = np.zeros(granules, np.uint64)
        self.site: Array = np.zeros(granules, np.int32)
        self.reads = Marks(agents, granules)
        self.strong_reads: Marks | None = None
        self.strong_writes: Marks | None = None


class Races:
    """The detector of one cluster. Unless ``strict``, a warp's loads are released by any of its lanes."""

    def __init__(self, code: Code, ctas: int, warps: int, shared_bytes: int, strict: bool) -> None:
        self.code = code
        self.strict = strict
        self.clocks = Clocks(ctas, warps)
        self.warps = warps
        self.shift = code.granule.bit_length() - 1
        self.granules = -(-shared_bytes // 128) * 128 >> self.shift
        self.cells = [Cells(self.clocks.size, self.granules) for _ in range(ctas)]
        self.ctas: list[Cta] = []
        self.sites: list[Instr] = []
        self.site_of: dict[int, int] = {}
        self.flags: dict[Any, Clock] = {}
        self.threads: dict[Any, tuple[Array, Array]] = {}

    def start(self, ctas: list[Cta]) -> None:
        self.ctas = ctas
        self.clocks.start()
        self.flags.clear()
        for k, cta in enumerate(ctas):
            cta.races = self
            cta.index = k

    def site(self, ins: Instr) -> int:
        found = self.site_of.get(id(ins))
        if found is None:
            found = self.site_of[id(ins)] = len(self.sites)
            self.sites.append(ins)
        return found

    def agent(self, cta: Cta, warp: int) -> int:
        return cta.index * self.warps + warp

    def who(self, g: Group, where: Array | None) -> tuple[Array, Array]:
        """Agent and lane bit of every active lane, as columns."""
        key = g.cta.index, g.warps
        found = self.threads.get(key)
        if found is None:
            agents = np.repeat(np.array(g.warps) + g.cta.index * self.warps, 32)
            found = self.threads[key] = agents[:, None], np.tile(BITS, g.n)[:, None]
        if g.mask is None and where is None:
            return found
        agents, bits = found
        if g.mask is not None:
            keep = g.mask.ravel()
            agents, bits = agents[keep], bits[keep]
        if where is not None:
            agents, bits = agents[where], bits[where]
        return agents, bits

    def places(self, offset: Array, size: int) -> Array:
        """Granules of accesses, one row each."""
        first = (offset.astype(np.int64) >> self.shift)[:, None]
        count = size >> self.shift
        return first if count == 1 else first + np.arange(count)

    # Accesses of threads

    def read(
        self, g: Group, ins: Instr, cta: Cta, offset: Array, size: int, where: Array | None, collective: bool = False
    ) -> None:
        """Ordinary loads; ``collective`` ones are made by all lanes together."""
        if not offset.size:
            return
        cells, clocks = self.cells[cta.index], self.clocks
        agent, bit = self.who(g, where)
        if collective:
            bit = np.zeros_like(bit)
        at = self.places(offset, size)
        self.after_writes(g, ins, cta, cells, agent, bit, at, where, "reads")
        if cells.strong_writes is not None:
            self.after_marks(g, ins, cta, cells.strong_writes, agent, bit, at, where, "reads", "written")
        self.record(cells.reads, agent, np.full_like(bit, LOW) if collective else bit, at, ins)
        clocks.touched[agent] = clocks.now[agent]

    def record(self, marks: Marks, agent: Array, bit: Array, at: Array, ins: Instr) -> None:
        clocks = self.clocks
        marks.fit(clocks.size)
        together = clocks.order[agent, agent]
        flat = agent * marks.granules + at
        mark = marks.mark.reshape(-1)
        new = (clocks.now[agent] & ~LOW) | bit
        old = mark.take(flat)
        kept = old > together
        if kept.any():
            new = new | np.where(kept, old & LOW, np.uint64(0))
        mark[flat] = new
        marks.site.reshape(-1)[flat] = self.site(ins)
        lost = (mark.take(flat) & bit) != bit
        if lost.any():  # lanes that read one place together
            np.bitwise_or.at(mark, flat[lost], np.broadcast_to(bit, flat.shape)[lost])

    def write(
        self,
        g: Group,
        ins: Instr,
        cta: Cta,
        offset: Array,
        size: int,
        where: Array | None,
        data: Array,
        collective: bool = False,
    ) -> None:
        """Ordinary stores of ``data`` (one row of bytes each), before they happen."""
        if not offset.size:
            return
        cells, clocks = self.cells[cta.index], self.clocks
        agent, bit = self.who(g, where)
        if collective:
            bit = np.zeros_like(bit)
        at = self.places(offset, size)
        same = _Same(cta, offset, size, data, 1 << self.shift)
        self.after_writes(g, ins, cta, cells, agent, bit, at, where, "writes", same)
        self.after_marks(g, ins, cta, cells.reads, agent, bit, at, where, "writes", "read")
        if cells.strong_writes is not None:
            self.after_marks(g, ins, cta, cells.strong_writes, agent, bit, at, where, "writes", "written")
        if cells.strong_reads is not None:
            self.after_marks(g, ins, cta, cells.strong_reads, agent, bit, at, where, "writes", "read")
        cells.writer[at] = agent
        cells.mark[at] = clocks.now[agent] if collective else (clocks.now[agent] & ~LOW) | bit
        cells.site[at] = self.site(ins)
        lost = cells.writer[at] != agent
        if lost.any():
            self.together(g, ins, cta, at, lost, agent, where, same)
        clocks.touched[agent] = clocks.now[agent]

    def together(
        self, g: Group, ins: Instr, cta: Cta, at: Array, lost: Array, agent: Array, where: Array | None, same: _Same
    ) -> None:
        """Warps that write one place by the same instruction have to write the same."""
        values: dict[int, tuple[int, bytes, int]] = {}
        for row, column in np.argwhere(np.isin(at, at[lost])).tolist():
            mine = (int(agent[row, 0]), same.bytes(row, column))
            first = values.setdefault(int(at[row, column]), (*mine, row))
            if first[0] != mine[0] and first[1] != mine[1]:
                raise self.error(g, ins, cta, int(at[row, column]), row, where, "writes", "written", *mine[:1], 0, ins)

    def strong(
        self, g: Group, ins: Instr, cta: Cta, offset: Array, size: int, where: Array | None, write: bool
    ) -> None:
        """Atomic and strong accesses: ordered with ordinary ones only."""
        cells, clocks = self.cells[cta.index], self.clocks
        agent, bit = self.who(g, where)
        at = self.places(offset, size)
        what = "writes" if write else "reads"
        self.after_writes(g, ins, cta, cells, agent, bit, at, where, what)
        if write:
            self.after_marks(g, ins, cta, cells.reads, agent, bit, at, where, what, "read")
            if cells.strong_writes is None:
                cells.strong_writes = Marks(clocks.size, self.granules)
            self.record(cells.strong_writes, agent, bit, at, ins)
        else:
            if cells.strong_reads is None:
                cells.strong_reads = Marks(clocks.size, self.granules)
            self.record(cells.strong_reads, agent, bit, at, ins)
        clocks.touched[agent] = clocks.now[agent]

    def flag(self, g: Group, space: Any, offset: Array, where: Array | None, store: bool, load: bool) -> None:
        """Strong accesses pass on clocks: what writes releases, what reads acquires (fences are taken for granted)."""
        agent, bit = self.who(g, where)
        for a, b, place in zip(agent[:, 0].tolist(), bit[:, 0].tolist(), offset.tolist(), strict=True):
            key = (id(space), place)
            known = self.flags.get(key)
            if load and known is not None:
                self.clocks.acquire(a, known)
            if store:
                if known is None:
                    known = self.flags[key] = self.clocks.new()
                self.clocks.release(known, a, b, False)

    # Checks

    def after_writes(
        self,
        g: Group,
        ins: Instr,
        cta: Cta,
        cells: Cells,
        agent: Array,
        bit: Array,
        at: Array,
        where: Array | None,
        what: str,
        same: _Same | None = None,
    ) -> None:
        """Raises unless the last writes are ordered before an access."""
        clocks = self.clocks
        writer, mark = cells.writer[at], cells.mark[at]
        bad = mark > clocks.order.reshape(-1).take(agent * clocks.size + writer)
        if not bad.any():
            return
        rows, columns = np.nonzero(bad)
        a, b = agent[rows, 0], bit[rows, 0]
        bad = self.unordered(a, b, writer[rows, columns], mark[rows, columns])
        for k in np.flatnonzero(bad).tolist():
            row, column = int(rows[k]), int(columns[k])
            if same is not None and same.there(row, column):
                continue
            place = int(at[row, column])
            earlier = int(writer[row, column]), int(mark[row, column]), self.sites[cells.site[place]]
            raise self.error(g, ins, cta, place, row, where, what, "written", *earlier)

    def after_marks(
        self,
        g: Group,
        ins: Instr,
        cta: Cta,
        marks: Marks,
        agent: Array,
        bit: Array,
        at: Array,
        where: Array | None,
        what: str,
        done: str,
    ) -> None:
        """Raises unless the accesses in ``marks`` are ordered before an access."""
        clocks = self.clocks
        used = clocks.used
        marks.fit(clocks.size)
        found = marks.mark[:used].take(at, axis=1)
        limit = clocks.order[agent[:, 0], :used].T[:, :, None]
        bad = found > limit
        if not bad.any():
            return
        others, rows, columns = np.nonzero(bad)
        loads = done == "read"
        bad = self.unordered(agent[rows, 0], bit[rows, 0], others, found[others, rows, columns], loads)
        for k in np.flatnonzero(bad).tolist():
            other, row, column = int(others[k]), int(rows[k]), int(columns[k])
            place = int(at[row, column])
            earlier = other, int(found[other, row, column]), self.sites[marks.site[other, place]]
            raise self.error(g, ins, cta, place, row, where, what, done, *earlier)

    def unordered(self, agent: Array, bit: Array, other: Array, mark: Array, loads: bool = False) -> Array:
        """Which of some suspicious pairs are races: not the same lane, and not released by the lanes in question."""
        clocks = self.clocks
        lanes = mark & LOW
        fine = (other == agent) & ((lanes & ~bit) == 0)
        warp = np.where(other < clocks.warps, other, 0)
        covered = (lanes & ~clocks.lanes[agent, warp].astype(np.uint64)) == 0
        if loads and not self.strict:
            covered |= other != agent
        fine |= (other < clocks.warps) & (mark <= clocks.part[agent, warp]) & covered
        result: Array = ~fine
        return result

    # Asynchronous copies

    def claim(self, slot: int, stamp: np.uint64) -> None:
        self.clocks.top[slot] = max(self.clocks.top[slot], stamp)

    def group(self, cta: Cta, kind: Any, number: int) -> tuple[int, np.uint64]:
        """Agent and stamp of a copy that is waited for by groups: cp.async of a warp, or bulk copies of a thread."""
        slot = self.clocks.slot((cta.index, *kind), kind[0] == "cp.async")
        stamp: np.uint64 = self.clocks.base[slot] + np.uint64(number + 1) * TICK
        return slot, stamp

    def groups_done(self, cta: Cta, warp: int, kind: Any, count: int) -> None:
        """A warp has waited for the first ``count`` groups."""
        slot = self.clocks.slots.get((cta.index, *kind))
        if slot is not None and count > 0:
            stamp = min(self.clocks.base[slot] + np.uint64(count) * TICK, self.clocks.top[slot])
            self.clocks.reached(self.agent(cta, warp), slot, stamp)

    def thread_copies(self, g: Group, ins: Instr, offset: Array, size: int, groups: Array) -> None:
        """cp.async: an ordinary store, but ordered for its own thread only after the wait for its group."""
        cta = g.cta
        cells, clocks = self.cells[cta.index], self.clocks
        agent, bit = self.who(g, None)
        at = self.places(offset, size)
        self.after_writes(g, ins, cta, cells, agent, bit, at, None, "overwrites")
        for marks in (cells.reads, cells.strong_reads, cells.strong_writes):
            if marks is not None:
                done = "written" if marks is cells.strong_writes else "read"
                self.after_marks(g, ins, cta, marks, agent, bit, at, None, "overwrites", done)
        for key in sorted(set(zip(agent[:, 0].tolist(), groups.tolist(), strict=True))):
            mine = at[(agent[:, 0] == key[0]) & (groups == key[1])]
            slot, stamp = self.group(cta, ("cp.async", key[0] % self.warps), key[1])
            cells.writer[mine] = slot
            cells.mark[mine] = stamp
            self.claim(slot, stamp)
        cells.site[at] = self.site(ins)
        clocks.touched[agent] = clocks.now[agent]

    def copies_arrive(self, g: Group, threads: Array, groups: list[int]) -> Clock:
        """cp.async.mbarrier.arrive: what the mbarrier gets when the threads' earlier copies are done."""
        clock = self.clocks.new()
        for warp in np.unique(threads >> 5).tolist():
            mine = [k for k, t in enumerate(threads.tolist()) if t >> 5 == warp]
            bits = sum(1 << int(threads[k] & 31) for k in mine)
            slot, stamp = self.group(g.cta, ("cp.async", warp), max(groups[k] for k in mine))
            self.clocks.release(clock, self.agent(g.cta, warp), bits, self.full(g.cta, warp, bits))
            clock.order[slot] = max(clock.order[slot], stamp)
        return clock

    def issue_clock(self, g: Group, warp: int, lane: int) -> Clock:
        """What is ordered before a copy that a thread issues."""
        clock = self.clocks.new()
        self.clocks.release(clock, self.agent(g.cta, warp), 1 << lane, False)
        return clock

    def copy_writes(self, g: Group, ins: Instr, warp: int, lane: int, cta: Cta, offset: int, size: int, slot: int,
                    stamp: np.uint64) -> None:  # fmt: skip
        """A copy into shared memory, at its issue by a thread."""
        cells, clocks = self.cells[cta.index], self.clocks
        agent, bit = self.agent(g.cta, warp), BITS[lane]
        part = self.range(offset, size)
        self.range_after_writes(g, ins, cta, cells, agent, bit, part, (warp, lane), "overwrites")
        for marks, done in ((cells.reads, "read"), (cells.strong_reads, "read"), (cells.strong_writes, "written")):
            if marks is None:
                continue
            marks.fit(clocks.size)
            found = marks.mark[: clocks.used, part]
            bad = found > clocks.order[agent, : clocks.used, None]
            if not bad.any():
                continue
            others, columns = np.nonzero(bad)
            mine = np.full(others.shape, agent), np.full(others.shape, bit)
            bad = self.unordered(*mine, others, found[others, columns], done == "read")
            for k in np.flatnonzero(bad).tolist():
                other, place = int(others[k]), part.start + int(columns[k])
                earlier = other, int(found[other, columns[k]]), self.sites[marks.site[other, place]]
                raise self.error(g, ins, cta, place, (warp, lane), None, "overwrites", done, *earlier)
        cells.writer[part] = slot
        cells.mark[part] = stamp
        cells.site[part] = self.site(ins)
        self.claim(slot, stamp)

    def copy_reads(self, g: Group, ins: Instr, warp: int, lane: int, offset: int, size: int, slot: int,
                   stamp: np.uint64) -> None:  # fmt: skip
        """A copy out of shared memory, at its issue: what it reads has to be ordered, and fenced for its proxy."""
        cta = g.cta
        cells, clocks = self.cells[cta.index], self.clocks
        agent, bit = self.agent(cta, warp), BITS[lane]
        part = self.range(offset, size)
        self.range_after_writes(g, ins, cta, cells, agent, bit, part, (warp, lane), "reads")
        writer = cells.writer[part]
        bad = (cells.mark[part] > clocks.fenced[agent].take(writer)) & clocks.generic.take(writer)
        if bad.any():
            place = part.start + int(np.argmax(bad))
            raise self.fence_error(g, ins, cta, cells, place, (warp, lane))
        cells.reads.fit(clocks.size)
        cells.reads.mark[slot, part] = stamp
        cells.reads.site[slot, part] = self.site(ins)
        self.claim(slot, stamp)

    def range(self, offset: int, size: int) -> slice:
        return slice(offset >> self.shift, (offset + size - 1 >> self.shift) + 1)

    def range_after_writes(self, g: Group, ins: Instr, cta: Cta, cells: Cells, agent: int, bit: Any, part: slice,
                           thread: tuple[int, int], what: str) -> None:  # fmt: skip
        writer, mark = cells.writer[part], cells.mark[part]
        bad = mark > self.clocks.order[agent].take(writer)
        if not bad.any():
            return
        columns = np.flatnonzero(bad)
        shape = columns.shape
        bad = self.unordered(np.full(shape, agent), np.full(shape, bit), writer[columns], mark[columns])
        for k in columns[bad].tolist():
            place = part.start + k
            earlier = int(writer[k]), int(mark[k]), self.sites[cells.site[place]]
            raise self.error(g, ins, cta, place, thread, None, what, "written", *earlier)

    # mbarriers

    def adopt(self, barrier: MBarrier, cta: Cta, addr: int) -> None:
        """A fresh mbarrier: copies that complete on it have a clock of their own."""
        barrier.slot = self.clocks.slot((cta.index, "mbarrier", addr), False)
        barrier.base = self.clocks.top[barrier.slot]
        barrier.races = self

    def phase_stamp(self, barrier: MBarrier) -> np.uint64:
        """The stamp of copies that complete in the current phase."""
        result: np.uint64 = barrier.base + np.uint64(barrier.phase + 1) * TICK
        return result

    def phase_done(self, barrier: MBarrier) -> None:
        """Called when a phase completes, before the count goes up."""
        clocks = self.clocks
        if barrier.done is None:
            barrier.done = clocks.new()
        if barrier.arriving is not None:
            barrier.done.join(barrier.arriving)
            barrier.arriving = None
        done = barrier.done
        size = max(done.order.size, clocks.size)
        if done.order.size < size:
            done.join(Clock(size, clocks.warps))
        done.order[barrier.slot] = self.phase_stamp(barrier)

    def arrive(self, g: Group, barrier: MBarrier, warp: int, lanes: int, relaxed: bool) -> None:
        agent = self.agent(g.cta, warp)
        clock = self.clocks.snapshots.get(agent) if relaxed else None
        if barrier.arriving is None:
            barrier.arriving = self.clocks.new()
        if clock is not None:
            barrier.arriving.join(clock)
        elif not relaxed:
            self.clocks.release(barrier.arriving, agent, lanes, self.full(g.cta, warp, lanes))

    def fence(self, g: Group, kind: str, warp: int, lanes: int) -> None:
        agent = self.agent(g.cta, warp)
        if not lanes:
            return
        if kind in ("async", "mbarrier_init"):
            for cta in self.ctas:
                for barrier in cta.mbarriers.values():
                    barrier.fenced |= barrier.initialiser == agent
        if kind == "async":
            self.clocks.fence_proxy(agent)
        elif kind in ("memory", "mbarrier_init"):
            self.clocks.fence(agent, lanes, self.full(g.cta, warp, lanes))

    def full(self, cta: Cta, warp: int, lanes: int) -> bool:
        living = int((BITS * cta.alive[warp]).sum())
        return not living & ~lanes

    def initialised(
        self, g: Group, ins: Instr, cta: Cta, addr: int, warp: int, lanes: int, proxy: bool = False
    ) -> None:
        """Initialisation has to be ordered before the use of an mbarrier, and fenced if asynchronous copies use it."""
        cells = self.cells[cta.index]
        place = addr - SHARED_BASE >> self.shift
        agent, writer, mark = self.agent(g.cta, warp), int(cells.writer[place]), cells.mark[place]
        one = np.array([agent]), np.array([np.uint64(lanes)]), np.array([writer]), np.array([mark])
        thread = warp, (lanes & -lanes).bit_length() - 1
        if mark > self.clocks.order[agent, writer] and self.unordered(*one)[0]:
            site = self.sites[cells.site[place]]
            raise self.error(
                g, ins, cta, place, thread, None, "uses the mbarrier at", "initialised", writer, int(mark), site
            )
        if proxy and mark > self.clocks.fenced[agent, writer] and not cta.mbarriers[addr].fenced:
            raise self.fence_error(g, ins, cta, cells, place, thread)

    # Messages

    def name(self, offset: int) -> str:
        """A shared address, with the variable that it lies in."""
        text = f"shared address {offset + SHARED_BASE:#x}"
        best = max(((o, n) for n, o in self.code.shared.items() if o <= offset), default=None)
        return f"{text} ({best[1]}+{offset - best[0]})" if best else text

    def describe(self, agent: int, mark: int, ins: Instr, done: str) -> str:
        """Who did the earlier access."""
        at = f"PTX line {ins.line} `{ins.text}`{ins.source}"
        if agent < self.clocks.warps:
            cta = self.ctas[agent // self.warps]
            lanes = [k for k in range(32) if mark >> k & 1]
            who = f"lane {', '.join(map(str, lanes))}" if 0 < len(lanes) < 32 else "all lanes"
            where = f"warp {agent % self.warps}" + (f" of CTA {cta.name}" if len(self.ctas) > 1 else "")
            return f"{where} ({who}) has {done} at {at}"
        return (
            f"the copy of {at} has {'written' if done == 'written' else 'read'} and which this warp has not waited for"
        )

    def error(self, g: Group, ins: Instr, cta: Cta, place: int, position: Any, where: Array | None, what: str,
              done: str, agent: int, mark: int, earlier: Instr) -> EmulatorError:  # fmt: skip
        """A race of the access at ``position`` (row, or warp and lane) with an earlier one."""
        start = self.start_of(g, ins, position, where)
        same = agent < self.clocks.warps and agent == self.agent(g.cta, start[1])
        missing = "with no bar.warp.sync" if same else "with no barrier"
        if agent >= self.clocks.warps:
            missing = "unordered"
        return SharedRace(
            f"{start[0]} {what} {self.name(place << self.shift)}"
            + (f" of CTA {cta.name}" if cta is not g.cta else "")
            + f", which {self.describe(agent, mark, earlier, done)}, {missing} between the two"
        )

    def fence_error(
        self, g: Group, ins: Instr, cta: Cta, cells: Cells, place: int, thread: tuple[int, int]
    ) -> EmulatorError:
        earlier = self.describe(
            int(cells.writer[place]), int(cells.mark[place]), self.sites[cells.site[place]], "written"
        )
        return MissingProxyFence(
            f"{self.start_of(g, ins, thread, None)[0]} reads {self.name(place << self.shift)} by the async proxy, "
            f"which {earlier}, with no fence.proxy.async between the two"
        )

    def start_of(self, g: Group, ins: Instr, position: Any, where: Array | None) -> tuple[str, int]:
        """The thread of an access, in words, and its warp."""
        if isinstance(position, tuple):
            warp, lane = position
        else:
            warp, lane = g.lane(position if where is None else int(where[position]))
        return f"{g.at(ins, warp, lane)}", warp


class _Same:
    """Whether a store writes what is there already."""

    def __init__(self, cta: Cta, offset: Array, size: int, data: Array, granule: int) -> None:
        self.cta = cta
        self.offset = offset
        self.data = data.view(np.uint8).reshape(-1, size)
        self.granule = granule

    def bytes(self, row: int, column: int) -> bytes:
        part = slice(column * self.granule, (column + 1) * self.granule)
        return self.data[row, part].tobytes()

    def there(self, row: int, column: int) -> bool:
        at = int(self.offset[row]) + column * self.granule
        shared = self.cta.shared
        assert shared.shadow is not None
        if shared.shadow[at : at + self.granule].any():
            return False
        return shared.buf[at : at + self.granule].tobytes() == self.bytes(row, column)


def lane_bits(fragment: Fragment) -> int:
    return int((BITS * fragment.mask).sum())


__all__ = ["BITS", "Races", "lane_bits"]
