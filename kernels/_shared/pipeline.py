"""A ring of shared-memory stages between one producer and several consumer warps.

Each stage has two mbarriers: ``full`` completes when the producer's copies have landed, ``empty`` when every consumer
warp has read the stage. A position counts steps from the start of the kernel; its stage is ``position % stages`` and
its phase bit ``position // stages % 2``. The producer waits for the *other* parity of ``empty``, which a fresh
barrier passes at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32

from b12x.kernels._shared import ptx


@dataclass(frozen=True)
class Ring:
    """``base`` is the shared address of ``2 * stages`` mbarriers: all ``full``, then all ``empty``."""

    base: Int32
    stages: int
    consumers: int

    @property
    def bytes(self) -> int:
        return 16 * self.stages

    def initialise(self) -> None:
        """By one thread, before a CTA-wide barrier."""
        for stage in range(self.stages):
            ptx.mbarrier_init(self.full(stage), 1)
            ptx.mbarrier_init(self.empty(stage), self.consumers)
        ptx.fence_mbarrier_init()

    def full(self, stage: Int32) -> Int32:
        return self.base + stage * 8

    def empty(self, stage: Int32) -> Int32:
        return self.base + (stage + self.stages) * 8

    def wait_empty(self, stage: Int32, phase: Int32) -> None:
        ptx.mbarrier_wait(self.empty(stage), phase ^ 1)

    def wait_full(self, stage: Int32, phase: Int32) -> None:
        ptx.mbarrier_wait(self.full(stage), phase)

    def advance(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """Stage and phase of the next position."""
        wrapped = Int32(stage + 1 == self.stages)
        return (stage + 1) * (1 - wrapped), phase ^ wrapped

    def skip(self, stage: Int32, phase: Int32, count: Int32) -> tuple[Int32, Int32]:
        """Stage and phase ``count`` positions on: those that another group of consumers takes."""
        position = stage + count
        turns = position // self.stages
        return position - turns * self.stages, (phase + turns) % 2
