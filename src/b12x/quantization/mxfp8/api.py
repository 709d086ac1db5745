"""``quantization.mxfp8``: bf16/fp16 rows to E4M3 values and E8M0 scales of 32-element blocks.

>>> plan = mxfp8.plan(mxfp8.Caps(device="cuda", m=4096, k=7168))
>>> rows = mxfp8.allocate_outputs(plan)
>>> binding = plan.bind(source=x, values=rows.values, scale_rows=rows.scale_rows, scale_mma=rows.scale_mma)
>>> mxfp8.run(binding=binding)

``quantize_rows`` is the one-shot form. Outputs are the operands of ``gemm.blockscaled``: values ``[M, K]``, or ``[M, K,
G]`` of a physical ``[G, M, K]`` for G groups; scales as plain rows ``[G, M, K/32]`` and in the swizzled layout of
:mod:`b12x.quantization.scales`. Only live rows are written, and of the swizzled scales the tiles that hold them, whose
pads are 127.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, Target
from b12x.quantization import scales
from b12x.quantization.mxfp8 import planner
from b12x.quantization.mxfp8.planner import BLOCK, PART, Caps
from b12x.quantization.mxfp8.planner import Rope as Rope
from b12x.quantization.mxfp8.spec import DTYPES

OP = planner.OP
META = registry.find_op(OP)

_VALUES = ("float8_e4m3fn", "uint8")
_SCALES = ("uint8", "float8_e8m0fnu")
_POSITIONS = {"int32": 1, "int64": 2}
#: Arguments and their alignment in bytes, the outputs first; without scale rows, and with and without a rope.
_OUTPUTS = (("values", 16), ("scale_mma", 16), ("scale_rows", 4))
_INPUTS = (("source", 16), ("positions", 4), ("cos_sin_cache", 16))
_ARGUMENTS = {3: (*_OUTPUTS, *_INPUTS), 2: (*_OUTPUTS[:2], *_INPUTS)}


class MXFP8Rows(NamedTuple):
    """Rows in MXFP8: activations or weights.

    ``values`` E4M3 ``[M, K]``, or ``[M, K, G]`` of a physical ``[G, M, K]``; ``scale_rows`` E8M0 bytes ``[G, M,
    K/32]``; ``scale_mma`` the same swizzled, as storage or as its 6-D view. ``values_tiled`` is None: no kernel here
    wants another order of the values.
    """

    values: torch.Tensor
    scale_rows: torch.Tensor
    scale_mma: torch.Tensor
    values_tiled: None = None

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}={checks.described(t)}" for n, t in self._asdict().items() if t is not None)
        return f"MXFP8Rows({shown})"


class Plan:
    """Resolved kernel for up to ``caps.m`` rows of ``caps.k`` columns."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)
        self.checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def with_rope(self, rope: Rope) -> Plan:
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
        values: torch.Tensor,
        scale_mma: torch.Tensor,
        scale_rows: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
    ) -> Binding:
        """As :func:`bind`."""
        return bind(
            self,
            source=source,
            values=values,
            scale_mma=scale_mma,
            scale_rows=scale_rows,
            positions=positions,
            cos_sin_cache=cos_sin_cache,
        )


class Binding(NamedTuple):
    """A checked launch; None where there are no rows."""

    launch: Launch | None


def plan(caps: Caps) -> Plan:
    """Resolve the kernel that these Caps need.

    Raises KernelResolutionFrozenError where it is in no pack and resolution is frozen.
    """
    return Plan(caps)


def allocate_outputs(plan: Plan, *, m: int | None = None, device: Any = None) -> MXFP8Rows:
    """Uninitialised outputs for ``m`` rows, the plan's capacity by default; the scales as the 6-D view."""
    caps = plan.caps
    rows = caps.m if m is None else checks.whole(OP, "m", m, least=0, most=caps.m)
    return _outputs(rows, caps.columns, caps.groups, device or plan.target.device)


