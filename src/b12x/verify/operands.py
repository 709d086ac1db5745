"""Operands of block-scaled GEMMs in torch, on any device, and their float64 values.

Nothing here is shared with kernels or ops: an operand is made of random codes and scales, or by a quantiser of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from b12x.quantization import scales

DISTRIBUTIONS = ("normal", "octaves", "mean1")

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
#: Rows that are made at a time: temporaries of a large operand would not fit on a small card.
_ROWS = 2048


@dataclass(frozen=True)
class Encoding:
    """Elements of ``bits`` 4 (E2M1, two a byte) or 8 (E4M3); a scale of kind ``scale`` for each ``block`` of K."""

    bits: Literal[4, 8]
    block: int
    scale: Literal["e4m3", "e8m0", "f32", "none"]


ENCODINGS = {
    "nvfp4": Encoding(4, 16, "e4m3"),
    "mxfp4": Encoding(4, 32, "e8m0"),
    "mxfp8": Encoding(8, 32, "e8m0"),
    "fp8": Encoding(8, 128, "none"),
    "block_fp8": Encoding(8, 128, "f32"),
}


@dataclass(frozen=True)
class Operand:
    """An operand as a GEMM takes it, and its scales by row and block.

    ``codes`` is ``[rows, K', L]``, ``scales`` what goes with it (None where there are none), ``linear`` the scales
    ``[L, rows, K / block]``; those of ``block_rows`` rows are one where that is more than 1.
    """

    encoding: Encoding
    codes: torch.Tensor
    scales: torch.Tensor | None
    linear: torch.Tensor
    block_rows: int = 1

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What GEMMs take; plain FP8 never looks at the second."""
        return self.codes, self.scales if self.scales is not None else torch.empty(0)

    def values(self, rows: slice = slice(None)) -> torch.Tensor:
        """float64 ``[L, rows, K]``."""
        codes = self.codes[rows].permute(2, 0, 1)
        linear = self.linear
        if self.block_rows > 1:
            linear = linear.repeat_interleave(self.block_rows, dim=1)[:, : self.codes.shape[0]]
        return dequantise(codes, linear[:, rows], self.encoding)


def dequantise(codes: torch.Tensor, linear: torch.Tensor, encoding: Encoding = ENCODINGS["nvfp4"]) -> torch.Tensor:
    """float64 values of codes ``[..., K']`` and linear scales ``[..., K / block]``."""
    if encoding.bits == 4:
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64, device=codes.device)
        values = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]
    else:
        values = codes.view(torch.float8_e4m3fn).double()
    return (values.unflatten(-1, (-1, encoding.block)) * _scale_values(linear, encoding).unsqueeze(-1)).flatten(-2)


