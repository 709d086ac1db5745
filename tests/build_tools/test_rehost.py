"""Rehost: expansions mean what the originals mean, and the result is Hopper code, line for line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from b12x._runtime.cuda_target import REHOSTS
from b12x._runtime.pack import Pack
from b12x.build_tools.rehost import TARGET, RehostError, assemble, rehost_pack, rewrite
from b12x.build_tools.rehost.__main__ import main
from b12x.build_tools.rehost.cases import Case, all_cases, differences, emulate, expected_results
from b12x.build_tools.rehost.scan import instructions, split

CASES = {case.name: case for case in all_cases()}
#: One case of each expansion and each shape of operands goes through the assembler; all of them do on the GPU machine.
ASSEMBLED = [case for index, case in enumerate(CASES.values()) if index % 8 == 0]

MODULE = """\
.version 9.4
.target sm_120a
.address_size 64
.visible .entry k(
\t.param .u64 k_0
)
.reqntid 32, 1, 1
.minnctapersm 1
{{
\t.reg .pred %p<4>;
\t.reg .b8 %b<4>;
\t.reg .b16 %h<4>;
\t.reg .b32 %r<40>;
\t.reg .b64 %rd<8>;
{body}
\tret;
}}
"""


def module(body: str) -> str:
    return MODULE.format(body=body)


@pytest.mark.parametrize("name", CASES)
def test_expansion_gives_the_same_bits(name: str) -> None:
    case = CASES[name]
    words = case.inputs(np.random.default_rng([len(name), *name.encode()]))
    expected = expected_results(case, words)
    bounds = emulate(case.ptx, case.magnitudes(words), case.results) if case.magnitudes else None
    rewritten = rewrite(case.ptx)
    assert rewritten.expansions
    found = emulate(rewritten.ptx, words, case.results)
    wrong = differences(case, found, expected, bounds)
    assert not len(wrong), _report(case, words, found, expected, wrong)


def _report(case: Case, words: np.ndarray, found: np.ndarray, expected: np.ndarray, wrong: np.ndarray) -> str:
    thread, result = wrong[0]
    inputs = [hex(word) for word in words[thread]]
    return (
        f"{len(wrong)} of {found.size} results of {case.name} differ, first thread {thread}, result {result}: "
        f"{found[thread, result]:#010x}, expected {expected[thread, result]:#010x}, inputs {inputs}"
    )


@pytest.mark.parametrize("case", ASSEMBLED, ids=lambda case: case.name)
def test_expansion_assembles(case: Case) -> None:
    if "redux" not in case.name:  # which is on SM100 only
        assemble(case.ptx, "sm_120a")
    assemble(rewrite(case.ptx).ptx)


def test_comparison_sees_a_wrong_bit() -> None:
    for compare in ("bits", "floats", "sums", "half sums"):
        case = next(c for c in CASES.values() if c.compare == compare)
        words = case.inputs(np.random.default_rng(0))
        expected = expected_results(case, words)
        bounds = np.abs(expected.view(np.float32)).view(np.uint32) if compare == "sums" else None
        found = expected.copy()
        row = int(np.flatnonzero(np.isfinite(expected.view(np.float32)).all(axis=1) & (expected != 0).all(axis=1))[0])
        found[row, 0] ^= np.uint32(0x00400040)
        assert [row, 0] in differences(case, found, expected, bounds).tolist()


def test_every_shipped_kernel_becomes_hopper_code(base_pack: Path, tmp_path: Path) -> None:
    source = Pack.open(base_pack)
    result = rehost_pack(base_pack, tmp_path / "rehosted", jobs=2)
    assert result.archs == (TARGET,)
    assert result.keys() == source.keys()
    for key in sorted(source.keys()):
        before, after = source.get(key), result.get(key)
        assert before is not None
        assert after is not None
        assert (after.ptx, after.fingerprint, after.entry) == (before.ptx, before.fingerprint, before.entry)
        assert list(after.cubins) == [TARGET]
        assert result.cubin(after, TARGET)
        assert result.ptx(after) == source.ptx(before)


def test_command_names_the_kernel_it_cannot_find(
    base_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(base_pack), "-o", str(tmp_path / "out"), "--key", "gemm.none:a=1"]) == 1
    assert "has no kernel gemm.none:a=1" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), "-o", str(tmp_path / "out")]) == 1
    assert "no pack at" in capsys.readouterr().err


def test_loader_has_a_target_of_this_name() -> None:
    assert list(REHOSTS) == [TARGET]


def test_lines_stay_and_the_rest_is_untouched() -> None:
    body = """\
