"""ldmatrix, stmatrix and movmatrix against the element tables of the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import THREAD, address, aligned, run

COPY_IN = """
    // each lane copies 16 bytes of the input to shared memory
    mul.wide.u32 %rd2, %r99, 16; add.s64 %rd2, %rd2, %src;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2];
    mov.b32 %r5, buffer; mad.lo.u32 %r6, %r99, 16, %r5;
    st.shared.v4.b32 [%r6], {%r1, %r2, %r3, %r4};
    bar.sync 0;
"""
SHARED = ".shared .align 128 .b8 buffer[512];"


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: bool, rng: np.random.Generator) -> None:
    """Rows are given by lanes 0 to 8 * count - 1, here in a scrambled order; "
    "lane l holds row l / 4, columns 2(l % 4)."""
    src = aligned((4, 8, 8), np.uint16, rng.integers(0, 65536, (4, 8, 8)))
    order = rng.permutation(8 * count).astype(np.uint32)
    rows = aligned(32, np.uint32, np.resize(order, 32))
    out = aligned((32, count), np.uint32)
    regs = ", ".join(f"%r{10 + i}" for i in range(count))
    code = THREAD + COPY_IN + address("rd3", "rows", 4)
    code += f"""
        ld.global.b32 %r7, [%rd3]; mad.lo.u32 %r8, %r7, 16, %r5;
        ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 {{{regs}}}, [%r8];
    """
    code += address("rd4", "out", 4 * count)
    code += "".join(f"st.global.b32 [%rd4+{4 * i}], %r{10 + i};" for i in range(count)) + "ret;"
    run(code, module=SHARED, src=src, rows=rows, out=out)
    flat = src.reshape(32, 8)
    for m in range(count):
        matrix = flat[order[8 * m : 8 * m + 8]]
        if trans:
            matrix = matrix.T
        for lane in range(32):
            row, column = lane // 4, 2 * (lane % 4)
            want = int(matrix[row, column]) | int(matrix[row, column + 1]) << 16
            assert out[lane, m] == want


@pytest.mark.parametrize(("form", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_ldmatrix_unpacks_narrow_elements(form: str, bits: int, rng: np.random.Generator) -> None:
    """16 elements packed at the start of each 16-byte row arrive one a byte, in its low bits."""
    codes = rng.integers(0, 1 << bits, (32, 16))
    packed = [sum(int(c) << bits * i for i, c in enumerate(row)) | (0xEE << 120) for row in codes]
    src = aligned((32, 16), np.uint8, [list(p.to_bytes(16, "little")) for p in packed])
    out = aligned((32, 4), np.uint32)
    code = THREAD + COPY_IN
    code += f"ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.{form} {{%r10, %r11, %r12, %r13}}, [%r6];"
    code += address("rd4", "out", 16) + "st.global.v4.b32 [%rd4], {%r10, %r11, %r12, %r13}; ret;"
    run(code, module=SHARED, src=src, out=out)
    for m in range(4):
        for lane in range(32):
            row, column = 8 * m + lane // 4, 4 * (lane % 4)
            assert out[lane, m] == sum(int(codes[row, column + i]) << 8 * i for i in range(4))


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count: int, trans: bool, rng: np.random.Generator) -> None:
    src = aligned((32, 4), np.uint32, rng.integers(0, 2**32, (32, 4)))
    out = aligned((32, 4), np.uint32)
    regs = ", ".join(f"%r{10 + i}" for i in range(count))
    code = THREAD + COPY_IN.replace(
        "st.shared.v4.b32 [%r6], {%r1, %r2, %r3, %r4};", "st.shared.v4.b32 [%r6], {0, 0, 0, 0};"
    )
    code += "".join(f"mov.b32 %r{10 + i}, %r{1 + i};" for i in range(count))
    code += f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 [%r6], {{{regs}}}; bar.sync 0;"
    code += "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r6];"
    code += address("rd4", "out", 16) + "st.global.v4.b32 [%rd4], {%r1, %r2, %r3, %r4}; ret;"
    run(code, module=SHARED, src=src, out=out)
    got = out.view(np.uint16).reshape(4, 8, 8)
    for m in range(count):
        matrix = np.zeros((8, 8), np.uint16)
        for lane in range(32):
            row, column = lane // 4, 2 * (lane % 4)
            matrix[row, column], matrix[row, column + 1] = src[lane, m] & 0xFFFF, src[lane, m] >> 16
        assert np.array_equal(got[m], matrix.T if trans else matrix)
    assert not got[count:].any()


def test_movmatrix_transposes(rng: np.random.Generator) -> None:
    src = aligned(32, np.uint32, rng.integers(0, 2**32, 32))
    out = aligned(32, np.uint32)
    code = THREAD + address("rd1", "src", 4) + "ld.global.b32 %r1, [%rd1];"
    code += (
        "movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;" + address("rd2", "out", 4) + "st.global.b32 [%rd2], %r2; ret;"
    )
    run(code, src=src, out=out)
    assert np.array_equal(out.view(np.uint16).reshape(8, 8), src.view(np.uint16).reshape(8, 8).T)
