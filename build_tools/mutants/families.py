"""The kernel families whose mutants are judged. A new family joins by a row of :data:`FAMILIES`.

A row names keys of the default packs, at least one of each shape of kernel that the family has, and the cases that its
mutants have to fail. The cases are as small as may be and still have what faults need to show: several tiles and a tail
on every axis, a batch, more tiles than CTAs, more K steps than stages (and no multiple of them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from b12x.gemm._bmm.cases import BmmCase
from b12x.gemm.blockscaled.cases import BlockscaledCase
from b12x.gemm.blockscaled.decode_cases import FusedCase
from b12x.gemm.mla_query_projection.cases import MlaQueryProjectionCase
from b12x.quantization.mxfp8.cases import Mxfp8Case
from b12x.quantization.mxfp8.planner import Rope
from b12x.quantization.mxfp8.spec import CACHE_DTYPES
from b12x.quantization.nvfp4.cases import Nvfp4Case
from b12x.verify.case import Case
from b12x.verify.mma.cases import MmaCase

from ..errors import BuildError


@dataclass(frozen=True)
class Family:
    """``count`` mutants are drawn in the tests. A case runs for the key that it launches."""

    kernel: str
    count: int
    keys: tuple[str, ...]
    cases: tuple[Case, ...]

    def cases_of(self, key: str) -> tuple[Case, ...]:
        """The cases that launch a kernel."""
        return tuple(
            case for case in self.cases if any(spec.key == key for role in case.roles() for spec in role.candidates)
        )


_GEMM = "gemm.blockscaled:recipe={},c_dtype={},tile_m={},tile_n={},groups={}"

#: The shapes of a GEMM (M, N, K, L, CTAs that share a tile). M ends in each group of rows that an instruction of its
#: own stores: slabs of 8 rows, whose rows of C are stored 16 bytes at a time where N allows it (73 does not). Among
#: them are one K step, more K steps than stages, and a batch.
_MIDDLE = (
    *((m, 72, 128, 1, 1) for m in (4, 12, 20, 28, 36, 44, 52, 60)),
    *((m, 73, 128, 1, 1) for m in (12, 60)),
    (36, 73, 256, 3, 1),
    (33, 72, 1280, 2, 1),
    (68, 72, 128, 1, 1),
    (64, 73, 384, 2, 2),
    (64, 72, 384, 1, 3),
)
_PREFILL = (
    *((m, 72, 128, 1, 1) for m in range(68, 129, 8)),
    *((m, 73, 128, 1, 1) for m in (76, 84, 124)),
    (132, 73, 256, 2, 1),
    (129, 136, 768, 2, 1),
)
#: Every group of rows once more, without alpha and bias.
_BARE = {m: tuple((m, n, 128, 1, 1) for n in (72, 73)) for m in (64, 128)}
_SHAPES = tuple(
    (recipe, c_dtype, role, distribution, shapes)
    for recipe, c_dtype, role, many, bare in (
        ("nvfp4", "float16", "middle", _MIDDLE, _BARE[64]),
        ("block_fp8", "float32", "middle", _MIDDLE, _BARE[64]),
        ("mxfp8", "bfloat16", "prefill", _PREFILL, _BARE[128]),
    )
    for distribution, shapes in (("octaves", many), ("grid", bare))
)
#: CTAs for a GEMM's tiles.
_SMS = 3

_DECODE = "gemm.blockscaled.decode:recipe={},c_dtype={},source={},rope={},tokens={}"
_DECODED = (("nvfp4", "float16"), ("mxfp8", "bfloat16"), ("block_fp8", "float32"))
#: M, N, K, L and CTAs that share K. M ends in both tiles of tokens; N in each group of 8 rows and of 32, and within
#: one; K has one step, fewer than parts, and enough to go round the rings of all warps.
_DECODE_SHAPES = (
    *((m, 72, 128, 1, 1) for m in (1, 2, 5, 8, 9, 14, 16)),
    *((11, n, 128, 1, 1) for n in (3, 13, 30, 37, 50, 100, 125)),
    (16, 136, 2304, 1, 1),
    (7, 133, 2176, 2, 1),
    *((13, 40, 640, 2, split) for split in range(2, 9)),
    (3, 8, 256, 1, 8),
)
#: M, N, K, 8 columns that A lacks, G, span, rope, CTAs that share K.
_FUSED_SHAPES = (
    *((m, 72, 128, m, 1, 0, "none", 1) for m in (1, 2, 3, 4, 6, 8)),
    (5, 133, 1408, 3, 1, 0, "none", 1),
    (7, 40, 640, 0, 1, 160, "none", 3),
    (3, 40, 384, 4, 2, 0, "none", 2),
    *(
        (m, n, k, 0, 2, 0, rope, split)
        for rope in CACHE_DTYPES
        for m, n, k, split in (
            (5, 133, 1408, 1),
            (8, 104, 384, 2),
            (3, 13, 128, 1),
            *((3, 8, 640, s) for s in range(3, 9)),
        )
    ),
)

#: Live rows of the MXFP8 quantiser that end in each of the 16 rows of a thread, in all warps.
_ENDS = tuple(32 * step + 8 * ((row + 1) % 4) + 4 * (step % 2) + row for step in range(4) for row in range(4))


#: M, K, values, and what else a case of the MXFP8 quantiser has; then the same with positions for values.
_MXFP8_ROWS: tuple[tuple[int, int, str, dict[str, Any]], ...] = (
    (69, 136, "blocks", {"k_out": 256, "groups": 2}),
    (131, 160, "bits", {}),
    (236, 128, "blocks", {}),
    (130, 192, "blocks", {"span": 48, "scale_rows": False}),
    *((m, 32, "blocks", {}) for m in _ENDS),
)
_MXFP8_ROTATED: tuple[tuple[int, int, str, dict[str, Any]], ...] = (
    (131, 192, "int32", {"groups": 2}),
    (37, 192, "int64", {"k_out": 256, "values": "bits"}),
    (70, 192, "int64", {"span": 96, "scale_rows": False}),
    *((m, 96, "int32", {}) for m in _ENDS),
)


def _rope(cache_dtype: str) -> Rope:
    return Rope(head_dim=96, nope_dim=32, rope_dim=64, cache_dtype=cache_dtype)


_MLA = "gemm.mla_query_projection:weight={},major=n,out_dtype={},tile={}"
#: Heads, M, N, K, RoPE columns and columns between rows of the output.
_QUERIES = (
    (2, 11, 160, 224, 64, 8),
    (1, 5, 96, 96, 10, 2),
    *((1, 3, 32, k, 4, 8) for k in (32, 96, 144, 208, 272, 336)),
)
#: Live rows that end in each of the rows that a thread stores.
_ENDING_ROWS = (32, 33, 40, 41, 48, 49, 56, 57)
_MANY_QUERIES = (
    (2, 70, 160, 352, 64, 8),
    (1, 70, 160, 96, 10, 2),
    *((1, m, 32, 32, 4, 8) for m in _ENDING_ROWS),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        kernel="gemm.blockscaled",
        count=90,
        keys=(
            _GEMM.format("nvfp4", "float16", 64, 64, 1),
            _GEMM.format("block_fp8", "float32", 64, 64, 1),
            _GEMM.format("mxfp8", "bfloat16", 128, 128, 2),
        ),
        cases=tuple(
            BlockscaledCase(
                size="small",
                recipe=recipe,
                c_dtype=c_dtype,
                m=m,
                n=n,
                k=k,
                batch=batch,
                role=role,
                split=split,
                distribution=distribution,
                sm_count=_SMS,
            )
            for recipe, c_dtype, role, distribution, shapes in _SHAPES
            for m, n, k, batch, split in shapes
        ),
    ),
    Family(
        kernel="gemm.blockscaled.decode",
        count=60,
        keys=(
            *(_DECODE.format(recipe, c_dtype, "quantized", "none", 16) for recipe, c_dtype in _DECODED),
            *(_DECODE.format("mxfp8", "bfloat16", "bfloat16", rope, 8) for rope in ("none", "float32", "bfloat16")),
        ),
        cases=(
            *(
                BlockscaledCase(
                    size="small",
                    recipe=recipe,
                    c_dtype=c_dtype,
                    m=m,
                    n=n,
                    k=k,
                    batch=batch,
                    role="decode",
                    split=split,
                    distribution="octaves" if c_dtype != "float16" else "normal",
                )
                for recipe, c_dtype in _DECODED
                for m, n, k, batch, split in _DECODE_SHAPES
            ),
            *(
                FusedCase(
                    size="small",
                    m=m,
                    n=n,
                    k=k,
                    k_source=k - 8 * cut,
                    groups=groups,
                    span=span,
                    rope=rope,
                    split=split,
                    distribution="octaves",
                )
                for m, n, k, cut, groups, span, rope, split in _FUSED_SHAPES
            ),
        ),
    ),
    Family(
        kernel="gemm.bmm",
        count=50,
        keys=tuple(
            f"gemm.bmm:weight=mxfp8,major={major},out_dtype=bfloat16,tile={tile}"
            for tile in ("decode", "prefill")
            for major in ("n", "k")
        ),
        cases=tuple(
            BmmCase(size="small", batch=batch, m=m, n=n, k=k, major=major, pad=pad, distribution=distribution)
            for major, columns, ends in (
                ("n", 160, ((32, 32), (32, 96), (32, 144), (32, 208), (32, 272), (32, 336))),
                ("k", 76, ((33, 128), (34, 320), (35, 576), (36, 832))),
            )
            for batch, m, n, k, pad, distribution in (
                (2, 11, columns, 224, 8, "octaves"),
                (1, 5, columns, 96, 3, "octaves"),
                (1, 9, columns, 96, 8, "extremes"),
                # K ends in each of the steps that a warp has under way.
                *((1, 3, n, k, 8, "octaves") for n, k in ends),
                (2, 70, columns, 352, 8, "octaves"),
                (1, 70, 2 * columns, 96, 3, "octaves"),
                (1, 66, columns, 96, 8, "extremes"),
                *((1, m, 32 if major == "n" else 33 + i, 32, 8, "octaves") for i, m in enumerate(_ENDING_ROWS)),
            )
        ),
    ),
    Family(
        kernel="gemm.mla_query_projection",
        count=45,
        keys=(
            _MLA.format("mxfp8", "bfloat16", "decode"),
            _MLA.format("bfloat16", "float8_e4m3fn", "decode"),
            _MLA.format("bfloat16", "bfloat16", "prefill"),
            _MLA.format("mxfp8", "float8_e4m3fn", "prefill"),
        ),
        cases=tuple(
            MlaQueryProjectionCase(
                size="small",
                heads=heads,
                m=m,
                n=n,
                k=k,
                rope=rope,
                pad=pad,
                weight_format=weight,
                output_dtype=output,
                distribution="octaves",
            )
            for weight, output, shapes in (
                ("mxfp8", "bfloat16", _QUERIES),
                ("bfloat16", "float8_e4m3fn", _QUERIES),
                ("bfloat16", "bfloat16", _MANY_QUERIES),
                ("mxfp8", "float8_e4m3fn", _MANY_QUERIES),
            )
            for heads, m, n, k, rope, pad in shapes
        ),
    ),
    Family(
        kernel="quantization.mxfp8",
        count=40,
        keys=(
            "quantization.mxfp8:dtype=bfloat16,rope=none",
            "quantization.mxfp8:dtype=float16,rope=none",
            "quantization.mxfp8:dtype=bfloat16,rope=float32",
            "quantization.mxfp8:dtype=bfloat16,rope=bfloat16",
        ),
        cases=(
            *(
                Mxfp8Case(size="small", dtype=dtype, m=m, k=k, capacity=300, values=values, **rest)
                for dtype in ("bfloat16", "float16")
                for m, k, values, rest in _MXFP8_ROWS
            ),
            *(
                Mxfp8Case(size="small", m=m, k=k, capacity=140, position_dtype=positions, rope=_rope(cache), **rest)
                for cache in ("float32", "bfloat16")
                for m, k, positions, rest in _MXFP8_ROTATED
            ),
        ),
    ),
    Family(
        kernel="quantization.nvfp4",
        count=30,
        keys=("quantization.nvfp4:dtype=bfloat16", "quantization.nvfp4:dtype=float16"),
        cases=tuple(
            # M ends in each of the four rows of a thread, twice in the second tile.
            Nvfp4Case(
                size="small", m=m, k=k, k_out=wide, capacity=300, dtype=dtype, values=values, global_scale=global_scale
            )
            for dtype in ("bfloat16", "float16")
            for m, k, wide, values, global_scale in (
                (37, 64, None, "blocks", 448 * 6 / 5.25),
                (70, 64, None, "bits", 1.0),
                (131, 192, None, "blocks", 448 * 6 / 5.25),
                (229, 128, None, "bits", 1.0),
                (101, 72, 192, "blocks", 448 * 6 / 5.25),
            )
        ),
    ),
    Family(
        kernel="verify.mma",
        count=30,
        keys=("verify.mma:kind=mxf4nvf4", "verify.mma:kind=f16"),
        cases=tuple(
            # One step, and many.
            MmaCase(size="small", kind=kind, tiles=3, k=k, distribution="octaves")
            for kind, step in (("mxf4nvf4", 64), ("f16", 16))
            for k in (step, 576)
        ),
    ),
)


def family_of(name: str) -> Family:
    """The family of a kernel or of a key (BuildError when there is none)."""
    kernel = name.partition(":")[0]
    for family in FAMILIES:
        if family.kernel == kernel:
            return family
    known = ", ".join(family.kernel for family in FAMILIES)
    raise BuildError(f"no family {kernel!r} has mutants; there are {known}")
