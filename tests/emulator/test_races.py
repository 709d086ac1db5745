"""Races on shared memory and missing proxy fences: found in lockstep, and silent on code that synchronises."""

from __future__ import annotations

import numpy as np
import pytest

from b12x import emulator

from .harness import THREAD, aligned, kernel, region, run

SHARED = ".shared .align 1024 .b8 buffer[8192];\n.shared .align 8 .b64 bar[8];"
MODES = [
    emulator.Options(),
    emulator.Options(races="strict"),
    emulator.Options(copies="eager"),
    emulator.Options(schedule="random", seed=3),
]
STRICT = MODES[1]
PROLOG = THREAD + """
    shr.u32 %r98, %r99, 5; and.b32 %r97, %r99, 31; mov.b32 %r90, buffer; mov.b32 %r80, bar;
    mad.lo.u32 %r91, %r99, 4, %r90; setp.eq.u32 %p10, %r99, 0; setp.eq.u32 %p11, %r97, 0; setp.eq.u32 %p12, %r98, 0;
    xor.b32 %r1, %r99, 32; mad.lo.u32 %r92, %r1, 4, %r90; xor.b32 %r2, %r99, 1; mad.lo.u32 %r93, %r2, 4, %r90;
"""  # fmt: skip
INIT = "@!%p10 bra I; mbarrier.init.shared.b64 [%r80], {0}; mbarrier.init.shared.b64 [%r80+8], {0}; {1} I: {2}"
FENCED = INIT.format("{0}", "fence.mbarrier_init.release.cluster;", "bar.sync 0;")
SPIN = "{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r80+{0}], {1}; @P bra D; bra W; D: }}"


def check(body: str, wrong: str | None, options: emulator.Options = MODES[0], **more: object) -> None:
    """Runs two warps; ``wrong`` is the message of the race, None if there is none."""
    more.setdefault("block", 64)
    code = PROLOG + body + "ret;"
    if wrong is None:
        run(code, module=SHARED, options=options, **more)  # type: ignore[arg-type]
        return
    with pytest.raises(emulator.SharedRace, match=wrong):
        run(code, module=SHARED, options=options, **more)  # type: ignore[arg-type]


# Threads

STORE, OTHER = "st.shared.b32 [%r91], %r99;", "ld.shared.b32 %r5, [%r92];"
NEIGHBOUR = "ld.shared.b32 %r5, [%r93];"


@pytest.mark.parametrize("sync", ["bar.sync 0;", "barrier.sync 3, 64;", "bar.red.popc.u32 %r7, 1, 64, %p10;"])
@pytest.mark.parametrize("options", MODES)
def test_barriers_order_warps(sync: str, options: emulator.Options) -> None:
    check(STORE + sync + OTHER + sync + STORE, None, options)


def test_a_race_names_both_accesses() -> None:
    wrong = (
        r"line \d+ `ld.shared.b32 %r5, \[%r92\]`, CTA \(0, 0, 0\), thread \(0, 0, 0\) \(warp 0, lane 0\) reads shared "
        r"address 0x480 \(buffer\+128\), which warp 1 \(lane 0\) has written at PTX line \d+ `st.shared.b32 .*`, "
        r"with no barrier"
    )
    check(STORE + OTHER, wrong)


@pytest.mark.parametrize(
    "body",
    [
        STORE + "bar.sync 0;" + OTHER + STORE,  # overwritten before the other warp has read
        STORE + "bar.warp.sync -1;" + OTHER,
        "st.shared.b32 [%r90], %r99;",  # by the same instruction
        "bar.sync 0; @%p12 bra X; st.shared.b8 [%r90+2], 1; X: @!%p12 bra Y; ld.shared.b32 %r5, [%r90]; Y:",
        STORE + "@%p12 bra A; bar.sync 1, 32; A:" + OTHER,  # a barrier of one warp
    ],
)
def test_unordered_warps(body: str) -> None:
    check(body, "with no barrier between the two|with no bar.warp.sync")


