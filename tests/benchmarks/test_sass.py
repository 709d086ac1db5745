"""Loops of a control-flow graph, wavefronts of shared memory, and what counts as a target missed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sass import report
from sass.graph import Graph, Instruction, is_bulk_copy, is_global, is_mma, parse, width
from sass.traffic import Traffic, wavefronts

#: A kernel as the compiler lays one out: the retry of a wait stands behind the end, a producer's loop beside the MMAs'.
KERNEL = """
    00 S2R R0
    10 @P0 BRA 0x90
    20 MOV R1
    30 SYNCS.PHASECHK.TRANS64.TRYWAIT P1
    40 @!P1 BRA 0xf0
    50 OMMA.SF.16864 R2
    60 OMMA.SF.16864 R3
    70 BRA.U UP0,0x30
    80 EXIT
    90 MOV R5
    a0 UTMALDG.3D [UR1]
    b0 UBLKCP.S.G [UR2]
    c0 @P2 BRA 0xa0
    d0 BRA.U !UP1,0x90
    e0 EXIT
    f0 SYNCS.PHASECHK.TRANS64.TRYWAIT P1
    100 @!P1 BRA 0xf0
    110 BRA 0x50
    120 BRA 0x120
"""


def instructions(text: str) -> list[Instruction]:
    found = []
    for line in text.split("\n"):
        words = line.split()
        if words:
            guard = words.pop(1) if words[1].startswith("@") else ""
            found.append(Instruction(int(words[0], 16), words[1], " ".join(words[2:]), guard))
    return found


def test_innermost_loops() -> None:
    """The retry belongs to the loop of the MMAs, is counted once, and is a loop of its own."""
    code = Graph(instructions(KERNEL))
    (multiplying,) = code.innermost(is_mma)
    assert [i.address for i in multiplying.body] == [0x30, 0x40, 0x50, 0x60, 0x70, 0xF0, 0x100, 0x110]
    assert multiplying.count(is_mma) == 2
    (producing,) = code.innermost(is_bulk_copy)
    assert [i.address for i in producing.body] == [0xA0, 0xB0, 0xC0]
    assert [(loop.head, loop.size) for loop in code.loops] == [(0xF0, 2), (0xA0, 3), (0x90, 5), (0x30, 8)]


def test_dominators() -> None:
    code = Graph(instructions(KERNEL))
    assert code.dominators[0x110] == {0x0, 0x20, 0x30, 0xF0, 0x110}
    assert 0x120 not in code.order  # the trap behind the end is never reached


def test_code_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match="BRX, whose targets are not known"):
        Graph(instructions("0 BRX R1\n10 EXIT"))
    with pytest.raises(ValueError, match="no target in BRA"):
        Graph(instructions("0 BRA R1\n10 EXIT"))
    with pytest.raises(ValueError, match="2 functions"):
        parse([{}, [{}, {}]])


def test_reading_the_disassembler() -> None:
    data = [
        {"opcode": "LDG.E.128.CONSTANT", "operands": "R4,desc[UR4][R2.64]"},
        {"predicate": "@P0", "opcode": "LDGSTS.E.BYPASS.128", "operands": "[R1],desc[UR4][R2.64]"},
        {"opcode": "STG.E.U16"},
        {"opcode": "STG.E"},
        {"opcode": "STG.E.64"},
        {"opcode": "EXIT"},
        {"opcode": "NOP"},
    ]
    found = parse([{}, [{"sass-instructions": data}]])
    assert [i.address for i in found] == [0, 16, 32, 48, 64, 80]
    assert [width(i) for i in found if is_global(i)] == [16, 16, 2, 4, 8]


@pytest.mark.parametrize(
    ("offsets", "size", "expected"),
    [
        ([4 * lane for lane in range(32)], 4, (1, 1)),
        ([0] * 32, 4, (1, 1)),  # one word for all
        ([128 * lane for lane in range(32)], 4, (32, 1)),
        ([16 * lane for lane in range(32)], 4, (4, 1)),
        ([2 * lane for lane in range(32)], 2, (1, 1)),
        ([8 * lane for lane in range(32)], 8, (2, 2)),
        ([16 * lane for lane in range(32)], 16, (4, 4)),
        ([64 * row for row in range(8)], 16, (4, 1)),  # rows of 64 bytes without a swizzle
        ([64 * row + 16 * (row // 2 % 4) for row in range(8)], 16, (1, 1)),
    ],
)
def test_wavefronts(offsets: list[int], size: int, expected: tuple[int, int]) -> None:
    assert wavefronts(offsets, size) == expected


def test_multiplies_between_stores() -> None:
    """Of two warps, the second multiplies while the first stores, and not the other way round."""
    traffic = Traffic()
    cta: Any = object()
    multiply = SimpleNamespace(mma=object(), ins=None)
    store = SimpleNamespace(mma=None, ins=SimpleNamespace(opcode="st", mods=("global", "v4")))
    for warp, op in ((0, multiply), (0, store), (1, multiply), (0, store), (1, store), (1, store), (0, multiply)):
        traffic.block(cta, [warp], [op])
    assert traffic.multiplies_during_stores() == (2, 1)
    assert traffic.multiplies == 3


def test_bytes_before_the_first_wait() -> None:
    """Copies to global memory and those after a landing are not counted."""
    traffic = Traffic()
    cta: Any = object()

    def bulk(size: int, *mods: str, target: object = object()) -> Any:
        return SimpleNamespace(ins=SimpleNamespace(mods=mods), size=size, target=target)

    first = bulk(1024, "shared::cluster", "global")
    traffic.copy(cta, first)
    traffic.copy(cta, bulk(2048, "shared::cluster", "global"))
    traffic.copy(cta, bulk(512, "global", "shared::cta", target=None))
    traffic.landed(cta, first)
    traffic.copy(cta, bulk(4096, "shared::cluster", "global"))
    assert traffic.before_first_wait == 3072
    assert traffic.copied == 7168


def test_what_is_missed() -> None:
    good: dict[str, Any] = {"key": "gemm.blockscaled:groups=2", "slots_over_mma_cycles": 0.12}
    good |= {"shared_bytes_per_mma_clock": 66.0, "store_stretches": 9, "with_multiplies_of_others": 8}
    good |= {"shared": {"ldmatrix": {"conflicts": 0}}}
    assert report.missed([good]) == []
    bad = good | {"slots_over_mma_cycles": 0.21, "with_multiplies_of_others": 0, "spill_bytes": 8}
    bad |= {"shared": {"stmatrix": {"conflicts": 3}}}
    assert len(report.missed([bad])) == 4
    decode: dict[str, Any] = {"key": "d", "instructions_per_576_bytes": 20.0, "loop_global_accesses": {"LDGSTS 16": 8}}
    decode |= {"bytes_before_first_wait": 9000, "whole_share": 9000}
    assert report.missed([decode]) == []
    decode |= {"whole_share": 90000, "loop_global_accesses": {"LDG 4": 1}, "instructions_per_576_bytes": 65.0}
    assert len(report.missed([decode])) == 3
