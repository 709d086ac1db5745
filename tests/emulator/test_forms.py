"""Types, modifiers and hints of opcodes, each against numpy: what other files have no cases for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .harness import THREAD, address, aligned, edges, elementwise, region, run

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16
FLOATS: dict[str, Any] = {
    "f16": np.float16, "bf16": BF16, "f16x2": np.float16, "bf16x2": BF16, "f32": np.float32, "f64": np.float64
}  # fmt: skip
INTS: dict[str, Any] = {
    "s16": np.int16, "s32": np.int32, "s64": np.int64, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64
}  # fmt: skip
BITS: dict[str, Any] = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
WORD = {2: np.uint16, 4: np.uint32, 8: np.uint64}
ALL16 = np.arange(65536, dtype=np.uint16)


def carrier(t: str) -> Any:
    """The unsigned type of the register that holds a PTX type."""
    return np.uint32 if t.endswith("x2") else WORD[np.dtype({**FLOATS, **INTS, **BITS}[t]).itemsize]


def values(t: str, rng: np.random.Generator, scale: float = 4.0) -> Array:
    """Moderate numbers of a floating-point type, zeros and ones among them."""
    return np.concatenate([rng.standard_normal(500) * scale, [0, -0.0, 1, -1, 0.5, 2, 3, -3]]).astype(FLOATS[t])


def apply(text: str, t: str, *inputs: Array) -> Array:
    """The instruction's result as values of the type; operands are %a, %b, %c."""
    word = carrier(t)
    got: Array = elementwise(text, *(np.ascontiguousarray(x).view(word) for x in inputs), out=word)
    return got.view(FLOATS.get(t) or {**INTS, **BITS}[t])