def test_neighbouring_bytes_do_not_race() -> None:
    check("mad.lo.u32 %r5, %r99, 1, %r90; st.shared.b8 [%r5], 7; ld.shared.b8 %rs1, [%r5];", None)


def test_equal_values_do_not_race() -> None:
    """Several warps raise the same flag; a reader still has to be ordered after them."""
    check("st.shared.b32 [%r90], 1; bar.sync 0; ld.shared.b32 %r5, [%r90];", None)
    check("st.shared.b32 [%r90], 1; bar.warp.sync -1; ld.shared.b32 %r5, [%r90];", "has written")


@pytest.mark.parametrize("options", MODES)
def test_lanes_of_one_warp(options: emulator.Options) -> None:
    """Only bar.warp.sync and barriers order the lanes of a warp; a shuffle does not."""
    check(STORE + "bar.warp.sync -1;" + NEIGHBOUR + "bar.warp.sync -1;" + STORE, None, options)
    check(STORE + "bar.sync 0;" + NEIGHBOUR + "bar.sync 0;" + STORE, None, options)
    check(STORE + "ld.shared.b32 %r5, [%r91];" + STORE, None, options)
    shuffle = "shfl.sync.idx.b32 %r6, %r99, 0, 31, -1;"
    check(STORE + shuffle + NEIGHBOUR, r"lane 1\) has written at .* with no bar\.warp\.sync", options)
    check(STORE + "bar.warp.sync -1;" + NEIGHBOUR + STORE, r"has read at .* with no bar\.warp\.sync", options)


def test_collective_accesses() -> None:
    rows = "mad.lo.u32 %r94, %r97, 16, %r90; st.shared.v4.b32 [%r94], {1, 2, 3, 4}; {}"
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r94];"
    store = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r94], {%r97, %r97, %r97, %r97};"
    check(rows.replace("{}", "bar.warp.sync -1;") + load, None, block=32)
    check(rows.replace("{}", "") + load, "ldmatrix.*has written at", block=32)
    check("mad.lo.u32 %r94, %r97, 16, %r90;" + store + "bar.warp.sync -1; ld.shared.b32 %r5, [%r94];", None, block=32)
    check("mad.lo.u32 %r94, %r97, 16, %r90;" + store + "ld.shared.b32 %r5, [%r94];", "stmatrix", block=32)


# mbarriers


@pytest.mark.parametrize("options", MODES)
def test_mbarriers_order_warps(options: emulator.Options) -> None:
    everyone = FENCED.format(64) + STORE + "mbarrier.arrive.shared.b64 _, [%r80];" + SPIN.format(0, 0)
    check(everyone + OTHER, None, options)
    one_lane = FENCED.format(2) + STORE + "{} @%p11 mbarrier.arrive.shared.b64 _, [%r80];" + SPIN.format(0, 0)
    check(one_lane.replace("{}", "bar.warp.sync -1;") + OTHER, None, options)
    check(one_lane.replace("{}", "") + OTHER, "has written", options)


def test_a_lane_releases_its_own_accesses() -> None:
    """Lane 0 stores and arrives: what it stored is ordered, what the others stored is not."""
    store = FENCED.format(2) + "@%p11 st.shared.b32 [%r91], %r99; @%p11 mbarrier.arrive.shared.b64 _, [%r80];"
    for options in MODES:
        check(store + SPIN.format(0, 0) + "@%p11 ld.shared.b32 %r5, [%r92];", None, options)
    check(
        FENCED.format(2) + STORE + "@%p11 mbarrier.arrive.shared.b64 _, [%r80];" + SPIN.format(0, 0) + OTHER,
        "lane 1\\) has written",
    )


def test_releasing_what_other_lanes_have_loaded() -> None:
    """Many kernels let one lane arrive for the loads of its warp; only the strict check wants bar.warp.sync."""
    body = FENCED.format(2) + STORE + "bar.sync 0; ld.shared.b32 %r5, [%r91]; {}"
    body += "@%p11 mbarrier.arrive.shared.b64 _, [%r80];" + SPIN.format(0, 0) + "st.shared.b32 [%r92], 77;"
    check(body.replace("{}", ""), None)
    check(body.replace("{}", "bar.warp.sync -1;"), None, STRICT)
    check(body.replace("{}", ""), "has read", STRICT)


