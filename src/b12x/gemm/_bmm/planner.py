"""Planner of ``gemm.bmm``: which kernels a plan holds, which of them serves a live M, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass

from b12x._runtime import checks
from b12x._runtime.spec import Role
from b12x.gemm._bmm.spec import MAJORS, TILES, BatchedSpec, BmmSpec

OP = "gemm.bmm"

#: The one specialisation: its dtypes and the values that share a scale.
SPECIALISATION = {
    "a_dtype": "bfloat16",
    "b_dtype": "float8_e4m3fn",
    "sf_dtype": "float8_e8m0fnu",
    "c_dtype": "bfloat16",
    "sf_vec_size": 32,
}
#: Largest M that the decode kernel serves: two of its token tiles. Beyond, weights are used more often than read.
DECODE_M = 16
#: Batch entries are the grid's z; K in bytes of bf16, and N in tiles along the grid's y, have to stay in 32 bits.
MOST_BATCH = 65535
MOST_N = 65535 * 64
MOST_K = 2**29


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capacities and static choices of a plan.

    ``out[B, M, N] = lhs[B, M, K] @ W[B]`` for any live M in 0..max_m; ``batch`` (B), ``n`` and ``k`` are exact.
    ``b_major`` is ``"n"`` for weights ``[B, K, N]``, where N has to be a multiple of 32 and K of 16, or ``"k"`` for
    ``[B, N, K]``, where K has to be a multiple of 32 and N at least 8. ``sf_axis``, the dimension along which 32 values
    share a scale, is ``b_major``. NotImplementedError for dtypes other than the defaults.
    """

    device: object = None
    batch: int
    max_m: int
    n: int
    k: int
    a_dtype: str = "bfloat16"
    b_dtype: str = "float8_e4m3fn"
    sf_dtype: str = "float8_e8m0fnu"
    c_dtype: str = "bfloat16"
    sf_vec_size: int = 32
    b_major: str = "k"
    sf_axis: str = "k"

    def __post_init__(self) -> None:
        for name in ("b_major", "sf_axis"):
            if getattr(self, name) not in MAJORS:
                raise ValueError(f"{OP}: {name} is {getattr(self, name)!r}; needed is 'n' or 'k': name a dimension")
        for name, only in SPECIALISATION.items():
            if getattr(self, name) != only:
                raise NotImplementedError(
                    f"{OP}: {name} is {getattr(self, name)!r}; available is {only!r} only: convert the operand before"
                )
        if self.sf_axis != self.b_major:
            raise NotImplementedError(
                f"{OP}: sf_axis is {self.sf_axis!r} with b_major {self.b_major!r}; available are scales along the "
                "innermost dimension only: pack the weights in the other order"
            )
        check_sizes(OP, self.batch, "batch", self.max_m, "max_m")
        check_weight(OP, "mxfp8", self.b_major, self.n, "n", self.k, "k")


def check_sizes(op: str, batch: int, batch_name: str, m: int, m_name: str) -> None:
    """Batch and M of a plan."""
    checks.whole(op, batch_name, batch, most=MOST_BATCH, fix="split the batch")
    checks.whole(op, m_name, m, fix="choose a capacity in that range")


def check_weight(op: str, weight: str, major: str, n: int, n_name: str, k: int, k_name: str) -> None:
    """N and K of a plan: what 16-byte pieces and whole scales need."""
    n_step, k_step, least = {"n": (32 if weight == "mxfp8" else 8, 16, 1), "k": (1, 32, 8)}[major]
    checks.whole(op, n_name, n, least=least, most=MOST_N, fix="split or pad the columns")
    checks.whole(op, k_name, k, most=MOST_K)
    for name, value, step in ((n_name, n, n_step), (k_name, k, k_step)):
        if value % step:
            raise ValueError(
                f"{op}: {name} is {value}; needed is a multiple of {step} for {weight} weights that are {major}-major: "
                "pad the weights with zeros"
            )


def roles(caps: Caps) -> tuple[Role, ...]:
    """The kernels that some live M picks."""
    return tuple(
        Role(tile, (BmmSpec(weight="mxfp8", major=caps.b_major, out_dtype=caps.c_dtype, tile=tile),))
        for tile in tiles(caps.max_m)
    )


def tiles(max_m: int) -> tuple[str, ...]:
    """The tiles that serve some M up to ``max_m``."""
    return TILES if max_m > DECODE_M else TILES[:1]


def choose(m: int) -> str:
    """The tile that serves ``m`` live rows."""
    return TILES[m > DECODE_M]


def grid(spec: BatchedSpec, batch: int, m: int, n: int) -> tuple[int, int, int]:
    """Row tiles run fastest: those that share weights run together."""
    return -(-m // spec.tokens), -(-n // spec.tile_n), batch
