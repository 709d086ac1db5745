"""Forms beyond what the library's kernels use: narrow matrix loads, integer and f64 mma, local memory, async stores."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from b12x import emulator

from .harness import THREAD, address, aligned, elementwise, region, run

Array = np.ndarray[Any, Any]
SHARED = ".shared .align 128 .b8 buffer[4096];\n.shared .align 8 .b64 bar[4];"
LANE, GROUP, QUAD = np.arange(32), np.arange(32) // 4, np.arange(32) % 4


def filled(data: Array) -> str:
    """Code that copies ``src`` to shared memory, 16 bytes a lane."""
    code = THREAD + "mov.b32 %r90, buffer;"
    for k in range(data.nbytes // 512):
        code += f"mad.lo.u32 %r91, %r99, 16, %r90; add.u32 %r91, %r91, {512 * k};" + address("rd1", "src", 16)
        code += f"ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd1+{512 * k}];"
        code += "st.shared.v4.b32 [%r91], {%r1, %r2, %r3, %r4};"
    return code + "bar.warp.sync -1;"


def save(count: int, first: int = 10) -> str:
    return "".join(address("rd2", "out", 4) + f"st.global.b32 [%rd2+{128 * k}], %r{first + k};" for k in range(count))


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_transposed_bytes(count: int, rng: np.random.Generator) -> None:
    """Lane 4g + t gets rows 4t to 4t + 3 of columns g and g + 8 of each 16x16 matrix."""
    src = aligned((32, 16), np.uint8, rng.integers(0, 256, (32, 16)))
    out = aligned((2 * count, 32, 4), np.uint8)
    registers = ", ".join(f"%r{10 + k}" for k in range(2 * count))
    code = filled(src) + "mad.lo.u32 %r91, %r99, 16, %r90;"
    code += f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{registers}}}, [%r91];" + save(2 * count)
    run(code + "ret;", module=SHARED, src=src, out=out.view(np.uint32))
    for k in range(2 * count):
        for e in range(4):
            want = src[16 * (k // 2) + 4 * QUAD + e, GROUP + 8 * (k % 2)]
            assert np.array_equal(out[k, :, e], want)


@pytest.mark.parametrize(("form", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_ldmatrix_of_transposed_narrow_elements(form: str, bits: int, rng: np.random.Generator) -> None:
    values = rng.integers(0, 1 << bits, (16, 16)).astype(np.uint8)
    src = aligned((32, 16), np.uint8)
    stream = np.unpackbits(values[..., None], axis=-1, bitorder="little")[..., :bits].reshape(16, -1)
    src[:16, : 2 * bits] = np.packbits(stream, axis=-1, bitorder="little")
    out = aligned((2, 32, 4), np.uint8)
    code = filled(src) + "and.b32 %r92, %r99, 15; mad.lo.u32 %r91, %r92, 16, %r90;"
    code += f"ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8x16.{form} {{%r10, %r11}}, [%r91];" + save(2)
    run(code + "ret;", module=SHARED, src=src, out=out.view(np.uint32))
    for k in range(2):
        for e in range(4):
            assert np.array_equal(out[k, :, e], values[4 * QUAD + e, GROUP + 8 * k])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(count: int, rng: np.random.Generator) -> None:
    """An accumulator fragment (rows g, g + 8, columns 2t, 2t + 1) becomes rows of columns."""
    tiles = rng.integers(0, 256, (count, 16, 8)).astype(np.uint8)
    src = aligned((4, 32, 4), np.uint8)
    for k in range(count):
        for e in range(4):
            src[k, :, e] = tiles[k, GROUP + 8 * (e // 2), 2 * QUAD + e % 2]
    out = aligned((32, 16), np.uint8)
    registers = ", ".join(f"%r{10 + k}" for k in range(count))
    code = THREAD + "mov.b32 %r90, buffer; mad.lo.u32 %r91, %r99, 16, %r90; st.shared.v4.b32 [%r91], {0, 0, 0, 0};"
    code += "bar.warp.sync -1;" + address("rd1", "src", 4)
    code += "".join(f"ld.global.b32 %r{10 + k}, [%rd1+{128 * k}];" for k in range(4))
    code += f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r91], {{{registers}}}; bar.warp.sync -1;"
    code += "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r91];" + address("rd2", "out", 16)
    run(code + "st.global.v4.b32 [%rd2], {%r1, %r2, %r3, %r4}; ret;", module=SHARED, src=src.view(np.uint32), out=out)
    assert np.array_equal(out[: 8 * count].reshape(count, 8, 16), tiles.transpose(0, 2, 1))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("k", "a", "b"), [(16, "s8", "u8"), (32, "u8", "s8"), (32, "s8", "s8"), (32, "s4", "u4"),
                                           (64, "u4", "s4")])  # fmt: skip
def test_integer_mma(k: int, a: str, b: str, saturate: bool, rng: np.random.Generator) -> None:
    bits = int(a[1])
    low = {t: -(1 << (bits - 1)) if t[0] == "s" else 0 for t in (a, b)}
    left, right = (rng.integers(low[t], low[t] + (1 << bits), (n, k)) for t, n in ((a, 16), (b, 8)))
    c = rng.integers(-(2**31), 2**31, (16, 8))
    c[0, 0], c[1, 1] = 2**31 - 1, -(2**31)
    per = 32 // bits
    quads = k * bits // 128

    def words(x: Array) -> Array:
        codes = (x & ((1 << bits) - 1)).astype(np.uint64).reshape(len(x), -1, per)
        return (codes << (np.arange(per) * bits).astype(np.uint64)).sum(axis=-1).astype(np.uint32)

    wa, wb = words(left), words(right)
    regs = [wa[GROUP + 8 * h, 4 * q + QUAD] for q in range(quads) for h in range(2)]
    regs += [wb[GROUP, 4 * q + QUAD] for q in range(quads)]
    regs += [c[GROUP + 8 * (r // 2), 2 * QUAD + r % 2].astype(np.int64).astype(np.uint32) for r in range(4)]
    src, out = aligned((len(regs), 32), np.uint32), aligned((4, 32), np.int32)
    src[...] = regs
    code = THREAD + address("rd1", "src", 4)
    code += "".join(f"ld.global.b32 %r{20 + i}, [%rd1+{128 * i}];" for i in range(len(regs)))
    names = [f"%r{20 + i}" for i in range(len(regs))]
    parts = [names[: 2 * quads], names[2 * quads : 3 * quads], names[3 * quads :]]
    vectors = ", ".join("{" + ", ".join(p) + "}" for p in parts)
    sat = ".satfinite" if saturate else ""
    code += f"mma.sync.aligned.m16n8k{k}.row.col{sat}.s32.{a}.{b}.s32 {{%r10, %r11, %r12, %r13}}, {vectors};" + save(4)
    run(code + "ret;", src=src, out=out.view(np.uint32))
    total = left @ right.T + c
    want = (
        np.clip(total, -(2**31), 2**31 - 1) if saturate else total.astype(np.uint64).astype(np.uint32).astype(np.int32)
    )
    for r in range(4):
        assert np.array_equal(out[r], want[GROUP + 8 * (r // 2), 2 * QUAD + r % 2])


def test_f64_mma(rng: np.random.Generator) -> None:
    a, b, c = rng.standard_normal((8, 4)), rng.standard_normal((8, 4)), rng.standard_normal((8, 8))
    src = aligned((4, 32), np.int64)
    src[...] = np.stack([a[GROUP, QUAD], b[GROUP, QUAD], c[GROUP, 2 * QUAD], c[GROUP, 2 * QUAD + 1]]).view(np.int64)
    out = aligned((2, 32), np.int64)
    code = THREAD + address("rd1", "src", 8) + address("rd2", "out", 8)
    code += "".join(f"ld.global.b64 %fd{i}, [%rd1+{256 * i}];" for i in range(4))
    code += "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%fd4, %fd5}, {%fd0}, {%fd1}, {%fd2, %fd3};"
    code += "st.global.b64 [%rd2], %fd4; st.global.b64 [%rd2+256], %fd5; ret;"
    run(code, src=src, out=out)
    got = out.view(np.float64)
    want = a @ b.T + c
    for r in range(2):
        np.testing.assert_allclose(got[r], want[GROUP, 2 * QUAD + r], rtol=1e-14, atol=1e-14)


# Local memory

SPILL = """
    .local .align 16 .b8 depot[48]; .reg .b64 %SP, %SPL;
    mov.u64 %SPL, depot; cvta.local.u64 %SP, %SPL;
    mul.lo.u32 %r1, %r99, 3; st.local.u32 [%SPL], %r1; st.u32 [%SP+4], %r99;
    st.local.v4.b32 [depot+16], {1, 2, 3, %r99};
    isspacep.local %p1, %SP; selp.b32 %r9, 1, 0, %p1;
    ld.u32 %r2, [%SP]; ld.local.u32 %r3, [%SPL+4]; ld.local.b32 %r4, [depot+28];
    add.u32 %r5, %r2, %r3; add.u32 %r5, %r5, %r4; add.u32 %r5, %r5, %r9;
