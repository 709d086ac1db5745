"""Rows of bf16 or fp16 to NVFP4; the public names are those of :mod:`b12x.quantization.nvfp4.api`."""

from b12x._runtime.lazy import attach

__all__ = [
    "META",
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
]

__getattr__ = attach(__name__, dict.fromkeys(__all__, ".api"))
