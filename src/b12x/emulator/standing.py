"""Reports of a deadlock, or of a launch that was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .machine import Cta, Fragment

if TYPE_CHECKING:
    from .schedule import Scheduler


def standing(scheduler: Scheduler) -> str:
    """Where every warp stands, and which copies are pending."""
    lines: list[str] = []
    found: list[tuple[Cta, Fragment, str]] = []
    for cta, f in scheduler.parked:
        detail = ", ".join(
            f"mbarrier {hex(a)} in phase {b.phase} waits for {b.pending} arrivals and {b.tx} bytes"
            for b in f.barriers
            for a, other in cta.mbarriers.items()
            if other is b
        )
        found.append((cta, f, f"waits ({detail or 'cluster barrier'})"))
    for place in scheduler.places.values():
        found += [(place.cta, f, "can go on") for f in place.fragments.values()]
    for cta, f in scheduler.apart.values():
        found.append((cta, f, "waits for the other lanes of its warp"))
    for cta in scheduler.ctas:
        for warp in range(cta.alive.shape[0]):
            for f, _ in scheduler.at_warp_barrier.get((id(cta), warp), []):
                found.append((cta, f, "waits for the other lanes of its warp"))
        for number, barrier in cta.barriers.items():
            for f in barrier.waiting:
                state = f"{barrier.arrived} of {barrier.expected} threads have arrived"
                found.append((cta, f, f"waits at barrier {number}, where {state}"))
    for cta, f, what in sorted(found, key=lambda s: (s[0].ctaid, s[1].warp)):
        ins = cta.code.ops[f.pc].ins
        who = f"CTA {cta.name} warp {f.warp} ({int(f.mask.sum())} lanes)"
        lines.append(f"  {who} at PTX line {ins.line} `{ins.text}`{ins.source}: {what}")
    for cta in scheduler.ctas:
        for ins in [*(c.ins for c in cta.copies.bulk), *(c.ins for c in cta.copies.thread_copies)]:
            lines.append(f"  CTA {cta.name}: pending is the copy of PTX line {ins.line} `{ins.text}`{ins.source}")
    return "\n".join(lines)
