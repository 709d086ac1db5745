"""Inputs of the rehost cases: register words, from a seeded generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from b12x.emulator.numerics import FORMATS, decode_table

Words = NDArray[np.uint32]
Generator = np.random.Generator
Maker = Callable[[Generator], Words]

#: Threads of a random case: 64 warps. Cases over all 16-bit inputs have 65536.
THREADS = 2048
_ORDINARY = (0, 0x80000000, 1, 0x80000001, 0x400000, 0x400001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800000, 0x7F000001)
_LARGE_AND_NAN = (0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF)
_SPECIAL = np.array([*_ORDINARY, *_LARGE_AND_NAN], np.uint32)


def _words(values: NDArray[Any]) -> Words:
    return values.astype(np.uint32)


def any_words(count: int) -> Maker:
    """Uniform bits."""
    return lambda rng: rng.integers(0, 2**32, (THREADS, count), np.uint32)


def any_floats(count: int) -> Maker:
    """f32 of every kind: uniform bits, magnitudes near 1, special values."""

    def make(rng: Generator) -> Words:
        words = rng.integers(0, 2**32, (THREADS, count), np.uint32)
        ordinary = rng.standard_normal((THREADS, count)).astype(np.float32).view(np.uint32)
        kind = rng.integers(0, 4, (THREADS, count))
        special = _SPECIAL[rng.integers(0, len(_SPECIAL), (THREADS, count))]
        return np.where(kind == 0, special, np.where(kind == 1, words, ordinary))

    return make


def quiet_floats(count: int) -> Maker:
    """As :func:`any_floats`, every NaN a quiet one: numpy's fmin and fmax take a signalling one for the result."""

    def make(rng: Generator) -> Words:
        words = any_floats(count)(rng)
        return _words(np.where((words & 0x7FFFFFFF) > 0x7F800000, words | 0x400000, words))

    return make


def floats_by_warp(rng: Generator) -> Words:
    """f32 of every kind; a third of the warps without NaN, a third of NaN only."""
    words = quiet_floats(1)(rng)
    kind = np.repeat(np.arange(THREADS // 32) % 3, 32).reshape(-1, 1)
    is_nan = (words & 0x7FFFFFFF) > 0x7F800000
    return _words(np.where(kind == 0, np.where(is_nan, 0x40490FDB, words), np.where(kind == 1, 0xFFC00000, words)))


def rounding_floats(name: str, *, negative_zero: bool) -> Maker:
    """f32 pairs around the values and the midpoints of a narrow format, and of every other kind."""

    def make(rng: Generator) -> Words:
        values = np.unique(np.abs(decode_table(name)[: 1 << FORMATS[name].bits]))
        points = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1:] * 2]).astype(np.float32)
        near = points.view(np.uint32)[rng.integers(0, len(points), (THREADS, 2))].astype(np.int64)
        near = np.maximum(near + rng.integers(-2, 3, near.shape), 0)
        near |= rng.integers(0, 2, near.shape) << 31
        words = np.where(rng.integers(0, 2, near.shape) == 0, near.astype(np.uint32), any_floats(2)(rng))
        return words if negative_zero else _words(np.where(words == 0x80000000, 0, words))

    return make


def half_pairs(kind: str, *, negative_zero: bool = True) -> Maker:
    """f16x2 or bf16x2: all values in the lower half, random ones in the upper half."""

    def make(rng: Generator) -> Words:
        low = np.arange(65536, dtype=np.uint32)
        high = rng.permutation(65536).astype(np.uint32)
        if not negative_zero:
            low, high = (np.where(half == 0x8000, np.uint32(0), half) for half in (low, high))
        return _words(low | (high << np.uint32(16))).reshape(-1, 1)

    return make


def all_pairs(mask: int) -> Maker:
    """All 16-bit words under a mask, in random order."""
    return lambda rng: _words(rng.permutation(65536) & mask).reshape(-1, 1)


def positive_floats(rng: Generator) -> Words:
    """f32 pairs without sign, powers of two and their neighbours among them; NaN keeps either sign."""
    words = any_floats(2)(rng)
    near = (rng.integers(0, 256, words.shape) << 23) + rng.integers(-1, 2, words.shape)
    words = np.where(rng.integers(0, 2, words.shape) == 0, np.maximum(near, 0).astype(np.uint32), words)
    return _words(words & 0x7FFFFFFF)


def positive_bf16_pairs(rng: Generator) -> Words:
    """All bf16 without sign in the lower half, random ones in the upper half."""
    return _words(half_pairs("bf16x2")(rng) & 0x7FFF7FFF)


@dataclass(frozen=True)
class MmaInputs:
    """Inputs of an MMA: A (4 words), B (2), C (4), scale words of A and of B, for each lane.

    ``exact`` values keep every sum within 24 bits, so that neither order nor truncation shows. ``magnitudes`` clears
    every sign, which makes D the sum of magnitudes.
    """

    exact: Maker
    wide: Maker
    magnitudes: Callable[[Words], Words]


