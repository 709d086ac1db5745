"""Tensor-FP8 linear; the public names are those of :mod:`b12x.gemm.tensor_fp8_linear.api`."""

from b12x._runtime.lazy import attach

__all__ = [
    "META",
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
]

__getattr__ = attach(__name__, dict.fromkeys(__all__, ".api"))
