"""Kernel spec of ``quantization.mxfp8``: rows of bf16/fp16 to E4M3 values and E8M0 scales of 32-element blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.abi import KernelABI, LaunchContract, Pointer, Scalar
from b12x._runtime.spec import KernelSpec

DTYPES = ("bfloat16", "float16")
#: Dtypes of a cos/sin cache, and what stands for none: values are quantised as they are.
CACHE_DTYPES = ("float32", "bfloat16")
NO_ROPE = "none"


@dataclass(frozen=True, kw_only=True)
class Mxfp8QuantizeSpec(KernelSpec):
    """A CTA quantises one scale tile: 128 rows by 128 columns.

    ``rope`` is the dtype of the cos/sin cache by which values are rotated back before, or ``none``.
    """

    kernel: ClassVar[str] = "quantization.mxfp8"

    dtype: str
    rope: str = NO_ROPE

    threads: ClassVar[int] = 128
    tile_rows: ClassVar[int] = 128
    tile_columns: ClassVar[int] = 128

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"quantization.mxfp8 reads {DTYPES}, not {self.dtype!r}")
        if self.rope not in (NO_ROPE, *CACHE_DTYPES):
            raise ValueError(f"quantization.mxfp8 rotates by a cache of {CACHE_DTYPES}, not {self.rope!r}")

    @property
    def rotates(self) -> bool:
        return self.rope != NO_ROPE

    def abi(self) -> KernelABI:
        """Strides are in bytes; column k of a row lies ``k // span * span_stride + k % span * 2`` bytes behind its
        start. Of each position the word at ``4 * position_words * row`` is read."""
        rope: tuple[Pointer | Scalar, ...] = ()
        if self.rotates:
            rope = (
                Pointer("positions", "int32", "r", align=4),
                Pointer("cos_sin_cache", self.rope, "r"),
                Scalar("position_words", "int32"),
                Scalar("head_dim", "int32"),
                Scalar("nope_dim", "int32"),
                Scalar("rope_dim", "int32"),
            )
        return KernelABI(
            params=(
                Pointer("source", self.dtype, "r"),
                Pointer("values", "float8_e4m3fn", "w", align=8),
                Pointer("scale_rows", "uint8", "w", align=4),
                Pointer("scale_mma", "uint8", "w"),
                Scalar("m", "int32"),
                Scalar("k", "int32"),
                Scalar("k_out", "int32"),
                Scalar("span", "int32"),
                Scalar("source_row", "int64"),
                Scalar("source_span", "int64"),
                Scalar("source_group", "int64"),
                Scalar("values_group", "int64"),
                Scalar("scale_rows_group", "int64"),
                Scalar("scale_mma_group", "int64"),
                *rope,
            ),
            launch=LaunchContract(block=(self.threads, 1, 1)),
        )


SPECS = (Mxfp8QuantizeSpec,)
