"""Syntax of PTX text: scopes, labels, literals, operand forms, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from b12x import emulator
from b12x.emulator.parse import parse_number

from .harness import THREAD, address, aligned, elementwise, kernel, run


def body_of(text: str) -> list[str]:
    entry = emulator.parse(kernel(text)).entries["k"]
    return [i.name for i in entry.instrs]


def test_statements_share_and_span_lines() -> None:
    assert body_of("mov.b32 %r1, 1; mov.b32 %r2,\n  2;\n add.s32\n%r3, %r1, %r2; ret;") == [
        "mov.b32",
        "mov.b32",
        "add.s32",
        "ret",
    ]


def test_lines_are_those_of_the_text() -> None:
    text = kernel("mov.b32 %r1, 1; /* two\nlines */ mov.b32 %r2, 2;\n// comment ; with { braces }\n\nret;")
    instrs = emulator.parse(text).entries["k"].instrs
    source = text.split("\n")
    for ins in instrs:
        assert ins.text.split()[0] in source[ins.line - 1]


def test_debug_directives_are_dropped() -> None:
    assert body_of(
        '.file 1 "a;b{.py"\n.loc 1 2 3, function_name $L1, inlined_at 1 2 3\nmov.b32 %r1, 1;\n.loc 1 4 5\nret;'
    ) == [
        "mov.b32",
        "ret",
    ]


def test_scopes_repeat_labels_and_registers() -> None:
    """Two copies of one inline assembly loop, a forward label, and an outer register of the same name."""
    out = aligned(32, np.uint32)
    loop = """
    {{
    .reg .pred P1; .reg .b32 n;
    mov.b32 n, 0;
    LAB: add.s32 n, n, 1; setp.ge.s32 P1, n, {count}; @P1 bra.uni DONE; bra.uni LAB;
    DONE: add.s32 {target}, {target}, n; }}
    """
    run(
        THREAD
        + ".reg .b32 n; mov.b32 n, 100; mov.b32 %r1, 0;"
        + loop.format(count=3, target="%r1")
        + loop.format(count=5, target="%r1")
        + "add.s32 %r1, %r1, n;"
        + address("rd1", "out", 4)
        + "st.global.b32 [%rd1], %r1; ret;",
        out=out,
    )
    assert (out == 108).all()


@pytest.mark.parametrize(
    ("text", "value", "bits"),
    [
        ("42", 42, 0),
        ("-7", -7, 0),
        ("0x1F", 31, 0),
        ("0b101", 5, 0),
        ("017", 15, 0),
        ("10U", 10, 0),
        ("0f3F800000", 0x3F800000, 32),
        ("-0f3F800000", 0xBF800000, 32),
        ("0d3FF0000000000000", 0x3FF0000000000000, 64),
        ("1.5", 0x3FF8000000000000, 64),
    ],
)
def test_literals(text: str, value: int, bits: int) -> None:
    number = parse_number(text)
    assert number is not None
    assert (number.value, number.float_bits) == (value, bits)


def test_literals_inside_vectors_and_addresses_with_spaces() -> None:
    out = aligned((32, 4), np.uint32)
    run(
        THREAD + address("rd1", "out", 16) + "st.global.v4.b32 [ %rd1 + 0 ], {1, -1, 0x10, %r99}; ret;",
        out=out,
    )
    assert (out == np.array([[1, 0xFFFFFFFF, 16, lane] for lane in range(32)], np.uint32)).all()


def test_float_literals_convert_to_the_instruction_type() -> None:
    x = np.linspace(-2, 2, 32, dtype=np.float32)
    got = elementwise("fma.rn.f32 %d, %a, 2.0, 0f3F000000;", x, out=np.float32)
    assert np.array_equal(got, x * 2 + np.float32(0.5))


def test_sinks_discard_results() -> None:
    got = elementwise("setp.lt.u32 %p1|_, %a, 5; selp.b32 %d, 1, 0, %p1;", np.arange(32, dtype=np.uint32))
    assert (got == (np.arange(32) < 5)).all()


def test_parameters_are_listed_with_their_offsets() -> None:
    params = ".param .align 64 .b8 m[128], .param .u32 a, .param .u64 .ptr .global .align 16 p,"
    params += ".param .f32 f, .param .b8 c[12]"
    entry = emulator.parse(kernel("ret;", params, directives=".reqntid 64, 2, 1")).entries["k"]
    assert [(p.text, p.size, p.align, p.offset) for p in entry.params] == [
        (".align 64 .b8[128]", 128, 64, 0),
        (".u32", 4, 4, 128),
        (".u64 .ptr .global .align 16", 8, 8, 136),
        (".f32", 4, 4, 144),
        (".b8[12]", 12, 1, 148),
    ]
    assert entry.reqntid == (64, 2, 1)


def test_static_shared_memory_is_counted() -> None:
    module = ".shared .align 4 .b8 small[5];\n.extern .shared .align 16 .b8 dynamic[];"
    entry = emulator.parse(kernel(".shared .align 16 .f32 table[3]; ret;", module=module)).entries["k"]
    assert entry.static_shared == 16 + 12


def test_several_entries_and_constant_tables() -> None:
    module = ".const .align 4 .b32 table[4] = {5, 6, 0x7, 8};\n.global .align 4 .b32 counter;"
    body = (
        "ld.param.b64 %rd1, [o]; mov.u32 %r1, %tid.x; mov.b64 %rd2, table; mul.wide.u32 %rd3, %r1, 4; "
        "add.s64 %rd2, %rd2, %rd3; ld.const.b32 %r2, [%rd2]; add.s64 %rd1, %rd1, %rd3; st.global.b32 [%rd1], %r2; ret;"
    )
    text = kernel(body, ".param .u64 o", module) + kernel("ret;", name="other").split(".address_size 64")[1]
    program = emulator.parse(text)
    assert set(program.entries) == {"k", "other"}
    out = aligned(4, np.uint32)
    from .harness import region

    emulator.launch(
        program, "k", grid=(1,), block=(4,), params=[out.ctypes.data], regions=[region("o", out, "w", False)]
    )
    assert out.tolist() == [5, 6, 7, 8]
    with pytest.raises(emulator.LaunchError, match="2 entries"):
        emulator.launch(program, grid=(1,), block=(4,))


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("frobnicate.b32 %r1, %r2;", "frobnicate"),
        ("add.wild.s32 %r1, %r2, %r3;", "wild"),
        ("add.s32 %r1, %r2;", "operands"),
        ("mov.b32 %r1, %pm0;", "pm0"),
        ("cvt.rn.f32.e9m9 %r1, %r2;", "types"),
        ("ld.global.v3.b32 {%r1,%r2,%r3}, [%rd1];", "v3"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1},{%r1},{%r2},{%f1};", "shape"),
        ("add.s64 %rd1, %rd2, %r1;", "s64"),
        ("call.uni foo;", "call"),
        ("tcgen05.alloc.b32 [%r1], 32;", "tcgen05"),
        ("wgmma.fence.sync.aligned;", "wgmma"),
    ],
)
def test_unknown_forms_are_refused_by_name_and_line(text: str, needle: str) -> None:
    source = kernel(f"ret;\n{text}")
    line = next(k for k, s in enumerate(source.split("\n"), 1) if s.strip() == text)
    with pytest.raises(emulator.EmulatorError, match=needle) as err:
        emulator.parse(source)
    assert f"line {line}" in str(err.value)
    assert isinstance(err.value, emulator.UnsupportedInstruction | emulator.ParseError)


def test_undeclared_names_are_errors() -> None:
    with pytest.raises(emulator.ParseError, match="nowhere"):
        emulator.parse(kernel("bra nowhere;"))
    with pytest.raises(emulator.EmulatorError, match="r200"):
        emulator.parse(kernel("mov.b32 %r1, %r200;"))
