"""Which instructions are expanded, and which are refused: what SM120 has and Hopper lacks.

Established with ptxas 13.4, form by form. Everything else passes through; a form that neither this table nor Hopper
knows is named by the assembler, with its line, which the expansions do not change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from . import arithmetic, convert, memory, mma
from .body import Body
from .scan import Instruction


class Expansion(NamedTuple):
    """``write`` expands every instruction of these opcodes for which ``applies`` holds."""

    title: str
    opcodes: tuple[str, ...]
    applies: Callable[[Instruction], bool]
    write: Callable[[Instruction, Body], None]


def _is_f32x2(ins: Instruction) -> bool:
    return "f32x2" in ins.mods


def _has_three(ins: Instruction) -> bool:
    return ins.mods[-1] == "f32" and len(ins.operands) == 4


def _is_mixed(ins: Instruction) -> bool:
    return ins.mods[-1] in ("f16", "bf16") and "f32" in ins.mods


def _is_f32_redux(ins: Instruction) -> bool:
    return ins.mods[-1] == "f32"


EXPANSIONS = (
    Expansion("mma with kind", ("mma",), mma.has_kind, mma.multiply),
    Expansion("narrow conversion", ("cvt",), convert.is_narrow, convert.convert),
    Expansion("matrix load below 16 bits", ("ldmatrix",), memory.is_small_load, memory.load_matrix),
    Expansion("matrix store of bytes", ("stmatrix",), memory.is_byte_store, memory.store_matrix),
    Expansion("f32x2 arithmetic", ("add", "sub", "mul", "fma"), _is_f32x2, arithmetic.f32x2),
    Expansion("mixed precision", ("add", "sub", "fma"), _is_mixed, arithmetic.mixed),
    Expansion("three-input min, max", ("min", "max"), _has_three, arithmetic.min_max_3),
    Expansion("f32 reduction", ("redux",), _is_f32_redux, arithmetic.redux_f32),
    Expansion("256-bit load", ("ld",), memory.is_wide, memory.load_wide),
    Expansion("256-bit store", ("st",), memory.is_wide, memory.store_wide),
)

#: Name pattern -> what it is. Hopper has neither these nor an expansion here.
REFUSED = (
    (r"mma\.sp\b.*\.kind::", "sparse MMA with a kind"),
    (r"tcgen05\.", "fifth-generation tensor core instruction"),
    (r"clusterlaunchcontrol\.", "cluster launch control"),
    (r"st\.bulk\b", "bulk store of a constant"),
    (r".*\.(tile::gather4|tile::scatter4|im2col::w|im2col::w::128|cta_group::\d)\b", "tensor copy mode"),
    (r"cvt\..*(\brs\b|x4\b|s2f6x2|scaled::)", "conversion"),
    (r"cvt\..*satfinite.*\btf32\b", "saturating conversion to tf32"),
)
_REFUSED = tuple((re.compile(pattern), what) for pattern, what in REFUSED)


def expansion_of(ins: Instruction) -> Expansion | None:
    """The expansion that an instruction needs, None where Hopper has it."""
    for expansion in EXPANSIONS:
        if ins.opcode in expansion.opcodes and ins.mods and expansion.applies(ins):
            return expansion
    return None


def refusal_of(ins: Instruction) -> str | None:
    """What an instruction without an expansion is, None where it is not known to be missing."""
    name = ins.name
    return next((what for pattern, what in _REFUSED if pattern.match(name)), None)
