"""Matrix fragments, scales and their selectors: dense matrices scattered to lanes by the tables, D compared densely."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from b12x import emulator

from .harness import THREAD, address, aligned, run

Array = np.ndarray[Any, Any]
SMALL = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def random_codes(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Codes of finite elements, and their values."""
    if name in ("f16", "bf16"):
        dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[name]
        values = rng.standard_normal(shape).astype(dtype)
        return values.view(np.uint16).astype(np.uint32), values.astype(np.float64)
    if name == "tf32":
        bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
        return bits, bits.view(np.float32).astype(np.float64)
    every = np.arange({"e2m1": 16, "e2m3": 64, "e3m2": 64}.get(name, 256), dtype=np.uint8)
    values = every.view(SMALL[name]).astype(np.float64)
    finite = every[np.isfinite(values)]
    codes = rng.choice(finite, shape)
    return codes.astype(np.uint32), values[codes]


def word(codes: Array, bits: int) -> int:
    """Consecutive elements of a register, the first one lowest."""
    return sum(int(c) << (bits * i) for i, c in enumerate(codes))


def container(codes: Array, name: str, bits: int) -> Array:
    """What a register holds for an element: a 4-bit value in an 8-bit container sits in bits 2 to 5."""
    return codes << np.uint32(2) if name == "e2m1" and bits == 8 else codes