\t// begin inline asm
\t{ .reg .b8 b0; cvt.rn.satfinite.e2m1x2.f32 b0, %r1,
\t\t%r2; cvt.u32.u8 %r3, b0; }
\t// end inline asm; add.rn.f32x2 is not here
\tadd.s32 \t%r4, %r3, 1; /* fma.rn.f32x2 */ add.s32 %r5, %r4, 1;
L_1:
\tadd.rn.f32x2 \t%rd1, %rd2, %rd3;"""
    before = module(body)
    after = rewrite(before)
    assert after.expansions == {"narrow conversion": 1, "f32x2 arithmetic": 1}
    old, new = before.splitlines(), after.ptx.splitlines()
    assert len(old) == len(new)
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    assert [old[i].strip()[:12] for i in changed] == [".target sm_1", "{ .reg .b8 b", "%r2; cvt.u32", "add.rn.f32x2"]
    assemble(after.ptx)


def test_guard_becomes_a_branch_around_the_scope() -> None:
    text = rewrite(module("@%p1 add.rn.f32x2 %rd1, %rd2, %rd3;\n@!%p2 mul.f32x2 %rd1, %rd1, %rd3;")).ptx
    assert re.search(r"\{ [^{}]*@!%p1 bra (\$rehost_1); .*\1: \}", text)
    assert re.search(r"\{ [^{}]*@%p2 bra (\$rehost_2); .*\1: \}", text)
    assemble(text)


def test_selectors_may_be_registers() -> None:
    text = module(
        "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0 "
        "{%r1, %r2, %r3, %r4}, {%r5, %r6, %r7, %r8}, {%r9, %r10}, {%r1, %r2, %r3, %r4}, %r11, {%h1, 0}, %r12, {2, %h2};"
    )
    assemble(rewrite(text).ptx)


def test_masked_elements_of_wide_accesses() -> None:
    text = rewrite(
        module(
            "ld.global.nc.L1::no_allocate.L2::evict_last.L2::128B.v8.b32 "
            "{%r1, %r2, %r3, _, %r5, %r6, %r7, _}, [ %rd1 + 32 ];\n"
            "st.global.L2::cache_hint.v8.b32 [%rd1+-64], {%r1, _, %r3, %r4, %r5, %r6, %r7, %r8}, %rd2;\n"
            "st.global.v4.f64 [%rd1], {%rd2, %rd3, %rd4, %rd5};"
        )
    ).ptx
    assert "[%rd1+48]" in text
    assert "evict_last" not in text
    assert "st.global.L2::cache_hint.b32 [%rd1+-64], %r1, %rd2;" in text
    assert "st.global.L2::cache_hint.v4.b32 [%rd1+-48], {%r5, %r6, %r7, %r8}, %rd2;" in text
    assemble(text)


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];", "cluster launch"),
        ("cvt.rn.satfinite.s2f6x2.f32 %h0, %r1, %r2;", "conversion"),
        ("cvt.rs.satfinite.e2m1x4.f32 %h0, {%r1, %r2, %r3, %r4}, %r5;", "conversion"),
        (
            "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4 [%r1], [%rd1, {%r2, %r3, %r4, %r5}], [%r4];",
            "tensor copy mode",
        ),
        (
            "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32 {%r1}, {%r5};",
            "sparse MMA",
        ),
    ],
)
def test_what_hopper_lacks_is_refused_by_name_and_line(statement: str, what: str) -> None:
    with pytest.raises(RehostError) as refused:
        rewrite(module(f"add.s32 %r1, %r2, 1;\n\n\t{statement}"))
    assert str(refused.value).startswith(f"line 17: {statement.split()[0]}: ")
    assert what in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".version 9.4\n", "0 .target lines"),
        (".target sm_120a\n.target sm_121a\n", "2 .target lines"),
        (module("add.s32 %r1, %r2").replace(";\n}", "\n}").replace("ret;", "ret"), "statement without ';'"),
        (module("12 + 3;"), "line 15: not an instruction"),
        (module(".section .debug_info { .b8 0 }"), "debug sections"),
        (module("ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1 - 32];"), "cannot be split"),
        (
            module("mma.sync.aligned.m16n8k64.row.col.kind::new.f32.e2m1.e2m1.f32 {%r1}, {%r2}, {%r3}, {%r4};"),
            "line 15: no expansion for mma.sync.aligned.m16n8k64.row.col.kind::new",
        ),
    ],
)
def test_text_that_cannot_be_rewritten(text: str, message: str) -> None:
    with pytest.raises(RehostError, match=re.escape(message)):
        rewrite(text)


def test_assembler_names_the_line_of_the_original() -> None:
    text = module("add.rn.f32x2 %rd1, %rd2, %rd3;\nadd.rn.unknown.f32 %r1, %r2, %r3;")
    with pytest.raises(RehostError, match="kernel x: ptxas does not accept it for sm_90a:\nline 16"):
        assemble(rewrite(text).ptx, about="kernel x")


def test_scanner_finds_instructions() -> None:
    text = module(
        "\t.shared .align 16 .b8 rows[64];\n"
        "\t{ .reg .b32 t; @!%p1 mov.b32 {%h1, %h2}, t; } L: bra.uni L;\n"
        "\tcall (%r1), helper, (%r2, %r3);\n\tts: .branchtargets L, L;\n\tbar.sync 0;"
    )
    found = list(instructions(text))
    assert [ins.name for ins in found] == ["mov.b32", "bra.uni", "call", "bar.sync", "ret"]
    assert (found[0].guard, found[0].negated, found[0].operands) == ("%p1", True, ("{%h1, %h2}", "t"))
    assert [ins.line for ins in found] == [16, 16, 17, 19, 20]
    assert split("{a, b}, [c + 4], d|p, (e, f)") == ("{a, b}", "[c + 4]", "d|p", "(e, f)")
    assert split("") == ()
