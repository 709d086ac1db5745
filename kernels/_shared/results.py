"""Results of a GEMM as the words that C holds, and the bias that is added to them."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Uint32

from b12x.kernels._shared import ptx


def convert(values: Sequence[Float32], dtype: str) -> list[Uint32]:
    """f32 results as words of C: one each, or two of 16 bits in one."""
    if dtype == "float32":
        return [ptx.bits_of(v) for v in values]
    return [ptx.pack_16(*values[i : i + 2], dtype) for i in range(0, len(values), 2)]


def add(word: Uint32, term: Uint32, dtype: str) -> Uint32:
    """The values of a word of C plus those of a word of bias, each sum rounded to C's dtype."""
    if dtype == "float32":
        return ptx.bits_of(ptx.float_of(word) + ptx.float_of(term))
    pairs = zip(ptx.unpack_16(word, dtype), ptx.unpack_16(term, dtype), strict=True)
    return ptx.pack_16(*(x + y for x, y in pairs), dtype)
