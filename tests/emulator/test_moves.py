"""mov, selp, slct, setp, set, cvta and special registers."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import THREAD, address, aligned, edges, elementwise, floats, run

COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("t", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("op", COMPARE)
def test_integer_comparisons(op: str, t: str, rng: np.random.Generator) -> None:
    dtype = np.dtype(f"{'i' if t[0] == 's' else 'u'}{int(t[1:]) // 8}")
    a = edges(dtype, rng)
    b = np.where(rng.random(a.size) < 0.3, a, edges(dtype, rng))
    got = elementwise(f"setp.{op}.{t} %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", a, b)
    assert np.array_equal(got == 1, COMPARE[op](a, b))


@pytest.mark.parametrize(("op", "same"), [("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")])
def test_unsigned_spellings(op: str, same: str, rng: np.random.Generator) -> None:
    a, b = edges(np.uint32, rng), edges(np.uint32, rng)
    got = elementwise(f"setp.{op}.u32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", a, b)
    assert np.array_equal(got == 1, COMPARE[same](a, b))


@pytest.mark.parametrize("op", [*COMPARE, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"])
def test_float_comparisons(op: str) -> None:
    """Ordered comparisons, ne included, are false on NaN; unordered ones true."""
    values = np.float32([-np.inf, -1, -0.0, 0, 1, np.nan])
    a, b = (g.ravel() for g in np.meshgrid(values, values))
    got = elementwise(f"setp.{op}.f32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", a, b)
    nan = np.isnan(a) | np.isnan(b)
    if op in ("num", "nan"):
        want = nan if op == "nan" else ~nan
    elif op.endswith("u"):
        want = COMPARE[op[:-1]](a, b) | nan
    else:
        want = COMPARE[op](a, b) & ~nan
    assert np.array_equal(got == 1, want)


def test_setp_combines_and_has_a_second_result(rng: np.random.Generator) -> None:
    a, b = edges(np.int32, rng), edges(np.int32, rng)
    flag = rng.integers(0, 2, a.size, dtype=np.uint32)
    for combine, fn in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        got = elementwise(
            f"setp.ne.u32 %p3, %c, 0; setp.lt.{combine}.s32 %p1|%p2, %a, %b, %p3;"
            "selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; or.b32 %d, %r1, %r2;",
            a,
            b,
            flag,
        )
        assert np.array_equal(got & 1, fn(a < b, flag == 1).astype(np.uint32))
        assert np.array_equal(got >> 1, fn(~(a < b), flag == 1).astype(np.uint32))


def test_packed_comparison_gives_both_halves(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(600).astype(np.float16) for _ in range(2))
    got = elementwise(
        "setp.gt.f16x2 %p1|%p2, %a, %b; selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; or.b32 %d, %r1, %r2;",
        a.view(np.uint32),
        b.view(np.uint32),
    )
    want = (a > b).reshape(-1, 2)
    assert np.array_equal(got, want[:, 0] + 2 * want[:, 1].astype(np.uint32))


def test_selection(rng: np.random.Generator) -> None:
    a, b = edges(np.uint64, rng), edges(np.uint64, rng)
    got = elementwise("setp.gt.u64 %p1, %a, %b; selp.b64 %d, %a, %b, %p1;", a, b, out=np.uint64)
    assert np.array_equal(got, np.maximum(a, b))
    x, y, c = floats(rng), floats(rng), floats(rng)
    got = elementwise("slct.f32.f32 %d, %a, %b, %c;", x, y, c)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(got, np.where(c >= 0, x, y).view(np.uint32))
    n = edges(np.int32, rng)[: x.size]
    got = elementwise("set.lt.u32.s32 %d, %a, 0;", n)
    assert np.array_equal(got, np.where(n < 0, 0xFFFFFFFF, 0).astype(np.uint32))


def test_packing_and_unpacking(rng: np.random.Generator) -> None:
    x = edges(np.uint64, rng)
    assert np.array_equal(
        elementwise("mov.b64 {%r1, %r2}, %a; mov.b64 %d, {%r2, %r1};", x, out=np.uint64),
        (x >> np.uint64(32)) | (x << np.uint64(32)),
    )
    got = elementwise(
        "mov.b64 {%rs1, %rs2, %rs3, %rs4}, %a; mov.b32 %r1, {%rs4, %rs1}; mov.b32 %r2, {%rs2, %rs3}; "
        "mov.b64 %d, {%r1, %r2};",
        x,
        out=np.uint64,
    )
    parts = x.view(np.uint16).reshape(-1, 4)
    assert np.array_equal(got.view(np.uint16).reshape(-1, 4), parts[:, [3, 0, 1, 2]])


def test_packing_over_its_own_parts() -> None:
    x = np.arange(32, dtype=np.uint32) * 0x01020304
    got = elementwise(
        "mov.b32 {%rs1, %rs2}, %a; mov.b32 %d, {%rs1, %rs2}; mov.b32 {%rs2, %rs1}, %d; mov.b32 %d, {%rs1, %rs2};", x
    )
    assert np.array_equal(got, (x >> 16) | (x << 16))


def test_special_registers() -> None:
    block, grid = (24, 4, 1), (3, 2, 1)
    names = ["tid.x", "tid.y", "ntid.x", "ntid.y", "ctaid.x", "ctaid.y", "nctaid.x", "laneid", "warpid", "lanemask_lt"]
    out = aligned((6, 96, len(names)), np.uint32)
    code = """
        mov.u32 %r1, %tid.y; mad.lo.u32 %r2, %r1, 24, %tid.x;
        mov.u32 %r3, %ctaid.y; mad.lo.u32 %r3, %r3, 3, %ctaid.x; mad.lo.u32 %r99, %r3, 96, %r2;
    """ + address("rd1", "out", 4 * len(names))
    code += "".join(f"mov.u32 %r5, %{n}; st.global.u32 [%rd1+{4 * k}], %r5;" for k, n in enumerate(names)) + "ret;"
    run(code, block=block, grid=grid, out=out)
    for cta in range(6):
        for t in range(96):
            want = [t % 24, t // 24, 24, 4, cta % 3, cta // 3, 3, t % 32, t // 32, (1 << t % 32) - 1]
            assert out[cta, t].tolist() == want


def test_clocks_advance() -> None:
    out = aligned(32, np.uint64)
    code = (
        THREAD + "mov.u64 %rd1, %clock64; mov.u64 %rd2, %globaltimer; mov.u64 %rd3, %clock64; sub.s64 %rd4, %rd3, %rd1;"
    )
    run(code + address("rd5", "out", 8) + "st.global.b64 [%rd5], %rd4; ret;", out=out)
    assert (out > 0).all()
    assert (out < 10**12).all()