"""


def test_local_memory() -> None:
    out = aligned(96, np.uint32)
    code = THREAD + SPILL + address("rd1", "out", 4) + "st.global.b32 [%rd1], %r5; ret;"
    run(code, block=96, out=out)
    assert np.array_equal(out, np.arange(96) * 5 + 1)


@pytest.mark.parametrize(
    ("body", "error", "needle"),
    [
        ("ld.local.b32 %r5, [%SPL+64];", emulator.OutOfBounds, "outside the 64 bytes of local memory"),
        ("ld.local.b32 %r5, [%SPL+8];", emulator.TaintError, "local memory, which the thread has not written"),
        ("ld.local.b32 %r5, [%SPL+2];", emulator.Misaligned, "multiple of 4"),
    ],
)
def test_wrong_local_accesses(body: str, error: type[Exception], needle: str) -> None:
    code = THREAD + SPILL + body + address("rd1", "out", 4) + "st.global.b32 [%rd1], %r5; ret;"
    with pytest.raises(error, match=needle):
        run(code, block=96, out=aligned(96, np.uint32))


# Asynchronous stores and reductions

INIT = THREAD + """
    mov.b32 %r90, buffer; mov.b32 %r80, bar; mad.lo.u32 %r91, %r99, 4, %r90; st.shared.b32 [%r91], 100;
    st.shared.b32 [%r91+256], %r99; setp.ne.u32 %p1, %r99, 0; mov.u32 %r98, %cluster_ctarank;
    @%p1 bra I; mbarrier.init.shared.b64 [%r80], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r80], {bytes};
    I: fence.proxy.async; barrier.cluster.arrive; barrier.cluster.wait; xor.b32 %r97, %r98, 1;
    mapa.shared::cluster.u32 %r81, %r80, %r97; mapa.shared::cluster.u32 %r92, %r91, %r97;
    mapa.shared::cluster.u32 %r93, %r90, %r97; mad.lo.u32 %r96, %r98, 1000, %r99;
