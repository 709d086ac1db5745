"""MXFP8 weights for tests, dequantised by ml_dtypes: other code than the library's."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch

BF16 = ml_dtypes.bfloat16


class Weights(NamedTuple):
    """Values E4M3 and scales u8 as tensors, and the float64 of their exact bf16 product, all in one layout."""

    values: torch.Tensor
    scales: torch.Tensor
    exact: np.ndarray

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values, self.scales

    def matrix(self, major: str) -> np.ndarray:
        """``[B, K, N]``."""
        return self.exact if major == "n" else self.exact.transpose(0, 2, 1)


def dequantise(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """``bf16(q) * bf16(2^(b - 127))`` as a bf16 multiplication."""
    q = codes.view(ml_dtypes.float8_e4m3fn).astype(BF16)
    s = scales.view(ml_dtypes.float8_e8m0fnu).astype(BF16)
    with np.errstate(over="ignore", invalid="ignore"):
        return (q * np.repeat(s, 32, axis=-1)).astype(np.float64)


def weights(codes: np.ndarray, scales: np.ndarray) -> Weights:
    values = torch.tensor(codes).view(torch.float8_e4m3fn)
    return Weights(values, torch.tensor(scales), dequantise(codes, scales))


def random_weights(rng: np.random.Generator, batch: int, k: int, n: int, major: str) -> Weights:
    """Finite codes of all sizes, scales over eight octaves."""
    shape = (batch, k, n) if major == "n" else (batch, n, k)
    codes = rng.integers(0, 0x7F, shape).astype(np.uint8) | rng.integers(0, 2, shape).astype(np.uint8) << 7
    return weights(codes, rng.integers(122, 130, (*shape[:2], shape[2] // 32)).astype(np.uint8))


def random_rows(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.tensor(rng.standard_normal(shape), dtype=torch.float32).to(torch.bfloat16)


def check(out: torch.Tensor, lhs: torch.Tensor, matrix: np.ndarray) -> None:
    """Every element of ``out [B, M, N]`` within half a unit of bf16 plus the bound on f32 accumulation."""
    x = lhs.cpu().double().numpy()
    reference, k = x @ matrix, x.shape[-1]
    accumulation = (4 + k / 16) * 2.0**-23 * (np.abs(x) @ np.abs(matrix))
    exponent = np.maximum(np.frexp(np.abs(reference) + accumulation)[1] - 1, -126)
    bound = np.ldexp(0.5, exponent - 7) + accumulation
    error = np.abs(out.cpu().double().numpy() - reference)
    assert (error <= bound).all(), f"{(~(error <= bound)).sum()} elements outside their bound"
