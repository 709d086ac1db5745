"""Asynchronous copies: cp.async, bulk copies and tensor (TMA) copies (PTX ISA 9.7.9.25, 9.7.9.26).

With ``copies="late"`` a copy takes effect at the last moment the rules allow: it reads its source and writes its
destination at the wait that covers it, or when a warp waits for the mbarrier phase that it completes and nothing else
can run. Until then its destination holds poison and is tainted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import PendingCopies
from .machine import Cta, Group
from .memory import POISON, GlobalRegion
from .parse import Instr

if TYPE_CHECKING:
    from .clocks import Clock
    from .machine import MBarrier

Array = NDArray[Any]


@dataclass(eq=False)
class ThreadCopies:
    """One cp.async instruction: an entry per active thread."""

    ins: Instr
    thread: Array
    group: Array
    dst: Array
    src: Sequence[tuple[GlobalRegion, Array | None, Array]]
    size: int
    valid: Array  # source bytes; the rest is filled with zeros


@dataclass(eq=False)
class ThreadArrive:
    """cp.async.mbarrier.arrive: arrives when the thread's earlier cp.async are done."""

    ins: Instr
    thread: Array
    barrier: MBarrier
    counts: Array
    clock: Clock | None = None


@dataclass(eq=False)
class BulkCopy:
    """A bulk or tensor copy: ``read`` gives the data, ``write`` delivers it, ``barrier`` or ``thread`` waits for it."""

    ins: Instr
    read: Callable[[], Any]
    write: Callable[[Any], None]
    size: int
    barrier: MBarrier | None = None
    thread: int = -1
    group: int = 0
    target: tuple[Cta, int, int] | None = None  # CTA, offset and size of a shared destination
    clock: Clock | None = None  # of the thread that issued it
    data: Any = None
    was_read: bool = False