def equal(got: Array, want: Array) -> None:
    """Equal as numbers, with NaN equal to NaN and zeros told apart."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    assert np.array_equal(a, b, equal_nan=True)
    assert np.array_equal(np.signbit(a)[b == 0], np.signbit(b)[b == 0])


# Floating point


@pytest.mark.parametrize("t", FLOATS)
def test_abs_and_neg(t: str, rng: np.random.Generator) -> None:
    word = carrier(t)
    x = ALL16 if word is np.uint16 else edges(word, rng)
    sign = {"f16x2": 0x80008000, "bf16x2": 0x80008000}.get(t, 1 << (np.dtype(word).itemsize * 8 - 1))
    assert np.array_equal(elementwise(f"abs.{t} %d, %a;", x, out=word), x & ~word(sign))
    assert np.array_equal(elementwise(f"neg.{t} %d, %a;", x, out=word), x ^ word(sign))


@pytest.mark.parametrize("t", FLOATS)
def test_min_and_max(t: str, rng: np.random.Generator) -> None:
    a, b = values(t, rng), values(t, rng)[::-1].copy()
    for name, fn in (("min", np.minimum), ("max", np.maximum)):
        equal(apply(f"{name}.{t} %d, %a, %b;", t, a, b) + 0, fn(a.astype(np.float64), b.astype(np.float64)) + 0)
        if t != "f64":
            got = apply(f"{name}.xorsign.abs.{t} %d, %a, %b;", t, a, b).astype(np.float64)
            want = fn(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
            assert np.array_equal(np.abs(got), want)
            assert np.array_equal(np.signbit(got), np.signbit(a) ^ np.signbit(b))


def test_ftz(rng: np.random.Generator) -> None:
    """Subnormal inputs and results become zeros of their sign."""
    tiny = np.float32([2.0**-130, -(2.0**-130), 2.0**-126, -(2.0**-149), 1, -2, 0, 3e-39])
    other = np.float32([1, 1, 1, 1, 2.0**-130, 1, 2.0**-140, 0.5])
    flush = lambda x: np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)  # noqa: E731
    a, b = flush(tiny), flush(other)
    with np.errstate(all="ignore"):
        cases = {
            "abs.ftz.f32 %d, %a;": np.abs(a), "neg.ftz.f32 %d, %a;": -a, "add.ftz.f32 %d, %a, %b;": flush(a + b),
            "sub.ftz.f32 %d, %a, %b;": flush(a - b), "min.ftz.f32 %d, %a, %b;": np.minimum(a, b),
            "max.ftz.f32 %d, %a, %b;": np.maximum(a, b), "fma.rn.ftz.f32 %d, %a, %b, %b;": flush(a * b + b),
            "div.rn.ftz.f32 %d, %b, %a;": flush(b / a), "sqrt.rn.ftz.f32 %d, %a;": np.sqrt(a),
            "mad.rn.ftz.f32 %d, %a, %b, %b;": flush(a * b + b), "cos.approx.ftz.f32 %d, %a;": np.cos(a),
            "sin.approx.ftz.f32 %d, %a;": np.sin(a),
            "lg2.approx.ftz.f32 %d, %a;": np.log2(a), "cvt.ftz.f32.f32 %d, %a;": a,
        }  # fmt: skip
    for text, want in cases.items():
        got = apply(text, "f32", *((tiny, other) if "%b" in text else (tiny,)))
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=text)
        assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0])), text
    got = elementwise(
        "{ .reg .pred p; setp.eq.ftz.f32 p, %a, 0f00000000; selp.b32 %d, 1, 0, p; }", tiny.view(np.uint32)
    )
    assert got.tolist() == (a == 0).tolist()
    got = elementwise("set.eq.ftz.u32.f32 %d, %a, 0f00000000;", tiny.view(np.uint32))
    assert (got != 0).tolist() == (a == 0).tolist()
    got = elementwise("slct.ftz.s32.f32 %d, 1, 0, %a;", tiny.view(np.uint32))
    assert got.tolist() == (a >= 0).tolist()


@pytest.mark.parametrize("t", FLOATS)
def test_fma(t: str, rng: np.random.Generator) -> None:
    a, b, c = (values(t, rng)[rng.permutation(508)] for _ in range(3))
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    with np.errstate(all="ignore"):
        want = exact.astype(np.float64).astype(FLOATS[t])
    got = apply(f"fma.rn.{t} %d, %a, %b, %c;", t, a, b, c)
    if t == "f64":
        np.testing.assert_allclose(got, want, rtol=1e-15)
        for mode in ("rn", "rz", "rm", "rp"):
            both = [apply(f"{op}.{mode}.f64 %d, %a, %b, %c;", t, a, b, c) for op in ("fma", "mad")]
            assert np.array_equal(*both)
        return
    assert (got == want).mean() > 0.99  # the reference rounds twice
    zero = want.dtype.type(0)
    if t != "f32":
        assert np.array_equal(apply(f"fma.rn.relu.{t} %d, %a, %b, %c;", t, a, b, c), np.where(got > zero, got, zero))
    if "bf16" not in t:
        sat = np.clip(got, zero, want.dtype.type(1))
        assert np.array_equal(apply(f"fma.rn.sat.{t} %d, %a, %b, %c;", t, a, b, c), sat)
    if t == "f32":
        for mode in ("rn", "rz", "rm", "rp"):
            both = [apply(f"{op}.{mode}.f32 %d, %a, %b, %c;", t, a, b, c) for op in ("fma", "mad")]
            assert np.array_equal(*both)
        assert np.array_equal(apply("mad.rn.sat.f32 %d, %a, %b, %c;", t, a, b, c), sat)
        product = np.clip(a * b, 0, 1).astype(np.float32)
        assert np.array_equal(apply("mul.sat.f32 %d, %a, %b;", t, a, b), product)


def test_packed_f32(rng: np.random.Generator) -> None:
    a, b, c = (rng.standard_normal(256).astype(np.float32) for _ in range(3))
    words = [x.view(np.uint64) for x in (a, b, c)]
    for text, want in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        got = elementwise(f"{text}.rn.f32x2 %d, %a, %b;", *words[:2], out=np.uint64).view(np.float32)
        assert np.array_equal(got, want)
    got = elementwise("fma.rn.f32x2 %d, %a, %b, %c;", *words, out=np.uint64).view(np.float32)
    np.testing.assert_allclose(got, a.astype(np.float64) * b + c, rtol=1e-6)


@pytest.mark.parametrize("t", ["f32", "f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize("op", ["ex2", "tanh"])
def test_functions_of_narrow_floats(op: str, t: str) -> None:
    """Every 16-bit input; results correctly rounded from float64."""
    x = ALL16.view(FLOATS[t]) if t != "f32" else np.linspace(-20, 20, 999, dtype=np.float32)
    ftz = ".ftz" if op == "ex2" and "bf16" in t else ""
    with np.errstate(all="ignore"):
        want = {"ex2": np.exp2, "tanh": np.tanh}[op](x.astype(np.float64)).astype(FLOATS[t])
        equal(apply(f"{op}.approx{ftz}.{t} %d, %a;", t, x), want)


def test_divisions_and_roots(rng: np.random.Generator) -> None:
    a, b = np.abs(values("f32", rng)) + np.float32(0.1), np.abs(values("f32", rng)) + np.float32(0.1)
    for form in ("approx", "full", "approx.ftz", "full.ftz"):
        np.testing.assert_allclose(apply(f"div.{form}.f32 %d, %a, %b;", "f32", a, b), a / b, rtol=3e-7)
    x = np.abs(values("f64", rng)) + 0.1
    np.testing.assert_allclose(apply("rsqrt.approx.f64 %d, %a;", "f64", x), 1 / np.sqrt(x), rtol=1e-14)
    y = values("f64", rng)
    assert np.array_equal(apply("copysign.f64 %d, %a, %b;", "f64", y, x), np.copysign(x, y))
    got = elementwise("{ .reg .pred p; testp.normal.f64 p, %a; selp.b32 %d, 1, 0, p; }", y.view(np.uint64))
    assert np.array_equal(got != 0, y != 0)


# Selections and comparisons


@pytest.mark.parametrize("t", [*BITS, *INTS, "f32", "f64"])
def test_moves_and_selections(t: str, rng: np.random.Generator) -> None:
    word = carrier(t)
    a, b = edges(word, rng), edges(word, rng)
    assert np.array_equal(elementwise(f"mov.{t} %d, %a;", a, out=word), a)
    pick = (
        "{ .reg .pred p, q; setp.lt.u32 p, %r99, 100; mov.pred q, p; and.pred q, q, p; or.pred q, q, p; not.pred q, q;"
    )
    pick += f"selp.{t} %d, %b, %a, q; }}"
    low = np.arange(a.size) < 100
    assert np.array_equal(elementwise(pick, a, b, out=word), np.where(low, a, b))
    text = "{ .reg .s32 n; sub.s32 n, %r99, 100;" + f"slct.{t}.s32 %d, %a, %b, n; }}"
    assert np.array_equal(elementwise(text, a, b, out=word), np.where(low, b, a))


OPS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@pytest.mark.parametrize("t", [*BITS, *INTS, *FLOATS])
def test_comparisons(t: str, rng: np.random.Generator) -> None:
    word = carrier(t)
    dtype = {**FLOATS, **INTS, **BITS}[t]
    pool = np.concatenate([ALL16[::97], ALL16[31700:32000]]) if word is np.uint16 else edges(word, rng)
    a = pool.astype(word)
    b = np.where(rng.random(a.size) < 0.3, a, a[::-1])
    with np.errstate(invalid="ignore"):
        x, y = (v.view(dtype).astype(np.float64 if t in FLOATS else dtype) for v in (a, b))
    names = dict.fromkeys(["eq", "ne"] if t in BITS else OPS)
    if t in ("u16", "u32", "u64"):
        names |= dict.fromkeys(UNSIGNED)
    if t in FLOATS:
        names |= dict.fromkeys([n + "u" for n in OPS] + ["num", "nan"])
    nan = np.isnan(x) | np.isnan(y) if t in FLOATS else np.zeros(x.shape, bool)
    for name in names:
        base = OPS.get(UNSIGNED.get(name, name)) or OPS.get(name[:-1])
        with np.errstate(invalid="ignore"):
            want = ~nan if name == "num" else nan if name == "nan" else base(x, y)  # type: ignore[misc]
        if name in OPS:
            want = want & ~nan
        elif name.endswith("u") and name[:-1] in OPS:
            want = want | nan
        if t.endswith("x2"):
            text = f"{{ .reg .pred p, q; setp.{name}.{t} p|q, %a, %b; selp.b32 %d, 1, 0, p; @q or.b32 %d, %d, 2; }}"
            got = elementwise(text, a, b)
            assert np.array_equal(np.stack([got & 1, got >> 1], axis=-1).ravel() != 0, want), name
            continue
        text = f"{{ .reg .pred p; setp.{name}.{t} p, %a, %b; selp.b32 %d, 1, 0, p; }}"
        assert np.array_equal(elementwise(text, a, b) != 0, want), name
        assert np.array_equal(elementwise(f"set.{name}.u32.{t} %d, %a, %b;", a, b) == 0xFFFFFFFF, want), name


# Integers


def test_more_integer_forms(rng: np.random.Generator) -> None:
    for t, dtype in INTS.items():
        a, b, c = (edges(carrier(t), rng).view(dtype) for _ in range(3))
        with np.errstate(over="ignore"):
            want = c + np.where(a < b, b - a, a - b)
        assert np.array_equal(apply(f"sad.{t} %d, %a, %b, %c;", t, a, b, c), want)
    for t, dtype in BITS.items():
        a = edges(dtype, rng)
        amount = rng.integers(0, 70, a.size).astype(np.uint32)
        width = np.dtype(dtype).itemsize * 8
        want = np.where(amount < width, a >> np.minimum(amount, width - 1).astype(dtype), 0)
        assert np.array_equal(elementwise(f"shr.{t} %d, %a, %b;", a, amount, out=dtype), want)
    for t in ("u32", "s32", "u64", "s64"):
        word = carrier(t)
        a, b = edges(word, rng), edges(word, rng)
        names = ", ".join("abc")
        text = f"{{ .reg .{'b64' if word is np.uint64 else 'b32'} {names}; add.cc.{t} a, %a, %b; addc.cc.{t} b, %a, %b;"
        text += f"addc.{t} c, 0, 0; sub.cc.{t} a, %a, %b; subc.cc.{t} a, b, %b; subc.{t} %d, a, c; }}"
        mask = (1 << (np.dtype(word).itemsize * 8)) - 1
        want_list = []
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            total = x + y + (x + y > mask)
            carry, low = total > mask, total & mask
            first = low - y - (x < y)
            want_list.append(((first & mask) - carry - (first < 0)) & mask)
        assert elementwise(text, a, b, out=word).tolist() == want_list
    a, b, c = (edges(np.uint32, rng) for _ in range(3))
    signed = lambda x: (x.astype(np.int64) << 40) >> 40  # noqa: E731
    unsigned = lambda x: x.astype(np.int64) & 0xFFFFFF  # noqa: E731
    for t, f in (("s32", signed), ("u32", unsigned)):
        product = f(a) * f(b)
        assert np.array_equal(elementwise(f"mul24.hi.{t} %d, %a, %b;", a, b), (product >> 16).astype(np.uint32))
        assert np.array_equal(elementwise(f"mul24.lo.{t} %d, %a, %b;", a, b), product.astype(np.uint32))
        want = (product + c).astype(np.uint64).astype(np.uint32)
        assert np.array_equal(elementwise(f"mad24.lo.{t} %d, %a, %b, %c;", a, b, c), want)
    start, length = rng.integers(0, 64, (2, 300)).astype(np.uint32)
    got = elementwise("bmsk.wrap.b32 %d, %a, %b;", start, length)
    want = [
        (((1 << (n % 32)) - 1) << (s % 32)) & 0xFFFFFFFF for s, n in zip(start.tolist(), length.tolist(), strict=True)
    ]
    assert got.tolist() == want
    got = elementwise("szext.wrap.u32 %d, %a, %b;", a[:300], length)
    assert got.tolist() == [x & ((1 << (n % 32)) - 1) for x, n in zip(a[:300].tolist(), length.tolist(), strict=True)]
    for op in ("min", "max"):
        got = elementwise(f"{op}.relu.s32 %d, %a, %b;", a, b).view(np.int32)
        assert np.array_equal(got, np.maximum(getattr(np, op + "imum")(a.view(np.int32), b.view(np.int32)), 0))
    x = edges(np.uint32, rng)[:32]
    assert (elementwise("redux.sync.max.u32 %d, %a, -1;", x) == x.max()).all()
    y = rng.integers(0, 4, 32).astype(np.uint64) << np.uint64(40)
    got = elementwise("match.any.sync.b64 %d, %a, -1;", y)
    assert got.tolist() == [sum(1 << j for j in range(32) if y[j] == v) for v in y]


# Memory


LOAD_HINTS = ["ca", "cg", "cs", "lu", "cv", "weak", "nc", "unified", "relaxed.cluster", "mmio.relaxed.sys"]
HINTS = [f"L1::{h}" for h in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")]
HINTS += [f"L2::{h}" for h in ("evict_normal", "evict_first", "evict_last", "64B", "128B", "256B")]
STORE_HINTS = ["wb", "cg", "cs", "wt", "weak", "relaxed.cluster", "mmio.relaxed.sys"]


def test_hints_do_not_change_loads_and_stores() -> None:
    src, out = aligned(32, np.uint32, np.arange(32)), aligned(32, np.uint32)
    base = (
        THREAD
        + address("rd1", "src", 4)
        + address("rd2", "out", 4)
        + "createpolicy.fractional.L2::evict_last.b64 %rd9, 1.0;"
    )
    for hint in [*LOAD_HINTS, *HINTS, "L2::cache_hint"]:
        order = hint if hint.startswith(("weak", "relaxed", "mmio")) else ""
        cache = f"global.{hint}" if not order else f"{order}.global"
        policy = ", %rd9" if hint == "L2::cache_hint" else ""
        out[:] = 0
        run(base + f"ld.{cache}.u32 %r1, [%rd1]{policy}; st.global.b32 [%rd2], %r1; ret;", src=src, out=out)
        assert np.array_equal(src, out), hint
    for hint in [*STORE_HINTS, *HINTS, "L2::cache_hint"]:
        order = hint if hint.startswith(("weak", "relaxed", "mmio")) else ""
        cache = f"global.{hint}" if not order else f"{order}.global"
        policy = ", %rd9" if hint == "L2::cache_hint" else ""
        out[:] = 0
        run(base + f"ld.global.u32 %r1, [%rd1]; st.{cache}.u32 [%rd2], %r1{policy}; ret;", src=src, out=out)
        assert np.array_equal(src, out), hint


@pytest.mark.parametrize("space", ["global", "shared::cta", "shared", "local"])
@pytest.mark.parametrize("t", ["b8", "u8", "s8", *BITS, *INTS, "f32", "f64"])
def test_types_of_loads_and_stores(t: str, space: str, rng: np.random.Generator) -> None:
    bits = int(t[1:])
    word = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    src, out = aligned(32, word, edges(np.uint64, rng)[:32].astype(word)), aligned(32, word)
    register = {8: "%rs1", 16: "%rs1", 32: "%r1", 64: "%rd5"}[bits]
    code = THREAD + address("rd1", "src", bits // 8) + address("rd2", "out", bits // 8)
    code += f"ld.global.{t} {register}, [%rd1];"
    if space != "global":
        where = "[buffer]" if space == "local" else "[%r91]"
        code += f"mov.b32 %r90, room; mad.lo.u32 %r91, %r99, {bits // 8}, %r90; .local .align 8 .b64 buffer;"
        code += f"st.{space}.{t} {where}, {register}; ld.{space}.{t} {register}, {where};"
    code += f"st.global.{t} [%rd2], {register}; ret;"
    run(code, module=".shared .align 16 .b8 room[256];", src=src, out=out)
    assert np.array_equal(src, out)


ATOMICS = [
    ("add", "u64", np.uint64), ("add", "f32", np.float32), ("add", "f64", np.float64), ("add", "s32", np.int32),
    ("add.noftz", "f16", np.float16), ("add.noftz", "bf16", BF16), ("add.noftz", "f16x2", np.float16),
    ("add.noftz", "bf16x2", BF16), ("min", "s64", np.int64), ("max", "u64", np.uint64), ("min", "u32", np.uint32),
    ("max", "s32", np.int32), ("and", "b32", np.uint32), ("or", "b64", np.uint64), ("xor", "b32", np.uint32),
    ("xor", "b64", np.uint64), ("inc", "u32", np.uint32), ("dec", "u32", np.uint32), ("exch", "b64", np.uint64),
    ("cas", "b16", np.uint16), ("cas", "b64", np.uint64),
]  # fmt: skip


@pytest.mark.parametrize(("op", "t", "dtype"), ATOMICS)
@pytest.mark.parametrize("order", ["relaxed.gpu", "acquire.cta", "release.cluster", "acq_rel.sys", "relaxed.cta", ""])
def test_atomics(op: str, t: str, dtype: Any, order: str) -> None:
    """One thread's atomic and reduction, in global and in shared memory."""
    name = op.split(".")[0]
    pair = 2 if t.endswith("x2") else 1
    old, value, other = np.full(pair, 5, dtype), np.full(pair, 3, dtype), np.full(pair, 9, dtype)
    if name == "cas":
        value = old
    new = {
        "add": old + value, "min": np.minimum(old, value), "max": np.maximum(old, value), "inc": dtype(0),
        "dec": dtype(3), "exch": value, "cas": other,
    }.get(name)  # fmt: skip
    if new is None:
        new = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name](old, value)
    word = carrier(t) if t not in ("u32", "u64", "s32", "s64") else WORD[np.dtype(dtype).itemsize]
    size = np.dtype(word).itemsize
    reg = {2: "%rs", 4: "%r", 8: "%rd"}[size]
    data = aligned(3 * 16 // size, word)
    data[0 :: 16 // size] = old.view(word)
    out = aligned(4 * 16 // size, word)
    args = aligned(32 // size, word)
    args[0], args[16 // size] = value.view(word)[0], other.view(word)[0]
    code = f"ld.global.b{8 * size} {reg}11, [%args]; ld.global.b{8 * size} {reg}12, [%args+16]; mov.b32 %r90, room;"
    code += f"ld.global.b{8 * size} {reg}13, [%data]; st.shared.b{8 * size} [%r90], {reg}13;"
    operands = f"{reg}11, {reg}12" if name == "cas" else f"{reg}11"
    dot = f".{order}" if order else ""
    code += f"atom{dot}.global.{op}.{t} {reg}14, [%data], {operands}; st.global.b{8 * size} [%out], {reg}14;"
    code += f"atom{dot}.shared::cta.{op}.{t} {reg}15, [%r90], {operands}; st.global.b{8 * size} [%out+16], {reg}15;"
    code += f"ld.shared.b{8 * size} {reg}16, [%r90]; st.global.b{8 * size} [%out+32], {reg}16;"
    if name not in ("exch", "cas") and "acq" not in order:
        code += f"st.shared.b{8 * size} [%r90], {reg}13;"
        code += f"red{dot}.global.{op}.{t} [%data+16], {operands}; red{dot}.shared::cta.{op}.{t} [%r90], {operands};"
        code += f"ld.shared.b{8 * size} {reg}16, [%r90]; st.global.b{8 * size} [%out+48], {reg}16;"
    code = code if order else code.replace("shared::cta", "shared::cluster")
    regions = [region("data", data), region("args", args, "r"), region("out", out, "w", False)]
    run(
        code + "ret;", block=1, module=".shared .align 16 .b8 room[32];", regions=regions, data=data, args=args, out=out
    )
    step = 16 // size
    assert data[0] == np.asarray(new, dtype).reshape(-1).view(word)[0]
    assert out[0] == out[step] == old.view(word)[0]
    assert out[2 * step] == data[0]
    if name not in ("exch", "cas") and "acq" not in order:
        assert data[step] == out[3 * step] == data[0]


@pytest.mark.parametrize(("vec", "t"), [(2, "f32"), (4, "f32"), (2, "f16"), (4, "bf16"), (8, "f16"), (8, "bf16"),
                                        (2, "f16x2"), (4, "bf16x2")])  # fmt: skip
def test_vector_atomics(vec: int, t: str) -> None:
    count = vec * (2 if t.endswith("x2") else 1)
    word = carrier(t)
    data = aligned(3 * count, FLOATS[t], np.arange(3 * count))
    regs = [f"{'%rs' if word is np.uint16 else '%r'}{k + 1}" for k in range(vec)]
    size = np.dtype(word).itemsize
    code = "".join(f"ld.global.b{8 * size} {r}, [%data+{size * k}];" for k, r in enumerate(regs))
    noftz = "" if t == "f32" else ".noftz"
    vector = "{" + ", ".join(regs) + "}"
    nbytes = size * vec
    code += "createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;"
    code += f"red.global.add{noftz}.L2::cache_hint.v{vec}.{t} [%data+{nbytes}], {vector}, %rd9;"
    code += f"atom.global.add{noftz}.L2::cache_hint.v{vec}.{t} {vector}, [%data+{2 * nbytes}], {vector}, %rd9; ret;"
    run(code, block=1, regions=[region("data", data.view(np.uint8))], data=data.view(np.uint8))
    first = np.arange(count)
    want = np.concatenate([first, 2 * first + count, 2 * first + 2 * count])
    assert np.array_equal(data.astype(np.float64), want)


def test_bulk_reductions_of_every_type() -> None:
    for op, t in (("and", "b32"), ("xor", "b64"), ("max", "s32"), ("min", "s64"), ("max", "u64"), ("inc", "u32"),
                  ("dec", "u32"), ("add", "f64"), ("add.noftz", "f16"), ("add.noftz", "bf16")):  # fmt: skip
        dtype = {**FLOATS, **INTS, **BITS}[t]
        data = aligned(32, dtype, 5)
        name = op.split(".")[0]
        value = np.full(32, 3, dtype)
        new = {"add": data + value, "max": np.maximum(data, value), "min": np.minimum(data, value),
               "inc": data * dtype(0),
               "dec": value}.get(name)  # fmt: skip
        if new is None:
            new = {"and": np.bitwise_and, "xor": np.bitwise_xor}[name](data, value)
        src = aligned(32, dtype, value)
        size = src.nbytes
        code = THREAD + "mov.b32 %r90, room;" + address("rd1", "src", np.dtype(dtype).itemsize)
        bits = 8 * np.dtype(dtype).itemsize
        reg = {16: "%rs1", 32: "%r1", 64: "%rd5"}[bits]
        code += f"mad.lo.u32 %r91, %r99, {bits // 8}, %r90; ld.global.b{bits} {reg}, [%rd1];"
        code += f"st.shared.b{bits} [%r91], {reg};"
        code += "fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r99, 0; @%p1 bra X;"
        code += "createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;"
        code += (
            f"cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.{op}.{t} [%data], [%r90], {size}, %rd9;"
        )
        code += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; X: ret;"
        raw, given = data.view(np.uint8), src.view(np.uint8)
        regions = [region("data", raw), region("src", given, "r")]
        run(code, module=".shared .align 16 .b8 room[256];", regions=regions, data=raw, src=given)
        assert np.array_equal(data, np.asarray(new, dtype)), (op, t)


def test_copy_hints() -> None:
    src, out = aligned(512, np.uint8, np.arange(512) % 251), aligned(512, np.uint8)
    base = (
        THREAD
        + "mov.b32 %r90, room; mad.lo.u32 %r91, %r99, 16, %r90; createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;"
    )
    base += address("rd1", "src", 16) + address("rd2", "out", 16)
    tail = "cp.async.wait_all; ld.shared::cta.v4.b32 {%r1,%r2,%r3,%r4}, [%r91];"
    tail += "st.global.v4.b32 [%rd2], {%r1,%r2,%r3,%r4}; ret;"
    for hint, policy in (("L2::64B", ""), ("L2::128B", ""), ("L2::256B", ""), ("L2::cache_hint", ", %rd9")):
        out[:] = 0
        copy = f"cp.async.cg.shared.global.{hint} [%r91], [%rd1], 16{policy};"
        prefetch = "cp.async.bulk.prefetch.L2.global [%src], 256; prefetch.global.L2 [%src]; prefetchu.L1 [%src];"
        prefetch += "applypriority.global.L2::evict_normal [%src], 128;"
        run(base + prefetch + copy + tail, module=".shared .align 16 .b8 room[512];", src=src, out=out)
        assert np.array_equal(src, out)


# Instructions that only have to be accepted


def test_hints_and_fences() -> None:
    """None of these changes a result."""
    fences = ["sc.cta", "acq_rel.gpu", "acquire.sync_restrict::shared::cluster.cluster", "proxy.alias",
              "release.sync_restrict::shared::cta.cluster", "proxy.async.shared::cluster", "proxy.async.global",
              "proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
              "proxy.async::generic.release.sync_restrict::shared::cta.cluster", "acq_rel.sys"]  # fmt: skip
    code = THREAD + "".join(f"fence.{f};" for f in fences) + "membar.gl; membar.cta; membar.sys;"
    code += "nanosleep.u32 20; setmaxnreg.inc.sync.aligned.u32 240; setmaxnreg.dec.sync.aligned.u32 40; pmevent 1;"
    code += "prefetch.local.L1 [%out]; prefetch.const.tensormap [%out]; prefetch.param.tensormap [%out];"
    code += "prefetch.global.L2::evict_last [%out]; prefetch.global.L2::evict_normal [%out]; pmevent.mask 3;"
    code += "createpolicy.range.global.L2::evict_normal.L2::evict_unchanged.b64 %rd9, [%out], 128, 128;"
    code += "createpolicy.cvt.L2.b64 %rd9, 3; createpolicy.fractional.L2::evict_unchanged.b64 %rd9, 1.0;"
    code += "griddepcontrol.wait; griddepcontrol.launch_dependents; setp.gt.u32 %p1, %r99, 99; @%p1 brkpt;"
    code += "bar.cta.sync 0; barrier.cta.sync.aligned 1; bar.red.and.pred %p2, 1, !%p1;"
    code += "barrier.cta.red.or.pred %p3, 2, %p1;"
    code += "barrier.cta.red.popc.u32 %r1, 3, %p2; selp.b32 %r2, 100, 0, %p2; selp.b32 %r3, 1000, 0, %p3;"
    code += "barrier.cta.red.popc.aligned.u32 %r4, 4, %p2; bar.red.or.pred %p4, 5, %p1; bar.red.popc.u32 %r5, 6, %p1;"
    code += "add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3;" + address("rd1", "out", 4) + "st.global.b32 [%rd1], %r1;"
    out = aligned(32, np.uint32)
    run(code.replace("barrier.cta.sync.aligned", "barrier.sync.aligned") + "@%p1 exit; ret.uni;", out=out)
    assert (out == 132).all()


def test_generic_addresses() -> None:
    out = aligned((32, 12), np.uint32)
    code = (
        THREAD + ".reg .b64 %x<9>; mov.u64 %x0, room; cvta.shared::cta.u64 %x1, %x0; cvta.shared::cluster.u64 %x2, %x0;"
    )
    code += "cvta.to.shared.u64 %x3, %x1; cvta.const.u64 %x4, %out; mov.u64 %x5, p_out; cvta.param::entry.u64 %x5, %x5;"
    code += "mapa.u64 %x6, %x1, 0; getctarank.u64 %r20, %x6;" + address("rd1", "out", 48)
    tests = [("shared", "%x1"), ("shared::cta", "%x2"), ("shared::cluster", "%x2"), ("global", "%x4"), ("param", "%x5"),
             ("const", "%x4"), ("local", "%x1"), ("global", "%x1"), ("param", "%x1")]  # fmt: skip
    for k, (space, value) in enumerate(tests):
        code += f"isspacep.{space} %p1, {value}; selp.b32 %r1, 1, 0, %p1; st.global.b32 [%rd1+{4 * k}], %r1;"
    code += (
        "ld.param::entry.b64 %x7, [p_out]; sub.s64 %x7, %x7, %out; cvt.u32.u64 %r2, %x7; st.global.b32 [%rd1+36], %r2;"
    )
    code += (
        "sub.s64 %x8, %x3, %x0; cvt.u32.u64 %r3, %x8; st.global.b32 [%rd1+40], %r3; st.global.b32 [%rd1+44], %r20; ret;"
    )
    run(code, module=".shared .align 16 .b8 room[64];", out=out)
    assert (out == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]).all()


def test_branch_tables_and_matrix_spaces() -> None:
    out = aligned(32, np.uint32)
    code = THREAD + "mov.b32 %r90, room; mad.lo.u32 %r91, %r99, 16, %r90; st.shared.v4.b32 [%r91], {%r99, 1, 2, 3};"
    code += "bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x1.shared::cta.b16 {%r5}, [%r91]; bar.warp.sync -1;"
    code += "stmatrix.sync.aligned.m8n8.x1.shared::cta.b16 [%r91], {%r5}; mov.b32 %r1, 1; T: .branchtargets A, B;"
    code += "brx.idx.uni %r1, T; A: mov.b32 %r5, 7; B:" + address("rd1", "out", 4) + "st.global.b32 [%rd1], %r5; ret;"
    run(code, module=".shared .align 16 .b8 room[512];", out=out)
    lane = np.arange(32)
    assert np.array_equal(out, np.where(lane % 4 == 0, lane // 4, lane % 4))


def test_mbarrier_memory_is_free_after_inval() -> None:
    out = aligned(32, np.uint32)
    code = THREAD + "mov.b32 %r80, room; setp.ne.u32 %p1, %r99, 0; @%p1 bra X; mbarrier.init.shared.b64 [%r80], 1;"
    code += (
        "mbarrier.arrive.shared.b64 %rd1, [%r80]; W: mbarrier.try_wait.acquire.cta.shared::cta.b64 %p2, [%r80], %rd1;"
    )
    code += "@!%p2 bra W; mbarrier.inval.shared.b64 [%r80]; st.shared.b32 [%r80], 5; ld.shared.b32 %r1, [%r80];"
    code += "st.global.b32 [%out], %r1; X: ret;"
    run(code, module=".shared .align 16 .b8 room[64];", out=out)
    assert out[0] == 5


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_mma_rounds_every_step(mode: str) -> None:
    """1 + 2^-60 three times over: only one direction moves away from 1."""
    one, tiny = np.float64(1).view(np.int64), np.float64(2.0**-60).view(np.int64)
    out = aligned(32, np.uint64)
    code = THREAD + f"mov.b64 %fd1, {tiny}; mov.b64 %fd2, {one};" + address("rd1", "out", 8)
    code += (
        f"mma.sync.aligned.m8n8k4.row.col.{mode}.f64.f64.f64.f64 {{%fd3, %fd4}}, {{%fd1}}, {{%fd2}}, {{%fd2, %fd2}};"
    )
    run(code + "st.global.b64 [%rd1], %fd3; ret;", out=out.view(np.int64))
    want = 1 + 4 * 2.0**-52 if mode == "rp" else 1.0
    assert (out.view(np.float64) == want).all()
