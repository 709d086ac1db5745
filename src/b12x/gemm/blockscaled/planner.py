"""Planner of ``gemm.blockscaled``: which kernels a plan holds, and which of them serves a live M."""

from __future__ import annotations

from dataclasses import dataclass

from b12x._runtime import checks
from b12x._runtime.spec import KernelSpec, Role
from b12x.gemm.blockscaled.spec import C_DTYPES, BlockscaledSpec

OP = "gemm.blockscaled"

#: Recipe by (operand dtype, scale dtype, values per scale).
RECIPES = {("float4_e2m1fn", "float8_e4m3fn", 16): "nvfp4"}

#: Role name -> (tile_m, tile_n, warps_m, warps_n).
TILES = {"small": (64, 64, 2, 2), "large": (128, 128, 4, 2)}
#: Largest M that the role serves, in ascending order; the last has no limit.
CHOICE: tuple[tuple[str, int | None], ...] = (("small", 64), ("large", None))


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capacities and static choices of a plan.

    ``C[M, N, L] = alpha * A[M, K, L] B[N, K, L]^T`` for any live M in 0..max_m; ``n``, ``k`` and ``batch`` (L) are
    exact. K must be a multiple of 128. Dtypes are given as strings: ``ab_dtype`` and ``sf_dtype`` with
    ``sf_vec_size`` name the recipe, ``c_dtype`` is ``bfloat16``, ``float16`` or ``float32``.
    """

    device: object = None
    ab_dtype: str = "float4_e2m1fn"
    sf_dtype: str = "float8_e4m3fn"
    sf_vec_size: int = 16
    c_dtype: str
    max_m: int
    n: int
    k: int
    batch: int = 1

    def __post_init__(self) -> None:
        checks.whole(OP, "sf_vec_size", self.sf_vec_size)
        recipe = (self.ab_dtype, self.sf_dtype, self.sf_vec_size)
        if recipe not in RECIPES:
            known = "; ".join(f"{name}: {key}" for key, name in RECIPES.items())
            raise ValueError(
                f"{OP}: no recipe for (ab_dtype, sf_dtype, sf_vec_size) = {recipe}; needed is one of {known}: choose "
                "it and quantise the operands with it"
            )
        if self.c_dtype not in C_DTYPES:
            raise ValueError(
                f"{OP}: c_dtype is {self.c_dtype!r}; needed is one of {', '.join(map(repr, C_DTYPES))}: choose one, as "
                "a string, and convert C afterwards"
            )
        for name in ("max_m", "n", "k", "batch"):
            checks.whole(OP, name, getattr(self, name))
        if self.k % BlockscaledSpec.tile_k:
            raise ValueError(
                f"{OP}: k is {self.k}; a multiple of {BlockscaledSpec.tile_k} is needed: pad the weight "
                "with zero codes and zero scales when it is prepared"
            )

    @property
    def recipe(self) -> str:
        return RECIPES[self.ab_dtype, self.sf_dtype, self.sf_vec_size]


def spec(caps: Caps, role: str) -> BlockscaledSpec:
    """The kernel of a role."""
    tile_m, tile_n, warps_m, warps_n = TILES[role]
    return BlockscaledSpec(
        recipe=caps.recipe, c_dtype=caps.c_dtype, tile_m=tile_m, tile_n=tile_n, warps_m=warps_m, warps_n=warps_n
    )


def roles(caps: Caps) -> tuple[Role, ...]:
    """Every kernel that some M in 1..max_m picks."""
    names = []
    for name, limit in CHOICE:
        names.append(name)
        if limit is not None and caps.max_m <= limit:
            break
    return tuple(Role(name, (spec(caps, name),)) for name in names)


def choose(m: int) -> str:
    """The role that serves a live M."""
    for name, limit in CHOICE:
        if limit is None or m <= limit:
            return name
    raise AssertionError("the last choice has no limit")


def tiles(kernel: KernelSpec, m: int, n: int, batch: int) -> int:
    """Tiles of C. The launch is persistent: one CTA an SM, or one a tile where there are fewer tiles."""
    assert isinstance(kernel, BlockscaledSpec)
    return -(-m // kernel.tile_m) * -(-n // kernel.tile_n) * batch
