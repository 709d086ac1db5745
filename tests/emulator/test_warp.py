"""Exchange between lanes, votes, divergence and reconvergence."""

from __future__ import annotations

import numpy as np
import pytest

from b12x import emulator

from .harness import THREAD, address, aligned, run

LANES = np.arange(32)


def warp(code: str, x: np.ndarray | None = None, block: int = 32, **kwargs: object) -> np.ndarray:  # type: ignore[type-arg]
    """Runs code over %r1 = x[thread] (or the thread); %r2 is stored."""
    src = aligned(block, np.uint32, np.arange(block) if x is None else x)
    out = aligned(block, np.uint32)
    run(
        THREAD + address("rd1", "src", 4) + "ld.global.b32 %r1, [%rd1];" + code + address("rd2", "out", 4)
        + "st.global.b32 [%rd2], %r2; ret;",
        block=block,
        src=src,
        out=out,
        **kwargs,  # type: ignore[arg-type]
    )  # fmt: skip
    return out


def shuffled(mode: str, b: int, c: int) -> tuple[list[int], list[bool]]:
    """The pseudo-code of PTX ISA 9.7.9.6, lane by lane."""
    lanes, valid = [], []
    for lane in range(32):
        segmask, cval, bval = c >> 8 & 31, c & 31, b & 31
        top = (lane & segmask) | (cval & ~segmask & 31)
        bottom = lane & segmask
        if mode == "up":
            j, ok = lane - bval, lane - bval >= top
        elif mode == "down":
            j, ok = lane + bval, lane + bval <= top
        elif mode == "bfly":
            j, ok = lane ^ bval, lane ^ bval <= top
        else:
            j = bottom | (bval & ~segmask & 31)
            ok = j <= top
        lanes.append(j if ok else lane)
        valid.append(ok)
    return lanes, valid


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize(
    ("mode", "b", "c"),
    [
        ("idx", 0, 31), ("idx", 5, 31), ("idx", 3, 0x1C1F), ("idx", 9, 0x181F), ("up", 1, 0), ("up", 4, 0x1800),
        ("down", 1, 31), ("down", 8, 0x181F), ("bfly", 1, 31), ("bfly", 16, 31), ("bfly", 3, 0x1C1F),
    ],
)  # fmt: skip
def test_shfl(mode: str, b: int, c: int, in_registers: bool) -> None:
    x = LANES.astype(np.uint32) * 77 + 5
    ops = (f"mov.b32 %r5, {b}; mov.b32 %r6, {c};", "%r5, %r6") if in_registers else ("", f"{b}, {c}")
    code = (
        ops[0]
        + f"shfl.sync.{mode}.b32 %r3|%p1, %r1, {ops[1]}, -1; selp.b32 %r4, 0x80000000, 0, %p1; or.b32 %r2, %r3, %r4;"
    )
    lanes, valid = shuffled(mode, b, c)
    assert np.array_equal(warp(code, x), x[lanes] | np.where(valid, np.uint32(1 << 31), np.uint32(0)))


def test_shfl_with_a_source_per_lane(rng: np.random.Generator) -> None:
    x = rng.integers(0, 32, 64).astype(np.uint32)
    got = warp("shfl.sync.idx.b32 %r2, %r99, %r1, 31, -1;", x, block=64)
    assert np.array_equal(got, x + np.repeat([0, 32], 32).astype(np.uint32))


def test_reading_an_inactive_lane_is_undefined() -> None:
    """Half the warp exchanges within itself; only a read from the other half is refused."""
    code = "mov.b32 %r2, 0; setp.gt.u32 %p1, %r99, 15; @%p1 bra END; shfl.sync.idx.b32 %r2, %r1, {}, 31, 0xFFFF; END:"
    assert warp(code.format(3)).tolist() == [3] * 16 + [0] * 16
    with pytest.raises(emulator.TaintError, match="shfl from an inactive lane"):
        warp(code.format(20))