"""  # fmt: skip
END = """
    { .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r80], 0; @P bra D; bra W; D: }
    ld.shared.b32 %r5, [%r91]; mad.lo.u32 %r6, %r98, 32, %r99;
"""
END += address("rd1", "out", 4, "%r6") + "st.global.b32 [%rd1], %r5; barrier.cluster.arrive; barrier.cluster.wait; ret;"


@pytest.mark.parametrize("options", [emulator.Options(), emulator.Options(copies="eager")])
@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r92], %r96, [%r81];", 0),
        ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r92], %r96, [%r81];", 100),
        (
            "add.u32 %r95, %r90, 256; @%p1 bra X; {}.add.u32 [%r93], [%r95], 128, [%r81]; X:".format(
                "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            ),
            -1,
        ),
    ],
)
def test_asynchronous_stores_to_a_peer(text: str, want: int, options: emulator.Options) -> None:
    out = aligned((2, 32), np.uint32)
    run(INIT.replace("{bytes}", "128") + text + END, module=SHARED, grid=(2,), cluster=(2,), options=options, out=out)
    if want < 0:
        assert np.array_equal(out, np.tile(100 + np.arange(32), (2, 1)))
    else:
        assert np.array_equal(out, want + 1000 * np.array([[1], [0]]) + np.arange(32))


def test_reading_an_asynchronous_store_before_it_lands() -> None:
    text = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r92], %r96, [%r81];"
    text += "ld.shared.b32 %r7, [%r91];"
    with pytest.raises(emulator.SharedRace, match=r"st\.async"):
        run(
            INIT.replace("{bytes}", "128") + text + END,
            module=SHARED,
            grid=(2,),
            cluster=(2,),
            out=aligned((2, 32), np.uint32),
        )


@pytest.mark.parametrize(
    ("op", "start", "want"),
    [("add.f32", np.float32(0.5), lambda i: i + 0.5), ("min.u32", np.uint32(9), lambda i: np.minimum(i, 9)),
     ("or.b32", np.uint32(8), lambda i: i | 8)],
)  # fmt: skip
def test_bulk_reductions_to_global_memory(op: str, start: Any, want: Any) -> None:
    data = aligned(32, start.dtype, start)
    convert = "cvt.rn.f32.u32 %f1, %r99; mov.b32 %r5, %f1;" if "f32" in op else "mov.b32 %r5, %r99;"
    code = THREAD + "mov.b32 %r90, buffer; mad.lo.u32 %r91, %r99, 4, %r90;" + convert + "st.shared.b32 [%r91], %r5;"
    code += "fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r99, 0; @%p1 bra X;"
    code += f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%data], [%r90], 128;"
    code += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; X: ret;"
    run(code, module=SHARED, regions=[region("data", data.view(np.uint32))], data=data)
    assert np.array_equal(data, want(np.arange(32)).astype(start.dtype))


# Guards on barriers, mbarrier forms


@pytest.mark.parametrize("options", [emulator.Options(), emulator.Options(schedule="random", seed=2)])
def test_guarded_barriers_and_waits(options: emulator.Options) -> None:
    """Two of three warps meet at a guarded barrier; a guarded wait is skipped by the warps that it does not concern."""
    out = aligned(96, np.uint32)
    code = THREAD + "shr.u32 %r98, %r99, 5; setp.lt.u32 %p1, %r98, 2; mov.b32 %r90, buffer; mov.b32 %r80, bar;"
    code += "mad.lo.u32 %r91, %r99, 4, %r90; xor.b32 %r1, %r99, 32; mad.lo.u32 %r92, %r1, 4, %r90; mov.b32 %r5, 7;"
    code += "st.shared.b32 [%r91], %r99; @%p1 bar.sync 1, 64; @%p1 ld.shared.b32 %r5, [%r92];"
    code += "setp.eq.u32 %p3, %r99, 0; @%p3 mbarrier.init.shared.b64 [%r80], 32; bar.sync 0;"
    code += "setp.eq.u32 %p4, %r98, 2; @%p4 mbarrier.arrive.shared.b64 _, [%r80]; mov.pred %p5, 0; mov.b32 %r6, 0;"
    code += "W: @!%p4 mbarrier.try_wait.parity.shared.b64 %p5, [%r80], 0; @%p4 bra E; @!%p5 bra W; E:"
    code += address("rd1", "out", 4) + "st.global.b32 [%rd1], %r5; ret;"
    run(code.replace("mov.pred %p5, 0;", "setp.ne.u32 %p5, 0, 0;"), block=96, module=SHARED, options=options, out=out)
    lanes = np.arange(96)
    assert np.array_equal(out, np.where(lanes < 64, lanes ^ 32, 7))


def test_a_barrier_skipped_by_some_lanes_is_a_deadlock() -> None:
    code = THREAD + "setp.lt.u32 %p1, %r99, 5; @%p1 bar.sync 1, 64; bar.sync 0; ret;"
    with pytest.raises(emulator.Deadlock):
        run(code, block=64)


def test_pending_count_and_no_complete() -> None:
    out = aligned(32, np.uint32)
    code = THREAD + "mov.b32 %r80, bar; setp.eq.u32 %p1, %r99, 0; @!%p1 bra X; mbarrier.init.shared.b64 [%r80], 5;"
    code += (
        "mbarrier.arrive.noComplete.shared.b64 %rd1, [%r80], 2; mbarrier.arrive.noComplete.shared.b64 %rd2, [%r80], 1;"
    )
    code += "mbarrier.pending_count.b64 %r1, %rd1; mbarrier.pending_count.b64 %r2, %rd2; mad.lo.u32 %r3, %r1, 10, %r2;"
    code += "st.global.b32 [%out], %r3; {} X: ret;"
    run(code.replace("{}", ""), module=SHARED, out=out)
    assert out[0] == 53
    with pytest.raises(emulator.BarrierError, match="noComplete completes the phase"):
        run(code.replace("{}", "mbarrier.arrive.noComplete.shared.b64 %rd3, [%r80], 2;"), module=SHARED, out=out)


# Directed rounding of f64


def rounded(exact: Fraction, mode: str) -> float:
    """By definition: the nearest float64 in the direction."""
    near = float(exact)
    if Fraction(near) == exact:
        return near
    low, high = (np.nextafter(near, -np.inf), near) if Fraction(near) > exact else (near, np.nextafter(near, np.inf))
    return float({"rm": low, "rp": high, "rz": high if exact < 0 else low, "rn": near}[mode])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_rounding(mode: str, rng: np.random.Generator) -> None:
    a, b, c = (rng.standard_normal(200) * np.exp2(rng.integers(-30, 30, 200)) for _ in range(3))
    bits = [x.view(np.int64) for x in (a, b, c)]
    pairs = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    cases = {
        f"add.{mode}.f64 %d, %a, %b;": [Fraction(x) + Fraction(y) for x, y, _ in pairs],
        f"sub.{mode}.f64 %d, %a, %b;": [Fraction(x) - Fraction(y) for x, y, _ in pairs],
        f"mul.{mode}.f64 %d, %a, %b;": [Fraction(x) * Fraction(y) for x, y, _ in pairs],
        f"div.{mode}.f64 %d, %a, %b;": [Fraction(x) / Fraction(y) for x, y, _ in pairs],
        f"fma.{mode}.f64 %d, %a, %b, %c;": [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in pairs],
        f"rcp.{mode}.f64 %d, %a;": [1 / Fraction(x) for x, _, _ in pairs],
    }
    for text, exact in cases.items():
        count = 1 + text.count("%b") + text.count("%c")
        got = elementwise(text, *bits[:count], out=np.int64).view(np.float64)
        assert got.tolist() == [rounded(e, mode) for e in exact], text
    got = elementwise(f"sqrt.{mode}.f64 %d, %a;", np.abs(a).view(np.int64), out=np.int64).view(np.float64)
    for x, y in zip(np.abs(a).tolist(), got.tolist(), strict=True):
        square, exact = Fraction(y) ** 2, Fraction(x)
        assert mode not in ("rm", "rz") or square <= exact < Fraction(np.nextafter(y, np.inf)) ** 2
        assert mode != "rp" or Fraction(np.nextafter(y, 0)) ** 2 < exact <= square


def test_minimum_ignores_every_nan() -> None:
    nan = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFC12345], np.uint32)
    one = np.full(4, np.float32(1).view(np.uint32))
    for op in ("min", "max"):
        assert (elementwise(f"{op}.f32 %d, %a, %b;", nan, one) == one).all()
        assert (elementwise(f"{op}.f32 %d, %a, %b;", one, nan) == one).all()
        assert (elementwise(f"{op}.f32 %d, %a, %b;", nan, nan) == 0x7FFFFFFF).all()
        assert (elementwise(f"{op}.NaN.f32 %d, %a, %b;", nan, one) == 0x7FFFFFFF).all()
        assert (elementwise(f"{op}.f32 %d, %a, %b, %c;", nan, one, nan) == one).all()


@pytest.mark.parametrize("op", ["min", "max"])
def test_redux_ignores_every_nan(op: str) -> None:
    values = np.full(32, 0x7F800001, np.uint32)
    assert (elementwise(f"redux.sync.{op}.f32 %d, %a, -1;", values) == 0x7FFFFFFF).all()
    values[7] = np.float32(-3).view(np.uint32)
    assert (elementwise(f"redux.sync.{op}.f32 %d, %a, -1;", values) == values[7]).all()


def test_wide_global_accesses() -> None:
    """256-bit loads and stores, as .v8.b32 and .v4.b64."""
    src, out = aligned((32, 8), np.uint32, np.arange(256).reshape(32, 8)), aligned((2, 32, 8), np.uint32)
    code = THREAD + address("rd1", "src", 32) + address("rd2", "out", 32)
    code += "ld.global.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%rd1];"
    code += "st.global.v8.b32 [%rd2], {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8};"
    code += "ld.global.v4.b64 {%rd3,%rd4,%rd5,%rd6}, [%rd1]; st.global.v4.b64 [%rd2+1024], {%rd3,%rd4,%rd5,%rd6}; ret;"
    run(code, src=src, out=out)
    assert np.array_equal(out[0], src)
    assert np.array_equal(out[1], src)
    with pytest.raises(emulator.Misaligned):
        run(code.replace("[%rd1];", "[%rd1+16];", 1), src=src, out=out)
