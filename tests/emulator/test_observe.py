"""What an observer is told: addresses of shared memory by warp, asynchronous copies, and the blocks that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from b12x import emulator

from .harness import THREAD, address, aligned, run

SHARED = ".shared .align 1024 .b8 buffer[4096];"
#: Each thread's address: 16 bytes apart.
BASE = THREAD + "mov.b32 %r90, buffer; mad.lo.u32 %r91, %r99, 16, %r90;"


class Notes:
    """Keeps everything."""

    def __init__(self) -> None:
        self.accesses: list[tuple[str, list[int], list[int], int, bool]] = []
        self.copies: list[str] = []
        self.opcodes: list[tuple[tuple[int, ...], list[str]]] = []

    def block(self, cta: Any, warps: Sequence[int], ops: Sequence[Any]) -> None:
        self.opcodes.append((tuple(warps), [op.ins.opcode for op in ops]))

    def shared(self, cta: Any, ins: Any, warps: Any, offsets: Any, size: int, write: bool) -> None:
        self.accesses.append((ins.opcode, warps.tolist(), offsets.tolist(), size, write))

    def copy(self, cta: Any, copy: Any) -> None:
        self.copies.append(f"asked {copy.size}")

    def landed(self, cta: Any, copy: Any) -> None:
        self.copies.append(f"landed {copy.size}")


def observed(body: str, block: int = 32, **tensors: Any) -> Notes:
    notes = Notes()
    run(body, module=SHARED, block=block, options=emulator.Options(observer=notes), **tensors)
    return notes


def test_loads_and_stores_by_lane() -> None:
    """Of two warps, the second with its upper lanes off."""
    code = BASE + "setp.ge.u32 %p1, %r99, 40; @%p1 bra END; st.shared.b64 [%r91+8], %rd9; END: ret;"
    notes = observed("mov.b64 %rd9, 7;" + code, block=64)
    found = {
        (warp, offset)
        for opcode, warps, offsets, size, write in notes.accesses
        for warp, offset in zip(warps, offsets, strict=True)
        if (opcode, size, write) == ("st", 8, True)
    }
    assert found == {(t // 32, 16 * t + 8) for t in range(40)}


def test_matrix_rows() -> None:
    """ldmatrix tells the rows that its first lanes point at, stmatrix as well."""
    code = BASE + "st.shared.v4.b32 [%r91], {0, 0, 0, 0}; bar.sync 0;"
    code += "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [%r91]; bar.sync 0;"
    code += "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r91], {%r1}; ret;"
    notes = observed(code, block=64)
    rows = [a for a in notes.accesses if a[0] in ("ldmatrix", "stmatrix")]
    lanes = [t for t in range(64) if t % 32 < 16]
    assert rows[0] == ("ldmatrix", [t // 32 for t in lanes], [16 * t for t in lanes], 16, False)
    lanes = [t for t in range(64) if t % 32 < 8]
    assert rows[1] == ("stmatrix", [t // 32 for t in lanes], [16 * t for t in lanes], 16, True)


def test_copies_when_they_are_asked_for_and_when_they_land(rng: np.random.Generator) -> None:
    src, out = aligned(512, np.uint8, rng.integers(0, 256, 512)), aligned(512, np.uint8)
    code = BASE + address("rd1", "src", 16) + "cp.async.cg.shared.global [%r91], [%rd1], 16; cp.async.wait_all;"
    code += "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r91];" + address("rd2", "out", 16)
    notes = observed(code + "st.global.v4.b32 [%rd2], {%r1, %r2, %r3, %r4}; ret;", src=src, out=out)
    assert notes.copies == ["asked 16", "landed 16"]
    assert [opcode for opcode, *_ in notes.accesses] == ["ld"]  # a copy's own writes are not accesses of lanes
    assert np.array_equal(src, out)


def test_blocks_in_order() -> None:
    """Every instruction that runs is in some block, with its warps."""
    notes = observed(
        THREAD + "setp.lt.u32 %p1, %r99, 32; @%p1 bra LOW; mov.b32 %r1, 1; LOW: bar.sync 0; ret;", block=64
    )
    ran = {warp: [o for warps, opcodes in notes.opcodes if warp in warps for o in opcodes] for warp in (0, 1)}
    assert [o for o in ran[0] if o in ("mov", "bar", "ret")].count("mov") == 1
    assert [o for o in ran[1] if o in ("mov", "bar", "ret")].count("mov") == 2
    assert ran[0][-1] == ran[1][-1] == "ret"
