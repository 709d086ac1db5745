"""Block-scaled GEMM; the public names are those of :mod:`b12x.gemm.blockscaled.api` and ``fused``."""

from b12x._runtime.lazy import attach

__all__ = [
    "META",
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
]
_FUSED = ("FusedCaps", "FusedPlan", "bind_fused", "mm_fused_quant_a", "mm_fused_quant_a_grouped", "plan_fused")

__getattr__ = attach(__name__, dict.fromkeys(__all__, ".api") | dict.fromkeys(_FUSED, ".fused"))
