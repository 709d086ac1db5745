"""Floating-point formats and correctly rounded operations over numpy arrays.

PTX ISA 5.2.3 (alternate floating-point formats), 9.7.3 to 9.7.5 (floating-point instructions) and 9.7.9.21 (cvt).
Values travel as float64, which holds every product and every narrow format exactly; results that float64 would round
a second time go through round-to-odd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format; ``max_code`` is the largest finite magnitude, ``nan`` the canonical NaN code."""

    name: str
    bits: int
    mantissa: int
    bias: int
    max_code: int
    nan: int | None
    inf: int | None
    signed: bool = True

    @property
    def emin(self) -> int:
        return 1 - self.bias

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1) if self.signed else 0


FORMATS = {
    f.name: f
    for f in (
        Format("f32", 32, 23, 127, 0x7F7FFFFF, 0x7FFFFFFF, 0x7F800000),
        Format("f16", 16, 10, 15, 0x7BFF, 0x7FFF, 0x7C00),
        Format("bf16", 16, 7, 127, 0x7F7F, 0x7FFF, 0x7F80),
        Format("tf32", 32, 10, 127, 0x7F7FE000, 0x7FFFFFFF, 0x7F800000),
        Format("e4m3", 8, 3, 7, 0x7E, 0x7F, None),
        Format("e5m2", 8, 2, 15, 0x7B, 0x7F, 0x7C),
        Format("e2m3", 6, 3, 1, 0x1F, None, None),
        Format("e3m2", 6, 2, 3, 0x1F, None, None),
        Format("e2m1", 4, 1, 1, 0x7, None, None),
        Format("ue4m3", 8, 3, 7, 0x7E, 0x7F, None, signed=False),
    )
}


def _round(scaled: F64, mode: str, negative: NDArray[np.bool_]) -> F64:
    """Rounds non-negative magnitudes to integers; ``negative`` tells which ones carry a minus sign."""
    if mode == "rn":
        return np.rint(scaled)
    if mode == "rna":
        return np.floor(scaled + 0.5)
    if mode == "rz":
        return np.floor(scaled)
    if mode == "rp":
        return np.where(negative, np.floor(scaled), np.ceil(scaled))
    if mode == "rm":
        return np.where(negative, np.ceil(scaled), np.floor(scaled))
    raise ValueError(mode)


def encode(x: Array, fmt: Format, mode: str = "rn", satfinite: bool = False) -> NDArray[np.uint32]:
    """float64 values to codes of ``fmt``, rounded once (PTX ISA 9.7.9.21, cvt)."""
    x = np.asarray(x, dtype=np.float64)
    negative = np.signbit(x)
    magnitude = np.abs(x)
    nan = np.isnan(x)
    infinite = np.isinf(x)
    finite = np.where(nan | infinite, 0.0, magnitude)
    _, exponent = np.frexp(finite)
    exponent = np.where(finite == 0, fmt.emin, np.maximum(exponent - 1, fmt.emin))
    quotient = _round(np.ldexp(finite, fmt.mantissa - exponent), mode, negative)
    code = ((exponent - fmt.emin).astype(np.int64) << fmt.mantissa) + quotient.astype(np.int64)
    # tf32 keeps its value in the upper bits of an f32
    shift = 13 if fmt.name == "tf32" else 0
    code <<= shift
    towards_zero = (mode == "rz") | ((mode == "rp") & negative) | ((mode == "rm") & ~negative)
    over = code > fmt.max_code
    if satfinite or fmt.inf is None:
        top: NDArray[np.int64] = np.full(code.shape, fmt.max_code)
        if not satfinite and fmt.nan is not None:
            top = np.full(code.shape, fmt.nan)
    else:
        top = np.where(towards_zero & ~infinite, fmt.max_code, fmt.inf)
    code = np.where(over | infinite, top, code)
    if fmt.signed:
        code = np.where(negative, code | fmt.sign_bit, code)
    else:
        code = np.where(negative, 0, code)
    # formats without NaN turn it into the largest positive finite value
    code = np.where(nan, fmt.nan if fmt.nan is not None else fmt.max_code, code)
    return code.astype(np.uint32)


