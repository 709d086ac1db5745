"""Planner of ``gemm.blockscaled``: which kernels a plan holds, and which of them serves a live M, split how.

Three regimes. Up to 16 rows, weights stream from DRAM once and nothing else costs: the decode kernel, whose many small
CTAs even out over the chip. Above that, the TMA kernel with small tiles and, where they are too few for the chip, K
split over a cluster; then with large ones, two consumer groups in turn, and no split. :func:`table` says where one
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from b12x._runtime import checks
from b12x._runtime.spec import KernelSpec, Role
from b12x.gemm.blockscaled.decode_spec import NO_ROPE, QUANTIZED, DecodeSpec
from b12x.gemm.blockscaled.recipes import BY_DTYPES, C_DTYPES, RECIPES
from b12x.gemm.blockscaled.spec import BlockscaledSpec

OP = "gemm.blockscaled"

#: K must be a multiple of this, for every recipe.
K_QUANTUM = 128
#: Largest L: the decode kernel has it in the grid's second dimension.
MOST_BATCH = 65535
#: Rows of A that a kernel quantises itself.
FUSED_M = 8
#: Role -> (tile_m, tile_n, groups of consumer warps).
TILES = {"narrow": (64, 32, 1), "middle": (64, 64, 1), "prefill": (128, 128, 2)}
#: Block FP8 keeps two sums of every result, so its large tile has half the columns.
BLOCK_FP8_TILES = {**TILES, "prefill": (128, 64, 2)}


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capacities and static choices of a plan.

    ``C[M, N, L] = alpha * A[M, K, L] B[N, K, L]^T + bias[N]`` for any live M in 0..max_m; ``n``, ``k`` and ``batch``
    (L) are exact. K must be a multiple of 128. Dtypes are given as strings: ``ab_dtype`` and ``sf_dtype`` with
    ``sf_vec_size`` name the recipe; ``plain_fp8`` ignores the scales of ``float8_e4m3fn`` operands, ``block_fp8`` is
    implied by float32 scales. ``c_dtype`` is ``bfloat16``, ``float16`` or ``float32``. ``k_a`` says that A has fewer
    columns than K: those it lacks count as zeros. A ``source`` other than ``quantized`` is the dtype of an A that the
    kernel quantises itself, rotated back by a ``rope`` of that dtype: what
    :class:`~b12x.gemm.blockscaled.fused_planner.FusedCaps` stands for.
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
    plain_fp8: bool = False
    block_fp8: bool = False
    k_a: int | None = None
    source: str = QUANTIZED
    rope: str = NO_ROPE

    def __post_init__(self) -> None:
        checks.whole(OP, "sf_vec_size", self.sf_vec_size)
        known = "; ".join(f"{name}: {key}" for key, name in BY_DTYPES.items())
        if self.ab_dtype not in {ab for ab, _, _ in BY_DTYPES}:
            raise TypeError(
                f"{OP}: ab_dtype is {self.ab_dtype!r}; needed is an operand dtype of one of {known}: name it as a "
                "string"
            )
        key = (self.ab_dtype, self.sf_dtype, self.sf_vec_size)
        if key not in BY_DTYPES:
            raise ValueError(
                f"{OP}: no recipe for (ab_dtype, sf_dtype, sf_vec_size) = {key}; needed is one of {known}: choose "
                "it and quantise the operands with it"
            )
        if self.plain_fp8 and BY_DTYPES[key] != "mxfp8":
            raise ValueError(
                f"{OP}: plain_fp8 goes with ('float8_e4m3fn', 'float8_e8m0fnu', 32), not with {key}: leave one out"
            )
        if self.block_fp8 and BY_DTYPES[key] != "block_fp8":
            raise ValueError(
                f"{OP}: block_fp8 goes with ('float8_e4m3fn', 'float32', 128), not with {key}: leave one out"
            )
        if self.c_dtype not in C_DTYPES:
            raise ValueError(
                f"{OP}: c_dtype is {self.c_dtype!r}; needed is one of {', '.join(map(repr, C_DTYPES))}: choose one, as "
                "a string, and convert C afterwards"
            )
        for name in ("max_m", "n", "k"):
            checks.whole(OP, name, getattr(self, name))
        checks.whole(OP, "batch", self.batch, most=MOST_BATCH)
        if self.source != QUANTIZED and (BY_DTYPES[key] != "mxfp8" or self.max_m > FUSED_M):
            raise ValueError(
                f"{OP}: source is {self.source!r} for {BY_DTYPES[key]} and max_m {self.max_m}; needed are mxfp8 and "
                f"max_m up to {FUSED_M}: quantise A before"
            )
        if self.k_a is not None:
            checks.whole(OP, "k_a", self.k_a, most=self.k)
            if RECIPES[self.recipe].row_bytes(self.k_a) % 16:
                raise ValueError(f"{OP}: k_a is {self.k_a}; rows of A have to be a multiple of 16 bytes: pad them")
        if self.k % K_QUANTUM:
            raise ValueError(
                f"{OP}: k is {self.k}; a multiple of {K_QUANTUM} is needed: pad the weight "
                "with zero codes and zero scales when it is prepared"
            )

    @property
    def recipe(self) -> str:
        return "fp8" if self.plain_fp8 else BY_DTYPES[self.ab_dtype, self.sf_dtype, self.sf_vec_size]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of A or B."""
        return RECIPES[self.recipe].row_bytes(self.k)


