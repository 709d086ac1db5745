"""The state of running CTAs: register files, groups of warps in lockstep, warp fragments and mbarriers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import BarrierError, OutOfBounds, TaintError
from .memory import POISON, SHARED_BASE, GlobalMemory, SharedMemory, Space

if TYPE_CHECKING:
    from .async_ import CopyQueue
    from .clocks import Clock
    from .decode import Code
    from .options import Options
    from .parse import Instr
    from .races import Races

Array = NDArray[Any]
Mask = NDArray[np.bool_] | None
Dim3 = tuple[int, int, int]

#: Register classes by width; a register id is ``row * 4 + class``.
PRED, W16, W32, W64 = range(4)
_CLASS_DTYPE = (np.bool_, np.uint16, np.uint32, np.uint64)
#: Typed views of the register file: name -> (class, dtype).
VIEWS: dict[str, tuple[int, Any]] = {
    "p": (PRED, np.bool_),
    "u16": (W16, np.uint16),
    "s16": (W16, np.int16),
    "f16": (W16, np.float16),
    "u32": (W32, np.uint32),
    "s32": (W32, np.int32),
    "f32": (W32, np.float32),
    "f16x2": (W32, np.float16),
    "u16x2": (W32, np.uint16),
    "s16x2": (W32, np.int16),
    "u64": (W64, np.uint64),
    "s64": (W64, np.int64),
    "f64": (W64, np.float64),
    "u32x2": (W64, np.uint32),
    "f32x2": (W64, np.float32),
}


class RegisterFile:
    """Registers of one CTA: per class an array [row, warp, lane]; constants and launch values are rows too."""

    def __init__(self, rows: tuple[int, int, int, int], warps: int) -> None:
        self.files: list[Array] = [np.zeros((n, warps, 32), dt) for n, dt in zip(rows, _CLASS_DTYPE, strict=True)]
        self.warps = warps
        self.shadows: list[Array] | None = None
        self._groups: dict[tuple[int, int, int], Group] = {}

    def shadow(self, rid: int) -> Array:
        """The tainted bits of a register, [warp, lane]."""
        if self.shadows is None:
            self.shadows = [np.zeros_like(f) for f in self.files]
        found: Array = self.shadows[rid & 3][rid >> 2]
        return found

    def group(self, cta: Cta, lo: int, hi: int, step: int) -> Group:
        key = (lo, hi, step)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = Group(self, lo, hi, step)
        found.cta = cta
        return found


class Group:
    """Warps of one CTA that execute together, with an active mask ([warps, 32], None if all lanes are active).

    The typed views (``g.u32[row]`` and so on) are made on first use and kept.
    """

    cta: Cta
    mask: Mask

    def __init__(self, file: RegisterFile, lo: int, hi: int, step: int) -> None:
        self.file = file
        self.slice = slice(lo, hi, step)
        self.warps = range(lo, hi, step)
        self.n = len(self.warps)
        self.mask = None

    def __getattr__(self, name: str) -> Any:
        spec = VIEWS.get(name)
        if spec is None:
            raise AttributeError(name)
        rows = self.file.files[spec[0]].view(spec[1])[:, self.slice]
        views = list(rows)
        setattr(self, name, views)
        return views

    def shadow(self, rid: int) -> Array:
        found: Array = self.file.shadow(rid)[self.slice]
        return found

    def active(self) -> NDArray[np.bool_]:
        """The active mask as an array."""
        return np.ones((self.n, 32), bool) if self.mask is None else self.mask

    def put(self, view: Array, value: Any) -> None:
        """Writes the active lanes of a register view."""
        mask = self.mask
        if mask is None:
            view[...] = value
        else:
            if view.shape != mask.shape:  # two halves a register
                mask = np.repeat(mask, 2, axis=1)
            np.copyto(view, value, where=mask, casting="unsafe")

    def pick(self, view: Array) -> Array:
        """The active lanes of a register view, as a vector."""
        return view.ravel() if self.mask is None else view[self.mask]

    def lane(self, position: int) -> tuple[int, int]:
        """(warp, lane) of a position in a vector of active lanes."""
        if self.mask is None:
            return self.warps[position // 32], position % 32
        warp, lane = np.argwhere(self.mask)[position]
        return self.warps[int(warp)], int(lane)

    def where(self, ins: Instr, position: int | None = None) -> str:
        """Names the instruction, the CTA and, for a position among the active lanes, the thread."""
        cta = self.cta
        if position is None:
            text = f"PTX line {ins.line} `{ins.text}`{ins.source}, CTA {cta.name}"
            return f"{text}, warp {self.warps[0]}" + (f" to {self.warps[-1]}" if self.n > 1 else "")
        return self.at(ins, *self.lane(position))

    def at(self, ins: Instr, warp: int, lane: int) -> str:
        """Names the instruction, the CTA and the thread."""
        bx, by, _ = self.cta.block
        t = warp * 32 + lane
        thread = (t % bx, t // bx % by, t // (bx * by))
        return (
            f"PTX line {ins.line} `{ins.text}`{ins.source}, CTA {self.cta.name}, thread {thread} "
            f"(warp {warp}, lane {lane})"
        )


@dataclass(eq=False)
class MBarrier:
    """An mbarrier object (PTX ISA 9.7.13.15): arrivals and bytes that the current phase still waits for.

    For the race detector: the agent of copies that complete on it and its stamp before the first phase, the clocks of
    this phase's arrivals and of completed phases, and whether its initialisation is fenced for the async proxy.
    """

    expected: int
    pending: int
    tx: int = 0
    phase: int = 0
    address: int = 0
    races: Races | None = None
    slot: int = 0
    base: Any = 0
    arriving: Clock | None = None
    done: Clock | None = None
    fenced: bool = False
    owner: int = 0  # index of its CTA
    initialiser: int = 0  # agent

    def settle(self) -> bool:
        """Completes the phase if nothing is outstanding."""
        if self.pending == 0 and self.tx == 0:
            if self.races is not None:
                self.races.phase_done(self)
            self.phase += 1
            self.pending = self.expected
            return True
        return False


@dataclass(eq=False)
class NamedBarrier:
    """One of the 16 CTA barriers: threads that have arrived, and the fragments that wait."""

    expected: int = 0
    whole: bool = False
    arrived: int = 0
    clock: Clock | None = None
    waiting: list[Fragment] = field(default_factory=list)
    votes: list[tuple[Fragment, Array]] = field(default_factory=list)


@dataclass(eq=False)
class Fragment:
    """Lanes of one warp at one place. ``ready`` is called by the scheduler to ask whether a parked one can go on."""

    warp: int
    pc: int
    mask: NDArray[np.bool_]
    full: bool
    ready: Callable[[], bool] | None = None
    barriers: list[MBarrier] = field(default_factory=list)
    timed_out: bool = False
    tried: bool = False


class Cta:
    """One running CTA."""

    def __init__(
        self, code: Code, file: RegisterFile, shared: SharedMemory, memory: GlobalMemory, options: Options
    ) -> None:
        self.code = code
        self.file = file
        self.shared = shared
        self.memory = memory
        self.options = options
        self.ctaid: Dim3 = (0, 0, 0)
        self.device: int | None = None
        self.block: Dim3 = (1, 1, 1)
        self.rank = 0
        self.cluster: list[Cta] = [self]
        self.alive: NDArray[np.bool_] = np.zeros((0, 32), bool)
        self.tainted: set[int] = set()
        self.origin: dict[int, str] = {}
        self.stored_origin: dict[int, str] = {}  # by 4-byte word of shared memory
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        self.params = Space(np.zeros(0, np.uint8), None)
        local = code.local_bytes * file.warps * 32
        self.local = Space(np.full(local, POISON, np.uint8), np.full(local, 0xFF, np.uint8))
        self.tensor_maps: dict[int, Any] = {}
        self.copies: CopyQueue
        self.events = 0
        self.stores = 0  # that may have changed memory
        self.polls: NDArray[np.int64] = np.zeros(
            file.warps, np.int64
        )  # strong loads of each warp since the last of those
        self.races: Races | None = None
        self.index = 0  # among the CTAs of the cluster

    @property
    def name(self) -> str:
        """The CTA in messages."""
        return f"{self.ctaid}" if self.device is None else f"{self.ctaid} of device {self.device}"

    def mark(self, rid: int, origin: str) -> None:
        self.tainted.add(rid)
        self.origin[rid] = origin

    def set_shadow(self, g: Group, rid: int, bits: Any, origin: str) -> None:
        """Sets the tainted bits of a register's active lanes, and keeps the set of tainted registers in step."""
        if not self.options.checks:
            return
        shadow = g.shadow(rid)
        g.put(shadow, bits)
        if shadow.any():
            self.mark(rid, origin or self.origin[rid])
        elif rid in self.tainted and not self.file.shadow(rid).any():
            self.tainted.discard(rid)

    def peer(self, g: Group, ins: Instr, tag: int) -> Cta:
        """The CTA that the rank bits of a shared::cluster address name; 0 is the CTA itself."""
        if tag == 0:
            return self
        if tag > len(self.cluster):
            raise OutOfBounds(f"{g.where(ins)}: rank {tag - 1} is outside the cluster of {len(self.cluster)} CTAs")
        other = self.cluster[tag - 1]
        if not other.alive.any():
            raise OutOfBounds(f"{g.where(ins)}: shared memory of rank {tag - 1}, which has exited")
        return other

    def init_mbarrier(self, g: Group, ins: Instr, addr: int, count: int, lanes: NDArray[np.int64]) -> None:
        offset = self.shared.range(g, ins, addr, 8)
        if not 1 <= count < 1 << 20:
            raise BarrierError(f"{g.where(ins)}: mbarrier count {count}")
        if addr in self.mbarriers:
            raise BarrierError(f"{g.where(ins)}: the mbarrier at {addr:#x} is already initialised")
        barrier = self.mbarriers[addr] = MBarrier(count, count, address=addr)
        if self.races is not None:
            offsets = np.full(1, offset, np.int64)
            self.races.write(g, ins, self, offsets, 8, lanes[:1], np.zeros(8, np.uint8))
            self.races.adopt(barrier, self, addr)
            barrier.owner, barrier.initialiser = self.index, self.races.agent(self, g.lane(int(lanes[0]))[0])
        assert self.shared.shadow is not None
        self.shared.shadow[offset : offset + 8] = 0xFF  # opaque to ordinary loads

    def end_mbarrier(self, g: Group, ins: Instr, addr: int, lanes: NDArray[np.int64]) -> None:
        """mbarrier.inval: the memory is free for other use, and undefined."""
        if addr not in self.mbarriers:
            raise BarrierError(f"{g.where(ins)}: no initialised mbarrier at shared address {addr:#x}")
        del self.mbarriers[addr]
        if self.races is not None:
            offsets = np.full(1, addr - SHARED_BASE, np.int64)
            self.races.write(g, ins, self, offsets, 8, lanes[:1], np.zeros(8, np.uint8))

    def copies_into(self, g: Group, ins: Instr, offset: int, size: int) -> None:
        """Refuses an asynchronous copy over a live mbarrier."""
        for addr in self.mbarriers:
            if offset - 8 < addr - SHARED_BASE < offset + size:
                raise BarrierError(f"{g.where(ins)}: the copy overwrites the mbarrier at {addr:#x}")

    def note_origin(self, offsets: Array, size: int, origin: str) -> None:
        """Remembers where tainted data stored to shared memory came from."""
        for offset in offsets.tolist():
            for word in range(offset // 4, (offset + size - 1) // 4 + 1):
                self.stored_origin[word] = origin

    def describe_shared(self, offset: int) -> str:
        """Why a byte of shared memory is tainted."""
        for other in self.cluster:
            pending = other.copies.describe(self, offset)
            if pending:
                return pending
        if offset // 4 in self.stored_origin:
            return self.stored_origin[offset // 4]
        address = offset + SHARED_BASE
        if any(a <= address < a + 8 for a in self.mbarriers):
            return f"the mbarrier at shared address {address:#x}, which is opaque"
        return f"shared address {address:#x} of CTA {self.ctaid}, which nothing has written"

    def clear_shadow(self, g: Group, rid: int) -> None:
        self.set_shadow(g, rid, 0, "")

    def refuse(self, g: Group, ins: Instr, rids: tuple[int, ...], what: str) -> None:
        """Raises if an active lane of any of these registers is tainted."""
        for rid in rids:
            if rid in self.tainted:
                bad = g.shadow(rid) != 0
                if g.mask is not None:
                    bad = bad & g.mask
                if bad.any():
                    at = int(np.argmax(g.pick(bad)))
                    raise TaintError(f"{g.where(ins, at)}: {what} depends on {self.origin[rid]}")
