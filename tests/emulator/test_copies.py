"""Asynchronous copies: completion, late semantics with poisoned destinations, tensor maps with swizzle and bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from b12x import emulator
from b12x._runtime.abi import TensorMapValue

from .harness import THREAD, address, aligned, kernel, region, run

Array = np.ndarray[Any, Any]
SHARED = ".shared .align 1024 .b8 buffer[32768];\n.shared .align 8 .b64 bar[4];"
# what late copies show by themselves
LATE, EAGER = emulator.Options(races=False), emulator.Options(races=False, copies="eager")
MODES = [emulator.Options(), emulator.Options(copies="eager"), emulator.Options(schedule="random", seed=1)]
BASE = THREAD + "mov.b32 %r90, buffer; mad.lo.u32 %r91, %r99, 16, %r90; mov.b32 %r80, bar;"
INIT = BASE + "setp.ne.u32 %p30, %r99, 0; @%p30 bra READY; mbarrier.init.shared.b64 [%r80], 1;"
INIT += "fence.mbarrier_init.release.cluster; READY: bar.sync 0;"
SPIN = "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r80], 0; @P bra D; bra W; D: }"
LOAD = address("rd1", "src", 16) + "cp.async.cg.shared.global [%r91], [%rd1], 16;"
STORE = (
    "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r91];"
    + address("rd2", "out", 16)
    + "st.global.v4.b32 [%rd2], {%r1, %r2, %r3, %r4};"
)


FILL = "st.shared.v4.b32 [%r91], {0, 0, 0, 0}; bar.sync 0;"


def data(rng: np.random.Generator, size: int = 512) -> Array:
    return aligned(size, np.uint8, rng.integers(0, 256, size))


# cp.async


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("wait", ["cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 0;"])
def test_cp_async(wait: str, options: emulator.Options, rng: np.random.Generator) -> None:
    src, out = data(rng), aligned(512, np.uint8)
    run(BASE + LOAD + wait + STORE + "ret;", module=SHARED, options=options, src=src, out=out)
    assert np.array_equal(src, out)


@pytest.mark.parametrize("wait", ["", "cp.async.commit_group; cp.async.wait_group 1;", "cp.async.wait_group 0;"])
def test_reading_before_the_wait_is_found(wait: str, rng: np.random.Generator) -> None:
    """A dropped wait, a wait for too few groups and a missing commit pass when copies are eager.

    The destination was written before: the copy itself makes it unreadable.
    """
    src = data(rng)
    code = BASE + FILL + LOAD + wait + STORE + "cp.async.wait_all; ret;"
    run(code, module=SHARED, options=EAGER, src=src, out=aligned(512, np.uint8))
    with pytest.raises(emulator.TaintError, match=r"cp.async of PTX line \d+, which has not been waited for"):
        run(code, module=SHARED, options=LATE, src=src, out=aligned(512, np.uint8))


@pytest.mark.parametrize("seed", range(4))
def test_warps_wait_for_their_own_groups(seed: int, rng: np.random.Generator) -> None:
    """Four warps with one, two or three groups in flight each, in any order."""
    src, out = data(rng, 4 * 1536), aligned(4 * 1536, np.uint8)
    code = THREAD + "shr.u32 %r98, %r99, 5; and.b32 %r98, %r98, 1; mov.b32 %r90, buffer; mov.b32 %r1, 0;"
    code += "LOOP: mad.lo.u32 %r2, %r1, 128, %r99; mad.lo.u32 %r91, %r2, 16, %r90;" + address("rd1", "src", 16, "%r2")
    code += "cp.async.cg.shared.global [%r91], [%rd1], 16; cp.async.commit_group;"
    code += "setp.eq.u32 %p1, %r98, 0; @%p1 bra DEEP; cp.async.wait_group 0; DEEP: add.u32 %r1, %r1, 1;"
    code += "setp.lt.u32 %p2, %r1, 3; @%p2 bra LOOP; cp.async.wait_group 1; mov.b32 %r1, 0;"
    code += "STORE: mad.lo.u32 %r2, %r1, 128, %r99; mad.lo.u32 %r91, %r2, 16, %r90;" + address("rd2", "out", 16, "%r2")
    code += "setp.eq.u32 %p3, %r1, 2; @!%p3 bra COPY; cp.async.wait_group 0;"
    code += "COPY: ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r91]; st.global.v4.b32 [%rd2], {%r3, %r4, %r5, %r6};"
    code += "add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 3; @%p2 bra STORE; ret;"
    options = emulator.Options(schedule="random", seed=seed)
    run(code, block=128, module=SHARED, options=options, src=src, out=out)
    assert np.array_equal(src, out)


def test_groups_complete_in_order(rng: np.random.Generator) -> None:
    """Three groups; after wait_group 1 the first two are there and the third is not."""
    src, out = data(rng, 1536), aligned(1536, np.uint8)
    code = BASE + address("rd1", "src", 16)
    code += "".join(
        f"cp.async.ca.shared.global [%r91+{512 * k}], [%rd1+{512 * k}], 16; cp.async.commit_group;" for k in range(3)
    )
    code += "cp.async.wait_group 1;" + address("rd2", "out", 16)
    copy = "ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r91+{0}]; st.global.v4.b32 [%rd2+{0}], {{%r1, %r2, %r3, %r4}};"
    first = code + copy.format(0) + copy.format(512)
    run(first + "cp.async.wait_all; ret;", module=SHARED, src=src, out=out)
    assert np.array_equal(src[:1024], out[:1024])
    for options, error in ((LATE, emulator.TaintError), (MODES[0], emulator.SharedRace)):
        with pytest.raises(error):
            run(first + copy.format(1024) + "cp.async.wait_all; ret;", module=SHARED, src=src, out=out, options=options)


def test_late_copies_read_their_source_at_the_wait(rng: np.random.Generator) -> None:
    """Overwriting the source between issue and wait shows in the result only when copies are late."""
    src, out = aligned(128, np.uint32, 1), aligned(128, np.uint32)
    code = BASE + LOAD + "st.global.v4.b32 [%rd1], {2, 2, 2, 2}; cp.async.wait_all;" + STORE + "ret;"
    regions = [region("src", src, "rw"), region("out", out, "w", False)]
    run(code, module=SHARED, regions=regions, options=LATE, src=src, out=out)
    assert (out == 2).all()
    src[...] = 1
    run(code, module=SHARED, regions=regions, options=EAGER, src=src, out=out)
    assert (out == 1).all()


def test_cp_async_fills_with_zeros(rng: np.random.Generator) -> None:
    """A run-time source size below the copy size: the rest is zero, and bytes beyond it need not exist."""
    src, out = data(rng, 500), aligned(512, np.uint8)
    code = BASE + address("rd1", "src", 16) + "setp.eq.u32 %p1, %r99, 31; selp.b32 %r5, 4, 16, %p1;"
    code += "setp.eq.u32 %p2, %r99, 3; selp.b32 %r5, 0, %r5, %p2; @%p2 mov.b64 %rd1, 64;"
    code += "cp.async.cg.shared.global [%r91], [%rd1], 16, %r5; cp.async.wait_all;" + STORE + "ret;"
    for options in MODES:
        run(code, module=SHARED, options=options, src=src, out=out)
        want = np.concatenate([src, np.zeros(12, np.uint8)])
        want[48:64] = 0
        assert np.array_equal(out, want)


def test_cp_async_bounds_are_checked_at_the_issue(rng: np.random.Generator) -> None:
    with pytest.raises(emulator.OutOfBounds, match=r"cp.async.cg.*outside the elements of 'src'"):
        run(BASE + LOAD + "cp.async.wait_all; ret;", module=SHARED, src=data(rng, 500))
    with pytest.raises(emulator.Misaligned):
        run(BASE + LOAD.replace("[%rd1]", "[%rd1+4]") + "ret;", module=SHARED, src=data(rng, 600))


@pytest.mark.parametrize("options", MODES)
def test_cp_async_completes_an_mbarrier(options: emulator.Options, rng: np.random.Generator) -> None:
    src, out = data(rng), aligned(512, np.uint8)
    init = INIT.replace("[%r80], 1;", "[%r80], 32;")
    code = init + LOAD + "cp.async.mbarrier.arrive.noinc.shared.b64 [%r80];" + SPIN + STORE + "ret;"
    run(code, module=SHARED, options=options, src=src, out=out)
    assert np.array_equal(src, out)
    plain = (
        init + LOAD + "cp.async.mbarrier.arrive.shared.b64 [%r80]; mbarrier.arrive.shared.b64 _, [%r80];" + SPIN + STORE
    )
    run(plain + "ret;", module=SHARED, options=options, src=src, out=out)


def test_ending_with_a_copy_pending(rng: np.random.Generator) -> None:
    with pytest.raises(emulator.PendingCopies, match=r"cp\.async\.cg"):
        run(BASE + LOAD + "cp.async.commit_group; ret;", module=SHARED, src=data(rng))


# Bulk copies

BULK = """
    setp.ne.u32 %p1, %r99, 0; @%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r80], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r90], [%src], 512, [%r80];
    ISSUED:
