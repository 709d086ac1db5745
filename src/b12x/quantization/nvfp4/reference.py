"""NVFP4 quantisation in plain numpy: the contract as arithmetic, one f32 rounding a line.

Formula: per block of 16 values ``b = E4M3(min(G * (amax * c), 448))`` with c = 1/6 rounded to f32, ``r = 1/(b *
(1/G))``, ``q = E2M1(x * r)``, all zero where b = 0 (also where G is no positive number), r the largest f32 where it
overflows; the real value is ``q * b / G``. E2M1 and E4M3 round to nearest even and saturate (PTX ISA 9.7.9.22,
``cvt.rn.satfinite``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BLOCK = 16
#: Magnitudes by code, and the midpoints between them: a tie goes to the even code.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_ONE_SIXTH = np.array(0x3E2AAAAB, np.uint32).view(np.float32)


def e2m1_codes(x: F32) -> U8:
    """Codes 0..15 of f32 values; bit 3 is the sign, and -0 is never produced."""
    magnitude = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for low in range(7):
        middle = (E2M1[low] + E2M1[low + 1]) / np.float32(2)
        code += np.where(low % 2 == 0, magnitude > middle, magnitude >= middle).astype(np.uint8)
    code[(x < 0) & (code > 0)] |= 8
    return code


def e2m1_values(codes: U8) -> F32:
    """f32 values of codes 0..15."""
    values: F32 = np.concatenate([E2M1, -E2M1])[codes]
    return values


def e4m3_codes(x: F32) -> U8:
    """Codes of non-negative f32 values, saturating at 448 (0x7e)."""
    clipped = np.minimum(x, np.float32(448))
    # Values below 2^-6 share the subnormal step 2^-9. A mantissa that rounds up carries into the exponent by itself.
    exponent = np.where(clipped < 2.0**-6, -6, np.frexp(clipped)[1] - 1)
    codes: U8 = (np.rint(np.ldexp(clipped, 3 - exponent)) + 8 * (exponent + 6)).astype(np.uint8)
    return codes


def e4m3_values(codes: U8) -> F32:
    """f32 values of the non-negative codes 0x00..0x7e."""
    exponent, mantissa = (codes >> 3).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values: F32 = np.where(exponent == 0, np.ldexp(mantissa, -9), normal).astype(np.float32)
    return values


def quantize(x: F32, global_scale: float) -> tuple[U8, U8]:
    """Rows ``[M, K]`` in f32 to packed codes ``[M, K/2]`` (low nibble first) and linear scale codes ``[M, K/16]``."""
    rows, columns = x.shape
    scale = np.float32(global_scale)
    blocks = x.reshape(rows, columns // BLOCK, BLOCK).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        amax = np.abs(blocks).max(axis=2)
        product = scale * (amax * _ONE_SIXTH)
        scales = e4m3_codes(np.minimum(np.fmax(product, np.float32(0)), np.float32(448)))
        inverse = np.float32(1) / scale
        factor = np.minimum(np.float32(1) / (e4m3_values(scales) * inverse), np.finfo(np.float32).max)
        codes = e2m1_codes(np.where(scales[..., None] == 0, np.float32(0), blocks * factor[..., None]))
    codes = codes.reshape(rows, columns)
    packed: U8 = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return packed, scales


def dequantize(packed: U8, scales: U8, global_scale: float = 1.0) -> npt.NDArray[np.float64]:
    """Real values ``[M, K]`` in f64 of packed codes ``[M, K/2]`` and linear scale codes ``[M, K/16]``."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    values: npt.NDArray[np.float64] = e2m1_values(codes).astype(np.float64)
    return values * np.repeat(e4m3_values(scales), BLOCK, axis=1) / global_scale
