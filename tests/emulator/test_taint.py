"""Data that nothing wrote: where it may go, and where it is refused."""

from __future__ import annotations

import numpy as np
import pytest

from b12x import emulator

from .harness import THREAD, address, aligned, region, run
from .test_mma import names, scatter_a, scatter_b, scatter_d

SHARED = ".shared .align 16 .b8 buffer[1024];"
LOAD = THREAD + address("rd1", "x", 4) + "ld.global.b32 %r1, [%rd1];"
STORE = address("rd2", "out", 4) + "st.global.b32 [%rd2], %r2; ret;"


def half_written(code: str, **more: object) -> np.ndarray:  # type: ignore[type-arg]
    """x has 16 written words, then 16 that nothing wrote: both in one tensor, by a first store of the kernel."""
    x, out = aligned(32, np.uint32, 0xBAD), aligned(32, np.uint32)
    first = THREAD + address("rd1", "x", 4) + "setp.lt.u32 %p1, %r99, 16; @%p1 st.global.b32 [%rd1], %r99;"
    run(
        first + "ld.global.b32 %r1, [%rd1];" + code,
        regions=[region("x", x, "rw", False), region("out", out, "w", False)],
        module=SHARED,
        x=x,
        out=out,
        **more,  # type: ignore[arg-type]
    )
    return out


def test_loading_and_computing_is_fine() -> None:
    out = half_written("add.u32 %r2, %r1, 1; @!%p1 mov.b32 %r2, 5;" + STORE)
    assert out.tolist() == [*range(1, 17), *[5] * 16]


@pytest.mark.parametrize(
    "code",
    [
        "mov.b32 %r2, %r1;",
        "add.u32 %r2, %r1, 1;",
        "mul.lo.u32 %r2, %r1, 0;",
        "cvt.rn.f32.u32 %r2, %r1;",
        "xor.b32 %r2, %r1, %r1;",
        "setp.eq.u32 %p2, %r1, 3; selp.b32 %r2, 1, 0, %p2;",
        "mov.b64 %rd9, {%r1, %r99}; mov.b64 {%r2, %r3}, %rd9;",
        "prmt.b32 %r2, %r1, %r99, 0x5410;",
        "mov.b32 %r2, 0; setp.eq.u32 %p2, %r1, 3; @%p2 mov.b32 %r2, 1;",
        "shfl.sync.idx.b32 %r2, %r1, 20, 31, -1;",
        "redux.sync.add.u32 %r2, %r1, -1;",
        "fma.rn.f32 %r2, %r1, 0f00000000, 0f00000000;",
        "mov.b32 %r8, buffer; mad.lo.u32 %r8, %r99, 4, %r8; st.shared.b32 [%r8], %r1; ld.shared.b32 %r2, [%r8];",
        "shl.b32 %r2, %r1, 4;",
        "lop3.b32 %r2, %r1, %r99, %r99, 0x96;",
        "bfe.u32 %r2, %r1, 4, 8;",
        "cvt.rn.bf16x2.f32 %r2, 0f00000000, %r1;",
    ],
)
def test_what_depends_on_it_cannot_be_stored(code: str) -> None:
    with pytest.raises(
        emulator.TaintError, match=r"stored to out\[\d+\] depends on x\[16\], which nothing has written"
    ):
        half_written(code + STORE)


@pytest.mark.parametrize(
    "code",
    [
        "and.b32 %r2, %r1, 0;",
        "or.b32 %r2, %r1, -1;",
        "lop3.b32 %r2, %r1, %r99, %r99, 0xCC;",
        "selp.b32 %r2, %r1, 7, %p1;",
        "prmt.b32 %r2, %r1, %r99, 0x7654;",
        "shr.u32 %r2, %r1, 32;",
        "bfi.b32 %r2, %r99, %r1, 0, 32;",
        "mov.b64 %rd9, {%r99, %r1}; mov.b64 {%r2, %r3}, %rd9;",
        "mov.b64 %rd9, {%r1, %r99}; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r2, %rd9;",
        "mov.b32 %r2, %r1; @!%p1 mov.b32 %r2, 3;",
        "mov.b32 %r2, %r1; mov.b32 %r2, %r99;",
        "mov.b32 {%rs1, %rs2}, %r1; mov.b32 {%rs3, %rs4}, %r99; mov.b32 %r3, {%rs1, %rs3}; shr.u32 %r2, %r3, 16;",
    ],
)
def test_what_does_not_depend_on_it_can(code: str) -> None:
    half_written(code + STORE)