def spec(caps: Caps, role: str) -> BlockscaledSpec | DecodeSpec:
    """The kernel of a role."""
    if role == "decode":
        return DecodeSpec(recipe=caps.recipe, c_dtype=caps.c_dtype)
    if role == "fused":
        return DecodeSpec(recipe=caps.recipe, c_dtype=caps.c_dtype, source=caps.source, rope=caps.rope, tokens=FUSED_M)
    shapes = BLOCK_FP8_TILES if caps.recipe == "block_fp8" else TILES
    tile_m, tile_n, groups = shapes[role]
    return BlockscaledSpec(recipe=caps.recipe, c_dtype=caps.c_dtype, tile_m=tile_m, tile_n=tile_n, groups=groups)


#: Largest M of a decode kernel, and the largest at which only small tiles are in question.
DECODE_M, MIDDLE_M = DecodeSpec.tokens, TILES["middle"][0]
#: The least max_m of a plan that holds a role.
LEAST_MAX_M = {"decode": 1, "narrow": DECODE_M + 1, "middle": DECODE_M + 1, "prefill": MIDDLE_M + 1}
#: Above this M the tiles are many, and large.
TABLE_M = 512


def roles(caps: Caps) -> tuple[Role, ...]:
    """Every kernel that some M in 1..max_m picks on some device."""
    if caps.source != QUANTIZED:
        return (Role("fused", (spec(caps, "fused"),)),)
    least = LEAST_MAX_M
    if caps.k_a is not None:  # TMA fills up short rows with zeros; the decode kernel copies whole steps of K
        least = {"narrow": 1, "middle": 1, "prefill": LEAST_MAX_M["prefill"]}
    return tuple(Role(name, (spec(caps, name),)) for name, value in least.items() if caps.max_m >= value)


@dataclass(frozen=True)
class Choice:
    """Rows up to ``limit`` (no limit for None) are served by a role, each tile by a cluster of ``split`` CTAs.

    Role and split fix the order of the f32 sums, so a row's bits depend on them, and on nothing else: not on M, its
    place, or the grid. Another SM count may choose another split; a table passed to ``plan`` fixes it.
    """

    limit: int | None
    role: str
    split: int


def table(caps: Caps, sm_count: int) -> tuple[Choice, ...]:
    """What serves every M >= 1, or as many rows as the kernel itself quantises, in ascending order of limits."""
    if caps.source != QUANTIZED:
        fused = [("fused", split) for split in range(1, DecodeSpec.max_split + 1)]
        return (Choice(FUSED_M, *_cheapest(_decode_load, fused, caps, FUSED_M, sm_count)),)
    choices: list[Choice] = []
    limits = [DECODE_M, *range(MIDDLE_M, TABLE_M + 1, MIDDLE_M)]
    for limit in limits:
        if limit == DECODE_M and caps.k_a is None:
            candidates = [("decode", split) for split in range(1, DecodeSpec.max_split + 1)]
            load = _decode_load
        else:
            splits = range(1, BlockscaledSpec.max_split + 1)
            candidates = [(role, split) for role in ("middle", "narrow") for split in splits]
            if limit > MIDDLE_M:
                candidates.append(("prefill", 1))
            load = _tile_load
        role, split = _cheapest(load, candidates, caps, limit, sm_count)
        choices.append(Choice(limit, role, split))
    choices.append(Choice(None, "prefill", 1))
    merged = [a for a, b in pairwise(choices) if (a.role, a.split) != (b.role, b.split)]
    return (*merged, choices[-1])


