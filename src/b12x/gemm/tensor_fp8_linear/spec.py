"""Kernel specs of ``gemm.tensor_fp8_linear``: none of its own, its part is ``gemm.blockscaled``."""

from __future__ import annotations

from b12x._runtime.spec import KernelSpec

SPECS: tuple[type[KernelSpec], ...] = ()
