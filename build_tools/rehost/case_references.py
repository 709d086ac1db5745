"""Expected results of the cases whose instruction the emulator does not know, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from b12x.emulator import numerics

from .case_data import Words

_LANES = np.arange(32)
#: The row whose address each lane passes.
_ROW_OF_LANE = (_LANES * 7 + 3) & 31


def mixed(name: str, words: Words) -> Words:
    """``add.rn.f32.f16`` and the like: inputs are a pair of f16 or bf16, and an f32."""
    opcode, mode, _, narrow = name.split(".")
    pairs = np.ascontiguousarray(words[:, 0]).view(np.uint16).reshape(-1, 2)
    halves = numerics.bf16_to_f32(pairs) if narrow == "bf16" else pairs.view(np.float16)
    with np.errstate(all="ignore"):
        first, second = halves.astype(np.float64).T
        last = np.ascontiguousarray(words[:, 1]).view(np.float32).astype(np.float64)
        if opcode == "fma":
            result = numerics.fma(first, second, last, "f32", mode)
        else:
            result = numerics.add_rounded(first, last if opcode == "add" else -last, "f32", mode)
    return np.ascontiguousarray(result).view(np.uint32).reshape(-1, 1)


def load_transposed(bits: int, matrices: int, words: Words) -> Words:
    """``ldmatrix.m16n16.trans`` (PTX ISA 9.7.14.5.15): lane ``4 g + t`` gets rows 4t to 4t+3 of columns g and g+8."""
    rows = _elements(words, bits)[:, _ROW_OF_LANE]
    group, quarter = _LANES >> 2, _LANES & 3
    out = np.zeros((rows.shape[0], 32, 2 * matrices, 4), np.uint8)
    for matrix in range(matrices):
        for column in range(2):
            for k in range(4):
                out[:, :, 2 * matrix + column, k] = rows[:, 16 * matrix + 4 * quarter + k, group + 8 * column]
    return out.reshape(-1, 8 * matrices).view(np.uint32)


def store_transposed(matrices: int, words: Words) -> Words:
    """``stmatrix.m16n8.trans.b8`` (9.7.14.5.16): byte ``a + 2 b`` of lane ``4 g + t`` to row 2t+a, byte g+8b."""
    memory = _elements(words, 8).copy()
    registers = words.view(np.uint8).reshape(-1, 32, 4, 4)
    group, quarter = _LANES >> 2, _LANES & 3
    for matrix in range(matrices):
        for a in range(2):
            for b in range(2):
                row = _ROW_OF_LANE[8 * matrix + 2 * quarter + a]
                memory[:, row, group + 8 * b] = registers[:, :, matrix, a + 2 * b]
    out: Words = memory.reshape(-1, 16).view(np.uint32)
    return out


def _elements(words: Words, bits: int) -> NDArray[np.uint8]:
    """``[warps, 32, 16]`` elements of the 16-byte rows, one a byte."""
    rows = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 32, 16)
    if bits == 8:
        return rows
    stream = np.unpackbits(rows[..., : 2 * bits], axis=-1, bitorder="little").reshape(*rows.shape[:2], 16, bits)
    out: NDArray[np.uint8] = np.packbits(stream, axis=-1, bitorder="little")[..., 0]
    return out
