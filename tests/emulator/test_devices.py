"""CTAs that wait for each other, and kernels of several virtual devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from b12x import emulator

from .harness import THREAD, address, aligned, kernel, pointers, region, run

Array = np.ndarray[Any, Any]
MODES = [
    emulator.Options(),
    emulator.Options(copies="eager"),
    *(emulator.Options(schedule="random", seed=s) for s in range(3)),
]
NAMES = ("mine", "flag", "peer", "peer_flag", "out")
POLL = "POLL: {load} %r5, [%peer_flag]; setp.lt.u32 %p1, %r5, {want}; @%p1 bra POLL;"


def exchange(signal: str, load: str = "ld.acquire.sys.global.b32", want: int = 1) -> emulator.Program:
    """Each device writes its values, raises its flag, waits for the peer's and adds the peer's values to its own."""
    params, code = pointers(*NAMES)
    code += THREAD + address("rd1", "mine", 4) + address("rd2", "peer", 4) + address("rd3", "out", 4)
    code += "mov.u32 %r98, %ctaid.x; add.u32 %r1, %r99, 100; st.global.b32 [%rd1], %r1; bar.sync 0;"
    code += "setp.ne.u32 %p2, %r99, 0; @%p2 bra WAIT;" + signal + "WAIT:" + POLL.format(load=load, want=want)
    code += "bar.sync 0; ld.global.b32 %r2, [%rd2]; add.u32 %r3, %r1, %r2; st.global.b32 [%rd3], %r3; ret;"
    return emulator.parse(kernel(code, params))


def devices(programs: list[emulator.Program], options: emulator.Options, threads: int = 64) -> list[Array]:
    mine = [aligned(threads, np.uint32) for _ in range(2)]
    flags = [aligned(1, np.uint32) for _ in range(2)]
    outs = [aligned(threads, np.uint32) for _ in range(2)]
    launches = []
    for k, program in enumerate(programs):
        tensors = (mine[k], flags[k], mine[1 - k], flags[1 - k], outs[k])
        regions = [
            region("mine", mine[k], "rw", False),
            region("flag", flags[k]),
            region("peer", mine[1 - k], "r", False),
            region("peer_flag", flags[1 - k]),
            region("out", outs[k], "w", False),
        ]
        params = [t.ctypes.data for t in tensors]
        launches.append(emulator.Launch(program, block=(threads,), params=params, regions=regions))
    emulator.launch_together(launches, options)
    return outs


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(
    ("signal", "load"),
    [
        ("st.release.sys.global.b32 [%flag], 1;", "ld.acquire.sys.global.b32"),
        ("red.release.sys.global.add.u32 [%flag], 1;", "ld.acquire.sys.global.b32"),
        ("fence.acq_rel.sys; st.relaxed.sys.global.b32 [%flag], 1;", "ld.relaxed.sys.global.b32"),
        ("membar.sys; st.volatile.global.b32 [%flag], 1;", "ld.volatile.global.b32"),
        ("atom.release.sys.global.exch.b32 %r9, [%flag], 1;", "ld.acquire.sys.global.b32"),
    ],
)
def test_two_devices_exchange_and_add(signal: str, load: str, options: emulator.Options) -> None:
    """Neither device can end before the other has started."""
    for out in devices([exchange(signal, load)] * 2, options):
        assert np.array_equal(out, 2 * (np.arange(64) + 100))


@pytest.mark.parametrize("options", MODES)
def test_a_dropped_flag_is_a_deadlock(options: emulator.Options) -> None:
    good = exchange("st.release.sys.global.b32 [%flag], 1;")
    with pytest.raises(emulator.Deadlock, match=r"(?s)poll memory.*of device 0 warp 0.*of device 0 warp 1") as err:
        devices([good, exchange("")], options)
    assert "device 1" not in str(err.value).split("\n", 1)[1]  # it has what it wants


def test_waiting_for_a_count_that_never_comes() -> None:
    signal = "red.release.sys.global.add.u32 [%flag], 1;"
    atomic = "atom.acquire.sys.global.or.b32"
    program = exchange(signal, "ld.acquire.sys.global.b32", want=2)
    with pytest.raises(emulator.Deadlock, match="device 1"):
        devices([program] * 2, emulator.Options())
    params, code = pointers("flag")
    code += f"L: {atomic} %r5, [%flag], 0; setp.eq.u32 %p1, %r5, 0; @%p1 bra L; ret;"
    flag = aligned(1, np.uint32)
    stuck = emulator.Launch(
        emulator.parse(kernel(code, params)), params=[flag.ctypes.data], regions=[region("flag", flag)]
    )
    with pytest.raises(emulator.Deadlock, match="poll"):
        emulator.launch_together([stuck])


def test_memory_that_the_peer_never_writes_stays_unwritten() -> None:
    """Overlapping regions of two devices share what is initialised, element for element."""
    signal = "st.release.sys.global.b32 [%flag], 1;"
    program = exchange(signal)
    partial = emulator.parse(
        kernel(
            pointers(*NAMES)[1] + THREAD + address("rd1", "mine", 4) + "setp.eq.u32 %p1, %r99, 9;"
            "@!%p1 st.global.b32 [%rd1], %r99; bar.sync 0; setp.ne.u32 %p2, %r99, 0; @%p2 ret;" + signal + "ret;",
            pointers(*NAMES)[0],
        )
    )
    with pytest.raises(emulator.TaintError, match=r"out\[9\] depends on peer\[9\], which nothing has written"):
        devices([program, partial], emulator.Options(), threads=32)


def test_a_copy_lands_while_another_warp_polls() -> None:
    """Warp 1 polls a flag that warp 0 raises only when its copy has landed."""
    src, flag, out = aligned(128, np.uint8, 3), aligned(1, np.uint32), aligned(1, np.uint32)
    code = THREAD + "mov.b32 %r90, buffer; mov.b32 %r80, bar; setp.ge.u32 %p1, %r99, 32; @%p1 bra POLL;"
    code += "setp.ne.u32 %p2, %r99, 0; @%p2 bra END; mbarrier.init.shared.b64 [%r80], 1; fence.proxy.async;"
    code += "mbarrier.arrive.expect_tx.shared.b64 _, [%r80], 128;"
    code += "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r90], [%src], 128, [%r80];"
    code += "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r80], 0; @P bra D; bra W; D: }"
    code += "ld.shared.b32 %r5, [%r90]; st.release.gpu.global.b32 [%flag], %r5; bra END;"
    code += "POLL: ld.acquire.gpu.global.b32 %r5, [%flag]; setp.eq.u32 %p2, %r5, 0; @%p2 bra POLL;"
    code += "st.global.b32 [%out], %r5; END: ret;"
    regions = [region("src", src, "r"), region("flag", flag), region("out", out, "w", False)]
    module = ".shared .align 128 .b8 buffer[128]; .shared .align 8 .b64 bar;"
    for options in MODES:
        flag[:] = 0
        run(code, block=64, module=module, regions=regions, options=options, src=src, flag=flag, out=out)
        assert out[0] == 0x03030303


@pytest.mark.parametrize("options", MODES[:3])
def test_a_grid_barrier(options: emulator.Options) -> None:
    """CTAs that count themselves in need to be resident together; too few of them are a deadlock."""
    count, data, out = aligned(1, np.uint32), aligned(8, np.uint32), aligned(8, np.uint32)
    code = "mov.u32 %r99, %ctaid.x;" + address("rd1", "data", 4) + address("rd3", "out", 4)
    code += "xor.b32 %r1, %r99, 7;" + address("rd2", "data", 4, "%r1") + "st.global.b32 [%rd1], %r99;"
    code += "red.release.gpu.global.add.u32 [%count], 1;"
    code += "POLL: ld.acquire.gpu.global.b32 %r5, [%count]; setp.lt.u32 %p2, %r5, 8; @%p2 bra POLL;"
    code += "ld.global.b32 %r2, [%rd2]; st.global.b32 [%rd3], %r2; ret;"
    regions = [region("count", count), region("data", data), region("out", out, "w", False)]
    more = {"count": count, "data": data, "out": out}
    for concurrent, fits in ((8, True), (4, False)):
        count[:] = 0
        chosen = emulator.Options(options.seed, options.schedule, options.copies, concurrent=concurrent)
        if fits:
            run(code, block=1, grid=(8,), regions=regions, options=chosen, **more)
            assert np.array_equal(out, np.arange(8) ^ 7)
            continue
        with pytest.raises(emulator.Deadlock):
            run(code, block=1, grid=(8,), regions=regions, options=chosen, **more)