def test_a_relaxed_arrival_needs_a_fence() -> None:
    body = FENCED.format(64) + STORE + "{} mbarrier.arrive.relaxed.cta.shared.b64 _, [%r80];" + SPIN.format(0, 0)
    check(body.replace("{}", "fence.acq_rel.cta;") + OTHER, None)
    check(body.replace("{}", "") + OTHER, "has written")


def test_an_mbarrier_is_used_after_its_initialisation() -> None:
    body = INIT.format(64, "", "") + "bar.warp.sync -1;" + "{} mbarrier.arrive.shared.b64 _, [%r80]; bar.sync 0;"
    check(body.replace("{}", "bar.sync 0;"), None)
    check(body.replace("{}", ""), r"uses the mbarrier at .*\(bar\+0\), which warp 0 \(lane 0\) has initialised")


# Strong accesses


@pytest.mark.parametrize("options", [MODES[0], MODES[3]])
def test_flags_pass_on_order(options: emulator.Options) -> None:
    body = "@%p10 st.shared.b32 [%r90+256], 0; bar.sync 0; @!%p12 bra READ; st.shared.b32 [%r91], %r99;"
    body += "bar.warp.sync -1; @%p10 st.release.cta.shared.b32 [%r90+256], 1; bra END;"
    body += "READ: ld.acquire.cta.shared.b32 %r5, [%r90+256]; setp.eq.u32 %p1, %r5, 0; @%p1 bra READ;"
    check(body + OTHER + "END:", None, options)


def test_atomics_race_with_ordinary_accesses_only() -> None:
    count = "@%p10 st.shared.b32 [%r90], 0; {} red.shared.add.u32 [%r90], 1; {} ld.shared.b32 %r5, [%r90];"
    check(count.replace("{}", "bar.sync 0;"), None)
    check(count.replace("{}", "bar.sync 0;", 1).replace("{}", ""), "has written at PTX line .* `red.shared")
    check(count.replace("{}", ""), "which warp 0 .lane 0. has written")


# Copies

BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r90], [%src], 256, [%r80];"
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r80], 256;"
SPINS = SPIN.format(0, 0)


@pytest.mark.parametrize("options", MODES)
def test_bulk_loads(options: emulator.Options) -> None:
    src = aligned(64, np.uint32, 3)
    load = "@!%p10 bra L; " + EXPECT + BULK + "L:"
    check(FENCED.format(1) + load + SPINS + OTHER, None, options, src=src)
    # the load lands because warp 0 waits; warp 1 has not waited
    skip = "@%p12 bra M; mbarrier.test_wait.parity.relaxed.cta.shared.b64 %p1, [%r80], 0; M: @!%p12 bra N;" + SPINS
    check(FENCED.format(1) + load + skip + "N: ld.shared.b32 %r5, [%r91];", "copy of PTX line .* has written", src=src)


def test_a_stage_that_is_refilled_too_early() -> None:
    """Both warps have to arrive before the copy overwrites what they read."""
    src = aligned(64, np.uint32, 3)
    body = STORE + FENCED.format(2) + OTHER + "bar.warp.sync -1; {}"
    release = "@%p11 mbarrier.arrive.shared.b64 _, [%r80+8];"
    load = "@!%p12 bra X;" + SPIN.format(8, 0) + "@!%p10 bra X; mbarrier.arrive.expect_tx.shared.b64 _, [%r80], 256;"
    load += "mbarrier.arrive.shared.b64 _, [%r80];" + BULK + "X:" + SPINS
    for options in MODES:
        check(body.replace("{}", release) + load, None, options, src=src)
    early = "@%p10 mbarrier.arrive.shared.b64 _, [%r80+8], 2;"
    check(body.replace("{}", early) + load, r"bulk.* overwrites .* which warp 1 .* has read at", src=src)


