"""Planner of ``toy.scale``: a kernel for few elements and, where there can be more, one for many."""

from __future__ import annotations

from dataclasses import dataclass

from b12x._runtime.spec import Role
from b12x.toy.scale.spec import ScaleSpec


@dataclass(frozen=True, kw_only=True)
class Caps:
    device: object
    n: int
    variant: str = "good"
    fast: bool = False

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"toy.scale: n is {self.n}; it must be at least 1")


def roles(caps: Caps) -> tuple[Role, ...]:
    few = ScaleSpec(variant=caps.variant, block=64)
    many = ScaleSpec(variant=caps.variant, block=128)
    candidates = (many, few) if caps.fast else (many,)
    return (Role("few", (few,)),) if caps.n <= 64 else (Role("few", (few,)), Role("many", candidates))