def test_addresses() -> None:
    with pytest.raises(emulator.TaintError, match=r"address depends on x\[16\]"):
        half_written("and.b32 %r3, %r1, 0x1F; " + address("rd3", "x", 4, "%r3") + "ld.global.b32 %r2, [%rd3]; ret;")
    with pytest.raises(emulator.TaintError, match="address depends on"):
        half_written(
            "mov.b32 %r3, buffer; add.u32 %r3, %r3, %r1; st.shared.b8 [%r3], 1; ret;".replace(
                "b8 [%r3], 1", "b8 [%r3], %rs1"
            ).replace("mov.b32 %r3", "mov.b16 %rs1, 0; mov.b32 %r3", 1)
        )


def test_branches_and_guards() -> None:
    with pytest.raises(emulator.TaintError, match="control flow depends on"):
        half_written("setp.eq.u32 %p2, %r1, 3; @%p2 bra SKIP; SKIP: ret;")
    with pytest.raises(emulator.TaintError, match="guard predicate depends on"):
        half_written("setp.eq.u32 %p2, %r1, 3; @%p2 st.global.b32 [%rd1], 1; ret;")
    half_written("@!%p1 bra SKIP; setp.eq.u32 %p2, %r1, 3; @%p2 bra SKIP; SKIP: ret;")


def test_registers_that_nothing_wrote() -> None:
    out = aligned(32, np.uint32)
    with pytest.raises(emulator.TaintError, match="register %r7, which nothing has written"):
        run(THREAD + "add.u32 %r2, %r7, 1;" + STORE, out=out)
    with pytest.raises(emulator.TaintError, match="register %r7"):
        run(THREAD + "setp.lt.u32 %p1, %r99, 30; @%p1 mov.b32 %r7, 1; add.u32 %r2, %r7, 1;" + STORE, out=out)
    run(
        THREAD + "setp.lt.u32 %p1, %r99, 30; @%p1 mov.b32 %r7, 1; @!%p1 mov.b32 %r7, 2; mov.b32 %r2, %r7;" + STORE,
        out=out,
    )


def test_a_path_that_skips_the_write() -> None:
    """Only the lanes that took the path without the write are refused."""
    code = THREAD + "setp.lt.u32 %p1, %r99, {}; @%p1 bra SKIP; mov.b32 %r7, 1; SKIP: mov.b32 %r2, %r7;"
    run(code.format(0) + STORE, out=aligned(32, np.uint32))
    with pytest.raises(emulator.TaintError, match=r"thread \(0, 0, 0\).*register %r7"):
        run(code.format(1) + STORE, out=aligned(32, np.uint32))


def test_shared_memory_starts_unwritten() -> None:
    out = aligned(32, np.uint32)
    code = (
        THREAD
        + "mov.b32 %r8, buffer; mad.lo.u32 %r8, %r99, 4, %r8; setp.ne.u32 %p1, %r99, 9; @%p1 st.shared.b32 [%r8], %r99;"
    )
    with pytest.raises(emulator.TaintError, match=r"thread \(9, 0, 0\).*shared address 0x424 of CTA \(0, 0, 0\)"):
        run(code + "ld.shared.b32 %r2, [%r8];" + STORE, module=SHARED, out=out)


def test_a_cta_does_not_see_what_the_last_one_left() -> None:
    out = aligned(2, np.uint32)
    code = "mov.u32 %r99, %ctaid.x; mov.b32 %r8, buffer; setp.eq.u32 %p1, %r99, 0; @%p1 st.shared.b32 [%r8], 1;"
    with pytest.raises(emulator.TaintError, match=r"CTA \(1, 0, 0\)"):
        run(code + "ld.shared.b32 %r2, [%r8];" + STORE, module=SHARED, block=1, grid=(2,), out=out)