def bind(
    plan: Plan,
    *,
    source: torch.Tensor,
    values: torch.Tensor,
    scale_mma: torch.Tensor,
    scale_rows: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
) -> Binding:
    """Check the tensors of one launch.

    Parameters
    ----------
    source
        ``[rows, K]`` with rows <= m; ``[rows, G, K]`` for G groups; ``[rows, span, K/span]`` with a span, column
        ``s * span + r`` being element ``(r, s)``. The dimension of neighbouring columns is dense, other strides are
        multiples of 8 elements.
    values
        ``[M, K]`` or ``[M, K, G]``, M >= rows, rows of K dense; the groups may lie further apart than needed.
    scale_mma
        Swizzled scales: storage ``[G, R, C, 32, 4, 4]`` or its 6-D view, R >= ceil(rows / 128), or the flat bytes of
        exactly as many row tiles a group as there are rows for (of one group also more).
    scale_rows
        ``[M, K/32]`` or ``[G, M, K/32]``, M >= rows, rows dense; None where no one reads them.
    positions, cos_sin_cache
        With a rope: int32 or int64 ``[rows]``, none negative, and ``[positions, rope_dim]`` of its cache dtype.

    Raises
    ------
    TypeError
        No tensor, or one of a wrong dtype; a missing argument.
    ValueError
        Shape, stride, device, capacity, alignment or overlap.
    """
    facts = checks.facts
    outputs = (values, scale_mma) if scale_rows is None else (values, scale_mma, scale_rows)
    inputs: tuple[Any, ...] = (source,)
    if plan.caps.rope is not None:
        inputs = (source, positions, cos_sin_cache)
    elif positions is not None or cos_sin_cache is not None:
        raise ValueError(f"{OP}: positions and cos_sin_cache are for a plan with a rope: leave them out")
    checked = plan.checked(len(outputs), *map(facts, outputs), *map(facts, inputs))
    checks.memory(OP, _ARGUMENTS[len(outputs)], (*outputs, *inputs), checked.sizes, len(outputs))
    if checked.grid is None:
        return Binding(None)
    arguments = {
        "source": source,
        "values": values,
        "scale_rows": scale_rows,
        "scale_mma": scale_mma,
        **checked.scalars,
    }
    if positions is not None:
        # Of an int64 the kernel reads the low word.
        arguments["positions"] = positions if checked.scalars["position_words"] == 1 else positions.view(torch.int32)
        arguments["cos_sin_cache"] = cos_sin_cache
    launch = plan.kernels["quantize"].loaded.prepare(arguments)
    launch.grid = checked.grid
    return Binding(launch)


def run(*, binding: Binding, stream: Any = None) -> None:
    """Launch a binding on ``stream``, the current one by default."""
    try:
        launch = binding.launch
    except AttributeError:
        raise checks.no_binding(OP, binding) from None
    if launch is not None:
        launch.launch(stream)


def quantize_rows(
    source: torch.Tensor,
    values: torch.Tensor,
    scale_rows: torch.Tensor | None,
    scale_mma: torch.Tensor,
    *,
    value_order: str = "linear",
    stream: Any = None,
) -> None:
    """One-shot: ``source`` ``[M, K]`` into outputs that are there; arguments as in :func:`bind`."""
    if value_order != "linear":
        raise ValueError(
            f"{OP}: value_order is {value_order!r}; needed is 'linear' ('trellis_native_mma', the order of trellis "
            "kernels, is not available): leave it out"
        )
    try:
        _, k = source.shape
        device = source.device
    except (AttributeError, ValueError):
        found = checks.facts(source)
        fix, place = "reshape it to rows of K columns", "cuda" if found[0] is None else str(found[3])
        checks.layout(OP, "source", found, dtype=DTYPES, shape=(None, None), strides=checks.ANY, device=place, fix=fix)
        raise
    kept = _plan(target.current_target(device), k, checks.dtype_name(source.dtype))
    run(binding=bind(kept, source=source, values=values, scale_rows=scale_rows, scale_mma=scale_mma), stream=stream)


