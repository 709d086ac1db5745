"""Global tensors and shared memory as numpy buffers, with bounds, alignment and taint of every access.

PTX ISA 5.1 (state spaces) and 6.4.5 / 9.7.9.8 (alignment of accesses). Taint is kept bit by bit: a set bit in the
shadow means that nothing has written that bit of memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from b12x._runtime.abi import ITEMSIZE, Region

from .errors import EmulatorError, LaunchError, Misaligned, OutOfBounds

if TYPE_CHECKING:
    from .machine import Group
    from .parse import Instr
    from .proxies import GlobalStores

Array = NDArray[Any]

#: The low kilobyte of the shared window belongs to the system, as on hardware: no valid shared address is 0.
SHARED_BASE = 1024
#: shared::cluster addresses of peers carry rank + 1 above bit 24; plain shared addresses mean the CTA itself.
RANK_SHIFT = 24
#: Generic addresses of the windows; user-space pointers never set these bits.
SHARED_WINDOW = 1 << 56
PARAM_WINDOW = 2 << 56
LOCAL_WINDOW = 3 << 56
#: Filled into the destination of a copy that has not landed.
POISON = 0xCB


class Space:
    """A stretch of bytes with an optional shadow of tainted bits."""

    def __init__(self, buf: NDArray[np.uint8], shadow: NDArray[np.uint8] | None) -> None:
        self.buf = buf
        self.shadow = shadow
        self._views: dict[tuple[Any, int, bool], Array] = {}

    def view(self, dtype: Any, lanes: int, shadow: bool = False) -> Array:
        """All aligned accesses of ``lanes`` elements of ``dtype``, one per row."""
        key = (dtype, lanes, shadow)
        found = self._views.get(key)
        if found is None:
            raw = self.shadow if shadow else self.buf
            assert raw is not None
            unit = np.dtype(dtype).itemsize * lanes
            raw = raw[: raw.size // unit * unit]
            found = self._views[key] = raw.view(dtype).reshape(-1, lanes)
        return found

    def units(self, size: int, shadow: bool = False) -> Array:
        """All aligned accesses of ``size`` bytes as items that numpy copies whole (pairs of items for 32 bytes)."""
        if size == 32:
            return self.view(np.complex128, 2, shadow)
        return self.view(_UNIT[size], 1, shadow)[:, 0]


_UNIT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class GlobalRegion(Space):
    """One passed tensor. The buffer starts at a 128-byte boundary at or below its first byte."""

    def __init__(self, region: Region, checks: bool) -> None:
        self.region = region
        self.name = region.name
        item = ITEMSIZE[region.dtype]
        if any(s < 0 for s in region.strides):
            raise LaunchError(f"region {region.name!r} has a negative stride")
        dims = [(n, s) for n, s in zip(region.shape, region.strides, strict=True) if n != 1]
        self.item = item
        self.span = item + sum((n - 1) * s for n, s in dims)
        self.start = region.address
        self.base = region.address & ~127
        lead = self.start - self.base
        size = -(-(lead + self.span) // 32) * 32
        raw = (ctypes.c_uint8 * size).from_address(self.base)
        super().__init__(np.ctypeslib.as_array(raw), None)
        self.lead = lead
        self.end = lead + self.span
        self.writable = region.access in ("w", "rw")
        self.run = self._runs(dims)
        if checks and not region.initialised:
            self.shadow = np.zeros(size, np.uint8)
            self.shadow[lead : self.end] = 0xFF
            if self.run is not None:
                self.shadow[self.run == 0] = 0
            self._views.clear()

    def _runs(self, dims: Sequence[tuple[int, int]]) -> NDArray[np.uint8] | None:
        """For each byte, how many valid bytes follow (at most 255); None if the tensor has no gaps."""
        dense = self.item
        for n, s in sorted(dims, key=lambda d: d[1]):
            if s > dense:
                break
            dense = max(dense, s * (n - 1) + dense)
        else:
            return None
        valid = np.zeros(self.buf.size, bool)
        window = np.lib.stride_tricks.as_strided(
            valid[self.lead :], [n for n, _ in dims] + [self.item], [s for _, s in dims] + [1]
        )
        window[...] = True
        position = np.arange(valid.size)
        gap = np.where(valid, valid.size, position)
        following = np.minimum.accumulate(gap[::-1])[::-1]
        return np.minimum(following - position, 255).astype(np.uint8)

    def holds(self, offset: int, size: int) -> bool:
        """Whether ``size`` bytes at ``offset`` in the buffer are all elements of the tensor."""
        if offset < self.lead or offset + size > self.end:
            return False
        return self.run is None or bool((self.run[offset : offset + size] > 0).all())

    def index(self, offset: int) -> tuple[int, ...]:
        """The tensor index nearest below a byte offset, for messages."""
        rest = offset - self.lead
        out = [0] * len(self.region.shape)
        order = sorted(range(len(out)), key=lambda d: -self.region.strides[d])
        for d in order:
            stride = self.region.strides[d]
            if stride > 0 and self.region.shape[d] != 1:
                out[d] = rest // stride
                rest -= out[d] * stride
        return tuple(out)


class GlobalMemory:
    """All passed tensors, the program's own .global and .const variables, and the resolution of addresses to them."""

    def __init__(self, regions: Sequence[Region], checks: bool) -> None:
        self.regions = [GlobalRegion(r, checks) for r in regions if all(r.shape)]
        #: Set if asynchronous copies read global memory and proxy fences are checked.
        self.stores: GlobalStores | None = None

    def resolve(
        self, g: Group, ins: Instr, addr: Array, size: int, write: bool, site: list[GlobalRegion]
    ) -> list[tuple[GlobalRegion, Array | None, Array]]:
        """(region, positions or None for all, byte offsets) of a vector of addresses; raises on anything outside."""
        if site:
            region = site[0]
            offset = addr - np.uint64(region.base)
            if self._inside(region, offset, size).all():
                return [(region, None, offset.view(np.int64))]
        out: list[tuple[GlobalRegion, Array | None, Array]] = []
        left = np.arange(addr.size)
        for region in self.regions:
            if write and not region.writable:
                continue
            offset = addr[left] - np.uint64(region.base)
            inside = self._inside(region, offset, size)
            if inside.any():
                if inside.all() and left.size == addr.size:
                    site[:] = [region]
                    return [(region, None, offset.view(np.int64))]
                out.append((region, left[inside], offset[inside].view(np.int64)))
                left = left[~inside]
                if not left.size:
                    return out
        raise self.outside(g, ins, int(addr[left[0]]), size, write, int(left[0]))

    @staticmethod
    def _inside(region: GlobalRegion, offset: Array, size: int) -> Array:
        # unsigned wrap-around puts addresses below the region far above its end
        ok = (offset - np.uint64(region.lead)) <= np.uint64(max(region.span - size, -1) & (2**64 - 1))
        if region.span < size:
            ok = np.zeros(offset.shape, bool)
        if region.run is not None and ok.any():
            ok[ok] = region.run[offset[ok].astype(np.int64)] >= size
        result: Array = ok
        return result

    def outside(self, g: Group, ins: Instr, addr: int, size: int, write: bool, lane: int | None) -> EmulatorError:
        """The error for one bad address: which tensor it misses, by how much."""
        what = "write" if write else "read"
        for region in self.regions:
            offset = addr - region.base
            if region.lead <= offset < region.end and region.holds(offset, size):
                detail = f"{region.name}{list(region.index(offset))} is read-only"
                break
        else:
            gap = [(r, max(r.start - addr, addr + size - (r.start + r.span))) for r in self.regions]
            if gap:
                region, _ = min(gap, key=lambda item: item[1])
                at = addr - region.start
                if 0 <= at < region.span:
                    near = list(region.index(at + region.lead))
                    detail = f"partly outside the elements of {region.name!r}, near index {near}"
                elif at < 0:
                    detail = f"{-at} bytes before {region.name!r} {list(region.region.shape)}"
                else:
                    detail = (
                        f"{at + size - region.span} bytes past the end of {region.name!r} "
                        f"{list(region.region.shape)}, near index {list(region.index(at + region.lead))}"
                    )
            else:
                detail = "no tensor was passed"
        return OutOfBounds(f"{g.where(ins, lane)}: {size}-byte {what} at {addr:#x}: {detail}")

    def range(self, g: Group, ins: Instr, addr: int, size: int, write: bool) -> tuple[GlobalRegion, int]:
        """The region and offset of a contiguous range (bulk copies)."""
        for region in self.regions:
            if region.writable or not write:
                offset = addr - region.base
                if region.holds(offset, size):
                    return region, offset
        raise self.outside(g, ins, addr, size, write, None)