def test_bytes_are_tracked_one_by_one() -> None:
    """One byte of a word written: loading the word and taking that byte is fine, taking another is not."""
    out = aligned(32, np.uint32)
    code = (
        THREAD
        + "mov.b32 %r8, buffer; mad.lo.u32 %r8, %r99, 4, %r8; mov.b16 %rs1, 77; "
        + "st.shared.b8 [%r8+1], %rs1; ld.shared.b32 %r1, [%r8];"
    )
    run(code + "bfe.u32 %r2, %r1, 8, 8;" + STORE, module=SHARED, out=out)
    assert (out == 77).all()
    with pytest.raises(emulator.TaintError):
        run(code + "bfe.u32 %r2, %r1, 7, 8;" + STORE, module=SHARED, out=out)


def test_checks_can_be_turned_off() -> None:
    half_written("mov.b32 %r2, %r1;" + STORE, options=emulator.Options(checks=False))


def test_atomics_on_unwritten_memory() -> None:
    x = aligned(32, np.uint32)
    with pytest.raises(emulator.TaintError):
        run(
            THREAD + address("rd1", "x", 4) + "red.global.add.u32 [%rd1], 1; ret;",
            regions=[region("x", x, "rw", False)],
            x=x,
        )


MMA = "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"


def tainted_mma(what: str, lane: int, register: int) -> np.ndarray:  # type: ignore[type-arg]
    """Which elements of D are tainted when one register of one lane of an operand is; by trying to store each."""
    counts = {"A": 4, "B": 2, "C": 4, "SA": 1, "SB": 1}
    code = THREAD + "".join(
        f".reg .b32 %{n}<{c}>;" + "".join(f"mov.b32 %{n}{i}, 0;" for i in range(c)) for n, c in counts.items()
    )
    code += f"mov.b32 %r8, buffer; setp.eq.u32 %p1, %r99, {lane}; @%p1 ld.shared.b32 %{what}{register}, [%r8];"
    code += ".reg .b32 %D<4>; "
    code += f"{MMA} {names('D', 4)}, {names('A', 4)}, {names('B', 2)}, {names('C', 4)}, %SA0, {{0,0}}, %SB0, {{0,0}};"
    found = np.zeros((4, 32), bool)
    for r in range(4):
        for thread in range(32):
            one = f"setp.eq.u32 %p2, %r99, {thread}; @%p2 st.global.b32 [%out], %D{r}; ret;"
            try:
                run(code + one, module=SHARED, out=aligned(1, np.uint32))
            except emulator.TaintError:
                found[r, thread] = True
    return found


@pytest.mark.parametrize(
    ("what", "lane", "register", "row", "column"),
    [
        ("A", 4 * 3 + 1, 2, 3, None),
        ("A", 4 * 3 + 1, 1, 11, None),
        ("B", 4 * 5 + 2, 1, None, 5),
        ("SA", 4 * 6 + 1, 0, 14, None),
        ("SB", 4 * 2, 0, None, 2),
        ("SA", 4 * 6 + 2, 0, None, None),
        ("C", 4 * 1 + 3, 3, 9, 7),
    ],
)
def test_mma_spreads_taint_by_row_and_column(
    what: str, lane: int, register: int, row: int | None, column: int | None
) -> None:
    dense = np.zeros((16, 8))
    if row is not None and column is not None:
        dense[row, column] = 1
    elif row is not None:
        dense[row] = 1
    elif column is not None:
        dense[:, column] = 1
    assert np.array_equal(tainted_mma(what, lane, register), scatter_d(dense) == 1)


def test_mma_tables_agree_with_the_oracle() -> None:
    """The lanes used above are those of the fragment tables."""
    a = np.zeros((16, 64), np.uint32)
    a[3, 32 + 8 : 32 + 16] = 1
    assert np.argwhere(scatter_a(a, 4)).tolist() == [[2, 13]]
    b = np.zeros((8, 64), np.uint32)
    b[5, 32 + 16 : 32 + 24] = 1
    assert np.argwhere(scatter_b(b, 4)).tolist() == [[1, 22]]
