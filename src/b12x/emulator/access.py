"""Loads and stores of vectors of addresses in any state space; every memory instruction goes through here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decode import TYPES, Decoder, Source
from .errors import OutOfBounds, TaintError
from .machine import Cta, Group
from .memory import LOCAL_WINDOW, PARAM_WINDOW, RANK_SHIFT, GlobalRegion, Space, check_alignment
from .observe import lanes
from .parse import Address, Instr, Operand, Reg

Array = NDArray[Any]

SHARED_SPACES = ("shared", "shared::cta", "shared::cluster")


def address(d: Decoder, operand: Operand, space: str) -> tuple[Callable[[Group], Array], tuple[int, ...]]:
    """The addresses of an ``[base+offset]`` operand (32-bit for shared memory), and the register it reads."""
    if not isinstance(operand, Address) or operand.coords:
        raise d.fail("address form is not supported")
    shared = space in SHARED_SPACES
    src: Source = d.src(operand.base, TYPES["u32" if shared else "u64"])
    if not shared and isinstance(operand.base, Reg) and operand.base.type in ("b32", "u32", "s32"):
        raise d.fail("32-bit address outside shared memory")
    get = src.get
    if not operand.offset:
        return get, (src.rid,)
    offset = np.uint32(operand.offset & 0xFFFFFFFF) if shared else np.uint64(operand.offset & (2**64 - 1))
    return (lambda g: get(g) + offset), (src.rid,)


def expand(g: Group, values: Array) -> Array:
    """A vector over the active lanes as [warps, 32]."""
    if g.mask is None:
        return values.reshape(g.n, 32)
    out = np.zeros((g.n, 32), values.dtype)
    out[g.mask] = values
    return out


class Access:
    """One memory instruction's way to its data: state space, width and the last tensor it met."""

    def __init__(
        self, ins: Instr, space: str, size: int, write: bool, strong: bool = False, atomic: bool = False
    ) -> None:
        self.ins = ins
        self.space = space
        self.size = size
        self.shift = size.bit_length() - 1
        self.write = write
        self.strong = strong
        self.atomic = atomic
        self.site: list[GlobalRegion] = []

    def spaces(self, g: Group, addr: Array) -> Iterator[tuple[Space, Array | None, Array, Cta | None]]:
        """(space, positions or None for all, byte offsets, CTA of shared memory) for every space that is met."""
        ins, size = self.ins, self.size
        check_alignment(g, ins, addr, size)
        if self.space in ("shared", "shared::cta"):
            yield g.cta.shared, None, g.cta.shared.offsets(g, ins, addr, size), g.cta
        elif self.space == "shared::cluster":
            yield from self._cluster(g, addr)
        elif self.space == "local":
            yield self._local(g, addr, None)
        elif self.space in ("param", "param::entry"):
            yield from self._param(g, addr)
        else:
            tags = (addr >> np.uint64(56)) if self.space == "" else None
            if tags is None or not tags.any():
                for region, where, offset in g.cta.memory.resolve(g, ins, addr, size, self.write, self.site):
                    yield region, where, offset, None
            else:
                yield from self._generic(g, addr, tags)

    def _cluster(self, g: Group, addr: Array) -> Iterator[tuple[Space, Array | None, Array, Cta | None]]:
        ranks = addr >> np.uint32(RANK_SHIFT)
        low = addr & np.uint32((1 << RANK_SHIFT) - 1)
        for rank in np.unique(ranks):
            where = np.flatnonzero(ranks == rank)
            cta = g.cta.peer(g, self.ins, int(rank))
            yield cta.shared, where, cta.shared.offsets(g, self.ins, low[where], self.size), cta

    def _local(self, g: Group, addr: Array, where: Array | None) -> tuple[Space, Array | None, Array, Cta | None]:
        """Each thread has a part of its own."""
        size = g.cta.code.local_bytes
        offset = (addr & np.uint64(LOCAL_WINDOW // 3 - 1)).astype(np.int64)
        if offset.size and int(offset.max()) + self.size > size:
            bad = int(np.argmax(offset + self.size > size))
            position = bad if where is None else int(where[bad])
            raise OutOfBounds(f"{g.where(self.ins, position)}: access outside the {size} bytes of local memory")
        threads = np.add.outer(np.array(g.warps) * 32, np.arange(32))
        mine = g.pick(threads) if where is None else g.pick(threads)[where]
        return g.cta.local, where, mine * size + offset, None

    def _param(self, g: Group, addr: Array) -> Iterator[tuple[Space, Array | None, Array, Cta | None]]:
        offset = (addr & np.uint64(PARAM_WINDOW - 1)).astype(np.int64)
        if self.write or (offset.size and int(offset.max()) + self.size > g.cta.params.buf.size):
            raise OutOfBounds(f"{g.where(self.ins, 0)}: access outside the kernel's parameters")
        yield g.cta.params, None, offset, None

    def _generic(self, g: Group, addr: Array, tags: Array) -> Iterator[tuple[Space, Array | None, Array, Cta | None]]:
        for tag in np.unique(tags):
            where = np.flatnonzero(tags == tag)
            if tag == LOCAL_WINDOW >> 56:
                yield self._local(g, addr[where], where)
                continue
            inner = Access(
                self.ins, {0: "global", 1: "shared::cluster", 2: "param"}.get(int(tag), "?"), self.size, self.write,
                self.strong,
            )  # fmt: skip
            part = addr[where]
            if inner.space == "?":
                raise OutOfBounds(f"{g.where(self.ins, int(where[0]))}: {int(part[0]):#x} is in no state space")
            if inner.space == "shared::cluster":
                part = (part & np.uint64(0xFFFFFFFF)).astype(np.uint32)
            for space, inside, offset, cta in inner.spaces(g, part):
                yield space, where if inside is None else where[inside], offset, cta

    def load(self, g: Group, addr: Array) -> tuple[Array, Array | None, str]:
        """Items at the addresses, their tainted bits (None if there are none), and where those came from."""
        out: Array | None = None
        bits: Array | None = None
        origin = ""
        if self.strong and not self.write:
            g.cta.polls[g.slice] += 1
        for space, where, offset, cta in self.spaces(g, addr):
            index = offset >> self.shift
            data = space.units(self.size).take(index, axis=0)
            shadow = None
            if space.shadow is not None:
                shadow = space.units(self.size, True).take(index, axis=0)
                if not shadow.view(np.uint8).any():
                    shadow = None
                elif not origin:
                    at = np.flatnonzero(shadow.view(np.uint8))[0] // self.size
                    origin = describe(space, int(offset[at]), self.size, cta)
            races, observer = g.cta.races, g.cta.options.observer
            if observer is not None and cta is not None:
                observer.shared(cta, self.ins, lanes(g, where), offset, self.size, False)
            if races is not None and cta is not None and not self.strong:
                races.read(g, self.ins, cta, offset, self.size, where)
            elif races is not None and self.strong and not self.write:
                if cta is not None:
                    races.strong(g, self.ins, cta, offset, self.size, where, False)
                races.flag(g, space, offset, where, False, True)
            if where is None:
                return data, shadow, origin
            if out is None:
                out = np.zeros((addr.size, *data.shape[1:]), data.dtype)
                bits = np.zeros_like(out)
            assert bits is not None
            out[where] = data
            if shadow is not None:
                bits[where] = shadow
        if out is None:
            out = np.zeros(0, np.complex128 if self.size >= 16 else np.dtype(f"u{self.size}"))
        return out, bits if origin else None, origin

    def store(self, g: Group, addr: Array, items: Array, bits: Array | None, origin: str = "") -> None:
        """Writes items; ``bits`` are their tainted bits, which global memory refuses."""
        g.cta.stores += not self.atomic
        for space, where, offset, cta in self.spaces(g, addr):
            index = offset >> self.shift
            part = items if where is None else items[where]
            shadow = None if bits is None else bits if where is None else bits[where]
            if isinstance(space, GlobalRegion) and shadow is not None and shadow.view(np.uint8).any():
                at = int(np.flatnonzero(shadow.view(np.uint8))[0] // self.size)
                lane = at if where is None else int(where[at])
                raise TaintError(
                    f"{g.where(self.ins, lane)}: the value stored to {space.name}{list(space.index(int(offset[at])))} "
                    f"depends on {origin}"
                )
            races, observer = g.cta.races, g.cta.options.observer
            if observer is not None and cta is not None:
                observer.shared(cta, self.ins, lanes(g, where), offset, self.size, True)
            if isinstance(space, GlobalRegion) and g.cta.memory.stores is not None:
                g.cta.memory.stores.store(g, self.ins, space, offset, self.size, where)
            if races is not None and (cta is not None or self.strong):
                if self.strong:
                    if cta is not None:
                        races.strong(g, self.ins, cta, offset, self.size, where, True)
                    races.flag(g, space, offset, where, True, self.atomic)
                else:
                    assert cta is not None
                    races.write(g, self.ins, cta, offset, self.size, where, part)
            if cta is not None and shadow is not None:
                cta.note_origin(offset[np.asarray(shadow != 0).reshape(offset.size, -1).any(axis=1)], self.size, origin)
            space.units(self.size)[index] = part
            if space.shadow is not None:
                space.units(self.size, True)[index] = 0 if shadow is None else shadow


def describe(space: Space, offset: int, size: int, cta: Cta | None) -> str:
    """Says why the bytes at an offset are tainted."""
    assert space.shadow is not None
    offset += int(np.argmax(space.shadow[offset : offset + size] != 0))
    if isinstance(space, GlobalRegion):
        return f"{space.name}{list(space.index(offset))}, which nothing has written"
    return "local memory, which the thread has not written" if cta is None else cta.describe_shared(offset)
