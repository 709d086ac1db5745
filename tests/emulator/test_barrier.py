"""CTA barriers, mbarriers, clusters and deadlocks."""

from __future__ import annotations

import numpy as np
import pytest

from b12x import emulator

from .harness import THREAD, address, aligned, kernel, region, run

SHARED = ".shared .align 16 .b8 buffer[4096];\n.shared .align 8 .b64 bar[4];"
SCHEDULES = [emulator.Options(), *(emulator.Options(schedule="random", seed=s) for s in range(4))]
WARP = THREAD + "shr.u32 %r98, %r99, 5; and.b32 %r97, %r99, 31;"
SLOT = "mov.b32 %r90, buffer; mad.lo.u32 %r91, %r99, 4, %r90;"


def store(register: str, base: str = "out") -> str:
    return address("rd59", base, 4) + f"st.global.b32 [%rd59], {register};"


@pytest.mark.parametrize("options", SCHEDULES)
def test_bar_sync_separates_writes_from_reads(options: emulator.Options) -> None:
    """Each warp reads what the next one wrote, three rounds over."""
    out = aligned(128, np.uint32)
    code = WARP + SLOT + "mov.b32 %r1, %r99; mov.b32 %r5, 0;"
    code += "add.u32 %r2, %r99, 32; and.b32 %r2, %r2, 127; mad.lo.u32 %r3, %r2, 4, %r90;"
    code += "LOOP: st.shared.b32 [%r91], %r1; bar.sync 0; ld.shared.b32 %r1, [%r3]; bar.sync 0;"
    code += "add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 3; @%p1 bra LOOP;" + store("%r1") + "ret;"
    run(code, block=128, module=SHARED, options=options, out=out)
    assert np.array_equal(out, (np.arange(128) + 96) % 128)


def test_a_dropped_barrier_is_found() -> None:
    """By the race detector in any schedule; without it by some random ones."""
    code = WARP + SLOT + "st.shared.b32 [%r91], %r99; {} xor.b32 %r2, %r99, 32; mad.lo.u32 %r3, %r2, 4, %r90;"
    code += "ld.shared.b32 %r1, [%r3];" + store("%r1") + "ret;"
    for options in SCHEDULES:
        with pytest.raises((emulator.SharedRace, emulator.TaintError)):
            run(code.format(""), block=64, module=SHARED, options=options, out=aligned(64, np.uint32))
        run(code.format("bar.sync 0;"), block=64, module=SHARED, options=options, out=aligned(64, np.uint32))

    def without_barrier() -> None:
        for seed in range(8):
            options = emulator.Options(schedule="random", seed=seed, races=False)
            run(code.format(""), block=64, module=SHARED, options=options, out=aligned(64, np.uint32))

    with pytest.raises(emulator.TaintError, match="shared address"):
        without_barrier()


@pytest.mark.parametrize("options", SCHEDULES)
def test_named_barriers_and_arrive(options: emulator.Options) -> None:
    """Warp 0 produces and only arrives; warps 1 and 2 wait for it; warp 3 takes no part."""
    out = aligned(128, np.uint32)
    code = WARP + SLOT + """
        setp.eq.u32 %p1, %r98, 3; mov.b32 %r1, 7; @%p1 bra OUT;
        setp.ne.u32 %p2, %r98, 0; @%p2 bra WAIT;
        st.shared.b32 [%r91], %r99; membar.cta; bar.arrive 3, 96; bra OUT;
        WAIT: bar.sync 3, 96; mad.lo.u32 %r2, %r97, 4, %r90; ld.shared.b32 %r1, [%r2];
        OUT:
    """ + store("%r1") + "ret;"  # fmt: skip
    run(code, block=128, module=SHARED, options=options, out=out)
    want = np.concatenate([np.full(32, 7), np.arange(32), np.arange(32), np.full(32, 7)])
    assert np.array_equal(out, want)


def test_barrier_reductions() -> None:
    out = aligned((3, 64), np.uint32)
    code = (
        WARP
        + """
        setp.lt.u32 %p1, %r99, 40; bar.red.popc.u32 %r1, 0, %p1; barrier.cta.red.and.pred %p2, 1, 64, %p1;
        bar.red.or.pred %p3, 2, %p1; selp.b32 %r2, 1, 0, %p2; selp.b32 %r3, 1, 0, %p3;
    """
        + address("rd1", "out", 4)
    )
    code += "st.global.b32 [%rd1], %r1; st.global.b32 [%rd1+256], %r2; st.global.b32 [%rd1+512], %r3; ret;"
    run(code, block=64, out=out)
    assert (out[0] == 40).all()
    assert (out[1] == 0).all()
    assert (out[2] == 1).all()


