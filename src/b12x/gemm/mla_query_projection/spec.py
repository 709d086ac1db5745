"""Kernel spec of ``gemm.mla_query_projection``: the batched product, then columns that are copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x.gemm._bmm.spec import BatchedSpec


@dataclass(frozen=True, kw_only=True)
class MlaQueryProjectionSpec(BatchedSpec):
    """The kernel of ``gemm.bmm`` with weights ``[H, K, N]`` in MXFP8 or bf16, and results in bf16 or E4M3."""

    kernel: ClassVar[str] = "gemm.mla_query_projection"

    rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.major != "n":
            raise ValueError(f"gemm.mla_query_projection: weights are [H, K, N], so major is 'n', not {self.major!r}")


SPECS = (MlaQueryProjectionSpec,)
