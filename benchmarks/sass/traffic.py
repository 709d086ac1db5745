"""What the emulator sees of shared memory: wavefronts against the ideal, bytes in flight, and who stores meanwhile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import b12x
from b12x import emulator
from b12x.verify.case import Case

#: Banks of shared memory and bytes of each: one wavefront moves a word of every bank.
BANKS, WORD = 32, 4
WAVEFRONT = BANKS * WORD
#: Bytes of an access -> lanes whose accesses share a wavefront where none conflict.
LANES = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}


def wavefronts(offsets: Sequence[int], size: int) -> tuple[int, int]:
    """Wavefronts that one warp's access takes, and the least it could for the words that it touches.

    Lanes are taken in groups of 128 bytes. In a group, a bank delivers one word a wavefront, to all who want it.
    """
    count = least = 0
    for first in range(0, len(offsets), LANES[size]):
        words = {
            word
            for offset in offsets[first : first + LANES[size]]
            for word in range(offset // WORD, (offset + size - 1) // WORD + 1)
        }
        count += max(Counter(word % BANKS for word in words).values())
        least += -(-len(words) // BANKS)
    return count, least


@dataclass
class Kind:
    """All accesses of one kind: how many by a warp, their wavefronts, and the least there could be."""

    accesses: int = 0
    wavefronts: int = 0
    least: int = 0

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.least


@dataclass(eq=False)  # targets are kept by their options, an observer among them
class Traffic:
    """An observer that counts. ``lines`` has the conflicts of each PTX line that has some."""

    kinds: dict[str, Kind] = field(default_factory=lambda: defaultdict(Kind))
    lines: Counter[str] = field(default_factory=Counter)
    multiplies: int = 0
    copied: int = 0
    in_flight: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _landed: set[tuple[int, int]] = field(default_factory=set)
    _known: dict[tuple[int, bytes], tuple[int, int]] = field(default_factory=dict)
    _kept: dict[int, Any] = field(default_factory=dict)
    #: For each warp what it did, in the order of all: (moment, is a multiply).
    trace: dict[tuple[int, int], list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))
    _moment: int = 0

    def block(self, cta: Any, warps: Sequence[int], ops: Sequence[Any]) -> None:
        self._kept[id(cta)] = cta  # so that no other takes its number
        for op in ops:
            multiply = op.mma is not None
            if multiply:
                self.multiplies += len(warps)
            if multiply or _stores_global(op.ins):
                self._moment += 1
                for warp in warps:
                    self.trace[id(cta), warp].append((self._moment, multiply))

    def shared(self, cta: Any, ins: Any, warps: NDArray[Any], offsets: NDArray[Any], size: int, write: bool) -> None:
        kind = self.kinds[_kind(ins, size)]
        offsets = offsets.astype(np.int64)
        for warp in np.unique(warps):
            mine = offsets[warps == warp]
            key = (size, (mine - mine[0] // WAVEFRONT * WAVEFRONT).tobytes())
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = wavefronts(np.frombuffer(key[1], np.int64).tolist(), size)
            kind.accesses += 1
            kind.wavefronts += found[0]
            kind.least += found[1]
            if found[0] > found[1]:
                self.lines[f"{ins.line}: {ins.text}"] += found[0] - found[1]

    def copy(self, cta: Any, copy: Any) -> None:
        if "global" not in copy.ins.mods or getattr(copy, "target", True) is None:
            return
        if not hasattr(copy, "valid"):  # a bulk copy: whoever waits for it, the CTA has one count
            self._count(cta, -1, copy.size)
            return
        for warp in np.unique(copy.thread >> 5).tolist():
            self._count(cta, warp, int(copy.valid[copy.thread >> 5 == warp].sum()))

    def _count(self, cta: Any, actor: int, size: int) -> None:
        self.copied += size
        if (id(cta), actor) not in self._landed:
            self.in_flight[id(cta)] += size

    def landed(self, cta: Any, copy: Any) -> None:
        if hasattr(copy, "valid"):
            self._landed.update((id(cta), warp) for warp in np.unique(copy.thread >> 5).tolist())
        else:
            self._landed.add((id(cta), -1))

    @property
    def read_bytes(self) -> int:
        """Shared memory's wavefronts of loads, in bytes."""
        return WAVEFRONT * sum(kind.wavefronts for name, kind in self.kinds.items() if name.startswith("ld"))

    @property
    def before_first_wait(self) -> int:
        """Bytes that a CTA asks for before any of them has to be there; of several CTAs the fewest."""
        return min(self.in_flight.values(), default=0)

    def multiplies_during_stores(self) -> tuple[int, int]:
        """Stretches in which a warp stores results, and how many of them have multiplies of other warps within."""
        multiplies: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (cta, warp), events in self.trace.items():
            multiplies[cta] += [(moment, warp) for moment, multiply in events if multiply]
        stretches = overlapped = 0
        for (cta, warp), events in self.trace.items():
            for first, last in _stretches(events):
                stretches += 1
                overlapped += any(first < moment < last and other != warp for moment, other in multiplies[cta])
        return stretches, overlapped


def _stretches(events: Sequence[tuple[int, bool]]) -> Iterator[tuple[int, int]]:
    """First and last moment of each run of stores between multiplies."""
    run: list[int] = []
    for moment, multiply in events:
        if not multiply:
            run.append(moment)
        elif run:
            yield run[0], run[-1]
            run = []
    if run:
        yield run[0], run[-1]


def _stores_global(ins: Any) -> bool:
    return (ins.opcode == "st" and "global" in ins.mods) or (ins.opcode == "cp" and ins.mods[-1:] == ("bulk_group",))


def _kind(ins: Any, size: int) -> str:
    """``ldmatrix``, ``stmatrix``, or the opcode and its bytes."""
    if ins.opcode in ("ldmatrix", "stmatrix"):
        return str(ins.opcode)
    return f"{ins.opcode}.{8 * size}"


@contextmanager
def emulated(sm_count: int, *, free: bool = False) -> Iterator[Traffic]:
    """Plans for the CPU run on an emulated GPU that this observes: copies land at the last moment, which shows how much
    is in flight; or, if ``free``, at once, and warps run in random order, which shows what may overlap."""
    traffic = Traffic()
    options = emulator.Options(observer=traffic, races=False)
    if free:
        options = replace(options, schedule="random", copies="eager")
    with b12x.target("emulator", sm_count=sm_count, options=options):
        yield traffic
    b12x.clear_all_caches()


def run_case(case: Case) -> None:
    """Run a numerical case on the emulated GPU, and see that its result is right."""
    prepared = case.prepare("cpu", torch.Generator().manual_seed(1))
    prepared.launch()
    judgement = prepared.judge()
    if judgement.wrong:
        raise ValueError(f"{case.name}: {judgement}")
