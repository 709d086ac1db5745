"""Rows of bf16 or fp16 to MXFP8; the public names are those of :mod:`b12x.quantization.mxfp8.api`."""

from b12x._runtime.lazy import attach

__all__ = [
    "META",
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
]

__getattr__ = attach(__name__, dict.fromkeys(__all__, ".api"))