def checked_table(caps: Caps, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """A table from elsewhere.

    ValueError where it does not serve every M up to ``max_m`` once, with kernels that can.
    """
    known = {role.name: role.candidates[-1] for role in roles(caps)}
    least = 0
    for choice in choices:
        kernel = known.get(choice.role)
        if kernel is None:
            raise ValueError(f"{OP}: the table names the role {choice.role!r}; these caps have {', '.join(known)}")
        most = kernel.abi().launch.max_cluster
        if not 1 <= choice.split <= most:
            raise ValueError(f"{OP}: the table splits {choice.role} {choice.split} ways; 1 to {most} are possible")
        if choice.limit is not None and choice.limit <= least:
            raise ValueError(f"{OP}: the table's limits are not ascending at {choice.limit}")
        if choice.role == "decode" and (choice.limit is None or choice.limit > DECODE_M):
            raise ValueError(f"{OP}: the table gives decode M up to {choice.limit}; it takes {DECODE_M}")
        least = caps.max_m if choice.limit is None else choice.limit
    if least < caps.max_m:
        raise ValueError(f"{OP}: the table ends at M = {least}, below max_m = {caps.max_m}: let the last limit be None")
    return tuple(choices)


def choose(choices: tuple[Choice, ...], m: int) -> Choice:
    """The entry of a table that serves a live M >= 1."""
    for choice in choices:
        if choice.limit is None or m <= choice.limit:
            return choice
    raise AssertionError("the last choice has no limit")


def tiles(kernel: KernelSpec, m: int, n: int, batch: int) -> int:
    """Tiles of C: each is the work of one CTA, or of one cluster."""
    if isinstance(kernel, DecodeSpec):
        return kernel.tiles(n) * batch
    assert isinstance(kernel, BlockscaledSpec)
    return -(-m // kernel.tile_m) * -(-n // kernel.tile_n) * batch


# ---- what a launch costs, in clocks -------------------------------------------------------------------------------

#: One SM's share of DRAM and of L2 bandwidth, and what it can draw at most (bytes a clock): an RTX 5090's, and much the
#: same for its siblings, since only ratios count.
DRAM_RATE, L2_RATE, SM_RATE = 4.4, 21.0, 64.0
#: Multiplications an SM does a clock, by bits of an element.
MMA_RATE = {4: 2048, 8: 1024}
#: Start and end of a CTA that nothing hides.
RAMP = 1500.0
#: By CTAs in a cluster, from 1: what their sum costs, and the part of the SMs that such clusters reach, for want of
#: whole ones in every processing cluster of the chip.
CLUSTER = (0.0, 500.0, 550.0, 600.0, 650.0, 700.0, 800.0, 900.0)
REACH = (1.0, 1.0, 0.98, 0.96, 0.94, 0.94, 0.9, 0.89)

#: The SM with most bytes should have at most this many times the mean, and a choice that sees to it may cost this many
#: times the cheapest: what the model leaves out hits the busiest SM.
EVEN, WORTH = 1.25, 1.5
#: CTAs an SM that a choice should have, on the same terms.
COVER = 0.9


@dataclass(frozen=True)
class _Load:
    """Clocks until the busiest SM is done, its bytes over the mean of all SMs, and CTAs an SM."""

    clocks: float
    spread: float
    cover: float


def _cheapest(
    load: Callable[[Caps, str, int, int, int], _Load],
    candidates: list[tuple[str, int]],
    caps: Caps,
    m: int,
    sm_count: int,
) -> tuple[str, int]:
    steps = caps.k // K_QUANTUM
    loads = {(role, split): load(caps, role, split, m, sm_count) for role, split in candidates if split <= steps}
    least = min(x.clocks for x in loads.values())
    near = [c for c, x in loads.items() if x.clocks <= WORTH * least]
    even = [c for c in near if loads[c].spread <= EVEN]
    covering = [c for c in near if loads[c].cover >= COVER]
    both = [c for c in even if c in covering]
    return min(both or even or covering or loads, key=lambda c: loads[c].clocks)


def _decode_load(caps: Caps, role: str, split: int, m: int, sm_count: int) -> _Load:
    """The SM with most weight bytes takes them at its share of DRAM bandwidth."""
    kernel = spec(caps, role)
    assert isinstance(kernel, DecodeSpec)
    steps = caps.k // kernel.tile_k
    work = tiles(kernel, m, caps.n, caps.batch)
    most = -(-work * split // _reached(sm_count, split)) * -(-steps // split)
    clocks = most * kernel.rows * caps.row_bytes / steps / DRAM_RATE + CLUSTER[split - 1]
    return _Load(clocks, most * sm_count / (work * steps), work * split / sm_count)


def _tile_load(caps: Caps, role: str, split: int, m: int, sm_count: int) -> _Load:
    """Every SM does its tiles one after another, each at the pace of its multiplications or of its loads."""
    kernel = spec(caps, role)
    assert isinstance(kernel, BlockscaledSpec)
    steps = caps.k // kernel.tile_k
    work = tiles(kernel, m, caps.n, caps.batch)
    rate = min(SM_RATE, L2_RATE * max(1.0, sm_count / (work * split)))
    step = max(
        kernel.tile_m * kernel.tile_n * kernel.tile_k / MMA_RATE[kernel.encoding.bits], kernel.stage_bytes / rate
    )
    each, most = -(-work * split // _reached(sm_count, split)), -(-steps // split)
    clocks = each * (most * step + RAMP / kernel.groups) + CLUSTER[split - 1]
    return _Load(clocks, each * most * sm_count / (work * steps), work * split / sm_count)


def _reached(sm_count: int, split: int) -> int:
    return max(1, int(sm_count * REACH[split - 1]))
