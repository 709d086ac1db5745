"""The table of ops. An op's module is imported only when it is asked for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from b12x._runtime.spec import module_name


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

    @property
    def module(self) -> str:
        """Full name of the op's module."""
        return module_name(self.qualname)


_OPS = (
    OpMeta(
        name="block_fp8_linear",
        group="gemm",
        api_style="planned",
        entry_points=(
            "Binding",
            "Caps",
            "Plan",
            "Weight",
            "bind",
            "clear_caches",
            "is_supported",
            "pack_weight",
            "plan",
            "prewarm",
            "quantize_input",
            "run",
        ),
        dtypes=("bfloat16", "float16"),
        recipes=("mxfp8",),
        test_path="tests/gemm/block_fp8_linear",
        notes="y = x @ W^T (+ bias) of FP8 weights with scales of 128 x 128 blocks, run as MXFP8.",
    ),
    OpMeta(
        name="blockscaled",
        group="gemm",
        api_style="planned",
        entry_points=(
            "Binding",
            "Caps",
            "FusedCaps",
            "FusedPlan",
            "Plan",
            "bind",
            "bind_fused",
            "clear_caches",
            "is_supported",
            "mm",
            "mm_fused_quant_a",
            "mm_fused_quant_a_grouped",
            "plan",
            "plan_fused",
            "run",
        ),
        dtypes=("float4_e2m1fn", "float8_e4m3fn"),
        recipes=("nvfp4", "mxfp4", "mxfp8", "fp8", "block_fp8"),
        test_path="tests/gemm/blockscaled",
        notes="C = alpha * (A * SFA) @ (B * SFB)^T + bias; bf16, fp16 and f32 results; M, N, K and the batch are live.",
    ),
    OpMeta(
        name="bmm",
        group="gemm",
        api_style="oneshot",
        entry_points=(
            "Binding",
            "Caps",
            "Plan",
            "bind",
            "bmm",
            "can_implement_bmm",
            "clear_caches",
            "is_bmm_supported",
            "is_supported",
            "plan",
            "prewarm_bmm",
            "run",
        ),
        dtypes=("bfloat16",),
        recipes=("mxfp8",),
        test_path="tests/gemm/bmm",
        notes="out[b] = lhs[b] @ W[b]; MXFP8 weights of either layout, dequantised exactly to bf16; functions of gemm.",
    ),
    OpMeta(
        name="mla_query_projection",
        group="gemm",
        api_style="oneshot",
        entry_points=(
            "Binding",
            "Caps",
            "Plan",
            "bind",
            "can_implement",
            "clear_caches",
            "is_supported",
            "plan",
            "prewarm",
            "run",
        ),
        dtypes=("bfloat16",),
        recipes=("mxfp8", "bf16"),
        test_path="tests/gemm/mla_query_projection",
        notes="Absorbed MLA queries: q_nope @ W_UK beside the RoPE part, in bf16 or E4M3; MXFP8 or bf16 weights.",
    ),
    OpMeta(
        name="mxfp8_linear",
        group="gemm",
        api_style="oneshot",
        entry_points=(
            "Binding",
            "Caps",
            "Plan",
            "Weight",
            "bind",
            "clear_caches",
            "is_supported",
            "mm",
            "pack_weight",
            "plan",
            "run",
        ),
        dtypes=("bfloat16", "float16"),
        recipes=("mxfp8",),
        test_path="tests/gemm/mxfp8_linear",
        notes="y = x @ W^T (+ bias) of MXFP8 weights; the input is quantised on the way.",
    ),
    OpMeta(
        name="tensor_fp8_linear",
        group="gemm",
        api_style="oneshot",
        entry_points=(
            "Binding",
            "Caps",
            "Plan",
            "Weight",
            "bind",
            "clear_caches",
            "is_supported",
            "mm",
            "pack_weight",
            "plan",
            "prewarm",
            "run",
        ),
        dtypes=("float8_e4m3fn",),
        recipes=("fp8",),
        test_path="tests/gemm/tensor_fp8_linear",
        notes="y = scale * (x @ W^T) (+ bias) of E4M3 operands with one static scale.",
    ),
    OpMeta(
        name="wo_projection",
        group="gemm",
        api_style="planned",
        entry_points=(
            "Binding",
            "Caps",
            "MXFP8Rows",
            "Plan",
            "Weights",
            "bind",
            "bind_inv_rope",
            "clear_caches",
            "is_supported",
            "pack_weights",
            "plan",
            "quantize_input",
            "quantize_input_b",
            "quantize_input_inv_rope",
            "run",
            "run_inv_rope",
        ),
        dtypes=("bfloat16",),
        recipes=("mxfp8",),
        test_path="tests/gemm/wo_projection",
        notes="Grouped low-rank output projection, WO-A then WO-B, with or without inverse RoPE.",
    ),
    OpMeta(
        name="mxfp8",
        group="quantization",
        api_style="oneshot",
        entry_points=(
            "Binding",
            "Caps",
            "MXFP8Rows",
            "Plan",
            "Rope",
            "allocate_outputs",
            "bind",
            "clear_caches",
            "is_supported",
            "plan",
            "quantize_rows",
            "run",
        ),
        dtypes=("bfloat16", "float16"),
        recipes=("mxfp8",),
        test_path="tests/quantization/mxfp8",
        notes="Rows to E4M3 values and E8M0 scales of 32, in rows and swizzled; groups, zero columns, inverse RoPE.",
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
