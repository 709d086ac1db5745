"""Planner of ``quantization.nvfp4``: which kernel, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass

from b12x._runtime import checks
from b12x._runtime.spec import Role
from b12x.quantization.nvfp4.spec import DTYPES, Nvfp4QuantizeSpec

OP = "quantization.nvfp4"


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capacities of a plan: up to ``m`` rows (any live count 0..m) of exactly ``k`` columns, a multiple of 64.

    ``k_out`` is the width of the outputs, ``k`` by default; where it is given, a multiple of 64 and at least ``k``, k
    may be any multiple of 8, and the further columns count as zeros. ``dtype`` of the rows is ``bfloat16`` or
    ``float16``.
    """

    device: object = None
    m: int
    k: int
    dtype: str = "bfloat16"
    k_out: int | None = None

    def __post_init__(self) -> None:
        checks.whole(OP, "m", self.m, fix="choose a row capacity in that range")
        checks.whole(OP, "k", self.k)
        if self.k_out is None and self.k % 64:
            raise ValueError(
                f"{OP}: k is {self.k}; a multiple of 64 is needed (4 blocks of 16 share a scale word): "
                "pass k_out, the K of the prepared weight, and the missing columns count as zeros"
            )
        if self.k_out is not None:
            checks.whole(OP, "k_out", self.k_out, least=self.k)
            if self.k % 8 or self.k_out % 64:
                raise ValueError(
                    f"{OP}: k is {self.k} and k_out {self.k_out}; needed are multiples of 8 and of 64: rows are read "
                    "16 bytes at a time, and 4 blocks of 16 share a scale word"
                )
        if self.dtype not in DTYPES:
            raise ValueError(f"{OP}: dtype is {self.dtype!r}; needed is {' or '.join(DTYPES)}: convert the rows before")


def width(caps: Caps) -> int:
    """Columns of the outputs."""
    return caps.k_out or caps.k


def roles(caps: Caps) -> tuple[Role, ...]:
    """The one kernel: it serves every row count and width."""
    return (Role("quantize", (Nvfp4QuantizeSpec(dtype=caps.dtype),)),)


def grid(rows: int, k: int) -> int:
    """CTAs for ``rows`` live rows: one for each scale tile of 128 rows by 64 columns."""
    return -(-rows // Nvfp4QuantizeSpec.tile_rows) * (k // Nvfp4QuantizeSpec.tile_columns)
