"""Kernel specs of batched products with weights of their own layout: ``gemm.bmm`` and ``gemm.mla_query_projection``.

Both ops run one device module, which this module describes; ``gemm.mla_query_projection`` adds the columns that are
copied, and other weights and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from b12x._runtime.abi import ITEMSIZE, KernelABI, LaunchContract, Pointer, Scalar
from b12x._runtime.spec import KernelSpec

MAJORS = ("n", "k")
#: ``decode`` for few tokens, where each weight is read once; ``prefill`` for many, where it is used often.
TILES = ("decode", "prefill")
WEIGHTS = {"mxfp8": "float8_e4m3fn", "bfloat16": "bfloat16"}
OUTPUTS = ("bfloat16", "float8_e4m3fn")
#: Strides in bytes, in the order of the parameters.
STRIDES = tuple(f"{name}_{axis}" for name in ("lhs", "weight", "scale", "rope", "out") for axis in ("batch", "row"))


@dataclass(frozen=True, kw_only=True)
class BatchedSpec(KernelSpec):
    """``out[b] = lhs[b] @ dequantised weight[b]`` for every ``b``.

    ``major`` is the weight's innermost dimension: ``n`` for ``[B, K, N]``, ``k`` for ``[B, N, K]``.
    """

    weight: str
    major: str
    out_dtype: str
    tile: str

    #: Whether ``rope`` columns of another tensor follow the N columns of the product.
    rope: ClassVar[bool] = False
    threads: ClassVar[int] = 128
    warps: ClassVar[int] = 4

    def __post_init__(self) -> None:
        known = {"weight": tuple(WEIGHTS), "major": MAJORS, "out_dtype": OUTPUTS, "tile": TILES}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{self.kernel}: {name} is {getattr(self, name)!r}; needed is one of {values}")
        if self.weight == "bfloat16" and self.major != "n":
            raise ValueError(f"{self.kernel}: bfloat16 weights are [B, K, N], so major is 'n', not {self.major!r}")

    @property
    def device_module(self) -> str:
        return "gemm.bmm"

    @property
    def scaled(self) -> bool:
        return self.weight == "mxfp8"

    @property
    def tile_n(self) -> int:
        """Output columns of a CTA. A decode lane takes 16 bytes of a weight row, or 8 rows."""
        return 128 if self.tile == "prefill" or (self.scaled and self.major == "n") else 64

    @property
    def tokens(self) -> int:
        """Rows of the left operand of a CTA."""
        return 8 if self.tile == "decode" else 64

    @property
    def step_k(self) -> int:
        """Decode: k values that a warp takes at a time, by 16-byte loads. Prefill: k values of a stage."""
        return 16 if self.tile == "decode" and self.major == "n" else 64

    @property
    def slots(self) -> int:
        """Decode: steps of a warp that are under way at a time."""
        return 2 if self.scaled else 3

    @property
    def ctas_per_sm(self) -> int:
        """CTAs whose registers have to fit an SM: what decode has under way, or prefill's sums, and room to work."""
        if self.tile == "prefill":
            return 2
        return 4 if self.scaled and self.major == "n" else 3

    @property
    def stages(self) -> int:
        """Prefill: stages of the ring in shared memory."""
        return 3 if self.scaled else 2

    @property
    def token_bytes(self) -> int:
        return self.tokens * self.step_k * 2

    @property
    def weight_bytes(self) -> int:
        return self.tile_n * self.step_k * ITEMSIZE[WEIGHTS[self.weight]]

    @property
    def factor_bytes(self) -> int:
        """bf16 factors, one for each k and 32 columns, or twice for each column and 32 k."""
        blocks = self.tile_n * self.step_k // 32
        return blocks * {"n": 2, "k": 4}[self.major] if self.scaled else 0

    @property
    def stage_bytes(self) -> int:
        return self.token_bytes + self.weight_bytes + self.factor_bytes

    @property
    def partial_pitch(self) -> int:
        """Decode: bytes between two tokens' partial sums in shared memory; the pad spreads the banks."""
        return (self.tile_n + 4) * 4

    @property
    def smem_bytes(self) -> int:
        if self.tile == "decode":
            return self.warps * self.tokens * self.partial_pitch
        return self.stages * self.stage_bytes

    def abi(self) -> KernelABI:
        element = WEIGHTS[self.weight]
        return KernelABI(
            params=(
                Pointer("lhs", "bfloat16", "r"),
                Pointer("weight", element, "r"),
                Pointer("scales", "uint8", "r", align=1),
                Pointer("rope", "bfloat16", "r", align=4),
                Pointer("q_scale", "float32", "r", align=4),
                Pointer("out", self.out_dtype, "w", align=ITEMSIZE[self.out_dtype]),
                Scalar("m", "int32"),
                Scalar("n", "int32"),
                Scalar("k", "int32"),
                Scalar("rope_words", "int32"),
                Scalar("vector", "int32"),
                *(Scalar(name, "int64") for name in STRIDES),
            ),
            launch=LaunchContract(block=(self.threads, 1, 1), dynamic_smem=self.smem_bytes),
        )


@dataclass(frozen=True, kw_only=True)
class BmmSpec(BatchedSpec):
    """MXFP8 weights of either layout, bf16 results."""

    kernel: ClassVar[str] = "gemm.bmm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.weight, self.out_dtype) != ("mxfp8", "bfloat16"):
            raise ValueError(f"gemm.bmm has mxfp8 weights and bfloat16 results, not {self.weight} and {self.out_dtype}")


SPECS = (BmmSpec,)
