"""MXFP8 rows for tests, made with ml_dtypes, index arithmetic and fractions, never with the library's own code."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import numpy.typing as npt

E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = 32
#: 1/448 in f32.
INVERSE = np.uint32(0x3B124925).view(np.float32)


def golden_scales(amax: npt.NDArray[np.float32]) -> np.ndarray:
    """E8M0 codes: the exponent of the smallest power of two that is not less than the f32 product ``amax * (1/448)``.

    Codes end at 1 (2^-126), since a product below that is no normal number; 127 where it is 0.
    """
    product = (amax * INVERSE).astype(np.float32)
    mantissa, exponent = np.frexp(product.astype(np.float64))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.where(product == 0, 127, np.maximum(exponent + 127, 1)).astype(np.uint8)


def golden_quantize(x: npt.NDArray[np.float32]) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 codes ``[M, K]`` and E8M0 codes ``[M, K/32]`` of f32 rows; ml_dtypes rounds to nearest even."""
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    scales = golden_scales(amax)
    # Scaling by a power of two is exact in f64, and E4M3 has few enough digits for one rounding from there.
    scaled = blocks.astype(np.float64) * np.exp2(127.0 - scales[..., None])
    scaled[(amax * INVERSE).astype(np.float32) == 0] = 0
    codes = np.clip(scaled, -448, 448).astype(E4M3).view(np.uint8)
    return codes.reshape(x.shape), scales


def golden_inverse_rope(
    x: np.ndarray, positions: np.ndarray, cache: np.ndarray, head_dim: int, nope_dim: int
) -> npt.NDArray[np.float32]:
    """Rows turned back, pair by pair: one product rounded to f32, then an exact fused multiply-add rounded once."""
    turned = x.astype(np.float32).copy()
    half = cache.shape[1] // 2
    for row, position in enumerate(positions):
        entry = cache[position].astype(np.float32)
        for column in range(0, x.shape[1], 2):
            place = column % head_dim - nope_dim
            if place < 0:
                continue
            c, s = entry[place // 2], entry[half + place // 2]
            x0, x1 = turned[row, column], turned[row, column + 1]
            turned[row, column] = fma(x1, s, np.float32(x0 * c))
            turned[row, column + 1] = fma(x0, -s, np.float32(x1 * c))
    return turned


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """``a * b + c`` rounded to f32 once, to nearest even, by exact fractions."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))  # within one neighbour of the nearest
    candidates = {near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))}

    def distance(value: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(value)) - exact), int(value.view(np.uint32)) & 1

    best = min((value for value in candidates if np.isfinite(value)), key=distance)
    if exact == 0:  # the sign of an exact zero: that of the terms, where they agree
        best = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    return best