def scatter_a(codes: Array, bits: int) -> Array:
    """[register, lane] of A (16 x K): row g or g + 8, and the lower or upper half of K, by the tables."""
    v = 32 // bits
    regs = codes.shape[1] // (4 * v) * 2
    out = np.zeros((regs, 32), np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for r in range(regs):
            row, k = g + 8 * (r % 2), 4 * v * (r // 2) + v * t
            out[r, lane] = word(codes[row, k : k + v], bits)
    return out


def scatter_b(codes: Array, bits: int) -> Array:
    """[register, lane] of B, given as 8 columns of K elements."""
    v = 32 // bits
    regs = codes.shape[1] // (4 * v)
    out = np.zeros((regs, 32), np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for r in range(regs):
            k = 4 * v * r + v * t
            out[r, lane] = word(codes[g, k : k + v], bits)
    return out


def scatter_d(values: Array) -> Array:
    """[register, lane] of a 16 x 8 f32 matrix."""
    out = np.zeros((4, 32), np.float32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        out[0, lane], out[1, lane] = values[g, 2 * t], values[g, 2 * t + 1]
        out[2, lane], out[3, lane] = values[g + 8, 2 * t], values[g + 8, 2 * t + 1]
    return out


def names(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def execute(instruction: str, operands: dict[str, Array], outs: int = 4, warps: int = 1) -> Array:
    """Loads operands ([register, lane] each) and runs one mma; returns D as [register, lane].

    ``instruction`` uses A, B, C, D and SA, SB, which become register lists.
    """
    code = [THREAD]
    tensors: dict[str, Array] = {}
    for name, regs in operands.items():
        count = regs.shape[0]
        memory = aligned(regs.shape, np.uint32)
        memory[...] = np.ascontiguousarray(regs).view(np.uint32)
        tensors[name.lower()] = memory
        code.append(f".reg .b32 %{name}<{count}>;")
        code.append("and.b32 %r99, %r99, 31;" + address("rd1", name.lower(), 4))
        code += [f"ld.global.b32 %{name}{i}, [%rd1+{128 * i}];" for i in range(count)]
        instruction = instruction.replace(f"<{name}>", names(name, count))
    out = aligned((outs, 32), np.uint32)
    tensors["out"] = out
    code.append(f".reg .b32 %D<{outs}>;")
    code.append(instruction.replace("<D>", names("D", outs)))
    code.append(address("rd1", "out", 4))
    code += [f"st.global.b32 [%rd1+{128 * i}], %D{i};" for i in range(outs)]
    run("\n".join(code) + "\nret;", block=32 * warps, **tensors)
    return out


PLAIN = [
    ("m16n8k16", "f16", "f16"),
    ("m16n8k8", "f16", "f16"),
    ("m16n8k16", "bf16", "bf16"),
    ("m16n8k8", "bf16", "bf16"),
    ("m16n8k8", "tf32", "tf32"),
    ("m16n8k4", "tf32", "tf32"),
    ("m16n8k32", "e4m3", "e4m3"),
    ("m16n8k32", "e5m2", "e4m3"),
    ("m16n8k16", "e4m3", "e5m2"),
]
WIDTH = {"f16": 16, "bf16": 16, "tf32": 32}


@pytest.mark.parametrize(("shape", "ta", "tb"), PLAIN)
def test_unscaled(shape: str, ta: str, tb: str, rng: np.random.Generator) -> None:
    k = int(shape.split("k")[1])
    bits = WIDTH.get(ta, 8)
    a, va = random_codes(rng, ta, (16, k))
    b, vb = random_codes(rng, tb, (8, k))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    got = execute(
        f"mma.sync.aligned.{shape}.row.col.f32.{ta}.{tb}.f32 <D>, <A>, <B>, <C>;",
        {"A": scatter_a(a, bits), "B": scatter_b(b, bits), "C": scatter_d(c)},
    ).view(np.float32)
    want = va @ vb.T + c
    bound = 1e-6 * (np.abs(va) @ np.abs(vb).T + np.abs(c))
    assert (np.abs(got - scatter_d(want)) <= scatter_d(bound)).all()


@pytest.mark.parametrize(("ta", "tb"), [("e4m3", "e2m1"), ("e2m1", "e5m2"), ("e3m2", "e2m3"), ("e2m1", "e2m1")])
def test_containers_without_scales(ta: str, tb: str, rng: np.random.Generator) -> None:
    a, va = random_codes(rng, ta, (16, 32))
    b, vb = random_codes(rng, tb, (8, 32))
    got = execute(
        f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.{ta}.{tb}.f32 <D>, <A>, <B>, <C>;",
        {
            "A": scatter_a(container(a, ta, 8), 8),
            "B": scatter_b(container(b, tb, 8), 8),
            "C": np.zeros((4, 32), np.float32),
        },
    ).view(np.float32)
    want = va @ vb.T
    assert np.allclose(got, scatter_d(want), rtol=1e-6, atol=1e-6 * np.abs(va).max() * np.abs(vb).max() * 32)


def test_f16_accumulators(rng: np.random.Generator) -> None:
    a, va = random_codes(rng, "f16", (16, 16))
    b, vb = random_codes(rng, "f16", (8, 16))
    c = rng.standard_normal((16, 8)).astype(np.float16)
    packed = scatter_d(c.astype(np.float32)).astype(np.float16)
    pair = lambda lo, hi: lo.view(np.uint16).astype(np.uint32) | hi.view(np.uint16).astype(np.uint32) << 16  # noqa: E731
    got = execute(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 <D>, <A>, <B>, <C>;",
        {
            "A": scatter_a(a, 16),
            "B": scatter_b(b, 16),
            "C": np.stack([pair(packed[0], packed[1]), pair(packed[2], packed[3])]),
        },
        outs=2,
    )
    halves = got.view(np.float16).reshape(2, 32, 2)
    want = scatter_d(va @ vb.T + c)
    for r in range(4):
        assert np.allclose(halves[r // 2, :, r % 2].astype(np.float32), want[r], rtol=2e-3, atol=2e-3)


def scale_values(codes: Array, name: str) -> Array:
    if name == "ue4m3":
        return (codes.astype(np.uint8) & 0x7F).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.exp2(codes.astype(np.float64) - 127)


def place_scales(rng: np.random.Generator, codes: Array, byte: int, lanes: Array) -> Array:
    """One register whose chosen bytes of chosen lanes hold the scales; everything else is garbage."""
    out = rng.integers(0, 2**32, (1, 32), dtype=np.uint32)
    for row in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            shift = np.uint32(8 * (byte + j))
            lane = lanes[row]
            out[0, lane] = (out[0, lane] & ~(np.uint32(0xFF) << shift)) | (np.uint32(codes[row, j]) << shift)
    return out


SCALED = [
    ("mxf4nvf4", 4, "ue4m3", "e2m1", "e2m1", 64),
    ("mxf4nvf4", 4, "ue8m0", "e2m1", "e2m1", 64),
    ("mxf4nvf4", 2, "ue8m0", "e2m1", "e2m1", 64),
    ("mxf4", 2, "ue8m0", "e2m1", "e2m1", 64),
    ("mxf8f6f4", 1, "ue8m0", "e4m3", "e4m3", 32),
    ("mxf8f6f4", 1, "ue8m0", "e5m2", "e2m1", 32),
    ("mxf8f6f4", 1, "ue8m0", "e2m3", "e3m2", 32),
]


@pytest.mark.parametrize("as_register", [False, True])
@pytest.mark.parametrize("choice", range(4))
@pytest.mark.parametrize(("kind", "vec", "scale", "ta", "tb", "k"), SCALED)
def test_block_scaled(
    kind: str, vec: int, scale: str, ta: str, tb: str, k: int, choice: int, as_register: bool, rng: np.random.Generator
) -> None:
    """Every thread selector, and every byte selector that the vector size leaves."""
    bits = 8 if kind == "mxf8f6f4" else 4
    a, va = random_codes(rng, ta, (16, k))
    b, vb = random_codes(rng, tb, (8, k))
    low, high = (0, 127) if scale == "ue4m3" else (117, 137)
    sa, sb = rng.integers(low, high, (16, vec)), rng.integers(low, high, (8, vec))
    tid_a, tid_b = choice % 2, choice
    byte = {4: [0, 0, 0, 0], 2: [0, 2, 2, 0], 1: [0, 1, 2, 3]}[vec][choice]
    byte_b = {4: 0, 2: 2 - byte, 1: 3 - byte}[vec]
    lanes_a = np.array([4 * (r % 8) + 2 * tid_a + r // 8 for r in range(16)])
    lanes_b = np.array([4 * c + tid_b for c in range(8)])
    c = rng.standard_normal((16, 8)).astype(np.float32)
    ids = [byte, tid_a, byte_b, tid_b]
    setup = ""
    if as_register:
        setup = "".join(f"mov.b16 %rs{i}, {v};" for i, v in enumerate(ids))
        selector = ["{%rs0, %rs1}", "{%rs2, %rs3}"]
    else:
        selector = [f"{{{byte}, {tid_a}}}", f"{{{byte_b}, {tid_b}}}"]
    got = execute(
        setup
        + f"mma.sync.aligned.kind::{kind}.block_scale.scale_vec::{vec}X.m16n8k{k}.row.col.f32.{ta}.{tb}.f32.{scale} "
        f"<D>, <A>, <B>, <C>, <SA>, {selector[0]}, <SB>, {selector[1]};",
        {
            "A": scatter_a(container(a, ta, bits), bits),
            "B": scatter_b(container(b, tb, bits), bits),
            "C": scatter_d(c),
            "SA": place_scales(rng, sa, byte, lanes_a),
            "SB": place_scales(rng, sb, byte_b, lanes_b),
        },
    ).view(np.float32)
    xa = va * np.repeat(scale_values(sa, scale), k // vec, axis=1)
    xb = vb * np.repeat(scale_values(sb, scale), k // vec, axis=1)
    want, bound = xa @ xb.T + c, 1e-6 * (np.abs(xa) @ np.abs(xb).T + np.abs(c))
    assert (np.abs(got - scatter_d(want)) <= scatter_d(bound)).all()


def nvf4(
    a: Array, b: Array, sa: Array, sb: Array, c: Array | None = None, rng: np.random.Generator | None = None
) -> Array:
    rng = rng or np.random.default_rng(0)
    return execute(
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
        "<D>, <A>, <B>, <C>, <SA>, {0, 0}, <SB>, {0, 0};",
        {
            "A": scatter_a(a, 4),
            "B": scatter_b(b, 4),
            "C": scatter_d(np.zeros((16, 8)) if c is None else c),
            "SA": place_scales(rng, sa, 0, np.array([4 * (r % 8) + r // 8 for r in range(16)])),
            "SB": place_scales(rng, sb, 0, np.array([4 * col for col in range(8)])),
        },
    ).view(np.float32)


def test_scale_sign_is_ignored_and_nan_stays_in_its_row(rng: np.random.Generator) -> None:
    a, va = random_codes(rng, "e2m1", (16, 64))
    b, vb = random_codes(rng, "e2m1", (8, 64))
    sa, sb = np.full((16, 4), 0x38), np.full((8, 4), 0xB8)  # 1.0 and "-1.0"
    assert np.array_equal(nvf4(a, b, sa, sb), scatter_d(va @ vb.T))
    sa[3, 2] = 0x7F
    got = nvf4(a, b, sa, sb)
    want = va @ vb.T
    want[3] = np.nan
    assert np.array_equal(got, scatter_d(want), equal_nan=True)


def test_extreme_power_of_two_scales_cancel(rng: np.random.Generator) -> None:
    """2^100 on A and 2^-100 on B leave a product in range although the scaled elements are not."""
    a, va = random_codes(rng, "e4m3", (16, 32))
    b, vb = random_codes(rng, "e4m3", (8, 32))
    got = execute(
        "mma.sync.aligned.kind::mxf8f6f4.block_scale.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0 "
        "<D>, <A>, <B>, <C>, <SA>, {0, 0}, <SB>, {0, 0};",
        {
            "A": scatter_a(a, 8),
            "B": scatter_b(b, 8),
            "C": np.zeros((4, 32), np.float32),
            "SA": np.full((1, 32), 0x01010101 * 250, np.uint32),
            "SB": np.full((1, 32), 0x01010101 * 4, np.uint32),
        },
    ).view(np.float32)
    assert np.allclose(got, scatter_d(va @ vb.T), rtol=1e-5, atol=1e-2)


def test_batches_equal_single_multiplies(rng: np.random.Generator) -> None:
    """A 2 x 3 grid of tiles in one basic block, chained once, against the dense product; all warps at once."""
    k = 16
    a, va = random_codes(rng, "bf16", (32, 2 * k))
    b, vb = random_codes(rng, "bf16", (24, 2 * k))
    regs, code = {}, [THREAD]
    regs["A"] = np.concatenate(
        [scatter_a(a[16 * i : 16 * i + 16, k * s : k * s + k], 16) for i in range(2) for s in range(2)]
    )
    regs["B"] = np.concatenate(
        [scatter_b(b[8 * j : 8 * j + 8, k * s : k * s + k], 16) for j in range(3) for s in range(2)]
    )
    tensors = {}
    for name, x in regs.items():
        tensors[name.lower()] = aligned(x.shape, np.uint32, x)
        code.append(f".reg .b32 %{name}<{len(x)}>; and.b32 %r99, %r99, 31;" + address("rd1", name.lower(), 4))
        code += [f"ld.global.b32 %{name}{i}, [%rd1+{128 * i}];" for i in range(len(x))]
    code.append(".reg .f32 %D<24>;")
    code += [f"mov.f32 %D{i}, 0f00000000;" for i in range(24)]
    for s in range(2):
        for i in range(2):
            for j in range(3):
                d = ", ".join(f"%D{4 * (3 * i + j) + r}" for r in range(4))
                fa = ", ".join(f"%A{4 * (2 * i + s) + r}" for r in range(4))
                fb = ", ".join(f"%B{2 * (2 * j + s) + r}" for r in range(2))
                code.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{d}}}, {{{fa}}}, {{{fb}}}, {{{d}}};"
                )
    out = aligned((3, 24, 32), np.float32)
    tensors["out"] = out
    code.append("mov.u32 %r99, %tid.x; and.b32 %r1, %r99, 31; shr.u32 %r2, %r99, 5; mad.lo.u32 %r99, %r2, 768, %r1;")
    code.append(address("rd1", "out", 4))
    code += [f"st.global.f32 [%rd1+{128 * i}], %D{i};" for i in range(24)]
    run("\n".join(code) + "ret;", block=96, **tensors)
    want = va @ vb.T
    for warp in range(3):
        for i in range(2):
            for j in range(3):
                tile = want[16 * i : 16 * i + 16, 8 * j : 8 * j + 8]
                got = out[warp, 4 * (3 * i + j) : 4 * (3 * i + j) + 4]
                assert np.allclose(got, scatter_d(tile), rtol=1e-5, atol=1e-5)


def test_a_batch_keeps_the_order_of_registers_it_overwrites(rng: np.random.Generator) -> None:
    """The second multiply overwrites what the first one reads, and a move between them reads the first result."""
    a, va = random_codes(rng, "bf16", (16, 16))
    b, vb = random_codes(rng, "bf16", (8, 16))
    got = execute(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 <D>, <A>, <B>, <C>; mov.b32 %r1, %D0;"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 <C>, <A>, <B>, <D>; mov.b32 %D1, %C0; mov.b32 %D0, %r1;",
        {"A": scatter_a(a, 16), "B": scatter_b(b, 16), "C": np.zeros((4, 32), np.float32)},
    ).view(np.float32)
    once = scatter_d(va @ vb.T)
    assert np.allclose(got[0], once[0], rtol=1e-5, atol=1e-5)
    assert np.allclose(got[1], 2 * once[0], rtol=1e-5, atol=1e-5)


def test_inputs_overwritten_after_a_multiply(rng: np.random.Generator) -> None:
    """Two multiplies of one block, whose shared A is overwritten between them."""
    a, va = random_codes(rng, "bf16", (16, 16))
    b, vb = random_codes(rng, "bf16", (8, 16))
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    clear = "".join(f"mov.b32 %A{i}, 0;" for i in range(4))
    got = execute(
        f"{mma} <D>, <A>, <B>, <C>; {clear} {mma} <C>, <A>, <B>, <C>; mov.b32 %D1, %C0;",
        {"A": scatter_a(a, 16), "B": scatter_b(b, 16), "C": np.zeros((4, 32), np.float32)},
    ).view(np.float32)
    assert np.allclose(got[0], scatter_d(va @ vb.T)[0], rtol=1e-5, atol=1e-5)
    assert not got[1].any()


def test_selectors_must_agree_and_fit() -> None:
    zeros = np.zeros((1, 32), np.uint32)
    operands = {
        "A": np.zeros((4, 32), np.uint32),
        "B": np.zeros((2, 32), np.uint32),
        "C": np.zeros((4, 32), np.float32),
        "SA": zeros,
        "SB": zeros,
    }
    mma = "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
    mma += "<D>, <A>, <B>, <C>, <SA>, "
    with pytest.raises(emulator.EmulatorError, match="differ"):
        execute("cvt.u16.u32 %rs1, %r99;" + mma + "{0, %rs1}, <SB>, {0, 0};", operands)
    with pytest.raises(emulator.UnsupportedInstruction, match="range"):
        execute(mma + "{0, 2}, <SB>, {0, 0};", operands)


def test_part_of_a_warp_cannot_multiply() -> None:
    operands = {
        "A": np.zeros((4, 32), np.uint32),
        "B": np.zeros((2, 32), np.uint32),
        "C": np.zeros((4, 32), np.float32),
    }
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 <D>, <A>, <B>, <C>;"
    with pytest.raises(emulator.Deadlock, match="other lanes"):
        execute("mov.b32 %D0, 0; mov.b32 %D1, 0; mov.b32 %D2, 0; mov.b32 %D3, 0; setp.lt.u32 %p1, %r99, 16;"
                "@%p1 bra SKIP;" + mma + "mov.b32 %r1, 1; bra.uni END; SKIP: bar.sync 0; END:", operands)  # fmt: skip
