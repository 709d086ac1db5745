"""Planner of ``gemm.block_fp8_linear``: the parts of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.spec import Role
from b12x.gemm import _parts

OP = "gemm.block_fp8_linear"


@dataclass(frozen=True, kw_only=True)
class Caps(_parts.LinearCaps):
    """Capacities and static choices of a plan for ``y = x @ W^T (+ bias)``; K is a multiple of 128.

    Any live token count 0..max_tokens; ``in_features`` (K) and ``out_features`` (N) are exact. ``output_dtype``, also
    that of the input, is ``bfloat16`` or ``float16``, as a string or a torch dtype.
    """

    op: ClassVar[str] = OP
    quantum: ClassVar[int] = _parts.COLUMNS


def roles(caps: Caps) -> tuple[Role, ...]:
    """Every kernel that some token count in 1..max_tokens needs."""
    return _parts.linear_roles(caps)