@pytest.mark.parametrize("threshold", [0, 1, 7, 32])
def test_votes(threshold: int) -> None:
    yes = threshold > LANES
    for mode, want in (("all", yes.all()), ("any", yes.any()), ("uni", yes.all() or not yes.any())):
        got = warp(f"setp.lt.u32 %p1, %r1, {threshold}; vote.sync.{mode}.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;")
        assert (got == want).all()
        got = warp(f"setp.lt.u32 %p1, %r1, {threshold}; vote.sync.{mode}.pred %p2, !%p1, -1; selp.b32 %r2, 1, 0, %p2;")
        assert (got == {"all": not yes.any(), "any": not yes.all(), "uni": want}[mode]).all()
    got = warp(f"setp.lt.u32 %p1, %r1, {threshold}; vote.sync.ballot.b32 %r2, %p1, -1;")
    assert (got == (1 << threshold) - 1).all()


def test_elect_chooses_one_lane() -> None:
    got = warp("elect.sync %r3|%p1, -1; selp.b32 %r2, 100, %r3, %p1;", block=64)
    assert (got.reshape(2, 32) == 100).sum(axis=1).tolist() == [1, 1]
    leader = int(np.flatnonzero(got[:32] == 100)[0])
    assert (got[:32][leader != LANES] == leader).all()


def test_match(rng: np.random.Generator) -> None:
    x = rng.integers(0, 4, 32).astype(np.uint32)
    want = [sum(1 << j for j in range(32) if x[j] == v) for v in x]
    assert warp("match.any.sync.b32 %r2, %r1, -1;", x).tolist() == want
    code = "match.all.sync.b32 %r3|%p1, %r1, -1; selp.b32 %r2, %r3, 7, %p1;"
    assert (warp(code, x) == 7).all()
    assert (warp(code, np.full(32, 9, np.uint32)) == 0xFFFFFFFF).all()


@pytest.mark.parametrize("op", ["add", "min", "max", "and", "or", "xor"])
def test_redux(op: str, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, 64, dtype=np.uint32)
    t = "b32" if op in ("and", "or", "xor") else "s32"
    got = warp(f"redux.sync.{op}.{t} %r2, %r1, -1;", x, block=64)
    fn = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    for w in range(2):
        want = fn.reduce(x[32 * w : 32 * w + 32].view(np.int32), dtype=np.int32)
        assert (got[32 * w : 32 * w + 32].view(np.int32) == want).all()


def test_redux_on_floats() -> None:
    x = np.linspace(-3, 5, 32, dtype=np.float32)
    x[4] = np.nan
    got = warp("redux.sync.max.f32 %r2, %r1, -1;", x.view(np.uint32)).view(np.float32)
    assert (got == 5).all()
    got = warp("redux.sync.min.abs.NaN.f32 %r2, %r1, -1;", x.view(np.uint32)).view(np.float32)
    assert np.isnan(got).all()


SCHEDULES = [emulator.Options(), *(emulator.Options(schedule="random", seed=s) for s in range(3))]


@pytest.mark.parametrize("options", SCHEDULES)
def test_nested_branches_reconverge(options: emulator.Options) -> None:
    """Every lane takes its own way through two levels of branches; afterwards the warp acts as one."""
    code = """
        mov.b32 %r2, 0;
        and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra EVEN;
        setp.gt.u32 %p2, %r1, 15; @%p2 bra HIGH;
        mov.b32 %r2, 1; bra JOIN;
        HIGH: mov.b32 %r2, 2; bra JOIN;
        EVEN: mov.b32 %r2, 3;
        JOIN: bar.warp.sync -1; activemask.b32 %r4; setp.ne.u32 %p3, %r4, -1; @%p3 trap;
        shfl.sync.idx.b32 %r5, %r2, 1, 31, -1; shl.b32 %r5, %r5, 8; or.b32 %r2, %r2, %r5;
    """
    want = np.where(LANES % 2 == 0, 3, np.where(LANES > 15, 2, 1)) | 1 << 8
    assert np.array_equal(warp(code, block=96, options=options).reshape(3, 32), np.stack([
        np.where(LANES % 2 == 0, 3, 2 if w else np.where(LANES > 15, 2, 1)) | (2 if w else 1) << 8 for w in range(3)
    ]))  # fmt: skip
    assert want[1] == 1 | 1 << 8


