"""What the CTAs of a recorded launch read and write, and how they are dealt to multiprocessors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from b12x._runtime.abi import ITEMSIZE
from b12x.gemm.blockscaled.recipes import RECIPES

from .recorder import Recorded

#: Shared memory of a multiprocessor, and what the system keeps of it for each CTA (bytes).
SM_SMEM, SMEM_RESERVED = 102_400, 1024
SM_THREADS, SM_CTAS, SM_REGISTERS = 1536, 24, 65_536
#: Multiprocessors of each GPC, which no cluster crosses. 170: the only division into GPCs of up to 16 that gives the
#: counts of active clusters that were published for the RTX 5090 (85, 41 and 19 of 2, 4 and 8). 84: the whole GB203.
#: The others are assumed.
GPCS = {48: (12,) * 4, 84: (12,) * 7, 170: (16,) * 8 + (14,) * 3, 188: (16,) * 10 + (14,) * 2}


@dataclass(frozen=True)
class Problem:
    """``C [M, N, L]``, all L entries alike."""

    recipe: str
    c_dtype: str
    m: int
    n: int
    k: int
    batch: int = 1

    def operand_bytes(self, rows: int) -> float:
        """Codes and scales of some rows over all of K."""
        encoding = RECIPES[self.recipe]
        return rows * self.k * (encoding.bits / 8 + 1 / encoding.block)

    @property
    def weight_bytes(self) -> float:
        return self.batch * self.operand_bytes(self.n)

    @property
    def bytes(self) -> float:
        """What has to cross the memory bus: both operands once, and the result."""
        return self.weight_bytes + self.batch * (self.operand_bytes(self.m) + self.m * self.n * ITEMSIZE[self.c_dtype])


@dataclass(frozen=True)
class Work:
    """Of one launch: global bytes of each CTA, bytes that a CTA may have in flight, bytes between CTAs of a cluster."""

    per_cta: NDArray[np.float64]
    in_flight: int
    exchanged: int
    what: str

    @property
    def all_in_flight(self) -> bool:
        """Whether every CTA asks for its whole share before it first waits."""
        return bool(self.per_cta.max() <= self.in_flight)


def persistent(launch: Recorded, problem: Problem) -> Work:
    """``gemm.blockscaled``: clusters take tiles in turn, the CTAs of one share a tile's K steps."""
    spec: Any = launch.spec
    split = math.prod(launch.cluster)
    clusters = launch.ctas // split
    rows, columns = -(-problem.m // spec.tile_m), -(-problem.n // spec.tile_n)
    tiles = rows * columns * problem.batch
    steps = problem.k // spec.tile_k
    share = np.diff([rank * steps // split for rank in range(split + 1)])
    index = np.arange(tiles)
    live_m = np.minimum(problem.m - index % rows * spec.tile_m, spec.tile_m)
    live_n = np.minimum(problem.n - index // rows % columns * spec.tile_n, spec.tile_n)
    step = (live_m + live_n) * spec.row_bytes + (spec.stage_bytes - spec.a_bytes - spec.b_bytes)
    stored = live_m * live_n * ITEMSIZE[spec.c_dtype] / split
    per_cta = np.zeros((clusters, split))
    np.add.at(per_cta, index % clusters, step[:, None] * share[None, :] + stored[:, None])
    exchanged = (split - 1) * tiles * spec.tile_m * spec.tile_n * 4
    what = f"{tiles} tiles of {spec.tile_m} x {spec.tile_n}"
    return Work(per_cta.reshape(-1), spec.stages * spec.stage_bytes, exchanged, what)


def decode(launch: Recorded, problem: Problem) -> Work:
    """``gemm.blockscaled.decode``: a cluster for each group of weight rows, its CTAs share K."""
    spec: Any = launch.spec
    split = math.prod(launch.cluster)
    groups = launch.grid[0] // split
    live_n = _rows_of_groups(problem.n, groups, spec.rows, spec.scale_rows)
    tokens = min(problem.m, spec.tokens)
    steps = problem.k // spec.tile_k
    share = np.diff([rank * steps // split for rank in range(split + 1)]) / steps
    stored = live_n * tokens * ITEMSIZE[spec.c_dtype] / split
    per_cta = ((live_n + tokens) * problem.operand_bytes(1))[:, None] * share[None, :] + stored[:, None]
    exchanged = (split - 1) * groups * launch.grid[1] * spec.rows * spec.tokens * 4
    what = f"{groups * launch.grid[1]} groups of {spec.rows} weight rows"
    return Work(np.tile(per_cta.reshape(-1), launch.grid[1]), spec.warps * spec.ring_bytes, exchanged, what)


def _rows_of_groups(n: int, groups: int, rows: int, block: int) -> NDArray[np.int64]:
    """Rows of B of each group: in a block of rows that share scales, every 32nd eight of them."""
    index = np.arange(n)
    inside = index % block
    group = index // block * (block // rows) + inside % 32 // 8 + inside // (block // 2) * 4 * (rows == 16)
    return np.bincount(group, minlength=groups)


MODELS: dict[str, Callable[[Recorded, Problem], Work]] = {
    "gemm.blockscaled": persistent,
    "gemm.blockscaled.decode": decode,
}


def resident(launch: Recorded, registers: int = 0) -> int:
    """CTAs of a launch that one multiprocessor holds at a time; ``registers`` a thread, 0 where they are not known."""
    threads = math.prod(launch.block)
    limits = [SM_CTAS, SM_THREADS // threads, SM_SMEM // (launch.smem + SMEM_RESERVED)]
    if registers:
        limits.append(SM_REGISTERS // (-(-registers // 8) * 8 * threads))
    return max(1, min(limits))


def deal(per_cta: NDArray[np.float64], cluster: int, slots: int, sm_count: int) -> NDArray[np.float64]:
    """Bytes of each multiprocessor when CTAs are dealt in order, a cluster at a time.

    A cluster goes to the GPC with most free slots, each of its CTAs to the emptiest multiprocessor there; where no GPC
    has room, it waits for CTAs to end. All bytes take the same time.
    """
    total = [0.0] * sm_count
    held = [0] * sm_count
    members = [range(sum(GPCS[sm_count][:i]), sum(GPCS[sm_count][: i + 1])) for i in range(len(GPCS[sm_count]))]
    gpc_of = [gpc for gpc, sms in enumerate(members) for _ in sms]
    free = [len(sms) * slots for sms in members]
    running: list[tuple[float, int]] = []
    now = 0.0
    for first in range(0, len(per_cta), cluster):
        sizes = per_cta[first : first + cluster].tolist()
        gpc = free.index(max(free))
        while free[gpc] < len(sizes):
            now = running[0][0]
            while running and running[0][0] <= now:  # those that end together free their slots together
                _, sm = heapq.heappop(running)
                held[sm] -= 1
                free[gpc_of[sm]] += 1
            gpc = free.index(max(free))
        free[gpc] -= len(sizes)
        for size in sizes:
            sm = min(members[gpc], key=held.__getitem__)
            held[sm] += 1
            total[sm] += size
            heapq.heappush(running, (now + size, sm))
    return np.array(total)