def clear_caches() -> None:
    """Forget the plans that ``quantize_rows`` keeps."""
    _plan.cache_clear()


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


@lru_cache(maxsize=4096)
def _plan(where: Target, k: int, dtype: str) -> Plan:
    """The plan ``quantize_rows`` keeps on a target for its static choices; M is not one of them."""
    return Plan(Caps(device=where.device, m=checks.LARGEST, k=k, dtype=dtype))


class _Checked(NamedTuple):
    """What tensors of the same facts share; ``sizes`` are in the order of the arguments, no grid is for no rows."""

    sizes: tuple[int, ...]
    scalars: dict[str, int]
    grid: tuple[int, int, int] | None


def _check(plan: Plan, outputs: int, *tensors: Facts) -> _Checked:
    caps, device = plan.caps, plan.target.device
    values, scale_mma = tensors[:2]
    source = tensors[outputs]
    source_size, rows, strides = _source(caps, source, device)
    if rows > caps.m:
        raise ValueError(
            f"{OP}: source has {rows} rows, more than the plan's capacity m = {caps.m}; plan with a larger m"
        )
    values_size, values_group = _values(caps, values, rows, device)
    mma_size, mma_group = _scale_mma(caps, scale_mma, rows, device)
    sizes, rows_group = [values_size, mma_size], 0
    if outputs == 3:
        rows_size, rows_group = _scale_rows(caps, tensors[2], rows, device)
        sizes.append(rows_size)
    sizes.append(source_size)
    scalars = {
        "m": rows,
        "k": caps.k,
        "k_out": caps.columns,
        "span": caps.span or caps.columns,
        "source_row": 2 * strides[0],
        "source_span": 2 * strides[1],
        "source_group": 2 * strides[2],
        "values_group": values_group,
        "scale_rows_group": rows_group,
        "scale_mma_group": mma_group,
    }
    if caps.rope is not None:
        positions, cache = tensors[outputs + 1 :]
        fix = "pass one position for each row of source"
        sizes += [
            checks.layout(OP, "positions", positions, dtype=tuple(_POSITIONS), shape=(rows,), device=device, fix=fix),
            checks.layout(
                OP, "cos_sin_cache", cache, dtype=caps.rope.cache_dtype, shape=(None, caps.rope.rope_dim), device=device
            ),
        ]
        scalars["position_words"] = _POSITIONS[checks.dtype_name(positions[0])]
        scalars |= {name: getattr(caps.rope, name) for name in ("head_dim", "nope_dim", "rope_dim")}
    return _Checked(tuple(sizes), scalars, planner.grid(rows, caps.columns, caps.groups) if rows else None)


