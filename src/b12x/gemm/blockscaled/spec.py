"""Kernel spec of ``gemm.blockscaled``: a persistent block-scaled GEMM, ``C = alpha * (A SFA) (B SFB)^T``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.abi import ITEMSIZE, KernelABI, LaunchContract, Pointer, Scalar, TensorMap
from b12x._runtime.spec import KernelSpec

C_DTYPES = ("bfloat16", "float16", "float32")
#: Dynamic shared memory a CTA may use on SM120 (bytes).
SMEM_LIMIT = 101_376


@dataclass(frozen=True, kw_only=True)
class BlockscaledSpec(KernelSpec):
    """Tile ``tile_m x tile_n``, a K step of 128, ``warps_m x warps_n`` MMA warps and one producer warp.

    The sizes M, N, K and L are launch arguments. ``stages`` follows from the shared memory that the tile leaves.
    """

    kernel: ClassVar[str] = "gemm.blockscaled"

    recipe: str = "nvfp4"
    c_dtype: str
    tile_m: int
    tile_n: int
    warps_m: int
    warps_n: int

    tile_k: ClassVar[int] = 128
    scale_rows: ClassVar[int] = 128
    #: Rows of C that a warp stages at a time, and the bytes that pad each staged row against bank conflicts.
    stage_rows: ClassVar[int] = 8
    stage_pad: ClassVar[int] = 16
    barrier_bytes: ClassVar[int] = 128

    def __post_init__(self) -> None:
        if self.recipe != "nvfp4":
            raise ValueError(f"gemm.blockscaled has the recipe 'nvfp4', not {self.recipe!r}")
        if self.c_dtype not in C_DTYPES:
            raise ValueError(f"gemm.blockscaled writes {C_DTYPES}, not {self.c_dtype!r}")
        for name, tile, warps, quantum in (
            ("tile_m", self.tile_m, self.warps_m, 32),
            ("tile_n", self.tile_n, self.warps_n, 32),
        ):
            if self.scale_rows % tile or tile % (warps * quantum):
                raise ValueError(
                    f"gemm.blockscaled: {name} {tile} must divide {self.scale_rows} and give each of its {warps} warps "
                    f"a multiple of {quantum}"
                )
        if self.stages < 2:
            raise ValueError(f"gemm.blockscaled: {self.key} leaves {self.stages} pipeline stages; 2 are needed")

    @property
    def mma_warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        """Rows of C per MMA warp."""
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of C per MMA warp."""
        return self.tile_n // self.warps_n

    @property
    def a_bytes(self) -> int:
        """Bytes of one stage's A tile: two FP4 values a byte."""
        return self.tile_m * self.tile_k // 2

    @property
    def b_bytes(self) -> int:
        return self.tile_n * self.tile_k // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of one operand's scales in a stage: whole 128-row scale tiles, whatever the tile's rows."""
        return self.scale_rows * self.tile_k // 16

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + 2 * self.scale_bytes

    @property
    def staging_pitch(self) -> int:
        """Bytes from one staged row of C to the next."""
        return self.warp_n * ITEMSIZE[self.c_dtype] + self.stage_pad

    @property
    def staging_bytes(self) -> int:
        return self.mma_warps * self.stage_rows * self.staging_pitch

    @property
    def stages(self) -> int:
        return min(8, (SMEM_LIMIT - self.staging_bytes - self.barrier_bytes) // self.stage_bytes)

    @property
    def threads(self) -> int:
        return 32 * (self.mma_warps + 1)

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.staging_bytes + self.barrier_bytes

    def abi(self) -> KernelABI:
        box_k = self.tile_k // 2
        return KernelABI(
            params=(
                TensorMap("a", "uint8", (box_k, self.tile_m, 1), "64B"),
                TensorMap("b", "uint8", (box_k, self.tile_n, 1), "64B"),
                Pointer("sfa", "uint8", "r"),
                Pointer("sfb", "uint8", "r"),
                Pointer("alpha", "float32", "r", align=4),
                Pointer("c", self.c_dtype, "w"),
                Scalar("m", "int32"),
                Scalar("n", "int32"),
                Scalar("k", "int32"),
                Scalar("batch", "int32"),
                Scalar("alpha_count", "int32"),
            ),
            launch=LaunchContract(block=(self.threads, 1, 1), dynamic_smem=self.smem_bytes),
        )


SPECS = (BlockscaledSpec,)