@cache
def decode_table(name: str) -> NDArray[np.float32]:
    """Value of every code of a format of up to 8 bits (indexed by a byte; upper bits of narrow formats are ignored)."""
    codes = np.arange(256)
    if name == "ue8m0":
        values = np.exp2(codes.astype(np.float64) - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    fmt = FORMATS[name]
    code = codes & ((1 << fmt.bits) - 1)
    magnitude = code & ((1 << fmt.bits) - 1 - fmt.sign_bit)
    if name == "ue4m3":
        magnitude = code & 0x7F
    exponent = magnitude >> fmt.mantissa
    fraction = magnitude & ((1 << fmt.mantissa) - 1)
    significand = np.where(exponent > 0, fraction + (1 << fmt.mantissa), fraction).astype(np.float64)
    values = np.ldexp(significand, np.maximum(exponent, 1) - fmt.bias - fmt.mantissa)
    if fmt.inf is not None:
        values = np.where(magnitude == fmt.inf, np.inf, np.where(magnitude > fmt.inf, np.nan, values))
    elif fmt.nan is not None:
        values = np.where(magnitude == fmt.nan, np.nan, values)
    values = np.where((code & fmt.sign_bit) != 0, -values, values)
    return values.astype(np.float32)


def encode_ue8m0(x: F64, mode: str, satfinite: bool) -> NDArray[np.uint32]:
    """float64 to a power-of-two scale 2^(b-127), rounding ``rz`` or ``rp``; the sign does not count."""
    x = np.abs(x)
    mantissa, exponent = np.frexp(np.where(~np.isfinite(x) | (x == 0), 1.0, x))
    exponent = exponent - 1
    if mode == "rp":
        exponent = np.where(mantissa > 0.5, exponent + 1, exponent)
    code = np.where(x == 0, 0, exponent + 127)
    code = np.where(code > 254, 254 if satfinite else 255, np.maximum(code, 0))
    code = np.where(np.isposinf(x), 254 if satfinite else 255, code)
    return np.where(np.isnan(x), 255, code).astype(np.uint32)


def bf16_to_f32(bits: Array) -> NDArray[np.float32]:
    result: NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return result


def f32_to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even; NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = x != x
    if nan.any():
        rounded = np.where(nan, np.uint32(0x7FFF), rounded)
    result: NDArray[np.uint16] = rounded.astype(np.uint16)
    return result


def f32_to_f16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even; NaN becomes 0x7fff."""
    bits = x.astype(np.float16).view(np.uint16)
    nan = x != x
    if nan.any():
        bits = np.where(nan, np.uint16(0x7FFF), bits)
    return bits


def flush(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Subnormal f32 to zero of the same sign (.ftz)."""
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def from_f64(x: F64, name: str, mode: str = "rn") -> Array:
    """float64 rounded once to f32, f16 or bf16; the result is that dtype (bf16 as uint16 bits)."""
    if name == "f64":
        return x
    if name == "f32":
        if mode == "rn":
            return x.astype(np.float32)
        return encode(x, FORMATS["f32"], mode).view(np.float32)
    codes = encode(x, FORMATS[name], mode).astype(np.uint16)
    return codes if name == "bf16" else codes.view(np.float16)


def round_to_odd_sum(p: F64, c: F64) -> F64:
    """p + c in float64 rounded to odd: rounding the result once more to at most 51 bits is exact rounding of p + c."""
    s = p + c
    bb = s - p
    error = (p - (s - bb)) + (c - bb)
    inexact = (error != 0) & np.isfinite(s)
    if not inexact.any():
        return s
    bits = s.view(np.int64)
    step = np.where((error > 0) == (s > 0), 1, -1)
    adjust = inexact & ((bits & 1) == 0)
    return np.where(adjust, bits + step, bits).view(np.float64)


def fma(a: F64, b: F64, c: F64, name: str, mode: str = "rn") -> Array:
    """a * b + c with one rounding to ``name``; a, b, c hold values of that format (f32, f16, bf16 or f64)."""
    if name == "f64":
        return fma_f64(a, b, c, mode)
    return from_f64(round_to_odd_sum(a * b, c), name, mode)


def directed(exact: Fraction, mode: str) -> float:
    """A rational number rounded to float64."""
    try:
        near = float(exact)
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
    if mode == "rn" or (math.isfinite(near) and Fraction(near) == exact):
        return near
    up = mode == "rp" or (mode == "rz" and exact < 0)
    above = near == math.inf or (near != -math.inf and Fraction(near) > exact)
    if above != up:
        near = math.nextafter(near, math.inf if up else -math.inf)
    return near


def fma_f64(a: F64, b: F64, c: F64, mode: str = "rn") -> F64:
    """a * b + c in float64, rounded once in any direction."""

    def one(x: float, y: float, z: float) -> float:
        if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)):
            return x * y + z
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            zero = x * y + z
            opposite = x != 0 and y != 0 and z != 0  # an exact cancellation is -0 only towards minus infinity
            if opposite or (x * y == 0 and z == 0 and np.signbit(x * y) != np.signbit(z)):
                return -0.0 if mode == "rm" else 0.0
            return zero
        return directed(exact, mode)

    result: F64 = np.vectorize(one, otypes=[np.float64])(a, b, c)
    return result


