"""Integer, bit and logic instructions against Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .harness import edges, elementwise

SIGNED = {"s16": np.int16, "s32": np.int32, "s64": np.int64}
UNSIGNED = {"u16": np.uint16, "u32": np.uint32, "u64": np.uint64}
INTS = {**SIGNED, **UNSIGNED}


def bits_of(t: str) -> int:
    return int(t[1:])


def wrap(value: int, t: str) -> int:
    """A Python integer as the type's unsigned bit pattern."""
    return value & ((1 << bits_of(t)) - 1)


def oracle(fn: Callable[..., int], t: str, *arrays: np.ndarray[Any, Any], out: str = "") -> list[int]:
    return [wrap(fn(*map(int, row)), out or t) for row in zip(*arrays, strict=True)]


def check(
    text: str, t: str, fn: Callable[..., int], rng: np.random.Generator, count: int = 2, out: str = "", **kwargs: Any
) -> None:
    args = [edges(INTS[t], rng) for _ in range(count)]
    for k, values in kwargs.items():
        args[int(k[1:])] = values(args[int(k[1:])])
    got = elementwise(text, *args, out=np.dtype(f"u{bits_of(out or t) // 8}"))
    assert got.tolist() == oracle(fn, t, *args, out=out)


@pytest.mark.parametrize("t", INTS)
@pytest.mark.parametrize(
    ("op", "fn"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("min", min),
        ("max", max),
    ],
)
def test_arithmetic(op: str, t: str, fn: Callable[..., int], rng: np.random.Generator) -> None:
    check(f"{op}.{t} %d, %a, %b;", t, fn, rng)


@pytest.mark.parametrize("t", INTS)
def test_mul_hi(t: str, rng: np.random.Generator) -> None:
    check(f"mul.hi.{t} %d, %a, %b;", t, lambda a, b: (a * b) >> bits_of(t), rng)


@pytest.mark.parametrize("t", ["s16", "u16", "s32", "u32"])
def test_mul_and_mad_wide(t: str, rng: np.random.Generator) -> None:
    wide = f"{t[0]}{2 * bits_of(t)}"
    check(f"mul.wide.{t} %d, %a, %b;", t, lambda a, b: a * b, rng, out=wide)
    check(f"mul.wide.{t} %d, %a, %b; mad.wide.{t} %d, %b, %a, %d;", t, lambda a, b: 2 * a * b, rng, out=wide)


@pytest.mark.parametrize("t", INTS)
def test_mad(t: str, rng: np.random.Generator) -> None:
    check(f"mad.lo.{t} %d, %a, %b, %c;", t, lambda a, b, c: a * b + c, rng, 3)
    check(f"mad.hi.{t} %d, %a, %b, %c;", t, lambda a, b, c: ((a * b) >> bits_of(t)) + c, rng, 3)


def truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


@pytest.mark.parametrize("t", INTS)
def test_div_and_rem(t: str, rng: np.random.Generator) -> None:
    nonzero = lambda x: np.where(x == 0, 1, x).astype(x.dtype)  # noqa: E731
    check(f"div.{t} %d, %a, %b;", t, truncated, rng, _1=nonzero)
    check(f"rem.{t} %d, %a, %b;", t, lambda a, b: a - b * truncated(a, b), rng, _1=nonzero)


def test_saturating_add(rng: np.random.Generator) -> None:
    clip = lambda v: max(-(2**31), min(2**31 - 1, v))  # noqa: E731
    check("add.sat.s32 %d, %a, %b;", "s32", lambda a, b: clip(a + b), rng)
    check("sub.sat.s32 %d, %a, %b;", "s32", lambda a, b: clip(a - b), rng)


