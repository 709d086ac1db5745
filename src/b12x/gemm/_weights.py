"""Preparing FP8 weights when a model is loaded: MXFP8 rows for the linears that quantise their input.

A prepared weight is :class:`MXFP8Rows`: E4M3 values ``[N, K]`` (of G groups: ``[N, K, G]``, physically ``[G, N, K]``),
one E8M0 byte for 32 values in rows ``[G, N, K/32]`` and swizzled, where the bytes of missing rows and columns are 127
(1.0). These are torch operations on whole weights, part by part, so that temporaries stay small beside the weight; some
read the device to find what has to be refused.
"""

from __future__ import annotations

import math

import torch

from b12x._runtime import checks
from b12x.gemm._parts import BLOCK, padded
from b12x.quantization import scales
from b12x.quantization.mxfp8.api import MXFP8Rows

#: The side of a square block of one scale.
SQUARE = 128
#: E8M0 byte of 1.0, which pads have.
ONE = 127
#: 1/448 as the quantisers have it, f32 bits 0x3B124925.
INVERSE_MAX = 0x3B124925
#: Rows of a weight that are worked on at a time.
_ROWS = 16 * SQUARE
_E8M0 = ("uint8", "float8_e8m0fnu")
_SCALE = ("float32", "bfloat16", *_E8M0)
_PAD = "quantise again with a K that is, or pad the checkpoint with zero columns"