"""


@pytest.mark.parametrize("options", MODES)
def test_bulk_load(options: emulator.Options, rng: np.random.Generator) -> None:
    src, out = data(rng), aligned(512, np.uint8)
    run(INIT + BULK + SPIN + STORE + "ret;", module=SHARED, options=options, src=src, out=out)
    assert np.array_equal(src, out)


def test_a_dropped_full_barrier_wait_is_found(rng: np.random.Generator) -> None:
    src = data(rng)
    code = INIT + FILL + BULK + STORE + SPIN + "ret;"
    run(code, module=SHARED, options=EAGER, src=src, out=aligned(512, np.uint8))
    with pytest.raises(emulator.TaintError, match=r"copy of PTX line \d+, which has not been waited for"):
        run(code, module=SHARED, options=LATE, src=src, out=aligned(512, np.uint8))


def test_bulk_load_that_nobody_waits_for(rng: np.random.Generator) -> None:
    with pytest.raises(emulator.PendingCopies, match=r"cp\.async\.bulk"):
        run(INIT + BULK + "ret;", module=SHARED, src=data(rng))


def test_expecting_too_many_bytes_is_a_deadlock(rng: np.random.Generator) -> None:
    with pytest.raises(emulator.Deadlock, match="waits for 0 arrivals and 16 bytes"):
        run(INIT + BULK.replace("[%r80], 512;", "[%r80], 528;") + SPIN + "ret;", module=SHARED, src=data(rng))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("[%r90], [%src], 512", "[%r90], [%src], 520", emulator.Misaligned),
        ("[%r90], [%src], 512", "[%r90], [%src+8], 496", emulator.Misaligned),
        ("[%r90], [%src], 512", "[%r90], [%src], 528", emulator.OutOfBounds),
        ("[%r90], [%src], 512", "[%r90+32512], [%src], 512", emulator.OutOfBounds),
        ("[%r90], [%src], 512", "[%r90+32352], [%src], 432", emulator.BarrierError),
    ],
)
def test_wrong_bulk_copies(old: str, new: str, error: type[Exception], rng: np.random.Generator) -> None:
    """Sizes and addresses that are no multiples of 16, ranges outside, and a copy over a live mbarrier."""
    module = (
        SHARED
        if error is not emulator.BarrierError
        else SHARED.replace(".shared .align 8 .b64 bar[4];", ".shared .align 16 .b64 bar[4];")
    )
    with pytest.raises(error):
        run(INIT + BULK.replace(old, new) + SPIN + "ret;", module=module, src=data(rng))


BULK_STORE = """
    st.shared.v4.b32 [%r91], {%r99, %r99, %r99, %r99}; fence.proxy.async.shared::cta; bar.sync 0;
    setp.ne.u32 %p1, %r99, 0; @%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%r90], 512; cp.async.bulk.commit_group;