@pytest.mark.parametrize("t", SIGNED)
def test_neg_abs(t: str, rng: np.random.Generator) -> None:
    check(f"neg.{t} %d, %a;", t, lambda a: -a, rng, 1)
    check(f"abs.{t} %d, %a;", t, abs, rng, 1)


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize(
    ("op", "fn"), [("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)]
)
def test_logic(op: str, width: int, fn: Callable[..., int], rng: np.random.Generator) -> None:
    check(f"{op}.b{width} %d, %a, %b;", f"u{width}", fn, rng)
    check(f"not.b{width} %d, %a;", f"u{width}", lambda a: ~a, rng, 1)
    check(f"cnot.b{width} %d, %a;", f"u{width}", lambda a: int(a == 0), rng, 1)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts_clamp(width: int, rng: np.random.Generator) -> None:
    for t, op in ((f"u{width}", f"shl.b{width}"), (f"u{width}", f"shr.u{width}"), (f"s{width}", f"shr.s{width}")):
        value = edges(INTS[t], rng)
        amount = np.resize(edges(np.uint32, rng), value.size)
        amount[: value.size // 2] %= 70
        got = elementwise(f"{op} %d, %a, %b;", value, amount, out=np.dtype(f"u{width // 8}"))
        left = op.startswith("shl")
        want = [
            wrap(a << min(n, width) if left else a >> min(n, width), t)
            for a, n in zip(value.tolist(), amount.tolist(), strict=True)
        ]
        assert got.tolist() == want


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shift(mode: str, rng: np.random.Generator) -> None:
    def amount(c: int) -> int:
        return c & 31 if mode == "wrap" else min(c, 32)

    check(f"shf.l.{mode}.b32 %d, %a, %b, %c;", "u32", lambda a, b, c: ((b << 32 | a) << amount(c)) >> 32, rng, 3)
    check(f"shf.r.{mode}.b32 %d, %a, %b, %c;", "u32", lambda a, b, c: (b << 32 | a) >> amount(c), rng, 3)


@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0xCA, 0x80, 0x1B, 0xFF])
def test_lop3(table: int, rng: np.random.Generator) -> None:
    def fn(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1)) & 1) << k for k in range(32))

    check(f"lop3.b32 %d, %a, %b, %c, {table};", "u32", fn, rng, 3)


def permuted(a: int, b: int, selectors: list[int]) -> int:
    pool = (b << 32 | a).to_bytes(8, "little")
    out = 0
    for k, s in enumerate(selectors):
        byte = pool[s & 7]
        out |= (0xFF * (byte >> 7) if s & 8 else byte) << (8 * k)
    return out


def test_prmt(rng: np.random.Generator) -> None:
    check(
        "prmt.b32 %d, %a, %b, %c;", "u32", lambda a, b, c: permuted(a, b, [c >> 4 * k & 15 for k in range(4)]), rng, 3
    )


@pytest.mark.parametrize(
    ("mode", "table"),
    [
        ("f4e", {0: "3210", 1: "4321", 2: "5432", 3: "6543"}),
        ("b4e", {0: "5670", 1: "6701", 2: "7012", 3: "0123"}),
        ("rc8", {0: "0000", 1: "1111", 2: "2222", 3: "3333"}),
        ("ecl", {0: "3210", 1: "3211", 2: "3222", 3: "3333"}),
        ("ecr", {0: "0000", 1: "1110", 2: "2210", 3: "3210"}),
        ("rc16", {0: "1010", 1: "3232", 2: "1010", 3: "3232"}),
    ],
)
def test_prmt_modes(mode: str, table: dict[int, str], rng: np.random.Generator) -> None:
    check(
        f"prmt.b32.{mode} %d, %a, %b, %c;",
        "u32",
        lambda a, b, c: permuted(a, b, [int(s) for s in table[c & 3][::-1]]),
        rng,
        3,
        _2=lambda x: x & np.uint32(3),
    )


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bfe(t: str, rng: np.random.Generator) -> None:
    width = bits_of(t)
    a = edges(INTS[t], rng)
    pos, length = (np.resize(edges(np.uint32, rng), a.size) for _ in range(2))
    pos[::2] %= 40
    length[::3] %= 40

    def fn(a: int, b: int, c: int) -> int:
        """The pseudo-code of PTX ISA 9.7.1.19."""
        pos, length, msb = b & 255, c & 255, width - 1
        bit = lambda k: a >> k & 1  # noqa: E731
        if t[0] == "u" or length == 0:
            sign = 0
        else:
            sign = bit(min(pos + length - 1, msb))
        return sum((bit(pos + k) if k < length and pos + k <= msb else sign) << k for k in range(msb + 1))

    got = elementwise(f"bfe.{t} %d, %a, %b, %c;", a, pos, length, out=np.dtype(f"u{width // 8}"))
    assert got.tolist() == oracle(fn, t, a, pos, length)


@pytest.mark.parametrize("width", [32, 64])
def test_bfi(width: int, rng: np.random.Generator) -> None:
    a, b = (edges(np.dtype(f"u{width // 8}"), rng) for _ in range(2))
    pos, length = (np.resize(edges(np.uint32, rng), a.size) for _ in range(2))
    pos[::2] %= 40
    length[::3] %= 40

    def fn(a: int, b: int, c: int, e: int) -> int:
        pos, length, msb = c & 255, e & 255, width - 1
        out = b
        for k in range(length):
            if pos + k > msb:
                break
            out = out & ~(1 << pos + k) | (a >> k & 1) << pos + k
        return out

    got = elementwise(f"bfi.b{width} %d, %a, %b, %c, %e;", a, b, pos, length, out=a.dtype)
    assert got.tolist() == oracle(fn, f"u{width}", a, b, pos, length)


