"""``gemm.bmm``; the public names are those of :mod:`b12x.gemm._bmm.api`.

``b12x.gemm.bmm`` is the function, so the op's module has a name of its own.
"""

from b12x._runtime.lazy import attach

__all__ = [
    "META",
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
]

__getattr__ = attach(__name__, dict.fromkeys(__all__, ".api"))