@dataclass
class CopyQueue:
    """Everything that one CTA has issued and that has not taken effect."""

    cta: Cta
    eager: bool
    thread_copies: list[ThreadCopies] = field(default_factory=list)
    thread_arrives: list[ThreadArrive] = field(default_factory=list)
    thread_group: dict[int, int] = field(default_factory=dict)
    bulk: list[BulkCopy] = field(default_factory=list)
    bulk_group: dict[int, int] = field(default_factory=dict)

    # cp.async: groups are per thread

    def issue_threads(self, g: Group, copy: ThreadCopies) -> None:
        copy.group = np.array([self.thread_group.get(int(t), 0) for t in copy.thread])
        if self.cta.options.observer is not None:
            self.cta.options.observer.copy(self.cta, copy)
        if self.cta.races is not None:
            self.cta.races.thread_copies(g, copy.ins, copy.dst, copy.size, copy.group)
        self.thread_copies.append(copy)
        if self.eager:
            self._run_threads(copy, np.ones(copy.thread.size, bool))
        else:
            poison(self.cta, copy.dst, copy.size)

    def commit_threads(self, threads: Array) -> None:
        for t in threads.tolist():
            self.thread_group[t] = self.thread_group.get(t, 0) + 1

    def wait_threads(self, threads: Array, keep: int | None) -> None:
        """Completes all but the ``keep`` latest groups of these threads; None completes everything."""
        limit = np.full(self.cta.alive.size, -1, np.int64)
        for t in threads.tolist():
            limit[t] = np.iinfo(np.int64).max if keep is None else self.thread_group.get(t, 0) - keep
        for copy in list(self.thread_copies):
            self._run_threads(copy, copy.group < limit[copy.thread])
        self._arrivals()
        races = self.cta.races
        if races is not None:
            done = {t >> 5: 0 for t in threads.tolist()}
            for t in threads.tolist():
                group = self.thread_group.get(t, 0) + (1 if keep is None else -keep)
                done[t >> 5] = max(done[t >> 5], group)
            for warp, group in done.items():
                races.groups_done(self.cta, warp, ("cp.async", warp), group)

    def _run_threads(self, copy: ThreadCopies, now: Array) -> None:
        if not now.any():
            return
        if self.cta.options.observer is not None:
            self.cta.options.observer.landed(self.cta, copy)
        shared = self.cta.shared
        size = copy.size
        data = np.zeros((copy.dst.size, size), np.uint8)
        bits = np.zeros((copy.dst.size, size), np.uint8)
        for region, where, offset in copy.src:
            lanes = np.arange(copy.dst.size) if where is None else where
            ok = copy.valid[lanes] > 0
            index = offset[ok] // size
            data[lanes[ok]] = region.view(np.uint8, size).take(index, axis=0)
            if region.shadow is not None:
                bits[lanes[ok]] = region.view(np.uint8, size, True).take(index, axis=0)
        beyond = np.arange(size) >= copy.valid[:, None]
        data[beyond] = 0
        bits[beyond] = 0
        index = copy.dst[now] // size
        shared.view(np.uint8, size)[index] = data[now]
        shared.view(np.uint8, size, True)[index] = bits[now]
        self.cta.events += 1
        self.thread_copies.remove(copy)
        rest = ~now
        if rest.any():
            back = np.cumsum(rest) - 1
            parts = []
            for region, where, offset in copy.src:
                lanes = np.arange(copy.dst.size) if where is None else where
                left = rest[lanes]
                parts.append((region, back[lanes[left]], offset[left]))
            self.thread_copies.append(
                ThreadCopies(
                    copy.ins, copy.thread[rest], copy.group[rest], copy.dst[rest], parts, size, copy.valid[rest]
                )
            )

    def issue_arrive(self, g: Group, item: ThreadArrive) -> None:
        if self.cta.races is not None:
            groups = [self.thread_group.get(t, 0) for t in item.thread.tolist()]
            item.clock = self.cta.races.copies_arrive(g, item.thread, groups)
        self.thread_arrives.append(item)
        if self.eager:
            self._arrivals()

    def _arrivals(self) -> None:
        busy = {int(t) for copy in self.thread_copies for t in copy.thread}
        for item in list(self.thread_arrives):
            done = np.array([int(t) not in busy for t in item.thread])
            if done.any():
                item.barrier.pending -= int(item.counts[done].sum())
                if item.clock is not None:
                    item.barrier.arriving = item.clock.plus(item.barrier.arriving)
                item.barrier.settle()
                self.cta.events += 1
                keep = ~done
                self.thread_arrives.remove(item)
                if keep.any():
                    self.thread_arrives.append(
                        ThreadArrive(item.ins, item.thread[keep], item.barrier, item.counts[keep], item.clock)
                    )

    # Bulk copies

    def issue_bulk(self, copy: BulkCopy) -> None:
        if copy.thread >= 0:
            copy.group = self.bulk_group.get(copy.thread, 0)
        if self.cta.options.observer is not None:
            self.cta.options.observer.copy(self.cta, copy)
        self.bulk.append(copy)
        if self.eager:
            self.land(copy)
        elif copy.target is not None:
            cta, offset, size = copy.target
            cta.shared.buf[offset : offset + size] = POISON
            assert cta.shared.shadow is not None
            cta.shared.shadow[offset : offset + size] = 0xFF

    def commit_bulk(self, thread: int) -> None:
        self.bulk_group[thread] = self.bulk_group.get(thread, 0) + 1

    def wait_bulk(self, thread: int, keep: int, read_only: bool) -> None:
        limit = self.bulk_group.get(thread, 0) - keep
        for copy in [c for c in self.bulk if c.thread == thread and c.group < limit]:
            self._read(copy)
            if not read_only:
                self.land(copy)
        if self.cta.races is not None:
            self.cta.races.groups_done(self.cta, thread >> 5, ("bulk", thread), limit)

    def _read(self, copy: BulkCopy) -> None:
        if not copy.was_read:
            copy.data = copy.read()
            copy.was_read = True

    def land(self, copy: BulkCopy) -> None:
        """Performs a copy and tells its mbarrier."""
        if self.cta.options.observer is not None:
            self.cta.options.observer.landed(self.cta, copy)
        self._read(copy)
        copy.write(copy.data)
        self.bulk.remove(copy)
        self.cta.events += 1
        if copy.barrier is not None:
            if copy.clock is not None:
                copy.barrier.arriving = copy.clock.plus(copy.barrier.arriving)
            copy.barrier.tx -= copy.size
            copy.barrier.settle()

    def land_for(self, barrier: MBarrier) -> bool:
        """Lands what the current phase of an mbarrier still waits for; says whether anything did."""
        phase = barrier.phase
        moved = False
        for item in [a for a in self.thread_arrives if a.barrier is barrier]:
            threads = set(item.thread.tolist())
            for copy in list(self.thread_copies):
                self._run_threads(copy, np.array([int(t) in threads for t in copy.thread]))
            self._arrivals()
            moved = True
            if barrier.phase != phase:
                return True
        for bulk in [c for c in self.bulk if c.barrier is barrier]:
            self.land(bulk)
            moved = True
            if barrier.phase != phase:
                break
        return moved

    def finish(self) -> None:
        """At the CTA's end only global writes whose source was read may be outstanding; they land now."""
        unfinished = [c.ins for c in self.bulk if c.barrier is not None or not c.was_read]
        unfinished += [c.ins for c in self.thread_copies]
        if unfinished:
            ins = unfinished[0]
            raise PendingCopies(
                f"CTA {self.cta.name} ended before the copy of PTX line {ins.line} `{ins.text}` was waited for"
            )
        for copy in list(self.bulk):
            self.land(copy)

    def describe(self, owner: Cta, offset: int) -> str:
        """The pending copy that covers a byte of a CTA's shared memory, if any."""
        for copy in self.bulk:
            if copy.target is not None:
                cta, start, size = copy.target
                if cta is owner and start <= offset < start + size:
                    return f"the copy of PTX line {copy.ins.line}, which has not been waited for"
        for item in self.thread_copies if owner is self.cta else ():
            if ((item.dst <= offset) & (offset < item.dst + item.size)).any():
                return f"the cp.async of PTX line {item.ins.line}, which has not been waited for"
        return ""


def poison(cta: Cta, offsets: Array, size: int) -> None:
    index = offsets // size
    cta.shared.view(np.uint8, size)[index] = POISON
    cta.shared.view(np.uint8, size, True)[index] = 0xFF


def thread_ids(g: Group) -> Array:
    """Linear thread numbers of the active lanes."""
    ids = np.array(g.warps)[:, None] * 32 + np.arange(32)
    return g.pick(ids)