@pytest.mark.parametrize("width", [32, 64])
def test_counting(width: int, rng: np.random.Generator) -> None:
    t = f"u{width}"
    check(f"popc.b{width} %d, %a;", t, lambda a: a.bit_count(), rng, 1, out="u32")
    check(f"clz.b{width} %d, %a;", t, lambda a: width - a.bit_length(), rng, 1, out="u32")
    check(f"brev.b{width} %d, %a;", t, lambda a: int(f"{a:0{width}b}"[::-1], 2), rng, 1)
    check(f"bfind.u{width} %d, %a;", t, lambda a: a.bit_length() - 1, rng, 1, out="u32")
    check(f"bfind.s{width} %d, %a;", f"s{width}", lambda a: (a if a >= 0 else ~a).bit_length() - 1, rng, 1, out="u32")
    check(f"bfind.shiftamt.u{width} %d, %a;", t, lambda a: width - a.bit_length() if a else -1, rng, 1, out="u32")


def test_extended_precision_add_and_sub(rng: np.random.Generator) -> None:
    """128-bit sums from four 32-bit additions with carry."""
    a, b = (edges(np.uint64, rng) for _ in range(2))
    split = "mov.b64 {%r1, %r2}, %a; mov.b64 {%r3, %r4}, %b;"
    got = elementwise(
        split + "add.cc.u32 %r5, %r1, %r3; addc.u32 %r6, %r2, %r4; mov.b64 %d, {%r5, %r6};", a, b, out=np.uint64
    )
    assert got.tolist() == oracle(lambda x, y: x + y, "u64", a, b)
    got = elementwise(
        split + "sub.cc.u32 %r5, %r1, %r3; subc.u32 %r6, %r2, %r4; mov.b64 %d, {%r5, %r6};", a, b, out=np.uint64
    )
    assert got.tolist() == oracle(lambda x, y: x - y, "u64", a, b)


def test_dot_products_and_differences(rng: np.random.Generator) -> None:
    def dot(a: int, b: int, c: int) -> int:
        signed = lambda v: v - 256 if v > 127 else v  # noqa: E731
        return c + sum(signed(a >> 8 * k & 255) * (b >> 8 * k & 255) for k in range(4))

    check("dp4a.s32.u32 %d, %a, %b, %c;", "s32", dot, rng, 3)
    check("sad.u32 %d, %a, %b, %c;", "u32", lambda a, b, c: c + abs(a - b), rng, 3)
    low = lambda v: (v & 0xFFFFFF) - (v >> 23 & 1) * (1 << 24)  # noqa: E731
    check("mul24.lo.s32 %d, %a, %b;", "s32", lambda a, b: low(a) * low(b), rng)
    check("mad24.hi.u32 %d, %a, %b, %c;", "u32", lambda a, b, c: ((a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16) + c, rng, 3)


@pytest.mark.parametrize("op", ["min", "max", "add"])
@pytest.mark.parametrize("t", ["u16x2", "s16x2"])
def test_packed_16_bit(op: str, t: str, rng: np.random.Generator) -> None:
    a, b = (edges(np.uint32, rng) for _ in range(2))
    got = elementwise(f"{op}.{t} %d, %a, %b;", a, b)
    half = np.uint16 if t[0] == "u" else np.int16
    fn = {"min": np.minimum, "max": np.maximum, "add": np.add}[op]
    assert np.array_equal(got.view(half), fn(a.view(half), b.view(half)))


def test_extension_from_run_time_width(rng: np.random.Generator) -> None:
    def fn(a: int, b: int) -> int:
        n = min(b, 32)
        low = a & ((1 << n) - 1)
        return low - (1 << n) if n and low >> (n - 1) & 1 else low

    check("szext.clamp.s32 %d, %a, %b;", "s32", lambda a, b: fn(a & 0xFFFFFFFF, b & 0xFFFFFFFF), rng)
    check(
        "bmsk.clamp.b32 %d, %a, %b;",
        "u32",
        lambda a, b: ((1 << min(min(a, 32) + b, 32)) - 1) & ~((1 << min(a, 32)) - 1),
        rng,
        _1=lambda x: x % np.uint32(40),
        _0=lambda x: x % np.uint32(40),
    )
