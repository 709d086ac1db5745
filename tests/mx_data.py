"""Operands of every GEMM recipe for tests, made with ml_dtypes and index arithmetic, never with the library's own code.

As :mod:`tests.nvfp4_data`, which serves ``nvfp4``.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from tests.nvfp4_data import E2M1, E4M3, pack, random_operand, swizzle, swizzled_size

E8M0 = ml_dtypes.float8_e8m0fnu
#: The dtype arguments of the op for each recipe, and K of one MMA.
RECIPES = {
    "nvfp4": ({"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "sf_vec_size": 16}, 64),
    "mxfp4": ({"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e8m0fnu", "sf_vec_size": 32}, 64),
    "mxfp8": ({"ab_dtype": "float8_e4m3fn", "sf_dtype": "float8_e8m0fnu", "sf_vec_size": 32}, 32),
    "fp8": ({"ab_dtype": "float8_e4m3fn", "sf_dtype": "float8_e8m0fnu", "sf_vec_size": 32, "plain_fp8": True}, 32),
    "block_fp8": ({"ab_dtype": "float8_e4m3fn", "sf_dtype": "float32", "sf_vec_size": 128, "block_fp8": True}, 32),
}


@dataclass(frozen=True)
class Operand:
    """``tensor`` ``[rows, K', L]``, the scales as the op takes them, ``values`` f64 ``[L, rows, K]``."""

    tensor: torch.Tensor
    scales: torch.Tensor | None
    values: npt.NDArray[np.float64]

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.tensor, self.scales


def make(
    rng: np.random.Generator, recipe: str, batch: int, rows: int, k: int, kind: str = "distinct", weight: bool = False
) -> Operand:
    """``kind``: ``distinct`` (uniform codes, a scale of its own for each block), ``mean1``, ``normal`` (that of values
    that were quantised), ``grid`` (few codes and scales: exact f32 sums)."""
    if recipe == "nvfp4" and kind != "grid":
        made = random_operand(rng, batch, rows, k, kind)
        return Operand(made.tensor, made.scales, made.values)
    block = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}.get(recipe, 128)
    row_block = 128 if recipe == "block_fp8" and weight else 1
    shape = (batch, -(-rows // row_block), k // block)
    scale = _scales(rng, recipe, shape, kind)
    element = E2M1 if recipe in ("nvfp4", "mxfp4") else E4M3
    if kind in ("mean1", "normal"):
        x = rng.standard_normal((batch, rows, k)) * (0.1 if kind == "mean1" else 1) + (kind == "mean1")
        most = 6.0 if element is E2M1 else 448.0
        scaled = x * most / 5 if recipe == "fp8" else x * most / 4.5 / 2.0
        codes = np.clip(scaled, -most, most).astype(element)
        if recipe != "fp8":
            scale = np.full_like(scale, 127 if scale.dtype == np.uint8 else 0.01)
    elif kind == "grid":
        codes = rng.integers(0, 4, (batch, rows, k)).astype(np.float64).astype(element)
    else:
        bits = rng.integers(0, 16 if element is E2M1 else 256, (batch, rows, k)).astype(np.uint8)
        if element is E4M3:
            bits[bits & 0x7F == 0x7F] = 0x38
        codes = bits.view(element)
    expanded = np.repeat(np.repeat(_values(recipe, scale), block, axis=2), row_block, axis=1)[:, :rows]
    values = codes.astype(np.float64) * expanded
    raw = codes.view(np.uint8) & (15 if element is E2M1 else 255)
    tensor = torch.tensor(pack(raw)) if element is E2M1 else torch.tensor(raw).view(torch.float8_e4m3fn)
    return Operand(tensor.permute(1, 2, 0), _as_taken(rng, recipe, scale), values)


def _scales(rng: np.random.Generator, recipe: str, shape: tuple[int, int, int], kind: str) -> np.ndarray:
    if recipe == "fp8":
        return np.ones(shape, np.float32)
    if recipe == "block_fp8":
        return np.ones(shape, np.float32) if kind == "grid" else (0.3 + rng.random(shape)).astype(np.float32)
    if recipe == "nvfp4":
        return np.full(shape, 0x38, np.uint8)
    low, high = (126, 128) if kind == "grid" else (121, 133)
    return rng.integers(low, high, shape).astype(np.uint8)


def _values(recipe: str, scale: np.ndarray) -> npt.NDArray[np.float64]:
    if scale.dtype == np.float32:
        return scale.astype(np.float64)
    return scale.view(E4M3 if recipe == "nvfp4" else E8M0).astype(np.float64)


def _as_taken(rng: np.random.Generator, recipe: str, scale: np.ndarray) -> torch.Tensor | None:
    if recipe == "fp8":
        return None
    if recipe == "block_fp8":
        return torch.tensor(scale).permute(1, 2, 0)
    pads = rng.choice(np.array([0x00, 0x7F, 0xFF, 0x55, 0xFE], np.uint8), swizzled_size(scale.shape))
    return torch.tensor(swizzle(scale, pads))