def fp4(scale: str) -> MmaInputs:
    """e2m1 operands, eight codes a word; scales ue4m3 or ue8m0."""
    return MmaInputs(
        exact=partial(_fp4_inputs, scale, True), wide=partial(_fp4_inputs, scale, False), magnitudes=_fp4_magnitudes
    )


def _fp4_inputs(scale: str, exact: bool, rng: Generator) -> Words:
    words = rng.integers(0, 2**32, (THREADS, 12), np.uint32)
    words[:, 6:10] = _accumulators(rng, exact, 4)
    if scale == "ue4m3":
        few = np.array([0x30, 0x34, 0x38, 0x3C])  # 0.5, 0.75, 1, 1.5
        every = _rare(rng, rng.integers(0, 0x7F, (THREADS, 8)), 0x7F)
        values = few[rng.integers(0, 4, (THREADS, 8))] if exact else every
        # The sign bit of ue4m3 has no meaning.
        codes = (values | (rng.integers(0, 2, values.shape) << 7)).astype(np.uint8)
    else:
        codes = _powers(rng, exact, 8)
    words[:, 10:] = np.ascontiguousarray(codes).view(np.uint32)
    return words


def _fp4_magnitudes(words: Words) -> Words:
    out: Words = words.copy()
    out[:, :6] &= np.uint32(0x77777777)
    out[:, 6:10] &= np.uint32(0x7FFFFFFF)
    return out


def fp8(a: str, b: str, *, half: bool = False) -> MmaInputs:
    """Byte containers of the formats ``a`` and ``b``; ue8m0 scales; C is f16 pairs where ``half``."""
    return MmaInputs(
        exact=partial(_fp8_inputs, a, b, half, True),
        wide=partial(_fp8_inputs, a, b, half, False),
        magnitudes=partial(_fp8_magnitudes, a, b, half),
    )


def _fp8_inputs(a: str, b: str, half: bool, exact: bool, rng: Generator) -> Words:
    words = np.zeros((THREADS, 12), np.uint32)
    for columns, name in ((slice(0, 4), a), (slice(4, 6), b)):
        count = 4 * (columns.stop - columns.start)
        codes = _element_codes(name, exact or half)
        # Bits of a container that the format does not use are ignored.
        padding = np.uint8(0) if name in ("e4m3", "e5m2") else np.uint8(0xC3 if name == "e2m1" else 0xC0)
        noise = rng.integers(0, 256, (THREADS, count)).astype(np.uint8) & padding
        words[:, columns] = (codes[rng.integers(0, len(codes), (THREADS, count))] | noise).view(np.uint32)
    if half:
        values = rng.integers(-64, 65, (THREADS, 8)).astype(np.float16)
        words[:, 6:10] = values.view(np.uint32)
    else:
        words[:, 6:10] = _accumulators(rng, exact, 4)
    words[:, 10:] = np.ascontiguousarray(_powers(rng, exact, 8)).view(np.uint32)
    return words


def _element_codes(name: str, exact: bool) -> NDArray[np.uint8]:
    """Container bytes: all finite values, or only multiples of 1/2 up to 6."""
    bits = FORMATS[name].bits
    codes = np.arange(1 << bits, dtype=np.uint8)
    values = decode_table(name)[: 1 << bits]
    keep = (np.abs(values) <= 6) & (values * 2 == np.rint(values * 2)) if exact else np.isfinite(values)
    kept = codes[keep]
    return kept << np.uint8(2) if name == "e2m1" else kept


def _fp8_magnitudes(a: str, b: str, half: bool, words: Words) -> Words:
    out: Words = words.copy()
    for columns, name in ((slice(0, 4), a), (slice(4, 6), b)):
        out[:, columns] &= np.uint32(0x7F7F7F7F if name in ("e4m3", "e5m2") else 0xDFDFDFDF)
    out[:, 6:10] &= np.uint32(0x7FFF7FFF if half else 0x7FFFFFFF)
    return out


def _accumulators(rng: Generator, exact: bool, count: int) -> Words:
    if exact:
        values = rng.integers(-(2**14), 2**14, (THREADS, count)) / 64
    else:
        values = rng.standard_normal((THREADS, count)) * 100
    out: Words = values.astype(np.float32).view(np.uint32)
    return out


def _powers(rng: Generator, exact: bool, count: int) -> NDArray[np.uint8]:
    """ue8m0 codes: near 1, or over the range whose products f32 holds, with a few at its ends and NaN."""
    if exact:
        return rng.integers(126, 129, (THREADS, count)).astype(np.uint8)
    codes = rng.integers(97, 158, (THREADS, count))
    return _rare(rng, _rare(rng, codes, 255), int(rng.integers(0, 2)) * 254).astype(np.uint8)


def _rare(rng: Generator, codes: NDArray[np.int64], value: int) -> NDArray[np.int64]:
    """``value`` in one place of 500."""
    return np.where(rng.integers(0, 500, codes.shape) == 0, value, codes)
