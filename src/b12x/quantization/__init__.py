"""Quantizers, the layout of their scales, and the two conventions of a global scale."""

from b12x._runtime.lazy import attach

_MODULES = ("global_scale", "mxfp8", "nvfp4", "scales")
_NAMES = ("Divisor", "Multiplier", "gemm_alpha", "quantizer_scale")

__all__ = [*_NAMES, *_MODULES]

__getattr__ = attach(__name__, {name: f".{name}" for name in _MODULES} | dict.fromkeys(_NAMES, ".global_scale"))
