"""The table of ops. An op's module is imported only when it is asked for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OpMeta:
    """What is known about an op without importing it.

    ``entry_points`` are the public names of the op's module; with ``META`` they are its ``__all__``. ``requires`` names
    what ``is_supported`` checks beyond the device.
    """

    name: str
    group: str
    api_style: Literal["planned", "oneshot", "stateful"]
    entry_points: tuple[str, ...]
    archs: tuple[str, ...] = ("sm120a", "sm121a")
    dtypes: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    status: str = "stable"
    provenance: str = ""
    test_path: str = ""
    since: str = "0.1.0"
    notes: str = ""

    @property
    def qualname(self) -> str:
        return f"{self.group}.{self.name}"


_OPS = (
    OpMeta(
        name="blockscaled",
        group="gemm",
        api_style="planned",
        entry_points=("Binding", "Caps", "Plan", "bind", "clear_caches", "is_supported", "mm", "plan", "run"),
        dtypes=("float4_e2m1fn",),
        recipes=("nvfp4",),
        test_path="tests/gemm/blockscaled",
        notes="C = alpha * (A * SFA) @ (B * SFB)^T; bf16, fp16 and f32 results; M, N, K and the batch are live.",
    ),
    OpMeta(
        name="nvfp4",
        group="quantization",
        api_style="planned",
        entry_points=(
            "Binding",
            "Caps",
            "Outputs",
            "Plan",
            "allocate_outputs",
            "bind",
            "clear_caches",
            "is_supported",
            "plan",
            "quantize",
            "run",
        ),
        dtypes=("bfloat16", "float16"),
        recipes=("nvfp4",),
        test_path="tests/quantization/nvfp4",
        notes="Rows to packed E2M1 codes and swizzled E4M3 block scales.",
    ),
)
_BY_NAME = {meta.qualname: meta for meta in _OPS}


def list_ops() -> tuple[OpMeta, ...]:
    """All ops, sorted by qualified name."""
    return _OPS


def find_op(qualname: str) -> OpMeta:
    """The op named ``<group>.<op>``.

    Raises
    ------
    KeyError
        There is no such op; the message lists those that there are.
    """
    try:
        return _BY_NAME[qualname]
    except KeyError:
        close = difflib.get_close_matches(qualname, _BY_NAME, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise KeyError(f"unknown op {qualname!r}; b12x has {', '.join(_BY_NAME)}{hint}") from None
