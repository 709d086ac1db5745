"""Kernel spec of the decode GEMM: few tokens, so that reading the weights is all the time there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.abi import KernelABI, LaunchContract, Param, Pointer, Scalar
from b12x._runtime.spec import KernelSpec
from b12x.gemm.blockscaled.recipes import C_DTYPES, RECIPES, Recipe

QUANTIZED = "quantized"
#: Where the tokens come from: quantised before, or as they are, to be quantised to MXFP8 by this kernel.
SOURCES = (QUANTIZED, "bfloat16", "float16")
NO_ROPE = "none"
#: Type of the cosines and sines by which tokens are rotated back before.
ROPES = (NO_ROPE, "float32", "bfloat16")
#: Shared memory (bytes) that lets two CTAs share an SM: half of its 100 KiB, less the 1 KiB kept for each.
_HALF = 100 * 1024 // 2 - 1024
_WHOLE = 100 * 1024 - 1024


@dataclass(frozen=True, kw_only=True)
class DecodeSpec(KernelSpec):
    """A CTA sums ``rows`` rows of B by up to ``tokens`` rows of A over a range of K; the CTAs of a cluster share K.

    Each of its warps has every row, every token and every ``warps``-th K step of 128, and ``stages`` of them in flight.
    With ``source`` other than ``quantized`` the recipe is ``mxfp8`` and A has bf16 or f16 values, quantised on the way.
    """

    kernel: ClassVar[str] = "gemm.blockscaled.decode"

    recipe: str
    c_dtype: str
    source: str = QUANTIZED
    rope: str = NO_ROPE
    tokens: int = 16

    warps: ClassVar[int] = 4
    tile_k: ClassVar[int] = 128
    #: Rows of B that share a tile of scales, and rows of C^T that one 16-byte store of 16-bit values takes.
    scale_rows: ClassVar[int] = 128
    group: ClassVar[int] = 8
    max_split: ClassVar[int] = 8

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"{self.kernel} has the recipes {', '.join(RECIPES)}, not {self.recipe!r}")
        if self.c_dtype not in C_DTYPES:
            raise ValueError(f"{self.kernel} writes {C_DTYPES}, not {self.c_dtype!r}")
        if self.source not in SOURCES or (self.fused and (self.recipe, self.tokens) != ("mxfp8", 8)):
            raise ValueError(
                f"{self.kernel} reads {SOURCES}, not {self.source!r}; it quantises 8 tokens to mxfp8, not "
                f"{self.tokens} to {self.recipe}"
            )
        if self.rope not in ROPES or (self.rotates and not self.fused):
            raise ValueError(f"{self.kernel} rotates tokens that it quantises, by {ROPES}, not by {self.rope!r}")
        if self.tokens not in (8, 16):
            raise ValueError(f"{self.kernel} takes 8 or 16 tokens, not {self.tokens}")

    @property
    def fused(self) -> bool:
        """Whether the kernel quantises A."""
        return self.source != QUANTIZED

    @property
    def rotates(self) -> bool:
        return self.rope != NO_ROPE

    @property
    def encoding(self) -> Recipe:
        return RECIPES[self.recipe]

    @property
    def rows(self) -> int:
        """Rows of B of a CTA: few, so that many CTAs even out over the chip; more where each has to quantise A."""
        return 32 if self.fused else 16

    @property
    def row_bytes(self) -> int:
        """Bytes of one K step of a quantised row."""
        return self.encoding.row_bytes(self.tile_k)

    @property
    def token_bytes(self) -> int:
        """Bytes of one K step of a token."""
        return 2 * self.tile_k if self.fused else self.row_bytes

    @property
    def scale_tiles(self) -> int:
        """Tiles of swizzled scales (128 rows by 4 blocks) in a K step."""
        return self.tile_k // (4 * self.encoding.block) if self.encoding.scales == "mma" else 0

    @property
    def row_scale_bytes(self) -> int:
        """Bytes copied from one tile of B's scales: the words of 8 residues, each of four rows at a distance of 32."""
        return 16 * self.group

    @property
    def token_scale_bytes(self) -> int:
        """Bytes copied from one tile of A's scales."""
        return 0 if self.fused else 16 * self.tokens

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a stage. The f32 scales are one a token and, padded to 16 bytes, one for the rows."""
        if self.encoding.scales == "f32":
            return 4 * self.tokens + 16
        return self.scale_tiles * (self.row_scale_bytes + self.token_scale_bytes)

    @property
    def stage_bytes(self) -> int:
        """Bytes of one K step of all operands, in whole spans of the swizzle."""
        return -(-(self.rows * self.row_bytes + self.tokens * self.token_bytes + self.scale_bytes) // 128) * 128

    @property
    def stages(self) -> int:
        """K steps that a warp has in flight: as many as let two CTAs share an SM, or else one."""
        step = self.warps * self.stage_bytes
        return min(8, _HALF // step if 2 * step <= _HALF else _WHOLE // step)

    @property
    def ring_bytes(self) -> int:
        """Bytes of one warp's stages."""
        return self.stages * self.stage_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes of one warp's sums."""
        return 4 * self.rows * self.tokens

    @property
    def sum_pitch(self) -> int:
        """Bytes from one token of the CTA's sums to the next: no two lanes of a quad write to one bank."""
        return 4 * self.rows + 16

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def tiles(self, n: int) -> int:
        """CTAs that the rows of B need; where K is split, clusters."""
        whole, rest = divmod(n, self.scale_rows)
        slices = self.scale_rows // self.rows
        count = whole * slices
        for part in range(slices):  # as the kernel counts them: a residue of 8 rows, then the next 64 rows
            first = part % 4 * self.group + part // 4 * 64
            count += first < rest
        return count

    def abi(self) -> KernelABI:
        scale = "float32" if self.encoding.scales == "f32" else "uint8"
        params: list[Param] = [
            Pointer("a", self.source if self.fused else "uint8", "r"),
            Pointer("b", "uint8", "r"),
            Pointer("sfa", scale, "r", align=4 if scale == "float32" else 16),
            Pointer("sfb", scale, "r", align=4 if scale == "float32" else 16),
            Pointer("alpha", "float32", "r", align=4),
            Pointer("bias", self.c_dtype, "r"),
            Pointer("c", self.c_dtype, "w"),
            *(Scalar(name, "int32") for name in ("m", "n", "k", "batch", "alpha_count", "has_bias")),
            *(Scalar(name, "int64") for name in ("a_row", "a_batch", "b_row", "b_batch")),
        ]
        if self.fused:
            params += [Scalar("k_source", "int32"), Scalar("span", "int32"), Scalar("span_bytes", "int64")]
        if self.rotates:
            params += [
                Pointer("positions", "int32", "r", align=4),
                Pointer("cos_sin_cache", self.rope, "r"),
                *(Scalar(name, "int32") for name in ("position_words", "head_dim", "nope_dim", "rope_dim")),
            ]
        return KernelABI(
            params=tuple(params),
            launch=LaunchContract(
                block=(self.threads, 1, 1), dynamic_smem=self.warps * self.ring_bytes, max_cluster=self.max_split
            ),
        )
