"""Every operator on a few lines of PTX: what it changes, and what it leaves alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from b12x import emulator
from b12x.build_tools.mutants.draw import OPERATORS, mutants, order
from b12x.build_tools.mutants.kernel import Kernel
from tests.emulator.harness import kernel as entry

SHARED = ".shared .align 1024 .b8 buffer[4096];"
POINTER = "ld.param.u64 %rd0, [p];"
TRY_WAIT = "mbarrier.try_wait.parity.shared::cta.b64 done, [buffer]"
WAIT = f"{{ .reg .pred done; WAIT: {TRY_WAIT}, %r1; @done bra.uni DONE; bra.uni WAIT; DONE: }}"
MMA = (
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
    "{%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r2}, {%r4, %r5}, {%f0, %f1, %f2, %f3}, "
    "{%r6}, {0, 1}, {%r7}, {0, 3};"
)
#: What makes the MMA's result count.
SINK = "st.shared.v4.b32 [buffer], {%f0, %f1, %f2, %f3};"


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@dataclass(frozen=True)
class Example:
    """A body, and what its mutants show in order: the changed statement, or "" for a dropped one."""

    body: str
    expected: list[str]


def added(register: str, delta: int, statement: str) -> str:
    """A statement whose operand ``FAULT`` is a register changed before it."""
    text = statement.replace("FAULT", "b12x_fault")
    return f"{{ .reg .b32 b12x_fault; add.s32 b12x_fault, {register}, {delta}; {text} }}"


EXAMPLES: dict[str, Example] = {
    "drop-barrier": Example(
        "bar.sync 0; bar.warp.sync -1; barrier.sync 1, 64; bar.red.popc.u32 %r1, 0, %p1;", ["", "", ""]
    ),
    "skip-wait": Example(WAIT, ["setp.eq.u32 done, 0, 0;"]),
    "wrong-parity": Example(
        WAIT,
        [added("%r1", 1, f"{TRY_WAIT}, FAULT;").replace("add.s32", "xor.b32")],
    ),
    "drop-commit": Example("cp.async.commit_group; cp.async.bulk.commit_group;", ["", ""]),
    "drop-group-wait": Example("cp.async.wait_group 1; cp.async.wait_all; griddepcontrol.wait;", ["", "", ""]),
    "drop-fence": Example(
        "fence.proxy.async.shared::cta; fence.mbarrier_init.release.cluster; membar.gl;", ["", "", ""]
    ),
    "drop-expect": Example(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [buffer], %r1;"
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [buffer], 64;",
        ["mbarrier.arrive.shared::cta.b64 _, [buffer];", ""],
    ),
    "change-expect": Example(
        "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [buffer], 64;",
        [
            added("64", delta, "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [buffer], FAULT;")
            for delta in (16, -16)
        ],
    ),
    "drop-arrive": Example(
        "mbarrier.arrive.shared::cta.b64 _, [buffer]; cp.async.mbarrier.arrive.noinc.shared::cta.b64 [buffer];"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [buffer], 64;",
        ["", ""],
    ),
    "change-arrivals": Example(
        "mbarrier.init.shared::cta.b64 [buffer], 4;",
        [added("4", delta, "mbarrier.init.shared::cta.b64 [buffer], FAULT;") for delta in (1, -1)],
    ),
    "change-ring": Example(
        "setp.eq.b32 %p1, %r1, 8; selp.b32 %r2, 0, %r1, %p1; st.shared.b32 [buffer], %r2;"
        "setp.eq.b32 %p2, %r1, 8; selp.b32 %r2, 7, %r1, %p2; st.shared.b32 [buffer], %r2;",
        ["setp.eq.b32 %p1, %r1, 9;", "setp.eq.b32 %p1, %r1, 7;"],
    ),
    "early-release": Example(
        f"setp.ne.b32 %p1, %r0, 0; {WAIT} ld.shared.b32 %r2, [buffer]; bar.warp.sync -1; @%p1 bra SKIP;"
        "add.s32 %r3, %r4, 8; mbarrier.arrive.shared::cta.b64 _, [%r3]; SKIP: st.shared.b32 [buffer+8], %r2;",
        ["(moved up before) ld.shared.b32 %r2, [buffer];"],
    ),
    "swap-scales": Example(MMA + SINK, [changed(MMA, "{%r6}, {0, 1}, {%r7}", "{%r7}, {0, 1}, {%r6}")]),
    "shift-selector": Example(MMA + SINK, [changed(MMA, "{0, 1}", "{0, 0}"), changed(MMA, "{0, 3}", "{0, 0}")]),
    "swap-fragment": Example(
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [buffer];" + MMA + SINK,
        [
            "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5, %r4}, [buffer];",
            *(
                changed(MMA, "{%r0, %r1, %r2, %r2}", fragment)
                for fragment in (
                    "{%r1, %r0, %r2, %r2}",
                    "{%r2, %r1, %r0, %r2}",
                    "{%r2, %r1, %r2, %r0}",
                    "{%r0, %r2, %r1, %r2}",
                    "{%r0, %r2, %r2, %r1}",
                )
            ),
            changed(MMA, "{%r4, %r5}", "{%r5, %r4}"),
        ],
    ),
    "shift-lane": Example(
        "shfl.sync.bfly.b32 %r1, %r0, 2, 31, -1; prmt.b32 %r2, %r1, %r0, 0x5140;"
        "shfl.sync.idx.b32 %r3, %r0, %r2, 31, -1; st.shared.v2.b32 [buffer], {%r2, %r3};",
        ["shfl.sync.bfly.b32 %r1, %r0, 3, 31, -1;", "prmt.b32 %r2, %r1, %r0, 20801;"],
    ),
    "swap-cvt": Example(
        "cvt.rn.f16x2.f32 %r1, %f1, %f2; cvt.rn.f16x2.f32 %r2, %f1, %f1; cvt.u32.u16 %r3, %rs1;"
        "st.shared.v4.b32 [buffer], {%r1, %r2, %r3, %r3};",
        ["cvt.rn.f16x2.f32 %r1, %f2, %f1;"],
    ),
    "swap-halves": Example(
        "mov.b64 %rd1, {%r1, %r2}; mov.b64 {%r3, %r4}, %rd1; mov.b64 {_, %r5}, %rd1; mov.b64 %rd2, {%r1, %r1};"
        "st.shared.v4.b32 [buffer], {%r3, %r4, %r5, %r5}; st.shared.b64 [buffer], %rd2;",
        ["mov.b64 %rd1, {%r2, %r1};", "mov.b64 {%r4, %r3}, %rd1;"],
    ),
    "flip-guard": Example(
        "@%p1 st.shared.b32 [buffer], %r1; @!%p2 ret;", ["@!%p1 st.shared.b32 [buffer], %r1;", "@%p2 ret;"]
    ),
    "flip-select": Example("selp.b32 %r1, 1, 0, %p1; st.shared.b32 [buffer], %r1;", ["selp.b32 %r1, 0, 1, %p1;"]),
    "drop-zero": Example(
        # Of two equal zeros neither is missed, and 1 is none.
        "mov.b32 %r1, 0; mov.b32 %r1, 0; mov.b32 %f1, 0f00000000; mov.b64 %rd1, {%f1, %f1}; mov.b32 %r2, 1;"
        "st.shared.v2.b32 [buffer], {%r1, %r2}; st.shared.b64 [buffer], %rd1;",
        ["", ""],
    ),
    "drop-store": Example(
        "st.shared.b32 [buffer], 0; ld.shared.b32 %r1, [buffer];"
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [buffer], {%r1};",
        ["", ""],
    ),
    "drop-copy": Example(
        f"{POINTER} cp.async.ca.shared.global [buffer], [%rd0], 8; cp.async.commit_group;"
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [buffer], [%rd0], 16, [buffer];",
        ["", ""],
    ),
    "off-by-one": Example(
        # The pair that rounds a signed division, and a comparison of constants that gives the same, stay.
        "setp.lt.s32 %p1, %r1, %r2; @%p1 ret; setp.eq.u32 %p2, %r1, 0; @%p2 ret; setp.ge.u32 %p3, %r1, 5; @%p3 ret;"
        "setp.lt.s32 %p4, %r1, 0; setp.ne.b32 %p5, %r1, %r2; and.pred %p6, %p4, %p5; selp.b32 %r3, -1, 0, %p6;"
        "mov.b32 %r4, 1; setp.ne.s32 %p7, %r4, 0; @%p7 ret; setp.lt.f32 %p8, %f1, %f2; @%p8 ret;"
        "st.shared.b32 [buffer], %r3;",
        [
            "setp.le.s32 %p1, %r1, %r2;",
            "setp.eq.u32 %p2, %r1, 1;",
            "setp.gt.u32 %p3, %r1, 5;",
            "setp.ge.u32 %p3, %r1, 6;",
            "setp.ge.u32 %p3, %r1, 4;",
            "setp.ne.s32 %p7, %r4, 1;",
        ],
    ),
    "misalign": Example(
        f"{POINTER} ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd0+16]; st.shared.b32 [buffer], %r1;"
        "st.shared.v2.b32 [buffer], {%r1, %r2}; cp.async.ca.shared.global [buffer], [%rd0], 8;",
        [
            "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0+20];",
            "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0+24];",
            "st.shared.v2.b32 [buffer+4], {%r1, %r2};",
            "cp.async.ca.shared.global [buffer+4], [%rd0], 8;",
            "cp.async.ca.shared.global [buffer], [%rd0+4], 8;",
        ],
    ),
    "change-offset": Example(
        "mov.b32 %r1, buffer; mad.lo.s32 %r2, %r0, 640, %r1; add.s32 %r3, %r2, 1024; add.s32 %r4, %r3, 24;"
        "add.s32 %r5, %r0, 32; st.shared.v2.b32 [%r4], {%r5, %r5};",
        [
            "add.s32 %r3, %r2, 1040;",
            "add.s32 %r3, %r2, 1008;",
            "add.s32 %r4, %r3, 32;",
            "add.s32 %r4, %r3, 16;",
        ],
    ),
    "change-stride": Example(
        "mad.lo.s32 %r1, %r0, 80, %r2; shl.b32 %r2, %r1, 3; mul.wide.u32 %rd1, %r2, 512; mul.rn.f32 %f1, %f2, %f3;"
        "st.shared.b64 [buffer], %rd1; st.shared.b32 [buffer], %f1;",
        [
            "mad.lo.s32 %r1, %r0, 96, %r2;",
            "mad.lo.s32 %r1, %r0, 64, %r2;",
            "shl.b32 %r2, %r1, 4;",
            "shl.b32 %r2, %r1, 2;",
            "mul.wide.u32 %rd1, %r2, 1024;",
        ],
    ),
    "narrow-address": Example(
        f"{POINTER} mul.wide.u32 %rd1, %r0, 4; add.s64 %rd2, %rd1, %rd0; add.s64 %rd3, %rd1, 4; "
        "st.global.b64 [%rd2], %rd3;",
        ["add.s64 %rd2, %rd1, %rd0; and.b64 %rd2, %rd2, 4294967295;"],
    ),
}


def scanned(body: str) -> Kernel:
    return Kernel(entry(body, params=".param .u64 p", module=SHARED))


def test_every_operator_has_an_example():
    assert sorted(EXAMPLES) == sorted(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_operator(operator):
    """What it makes of the example, in the order of the text; the results parse, and differ in that place only."""
    example = EXAMPLES[operator]
    kernel = scanned(example.body)
    emulator.parse(kernel.ptx)
    found = list(mutants("key", kernel, [operator]))
    assert [mutant.change.after for mutant in found] == example.expected
    for mutant in found:
        text = kernel.apply(mutant.change)
        emulator.parse(text)
        assert text != kernel.ptx
        assert mutant.change.before in " ".join(kernel.ptx.split())
    assert len({mutant.name for mutant in found}) == len(found)


def test_early_release_moves_the_branch_too():
    """The arrive, its address and the branch around them stand between the wait and the first read."""
    kernel = scanned(EXAMPLES["early-release"].body)
    (mutant,) = mutants("key", kernel, ["early-release"])
    text = kernel.apply(mutant.change)
    moved = "{ @%p1 bra b12x_fault;add.s32 %r3, %r4, 8; mbarrier.arrive.shared::cta.b64 _, [%r3]; b12x_fault: }"
    assert f"DONE: }} {moved} ld.shared.b32 %r2, [buffer]; bar.warp.sync -1;  SKIP:" in text


def test_early_release_needs_its_operands():
    """An arrive whose address is computed after the wait cannot move up."""
    body = f"{WAIT} ld.shared.b32 %r3, [buffer]; mbarrier.arrive.shared::cta.b64 _, [%r3];"
    assert list(mutants("key", scanned(body), ["early-release"])) == []


def test_dead_results_are_left_alone():
    """A change of what nothing reads makes no mutant."""
    assert list(mutants("key", scanned("selp.b32 %r1, 1, 0, %p1; cvt.rn.f16x2.f32 %r2, %f1, %f2;"))) == []


def test_zero_under_a_guard_that_always_holds():
    """What a load surely overwrites needs no zero; what it may leave does."""
    load = "setp.ne.s32 %p1, {}, 0; mov.b32 %r2, 0; @%p1 ld.shared.b32 %r2, [buffer]; st.shared.b32 [buffer], %r2;"
    assert list(mutants("key", scanned("mov.b32 %r1, 1;" + load.format("%r1")), ["drop-zero"])) == []
    assert len(list(mutants("key", scanned(load.format("%r3")), ["drop-zero"]))) == 1


def test_equal_statements_are_counted():
    found = list(mutants("key", scanned("bar.sync 0; bar.sync 0;"), ["drop-barrier"]))
    assert [mutant.change.nth for mutant in found] == [1, 2]


def test_order_follows_the_seed_and_leaves_no_operator_out():
    body = "bar.sync 0; membar.gl; st.shared.b32 [buffer], 0; st.shared.b32 [buffer+4], 0; st.shared.b32 [buffer+8], 0;"
    kernels = {"key": scanned(body)}
    drawn = [order(kernels, seed) for seed in range(8)]
    assert order(kernels, 3) == drawn[3]
    assert len({tuple(mutant.name for mutant in mutants) for mutants in drawn}) > 1
    for sample in drawn:
        assert {mutant.operator for mutant in sample[:3]} == {"drop-barrier", "drop-fence", "drop-store"}
        assert len(sample) == 5
