"""Planner of the MMA probe, through which the default wheel gets its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from b12x._runtime.spec import Role
from b12x.verify.mma.spec import MmaSpec


@dataclass(frozen=True, kw_only=True)
class Caps:
    """``kind`` is one of :data:`b12x.verify.mma.spec.KINDS`."""

    device: object = None
    kind: str


def roles(caps: Caps) -> tuple[Role, ...]:
    """The one kernel: tiles and K are live."""
    return (Role("chain", (MmaSpec(kind=caps.kind),)),)
