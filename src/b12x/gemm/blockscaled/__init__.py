"""Block-scaled GEMM; the public names are those of :mod:`b12x.gemm.blockscaled.api`."""

from b12x._runtime.lazy import attach

__all__ = ["META", "Binding", "Caps", "Plan", "bind", "clear_caches", "is_supported", "mm", "plan", "run"]

__getattr__ = attach(__name__, dict.fromkeys(__all__, ".api"))