"""


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("read", ["", ".read"])
def test_bulk_store(options: emulator.Options, read: str) -> None:
    out = aligned((32, 4), np.uint32)
    run(BASE + BULK_STORE + f"cp.async.bulk.wait_group{read} 0; END: ret;", module=SHARED, options=options, out=out)
    assert np.array_equal(out, np.repeat(np.arange(32), 4).reshape(32, 4))


def test_reusing_the_source_of_a_bulk_store_too_early() -> None:
    """Late copies read at wait_group.read, so an overwrite before it shows."""
    out = aligned((32, 4), np.uint32)
    again = "st.shared.b32 [%r90], 99; cp.async.bulk.wait_group.read 0;"
    run(BASE + BULK_STORE + again + "END: ret;", module=SHARED, options=LATE, out=out)
    assert out[0, 0] == 99
    good = "cp.async.bulk.wait_group.read 0; st.shared.b32 [%r90], 99;"
    run(BASE + BULK_STORE + good + "END: ret;", module=SHARED, options=LATE, out=out)
    assert out[0, 0] == 0


def test_bulk_groups_complete_in_order() -> None:
    """wait_group.read 1 reads the older of two groups and leaves the younger one alone."""
    out = aligned((2, 32, 4), np.uint32)
    second = "add.s64 %rd5, %out, 512; cp.async.bulk.global.shared::cta.bulk_group [%rd5], [%r90], 512;"
    second += "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 1; st.shared.b32 [%r90], 77;"
    run(BASE + BULK_STORE + second + "cp.async.bulk.wait_group 0; END: ret;", module=SHARED, options=LATE, out=out)
    assert out[:, 0, 0].tolist() == [0, 77]


def test_bulk_store_that_nobody_waits_for() -> None:
    with pytest.raises(emulator.PendingCopies):
        run(BASE + BULK_STORE + "END: ret;", module=SHARED, out=aligned((32, 4), np.uint32))


def test_bulk_store_of_bytes_that_nothing_wrote() -> None:
    code = BASE + BULK_STORE.replace("[%r91], {%r99, %r99, %r99, %r99}", "[%r91+16], {1, 1, 1, 1}")
    with pytest.raises(emulator.TaintError, match="never written"):
        run(code + "cp.async.bulk.wait_group 0; END: ret;", module=SHARED, out=aligned((32, 4), np.uint32))


def test_bulk_store_is_visible_only_after_the_full_wait() -> None:
    """A load of the target after wait_group.read alone sees unwritten memory."""
    out, copy = aligned((32, 4), np.uint32), aligned(4, np.uint32)
    code = (
        BASE
        + BULK_STORE
        + "cp.async.bulk.wait_group<read> 0; ld.global.b32 %r1, [%out]; st.global.b32 [%copy], %r1; END: ret;"
    )
    regions = [region("out", out, "rw", False), region("copy", copy, "w", False)]
    run(code.replace("<read>", ""), module=SHARED, regions=regions, out=out, copy=copy)
    with pytest.raises(emulator.TaintError):
        run(code.replace("<read>", ".read"), module=SHARED, regions=regions, out=out, copy=copy)


def test_multicast_reaches_every_cta_of_the_mask(rng: np.random.Generator) -> None:
    src, out = data(rng), aligned((2, 512), np.uint8)
    code = INIT + "mov.u32 %r98, %cluster_ctarank; mbarrier.expect_tx.shared.b64 [%r80], 512;".replace(
        "mbarrier.expect_tx", "setp.ne.u32 %p2, %r99, 0; @!%p2 mbarrier.arrive.expect_tx"
    ).replace("b64 [%r80]", "b64 _, [%r80]")
    code += "barrier.cluster.arrive; barrier.cluster.wait; or.b32 %r97, %r98, %r99; "
    code += "setp.ne.u32 %p1, %r97, 0; mov.b16 %rs1, 3;"
    code += "@%p1 bra NEXT; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    code += "[%r90], [%src], 512, [%r80], %rs1;"
    code += "NEXT:" + SPIN + "mul.wide.u32 %rd9, %r98, 512; add.s64 %out, %out, %rd9;" + STORE
    code += "barrier.cluster.arrive; barrier.cluster.wait; ret;"
    for options in MODES:
        run(code, module=SHARED, grid=(2,), cluster=(2,), options=options, src=src, out=out)
        assert np.array_equal(out[0], src)
        assert np.array_equal(out[1], src)


# Tensor maps


def expected_tile(x: Array, box: tuple[int, ...], coords: tuple[int, ...], swizzle: str, where: int) -> Array:
    """Shared memory after a tensor load, byte by byte: row-major box, bits of each absolute address exchanged."""
    mask = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[swizzle]
    shape = box[::-1]
    item = x.itemsize
    out = np.zeros(int(np.prod(box)) * item, np.uint8)
    for linear, place in enumerate(np.ndindex(*shape)):
        index = tuple(p + c for p, c in zip(place, coords[::-1], strict=True))
        inside = all(0 <= i < n for i, n in zip(index, x.shape, strict=True))
        value = x[index].tobytes() if inside else bytes(item)
        for b in range(item):
            a = where + linear * item + b
            out[(a ^ ((a >> 7) & mask) << 4) - where] = value[b]
    return out


def tensor_map(x: Array, box: tuple[int, ...], swizzle: str, dtype: str) -> TensorMapValue:
    return TensorMapValue(x.ctypes.data, dtype, x.shape[::-1], x.strides[-2::-1], box, swizzle)


def tensor_kernel(dims: int, load: bool, size: int, offset: int) -> str:
    coords = ", ".join(f"%c{i}" for i in range(dims))
    code = "".join(f".reg .b32 %c{i}; ld.param.b32 %c{i}, [coord+{4 * i}];" for i in range(dims))
    code += ".reg .b64 %io, %map; ld.param.b64 %io, [p_io]; mov.b64 %map, tmap; cvta.param.u64 %map, %map;"
    code += INIT + f"add.u32 %r90, %r90, {offset}; add.u32 %r91, %r91, {offset}; setp.ne.u32 %p1, %r99, 0;"
    loop = f"""
        mov.b32 %r70, %r99;
        LOOP: setp.ge.u32 %p5, %r70, {size // 16}; @%p5 bra DONE;
        mad.lo.u32 %r71, %r70, 16, %r90; mul.wide.u32 %rd9, %r70, 16; add.s64 %rd9, %rd9, %io;
        {{}} add.u32 %r70, %r70, 32; bra LOOP; DONE:
    """
    if load:
        code += f"@%p1 bra ISSUED; mbarrier.arrive.expect_tx.shared.b64 _, [%r80], {size};"
        code += f"cp.async.bulk.tensor.{dims}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        code += f"[%r90], [%map, {{{coords}}}], [%r80]; ISSUED:" + SPIN
        code += loop.format("ld.shared.v4.b32 {%r1,%r2,%r3,%r4}, [%r71]; st.global.v4.b32 [%rd9], {%r1,%r2,%r3,%r4};")
    else:
        code += loop.format("ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd9]; st.shared.v4.b32 [%r71], {%r1,%r2,%r3,%r4};")
        code += "fence.proxy.async.shared::cta; bar.sync 0;"
        # all lanes store, as some kernels do: the bytes move once, and each lane waits for its own group
        code += f"cp.async.bulk.tensor.{dims}d.global.shared::cta.tile.bulk_group [%map, {{{coords}}}], [%r90];"
        code += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    params = f".param .align 64 .b8 tmap[128], .param .align 4 .b8 coord[{4 * dims}], .param .u64 p_io"
    return kernel(code + "ret;", params, SHARED)


CASES = [
    ((96,), (32,), (64,), "none", "uint8"),
    ((40, 64), (32, 16), (8, 4), "none", "bfloat16"),
    ((40, 64), (32, 16), (32, -3), "64B", "bfloat16"),
    ((40, 64), (64, 8), (0, 36), "128B", "bfloat16"),
    ((40, 64), (16, 24), (60, 20), "32B", "bfloat16"),
    ((3, 40, 128), (64, 32, 1), (64, 16, 2), "64B", "uint8"),
    ((3, 5, 16, 32), (32, 8, 2, 2), (0, 12, 4, 1), "128B", "float32"),
    ((2, 3, 2, 4, 16), (8, 2, 2, 3, 2), (-4, 1, 1, 0, -1), "32B", "float32"),
]
NUMPY = {"uint8": np.uint8, "bfloat16": np.uint16, "float32": np.uint32}


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("offset", [0, 128, 2304])
@pytest.mark.parametrize(("shape", "box", "coords", "swizzle", "dtype"), CASES)
def test_tensor_load(
    shape: tuple[int, ...],
    box: tuple[int, ...],
    coords: tuple[int, ...],
    swizzle: str,
    dtype: str,
    offset: int,
    options: emulator.Options,
    rng: np.random.Generator,
) -> None:
    """Elements outside the tensor are zero, and all bytes of the box count for the mbarrier."""
    x = aligned(shape, NUMPY[dtype], rng.integers(1, 255, shape))
    want = expected_tile(x, box, coords, swizzle, 1024 + offset)
    out = aligned(want.size, np.uint8)
    emulator.launch(
        emulator.parse(tensor_kernel(len(shape), True, want.size, offset)),
        grid=(1,),
        block=(32,),
        params=[tensor_map(x, box, swizzle, dtype), np.array(coords, np.int32).tobytes(), out.ctypes.data],
        regions=[region("x", x, "r"), region("out", out, "w", False)],
        options=options,
    )
    assert np.array_equal(out, want)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(("shape", "box", "coords", "swizzle", "dtype"), CASES)
def test_tensor_store(
    shape: tuple[int, ...],
    box: tuple[int, ...],
    coords: tuple[int, ...],
    swizzle: str,
    dtype: str,
    options: emulator.Options,
    rng: np.random.Generator,
) -> None:
    """What lies outside the tensor is dropped, and nothing else changes."""
    x = aligned(shape, NUMPY[dtype], rng.integers(1, 255, shape))
    tile = rng.integers(1, 255, box[::-1]).astype(NUMPY[dtype])
    shared = expected_tile(tile, box, (0,) * len(box), swizzle, 1024)
    source = aligned(shared.size, np.uint8, shared)
    want = x.copy()
    for place in np.ndindex(*box[::-1]):
        index = tuple(p + c for p, c in zip(place, coords[::-1], strict=True))
        if all(0 <= i < n for i, n in zip(index, shape, strict=True)):
            want[index] = tile[place]
    emulator.launch(
        emulator.parse(tensor_kernel(len(shape), False, shared.size, 0)),
        grid=(1,),
        block=(32,),
        params=[tensor_map(x, box, swizzle, dtype), np.array(coords, np.int32).tobytes(), source.ctypes.data],
        regions=[region("x", x, "w"), region("source", source, "r")],
        options=options,
    )
    assert np.array_equal(x, want)


def launch_map(
    m: TensorMapValue, regions: list[Any], coords: tuple[int, ...] = (0, 0), load: bool = True, offset: int = 0
) -> None:
    io = aligned(4096, np.uint8)
    emulator.launch(
        emulator.parse(tensor_kernel(2, load, int(np.prod(m.box)) * 2, offset)),
        grid=(1,),
        block=(32,),
        params=[m, np.array(coords, np.int32).tobytes(), io.ctypes.data],
        regions=[*regions, region("io", io)],
    )


def test_maps_are_checked() -> None:
    x = aligned((40, 64), np.uint16)
    good = tensor_map(x, (32, 16), "64B", "bfloat16")
    launch_map(good, [region("x", x, "r")])
    with pytest.raises(emulator.LaunchError, match="not inside a passed tensor"):
        launch_map(good, [region("x", x[:39], "r")])
    with pytest.raises(emulator.LaunchError, match="not inside a passed tensor"):
        launch_map(good, [region("x", x[:, :63], "r")])
    with pytest.raises(emulator.LaunchError, match="exceeds the 64B swizzle"):
        launch_map(tensor_map(x, (64, 16), "64B", "bfloat16"), [region("x", x, "r")])
    with pytest.raises(emulator.LaunchError, match="multiples of 16"):
        launch_map(tensor_map(x, (4, 16), "none", "bfloat16"), [region("x", x, "r")])
    with pytest.raises(emulator.LaunchError, match="multiples of 16"):
        launch_map(tensor_map(aligned((40, 60), np.uint16), (8, 8), "none", "bfloat16"), [region("x", x, "r")])
    with pytest.raises(emulator.Misaligned, match="128"):
        launch_map(good, [region("x", x, "r")], offset=64)
    with pytest.raises(emulator.OutOfBounds, match="read-only"):
        launch_map(good, [region("x", x, "r")], load=False)


def test_a_tensor_store_of_unwritten_bytes_names_the_place() -> None:
    x, io = aligned((40, 64), np.uint16), aligned(4096, np.uint8)
    text = tensor_kernel(2, False, 1024, 0).replace(
        "st.shared.v4.b32 [%r71]", "setp.ne.u32 %p9, %r70, 7; @%p9 st.shared.v4.b32 [%r71]"
    )
    args = [tensor_map(x, (32, 16), "64B", "bfloat16"), bytes(8), io.ctypes.data]
    with pytest.raises(emulator.TaintError, match=r"tensor map of parameter 0 .* shared address 0x470"):
        emulator.launch(
            emulator.parse(text), grid=(1,), block=(32,), params=args, regions=[region("x", x), region("io", io)]
        )


def test_only_map_parameters_are_maps() -> None:
    x, io = aligned((40, 64), np.uint16), aligned(4096, np.uint8)
    text = tensor_kernel(2, True, 1024, 0).replace("mov.b64 %map, tmap", "mov.b64 %map, coord")
    args = [tensor_map(x, (32, 16), "64B", "bfloat16"), bytes(8), io.ctypes.data]
    with pytest.raises(emulator.LaunchError, match="not the address of a tensor-map parameter"):
        emulator.launch(
            emulator.parse(text), grid=(1,), block=(32,), params=args, regions=[region("x", x), region("io", io)]
        )
    with pytest.raises(emulator.LaunchError, match="is not a tensor map"):
        emulator.launch(
            emulator.parse(text), grid=(1,), block=(32,), params=[args[0], args[0], 0], regions=[region("x", x)]
        )
