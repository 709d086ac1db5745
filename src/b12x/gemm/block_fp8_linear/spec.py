"""Kernel specs of ``gemm.block_fp8_linear``: none of its own.

Its parts are ``quantization.mxfp8`` and ``gemm.blockscaled``.
"""

from __future__ import annotations

from b12x._runtime.spec import KernelSpec

SPECS: tuple[type[KernelSpec], ...] = ()