def _scale_values(linear: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    if encoding.scale == "e4m3":
        return linear.view(torch.float8_e4m3fn).double()
    if encoding.scale == "e8m0":
        return torch.ldexp(torch.ones_like(linear, dtype=torch.float64), linear.int() - 127)
    return linear.double()


def quantise(x: torch.Tensor, encoding: Encoding = ENCODINGS["nvfp4"]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[rows, K]`` f32 to codes and linear scales: near ``x``, but not the ops' contract to the byte."""
    blocks = x.unflatten(-1, (-1, encoding.block))
    amax = blocks.abs().amax(-1)
    most = 6.0 if encoding.bits == 4 else 448.0
    if encoding.scale == "e4m3":
        linear = (amax / most).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
    elif encoding.scale == "e8m0":
        linear = ((amax / most).log2().ceil() + 127).to(torch.uint8)
    else:
        linear = amax / most if encoding.scale == "f32" else torch.ones_like(amax)
    scaled = blocks / _scale_values(linear, encoding).float().unsqueeze(-1).clamp(min=2.0**-126)
    if encoding.bits == 8:
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), linear
    middles = torch.tensor(_MIDPOINTS, device=x.device)
    codes = torch.bucketize(scaled.abs(), middles, out_int32=True).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    codes = codes.flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, linear


def random_operand(
    generator: torch.Generator,
    rows: int,
    k: int,
    distribution: str,
    batch: int = 1,
    recipe: str = "nvfp4",
    block_rows: int = 1,
) -> Operand:
    """Seeded operand with pads that would show.

    ``normal`` is N(0, 1), ``mean1`` N(1, 0.1). ``octaves``: uniform codes, block scales over three octaves and more.
    ``grid``: few codes, scales 0.5 and 1, so that every f32 sum is exact. ``onehot``: one value in each row, at a
    position and with a scale that differ between rows; a product with it reads the other operand back. ``block_rows``
    is 128 for the weights of block FP8.
    """
    encoding = ENCODINGS[recipe]
    device = generator.device
    shape = (batch, -(-rows // block_rows), k // encoding.block)
    if distribution in ("normal", "mean1") and block_rows == 1:
        parts = []
        for start in range(0, batch * rows, _ROWS):
            x = torch.randn((min(_ROWS, batch * rows - start), k), generator=generator, device=device)
            parts.append(quantise(x if distribution == "normal" else 1 + 0.1 * x, encoding))
        codes = torch.cat([part for part, _ in parts]).view(batch, rows, -1)
        linear = torch.cat([scale for _, scale in parts]).view(shape)
    elif distribution == "onehot":
        codes, linear = _onehot(batch, rows, k, encoding, device)
    else:
        codes = _random_codes(generator, (batch, rows, k), distribution, encoding)
        linear = _random_scales(generator, shape, distribution, encoding)
    return Operand(encoding, codes.permute(1, 2, 0), _as_taken(linear, encoding), linear, block_rows)


def _onehot(
    batch: int, rows: int, k: int, encoding: Encoding, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.arange(batch * rows, device=device)
    hot, step = row * 5 % k, row % 16
    unit, values = {
        "e4m3": (0x38, 0x30 + step),
        "e8m0": (127, 120 + step),
        "f32": (1.0, torch.exp2(step - 8.0)),
        "none": (1.0, torch.ones_like(row)),
    }[encoding.scale]
    dtype = torch.uint8 if encoding.scale in ("e4m3", "e8m0") else torch.float32
    linear = torch.full((batch * rows, k // encoding.block), unit, dtype=dtype, device=device)
    linear[row, hot // encoding.block] = values.to(dtype)
    if encoding.bits == 4:
        codes = torch.zeros((batch * rows, k // 2), dtype=torch.uint8, device=device)
        codes[row, hot // 2] = torch.where(hot % 2 == 0, 0x02, 0x20).to(torch.uint8)
    else:
        codes = torch.zeros((batch * rows, k), dtype=torch.uint8, device=device)
        codes[row, hot] = 0x38
        codes = codes.view(torch.float8_e4m3fn)
    return codes.view(batch, rows, -1), linear.view(batch, rows, -1)


def _random_codes(
    generator: torch.Generator, shape: tuple[int, int, int], distribution: str, encoding: Encoding
) -> torch.Tensor:
    """Uniform codes without NaN; for ``grid`` in FP8, those of 1 to 2."""
    batch, rows, k = shape
    device = generator.device
    low, high = (0x38, 0x41) if encoding.bits == 8 and distribution == "grid" else (0, 256)
    size = (batch, rows, k * encoding.bits // 8)
    codes = torch.randint(low, high, size, generator=generator, device=device, dtype=torch.uint8)
    if encoding.bits == 4:
        return codes
    return torch.where(codes & 0x7F == 0x7F, 0x38, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def _random_scales(
    generator: torch.Generator, shape: tuple[int, int, int], distribution: str, encoding: Encoding
) -> torch.Tensor:
    device = generator.device
    if encoding.scale == "none":
        return torch.ones(shape, device=device)
    if encoding.scale == "f32":
        x = torch.rand(shape, generator=generator, device=device)
        return torch.where(x < 0.5, 0.5, 1.0) if distribution == "grid" else torch.exp2(6 * x - 3)
    low, high = {
        ("e4m3", False): (0x28, 0x48),
        ("e4m3", True): (0x30, 0x39),
        ("e8m0", False): (123, 132),
        ("e8m0", True): (126, 128),
    }[encoding.scale, distribution == "grid"]
    linear = torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)
    return linear & 0x38 if (encoding.scale, distribution) == ("e4m3", "grid") else linear


def _as_taken(linear: torch.Tensor, encoding: Encoding) -> torch.Tensor | None:
    """Scales as the GEMM takes them."""
    if encoding.scale == "none":
        return None
    return linear.permute(1, 2, 0) if encoding.scale == "f32" else _with_pads(linear)


def _with_pads(linear: torch.Tensor) -> torch.Tensor:
    """Swizzled scales whose pads hold NaN, the largest value and other bytes that would show in the result."""
    storage = scales.swizzle(linear)
    inside = scales.swizzle(torch.ones_like(linear))
    pads = torch.arange(storage.numel(), device=storage.device).view(storage.shape) % 5
    poison = torch.tensor([0x7F, 0x00, 0xFF, 0x7E, 0x55], dtype=torch.uint8, device=storage.device)[pads]
    return torch.where(inside == 1, storage, poison)