@pytest.mark.parametrize("options", MODES)
def test_bulk_stores(options: emulator.Options) -> None:
    copy = "@!%p10 bra X; cp.async.bulk.global.shared::cta.bulk_group [%out], [%r90], 256; "
    copy += "cp.async.bulk.commit_group; {} X: {} st.shared.b32 [%r91], 5; @!%p10 bra Y;"
    copy += "cp.async.bulk.wait_group 0; Y:"
    wait = "cp.async.bulk.wait_group.read 0;"
    good = STORE + "fence.proxy.async.shared::cta; bar.sync 0;" + copy
    check(good.replace("{}", wait, 1).replace("{}", "bar.sync 0;"), None, options, out=aligned(64, np.uint32))
    check(good.replace("{}", "", 1).replace("{}", "bar.sync 0;"), "has read and", options, out=aligned(64, np.uint32))
    check(good.replace("{}", wait, 1).replace("{}", ""), "has read and", options, out=aligned(64, np.uint32))
    unordered = STORE + "fence.proxy.async.shared::cta;" + copy.replace("{}", "")
    check(unordered, r"which warp \d .* has written", options, out=aligned(64, np.uint32))


CP_ASYNC = "mul.wide.u32 %rd1, %r99, 4; add.s64 %rd1, %rd1, %src; cp.async.ca.shared.global [%r91], [%rd1], 4;"
CP_ASYNC += "cp.async.commit_group;"


@pytest.mark.parametrize("options", MODES)
def test_cp_async(options: emulator.Options) -> None:
    src = aligned(64, np.uint32, 3)
    check(CP_ASYNC + "cp.async.wait_group 0; bar.sync 0;" + OTHER, None, options, src=src)
    check(CP_ASYNC + "cp.async.wait_group 0;" + OTHER, "cp.async.ca", options, src=src)
    check(
        CP_ASYNC + "cp.async.wait_group 1; bar.sync 0;" + OTHER + "cp.async.wait_all;", "cp.async.ca", options, src=src
    )
    arrive = FENCED.format(64) + CP_ASYNC + "cp.async.mbarrier.arrive.noinc.shared.b64 [%r80];" + SPINS
    check(arrive + OTHER, None, options, src=src)
    used = STORE + "bar.sync 0;" + OTHER
    check(used + CP_ASYNC + "cp.async.wait_all;", "overwrites .* has read", options, src=src)


# Clusters


@pytest.mark.parametrize("options", MODES)
def test_clusters(options: emulator.Options) -> None:
    sync = "barrier.cluster.arrive; barrier.cluster.wait;"
    body = "mov.u32 %r6, %cluster_ctarank; xor.b32 %r6, %r6, 1; mapa.shared::cluster.u32 %r7, %r91, %r6;"
    body += STORE + "{} ld.shared::cluster.b32 %r5, [%r7];"
    check(body.replace("{}", sync) + sync, None, options, grid=(4,), cluster=(2,))
    relaxed = sync.replace("arrive", "arrive.relaxed")
    check(body.replace("{}", "fence.acq_rel.cluster;" + relaxed) + sync, None, options, grid=(2,), cluster=(2,))
    wrong = r"of CTA \(\d, 0, 0\), which warp \d of CTA"
    check(body.replace("{}", relaxed) + sync, wrong, options, grid=(2,), cluster=(2,))
    if options.schedule == "lockstep":
        check(body.replace("{}", "bar.sync 0;") + sync, wrong, options, grid=(2,), cluster=(2,))


# Proxy fences


