"""Quantizers, and the layout of their scales."""

from b12x._runtime.lazy import attach

__all__ = ["nvfp4", "scales"]

__getattr__ = attach(__name__, {name: f".{name}" for name in __all__})