def mxfp8_rows(op: str, weight: torch.Tensor, weight_scale: torch.Tensor) -> MXFP8Rows:
    """A weight with a scale for 32 values of a row, K padded to a multiple of 128 with zeros and scales of 1."""
    n, k = _matrix(op, "weight", weight, BLOCK)
    _kind(op, "weight_scale", weight_scale, _E8M0, weight)
    if weight_scale.ndim != 2 or weight_scale.shape[0] < n or weight_scale.shape[1] < k // BLOCK:
        raise ValueError(
            f"{op}: weight_scale has shape {tuple(weight_scale.shape)}; needed is a byte for {BLOCK} values, at least "
            f"({n}, {k // BLOCK}) for a weight of shape {(n, k)}: pass the scales that belong to it, not swizzled"
        )
    codes = weight_scale[:n, : k // BLOCK].view(torch.uint8)
    _refuse_nan_scale(op, "weight_scale", codes)
    linear = codes.new_full((n, padded(k) // BLOCK), ONE)
    linear[:, : k // BLOCK] = codes
    return _rows(padded_values(weight), linear, 1)


def square_block_rows(
    op: str, name: str, weight: torch.Tensor, scale_name: str, weight_scale: torch.Tensor, groups: int = 1
) -> MXFP8Rows:
    """A weight ``[groups * N, K]`` with a scale for a square block of 128, as rows of ``groups`` entries.

    Where every scale is a power of two (E8M0 always is), values are kept and scales repeated. Else they are quantised
    again: each block to the power of two that its largest weight needs, by the rule of ``quantization.mxfp8``.
    """
    n, k = _matrix(op, name, weight, SQUARE)
    found = _square_scales(op, scale_name, weight_scale, n, k, weight)
    codes = _power_codes(op, scale_name, found)
    values = weight.contiguous()
    if codes is None:
        values, codes = _requantised(op, name, values, scale_name, found)
    linear = codes.repeat_interleave(SQUARE, 0)[:n].repeat_interleave(SQUARE // BLOCK, 1).contiguous()
    return _rows(values, linear, groups)


def padded_values(weight: torch.Tensor) -> torch.Tensor:
    """E4M3 values, contiguous, K padded to a multiple of 128 with zeros."""
    n, k = weight.shape
    if k == padded(k):
        return weight.contiguous()
    values = torch.zeros((n, padded(k)), dtype=torch.uint8, device=weight.device)
    values[:, :k] = weight.view(torch.uint8)
    return values.view(torch.float8_e4m3fn)


def unit_scales(n: int, k: int, device: torch.device) -> torch.Tensor:
    """Swizzled scales of 1 for a weight ``[n, k]``, as the 6-D view."""
    storage = torch.full(scales.storage_shape(n, k // BLOCK), ONE, dtype=torch.uint8, device=device)
    return scales.view(storage, n, k // BLOCK)


def values_matrix(op: str, weight: torch.Tensor) -> tuple[int, int]:
    """Check a weight that has no scales of its own: N and K."""
    return _matrix(op, "weight", weight, BLOCK)


def output_scale(op: str, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The factor of a product of two E4M3 tensors, checked, as f32 ``[1]``."""
    _kind(op, "output_scale", value, "float32", weight)
    if value.numel() != 1:
        raise ValueError(
            f"{op}: output_scale has shape {tuple(value.shape)}; needed is one factor, (1,): input_scale * weight_scale"
        )
    factor = float(value)
    if not math.isfinite(factor) or factor < 0:
        raise ValueError(
            f"{op}: output_scale is {factor}; needed is a finite factor of 0 or more: multiply the checkpoint's "
            "input_scale and weight_scale, which are themselves factors and not their inverses"
        )
    return value.detach().reshape(1).clone()


def _rows(values: torch.Tensor, linear: torch.Tensor, groups: int) -> MXFP8Rows:
    """Values ``[groups * N, K]`` and scales ``[groups * N, K/32]``, both contiguous, as rows of ``groups`` entries."""
    n, k = values.shape[0] // groups, values.shape[1]
    rows = linear.view(groups, n, k // BLOCK)
    _, row_tiles, *_ = scales.storage_shape(n, k // BLOCK)
    tiles = linear.new_full((groups, row_tiles * 128, k // BLOCK), ONE)
    tiles[:, :n] = rows
    scale_mma = scales.view(scales.swizzle(tiles), n, k // BLOCK, groups)
    return MXFP8Rows(values if groups == 1 else values.view(groups, n, k).permute(1, 2, 0), rows, scale_mma)


def _matrix(op: str, name: str, weight: torch.Tensor, quantum: int) -> tuple[int, int]:
    """Check a weight's dtype, shape and values."""
    _kind(op, name, weight, "float8_e4m3fn", weight)
    if weight.ndim != 2 or 0 in weight.shape or weight.shape[1] % quantum:
        raise ValueError(
            f"{op}: {name} has shape {tuple(weight.shape)}; needed is [N, K] with K a multiple of {quantum}: {_PAD}"
        )
    for part in weight.view(torch.uint8).split(_ROWS):
        if bool(((part & 0x7F) == 0x7F).any()):
            raise ValueError(
                f"{op}: {name} holds NaN (E4M3 codes 0x7F or 0xFF), which would spread over whole rows of every "
                "result; needed are finite values: check that the checkpoint was read as float8_e4m3fn"
            )
    return weight.shape[0], weight.shape[1]


def _kind(op: str, name: str, value: torch.Tensor, dtype: str | tuple[str, ...], beside: torch.Tensor) -> torch.Tensor:
    """Check that a value is a tensor of a dtype on the weight's device."""
    found = checks.facts(value)
    device = "cuda" if found[0] is None else checks.device_name(beside.device)
    checks.layout(op, name, found, dtype=dtype, shape=None, strides=checks.ANY, device=device)
    return value


def _square_scales(op: str, name: str, value: torch.Tensor, n: int, k: int, weight: torch.Tensor) -> torch.Tensor:
    """The scales as a matrix ``[ceil(N/128), K/128]``."""
    _kind(op, name, value, _SCALE, weight)
    wanted = (-(-n // SQUARE), k // SQUARE)
    matrix = value[0] if value.ndim == 3 and value.shape[0] == 1 else value
    if tuple(matrix.shape) != wanted:
        raise ValueError(
            f"{op}: {name} has shape {tuple(value.shape)}; needed is {wanted}, one scale for a block of {SQUARE} x "
            f"{SQUARE} of a weight of shape {(n, k)}, the last row's for the rows that are left: pass the scales that "
            "belong to it"
        )
    return matrix


def _power_codes(op: str, name: str, found: torch.Tensor) -> torch.Tensor | None:
    """E8M0 bytes of scales that are all normal powers of two, or None."""
    if not found.dtype.is_floating_point or found.dtype == torch.float8_e8m0fnu:
        codes = found.contiguous().view(torch.uint8)
        _refuse_nan_scale(op, name, codes)
        return codes
    exact = found.float().contiguous()
    if not bool((exact.isfinite() & (exact >= 0)).all()):
        raise ValueError(
            f"{op}: {name} holds a value that is negative or not finite; needed are factors of 0 or more, of which a "
            "weight is its value times its block's: check that the checkpoint was read in its own dtype"
        )
    bits = exact.abs().view(torch.int32)
    if bool(((bits & 0x7FFFFF == 0) & (bits != 0)).all()):
        return (bits >> 23).to(torch.uint8)
    return None


def _refuse_nan_scale(op: str, name: str, codes: torch.Tensor) -> None:
    if bool((codes == 255).any()):
        raise ValueError(
            f"{op}: {name} holds the E8M0 byte 255, which is NaN; needed are bytes of 0 to 254, 2^(byte - 127): check "
            "that the scales belong to this weight and are not swizzled"
        )


def _requantised(
    op: str, name: str, values: torch.Tensor, scale_name: str, found: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and bytes of the blocks whose weights are ``values * found``."""
    fresh = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
    codes = torch.empty(found.shape, dtype=torch.uint8, device=values.device)
    inverse = torch.tensor(INVERSE_MAX, dtype=torch.int32, device=values.device).view(torch.float32)
    for first in range(0, values.shape[0], _ROWS):
        part = values[first : first + _ROWS].float()
        blocks = slice(first // SQUARE, first // SQUARE + -(-part.shape[0] // SQUARE))
        part *= _spread(found[blocks].float(), part.shape[0])
        amax = _block_maxima(part)
        if not bool(amax.isfinite().all()):
            raise ValueError(
                f"{op}: {name} times {scale_name} exceeds what float32 holds; needed are weights within it: check that "
                f"{scale_name} is the factor of the values and not its inverse"
            )
        codes[blocks] = e8m0_codes(amax * inverse)
        # By powers of two made from their exponents: exact in float64, and all that E4M3 keeps is exact in float32.
        powers = (1023 + ONE - codes[blocks].long() << 52).view(torch.float64)
        part = (part.double() * _spread(powers, part.shape[0])).float()
        fresh[first : first + _ROWS] = part.clamp(-448, 448).to(torch.float8_e4m3fn)
    return fresh, codes


def e8m0_codes(scale: torch.Tensor) -> torch.Tensor:
    """Bytes of f32 scales rounded up to a power of two by integer arithmetic on their bits; 127 for 0."""
    bits = scale.contiguous().view(torch.int32)
    up = torch.where(bits & 0x7FFFFF != 0, bits + 0x800000, bits) >> 23
    return torch.where(bits == 0, ONE, up).to(torch.uint8)


def _spread(blocks: torch.Tensor, rows: int) -> torch.Tensor:
    """A value a block as a value an element."""
    return blocks.repeat_interleave(SQUARE, 0)[:rows].repeat_interleave(SQUARE, 1)


def _block_maxima(part: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block of some rows, the last block being of the rows that are left."""
    rows, k = part.shape
    tall = torch.nn.functional.pad(part.abs(), (0, 0, 0, -rows % SQUARE))
    return tall.view(-1, SQUARE, k // SQUARE, SQUARE).amax((1, 3))
