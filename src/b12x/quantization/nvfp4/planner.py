"""Planner of ``quantization.nvfp4``: which kernel, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass

from b12x._runtime.spec import Role
from b12x.quantization.nvfp4.spec import DTYPES, Nvfp4QuantizeSpec


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capacities of a plan: up to ``m`` rows (any live count 0..m) of exactly ``k`` columns, a multiple of 64.

    ``dtype`` of the rows is ``bfloat16`` or ``float16``.
    """

    device: object = None
    m: int
    k: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.m < 1:
            raise ValueError(f"quantization.nvfp4: m is {self.m}; it is a row capacity and must be at least 1")
        if self.k < 64 or self.k % 64:
            raise ValueError(
                f"quantization.nvfp4: k is {self.k}; a multiple of 64 is needed (4 blocks of 16 share a scale word): "
                "pad the rows with zeros"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"quantization.nvfp4: dtype is {self.dtype!r}; it reads {' or '.join(DTYPES)}")


def roles(caps: Caps) -> tuple[Role, ...]:
    """The one kernel: it serves every row count and width."""
    return (Role("quantize", (Nvfp4QuantizeSpec(dtype=caps.dtype),)),)


def grid(rows: int, k: int) -> int:
    """CTAs for ``rows`` live rows: one for each scale tile of 128 rows by 64 columns."""
    return -(-rows // Nvfp4QuantizeSpec.tile_rows) * (k // Nvfp4QuantizeSpec.tile_columns)
