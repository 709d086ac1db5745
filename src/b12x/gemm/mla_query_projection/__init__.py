"""Absorbed queries of latent attention; the public names are those of :mod:`b12x.gemm.mla_query_projection.api`."""

from b12x._runtime.lazy import attach

__all__ = [
    "META",
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
]

__getattr__ = attach(__name__, dict.fromkeys(__all__, ".api"))
