"""Planner of ``gemm.tensor_fp8_linear``: the one part of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from b12x._runtime.spec import Role
from b12x.gemm import _parts
from b12x.gemm.blockscaled import planner as blockscaled

OP = "gemm.tensor_fp8_linear"


@dataclass(frozen=True, kw_only=True)
class Caps(_parts.LinearCaps):
    """Capacities and static choices of a plan for ``y = scale * (x @ W^T) (+ bias)`` of E4M3; K is a multiple of 32.

    Any live token count 0..max_tokens; ``in_features`` (K) and ``out_features`` (N) are exact. ``output_dtype`` is
    ``bfloat16`` or ``float16``, as a string or a torch dtype.
    """

    op: ClassVar[str] = OP


def product(caps: Caps) -> blockscaled.Caps:
    """The part that multiplies. Rows of the input may be shorter than those of the prepared weight."""
    short = caps.in_features < caps.padded_in_features
    return replace(_parts.product(caps, plain_fp8=True), k_a=caps.in_features if short else None)


def roles(caps: Caps) -> tuple[Role, ...]:
    """Every kernel that some token count in 1..max_tokens needs."""
    return _parts.together(gemm=blockscaled.roles(product(caps)))