@pytest.mark.parametrize("options", MODES)
def test_bulk_stores_need_a_proxy_fence(options: emulator.Options) -> None:
    copy = "@!%p10 bra X; {} cp.async.bulk.global.shared::cta.bulk_group [%out], [%r90], 256; "
    copy += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; X:"
    fence = "fence.proxy.async.shared::cta;"
    out = aligned(64, np.uint32)
    for body in (STORE + fence + "bar.sync 0;" + copy.format(""), STORE + "bar.sync 0;" + copy.format(fence)):
        check(body, None, options, out=out)
    for body in (STORE + "bar.sync 0;" + copy.format(""), fence + STORE + "bar.sync 0;" + copy.format("")):
        with pytest.raises(emulator.MissingProxyFence, match=r"buffer\+\d+.*has written at .*no fence.proxy.async"):
            check(body, None, options, out=out)
    late = CP_ASYNC + "cp.async.wait_all; {} bar.sync 0;" + copy.format("")
    src = aligned(64, np.uint32, 3)
    check(late.replace("{}", fence), None, options, src=src, out=out)
    with pytest.raises(emulator.MissingProxyFence, match=r"cp\.async\.ca"):
        check(late.replace("{}", ""), None, options, src=src, out=out)


@pytest.mark.parametrize("options", MODES)
def test_copies_need_a_fence_after_mbarrier_init(options: emulator.Options) -> None:
    src = aligned(64, np.uint32, 3)
    rest = "@!%p10 bra L; " + EXPECT + BULK + "L:" + SPINS
    for fence in ("fence.mbarrier_init.release.cluster;", "fence.proxy.async;"):
        check(INIT.format(1, fence, "bar.sync 0;") + rest, None, options, src=src)
    with pytest.raises(emulator.MissingProxyFence, match=r"bar\+0.*mbarrier\.init"):
        check(INIT.format(1, "", "bar.sync 0;") + rest, None, options, src=src)


def test_copies_of_global_memory_that_the_kernel_has_stored() -> None:
    data = aligned(64, np.uint32)
    body = FENCED.format(1) + "mul.wide.u32 %rd1, %r99, 4; add.s64 %rd1, %rd1, %src; st.global.b32 [%rd1], %r99;"
    rest = "bar.sync 0; @!%p10 bra L; <>" + EXPECT + BULK + "L:" + SPINS
    more = {"regions": [region("src", data)], "src": data}
    check(body + "fence.proxy.async;" + rest.replace("<>", ""), None, **more)
    check(body + "fence.proxy.async.global;" + rest.replace("<>", ""), None, **more)
    check(body + rest.replace("<>", "fence.proxy.async;"), None, **more)
    with pytest.raises(emulator.MissingProxyFence, match=r"reads src\[0\] by the async proxy"):
        check(body + rest.replace("<>", ""), None, **more)


# Switches, and other reports


def test_switched_off() -> None:
    for options in (emulator.Options(races=False), emulator.Options(checks=False)):
        check(STORE + OTHER, None, options)


def test_step_limit() -> None:
    with pytest.raises(emulator.StepLimit, match=r"(?s)more than 500 steps.*warp 1 .* at PTX line \d+ .*can go on"):
        check("L: add.u32 %r5, %r5, 1; bra L;".replace("%r5, %r5", "%r5, %r99"), None, emulator.Options(max_steps=500))
    check("L:", None, emulator.Options(max_steps=500))


def test_reports_name_the_source_line() -> None:
    body = PROLOG + "\n.loc 1 42 3\n" + STORE + "\n.loc 2 7 0, function_name $L1, inlined_at 1 3 4\n" + OTHER + "ret;"
    module = SHARED + '\n.file 1 "gemm.py"\n.file 2 "ptx.py"\n'
    program = emulator.parse(kernel(body, module=module))
    with pytest.raises(emulator.SharedRace, match=r"`ld.shared.*` \(ptx.py:7\).*`st.shared.*` \(gemm.py:42\)"):
        emulator.launch(program, grid=(1,), block=(64,))


def test_a_deadlock_names_pending_copies() -> None:
    src = aligned(64, np.uint32)
    body = FENCED.format(1) + "@!%p10 bra L;" + EXPECT + BULK + "L: bar.sync 1, 96;"
    with pytest.raises(emulator.Deadlock, match=r"pending is the copy of PTX line \d+ `cp.async.bulk"):
        check(body, None, src=src)
