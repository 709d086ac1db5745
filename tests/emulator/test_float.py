"""Floating-point arithmetic against exact rational arithmetic and numpy."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b12x.emulator import numerics

from .harness import edges, elementwise, floats

Array = np.ndarray[Any, Any]


def same(got: Array, want: Array) -> None:
    """Equal bits, except that any NaN is as good as another."""
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    bits = np.dtype(f"u{got.itemsize}")
    assert np.array_equal(got[~nan].view(bits), want[~nan].view(bits))


def exact_round(value: Fraction, mode: str, mantissa: int = 23, emin: int = -126, emax: int = 127) -> float:
    """A rational number rounded once to a binary format, by the definition of IEEE 754."""
    if value == 0:
        return 0.0
    magnitude, negative = abs(value), value < 0
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** e > magnitude:
        e -= 1
    unit = Fraction(2) ** (max(e, emin) - mantissa)
    low = magnitude // unit
    rest = magnitude / unit - low
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1),
        "rz": False,
        "rp": rest > 0 and not negative,
        "rm": rest > 0 and negative,
    }[mode]
    result = (low + up) * unit
    limit = (2 - Fraction(1, 2**mantissa)) * Fraction(2) ** emax
    if result > limit:
        out = float(limit) if mode == "rz" or mode == ("rm" if not negative else "rp") else float("inf")
    else:
        out = float(result)
    return -out if negative else out


def finite_triples(rng: np.random.Generator) -> list[Array]:
    """Operands that make fma hard: cancellation, halfway cases, subnormal results."""
    n = 300
    x = floats(rng, n)
    x = x[np.isfinite(x)]
    a, b = rng.permutation(x), rng.permutation(x)
    with np.errstate(all="ignore"):
        near = -(a * b)
        c = np.where(
            rng.random(a.size) < 0.5, near * rng.choice(np.float32([1, 1 + 2.0**-23, 0.5]), a.size), rng.permutation(x)
        )
    c = np.where(np.isfinite(c), c, np.float32(1)).astype(np.float32)
    half = np.float32(2.0**-24)
    extra_a = np.float32([1 + 2.0**-12, 1 + 2.0**-23, 2.0**-75, 3 * 2.0**-75, 1.0, 1.0])
    extra_b = np.float32([1 + 2.0**-12, half, 2.0**-75, 2.0**-75, half, half])
    extra_c = np.float32([2.0**-60, 1.0, 0, 2.0**-149, 1 + 2.0**-23, 1])
    return [np.concatenate(p) for p in ((a, extra_a), (b, extra_b), (c, extra_c))]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_has_one_rounding(mode: str, rng: np.random.Generator) -> None:
    a, b, c = finite_triples(rng)
    got = elementwise(f"fma.{mode}.f32 %d, %a, %b, %c;", a, b, c, out=np.float32)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert r == exact_round(Fraction(x) * Fraction(y) + Fraction(z), mode), (x, y, z)


def test_fma_through_float64_would_fail() -> None:
    """The case that separates one rounding from two."""
    a, b, c = (np.array([v], np.float32) for v in (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60))
    twice = np.float32(a.astype(np.float64) * b + c)
    got = elementwise("fma.rn.f32 %d, %a, %b, %c;", a, b, c, out=np.float32)
    assert got[0] != twice[0]


def test_fma_special_values(rng: np.random.Generator) -> None:
    values = np.float32([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 3e38])
    a, b, c = (g.ravel().astype(np.float32) for g in np.meshgrid(values, values, values))
    with np.errstate(all="ignore"):
        want = (a.astype(np.float64) * b + c).astype(np.float32)
    same(elementwise("fma.rn.f32 %d, %a, %b, %c;", a, b, c, out=np.float32), want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(
    ("op", "fn"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("div", lambda a, b: a / b),
    ],
)
def test_rounding_modes(op: str, mode: str, fn: Callable[..., Fraction], rng: np.random.Generator) -> None:
    x = floats(rng, 300)
    x = x[np.isfinite(x) & (x != 0)]
    a, b = rng.permutation(x), rng.permutation(x)
    got = elementwise(f"{op}.{mode}.f32 %d, %a, %b;", a, b, out=np.float32)
    want = [exact_round(fn(Fraction(p), Fraction(q)), mode) for p, q in zip(a.tolist(), b.tolist(), strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_f16_and_bf16_arithmetic(op: str, rng: np.random.Generator) -> None:
    a, b = edges(np.uint16, rng, 2000), edges(np.uint16, rng, 2000)
    fn = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
    for name, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        with np.errstate(all="ignore"):
            want = fn(a.view(dtype), b.view(dtype))
        got = elementwise(f"{op}.rn.{name} %d, %a, %b;", a, b, out=np.uint16).view(dtype)
        same(got.astype(np.float32), want.astype(np.float32))
        packed = elementwise(
            f"{op}.rn.{name}x2 %d, %a, %b;", a[: a.size // 2 * 2].view(np.uint32), b[: b.size // 2 * 2].view(np.uint32)
        )
        same(packed.view(dtype).astype(np.float32), want[: a.size // 2 * 2].astype(np.float32))


@pytest.mark.parametrize(("name", "mantissa", "emin", "emax"), [("f16", 10, -14, 15), ("bf16", 7, -126, 127)])
def test_fma_of_narrow_floats(name: str, mantissa: int, emin: int, emax: int, rng: np.random.Generator) -> None:
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[name]
    a, b, c = (edges(np.uint16, rng, 300) for _ in range(3))
    ok = np.isfinite(a.view(dtype)) & np.isfinite(b.view(dtype)) & np.isfinite(c.view(dtype))
    a, b, c = a[ok], b[ok], c[ok]
    got = elementwise(f"fma.rn.{name} %d, %a, %b, %c;", a, b, c, out=np.uint16).view(dtype).astype(float)
    for x, y, z, r in zip(*(v.view(dtype).astype(float).tolist() for v in (a, b, c)), got.tolist(), strict=True):
        assert r == exact_round(Fraction(x) * Fraction(y) + Fraction(z), "rn", mantissa, emin, emax), (x, y, z)


def test_f64_fma(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal(64), rng.standard_normal(64)
    c = -(a * b)
    got = elementwise("fma.rn.f64 %d, %a, %b, %c;", a, b, c, out=np.float64)
    want = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert got.tolist() == want
    assert any(want)


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_mixed_precision_arithmetic(name: str, dtype: Any, rng: np.random.Generator) -> None:
    """f32 results from narrow operands: all but the last are widened first."""
    a, b = (rng.standard_normal(300).astype(dtype) for _ in range(2))
    c = rng.standard_normal(300).astype(np.float32)
    bits = [x.view(np.uint16) for x in (a, b)]
    got = elementwise(f"add.rn.f32.{name} %d, %a, %b;", bits[0], c, out=np.float32)
    assert np.array_equal(got, a.astype(np.float32) + c)
    got = elementwise(f"sub.f32.{name} %d, %a, %b;", bits[0], c, out=np.float32)
    assert np.array_equal(got, a.astype(np.float32) - c)
    got = elementwise(f"fma.rn.f32.{name} %d, %a, %b, %c;", *bits, c, out=np.float32)
    assert np.array_equal(got, (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32))


def test_packed_f32(rng: np.random.Generator) -> None:
    a, b, c = (rng.standard_normal(128).astype(np.float32) for _ in range(3))
    a, b, c = (x.view(np.uint64) for x in (a, b, c))
    got = elementwise("mul.rn.f32x2 %d, %a, %b; add.rn.f32x2 %d, %d, %c;", a, b, c, out=np.uint64).view(np.float32)
    assert np.array_equal(got, a.view(np.float32) * b.view(np.float32) + c.view(np.float32))
    got = elementwise("fma.rn.f32x2 %d, %a, %b, %c;", a, b, c, out=np.uint64).view(np.float32)
    scalar = elementwise("fma.rn.f32 %d, %a, %b, %c;", *(x.view(np.float32) for x in (a, b, c)), out=np.float32)
    assert np.array_equal(got, scalar)


def test_flush_to_zero(rng: np.random.Generator) -> None:
    x = np.float32([2.0**-127, -(2.0**-130), 2.0**-126, 1.0, 0.0])
    one = np.ones_like(x)
    assert elementwise("mul.ftz.f32 %d, %a, %b;", x, one, out=np.float32).tolist() == [0, -0.0, 2.0**-126, 1, 0]
    got = elementwise("mul.ftz.f32 %d, %a, %b;", x, one, out=np.float32)
    assert np.signbit(got).tolist() == [False, True, False, False, False]
    half = np.full_like(x, 0.5)
    assert elementwise("mul.ftz.f32 %d, %a, %b;", x, half, out=np.float32)[2] == 0
    assert elementwise("mul.f32 %d, %a, %b;", x, half, out=np.float32)[2] == 2.0**-127


def test_saturation() -> None:
    x = np.float32([-1, -0.0, 0.25, 1.5, np.inf, np.nan])
    got = elementwise("add.sat.f32 %d, %a, 0f00000000;", x, out=np.float32)
    assert got.tolist() == [0, 0, 0.25, 1, 1, 0]


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_max_ignore_nan_and_order_zeros(op: str) -> None:
    values = np.float32([0.0, -0.0, 1, -2, np.inf, -np.inf, np.nan])
    a, b = (g.ravel() for g in np.meshgrid(values, values))
    low = op == "min"

    def fn(x: float, y: float, nan: bool) -> float:
        if np.isnan(x) or np.isnan(y):
            return float("nan") if nan or (np.isnan(x) and np.isnan(y)) else (y if np.isnan(x) else x)
        if x == y == 0:
            signs = [np.signbit(x), np.signbit(y)]
            return -0.0 if (any(signs) if low else all(signs)) else 0.0
        return min(x, y) if low else max(x, y)

    for modifier, nan in (("", False), (".NaN", True)):
        want = np.float32([fn(x, y, nan) for x, y in zip(a.tolist(), b.tolist(), strict=True)])
        got = elementwise(f"{op}{modifier}.f32 %d, %a, %b;", a, b, out=np.float32)
        same(got, want)
        assert (got[np.isnan(want)].view(np.uint32) == 0x7FFFFFFF).all()
        for name, dtype, code in (("f16", np.float16, 0x7FFF), ("bf16", ml_dtypes.bfloat16, 0x7FFF)):
            bits = elementwise(
                f"{op}{modifier}.{name} %d, %a, %b;",
                a.astype(dtype).view(np.uint16),
                b.astype(dtype).view(np.uint16),
                out=np.uint16,
            )
            same(bits.view(dtype).astype(np.float32), want)
            assert (bits[np.isnan(want)] == code).all()


def test_three_input_min_and_xorsign_abs() -> None:
    a, b, c = np.float32([3, -5, np.nan]), np.float32([-4, 2, 1]), np.float32([1, 7, np.nan])
    assert elementwise("min.f32 %d, %a, %b, %c;", a, b, c, out=np.float32).tolist() == [-4, -5, 1]
    assert elementwise("max.f32 %d, %a, %b, %c;", a, b, c, out=np.float32).tolist() == [3, 7, 1]
    assert elementwise("max.xorsign.abs.f32 %d, %a, %b;", a, b, out=np.float32)[:2].tolist() == [-4, -5]


def test_neg_and_abs_touch_only_the_sign(rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, 500, dtype=np.uint32)
    assert np.array_equal(elementwise("neg.f32 %d, %a;", x), x ^ np.uint32(1 << 31))
    assert np.array_equal(elementwise("abs.f32 %d, %a;", x), x & np.uint32(0x7FFFFFFF))
    assert np.array_equal(elementwise("neg.bf16x2 %d, %a;", x), x ^ np.uint32(0x80008000))
    assert np.array_equal(elementwise("abs.f16x2 %d, %a;", x), x & np.uint32(0x7FFF7FFF))
    y = rng.integers(0, 2**63, 500, dtype=np.uint64)
    assert np.array_equal(elementwise("neg.f64 %d, %a;", y, out=np.uint64), y ^ np.uint64(1 << 63))


def test_reciprocal_root_and_quotient_are_correctly_rounded(rng: np.random.Generator) -> None:
    x = np.abs(floats(rng, 300))
    x = x[np.isfinite(x) & (x != 0)]
    got = elementwise("rcp.rn.f32 %d, %a;", x, out=np.float32)
    assert got.tolist() == [exact_round(1 / Fraction(v), "rn") for v in x.tolist()]
    for mode in ("rz", "rp"):
        got = elementwise(f"rcp.{mode}.f32 %d, %a;", x, out=np.float32)
        assert got.tolist() == [exact_round(1 / Fraction(v), mode) for v in x.tolist()]
    root = elementwise("sqrt.rn.f32 %d, %a;", x, out=np.float32).astype(np.float64)
    below, above = np.nextafter(root.astype(np.float32), 0), np.nextafter(root.astype(np.float32), np.inf)
    wide = x.astype(np.longdouble)
    assert (((below.astype(np.longdouble) + root) / 2) ** 2 <= wide).all()
    assert (((above.astype(np.longdouble) + root) / 2) ** 2 >= wide).all()


@pytest.mark.parametrize(
    ("text", "fn", "low", "high", "error"),
    [
        ("ex2.approx.ftz.f32", np.exp2, -120, 120, 2.0**-22),
        ("lg2.approx.f32", np.log2, 2.5, 1e30, 2.0**-22),
        ("rsqrt.approx.ftz.f32", lambda x: 1 / np.sqrt(x), 1e-30, 1e30, 2.0**-22),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, 1e-30, 1e30, 2.0**-23),
        ("sqrt.approx.f32", np.sqrt, 1e-30, 1e30, 2.0**-23),
        ("sin.approx.f32", np.sin, 0.1, 3.0, 2.0**-20),
        ("cos.approx.f32", np.cos, 0.1, 1.5, 2.0**-20),
        ("tanh.approx.f32", np.tanh, -8, 8, 2.0**-11),
    ],
)
def test_approximate_functions(text: str, fn: Callable[..., Array], low: float, high: float, error: float) -> None:
    x = np.linspace(low, high, 500, dtype=np.float32)
    got = elementwise(f"{text} %d, %a;", x, out=np.float32).astype(np.float64)
    want = fn(x.astype(np.float64))
    assert (np.abs(got - want) <= error * np.abs(want) + 2.0**-140).all()


def test_classification_and_copysign() -> None:
    x = np.float32([0, -0.0, 1, 2.0**-130, np.inf, np.nan])
    tests = {
        "finite": [1, 1, 1, 1, 0, 0],
        "infinite": [0, 0, 0, 0, 1, 0],
        "number": [1, 1, 1, 1, 1, 0],
        "notanumber": [0, 0, 0, 0, 0, 1],
        "normal": [0, 0, 1, 0, 0, 0],
        "subnormal": [0, 0, 0, 1, 0, 0],
    }
    for name, want in tests.items():
        assert elementwise(f"testp.{name}.f32 %p1, %a; selp.b32 %d, 1, 0, %p1;", x).tolist() == want
    got = elementwise("copysign.f32 %d, %a, %b;", np.float32([-1, 1]), np.float32([5, -5]), out=np.float32)
    assert got.tolist() == [-5, 5]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300)
@given(finite, finite, finite, st.sampled_from(["rn", "rz", "rm", "rp"]))
def test_fma_property(a: float, b: float, c: float, mode: str) -> None:
    with np.errstate(all="ignore"):
        got = numerics.fma(*(np.array([v], np.float64) for v in (a, b, c)), "f32", mode)
    assert float(got[0]) == exact_round(Fraction(a) * Fraction(b) + Fraction(c), mode)


@settings(max_examples=300)
@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["rn", "rz", "rm", "rp"]))
def test_narrowing_property(x: float, mode: str) -> None:
    for name, mantissa, emin, emax in (("f32", 23, -126, 127), ("f16", 10, -14, 15), ("bf16", 7, -126, 127)):
        code = numerics.encode(np.array([x]), numerics.FORMATS[name], mode)
        dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[name]
        value = code.astype(np.dtype(f"u{np.dtype(dtype).itemsize}")).view(dtype).astype(float)[0]
        assert value == exact_round(Fraction(x), mode, mantissa, emin, emax)


@pytest.mark.parametrize(("mode", "negative"), [("rn", False), ("rz", False), ("rp", False), ("rm", True)])
def test_a_sum_that_cancels_is_minus_zero_when_rounding_down(mode: str, negative: bool) -> None:
    """IEEE 754 section 6.3; an H200 gave -0 for `sub.rm.f32x2` of equal numbers."""
    x = np.float32([1.5, 2.0**-149, 3e38, 0.0])
    difference = elementwise(f"sub.{mode}.f32 %d, %a, %b;", x, x, out=np.float32)
    assert (difference == 0).all()
    assert (np.signbit(difference) == negative).all()
