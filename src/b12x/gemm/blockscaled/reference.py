"""Block-scaled GEMM in plain numpy at float64: what the kernel approximates, and the bound it is judged by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def matmul(a: F64, b: F64, alpha: float = 1.0) -> F64:
    """``alpha * A B^T`` for dequantised operands ``A [M, K]`` and ``B [N, K]``."""
    product: F64 = alpha * (a @ b.T)
    return product


def tolerance(a: F64, b: F64, alpha: float, c_dtype: str, mma_k: int = 64) -> F64:
    """Largest allowed ``|C - reference|`` for each element ``[M, N]``.

    Half a unit in the last place of the output, plus ``(4 + K / k_mma) * 2^-23 * sum |a b|`` for f32 accumulation in
    any order, truncation included. ``mma_k`` is the K of one MMA: 64 of FP4, 32 of FP8.
    """
    result = np.abs(matmul(a, b, alpha))
    magnitude = abs(alpha) * (np.abs(a) @ np.abs(b).T)
    accumulation: F64 = (4 + a.shape[1] / mma_k) * 2.0**-23 * magnitude
    return half_ulp(result + accumulation, c_dtype) + accumulation


def half_ulp(x: F64, dtype: str) -> F64:
    """Half the distance between neighbouring values of a dtype around ``|x|``."""
    digits, smallest = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126)}[dtype]
    _, exponent = np.frexp(x)
    half: F64 = np.ldexp(0.5, np.maximum(exponent - 1, smallest) - (digits - 1))
    return half