def share_shadows(regions: Sequence[GlobalRegion]) -> None:
    """Makes regions that overlap (of several devices) agree on what is initialised: what one of them says is, is."""
    order = sorted(regions, key=lambda r: r.base)
    groups: list[list[GlobalRegion]] = []
    end = -1
    for region in order:
        if region.base >= end:
            groups.append([])
        groups[-1].append(region)
        end = max(end, region.base + region.buf.size)
    for group in groups:
        if len(group) == 1 or all(r.shadow is None for r in group):
            continue
        base = group[0].base
        union = np.zeros(max(r.base + r.buf.size for r in group) - base, np.uint8)
        parts = [union[r.base - base : r.base - base + r.buf.size] for r in group]
        for region, part in zip(group, parts, strict=True):
            if region.shadow is not None:
                part |= region.shadow
        for region, part in zip(group, parts, strict=True):
            if region.shadow is None:
                valid = slice(region.lead, region.end)
                part[valid] = 0 if region.run is None else np.where(region.run[valid] > 0, 0, part[valid])
        for region, part in zip(group, parts, strict=True):
            region.shadow = part
            region._views.clear()


class SharedMemory(Space):
    """The shared memory of one CTA; nothing in it is initialised."""

    def __init__(self, size: int) -> None:
        self.size = size
        room = -(-size // 128) * 128
        super().__init__(np.full(room, POISON, np.uint8), np.full(room, 0xFF, np.uint8))

    def reset(self) -> None:
        self.buf[:] = POISON
        assert self.shadow is not None
        self.shadow[:] = 0xFF

    def offsets(self, g: Group, ins: Instr, addr: Array, size: int) -> Array:
        """Byte offsets of a vector of 32-bit shared addresses; raises if any is outside the allocation."""
        offset = addr - np.uint32(SHARED_BASE)
        if (offset.size and int(offset.max()) > self.size - size) or self.size < size:
            bad = int(np.argmax(offset > np.uint32(max(self.size - size, 0))))
            raise OutOfBounds(
                f"{g.where(ins, bad)}: {size}-byte access at shared address {int(addr.flat[bad]):#x}, "
                f"outside the CTA's {self.size} bytes ({SHARED_BASE:#x} to {SHARED_BASE + self.size:#x})"
            )
        result: Array = offset
        return result

    def range(self, g: Group, ins: Instr, addr: int, size: int) -> int:
        offset = addr - SHARED_BASE
        if offset < 0 or offset + size > self.size:
            raise OutOfBounds(
                f"{g.where(ins, None)}: {size} bytes at shared address {addr:#x}, outside the CTA's {self.size} bytes "
                f"({SHARED_BASE:#x} to {SHARED_BASE + self.size:#x})"
            )
        return offset


def check_alignment(g: Group, ins: Instr, addr: Array, size: int) -> None:
    """Natural alignment of every access (PTX ISA 6.4.5)."""
    if size > 1 and int(np.bitwise_or.reduce(addr, axis=None)) & (size - 1):
        bad = int(np.argmax((addr & addr.dtype.type(size - 1)) != 0))
        raise Misaligned(f"{g.where(ins, bad)}: address {int(addr.flat[bad]):#x} is not a multiple of {size}")
