"""Dense GEMMs and fused linears. ``gemm.mm`` is ``gemm.blockscaled.mm``."""

from b12x._runtime.lazy import attach

__all__ = ["blockscaled", "mm"]

__getattr__ = attach(__name__, {"blockscaled": ".blockscaled", "mm": ".blockscaled"})