def test_a_barrier_waits_for_a_whole_warp() -> None:
    """Lanes that come late to the barrier are waited for; the barrier counts the warp once."""
    out = aligned(64, np.uint32)
    code = (
        WARP
        + """
        setp.lt.u32 %p1, %r97, 5; mov.b32 %r1, 1; @!%p1 bra MEET; mov.b32 %r1, 2;
        MEET: bar.sync 0;
    """
        + store("%r1")
        + "ret;"
    )
    for options in SCHEDULES:
        run(code, block=64, options=options, out=out)
        assert np.array_equal(out, np.where(np.arange(64) % 32 < 5, 2, 1))


def test_warps_that_exit_do_not_count() -> None:
    """Warps 0 and 2 wait at barrier 0 when warp 1 ends."""
    out = aligned(96, np.uint32)
    code = WARP + "setp.eq.u32 %p1, %r98, 1; @%p1 bra LEAVE; bar.sync 0;" + store("%r99") + "ret;"
    code += (
        "LEAVE: mov.b32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 100; @%p2 bra L;" + store("9") + "ret;"
    )
    for options in SCHEDULES:
        run(code, block=96, options=options, out=out)
    assert np.array_equal(out, np.where(np.arange(96) // 32 == 1, 9, np.arange(96)))


@pytest.mark.parametrize(
    ("body", "needle"),
    [
        ("bar.sync 1, 96; ret;", "96 threads have arrived"),
        ("setp.lt.u32 %p1, %r99, 32; @%p1 bra A; bar.sync 1, 64; ret; A: bar.sync 2, 64; ret;", "barrier 2"),
        ("setp.lt.u32 %p1, %r97, 9; @%p1 bra A; bar.sync 0; ret; A: bar.sync 1; ret;", "other lanes of its warp"),
    ],
)
def test_deadlock_says_where_each_warp_stands(body: str, needle: str) -> None:
    with pytest.raises(emulator.Deadlock, match=needle) as err:
        run(WARP + body, block=64)
    message = str(err.value)
    assert "warp 0" in message
    assert "warp 1" in message
    assert "bar.sync" in message


@pytest.mark.parametrize(
    ("body", "needle"),
    [
        ("bar.sync 0, 48; ret;", "48 threads"),
        ("bar.sync 16; ret;", "barrier 16"),
        ("setp.eq.u32 %p1, %r98, 0; @%p1 bra A; bar.sync 0, 64; ret; A: bar.sync 0, 96; ret;", "earlier arrivals"),
    ],
)
def test_wrong_use_of_a_barrier(body: str, needle: str) -> None:
    with pytest.raises(emulator.BarrierError, match=needle):
        run(WARP + body, block=64)


# mbarriers

INIT = "mov.b32 %r80, bar; setp.ne.u32 %p30, %r99, 0; @%p30 bra READY; {} READY: bar.sync 0;"
SPIN = "{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [{bar}], {parity}, 1000; @P bra D; bra W; D: }}"


@pytest.mark.parametrize("options", SCHEDULES)
def test_phases_over_more_rounds_than_stages(options: emulator.Options) -> None:
    """A ring of 2 stages passes 7 values from warp 0 to warp 1, with full and empty barriers and parities."""
    out = aligned((7, 32), np.uint32)
    init = INIT.format("mbarrier.init.shared.b64 [%r80], 32; mbarrier.init.shared.b64 [%r80+8], 32;"
                       "mbarrier.init.shared.b64 [%r80+16], 32; mbarrier.init.shared.b64 [%r80+24], 32;")  # fmt: skip
    loop = """
        mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, {parity};
        LOOP{n}: mad.lo.u32 %r4, %r2, 8, %r80; mad.lo.u32 %r5, %r2, 128, %r90; mad.lo.u32 %r5, %r97, 4, %r5;
        {work}
        add.u32 %r2, %r2, 1; setp.eq.u32 %p2, %r2, 2; selp.b32 %r2, 0, %r2, %p2; selp.b32 %r6, 1, 0, %p2;
        xor.b32 %r3, %r3, %r6; add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 7; @%p3 bra LOOP{n};
    """
    produce = SPIN.format(bar="%r4+16", parity="%r3")
    produce += "mad.lo.u32 %r7, %r1, 100, %r97; st.shared.b32 [%r5], %r7; mbarrier.arrive.shared.b64 _, [%r4];"
    consume = (
        SPIN.format(bar="%r4", parity="%r3")
        + "ld.shared.b32 %r7, [%r5]; mbarrier.arrive.shared::cta.b64 %rd9, [%r4+16];"
    )
    consume += "mad.lo.u32 %r8, %r1, 32, %r97;" + address("rd1", "out", 4, "%r8") + "st.global.b32 [%rd1], %r7;"
    code = WARP + SLOT + init + "setp.ne.u32 %p1, %r98, 0; @%p1 bra CONSUMER;"
    code += (
        loop.format(parity=1, n=0, work=produce) + "ret; CONSUMER:" + loop.format(parity=0, n=1, work=consume) + "ret;"
    )
    run(code, block=64, module=SHARED, options=options, out=out)
    assert np.array_equal(out, np.arange(7)[:, None] * 100 + np.arange(32))


def test_a_fresh_barrier_has_completed_its_preceding_phase() -> None:
    out = aligned(32, np.uint32)
    code = WARP + INIT.format("mbarrier.init.shared.b64 [%r80], 1;")
    code += "mbarrier.test_wait.parity.shared.b64 %p1, [%r80], 1; selp.b32 %r1, 1, 0, %p1;" + store("%r1") + "ret;"
    run(code, module=SHARED, out=out)
    assert (out == 1).all()


def test_a_failing_wait_returns_false_when_nothing_else_can_run() -> None:
    """The kernel gives up by itself: the wait times out, and the other path ends it."""
    out = aligned(32, np.uint32)
    code = WARP + INIT.format("mbarrier.init.shared.b64 [%r80], 1;")
    code += "mbarrier.try_wait.parity.shared.b64 %p1, [%r80], 0; selp.b32 %r1, 1, 0, %p1;" + store("%r1") + "ret;"
    run(code, module=SHARED, out=out)
    assert (out == 0).all()


def test_states_name_the_phase_they_arrived_in() -> None:
    out = aligned(32, np.uint32)
    code = WARP + INIT.format("mbarrier.init.shared.b64 [%r80], 32;")
    code += "mbarrier.arrive.shared.b64 %rd1, [%r80]; W: mbarrier.test_wait.shared.b64 %p1, [%r80], %rd1; @!%p1 bra W;"
    code += "mbarrier.arrive.shared.b64 %rd2, [%r80]; setp.eq.s64 %p2, %rd1, %rd2; selp.b32 %r1, 1, 0, %p2;" + store(
        "%r1"
    )
    run(code + "ret;", module=SHARED, out=out)
    assert (out == 0).all()


def test_expect_tx_counts_before_it_arrives() -> None:
    """arrive.expect_tx on the last pending arrival must not complete the phase; complete_tx does."""
    out = aligned(32, np.uint32)
    code = WARP + INIT.format("mbarrier.init.shared.b64 [%r80], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r80], 64;")
    code += "mbarrier.test_wait.parity.shared.b64 %p1, [%r80], 0; selp.b32 %r1, 1, 0, %p1;"
    code += "setp.ne.u32 %p5, %r99, 0; @%p5 bra NEXT; "
    code += "mbarrier.complete_tx.relaxed.cta.shared.b64 [%r80], 64; NEXT: bar.sync 0;"
    code += (
        "mbarrier.test_wait.parity.shared.b64 %p2, [%r80], 0; selp.b32 %r2, 2, 0, %p2; or.b32 %r1, %r1, %r2;"
        + store("%r1")
    )
    run(code + "ret;", module=SHARED, out=out)
    assert (out == 2).all()


def test_arrive_drop_lowers_later_phases() -> None:
    out = aligned(32, np.uint32)
    code = WARP + INIT.format(
        "mbarrier.init.shared.b64 [%r80], 2; mbarrier.arrive_drop.shared.b64 _, [%r80]; "
        "mbarrier.arrive.shared.b64 _, [%r80];"
        "mbarrier.arrive.shared.b64 _, [%r80];"
    )
    code += "mbarrier.test_wait.parity.shared.b64 %p1, [%r80], 1; selp.b32 %r1, 1, 0, %p1;" + store("%r1")
    run(code + "ret;", module=SHARED, out=out)
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("body", "needle"),
    [
        (
            "mbarrier.init.shared.b64 [%r80], 1; mbarrier.arrive.shared.b64 _, [%r80], 2;",
            "2 arrivals .* waits for 1 of 1",
        ),
        ("mbarrier.arrive.shared.b64 _, [%r80];", "no initialised mbarrier"),
        ("mbarrier.init.shared.b64 [%r80], 1; mbarrier.init.shared.b64 [%r80], 1;", "already initialised"),
        ("mbarrier.init.shared.b64 [%r80], 0;", "count 0"),
        ("mbarrier.init.b64 [%r80], 1; mbarrier.inval.b64 [%r80]; mbarrier.arrive.b64 _, [%r80];", "no initialised"),
    ],
)
def test_wrong_use_of_an_mbarrier(body: str, needle: str) -> None:
    with pytest.raises(emulator.BarrierError, match=needle):
        run(THREAD + INIT.format(body) + "ret;", module=SHARED)


def test_misaligned_mbarrier() -> None:
    with pytest.raises(emulator.Misaligned):
        run(THREAD + INIT.format("mbarrier.init.shared.b64 [%r80+4], 1;") + "ret;", module=SHARED)


def test_waiting_for_a_phase_that_never_comes_is_a_deadlock() -> None:
    code = WARP + INIT.format("mbarrier.init.shared.b64 [%r80], 2; mbarrier.arrive.shared.b64 _, [%r80];")
    with pytest.raises(emulator.Deadlock, match=r"in phase 0 waits for 1 arrivals and 0 bytes") as err:
        run(code + SPIN.format(bar="%r80", parity=0) + "ret;", module=SHARED)
    assert "try_wait" in str(err.value)


# Clusters


def cluster_kernel(body: str) -> str:
    prolog = (
        THREAD
        + """
        mov.u32 %r98, %cluster_ctarank; mov.b32 %r90, buffer; mad.lo.u32 %r91, %r99, 4, %r90;
        mov.u32 %r96, %ctaid.x; mad.lo.u32 %r95, %r96, 32, %r99;
    """
    )
    return prolog + body


ARRIVE_WAIT = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


@pytest.mark.parametrize("options", SCHEDULES)
def test_clusters_read_and_write_each_others_memory(options: emulator.Options) -> None:
    """Every CTA reads its right neighbour and writes its left one; two clusters of 4."""
    out = aligned((2, 8, 32), np.uint32)
    body = "mad.lo.u32 %r1, %r98, 1000, %r99; st.shared.b32 [%r91], %r1;" + ARRIVE_WAIT
    body += "add.u32 %r2, %r98, 1; and.b32 %r2, %r2, 3; mapa.shared::cluster.u32 %r3, %r91, %r2; "
    body += "ld.shared::cluster.b32 %r4, [%r3];"
    body += "add.u32 %r5, %r98, 3; and.b32 %r5, %r5, 3; add.u32 %r6, %r91, 128; mapa.shared::cluster.u32 %r7, %r6, %r5;"
    body += "getctarank.shared::cluster.u32 %r8, %r7; setp.ne.u32 %p1, %r8, %r5; @%p1 trap;"
    body += "st.shared::cluster.b32 [%r7], %r1;" + ARRIVE_WAIT + "ld.shared.b32 %r9, [%r91+128];"
    body += address("rd1", "out", 4, "%r95") + "st.global.b32 [%rd1], %r4; st.global.b32 [%rd1+1024], %r9; ret;"
    run(cluster_kernel(body), grid=(8,), cluster=(4,), module=SHARED, options=options, out=out)
    rank = np.arange(8) % 4
    assert np.array_equal(out[0], ((rank + 1) % 4)[:, None] * 1000 + np.arange(32))
    assert np.array_equal(out[1], ((rank + 1) % 4)[:, None] * 1000 + np.arange(32))


def test_remote_arrivals() -> None:
    """Rank 0 waits on its mbarrier, which both CTAs arrive on."""
    out = aligned((2, 32), np.uint32)
    body = (
        "mov.b32 %r80, bar; setp.ne.u32 %p1, %r99, 0; @%p1 bra A; mbarrier.init.shared.b64 [%r80], 64; A:" + ARRIVE_WAIT
    )
    body += "mapa.shared::cluster.u32 %r81, %r80, 0; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r81];"
    body += "setp.ne.u32 %p2, %r98, 0; @%p2 bra B;" + SPIN.format(bar="%r80", parity=0) + "B:" + ARRIVE_WAIT
    body += address("rd1", "out", 4, "%r95") + "st.global.b32 [%rd1], 1; ret;"
    for options in SCHEDULES:
        run(cluster_kernel(body), grid=(2,), cluster=(2,), module=SHARED, options=options, out=out)
    assert (out == 1).all()


def test_leaving_while_a_peer_still_reads_is_an_error() -> None:
    body = "st.shared.b32 [%r91], 1;" + ARRIVE_WAIT + "setp.eq.u32 %p1, %r98, 1; @%p1 ret;"
    body += "mov.b32 %r20, 0; L: add.u32 %r20, %r20, 1; setp.lt.u32 %p2, %r20, 200; @%p2 bra L;"
    body += "mapa.shared::cluster.u32 %r3, %r91, 1; ld.shared::cluster.b32 %r4, [%r3]; ret;"
    with pytest.raises(emulator.OutOfBounds, match="rank 1, which has exited"):
        run(cluster_kernel(body), grid=(2,), cluster=(2,), module=SHARED)


def test_ranks_outside_the_cluster() -> None:
    body = "mapa.shared::cluster.u32 %r3, %r91, 2; ld.shared::cluster.b32 %r4, [%r3]; ret;"
    with pytest.raises(emulator.OutOfBounds, match="outside the cluster of 2"):
        run(cluster_kernel(body), grid=(2,), cluster=(2,), module=SHARED)


def test_cluster_special_registers() -> None:
    names = [
        "cluster_ctaid.x",
        "cluster_ctaid.y",
        "cluster_nctaid.x",
        "cluster_ctarank",
        "cluster_nctarank",
        "clusterid.x",
        "nclusterid.x",
    ]
    out = aligned((8, len(names)), np.uint32)
    code = "mov.u32 %r1, %ctaid.y; mad.lo.u32 %r99, %r1, 4, %ctaid.x;" + address("rd1", "out", 4 * len(names))
    code += "".join(f"mov.u32 %r5, %{n}; st.global.u32 [%rd1+{4 * k}], %r5;" for k, n in enumerate(names)) + "ret;"
    run(code, block=1, grid=(4, 2), cluster=(2, 2), out=out)
    for y in range(2):
        for x in range(4):
            assert out[4 * y + x].tolist() == [x % 2, y, 2, x % 2 + 2 * y, 4, x // 2, 2]


def test_ctas_that_wait_for_each_other_need_to_run_together() -> None:
    """CTA 0 polls a flag in global memory that CTA 1 sets."""
    flag, out = aligned(1, np.uint32), aligned(2, np.uint32)
    code = "mov.u32 %r99, %ctaid.x; setp.ne.u32 %p1, %r99, 0; @%p1 bra SET;"
    code += "POLL: ld.acquire.gpu.global.b32 %r1, [%flag]; setp.eq.u32 %p2, %r1, 0; @%p2 bra POLL; bra END;"
    code += "SET: mov.b32 %r1, 5; st.release.gpu.global.b32 [%flag], %r1; END:" + address("rd1", "out", 4)
    regions = [region("flag", flag), region("out", out, "w", False)]
    run(code + "st.global.b32 [%rd1], %r1; ret;", block=1, grid=(2,), regions=regions, flag=flag, out=out,
        options=emulator.Options(concurrent=2))  # fmt: skip
    assert out.tolist() == [5, 5]


def test_launches_that_do_not_fit() -> None:
    program = emulator.parse(kernel("ret;", directives=".reqntid 64, 1, 1"))
    with pytest.raises(emulator.LaunchError, match="requires blocks"):
        emulator.launch(program, grid=(1,), block=(32,))
    with pytest.raises(emulator.LaunchError, match="divide into clusters"):
        emulator.launch(program, grid=(3,), block=(64,), cluster=(2,))
    with pytest.raises(emulator.LaunchError, match="takes 0 parameters"):
        emulator.launch(program, grid=(1,), block=(64,), params=[1])
    small = emulator.parse(kernel("ret;", directives=".maxntid 64, 1, 1"))
    emulator.launch(small, grid=(1,), block=(16, 4))
    with pytest.raises(emulator.LaunchError, match="at most"):
        emulator.launch(small, grid=(1,), block=(16, 5))
    with pytest.raises(emulator.LaunchError, match="no entry"):
        emulator.launch(program, "other", grid=(1,), block=(64,))
