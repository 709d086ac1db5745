"""NVFP4 operands for tests, made with ml_dtypes and index arithmetic, never with the library's own code.

Tensors are made on torch's default device, which the ``target`` fixture sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = 16


def golden_quantize(x: npt.NDArray[np.float32], global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[M, K]`` and linear E4M3 scale bytes ``[M, K/16]`` by the contract's chain, one f32 rounding a step.

    ml_dtypes rounds to nearest even but does not saturate, so values are clamped first.
    """
    one, scale = np.float32(1), np.float32(global_scale)
    sixth = np.uint32(0x3E2AAAAB).view(np.float32)
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, BLOCK)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=-1)
        b = np.minimum(scale * (amax * sixth), np.float32(448)).astype(E4M3)
        factor = one / (b.astype(np.float32) * (one / scale))
        scaled = np.where(b.astype(np.float32)[..., None] == 0, np.float32(0), blocks * factor[..., None])
    codes = np.clip(scaled, -6, 6).astype(E2M1).view(np.uint8) & 15
    codes[codes == 8] = 0
    return codes.reshape(x.shape), b.view(np.uint8)


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, low nibble first."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def swizzled_offsets(batch: int, rows: int, columns: int) -> np.ndarray:
    """Byte offset of the scale of every ``[l, row, column]``."""
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    entry, r, c = np.meshgrid(np.arange(batch), np.arange(rows), np.arange(columns), indexing="ij")
    tile = (entry * row_tiles + r // 128) * column_tiles + c // 4
    return tile * 512 + (r % 32) * 16 + (r // 32 % 4) * 4 + c % 4


def swizzle(linear: np.ndarray, fill: np.ndarray | int) -> np.ndarray:
    """Linear scale bytes ``[L, rows, columns]`` in swizzled storage whose pads hold ``fill``."""
    batch, rows, columns = linear.shape
    storage = np.empty(batch * -(-rows // 128) * -(-columns // 4) * 512, np.uint8)
    storage[:] = fill
    storage[swizzled_offsets(batch, rows, columns)] = linear
    return storage


@dataclass(frozen=True)
class Operand:
    """``tensor`` uint8 ``[rows, K/2, L]``, ``scales`` swizzled storage, ``values`` f64 ``[L, rows, K]``."""

    tensor: torch.Tensor
    scales: torch.Tensor
    values: npt.NDArray[np.float64]

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tensor, self.scales


def operand(codes: np.ndarray, scale_bytes: np.ndarray, rng: np.random.Generator) -> Operand:
    """Operand of codes ``[L, rows, K]`` and linear scale bytes ``[L, rows, K/16]``; scale pads hold random bytes, NaN
    too."""
    pads = rng.choice(np.array([0x00, 0x7F, 0xFF, 0x55, 0x7E], np.uint8), swizzled_size(scale_bytes.shape))
    values = codes.astype(np.uint8).view(E2M1).astype(np.float64)
    values *= np.repeat(scale_bytes.view(E4M3).astype(np.float64), BLOCK, axis=-1)
    return Operand(
        torch.tensor(pack(codes)).permute(1, 2, 0),
        torch.tensor(swizzle(scale_bytes, pads)),
        values,
    )


def swizzled_size(shape: tuple[int, int, int]) -> int:
    batch, rows, columns = shape
    return batch * -(-rows // 128) * -(-columns // 4) * 512


def random_operand(rng: np.random.Generator, batch: int, rows: int, k: int, distribution: str) -> Operand:
    """``normal``: N(0, 1) quantised with G = 1. ``octaves``: uniform codes, block scales over four octaves. ``mean1``:
    N(1, 0.1), quantised likewise. ``distinct``: uniform codes and a scale that differs between neighbouring blocks."""
    shape = (batch, rows, k)
    if distribution in ("normal", "mean1"):
        x = rng.standard_normal(shape) if distribution == "normal" else 1 + 0.1 * rng.standard_normal(shape)
        codes, scale_bytes = golden_quantize(x.reshape(-1, k).astype(np.float32), 1.0)
        return operand(codes.reshape(shape), scale_bytes.reshape(batch, rows, -1), rng)
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    blocks = (batch, rows, k // BLOCK)
    if distribution == "octaves":
        scale_bytes = rng.integers(0x28, 0x48, blocks).astype(np.uint8)
    else:
        index = np.arange(np.prod(blocks)).reshape(blocks)
        scale_bytes = (0x20 + (index * 37 + 11 * (index // (k // BLOCK))) % 0x40).astype(np.uint8)
    return operand(codes, scale_bytes, rng)
