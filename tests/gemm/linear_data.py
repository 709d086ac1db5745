"""MXFP8 in numpy for the tests of the linears, made with ml_dtypes and index arithmetic, never with the library's own
code, and the bounds by which their results are judged."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import b12x
from b12x._runtime import packs
from tests.nvfp4_data import swizzle

E4M3 = ml_dtypes.float8_e4m3fn
BLOCK, SQUARE = 32, 128
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DISTRIBUTIONS = ("normal", "octaves", "mean1")
#: Elements around an output, and bytes behind a scratch, that have to stay as they were.
GUARD = 64
#: Significant bits, and the exponent of the smallest normal number.
_FORMATS = {"bfloat16": (8, -126), "float16": (11, -14)}
_INVERSE_MAX = np.uint32(0x3B124925).view(np.float32)

F64 = npt.NDArray[np.float64]


def e8m0(amax: np.ndarray) -> np.ndarray:
    """Bytes of blocks by their largest magnitude: 1/448 of it, rounded up to a normal power of two; 127 for none."""
    s = amax.astype(np.float32) * _INVERSE_MAX
    fraction, exponent = np.frexp(s)
    exact = fraction == 0.5
    return np.where(s == 0, 127, np.maximum(exponent - exact + 127, 1)).astype(np.uint8)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest values, at most 448."""
    return np.clip(x, -448, 448).astype(np.float32).astype(E4M3).view(np.uint8)


def from_e4m3(codes: np.ndarray) -> F64:
    return codes.view(E4M3).astype(np.float64)


def powers(codes: np.ndarray) -> F64:
    """2^(byte - 127)."""
    return np.ldexp(1.0, codes.astype(np.int32) - 127)


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``[..., K]`` to codes ``[..., K]`` and scale bytes ``[..., K/32]``."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    codes = e8m0(amax)
    empty = (amax.astype(np.float32) * _INVERSE_MAX == 0)[..., None]
    scaled = np.where(empty, 0.0, blocks / powers(codes)[..., None])
    return to_e4m3(scaled).reshape(x.shape), codes


def dequantise(values: np.ndarray, codes: np.ndarray) -> F64:
    """float64 values of codes ``[..., K]`` and scale bytes ``[..., K/32]``."""
    return from_e4m3(values) * np.repeat(powers(codes), BLOCK, axis=-1)


def quantised(x: torch.Tensor) -> F64:
    """float64 values of rows after their quantisation."""
    return dequantise(*quantise(x.detach().cpu().double().numpy()))


def requantise(values: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight ``[N, K]`` with factors of 128 x 128 blocks to codes and a byte a block, block by block."""
    fresh, codes = np.empty_like(values), np.empty(scale.shape, np.uint8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * SQUARE, (i + 1) * SQUARE), slice(j * SQUARE, (j + 1) * SQUARE))
            w = values[part].view(E4M3).astype(np.float32) * np.float32(scale[i, j])
            codes[i, j] = e8m0(np.abs(w).max())
            fresh[part] = to_e4m3(w.astype(np.float64) / powers(codes[i, j]))
    return fresh, codes


def block_rows(codes: np.ndarray, n: int) -> np.ndarray:
    """A byte a block to bytes of rows ``[n, K/32]``."""
    return codes[np.arange(n)[:, None] // SQUARE, np.arange(codes.shape[1] * 4)[None] // 4]


def swizzled(linear: np.ndarray) -> np.ndarray:
    """Scale bytes ``[G, N, K/32]`` swizzled, pads 127."""
    return swizzle(linear, 127)


def view_bytes(scale_mma: torch.Tensor) -> np.ndarray:
    """The storage behind a 6-D view."""
    return scale_mma.permute(5, 2, 4, 0, 1, 3).contiguous().view(-1).cpu().numpy()


def activations(rng: np.random.Generator, shape: tuple[int, ...], distribution: str, dtype: str) -> torch.Tensor:
    """``normal`` N(0, 1), ``octaves`` blocks spread over seven octaves, ``mean1`` N(1, 0.1)."""
    x = rng.standard_normal(shape)
    if distribution == "mean1":
        x = 1 + 0.1 * x
    elif distribution == "octaves":
        x *= np.repeat(np.exp2(rng.integers(-5, 3, (*shape[:-1], shape[-1] // BLOCK))), BLOCK, axis=-1)
    return torch.tensor(x, dtype=DTYPES[dtype])


def weight_codes(rng: np.random.Generator, n: int, k: int, distribution: str = "normal") -> np.ndarray:
    """E4M3 codes of a weight."""
    w = rng.standard_normal((n, k)) * 60 if distribution != "mean1" else 100 + 10 * rng.standard_normal((n, k))
    return to_e4m3(w)


def as_weight(codes: np.ndarray) -> torch.Tensor:
    return torch.tensor(codes).view(torch.float8_e4m3fn)


def half_ulp(x: F64, dtype: str) -> F64:
    """Half the distance of neighbouring values around ``|x|``."""
    digits, smallest = _FORMATS[dtype]
    _, exponent = np.frexp(x)
    return np.ldexp(0.5, np.maximum(exponent, smallest + 1) - digits)


def tolerance(a: F64, b: F64, dtype: str, factor: float = 1.0, bias: F64 | None = None) -> tuple[F64, F64]:
    """``factor * a @ b^T (+ bias)`` in float64, and what each element may be off by: half a unit of each rounding, and
    what f32 sums of K / 32 MMAs may lose."""
    reference = factor * (a @ np.swapaxes(b, -1, -2))
    lost = (4 + a.shape[-1] / BLOCK) * 2.0**-23 * factor * (np.abs(a) @ np.swapaxes(np.abs(b), -1, -2))
    bound = lost + half_ulp(np.abs(reference) + lost, dtype)
    if bias is not None:
        reference = reference + bias
        bound = bound + half_ulp(np.abs(reference) + bound, dtype)
    return reference, bound


def check(found: torch.Tensor, reference: F64, bound: F64) -> None:
    """Every element within its bound."""
    error = np.abs(found.detach().cpu().double().numpy() - reference)
    wrong = ~(error <= bound)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, first at {np.argwhere(wrong)[0]}: {error[wrong][:4]}"


def guarded(tokens: int, n: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned output ``[T, N, 1]`` inside a larger buffer, and the buffer, of which :data:`GUARD` at each end are
    not the output's."""
    buffer = torch.full((tokens * n + 2 * GUARD,), float("nan"), dtype=DTYPES[dtype])
    return buffer[GUARD : GUARD + tokens * n].view(tokens, n, 1), buffer


def guards_intact(buffer: torch.Tensor) -> bool:
    return bool(buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all())


def poisoned(nbytes: int) -> torch.Tensor:
    """Scratch full of NaN, as E4M3 and as E8M0, and a guard behind it."""
    return torch.full((nbytes + GUARD,), 0xFF, dtype=torch.uint8)


def hide_packs(patch: pytest.MonkeyPatch) -> None:
    """Forget every kernel, and find no pack from here on."""
    patch.setattr(packs, "pack_folders", list)
    b12x.clear_all_caches()
