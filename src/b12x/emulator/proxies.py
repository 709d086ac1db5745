"""Ordinary stores to global memory that an asynchronous copy reads in the same launch (PTX ISA 8.8, 9.7.13.4).

Either the warp that stored or the one that issues the copy has to execute ``fence.proxy.async`` in between. Whether the
two are ordered at all is not checked: global memory is outside the race detector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import MissingProxyFence

if TYPE_CHECKING:
    from .machine import Cta, Group
    from .memory import GlobalRegion
    from .parse import Instr

Array = NDArray[Any]
#: Bytes that share an entry; asynchronous copies move multiples of it.
CHUNK = 16


class GlobalStores:
    """When, and by which warp, each chunk of each tensor was last stored to."""

    def __init__(self) -> None:
        self.time = 0
        self.fences: dict[int, int] = {}
        self.stores: dict[int, tuple[Array, Array]] = {}
        self.warps: dict[tuple[Any, int], int] = {}
        self.sites: dict[int, Instr] = {}

    def warp(self, cta: Cta, warp: int) -> int:
        return self.warps.setdefault((cta.ctaid, warp), len(self.warps))

    def store(self, g: Group, ins: Instr, region: GlobalRegion, offset: Array, size: int, where: Array | None) -> None:
        found = self.stores.get(id(region))
        if found is None:
            count = region.buf.size // CHUNK + 2
            found = self.stores[id(region)] = np.zeros(count, np.int64), np.zeros(count, np.int32)
        self.time += 1
        self.sites[self.time] = ins
        who = np.repeat([self.warp(g.cta, w) for w in g.warps], 32)
        if g.mask is not None:
            who = who[g.mask.ravel()]
        if where is not None:
            who = who[where]
        first = offset.astype(np.int64)
        for chunk in (first // CHUNK, (first + size - 1) // CHUNK):
            found[0][chunk] = self.time
            found[1][chunk] = who

    def fence(self, g: Group) -> None:
        self.time += 1
        for w in g.warps:
            self.fences[self.warp(g.cta, w)] = self.time

    def copy(self, g: Group, ins: Instr, warp: int, region: GlobalRegion, rows: Array, length: int) -> None:
        """An asynchronous copy of ``length`` bytes at each of some offsets."""
        found = self.stores.get(id(region))
        if found is None or not rows.size or not length:
            return
        spread = np.arange(0, length + CHUNK - 1, CHUNK)
        chunks = np.unique(np.minimum(rows.reshape(-1, 1) + spread, rows.reshape(-1, 1) + length - 1) // CHUNK)
        times, writers = found[0][chunks], found[1][chunks]
        fence = self.fences.get(self.warp(g.cta, warp), 0)
        for k in np.flatnonzero(times > fence).tolist():
            if self.fences.get(int(writers[k]), 0) < times[k]:
                earlier = self.sites[int(times[k])]
                index = list(region.index(max(int(chunks[k]) * CHUNK, region.lead)))
                writer = f"PTX line {earlier.line} `{earlier.text}`{earlier.source}"
                raise MissingProxyFence(
                    f"{g.at(ins, warp, 0)} reads {region.name}{index} by the async proxy, which {writer} has written, "
                    "with no fence.proxy.async between the two"
                )