def _source(caps: Caps, source: Facts, device: str) -> tuple[int, int, tuple[int, int, int]]:
    """Size in bytes, rows, and the strides in elements of rows, spans and groups."""
    shape: tuple[int | None, ...] = (None, caps.k)
    dense = 1
    if caps.span:
        shape = (None, caps.span, caps.k // caps.span)
    elif caps.groups > 1 or len(source[1]) == 3:
        shape, dense = (None, caps.groups, caps.k), 2
    wanted = tuple(1 if axis == dense else None for axis in range(len(shape))) if 0 not in source[1] else checks.ANY
    size = checks.layout(OP, "source", source, dtype=caps.dtype, shape=shape, strides=wanted, device=device)
    _, extents, steps, _ = source
    outer = [steps[axis] if axis != dense and extents[axis] > 1 else 0 for axis in range(len(shape))]
    if any(step % PART or step < 0 for step in outer):
        raise ValueError(
            f"{OP}: source of shape {tuple(extents)} has strides {tuple(steps)}; needed are multiples of {PART} "
            "elements (16 bytes) but for neighbouring columns: copy it into a tensor of such strides"
        )
    return size, extents[0], (outer[0], outer[2] if caps.span else 0, outer[1] if dense == 2 else 0)


def _values(caps: Caps, values: Facts, rows: int, device: str) -> tuple[int, int]:
    """Size in bytes, and bytes from a group to the next."""
    columns, groups = caps.columns, caps.groups
    shape: tuple[int | None, ...] = (None, columns)
    strides: tuple[int | None, ...] = (columns, 1)
    if groups > 1 or len(values[1]) == 3:
        shape, strides = (*shape, groups), (*strides, None)
    size = checks.layout(OP, "values", values, dtype=_VALUES, shape=shape, strides=strides, device=device)
    _, extents, steps, _ = values
    step = steps[2] if groups > 1 else 0
    _check_groups("values", values, extents[0], rows, step, columns, groups, 8)
    return size, step


def _scale_rows(caps: Caps, scale_rows: Facts, rows: int, device: str) -> tuple[int, int]:
    """As :func:`_values`."""
    columns, groups = caps.columns // BLOCK, caps.groups
    shape: tuple[int | None, ...] = (None, columns)
    strides: tuple[int | None, ...] = (columns, 1)
    if groups > 1 or len(scale_rows[1]) == 3:
        shape, strides = (groups, *shape), (None, *strides)
    size = checks.layout(OP, "scale_rows", scale_rows, dtype=_SCALES, shape=shape, strides=strides, device=device)
    _, extents, steps, _ = scale_rows
    step = steps[0] if groups > 1 else 0
    _check_groups("scale_rows", scale_rows, extents[-2], rows, step, columns, groups, 4 if columns % 4 == 0 else 1)
    return size, step


def _check_groups(
    name: str, found: Facts, capacity: int, rows: int, step: int, columns: int, groups: int, align: int
) -> None:
    if capacity < rows:
        raise ValueError(
            f"{OP}: {name} of shape {tuple(found[1])} has {capacity} rows, source {rows}; needed are as many at least: "
            "allocate_outputs(plan) makes room for the plan's capacity"
        )
    if groups > 1 and (step < rows * columns or step % align):
        raise ValueError(
            f"{OP}: {name} has strides {tuple(found[2])}, its groups {step} bytes apart; needed is a multiple of "
            f"{align} that is at least {rows * columns}: make it as [G, M, columns] and permute it"
        )


def _scale_mma(caps: Caps, scale_mma: Facts, rows: int, device: str) -> tuple[int, int]:
    """As :func:`_values`."""
    columns, groups = caps.columns // BLOCK, caps.groups
    size = checks.layout(OP, "scale_mma", scale_mma, dtype=_SCALES, shape=None, strides=checks.ANY, device=device)
    _, shape, strides, _ = scale_mma
    needed = scales.storage_bytes(rows, columns, groups)
    flat = len(shape) == 1
    if flat or scales.is_storage(shape, columns, groups):
        swizzled = checks.contiguous(scale_mma)
    else:
        swizzled = scales.is_view(shape, strides, columns, groups)
    if not swizzled or size < needed or (flat and groups > 1 and size != needed):
        storage = scales.storage_shape(rows, columns, groups)
        raise ValueError(
            f"{OP}: scale_mma has shape {tuple(shape)}, strides {tuple(strides)}; needed are the swizzled scales of "
            f"{rows} rows or more: contiguous storage {list(storage)}, its {needed} contiguous bytes in one dimension, "
            f"or the view [32, 4, {storage[1]}, 4, {storage[2]}, {groups}]: allocate_outputs(plan) makes them"
        )
    return size, size // groups if groups > 1 else 0


def _outputs(m: int, k: int, groups: int, device: Any) -> MXFP8Rows:
    values = torch.empty((groups, m, k), dtype=torch.float8_e4m3fn, device=device)
    scale_rows = torch.empty((groups, m, k // BLOCK), dtype=torch.uint8, device=device)
    storage = torch.empty(scales.storage_shape(m, k // BLOCK, groups), dtype=torch.uint8, device=device)
    shaped = values[0] if groups == 1 else values.permute(1, 2, 0)
    return MXFP8Rows(shaped, scale_rows, scales.view(storage, m, k // BLOCK, groups))
