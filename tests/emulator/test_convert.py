"""cvt: exhaustive where a source has at most 16 bits, against numpy, ml_dtypes and enumeration."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .harness import edges, elementwise, floats
from .test_float import exact_round, same

Array = np.ndarray[Any, Any]
ALL16 = np.arange(65536, dtype=np.uint32).astype(np.uint16)
ALL8 = np.arange(256, dtype=np.uint16)
INTS = {f"{s}{b}": np.dtype(f"{'i' if s == 's' else 'u'}{b // 8}") for s in "su" for b in (8, 16, 32, 64)}
#: Finite values of each narrow format by non-negative code, from the definitions of their fields.
NARROW = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
SIGN = {"e4m3": 0x80, "e5m2": 0x80, "e2m3": 0x20, "e3m2": 0x20, "e2m1": 0x8}
NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m3": 0x1F, "e3m2": 0x1F, "e2m1": 0x7}


def magnitudes(name: str) -> Array:
    """Finite non-negative values in code order."""
    values = np.arange(SIGN[name], dtype=np.uint8).view(NARROW[name]).astype(np.float64)
    return values[np.isfinite(values)]


def nearest_code(x: float, name: str) -> int:
    """Round to nearest, ties to the even code, saturating: by search over all values."""
    if np.isnan(x):
        return NAN[name]
    table = magnitudes(name)
    distance = np.abs(table - min(abs(x), table[-1]))
    best = np.flatnonzero(distance == distance.min())
    code = int(best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0))
    return code | (SIGN[name] if np.signbit(x) else 0)


@pytest.mark.parametrize("to", INTS)
@pytest.mark.parametrize("frm", INTS)
def test_integer_to_integer(to: str, frm: str, rng: np.random.Generator) -> None:
    carrier = np.dtype(f"u{max(INTS[frm].itemsize, 2)}")
    x = edges(carrier, rng)
    value = x.astype(np.dtype(f"u{INTS[frm].itemsize}")).view(INTS[frm])
    out = np.dtype(f"u{max(INTS[to].itemsize, 2)}")
    wide = np.dtype(out.str.replace("u", "i")) if to[0] == "s" else out
    got = elementwise(f"cvt.{to}.{frm} %d, %a;", x, out=out)
    assert np.array_equal(got, value.astype(INTS[to]).astype(wide).view(out))
    info = np.iinfo(INTS[to])
    got = elementwise(f"cvt.sat.{to}.{frm} %d, %a;", x, out=out)
    want = np.array([min(max(v, info.min), info.max) for v in value.tolist()], INTS[to])
    assert np.array_equal(got, want.astype(wide).view(out))


def test_narrow_registers_extend_into_wide_ones() -> None:
    x = np.arange(256, dtype=np.uint32)
    assert np.array_equal(
        elementwise("cvt.s8.s32 %d, %a;", x), x.astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
    )
    assert np.array_equal(elementwise("cvt.u8.u32 %d, %a;", x + 512), x)


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", [t for t in INTS if t[1:] != "8"])
def test_float_to_integer(to: str, mode: str, rng: np.random.Generator) -> None:
    x = np.concatenate([floats(rng), np.float32([0.5, 1.5, -0.5, 2.5, 1e9, -1e9, 4294967296.0, 2147483648.0])])
    got = elementwise(f"cvt.{mode}.{to}.f32 %d, %a;", x, out=INTS[to])
    info = np.iinfo(INTS[to])
    rounding = {"rni": round, "rzi": int, "rmi": lambda f: f.__floor__(), "rpi": lambda f: f.__ceil__()}[mode]
    for v, r in zip(x.tolist(), got.tolist(), strict=True):
        if np.isnan(v):
            want = 0 if info.bits < 64 else (info.min if info.min else 1 << 63)
        elif np.isinf(v):
            want = info.max if v > 0 else info.min
        else:
            want = min(max(rounding(Fraction(v)), info.min), info.max)
        assert r == want, (v, mode)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("frm", ["s32", "u32", "s64", "u64"])
def test_integer_to_float(frm: str, mode: str, rng: np.random.Generator) -> None:
    x = edges(INTS[frm], rng, 200)
    got = elementwise(f"cvt.{mode}.f32.{frm} %d, %a;", x, out=np.float32)
    assert got.tolist() == [exact_round(Fraction(v), mode) for v in x.tolist()]


def test_integer_to_half_and_double(rng: np.random.Generator) -> None:
    x = edges(np.int16, rng)
    assert np.array_equal(elementwise("cvt.rn.f16.s16 %d, %a;", x, out=np.float16), x.astype(np.float16))
    y = edges(np.int64, rng)
    assert np.array_equal(elementwise("cvt.rn.f64.s64 %d, %a;", y, out=np.float64), y.astype(np.float64))


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_half_to_float_is_exhaustively_exact(name: str, dtype: Any) -> None:
    got = elementwise(f"cvt.f32.{name} %d, %a;", ALL16, out=np.float32)
    same(got, ALL16.view(dtype).astype(np.float32))


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_float_to_half(name: str, dtype: Any, mode: str, rng: np.random.Generator) -> None:
    exact = ALL16.view(dtype).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    between = (exact[:-1].astype(np.float64) + exact[1:]) / 2  # ties
    x = np.concatenate([floats(rng), exact[::7], between[::7].astype(np.float32), np.float32([65519, 65520, 3.4e38])])
    got = elementwise(f"cvt.{mode}.{name}.f32 %d, %a;", x, out=np.uint16).view(dtype)
    if mode == "rn":
        with np.errstate(all="ignore"):
            same(got.astype(np.float32), x.astype(dtype).astype(np.float32))
    fields = (10, -14, 15) if name == "f16" else (7, -126, 127)
    for v, r in zip(x.tolist(), got.astype(float).tolist(), strict=True):
        if np.isfinite(v):
            assert r == exact_round(Fraction(v), mode, *fields)
    assert (got.view(np.uint16)[np.isnan(x)] == 0x7FFF).all()


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_pairs_put_the_first_source_high(name: str, dtype: Any, rng: np.random.Generator) -> None:
    a, b = floats(rng), floats(rng)
    got = elementwise(f"cvt.rn.{name}x2.f32 %d, %a, %b;", a, b).view(dtype).reshape(-1, 2).astype(np.float32)
    with np.errstate(all="ignore"):
        same(got[:, 1], a.astype(dtype).astype(np.float32))
        same(got[:, 0], b.astype(dtype).astype(np.float32))
    relu = elementwise(f"cvt.rn.relu.{name}x2.f32 %d, %a, %b;", a, b).view(dtype).reshape(-1, 2).astype(np.float32)
    with np.errstate(all="ignore"):
        same(relu[:, 1], np.where(np.isnan(a), a, np.maximum(a, 0)).astype(dtype).astype(np.float32))
    huge = np.float32([np.inf, -np.inf])
    top = elementwise(f"cvt.rn.satfinite.{name}x2.f32 %d, %a, %b;", huge, np.float32([1, 2]))
    limit = {"f16": 0x7BFF, "bf16": 0x7F7F}[name]
    assert (top >> 16).tolist() == [limit, limit | 0x8000]


@pytest.mark.parametrize("name", NARROW)
def test_float_to_narrow_pairs(name: str, rng: np.random.Generator) -> None:
    table = magnitudes(name)
    ties = (table[:-1] + table[1:]) / 2
    values = np.concatenate(
        [table, ties, np.nextafter(ties, 0), np.nextafter(ties, 9e9), table[-1:] * 1.01, table[-1:] * 64]
    )
    values = np.concatenate([values, -values]).astype(np.float32)
    x = np.concatenate([values, floats(rng, 200), np.float32([np.inf, -np.inf, np.nan])])
    y = rng.permutation(x)
    got = elementwise(f"cvt.rn.satfinite.{name}x2.f32 %rs1, %a, %b; cvt.u32.u16 %d, %rs1;", x, y)
    half = 4 if name == "e2m1" else 8
    for a, b, r in zip(x.tolist(), y.tolist(), got.tolist(), strict=True):
        assert r >> half == nearest_code(a, name), a
        assert r & ((1 << half) - 1) == nearest_code(b, name), b


@pytest.mark.parametrize("name", NARROW)
def test_narrow_pairs_to_half_exhaustively(name: str) -> None:
    codes = ALL16 if name != "e2m1" else ALL8
    if name in ("e2m3", "e3m2"):
        codes = codes[(codes & 0xC0C0) == 0]
    half = 4 if name == "e2m1" else 8
    mask = (1 << half) - 1
    got = elementwise(f"cvt.rn.f16x2.{name}x2 %d, %a;", codes).view(np.float16).reshape(-1, 2).astype(np.float32)
    for column, shift in ((0, 0), (1, half)):
        want = ((codes >> shift) & mask).astype(np.uint8).view(NARROW[name]).astype(np.float32)
        same(got[:, column], want)


def test_e2m1_bytes_pack_into_a_word(rng: np.random.Generator) -> None:
    x = rng.uniform(-7, 7, (8, 64)).astype(np.float32)
    text = ".reg .b8 b0, b1, b2, b3; .reg .f32 zero; mov.f32 zero, 0f00000000;"
    got = elementwise(
        text
        + "cvt.rn.satfinite.e2m1x2.f32 b0, %b, %a; cvt.rn.satfinite.e2m1x2.f32 b1, %c, %b;"
        + "cvt.rn.satfinite.e2m1x2.f32 b2, %e, %c; cvt.rn.satfinite.e2m1x2.f32 b3, zero, %e; "
        + "mov.b32 %d, {b0, b1, b2, b3};",
        *x[:4],
    )
    code = [[nearest_code(float(v), "e2m1") for v in row] for row in x[:4]]
    for k, r in enumerate(got.tolist()):
        a, b, c, e = (row[k] for row in code)
        assert [r >> 4 * i & 15 for i in range(8)] == [a, b, b, c, c, e, e, 0]


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_scales_of_powers_of_two(mode: str, rng: np.random.Generator) -> None:
    x = np.concatenate([np.abs(floats(rng)), np.float32([-1, 0, 1, 1.0001, 2, 3, np.inf, np.nan, 2.0**-149, 3e38])])
    x = np.concatenate([x, -x])
    got = elementwise(f"cvt.{mode}.satfinite.ue8m0x2.f32 %rs1, 0f00000000, %a; cvt.u32.u16 %d, %rs1;", x) & 0xFF
    for v, r in zip(np.abs(x).tolist(), got.tolist(), strict=True):  # the sign does not count
        if np.isnan(v):
            assert r == 255
        elif np.isinf(v):
            assert r == 254
        elif v == 0:
            assert r == 0
        else:
            e = int(np.frexp(v)[1]) - 1
            up = mode == "rp" and Fraction(v) != Fraction(2) ** e
            assert r == min(max(e + 127 + up, 0), 254), v


def test_scales_expand_to_bf16() -> None:
    got = elementwise("cvt.rn.bf16x2.ue8m0x2 %d, %a;", ALL16).view(ml_dtypes.bfloat16).reshape(-1, 2).astype(np.float64)
    for column in (0, 1):
        code = (ALL16 >> 8 * column & 255).astype(np.float64)
        want = np.where(code == 255, np.nan, np.exp2(code - 127))
        assert np.array_equal(got[:, column], want, equal_nan=True)


def test_tf32(rng: np.random.Generator) -> None:
    x = floats(rng, 300)
    x = x[np.isfinite(x) & (np.abs(x) < 1e38)]
    got = elementwise("cvt.rna.tf32.f32 %d, %a;", x).view(np.float32)
    assert (got.view(np.uint32) & 0x1FFF == 0).all()
    bits = x.view(np.uint32)
    want = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    assert np.array_equal(got, want)


def test_rounding_to_integral_values(rng: np.random.Generator) -> None:
    x = np.concatenate([floats(rng), np.float32([0.5, 1.5, 2.5, -0.5, -1.5])])
    with np.errstate(all="ignore"):
        for mode, fn in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
            same(elementwise(f"cvt.{mode}.f32.f32 %d, %a;", x, out=np.float32), fn(x))
    sat = elementwise("cvt.sat.f32.f32 %d, %a;", np.float32([-1, 0.5, 2, np.nan]), out=np.float32)
    assert sat.tolist() == [0, 0.5, 1, 0]


SOURCES: dict[str, Any] = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": ml_dtypes.bfloat16
}  # fmt: skip
TARGETS: dict[str, Any] = {f"{k}{b}": np.dtype(f"{k.replace('s', 'i')}{b // 8}") for k in "us" for b in (8, 16, 32, 64)}
ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


REFERENCE_WARNINGS = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")


@REFERENCE_WARNINGS
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_16_bit_input_to_every_integer(source: str, target: str) -> None:
    """Integers wrap, or saturate with .sat; floats are rounded and saturate, NaN is 0 or (64 bits) the top bit."""
    dtype = TARGETS[target]
    x = ALL16.view(np.uint8)[::2].view(SOURCES[source]) if source[1:] == "8" else ALL16.view(SOURCES[source])
    word = {1: np.uint16, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    info = np.iinfo(dtype)
    floating = "f" in source
    for form in ROUNDINGS if floating else ("", ".sat"):
        text = f"cvt.{form}.{target}.{source}" if floating else f"cvt{form}.{target}.{source}"
        got = elementwise(f"{text} %d, %a;", ALL16, out=word).astype(dtype)
        if floating:
            value = ROUNDINGS[form](x.astype(np.float64))
            nan = np.isnan(value)
            low, high = int(info.min), int(info.max)
            want = np.array([0 if v != v else low if v <= low else high if v >= high else int(v) for v in value], dtype)
            if dtype.itemsize == 8:
                want[nan] = np.array([1 << 63], np.uint64).view(dtype)[0]
        elif form:
            want = np.clip(x.astype(np.int64), max(info.min, -(2**15)), min(info.max, 2**16)).astype(dtype)
        else:
            want = x.astype(dtype)
        assert np.array_equal(got, want), text


@REFERENCE_WARNINGS
@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_every_16_bit_integer_to_every_float(source: str, mode: str) -> None:
    x = ALL16.view(np.uint8)[::2].view(SOURCES[source]) if source[1:] == "8" else ALL16.view(SOURCES[source])
    for target, dtype, word in (("f32", np.float32, np.uint32), ("f64", np.float64, np.uint64)):
        got = elementwise(f"cvt.{mode}.{target}.{source} %d, %a;", ALL16, out=word).view(dtype)
        assert np.array_equal(got, x.astype(dtype))
    for target, half in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        got = elementwise(f"cvt.{mode}.{target}.{source} %d, %a;", ALL16, out=np.uint16).view(half).astype(np.float64)
        exact = x.astype(np.float64)
        near = exact.astype(half).astype(np.float64)
        # got is a neighbour of the exact value, on the side that the mode asks for
        assert {"rn": got == near, "rm": got <= exact, "rp": got >= exact, "rz": np.abs(got) <= np.abs(exact)}[
            mode
        ].all()
        unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 1))) - (10 if target == "f16" else 7))
        finite = np.isfinite(got)
        assert (np.abs(got - exact)[finite] < unit[finite]).all()
        assert finite.all() or (target == "f16" and mode in ("rn", "rp") and source == "u16")