@pytest.mark.parametrize("options", SCHEDULES)
def test_loops_of_different_lengths(options: emulator.Options) -> None:
    code = """
        mov.b32 %r2, 0; mov.b32 %r3, 0;
        LOOP: setp.ge.u32 %p1, %r3, %r1; @%p1 bra DONE;
        add.u32 %r2, %r2, %r3; add.u32 %r3, %r3, 1; bra LOOP;
        DONE:
    """
    n = np.arange(64)
    assert np.array_equal(warp(code, block=64, options=options), n * (n - 1) // 2)


def test_exited_lanes_do_not_block_the_rest() -> None:
    src, out = aligned(32, np.uint32, np.arange(32)), aligned(32, np.uint32, 5)
    code = (
        THREAD
        + """
        and.b32 %r1, %r99, 3; setp.eq.u32 %p1, %r1, 0; @%p1 ret;
        setp.gt.u32 %p2, %r99, 20; @%p2 bra LATE; bar.warp.sync -1; bra OUT; LATE: bar.warp.sync -1;
        OUT: vote.sync.ballot.b32 %r2, 1, 0xEEEEEEEE; bar.sync 0;
    """
    )
    code = code.replace("ballot.b32 %r2, 1,", "ballot.b32 %r2, %p3,").replace(
        "OUT:", "OUT: setp.eq.u32 %p3, %r99, %r99;"
    )
    run(code + address("rd2", "out", 4) + "st.global.b32 [%rd2], %r2; ret;", src=src, out=out)
    assert np.array_equal(out, np.where(LANES % 4 == 0, 5, 0xEEEEEEEE))


def test_a_shuffle_waits_for_lanes_that_come_late() -> None:
    """One lane takes a detour behind the join point in program order; the shuffle still sees the whole warp."""
    code = """
        setp.eq.u32 %p1, %r1, 3; @%p1 bra DETOUR;
        BACK: shfl.sync.idx.b32 %r2, %r1, 3, 31, -1; bra END;
        DETOUR: add.u32 %r1, %r1, 40; bra BACK;
        END:
    """
    assert (warp(code) == 43).all()


def test_branch_tables() -> None:
    code = """
        and.b32 %r3, %r1, 3;
        TABLE: .branchtargets A, B, C, B;
        brx.idx %r3, TABLE;
        A: mov.b32 %r2, 10; bra END;
        B: mov.b32 %r2, 20; bra END;
        C: mov.b32 %r2, 30;
        END:
    """
    assert warp(code).tolist() == [10, 20, 30, 20] * 8


def test_a_polling_loop_does_not_starve_the_writer() -> None:
    """Warp 0 polls a flag that warp 1 sets from further down the program."""
    code = """
        mov.b32 %r5, flag; setp.gt.u32 %p1, %r99, 31; @%p1 bra WRITER;
        POLL: ld.volatile.shared.b32 %r2, [%r5+4]; setp.ne.u32 %p2, %r2, 42; @%p2 bra POLL; bra END;
        WRITER: mov.b32 %r2, 42; st.volatile.shared.b32 [%r5+4], %r2;
        END:
    """
    init = "mov.b32 %r5, flag; mov.b32 %r6, 0; st.shared.b32 [%r5+4], %r6; bar.sync 0;"
    for options in SCHEDULES:
        got = warp(init + code, block=64, module=".shared .align 8 .b8 flag[8];", options=options)
        assert (got == 42).all()


def test_partial_warps() -> None:
    out = aligned(40, np.uint32)
    code = THREAD + "activemask.b32 %r1; vote.sync.ballot.b32 %r2, %p1, -1; popc.b32 %r3, %r1;"
    code = code.replace("vote", "setp.eq.u32 %p1, %r99, %r99; vote") + "bar.sync 0;"
    run(code + address("rd2", "out", 4) + "st.global.b32 [%rd2], %r2; ret;", block=40, out=out)
    assert out.tolist() == [0xFFFFFFFF] * 32 + [0xFF] * 8
