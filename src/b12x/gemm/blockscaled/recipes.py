"""The encodings of GEMM operands: which dtypes name a recipe, and what a kernel has to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

C_DTYPES = ("bfloat16", "float16", "float32")
#: Dynamic shared memory a CTA may use on SM120 (bytes).
SMEM_LIMIT = 101_376


@dataclass(frozen=True)
class Recipe:
    """How operands are encoded: bits an element, elements a scale along K, and where the scales are applied.

    ``scales``: ``mma`` (the instruction applies one scale a block, from the swizzled layout), ``none`` (the instruction
    gets constant unit scales) or ``f32`` (a float a row of A and a float a 128 x 128 block of B, applied to partial
    sums over 128 of K).
    """

    bits: int
    block: int
    scales: Literal["mma", "none", "f32"]

    @property
    def mma_k(self) -> int:
        """K of one MMA: 32 bytes of every row."""
        return 256 // self.bits

    def row_bytes(self, k: int) -> int:
        """Bytes of ``k`` elements of one row."""
        return k * self.bits // 8


RECIPES = {
    "nvfp4": Recipe(bits=4, block=16, scales="mma"),
    "mxfp4": Recipe(bits=4, block=32, scales="mma"),
    "mxfp8": Recipe(bits=8, block=32, scales="mma"),
    "fp8": Recipe(bits=8, block=32, scales="none"),
    "block_fp8": Recipe(bits=8, block=128, scales="f32"),
}

#: Recipe by (operand dtype, scale dtype, elements a scale). Plain FP8 has the dtypes of MXFP8 and asks by a flag.
BY_DTYPES = {
    ("float4_e2m1fn", "float8_e4m3fn", 16): "nvfp4",
    ("float4_e2m1fn", "float8_e8m0fnu", 32): "mxfp4",
    ("float8_e4m3fn", "float8_e8m0fnu", 32): "mxfp8",
    ("float8_e4m3fn", "float32", 128): "block_fp8",
}
