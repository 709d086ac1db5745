"""Loads, stores and atomics; bounds, gaps, access rights and alignment, each with a seeded fault."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from b12x import emulator
from b12x._runtime.abi import Region

from .harness import THREAD, address, aligned, elementwise, region, run


@pytest.mark.parametrize(
    ("vec", "t"),
    [
        (1, "b8"),
        (1, "b16"),
        (2, "b16"),
        (4, "b8"),
        (1, "b32"),
        (2, "b32"),
        (4, "b32"),
        (8, "b32"),
        (2, "b64"),
        (4, "b64"),
    ],
)
def test_vectors_round_trip_through_shared_and_global(vec: int, t: str, rng: np.random.Generator) -> None:
    width = int(t[1:]) // 8
    size = vec * width
    prefix = {1: "rs", 2: "rs", 4: "r", 8: "rd"}[width]
    regs = ", ".join(f"%{prefix}{10 + i}" for i in range(vec))
    operand, suffix = (f"{{{regs}}}", f".v{vec}") if vec > 1 else (regs, "")
    src, out = aligned(32 * size, np.uint8, rng.integers(0, 256, 32 * size)), aligned(32 * size, np.uint8)
    shared = f"""
        mov.b32 %r1, buffer; mad.lo.u32 %r1, %r99, {size}, %r1;
        st.shared{suffix}.{t} [%r1], {operand}; bar.sync 0; ld.shared{suffix}.{t} {operand}, [%r1];
    """
    code = THREAD + address("rd1", "src", size) + f"ld.global{suffix}.{t} {operand}, [%rd1];"
    code += (
        (shared if size <= 16 else "") + address("rd2", "out", size) + f"st.global{suffix}.{t} [%rd2], {operand}; ret;"
    )
    run(code, module=".shared .align 32 .b8 buffer[1024];", src=src, out=out)
    assert np.array_equal(src, out)


def test_narrow_loads_extend_by_sign() -> None:
    src = aligned(32, np.uint8, np.arange(32) * 8)
    out = aligned((32, 2), np.uint32)
    code = (
        THREAD + "cvt.u64.u32 %rd1, %r99; add.s64 %rd1, %rd1, %src; ld.global.s8 %r1, [%rd1]; ld.global.u8 %r2, [%rd1];"
    )
    run(code + address("rd2", "out", 8) + "st.global.v2.b32 [%rd2], {%r1, %r2}; ret;", src=src, out=out)
    assert np.array_equal(out[:, 0].view(np.int32), src.view(np.int8))
    assert np.array_equal(out[:, 1], src)


def test_stores_truncate() -> None:
    out = aligned(32, np.uint8)
    code = (
        THREAD
        + "mad.lo.u32 %r1, %r99, 257, 4096; cvt.u16.u32 %rs1, %r1; cvt.u64.u32 %rd1, %r99; add.s64 %rd1, %rd1, %out;"
    )
    run(code + "st.global.u8 [%rd1], %rs1; ret;", out=out)
    assert out.tolist() == list(range(32))


def read_at(offset: int, width: str = "b32", **tensors: np.ndarray) -> None:  # type: ignore[type-arg]
    """Every lane reads x[lane], lane 5 somewhere else."""
    code = THREAD + address("rd1", "x", 4) + f"setp.eq.u32 %p1, %r99, 5; @%p1 add.s64 %rd1, %x, {offset};"
    reg = {"b16": "%rs1", "b32": "%r1", "b64": "%rd9"}[width]
    run(code + f"ld.global.{width} {reg}, [%rd1]; ret;", **tensors)


@pytest.mark.parametrize(
    ("offset", "needle"),
    [
        (128, r"4-byte read .* 4 bytes past the end of 'x' \[32\], near index \[32\]"),
        (-4, "4 bytes before 'x'"),
        (1 << 40, "past the end of 'x'"),
    ],
)
def test_reads_outside_a_tensor(offset: int, needle: str) -> None:
    x = aligned(32, np.uint32)
    with pytest.raises(emulator.OutOfBounds, match=needle) as err:
        read_at(offset, x=x)
    assert "thread (5, 0, 0) of CTA" in str(err.value).replace("CTA (0, 0, 0), thread", "thread").replace(
        "thread (5, 0, 0)", "thread (5, 0, 0) of CTA"
    )
    assert "ld.global.b32" in str(err.value)


def test_a_vector_that_sticks_out_by_one_element() -> None:
    x = aligned(31, np.uint32)
    code = (
        THREAD + "and.b32 %r99, %r99, 7;" + address("rd1", "x", 16) + "ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1]; ret;"
    )
    with pytest.raises(emulator.OutOfBounds, match="16-byte read"):
        run(code, x=x)
    run(code.replace("%r99, 7", "%r99, 3"), x=x)


def test_gaps_of_a_strided_view_are_outside() -> None:
    whole = aligned((32, 8), np.uint32)
    view = whole[:, :5]
    assert view.strides == (32, 4)
    code = THREAD + address("rd1", "x", 32) + "ld.global.b32 %r1, [%rd1+{}]; ret;"
    run(code.format(16), x=view)
    with pytest.raises(emulator.OutOfBounds, match="outside the elements of 'x'"):
        run(code.format(20), x=view)
    wide = THREAD + address("rd1", "x", 32) + "ld.global.v2.b32 {%r1, %r2}, [%rd1+16]; ret;"
    with pytest.raises(emulator.OutOfBounds, match="8-byte read"):
        run(wide, x=view)


def test_overlapping_views_are_separate_tensors(rng: np.random.Generator) -> None:
    """Two interleaved views of one buffer: lanes of one instruction may touch both, gaps between them stay out."""
    whole = aligned((32, 8), np.uint32, rng.integers(0, 2**32, (32, 8)))
    out = aligned(32, np.uint32)
    left, right = whole[:, :3], whole[:, 5:]
    code = (
        THREAD
        + address("rd1", "left", 32)
        + "and.b32 %r1, %r99, 1; setp.ne.u32 %p1, %r1, 0; @%p1 add.s64 %rd1, %rd1, {};"
    )
    code += "ld.global.b32 %r2, [%rd1];" + address("rd2", "out", 4) + "st.global.b32 [%rd2], %r2; ret;"
    run(code.format(28), left=left, right=right, out=out)
    assert np.array_equal(out, np.where(np.arange(32) % 2, whole[:, 7], whole[:, 0]))
    with pytest.raises(emulator.OutOfBounds):
        run(code.format(16), left=left, right=right, out=out)


def test_read_only_tensors() -> None:
    x = aligned(32, np.uint32)
    code = THREAD + address("rd1", "x", 4) + "st.global.b32 [%rd1], 1; ret;"
    with pytest.raises(emulator.OutOfBounds, match=r"4-byte write .*x\[0\] is read-only"):
        run(code, x=x)
    with pytest.raises(emulator.OutOfBounds, match="read-only"):
        run(code.replace("st.global.b32 [%rd1], 1", "red.global.add.u32 [%rd1], 1"), x=x)
    assert not x.any()


def test_no_tensor_at_all() -> None:
    with pytest.raises(emulator.OutOfBounds, match="no tensor was passed"):
        run("mov.b64 %rd1, 4096; ld.global.b32 %r1, [%rd1]; ret;", regions=[])


@pytest.mark.parametrize("space", ["global", "shared"])
def test_alignment(space: str) -> None:
    x = aligned(64, np.uint32)
    base = "mov.b64 %rd1, %x;" if space == "global" else "mov.b32 %r5, buffer;"
    reg = "%rd1" if space == "global" else "%r5"
    code = base + f"ld.{space}.v2.b32 {{%r1, %r2}}, [{reg}+4]; ret;"
    with pytest.raises(emulator.Misaligned, match="not a multiple of 8"):
        run(code, module=".shared .align 16 .b8 buffer[64];", x=x)
    run(code.replace("v2.b32 {%r1, %r2}", "b32 %r1"), module=".shared .align 16 .b8 buffer[64];", x=x)


@pytest.mark.parametrize(
    "text",
    [
        "ld.shared.b32 %r1, [%r5+{}];",
        "st.shared.b32 [%r5+{}], 1;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r1}}, [%r5+{}];",
    ],
)
def test_shared_bounds(text: str) -> None:
    """64 bytes static and 32 dynamic: the first byte behind them, and one before, are outside."""
    module = ".shared .align 16 .b8 buffer[64];\n.extern .shared .align 16 .b8 dynamic[];"
    inside, outside = (80, 96) if "ldmatrix" in text else (92, 96)
    code = "mov.b32 %r5, buffer;" + text
    run(code.format(inside) + "ret;", module=module, dynamic_smem=32)
    for offset in (outside, -16):
        with pytest.raises(emulator.OutOfBounds, match="outside the CTA's 96 bytes"):
            run(code.format(offset) + "ret;", module=module, dynamic_smem=32)


def test_dynamic_shared_memory_is_aligned() -> None:
    module = ".shared .align 4 .b8 small[4];\n.extern .shared .align 1024 .b8 dynamic[];"
    out = aligned(32, np.uint32)
    code = (
        THREAD
        + "mov.b32 %r1, dynamic; rem.u32 %r2, %r1, 1024;"
        + address("rd1", "out", 4)
        + "st.global.b32 [%rd1], %r2; ret;"
    )
    run(code, module=module, dynamic_smem=64, out=out)
    assert not out.any()


def test_generic_addresses_reach_every_space(rng: np.random.Generator) -> None:
    """Odd lanes read shared memory and even lanes global memory through one generic load."""
    x, out = aligned(32, np.uint32, rng.integers(0, 2**32, 32)), aligned(32, np.uint32)
    code = (
        THREAD
        + address("rd1", "x", 4)
        + """
        mov.b32 %r1, buffer; mad.lo.u32 %r1, %r99, 4, %r1; mul.lo.u32 %r2, %r99, 1000;
        st.shared.b32 [%r1], %r2; bar.sync 0;
        cvt.u64.u32 %rd2, %r1; cvta.shared.u64 %rd2, %rd2; cvta.global.u64 %rd3, %rd1;
        and.b32 %r3, %r99, 1; setp.ne.u32 %p1, %r3, 0; selp.b64 %rd4, %rd2, %rd3, %p1; ld.b32 %r4, [%rd4];
        cvta.to.shared.u64 %rd5, %rd2; cvt.u32.u64 %r6, %rd5; setp.eq.u32 %p2, %r6, %r1; @!%p2 trap;
        isspacep.shared %p3, %rd4; xor.pred %p3, %p3, %p1; @%p3 trap;
    """
        + address("rd6", "out", 4)
        + "st.b32 [%rd6], %r4; ret;"
    )
    run(code, module=".shared .align 16 .b8 buffer[128];", x=x, out=out)
    assert np.array_equal(out, np.where(np.arange(32) % 2, np.arange(32) * 1000, x))


def test_guarded_accesses_touch_only_their_lanes() -> None:
    x, out = aligned(16, np.uint32, np.arange(16)), aligned(32, np.uint32, 7)
    code = (
        THREAD + address("rd1", "x", 4) + "setp.lt.u32 %p1, %r99, 16; mov.b32 %r1, 99; @%p1 ld.global.b32 %r1, [%rd1];"
    )
    code += address("rd2", "out", 4) + "@!%p1 st.global.b32 [%rd2], %r1; ret;"
    run(code, x=x, out=out)
    assert out.tolist() == [7] * 16 + [99] * 16


# Atomics


@pytest.mark.parametrize(
    ("op", "t", "start", "want"),
    [
        ("add", "u32", 5, 5 + sum(range(32))),
        ("min", "s32", 20, -16),
        ("max", "u32", 3, 2**32 - 1),
        ("and", "b32", 0xFFFF, 0),
        ("or", "b32", 0, 0xFFFFFFFF),
        ("xor", "b32", 1, None),
        ("inc", "u32", 0, None),
        ("exch", "b32", 9, None),
    ],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(op: str, t: str, start: int, want: int | None, space: str) -> None:
    """All lanes hit one word; the values returned and the final one fit one serial order."""
    word, out = aligned(1, np.uint32, start), aligned(32, np.uint32)
    value = "sub.s32 %r1, %r99, 16;" if op != "add" and op != "inc" else "mov.b32 %r1, %r99;"
    if op == "inc":
        value = "mov.b32 %r1, 4;"
    target = "%word"
    prolog = ""
    if space == "shared":
        prolog = f"mov.b32 %r8, cell; st.shared.b32 [%r8], {start}; bar.warp.sync -1;"
        target = "%r8"
    code = THREAD + value + prolog + f"atom.{space}.{op}.{t} %r2, [{target}], %r1;" + address("rd1", "out", 4)
    code += "st.global.b32 [%rd1], %r2;"
    if space == "shared":
        code += "bar.warp.sync -1; ld.shared.b32 %r3, [%r8]; setp.eq.u32 %p1, %r99, 0; @%p1 st.global.b32 [%word], %r3;"
    regions = [region("word", word), region("out", out, "w", False)]
    run(code + "ret;", module=".shared .align 4 .b32 cell;", regions=regions, word=word, out=out)
    mask = 2**32 - 1
    values = [lane if op == "add" else 4 if op == "inc" else (lane - 16) & mask for lane in range(32)]
    signed = lambda v: v - 2**32 if v > 2**31 - 1 else v  # noqa: E731
    serial = {
        "add": lambda o, v: (o + v) & mask,
        "min": lambda o, v: min(signed(o), signed(v)) & mask,
        "max": max,
        "and": lambda o, v: o & v,
        "or": lambda o, v: o | v,
        "xor": lambda o, v: o ^ v,
        "inc": lambda o, v: 0 if o >= v else o + 1,
        "exch": lambda o, v: v,
    }[op]
    state = start
    for lane, v in enumerate(values):
        assert out[lane] == state
        state = serial(state, v)
    assert word[0] == state
    if want is not None:
        assert state == want & mask


def test_compare_and_swap_takes_turns() -> None:
    """A lock per lane value: only the lane that finds its number moves it on."""
    word, out = aligned(1, np.uint32, 0), aligned(32, np.uint32)
    code = THREAD + "add.u32 %r1, %r99, 1; atom.global.cas.b32 %r2, [%word], %r99, %r1;" + address("rd1", "out", 4)
    run(
        code + "st.global.b32 [%rd1], %r2; ret;",
        regions=[region("word", word), region("out", out, "w", False)],
        word=word,
        out=out,
    )
    assert out.tolist() == list(range(32))
    assert word[0] == 32


def test_vector_and_packed_reductions(rng: np.random.Generator) -> None:
    x = aligned(4, np.float32, [1, 2, 3, 4])
    pair = aligned(2, np.uint16, np.array([1, 2], ml_dtypes.bfloat16).view(np.uint16))
    code = "red.global.add.v4.f32 [%x], {0f3F800000, 0f40000000, 0f3F000000, 0f00000000};"
    code += "mov.b32 %r1, 0x40003F80; red.global.add.noftz.bf16x2 [%pair], %r1; ret;"
    run(code, block=4, regions=[region("x", x), region("pair", pair)], x=x, pair=pair)
    assert x.tolist() == [5, 10, 5, 4]
    assert pair.view(ml_dtypes.bfloat16).astype(float).tolist() == [5, 10]


def test_empty_and_padded_regions() -> None:
    x = aligned(32, np.uint32)
    empty = Region("empty", 0, (0, 4), (16, 4), "uint32", "r", True)
    code = THREAD + address("rd1", "x", 4) + "ld.global.b32 %r1, [%rd1]; ret;"
    run(code, regions=[empty, region("x", x)], x=x)
    single = Region("x", x.ctypes.data, (32, 1), (4, 9999), "uint32", "r", True)
    run(code, regions=[single], x=x)
    broadcast = Region("x", x.ctypes.data, (3, 32), (0, 4), "uint32", "r", True)
    run(code, regions=[broadcast], x=x)


def test_elementwise_harness_sees_every_lane() -> None:
    """The harness itself: a size that is no multiple of a warp."""
    x = np.arange(37, dtype=np.uint32)
    assert np.array_equal(elementwise("add.u32 %d, %a, 1;", x), x + 1)
