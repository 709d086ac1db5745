"""MXFP8 quantisation in plain numpy: the contract as arithmetic, one f32 rounding a line.

Per block of 32 values ``s = amax * (1/448)`` in f32, rounded up to a power of two 2^(b - 127) by integer arithmetic on
its bits, ``q = E4M3(x * 2^(127 - b))`` to nearest even, saturating; b = 127 and q = 0 where s is 0; the real value is
``q * 2^(b - 127)`` (OCP Microscaling Formats 1.0, E8M0).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from b12x.quantization.nvfp4.reference import e4m3_codes, e4m3_values

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BLOCK = 32
_INVERSE_MAX = np.array(0x3B124925, np.uint32).view(np.float32)


def e8m0_codes(amax: F32) -> U8:
    """Scale codes of blocks by their largest magnitude."""
    bits = (amax * _INVERSE_MAX).astype(np.float32).view(np.uint32)
    up = np.where(bits & 0x7FFFFF, (bits + 0x800000) & 0x7F800000, bits)
    codes: U8 = np.where(bits == 0, 127, up >> 23 & 0xFF).astype(np.uint8)
    return codes


def quantize(x: F32) -> tuple[U8, U8]:
    """Rows ``[M, K]`` in f32 to E4M3 codes ``[M, K]`` and E8M0 codes ``[M, K/32]``."""
    rows, columns = x.shape
    blocks = x.reshape(rows, columns // BLOCK, BLOCK).astype(np.float32)
    amax: F32 = np.abs(blocks).max(axis=2)
    scales = e8m0_codes(amax)
    empty = (amax * _INVERSE_MAX).astype(np.float32)[..., None] == 0
    scaled = np.where(empty, np.float32(0), np.ldexp(blocks, 127 - scales.astype(np.int32)[..., None]))
    codes = e4m3_codes(np.abs(scaled).astype(np.float32)) | np.where(np.signbit(scaled), np.uint8(0x80), np.uint8(0))
    return codes.reshape(rows, columns), scales


def inverse_rope(
    x: F32, positions: npt.NDArray[np.integer], cos_sin_cache: F32, *, head_dim: int, nope_dim: int
) -> F32:
    """Rows ``[M, K]`` with the last columns of every head turned back by the row's position.

    A pair ``(x0, x1)`` of neighbours becomes ``fma(x1, s, x0 * c)`` and ``fma(x0, -s, x1 * c)`` with its own c and s of
    the cache's row, which holds all c, then all s.
    """
    rows, columns = x.shape
    half = cos_sin_cache.shape[1] // 2
    heads = x.reshape(rows, columns // head_dim, head_dim).astype(np.float32)
    entry = cos_sin_cache[positions].astype(np.float32)
    cosine, sine = entry[:, None, :half], entry[:, None, half:]
    even, odd = heads[..., nope_dim::2], heads[..., nope_dim + 1 :: 2]
    turned = heads.copy()
    turned[..., nope_dim::2] = fused_multiply_add(odd, sine, even * cosine)
    turned[..., nope_dim + 1 :: 2] = fused_multiply_add(even, -sine, odd * cosine)
    result: F32 = turned.reshape(rows, columns)
    return result


def fused_multiply_add(a: F32, b: F32, c: F32) -> F32:
    """``a * b + c`` rounded once.

    The product is exact in f64. Their sum may not be: it is rounded to odd, by its exact error, which the rounding to
    f32 then cannot tell from the exact one (f64 has more than two digits over twice those of f32).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.broadcast_to(c.astype(np.float64), product.shape)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + step, bits)
    found: F32 = odd.view(np.float64).astype(np.float32)
    return found


def dequantize(values: U8, scales: U8) -> npt.NDArray[np.float64]:
    """Real values ``[M, K]`` in f64 of E4M3 codes and E8M0 codes ``[M, K/32]``."""
    magnitude = e4m3_values(values & np.uint8(0x7F)).astype(np.float64)
    signed = np.where(values & 0x80, -magnitude, magnitude)
    real: npt.NDArray[np.float64] = np.ldexp(signed, np.repeat(scales.astype(np.int32) - 127, BLOCK, axis=1))
    return real
