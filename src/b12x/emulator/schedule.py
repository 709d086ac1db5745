"""Runs CTAs: picks which warps execute next, handles divergence, barriers and waits, and finds deadlocks.

PTX ISA 3.1 (thread scheduling), 9.7.12 (control flow), 9.7.13 (synchronisation). The lanes of a warp that stand at
one place form a fragment; fragments meet again at the lowest program counter, and warps at one place run together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks import steps
from .clocks import ALL_LANES, Clock
from .decode import Op
from .errors import BarrierError, Deadlock, StepLimit
from .machine import Cta, Fragment, Group, MBarrier, NamedBarrier
from .memory import RANK_SHIFT
from .options import Options, Stats
from .races import BITS, lane_bits
from .standing import standing

Array = NDArray[Any]
LANES = np.arange(32, dtype=np.uint32)
#: After this many picks the place that has waited longest runs, so that a polling loop cannot starve the others.
FAIRNESS = 64
#: How often (in turns) to look for warps that poll in vain, and after how many polls they do.
PATIENCE, POLLS = 256, 100
#: Rounds in which every wait times out and nothing happens before a deadlock is declared.
ROUNDS = 4
#: The phase in an mbarrier state (the rest is the pending count).
PHASE = (1 << 40) - 1


@dataclass
class _Place:
    """Fragments of one CTA that are ready at one program counter."""

    cta: Cta
    pc: int
    since: int
    fragments: dict[int, Fragment]


@dataclass
class _Cluster:
    """The barrier of one cluster; ``arrived_in`` is the phase that each warp has arrived in."""

    members: list[Cta]
    phase: int = 0
    arrived: int = 0
    arrived_in: dict[tuple[int, int], int] = field(default_factory=dict)
    arriving: Clock | None = None
    done: Clock | None = None


class Scheduler:
    """CTAs that run at the same time (of a cluster, or of several launches) until all their threads have ended."""

    def __init__(self, ctas: list[Cta], options: Options, stats: Stats, rng: np.random.Generator) -> None:
        self.ctas = ctas
        self.options = options
        self.stats = stats
        self.rng = rng
        self.random = options.schedule == "random"
        self.places: dict[tuple[int, int], _Place] = {}
        self.parked: list[tuple[Cta, Fragment]] = []
        self.apart: dict[tuple[int, int, int], tuple[Cta, Fragment]] = {}  # waiting for the rest of their warp
        self.at_warp_barrier: dict[tuple[int, int], list[tuple[Fragment, Array]]] = {}
        self.turn = 0
        self.seen_events = 0
        self.idle_rounds = 0
        self.clusters = {id(c.cluster): _Cluster(c.cluster) for c in ctas}
        self.last_turn: dict[int, int] = {}
        self.seen_progress = -1
        for cta in ctas:
            for warp in range(cta.alive.shape[0]):
                mask = cta.alive[warp].copy()
                self.add(cta, Fragment(warp, 0, mask, bool(mask.all())))

    # Places

    def add(self, cta: Cta, fragment: Fragment) -> None:
        """Puts a fragment where it stands; it merges with the rest of its warp if that is there."""
        other = self.apart.pop((id(cta), fragment.pc, fragment.warp), None)
        if other is not None:
            fragment.mask = fragment.mask | other[1].mask
            fragment.full = bool(fragment.mask.all())
        key = (id(cta), fragment.pc)
        place = self.places.get(key)
        if place is None:
            self.places[key] = _Place(cta, fragment.pc, self.turn, {fragment.warp: fragment})
            return
        old = place.fragments.get(fragment.warp)
        if old is not None:
            fragment.mask = fragment.mask | old.mask
            fragment.full = bool(fragment.mask.all())
        place.fragments[fragment.warp] = fragment

    def move(self, cta: Cta, fragment: Fragment, pc: int) -> None:
        fragment.pc = pc
        fragment.ready = None
        fragment.timed_out = fragment.tried = False
        self.add(cta, fragment)

    def run(self) -> None:
        limit = self.options.max_steps if self.options.max_steps is not None else float("inf")
        while True:
            events = sum(c.events for c in self.ctas)
            if events != self.seen_events:
                self.seen_events = events
                self.idle_rounds = 0
                self.wake()
            if not self.places:
                if not any(c.alive.any() for c in self.ctas):
                    break
                if not self.unblock():
                    raise Deadlock(f"no warp can go on:\n{standing(self)}")
                continue
            if self.turn % PATIENCE == 0 and self.only_polling() and not self.unblock():
                raise Deadlock(f"all warps that can go on poll memory that nobody changes:\n{standing(self)}")
            if self.stats.steps > limit:
                raise StepLimit(f"more than {limit} steps; the warps stand here:\n{standing(self)}")
            cta, fragments = self.pick()
            self.turn += 1
            for full in (True, False):
                chosen = [f for f in fragments if f.full is full]
                for part in progressions(chosen):
                    self.execute(cta, part)

    def pick(self) -> tuple[Cta, list[Fragment]]:
        """Removes and returns the fragments that run next; all stand at one place."""
        if self.random:
            return self.pick_random()
        if self.turn % FAIRNESS == FAIRNESS - 1:
            key = min(self.places, key=lambda k: self.places[k].since)
        elif len(self.ctas) == 1:
            key = min(self.places, key=lambda k: k[1])
        else:  # CTAs take turns
            key = min(self.places, key=lambda k: (self.last_turn.get(k[0], -1), k[1]))
            self.last_turn[key[0]] = self.turn
        place = self.places.pop(key)
        return place.cta, [place.fragments[w] for w in sorted(place.fragments)]

    def pick_random(self) -> tuple[Cta, list[Fragment]]:
        """A random warp at its lowest place; sometimes any place, and sometimes with others that stand there."""
        keys = list(self.places)
        key = keys[int(self.rng.integers(len(keys)))]
        place = self.places[key]
        warps = sorted(place.fragments)
        warp = warps[int(self.rng.integers(len(warps)))]
        if self.turn % FAIRNESS != FAIRNESS - 1:
            for k, other in self.places.items():
                if k[0] == key[0] and k[1] < place.pc and warp in other.fragments:
                    key, place = k, other
        chosen = [warp]
        if self.rng.random() < 0.5:
            chosen += [w for w in place.fragments if w != warp and self.rng.random() < 0.5]
        out = [place.fragments.pop(w) for w in sorted(chosen)]
        if not place.fragments:
            del self.places[key]
        return place.cta, out

    def only_polling(self) -> bool:
        """Whether every warp that can go on has polled often since anything changed in memory."""
        progress = sum(c.events + c.stores for c in self.ctas)
        if progress != self.seen_progress:
            self.seen_progress = progress
            for cta in self.ctas:
                cta.polls[:] = 0
            return False
        return all(p.cta.polls[w] >= POLLS for p in self.places.values() for w in p.fragments)

    # Execution

    def execute(self, cta: Cta, fragments: list[Fragment]) -> None:
        """Runs fragments from their place to the end of the basic block."""
        code, pc = cta.code, fragments[0].pc
        warps = [f.warp for f in fragments]
        step = warps[1] - warps[0] if len(warps) > 1 else 1
        g = cta.file.group(cta, warps[0], warps[-1] + 1, step)
        end = code.ends[pc]
        self.stats.steps += end - pc + 1
        self.stats.instructions += (end - pc + 1) * len(warps)
        if self.options.observer is not None:
            self.options.observer.block(cta, warps, code.ops[pc : end + 1])
        tainted = cta.tainted
        if fragments[0].full:
            g.mask = None
            for op in steps(code, pc):
                if tainted:
                    op.checked(g)
                else:
                    op.run(g)
        else:
            g.mask = np.stack([f.mask for f in fragments])
            for at in range(pc, end):
                op = code.ops[at]
                if op.converge is not None and op.ins.guard is None and not self.converged(g, op, fragments, at):
                    return
                if tainted:
                    op.checked(g)
                else:
                    op.run(g)
        op = code.ops[end]
        for f in fragments:
            f.pc = end
        if op.kind:
            if tainted:
                cta.refuse(g, op.ins, op.srcs, "control flow")
            act = getattr(self, f"do_{op.kind}")
            if op.guard is None:
                act(g, op, fragments, end)
                return
            for part in self.guarded(g, op, fragments):
                g = cta.file.group(cta, part[0].warp, part[-1].warp + 1, part[1].warp - part[0].warp if part[1:] else 1)
                g.mask = None if part[0].full else np.stack([f.mask for f in part])
                act(g, op, part, end)
        else:
            for f in fragments:
                self.move(cta, f, end)

    def converged(self, g: Group, op: Op, fragments: list[Fragment], at: int) -> bool:
        """Whether all member lanes are here; if not, the warps that miss some wait for them."""
        assert op.converge is not None
        assert g.mask is not None
        words = g.u32[op.converge >> 2]
        first = np.argmax(g.mask, axis=1)
        named = (words[np.arange(g.n), first][:, None] >> LANES) & np.uint32(1) != 0
        missing = (named & g.cta.alive[list(g.warps)] & ~g.mask).any(axis=1)
        if not missing.any():
            return True
        for f, lacks in zip(fragments, missing.tolist(), strict=True):
            f.pc = at
            if lacks:
                self.set_apart(g.cta, f)
            else:
                self.add(g.cta, f)
        return False

    def set_apart(self, cta: Cta, fragment: Fragment) -> None:
        key = (id(cta), fragment.pc, fragment.warp)
        place = self.places.get((id(cta), fragment.pc))
        if key in self.apart or (place is not None and fragment.warp in place.fragments):
            self.add(cta, fragment)
        else:
            self.apart[key] = (cta, fragment)

    # Control flow

    def guarded(self, g: Group, op: Op, fragments: list[Fragment]) -> list[list[Fragment]]:
        """Lets lanes pass whose guard predicate is false; groups the others as ``execute`` wants them."""
        assert op.guard is not None
        p = g.p[op.guard >> 2]
        yes = (~p if op.ins.guard_neg else p) & g.active()
        here: list[Fragment] = []
        for k, f in enumerate(fragments):
            lanes = yes[k].copy()
            if lanes.any():
                here.append(Fragment(f.warp, f.pc, lanes, bool(lanes.all())))
            if (f.mask & ~lanes).any():
                self.move(g.cta, Fragment(f.warp, 0, f.mask & ~lanes, False), f.pc + 1)
        return [part for full in (True, False) for part in progressions([f for f in here if f.full is full])]

    def split(self, g: Group, fragments: list[Fragment], taken: Array, target: int, other: int) -> None:
        """Moves the lanes where ``taken`` holds to one place and the rest to another."""
        here = g.active()
        yes = taken & here
        for k, f in enumerate(fragments):
            lanes = yes[k]
            if not lanes.any():
                self.move(g.cta, f, other)
            elif (lanes == here[k]).all():
                self.move(g.cta, f, target)
            else:
                self.move(g.cta, Fragment(f.warp, 0, lanes.copy(), False), target)
                rest = here[k] & ~lanes
                self.move(g.cta, Fragment(f.warp, 0, rest, False), other)

    def do_bra(self, g: Group, op: Op, fragments: list[Fragment], pc: int) -> None:
        guard, target = op.data
        if guard is None:
            for f in fragments:
                self.move(g.cta, f, target)
            return
        p = g.p[guard >> 2]
        self.split(g, fragments, ~p if op.ins.guard_neg else p, target, pc + 1)

    def do_brx(self, g: Group, op: Op, fragments: list[Fragment], pc: int) -> None:
        src, targets = op.data
        index = src.get(g)
        if (g.pick(index) >= len(targets)).any():
            raise BarrierError(f"{g.where(op.ins)}: branch index outside its table")
        for k, f in enumerate(fragments):
            for value in np.unique(index[k][f.mask]).tolist():
                lanes = f.mask & (index[k] == value)
                self.move(g.cta, Fragment(f.warp, 0, lanes, bool(lanes.all())), targets[value])

    def do_exit(self, g: Group, op: Op, fragments: list[Fragment], pc: int) -> None:
        cta, here = g.cta, g.active()
        gone = here
        if op.data is not None:
            p = g.p[op.data >> 2]
            gone = here & (~p if op.ins.guard_neg else p)
        for k, f in enumerate(fragments):
            cta.alive[f.warp] &= ~gone[k]
            rest = here[k] & ~gone[k]
            if rest.any():
                self.move(cta, Fragment(f.warp, 0, rest, bool(rest.all())), pc + 1)
        cta.events += 1
        leaving = {f.warp for f in fragments}
        for key, (owner, f) in list(self.apart.items()):
            if owner is cta and f.warp in leaving:
                del self.apart[key]
                self.add(cta, f)
        for warp in leaving:
            self.settle_warp(cta, warp)
        for number, barrier in cta.barriers.items():
            if barrier.whole and barrier.waiting:
                barrier.expected = 32 * int(cta.alive.any(axis=1).sum())
                self.settle(cta, number, barrier)
        self.settle_cluster(self.clusters[id(cta.cluster)])
        if not cta.alive.any():
            cta.copies.finish()

    # Barriers

    def do_bar(self, g: Group, op: Op, fragments: list[Fragment], pc: int) -> None:
        cta = g.cta
        action, number, count, _, _, pred = op.data
        for k, f in enumerate(fragments):
            if (f.mask != cta.alive[f.warp]).any():  # a barrier counts warps, not parts of them
                self.set_apart(cta, f)
                continue
            lane = int(np.argmax(f.mask))
            which = int(number.get(g)[k, lane])
            expected = int(count.get(g)[k, lane]) if count is not None else 32 * int(cta.alive.any(axis=1).sum())
            if which > 15 or expected % 32 or not expected:
                raise BarrierError(f"{g.where(op.ins)}: barrier {which} with {expected} threads")
            barrier = cta.barriers.setdefault(which, NamedBarrier())
            if barrier.arrived and (barrier.expected != expected or barrier.whole != (count is None)):
                raise BarrierError(
                    f"{g.where(op.ins)}: barrier {which} is used with {expected} threads, by earlier arrivals with "
                    f"{barrier.expected}"
                )
            barrier.expected, barrier.whole = expected, count is None
            barrier.arrived += 32
            if cta.races is not None:
                if barrier.clock is None:
                    barrier.clock = cta.races.clocks.new()
                cta.races.clocks.release(barrier.clock, cta.races.agent(cta, f.warp), ALL_LANES, True)
            if barrier.arrived > expected:
                raise BarrierError(f"{g.where(op.ins)}: more than {expected} threads arrive at barrier {which}")
            if pred is not None:
                barrier.votes.append((f, pred.get(g)[k].copy()))
            if action == "arrive":
                self.move(cta, f, pc + 1)
            else:
                barrier.waiting.append(f)
            self.settle(cta, which, barrier)

    def settle(self, cta: Cta, number: int, barrier: NamedBarrier) -> None:
        """Releases a barrier whose threads have all arrived."""
        if barrier.arrived < barrier.expected or not barrier.arrived:
            return
        waiting, votes, clock = barrier.waiting, barrier.votes, barrier.clock
        barrier.arrived, barrier.waiting, barrier.votes, barrier.clock = 0, [], [], None
        cta.events += 1
        total = sum(int((v & f.mask).sum()) for f, v in votes)
        threads = sum(int(f.mask.sum()) for f, _ in votes)
        for f in waiting:
            if cta.races is not None and clock is not None:
                cta.races.clocks.acquire(cta.races.agent(cta, f.warp), clock)
            _, _, _, reduction, dst, _ = cta.code.ops[f.pc].data
            if dst is not None:
                g = cta.file.group(cta, f.warp, f.warp + 1, 1)
                g.mask = f.mask[None]
                result = {"popc": total, "and": total == threads, "or": total > 0}[reduction]
                dst.put(g, np.full((1, 32), result, dst.type.dtype))
                cta.clear_shadow(g, dst.rid)
            self.move(cta, f, f.pc + 1)

    def do_warpsync(self, g: Group, op: Op, fragments: list[Fragment], pc: int) -> None:
        """The lanes may arrive at different bar.warp.sync; they leave together."""
        races = g.cta.races
        if races is not None:
            for f in fragments:
                races.clocks.warp_sync(races.agent(g.cta, f.warp))
        if g.mask is None:
            for f in fragments:
                self.move(g.cta, f, pc + 1)
            return
        words = op.data.get(g)
        for k, f in enumerate(fragments):
            named = (words[k, int(np.argmax(f.mask))] >> LANES) & np.uint32(1) != 0
            self.at_warp_barrier.setdefault((id(g.cta), f.warp), []).append((f, named))
            self.settle_warp(g.cta, f.warp)

    def settle_warp(self, cta: Cta, warp: int) -> None:
        key = (id(cta), warp)
        waiting = self.at_warp_barrier.get(key, [])
        here = np.zeros(32, bool)
        for f, _ in waiting:
            here |= f.mask
        leaving = [f for f, named in waiting if not (named & cta.alive[warp] & ~here).any()]
        if leaving:
            self.at_warp_barrier[key] = [(f, named) for f, named in waiting if f not in leaving]
            for f in leaving:
                self.move(cta, f, f.pc + 1)

    def do_cluster(self, g: Group, op: Op, fragments: list[Fragment], pc: int) -> None:
        cta = g.cta
        action, relaxed = op.data
        cluster = self.clusters[id(cta.cluster)]
        for f in fragments:
            key = (id(cta), f.warp)
            if action == "arrive":
                self.cluster_release(cluster, cta, f, relaxed)
                cluster.arrived_in[key] = cluster.phase
                cluster.arrived += int(f.mask.sum())
                self.move(cta, f, pc + 1)
            else:
                if key not in cluster.arrived_in:
                    raise BarrierError(f"{g.where(op.ins)}: barrier.cluster.wait without arrive")
                phase = cluster.arrived_in[key]
                if cluster.phase > phase:
                    self.leave_cluster_barrier(cta, f)
                else:
                    f.ready = lambda phase=phase: cluster.phase > phase
                    self.parked.append((cta, f))
        self.settle_cluster(cluster)

    def cluster_release(self, cluster: _Cluster, cta: Cta, f: Fragment, relaxed: bool) -> None:
        races = cta.races
        if races is None:
            return
        agent = races.agent(cta, f.warp)
        # earlier phases stay in: a warp that waits for this one has waited for them
        clock = races.clocks.new()
        clock.join(cluster.arriving or clock)
        if not relaxed:
            bits = lane_bits(f)
            races.clocks.release(clock, agent, bits, races.full(cta, f.warp, bits))
        elif agent in races.clocks.snapshots:
            clock.join(races.clocks.snapshots[agent])
        cluster.arriving = clock

    def leave_cluster_barrier(self, cta: Cta, f: Fragment) -> None:
        done = self.clusters[id(cta.cluster)].done
        if cta.races is not None and done is not None:
            cta.races.clocks.acquire(cta.races.agent(cta, f.warp), done)
        self.move(cta, f, f.pc + 1)

    def settle_cluster(self, cluster: _Cluster) -> None:
        expected = sum(int(c.alive.sum()) for c in cluster.members)
        if expected and cluster.arrived >= expected:
            cluster.arrived = 0
            cluster.phase += 1
            cluster.done = cluster.arriving
            cluster.members[0].events += 1

    # mbarrier waits

    def do_wait(self, g: Group, op: Op, fragments: list[Fragment], pc: int) -> None:
        """Warps whose phases are complete go on; the others are parked until they are, or nothing else can run."""
        cta = g.cta
        pred, _, _, parity, relaxed = op.data

        def done(barrier: MBarrier, v: int) -> bool:
            return (barrier.phase & 1) != (v & 1) if parity else barrier.phase != v & PHASE

        result = np.zeros((g.n, 32), bool)
        mask = np.zeros((g.n, 32), bool)
        leaving = []
        for k, (f, wants) in enumerate(zip(fragments, self.awaited(g, op, fragments), strict=True)):
            complete = [done(barrier, v) for barrier, v, _ in wants]
            impatient = self.random and not f.tried and self.rng.random() < 0.25
            if f.timed_out or impatient or all(complete):
                for yes, (barrier, _, lanes) in zip(complete, wants, strict=True):
                    result[k][lanes] = yes
                    if yes and cta.races is not None and barrier.done is not None and not relaxed:
                        cta.races.clocks.acquire(cta.races.agent(cta, f.warp), barrier.done)
                mask[k] = f.mask
                leaving.append(f)
                continue
            f.tried = True
            f.barriers = [barrier for barrier, _, _ in wants]
            f.ready = lambda wants=wants: all(done(barrier, v) for barrier, v, _ in wants)
            self.parked.append((cta, f))
        if leaving:
            old, g.mask = g.mask, mask
            pred.put(g, result)
            if pred.rid in cta.tainted:
                cta.clear_shadow(g, pred.rid)
            g.mask = old
            for f in leaving:
                self.move(cta, f, pc + 1)

    def awaited(self, g: Group, op: Op, fragments: list[Fragment]) -> list[list[tuple[MBarrier, int, Array]]]:
        """For each warp the mbarriers that its lanes name, the phase or parity, and the lanes."""
        _, addr, expected, *_ = op.data
        places, values = addr(g), expected.get(g)
        here = g.active()
        warps, first = np.arange(g.n), np.argmax(here, axis=1)
        a0, v0 = places[warps, first], values[warps, first]
        same = (places == a0[:, None]) & (values == v0[:, None])
        if (same | ~here).all():
            return [
                [(self.mbarrier(g, op, a, f.warp, f.mask), v, f.mask)]
                for a, v, f in zip(a0.tolist(), v0.tolist(), fragments, strict=True)
            ]
        out = []
        for k, f in enumerate(fragments):
            pairs = sorted(set(zip(places[k][f.mask].tolist(), values[k][f.mask].tolist(), strict=True)))
            lanes = [f.mask & (places[k] == a) & (values[k] == v) for a, v in pairs]
            out.append([(self.mbarrier(g, op, a, f.warp, m), v, m) for (a, v), m in zip(pairs, lanes, strict=True)])
        return out

    def mbarrier(self, g: Group, op: Op, address: int, warp: int, lanes: Array) -> MBarrier:
        owner = g.cta.peer(g, op.ins, address >> RANK_SHIFT)
        barrier = owner.mbarriers.get(address & ((1 << RANK_SHIFT) - 1))
        if barrier is None:
            raise BarrierError(f"{g.where(op.ins)}: no initialised mbarrier at shared address {address:#x}")
        if g.cta.races is not None:
            g.cta.races.initialised(g, op.ins, owner, barrier.address, warp, int((BITS * lanes).sum()))
        return barrier

    def wake(self) -> None:
        """Makes parked fragments ready whose condition holds."""
        still = []
        for cta, f in self.parked:
            if f.ready is not None and f.ready():
                f.ready = None
                self.wake_one(cta, f)
            else:
                still.append((cta, f))
        self.parked = still

    def wake_one(self, cta: Cta, f: Fragment) -> None:
        if cta.code.ops[f.pc].kind == "cluster":
            self.leave_cluster_barrier(cta, f)
        else:
            self.add(cta, f)

    def unblock(self) -> bool:
        """Nothing can run: let a copy land that someone waits for, else let waits time out. False is a deadlock."""
        waiting = [(c, f) for c, f in self.parked if f.barriers and cta_kind(c, f) == "wait"]
        order = self.rng.permutation(len(waiting)) if self.random else range(len(waiting))
        for k in order:
            for barrier in waiting[int(k)][1].barriers:
                for cta in self.ctas:
                    if cta.copies.land_for(barrier):
                        return True
        if not waiting or self.idle_rounds >= ROUNDS:
            return False
        self.idle_rounds += 1
        for cta, f in waiting:
            f.timed_out = True
            self.parked.remove((cta, f))
            self.add(cta, f)
        return True


def cta_kind(cta: Cta, f: Fragment) -> str:
    return cta.code.ops[f.pc].kind


def progressions(fragments: list[Fragment]) -> list[list[Fragment]]:
    """Splits fragments, sorted by warp, into runs of evenly spaced warps, which are slices of the register file."""
    out: list[list[Fragment]] = []
    for f in fragments:
        run = out[-1] if out else None
        if run is None or (len(run) > 1 and f.warp - run[-1].warp != run[1].warp - run[0].warp):
            out.append([f])
        else:
            run.append(f)
    return out
