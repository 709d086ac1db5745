"""Kernel spec of ``quantization.nvfp4``: rows of bf16/fp16 to packed E2M1 and swizzled E4M3 block scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.abi import KernelABI, LaunchContract, Pointer, Scalar
from b12x._runtime.spec import KernelSpec

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Nvfp4QuantizeSpec(KernelSpec):
    """A CTA quantises one scale tile: 128 rows by 64 columns."""

    kernel: ClassVar[str] = "quantization.nvfp4"

    dtype: str

    threads: ClassVar[int] = 128
    tile_rows: ClassVar[int] = 128
    tile_columns: ClassVar[int] = 64

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"quantization.nvfp4 reads {DTYPES}, not {self.dtype!r}")

    def abi(self) -> KernelABI:
        return KernelABI(
            params=(
                Pointer("x", self.dtype, "r"),
                Pointer("global_scale", "float32", "r", align=4),
                Pointer("packed", "uint8", "w", align=8),
                Pointer("scales", "uint8", "w", align=4),
                Scalar("m", "int32"),
                Scalar("k", "int32"),
                Scalar("k_out", "int32"),
            ),
            launch=LaunchContract(block=(self.threads, 1, 1)),
        )


SPECS = (Nvfp4QuantizeSpec,)