def divide_f64(a: F64, b: F64, mode: str) -> F64:
    def one(x: float, y: float, plain: float) -> float:
        if not (np.isfinite(x) and np.isfinite(y)) or x == 0 or y == 0:
            return plain
        value = directed(Fraction(x) / Fraction(y), mode)
        return float(np.copysign(value, plain))

    result: F64 = np.vectorize(one, otypes=[np.float64])(a, b, np.divide(a, b))
    return result


def sqrt_rounded(a: F64, name: str, mode: str) -> Array:
    """A square root in any rounding; for f32 the one of float64, made odd where it is inexact, is rounded once more."""
    if name == "f64":
        return _sqrt_f64(a, mode)
    down = _sqrt_f64(a, "rm")
    inexact = np.isfinite(down) & (down != _sqrt_f64(a, "rp"))
    bits = down.view(np.int64)
    return from_f64(np.where(inexact, bits | 1, bits).view(np.float64), name, mode)


def _sqrt_f64(a: F64, mode: str) -> F64:
    def one(x: float, near: float) -> float:
        if not np.isfinite(near) or x <= 0:
            return near
        error = Fraction(near) ** 2 - Fraction(x)
        if error == 0 or mode == "rn":
            return near
        up = mode == "rp"
        if (error > 0) == up:
            return near
        return math.nextafter(near, math.inf if up else 0.0)

    result: F64 = np.vectorize(one, otypes=[np.float64])(a, np.sqrt(a))
    return result


def add_rounded(a: F64, b: F64, name: str, mode: str) -> Array:
    if name == "f64":
        return fma_f64(a, np.ones_like(a), b, mode)
    total = round_to_odd_sum(a, b)
    if mode == "rm":
        # A sum that cancels to zero is -0 when rounding down; two zeros of one sign keep it.
        cancelled = (total == 0) & ~((a == 0) & (b == 0) & (np.signbit(a) == np.signbit(b)))
        total = np.where(cancelled, -0.0, total)
    return from_f64(total, name, mode)


def mul_rounded(a: F64, b: F64, name: str, mode: str) -> Array:
    if name == "f64":
        # a product of numbers has the sign of the exact result even where it is 0
        return np.copysign(fma_f64(a, b, np.copysign(0.0, a * b), mode), a * b)
    return from_f64(a * b, name, mode)


def div_rounded(a: F64, b: F64, mode: str) -> Array:
    """f32 quotient: float64 division is exact to 53 bits, made odd where a remainder is left."""
    q = a / b
    ok = np.isfinite(q) & (q != 0)
    remainder = fma_f64(-q, b, a) if mode != "rn" else np.zeros_like(q)
    bits = q.view(np.int64)
    step = np.where(((remainder > 0) == (b > 0)) == (q > 0), 1, -1)
    odd = np.where(ok & (remainder != 0) & ((bits & 1) == 0), bits + step, bits).view(np.float64)
    return from_f64(odd, "f32", mode)


def _other(a: Array, b: Array, out: Array) -> Array:
    """``out``, or the operand that is not NaN; numpy's fmin and fmax do not ignore signalling NaN."""
    return np.where(a != a, b, np.where(b != b, a, out))


def minimum(a: Array, b: Array, nan: bool) -> Array:
    """PTX min: NaN is ignored unless both are NaN, or ``nan``; -0 is less than +0."""
    out = np.minimum(a, b) if nan else _other(a, b, np.where(a < b, a, b))
    return np.where(a == b, np.where(np.signbit(a), a, b), out)


def maximum(a: Array, b: Array, nan: bool) -> Array:
    out = np.maximum(a, b) if nan else _other(a, b, np.where(a > b, a, b))
    return np.where(a == b, np.where(np.signbit(a), b, a), out)


def to_int(x: F64, mode: str, bits: int, signed: bool, high_nan: bool) -> Array:
    """Float to integer with saturation (cvt.{rni,rzi,rmi,rpi}); NaN becomes 0, or the top bit alone if ``high_nan``."""
    rounding: dict[str, Callable[[F64], F64]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    r = rounding[mode](x)
    low = -(2 ** (bits - 1)) if signed else 0
    high = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    nan = np.isnan(x)
    over, under = r >= float(high), r <= float(low)
    safe = np.where(nan | over | under, 0.0, r)
    out = safe.astype(dtype) if bits < 64 or signed else safe.astype(np.uint64)
    out = np.where(over, np.array(high, dtype), np.where(under, np.array(low, dtype), out))
    fallback = (-(2 ** (bits - 1)) if signed else 2 ** (bits - 1)) if high_nan else 0
    return np.where(nan, np.array(fallback, dtype), out).astype(dtype)
