"""Kernel specs of ``gemm.blockscaled``, ``C = alpha * (A SFA) (B SFB)^T``: the persistent TMA kernel and, for few rows,
the decode kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.abi import ITEMSIZE, KernelABI, LaunchContract, Pointer, Scalar, TensorMap
from b12x._runtime.spec import KernelSpec
from b12x.gemm.blockscaled.decode_spec import DecodeSpec
from b12x.gemm.blockscaled.recipes import C_DTYPES, RECIPES, SMEM_LIMIT, Recipe


@dataclass(frozen=True, kw_only=True)
class BlockscaledSpec(KernelSpec):
    """Tile ``tile_m x tile_n`` for a consumer group of 2 x 2 MMA warps, and one producer warp.

    With two groups, each takes every other tile of the CTA: while one stores its tile, the other multiplies. Three idle
    warps then complete the producer's four, which hand registers to the consumers. A launch of one group may split K
    over the CTAs of a cluster. The sizes M, N, K and L are launch arguments; ``stages`` follows
    from the shared memory that the tile leaves.
    """

    kernel: ClassVar[str] = "gemm.blockscaled"

    recipe: str
    c_dtype: str
    tile_m: int
    tile_n: int
    groups: int

    scale_rows: ClassVar[int] = 128
    #: Bytes of one row of an operand in a stage: the span of the TMA swizzle.
    row_bytes: ClassVar[int] = 64
    #: MMA warps of a consumer group.
    group_warps: ClassVar[int] = 4
    #: Rows of C that a warp stages at a time.
    stage_rows: ClassVar[int] = 8
    #: Room for two mbarriers a stage and one a group.
    barrier_bytes: ClassVar[int] = 192
    #: Registers a thread with two groups: 128 producer and 256 consumer threads share the SM's 65,536.
    producer_registers: ClassVar[int] = 40
    consumer_registers: ClassVar[int] = 232
    max_split: ClassVar[int] = 8

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"gemm.blockscaled has the recipes {', '.join(RECIPES)}, not {self.recipe!r}")
        if self.c_dtype not in C_DTYPES:
            raise ValueError(f"gemm.blockscaled writes {C_DTYPES}, not {self.c_dtype!r}")
        if self.groups not in (1, 2):
            raise ValueError(f"gemm.blockscaled has 1 or 2 consumer groups, not {self.groups}")
        for name, tile in (("tile_m", self.tile_m), ("tile_n", self.tile_n)):
            if tile not in (32, 64, 128):
                raise ValueError(f"gemm.blockscaled: {name} is {tile}; it has to be 32, 64 or 128")
        if self.stages < 2:
            raise ValueError(f"gemm.blockscaled: {self.key} leaves {self.stages} pipeline stages; 2 are needed")

    @property
    def encoding(self) -> Recipe:
        return RECIPES[self.recipe]

    @property
    def tile_k(self) -> int:
        """K of a stage: 128 of FP4, 64 of FP8."""
        return self.row_bytes * 8 // self.encoding.bits

    @property
    def mma_warps(self) -> int:
        return self.groups * self.group_warps

    @property
    def warp_m(self) -> int:
        """Rows of C per MMA warp."""
        return self.tile_m // 2

    @property
    def warp_n(self) -> int:
        """Columns of C per MMA warp."""
        return self.tile_n // 2

    @property
    def stage_columns(self) -> int:
        """Columns of C that a warp stages at a time."""
        return min(32, self.warp_n)

    @property
    def a_bytes(self) -> int:
        """Bytes of one stage's A tile."""
        return self.tile_m * self.row_bytes

    @property
    def b_bytes(self) -> int:
        return self.tile_n * self.row_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of one operand's scales in a stage: whole scale tiles of 128 rows by 4 blocks along K."""
        if self.encoding.scales != "mma":
            return 0
        return self.scale_rows * max(4, self.tile_k // self.encoding.block)

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + 2 * self.scale_bytes

    @property
    def staging_pitch(self) -> int:
        """Bytes from one staged row of C to the next."""
        return self.stage_columns * ITEMSIZE[self.c_dtype]

    @property
    def staging_bytes(self) -> int:
        return self.mma_warps * self.stage_rows * self.staging_pitch

    @property
    def splits(self) -> bool:
        """Whether a launch may split K."""
        return self.groups == 1

    @property
    def partial_bytes(self) -> int:
        """Where a CTA shows its f32 sums to the other CTAs of its cluster."""
        return 4 * self.tile_m * self.tile_n if self.splits else 0

    @property
    def stages(self) -> int:
        return min(8, (SMEM_LIMIT - self.staging_bytes - self.partial_bytes - self.barrier_bytes) // self.stage_bytes)

    @property
    def threads(self) -> int:
        return 32 * (self.mma_warps + (1 if self.groups == 1 else 4))

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.staging_bytes + self.partial_bytes + self.barrier_bytes

    def abi(self) -> KernelABI:
        scale = "float32" if self.encoding.scales == "f32" else "uint8"
        return KernelABI(
            params=(
                TensorMap("a", "uint8", (self.row_bytes, self.tile_m, 1), "64B"),
                TensorMap("b", "uint8", (self.row_bytes, self.tile_n, 1), "64B"),
                Pointer("sfa", scale, "r"),
                Pointer("sfb", scale, "r"),
                Pointer("alpha", "float32", "r", align=4),
                Pointer("bias", self.c_dtype, "r"),
                Pointer("c", self.c_dtype, "w"),
                Scalar("m", "int32"),
                Scalar("n", "int32"),
                Scalar("k", "int32"),
                Scalar("batch", "int32"),
                Scalar("alpha_count", "int32"),
                Scalar("has_bias", "int32"),
            ),
            launch=LaunchContract(
                block=(self.threads, 1, 1),
                dynamic_smem=self.smem_bytes,
                max_cluster=self.max_split if self.splits else 1,
            ),
        )


SPECS = (BlockscaledSpec, DecodeSpec)
