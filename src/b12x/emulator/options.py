"""How a launch runs, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .observe import Observer


@dataclass(frozen=True)
class Options:
    """``schedule`` runs the warps of a CTA together (lockstep) or in random order from ``seed``; ``copies`` lets
    asynchronous copies take effect as late as the rules allow, or at once; ``concurrent`` CTAs run interleaved, for
    kernels whose CTAs wait for each other. ``checks=False`` lets data that nothing wrote pass, and ``races=False`` lets
    unordered accesses to shared memory and missing proxy fences pass (bounds stay checked). With
    ``races=True`` one lane's arrival at an mbarrier also releases what the other lanes of its warp have loaded, as many
    kernels assume; ``"strict"`` wants the ``bar.warp.sync`` that PTX does. A launch that takes more
    than ``max_steps`` steps (one instruction of a group of warps that run together) raises ``StepLimit``. An
    ``observer`` is told what the launch does."""

    seed: int = 0
    schedule: Literal["lockstep", "random"] = "lockstep"
    copies: Literal["late", "eager"] = "late"
    checks: bool = True
    races: bool | Literal["strict"] = True
    concurrent: int = 1
    max_steps: int | None = None
    observer: Observer | None = None


@dataclass
class Stats:
    """``instructions`` counts per warp, ``steps`` per group of warps that ran together."""

    instructions: int = 0
    steps: int = 0
    ctas: int = 0
    seconds: float = 0.0
