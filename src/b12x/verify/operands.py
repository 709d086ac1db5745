"""NVFP4 operands in torch, on any device, and their float64 values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from b12x.quantization import scales

BLOCK = 16
DISTRIBUTIONS = ("normal", "octaves", "mean1")

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
#: Rows that are made at a time: temporaries of a large operand would not fit on a small card.
_ROWS = 2048


@dataclass(frozen=True)
class Operand:
    """``packed`` uint8 ``[rows, K/2, L]``, ``swizzled`` scales, and ``linear`` scales ``[L, rows, K/16]``."""

    packed: torch.Tensor
    swizzled: torch.Tensor
    linear: torch.Tensor

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.packed, self.swizzled

    def values(self, rows: slice = slice(None)) -> torch.Tensor:
        """float64 ``[L, rows, K]``."""
        return dequantise(self.packed[rows].permute(2, 0, 1), self.linear[:, rows])


def dequantise(packed: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    """float64 values of packed codes ``[..., K/2]`` and linear E4M3 scale bytes ``[..., K/16]``."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    values = table[codes.int()].unflatten(-1, (-1, BLOCK))
    return (values * linear.view(torch.float8_e4m3fn).double().unsqueeze(-1)).flatten(-2)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[rows, K]`` f32 to packed codes and linear scales: near ``x``, but not the op's contract to the byte."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    scaled = blocks / scale.float().unsqueeze(-1).clamp(min=2.0**-9)
    middles = torch.tensor(_MIDPOINTS, device=x.device)
    codes = torch.bucketize(scaled.abs(), middles, out_int32=True).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    codes = codes.flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale.view(torch.uint8)


def random_operand(generator: torch.Generator, rows: int, k: int, distribution: str, batch: int = 1) -> Operand:
    """Seeded operand with pads that would show.

    ``normal`` is N(0, 1), ``mean1`` N(1, 0.1). ``octaves``: uniform codes, block scales over four octaves. ``grid``:
    uniform codes, scales 0.5 and 1, so that every f32 sum is exact. ``onehot``: one value in each row, at a position
    and with a scale that differ between rows; a product with it reads the other operand back.
    """
    device = generator.device
    shape = (batch, rows, k // BLOCK)
    if distribution in ("normal", "mean1"):
        parts = []
        for start in range(0, batch * rows, _ROWS):
            x = torch.randn((min(_ROWS, batch * rows - start), k), generator=generator, device=device)
            parts.append(quantise(x if distribution == "normal" else 1 + 0.1 * x))
        packed = torch.cat([codes for codes, _ in parts]).view(batch, rows, k // 2)
        linear = torch.cat([scale for _, scale in parts]).view(shape)
    elif distribution == "onehot":
        row = torch.arange(batch * rows, device=device)
        hot = row * 5 % k
        packed = torch.zeros((batch * rows, k // 2), dtype=torch.uint8, device=device)
        packed[row, hot // 2] = torch.where(hot % 2 == 0, 0x02, 0x20).to(torch.uint8)
        linear = torch.full((batch * rows, k // BLOCK), 0x38, dtype=torch.uint8, device=device)
        linear[row, hot // BLOCK] = (0x30 + row % 16).to(torch.uint8)
        packed, linear = packed.view(batch, rows, k // 2), linear.view(shape)
    else:
        packed = torch.randint(0, 256, (batch, rows, k // 2), generator=generator, device=device, dtype=torch.uint8)
        low, high = (0x28, 0x48) if distribution == "octaves" else (0x30, 0x39)
        linear = torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)
        if distribution == "grid":
            linear &= 0x38
    return Operand(packed.permute(1, 2, 0), _with_pads(linear), linear)


def _with_pads(linear: torch.Tensor) -> torch.Tensor:
    """Swizzled scales whose pads hold NaN, 448 and other bytes that would show in the result."""
    storage = scales.swizzle(linear)
    inside = scales.swizzle(torch.ones_like(linear))
    pads = torch.arange(storage.numel(), device=storage.device).view(storage.shape) % 5
    poison = torch.tensor([0x7F, 0x00, 0xFF, 0x7E, 0x55], dtype=torch.uint8, device=storage.device)[pads]
    return torch.where(inside == 1, storage, poison)
