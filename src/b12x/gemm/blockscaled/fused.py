"""Decode GEMM on bf16 or f16 tokens: ``C = alpha * MXFP8(A) (B * SFB)^T + bias``, A quantised inside the kernel.

>>> plan = blockscaled.plan_fused(blockscaled.FusedCaps(device="cuda", n=7168, k=2048))
>>> binding = plan.bind(source=x, b=b, sfb=sfb, out=out)
>>> blockscaled.run(binding=binding)

For at most 8 rows, where a launch of a quantizer would cost as much as the GEMM; the result is that of
``quantization.mxfp8`` followed by ``gemm.blockscaled``, to the byte in A's codes and scales. ``mm_fused_quant_a`` and
``mm_fused_quant_a_grouped`` are the one-shot forms; the latter may take a rotary embedding back first.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch

from b12x._runtime import checks, resolve, target
from b12x._runtime.abi import Dim3
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Target, used_on
from b12x.gemm.blockscaled import api, fused_planner
from b12x.gemm.blockscaled.api import Binding
from b12x.gemm.blockscaled.decode_spec import SOURCES, DecodeSpec
from b12x.gemm.blockscaled.fused_planner import PART, FusedCaps
from b12x.quantization.mxfp8.planner import Rope
from b12x.quantization.mxfp8.spec import CACHE_DTYPES

OP = fused_planner.OP

#: Dtypes of A.
_SOURCES = SOURCES[1:]
#: Words of a position, by its dtype.
_POSITION_WORDS = {"int32": 1, "int64": 2}
#: Arguments of a bind and their alignment in bytes, the output first.
_ALIGNMENT = {"out": 16, "source": 16, "B": 16, "SFB": 16, "positions": 4, "cos_sin_cache": 16, "alpha": 4, "bias": 16}


class FusedPlan:
    """Resolved kernel for up to ``caps.max_m`` rows."""

    def __init__(self, caps: FusedCaps, split: int | None = None) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        kernels = resolve.resolve_all(OP, fused_planner.roles(caps), self.target, caps.product)
        (self.kernel,) = kernels.values()
        spec = self.kernel.spec
        assert isinstance(spec, DecodeSpec)
        self.split = fused_planner.split(caps, self.target.sm_count, split)
        self.grid: Dim3 = (spec.tiles(caps.n) * self.split, caps.groups, 1)
        self.checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves it, and why."""
        return f"{self.kernel.why}\nM up to {self.caps.max_m}: K split {self.split} ways"

    def with_rope(self, rope: Rope) -> FusedPlan:
        """This plan for heads of other dimensions, which are arguments of the launch: nothing is resolved."""
        assert self.caps.rope is not None
        assert self.caps.rope.cache_dtype == rope.cache_dtype
        other = copy(self)
        other.caps = replace(self.caps, rope=rope)
        other.checked = lru_cache(maxsize=1024)(partial(_check, other))
        return other

    def bind(
        self,
        *,
        source: torch.Tensor,
        b: torch.Tensor,
        sfb: torch.Tensor,
        out: torch.Tensor,
        positions: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
        alpha: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> Binding:
        """As :func:`bind_fused`."""
        return bind_fused(
            self,
            source=source,
            b=b,
            sfb=sfb,
            out=out,
            positions=positions,
            cos_sin_cache=cos_sin_cache,
            alpha=alpha,
            bias=bias,
        )


def plan_fused(caps: FusedCaps, *, split: int | None = None) -> FusedPlan:
    """Resolve the kernel that these Caps need. ``split`` CTAs share K, by default as many as take least time.

    Raises KernelResolutionFrozenError where it is in no pack and resolution is frozen.
    """
    return FusedPlan(caps, split)


def bind_fused(
    plan: FusedPlan,
    *,
    source: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    out: torch.Tensor,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Binding:
    """Check the tensors of one launch, which :func:`~b12x.gemm.blockscaled.run` takes.

    Parameters
    ----------
    source
        A: ``[M, K]``; ``[M, G, K]`` for G groups; ``[M, span, K/span]`` with a span, column ``s * span + r`` being
        element ``(r, s)``. The dimension of neighbouring columns is dense, other strides are multiples of 8 elements.
    b, sfb
        E4M3 ``[N, K, G]`` and its swizzled E8M0 scales, as for ``gemm.blockscaled``.
    out
        C ``[M, N, G]``, physically ``[G, M, N]``.
    positions, cos_sin_cache
        With a rope: int32 or int64 ``[M]``, none negative, and ``[positions, rope_dim]`` of its cache dtype.
    alpha, bias
        As for ``gemm.blockscaled``.

    Raises
    ------
    TypeError
        No tensor, or one of a wrong dtype; a missing argument.
    ValueError
        Shape, stride, device, capacity, alignment or overlap.
    """
    facts = checks.facts
    if plan.caps.rope is None and (positions is not None or cos_sin_cache is not None):
        raise ValueError(f"{OP}: positions and cos_sin_cache are for a plan with a rope: leave them out")
    tensors = (out, source, b, sfb, positions, cos_sin_cache, alpha, bias)
    checked = plan.checked(*[None if x is None else facts(x) for x in tensors])
    checks.memory(OP, checked.arguments, [x for x in tensors if x is not None], checked.sizes, 1)
    if not checked.scalars:
        return Binding(None, out)
    arguments = {
        "a": source,
        "b": b,
        "sfa": None,
        "sfb": sfb,
        "alpha": alpha,
        "bias": bias,
        "c": out,
        **checked.scalars,
    }
    if plan.caps.rope is not None:
        # Of an int64 the kernel reads the low word.
        wide = checked.scalars["position_words"] == 2
        arguments["positions"] = positions.view(torch.int32) if wide else positions  # type: ignore[union-attr]
        arguments["cos_sin_cache"] = cos_sin_cache
    launch = plan.kernel.loaded.prepare(arguments)
    if plan.split > 1:
        launch.cluster = (plan.split, 1, 1)
    launch.grid = plan.grid
    return Binding(launch, out)


def mm_fused_quant_a(
    source: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    expected_m: int | None = None,
    sfb_k_replicated: bool = False,
    rhs_values_tiled: torch.Tensor | bool | None = None,
    a_inner_span: int = 0,
    mma_tiler_mn: tuple[int, int] | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """One-shot ``MXFP8(source) (b sfb)^T`` of at most 8 rows; C ``[M, N, 1]`` is allocated where ``out`` is None.

    ``source`` is ``[M, K]``, or with ``a_inner_span`` s ``[M, s, K/s]``, column ``g * s + r`` being element ``(r, g)``;
    ``b`` is E4M3 ``[N, K, 1]`` or ``[N, K]``. ``expected_m`` and ``sfb_k_replicated`` are hints that change no result.
    """
    tiled = None if rhs_values_tiled is False else rhs_values_tiled
    _refuse(expected_m, rhs_values_tiled=tiled, mma_tiler_mn=mma_tiler_mn)
    checks.whole(OP, "a_inner_span", a_inner_span, least=0)
    shape = _shape("source", source, 3 if a_inner_span else 2)
    if a_inner_span and shape[1] != a_inner_span:
        raise ValueError(
            f"{OP}: source has shape {shape}, a_inner_span is {a_inner_span}; needed is [M, {a_inner_span}, K/"
            f"{a_inner_span}]: view it so"
        )
    if getattr(b, "ndim", 3) == 2:
        b = b.unsqueeze(-1)
    n, k, _ = _shape("B", b, 3)
    columns = shape[1] * (shape[2] if a_inner_span else 1)
    dtype = _dtype("source", source, _SOURCES)
    kept = _plan(target.current_target(source.device), n, k, columns, 1, a_inner_span, None, dtype)
    return _run(kept, source, b, sfb, out, stream)


def mm_fused_quant_a_grouped(
    source: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    *,
    groups: int,
    out: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    head_dim: int = 0,
    nope_dim: int = 0,
    rope_dim: int = 0,
    expected_m: int | None = None,
    sfb_k_replicated: bool = False,
    mma_tiler_mn: tuple[int, int] | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """One-shot product of each group: ``source [M, G, K]`` by ``b [N, K, G]`` gives ``out`` ``[M, N, G]``.

    With ``positions`` and ``cos_sin_cache``, the last ``rope_dim`` columns of every ``head_dim`` are rotated back
    before they are quantised; without both the three dimensions are not looked at. Hints are as for
    :func:`mm_fused_quant_a`.
    """
    _refuse(expected_m, mma_tiler_mn=mma_tiler_mn)
    checks.whole(OP, "groups", groups)
    _, _, columns = _shape("source", source, 3)
    n, k, _ = _shape("B", b, 3)
    rope = None
    if positions is not None or cos_sin_cache is not None:
        if positions is None or cos_sin_cache is None:
            missing = "positions" if positions is None else "cos_sin_cache"
            raise TypeError(
                f"{OP}: {missing} is None; needed are positions and cos_sin_cache for a rotation: pass both or neither"
            )
        rope = (head_dim, nope_dim, rope_dim, _dtype("cos_sin_cache", cos_sin_cache, CACHE_DTYPES))
    dtype = _dtype("source", source, _SOURCES)
    kept = _plan(target.current_target(source.device), n, k, columns, groups, 0, rope, dtype)
    return _run(kept, source, b, sfb, out, stream, positions=positions, cos_sin_cache=cos_sin_cache)


def clear_fused() -> None:
    """Forget the plans that the one-shot functions keep."""
    _plan.cache_clear()


def _run(
    plan: FusedPlan,
    source: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    out: torch.Tensor | None,
    stream: Any,
    **rotation: torch.Tensor | None,
) -> torch.Tensor:
    made = out is None
    if out is None:
        m, n, groups = source.shape[0], plan.caps.n, plan.caps.groups
        out = torch.empty_strided((m, n, groups), (n, 1, m * n), dtype=source.dtype, device=source.device)
    binding = bind_fused(plan, source=source, b=b, sfb=sfb, out=out, **rotation)
    result = api.run(binding=binding, stream=stream)
    if made:
        used_on(stream, result)
    return result


@lru_cache(maxsize=4096)
def _plan(
    where: Target,
    n: int,
    k: int,
    columns: int,
    groups: int,
    span: int,
    rope: tuple[int, int, int, str] | None,
    dtype: str,
) -> FusedPlan:
    """The plan that a one-shot function keeps on a target for its static choices; M is not one of them."""
    rotation = None
    if rope is not None:
        head_dim, nope_dim, rope_dim, cache_dtype = rope
        rotation = Rope(head_dim=head_dim, nope_dim=nope_dim, rope_dim=rope_dim, cache_dtype=cache_dtype)
    return FusedPlan(
        FusedCaps(
            device=where.device,
            n=n,
            k=k,
            k_source=columns,
            groups=groups,
            span=span,
            rope=rotation,
            dtype=dtype,
            c_dtype=dtype,
        )
    )


class _Checked(NamedTuple):
    """What tensors of the same facts share; no scalars are for no rows."""

    arguments: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]
    scalars: dict[str, int]


def _check(
    plan: FusedPlan,
    out: Facts,
    source: Facts,
    b: Facts,
    sfb: Facts,
    positions: Facts | None,
    cos_sin_cache: Facts | None,
    alpha: Facts | None,
    bias: Facts | None,
) -> _Checked:
    caps, product, device = plan.caps, plan.caps.product, plan.target.device
    source_size, strides = _source(caps, source, device)
    m = source[1][0]
    if m > caps.max_m:
        raise ValueError(
            f"{OP}: source has {m} rows; needed are no more than the plan's max_m = {caps.max_m}, which is 8 at most: "
            "quantise more rows with b12x.quantization.mxfp8, and multiply with gemm.blockscaled.mm"
        )
    n, groups = caps.n, caps.groups
    shape = (m, n, groups)
    sizes = {
        "out": checks.layout(OP, "out", out, dtype=caps.c_dtype, shape=shape, strides=(n, 1, m * n), device=device),
        "source": source_size,
    }
    sizes["B"], (_, b_strides) = api._operand("B", b, n, caps.k, product, device)
    sizes["SFB"] = api._scales("SFB", sfb, n, 128, product, device)
    scalars = {
        "m": m,
        "n": n,
        "k": caps.k,
        "batch": groups,
        "alpha_count": 0,
        "has_bias": int(bias is not None),
        "a_row": 2 * strides[0],
        "a_batch": 2 * strides[1],
        "b_row": b_strides[0],
        "b_batch": b_strides[1],
        "k_source": caps.columns,
        "span": caps.span or caps.k,
        "span_bytes": 2 * strides[2],
    }
    if caps.rope is not None:
        rope = caps.rope
        if positions is None or cos_sin_cache is None:
            raise TypeError(f"{OP}: positions and cos_sin_cache are needed for a plan with a rope: pass both")
        dtypes = tuple(_POSITION_WORDS)
        sizes["positions"] = checks.layout(OP, "positions", positions, dtype=dtypes, shape=(m,), device=device)
        cache = (None, rope.rope_dim)
        sizes["cos_sin_cache"] = checks.layout(
            OP, "cos_sin_cache", cos_sin_cache, dtype=rope.cache_dtype, shape=cache, device=device
        )
        scalars["position_words"] = _POSITION_WORDS[checks.dtype_name(positions[0])]
        scalars |= {name: getattr(rope, name) for name in ("head_dim", "nope_dim", "rope_dim")}
    if alpha is not None:
        scalars["alpha_count"] = 1 if alpha[1] == (1,) else groups
        fix = "pass one factor, or one for each group, as a 1-D tensor"
        shape_alpha = (scalars["alpha_count"],)
        sizes["alpha"] = checks.layout(OP, "alpha", alpha, dtype="float32", shape=shape_alpha, device=device, fix=fix)
    if bias is not None:
        fix = "pass one term a column of C, of C's dtype"
        sizes["bias"] = checks.layout(OP, "bias", bias, dtype=caps.c_dtype, shape=(n,), device=device, fix=fix)
    arguments = tuple((name, _ALIGNMENT[name]) for name in sizes)
    return _Checked(arguments, tuple(sizes.values()), scalars if m else {})


def _source(caps: FusedCaps, source: Facts, device: str) -> tuple[int, tuple[int, int, int]]:
    """Size in bytes, and the strides in elements of rows, groups and spans."""
    shape: Sequence[int | None] = (None, caps.columns)
    dense = 1
    if caps.span:
        shape = (None, caps.span, caps.columns // caps.span)
    elif caps.groups > 1 or len(source[1]) == 3:
        shape, dense = (None, caps.groups, caps.columns), 2
    wanted = tuple(1 if axis == dense else None for axis in range(len(shape)))
    size = checks.layout(OP, "source", source, dtype=caps.dtype, shape=shape, strides=wanted, device=device)
    _, extents, steps, _ = source
    outer = [steps[axis] if axis != dense and extents[axis] > 1 else 0 for axis in range(len(shape))]
    if any(step % PART or step < 0 for step in outer):
        raise ValueError(
            f"{OP}: source of shape {tuple(extents)} has strides {tuple(steps)}; needed are multiples of {PART} "
            "elements (16 bytes) but for neighbouring columns: copy it into a tensor of such strides"
        )
    return size, (outer[0], outer[1] if dense == 2 else 0, outer[2] if caps.span else 0)


def _shape(name: str, x: Any, rank: int) -> tuple[int, ...]:
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != rank:
        _no_operand(name, x, rank)
    return tuple(shape)


def _no_operand(name: str, x: Any, rank: int) -> NoReturn:
    found = checks.facts(x)
    if found[0] is None:
        raise TypeError(f"{OP}: {name} is a {found[3]}; needed is a tensor: pass one")
    raise ValueError(f"{OP}: {name} has shape {tuple(x.shape)}; needed are {rank} dimensions: view it so")


def _dtype(name: str, x: Any, known: tuple[str, ...]) -> str:
    """The dtype of a tensor; refused where there is no kernel for it."""
    found = checks.facts(x)
    device = "cuda" if found[0] is None else checks.device_name(found[3])
    checks.layout(OP, name, found, dtype=known, shape=None, strides=checks.ANY, device=device)
    return checks.dtype_name(x.dtype)


def _refuse(expected_m: int | None, **policy: Any) -> None:
    """Arguments of the contract that this op does not act on: harmless values pass, others are named."""
    if expected_m is not None:
        checks.whole(OP, "expected_m", expected_m, fix="leave the hint out, or take the M that is most common")
    for name, value in policy.items():
        if value is not None:
            raise ValueError(f"{OP}: {name} is not available; leave it out and the library chooses")
