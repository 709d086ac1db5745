"""MXFP8 weights in bf16, and E4M3 outputs, in plain numpy: the contract as arithmetic.

A weight is ``bf16(q) * bf16(2^(b - 127))`` rounded to nearest even. The exact product has four significant bits, so it
is rounded only below bf16's smallest normal number, 2^-126, and above its largest, to infinity. An E4M3 output is
``E4M3(f32(t) * (1 / q_scale))`` of a bf16 result t, both f32 operations correctly rounded, saturating at 448.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

BLOCK = 32


def e4m3_values(codes: U8) -> F32:
    """f32 values of E4M3 codes; 0x7f and 0xff are NaN."""
    magnitude = codes & np.uint8(0x7F)
    exponent, mantissa = (magnitude >> 3).astype(np.int32), (magnitude & 7).astype(np.float32)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    value = np.where(magnitude == 0x7F, np.nan, value)
    signed: F32 = np.where(codes >= 0x80, -value, value).astype(np.float32)
    return signed


def e8m0_values(codes: U8) -> F64:
    """Powers of two of E8M0 codes; 255 is NaN."""
    values: F64 = np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127))
    return values


def round_bf16(x: F64) -> F64:
    """Nearest bf16 value, ties to even; subnormals kept, infinity beyond the range."""
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.maximum(np.frexp(x)[1] - 1, -126)
        rounded = np.ldexp(np.rint(np.ldexp(x, 7 - exponent)), exponent - 7)
    largest = np.ldexp(255.0, 120)
    values: F64 = np.where(np.isfinite(x), np.where(np.abs(rounded) > largest, np.copysign(np.inf, x), rounded), x)
    return values


def dequantise(codes: U8, scales: U8) -> F64:
    """bf16 values of E4M3 codes ``[..., C]`` and E8M0 codes ``[..., C/32]``."""
    with np.errstate(invalid="ignore"):
        return round_bf16(e4m3_values(codes).astype(np.float64) * np.repeat(e8m0_values(scales), BLOCK, axis=-1))


def quantise(results: F32, q_scale: float) -> U8:
    """E4M3 codes of bf16 results given as f32."""
    with np.errstate(over="ignore"):
        x = results.astype(np.float32) * (np.float32(1) / np.float32(q_scale))
    magnitude = np.minimum(np.abs(x), np.float32(448))
    exponent = np.where(magnitude < 2.0**-6, -6, np.frexp(magnitude)[1] - 1)
    codes = np.where(np.isnan(x), 0x7F, np.rint(np.ldexp(magnitude, 3 - exponent)) + 8 * (exponent + 6))
    signed: U8 = codes.astype(np.uint8) | (np.signbit(x) & ~np.isnan(x)).astype(np.uint8) << np.uint8(7)
    return signed
