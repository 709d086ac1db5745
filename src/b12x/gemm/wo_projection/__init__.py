"""Grouped low-rank output projection; the public names are those of :mod:`b12x.gemm.wo_projection.api`."""

from b12x._runtime.lazy import attach

__all__ = [
    "META",
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
]

__getattr__ = attach(__name__, dict.fromkeys(__all__, ".api"))
