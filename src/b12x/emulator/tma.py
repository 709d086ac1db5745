"""Tensor maps as data: which bytes of the tensor a box covers, and where they lie in shared memory.

PTX ISA 5.5 (tensors), 5.5.7 (swizzling modes): rows of the box follow each other in shared memory, and 16-byte units
are exchanged by address bits, ``a ^= ((a >> 7) & m) << 4``. Elements outside the tensor read as zero and are not
written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from b12x._runtime.abi import ITEMSIZE, TensorMapValue

from .async_ import BulkCopy
from .clocks import Clock
from .errors import LaunchError, Misaligned, TaintError
from .machine import Cta, Group, MBarrier
from .memory import PARAM_WINDOW, SHARED_BASE, GlobalRegion, Space
from .parse import Instr

Array = NDArray[Any]
SWIZZLE = {"none": 0, "32B": 1, "64B": 3, "128B": 7}
#: Types that TMA knows and that parameters do not name: bits per element.
SUBBYTE = {"float4_e2m1fn": 4, "uint4": 4}


@dataclass
class Box:
    """One tile of a tensor map: extents in bytes along the innermost dimension, in elements along the others."""

    map: TensorMapValue
    name: str
    region: GlobalRegion
    start: int  # buffer offset of the tensor's element 0
    shape: tuple[int, ...]  # outermost first, last one in bytes
    low: tuple[int, ...]  # first coordinate, same order and units
    dims: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def inside(self) -> tuple[list[slice], tuple[int, ...], int]:
        """(slices of the box that exist, their lengths, buffer offset of the first one)."""
        slices, lengths, offset = [], [], self.start
        for n, low, dim, stride in zip(self.shape, self.low, self.dims, self.strides, strict=True):
            first, last = max(0, -low), max(0, min(n, dim - low))
            slices.append(slice(first, max(first, last)))
            lengths.append(max(0, last - first))
            offset += (low + first) * stride
        return slices, tuple(lengths), offset

    def view(self, shadow: bool, lengths: tuple[int, ...], offset: int) -> Array:
        raw = self.region.shadow if shadow else self.region.buf
        assert raw is not None
        result: Array = np.ndarray(lengths, np.uint8, raw.data, offset, self.strides)
        return result

    def shared_offset(self, g: Group, ins: Instr, cta: Cta, addr: int) -> int:
        align = 128
        if addr & (align - 1):
            raise Misaligned(f"{g.where(ins)}: shared address {addr:#x} of a tensor copy is not a multiple of {align}")
        return cta.shared.range(g, ins, addr, self.size)

    def units(self, offset: int) -> Array | slice:
        """Places (in 16-byte units) of the box's bytes, in box order."""
        mask = SWIZZLE[self.map.swizzle]
        first = offset // 16
        if not mask:
            return slice(first, first + self.size // 16)
        return first + _swizzled(self.size // 16, (first + SHARED_BASE // 16) % 64, mask)


@cache
def _swizzled(count: int, phase: int, mask: int) -> Array:
    unit = np.arange(phase, phase + count)
    return (unit ^ ((unit >> 3) & mask)) - phase


def box_of(g: Group, ins: Instr, where: int, coords: tuple[int, ...]) -> Box:
    """The box of a tensor copy; coordinates are innermost first, as in the instruction."""
    key = where & (PARAM_WINDOW - 1) if where >> 56 in (0, 2) else -1
    found = g.cta.tensor_maps.get(key)
    if found is None:
        raise LaunchError(f"{g.where(ins)}: {where:#x} is not the address of a tensor-map parameter")
    name, m, region, start = found
    if len(coords) != len(m.dims):
        raise LaunchError(f"{g.where(ins)}: {len(coords)} coordinates for the {len(m.dims)}-dimensional map of {name}")
    bits = SUBBYTE.get(m.dtype, 8 * ITEMSIZE.get(m.dtype, 0))
    inner = [n * bits // 8 for n in (m.box[0], coords[0], m.dims[0])]
    return Box(
        m,
        name,
        region,
        start,
        (*m.box[:0:-1], inner[0]),
        (*coords[:0:-1], inner[1]),
        (*m.dims[:0:-1], inner[2]),
        (*m.strides[::-1], 1),
    )


def check_map(name: str, m: TensorMapValue, regions: list[GlobalRegion]) -> tuple[GlobalRegion, int]:
    """What cuTensorMapEncodeTiled refuses, and the passed tensor that the map covers."""
    bits = SUBBYTE.get(m.dtype, 8 * ITEMSIZE.get(m.dtype, 0))
    if not bits or m.swizzle not in SWIZZLE:
        raise LaunchError(f"tensor map {name}: dtype {m.dtype!r} or swizzle {m.swizzle!r} is not supported")
    rank = len(m.dims)
    if not 1 <= rank <= 5 or len(m.box) != rank or len(m.strides) != rank - 1:
        raise LaunchError(f"tensor map {name}: ranks of dims, box and strides do not fit")
    inner = m.box[0] * bits // 8
    if m.address % 16 or any(s % 16 for s in m.strides) or inner % 16 or any(not 1 <= b <= 256 for b in m.box):
        raise LaunchError(
            f"tensor map {name}: address, strides and inner box have to be multiples of 16 bytes, box <= 256"
        )
    span = {"none": 1 << 30, "32B": 32, "64B": 64, "128B": 128}[m.swizzle]
    if inner > span:
        raise LaunchError(f"tensor map {name}: the inner box of {inner} bytes exceeds the {m.swizzle} swizzle")
    if min(m.dims) < 1:
        raise LaunchError(f"tensor map {name}: empty dimension")
    extent = m.dims[0] * bits // 8 + sum((n - 1) * s for n, s in zip(m.dims[1:], m.strides, strict=True))
    for region in regions:
        offset = m.address - region.base
        if offset >= region.lead and offset + extent <= region.end:
            if region.run is not None:
                lengths = (*m.dims[:0:-1], 1)
                rows = np.ndarray(lengths, np.uint8, region.run.data, offset, (*m.strides[::-1], 1))
                if int(rows.min()) < min(255, m.dims[0] * bits // 8):
                    continue
            return region, offset
    raise LaunchError(f"tensor map {name}: its {extent} bytes at {m.address:#x} are not inside a passed tensor")


def issue_clock(g: Group, thread: int) -> Clock | None:
    races = g.cta.races
    return None if races is None else races.issue_clock(g, thread >> 5, thread & 31)


def writes_shared(g: Group, ins: Instr, cta: Cta, offset: int, size: int, thread: int, barrier: MBarrier) -> None:
    """Tells the race detector of a copy into shared memory that completes on an mbarrier."""
    races = g.cta.races
    if races is not None:
        warp, lane = thread >> 5, thread & 31
        owner = races.ctas[barrier.owner]
        races.initialised(g, ins, owner, barrier.address, warp, 1 << lane, proxy=True)
        races.copy_writes(g, ins, warp, lane, cta, offset, size, barrier.slot, races.phase_stamp(barrier))


def reads_shared(g: Group, ins: Instr, addr: int, size: int, thread: int, barrier: MBarrier | None = None) -> None:
    """Tells the race detector of a copy out of shared memory, waited for by group or by mbarrier."""
    races = g.cta.races
    if races is not None:
        slot, stamp = races.group(g.cta, ("bulk", thread), g.cta.copies.bulk_group.get(thread, 0))
        if barrier is not None:
            slot, stamp = barrier.slot, races.phase_stamp(barrier)
        races.copy_reads(g, ins, thread >> 5, thread & 31, addr - SHARED_BASE, size, slot, stamp)


def load(g: Group, ins: Instr, box: Box, cta: Cta, addr: int, barrier: MBarrier, thread: int) -> None:
    """Global to shared; complete_tx counts the whole box."""
    offset = box.shared_offset(g, ins, cta, addr)
    cta.copies_into(g, ins, offset, box.size)
    clock = issue_clock(g, thread)
    if g.cta.memory.stores is not None:
        _, lengths, start = box.inside()
        rows = start + sum(
            np.ix_(*(np.arange(n) * s for n, s in zip(lengths[:-1], box.strides, strict=False))), np.int64(0)
        )
        g.cta.memory.stores.copy(g, ins, thread >> 5, box.region, np.asarray(rows), lengths[-1])
    writes_shared(g, ins, cta, offset, box.size, thread, barrier)

    def read() -> tuple[Array, Array | None]:
        slices, lengths, start = box.inside()
        tile = np.zeros(box.shape, np.uint8)
        bits = None
        if all(lengths):
            tile[tuple(slices)] = box.view(False, lengths, start)
            if box.region.shadow is not None:
                bits = np.zeros(box.shape, np.uint8)
                bits[tuple(slices)] = box.view(True, lengths, start)
        return tile, bits

    def write(data: tuple[Array, Array | None]) -> None:
        units = box.units(offset)
        tile, bits = data
        cta.shared.units(16)[units] = tile.reshape(-1).view(np.complex128)
        cta.shared.units(16, True)[units] = 0 if bits is None else bits.reshape(-1).view(np.complex128)

    g.cta.copies.issue_bulk(BulkCopy(ins, read, write, box.size, barrier, target=(cta, offset, box.size), clock=clock))


def store(g: Group, ins: Instr, box: Box, offset: int, thread: int, first: bool) -> None:
    """Shared to global; what lies outside the tensor is dropped."""
    shared = g.cta.shared
    region = box.region
    slices, lengths, start = box.inside()
    if not region.writable:
        raise g.cta.memory.outside(g, ins, region.base + start, 1, True, None)
    place = g.where(ins)

    def read() -> tuple[Array, Array]:
        units = box.units(offset)
        tile = shared.units(16)[units].view(np.uint8).reshape(box.shape)[tuple(slices)].copy()
        bits = shared.units(16, True)[units].view(np.uint8).reshape(box.shape)[tuple(slices)]
        if g.cta.options.checks and bits.any():
            where = np.argwhere(bits)[0]
            index = tuple(int(w + s.start + low) for w, s, low in zip(where, slices, box.low, strict=True))
            unit = np.ravel_multi_index([int(w + s.start) for w, s in zip(where, slices, strict=True)], box.shape)
            chunk = np.arange(shared.buf.size // 16)[units][int(unit) // 16]
            cause = g.cta.describe_shared(int(chunk) * 16 + int(unit) % 16)
            raise TaintError(f"{place}: byte {index} of {box.name} (outermost first) depends on {cause}")
        return tile, bits

    def write(data: tuple[Array, Array]) -> None:
        if not all(lengths):
            return
        box.view(False, lengths, start)[...] = data[0]
        if region.shadow is not None:
            box.view(True, lengths, start)[...] = 0

    if first:
        reads_shared(g, ins, offset + SHARED_BASE, box.size, thread)
    else:
        g.cta.copies.issue_bulk(BulkCopy(ins, lambda: None, lambda data: None, box.size, thread=thread))
        return
    g.cta.copies.issue_bulk(BulkCopy(ins, read, write, box.size, thread=thread))


def reader(
    g: Group, ins: Instr, space: str, addr: int, size: int, thread: int
) -> Callable[[], tuple[Array, Array | None]]:
    """Reads a contiguous range when the copy takes effect."""
    source: Space
    if space == "global":
        source, offset = g.cta.memory.range(g, ins, addr, size, False)
        if g.cta.memory.stores is not None:
            g.cta.memory.stores.copy(g, ins, thread >> 5, source, np.array([offset]), size)
    else:
        source = g.cta.shared
        offset = g.cta.shared.range(g, ins, addr, size)

    def read() -> tuple[Array, Array | None]:
        part = slice(offset, offset + size)
        return source.buf[part].copy(), None if source.shadow is None else source.shadow[part].copy()

    return read


def shared_writer(cta: Cta, offset: int) -> Callable[[Any], None]:
    def write(data: tuple[Array, Array | None]) -> None:
        part = slice(offset, offset + data[0].size)
        cta.shared.buf[part] = data[0]
        assert cta.shared.shadow is not None
        cta.shared.shadow[part] = 0 if data[1] is None else data[1]

    return write


def poison_global(cta: Cta, region: GlobalRegion, offset: int, size: int) -> None:
    """Until a store by bulk copy has landed, its target may not be read."""
    if region.shadow is not None and not cta.copies.eager:
        region.shadow[offset : offset + size] = 0xFF


def write_global(cta: Cta, place: str, region: GlobalRegion, offset: int, data: tuple[Array, Array | None]) -> None:
    """Lands a bulk store; bytes that nothing wrote are refused."""
    check_written(cta, place, region, offset, data[1])
    region.buf[offset : offset + data[0].size] = data[0]
    if region.shadow is not None:
        region.shadow[offset : offset + data[0].size] = 0


def check_written(cta: Cta, place: str, region: GlobalRegion, offset: int, bits: Array | None) -> None:
    if cta.options.checks and bits is not None and bits.any():
        at = int(np.flatnonzero(bits)[0])
        raise TaintError(
            f"{place}: byte {at} of the copy to {region.name}{list(region.index(offset + at))} was never written"
        )
