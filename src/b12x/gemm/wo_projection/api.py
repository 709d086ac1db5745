"""``gemm.wo_projection``: a low-rank output projection of attention, WO-A for each group of heads, then WO-B.

>>> weights = wo_projection.pack_weights(wo_a, wo_a_scale, wo_b, wo_b_scale, groups=4, group_width=4096, rank=1024,
...                                      hidden=4096)  # once, when the model is loaded
>>> plan = wo_projection.plan(wo_projection.Caps(device="cuda", max_tokens=256, groups=4, group_width=4096, rank=1024,
...                                              hidden=4096))
>>> scratch = torch.empty(plan.layout.nbytes, dtype=torch.uint8, device="cuda")
>>> y = wo_projection.run(binding=plan.bind(scratch=scratch, source_tgd=x, weights=weights))

With t = bf16(MXFP8(x) @ A^T) for each group, y = bf16(MXFP8(t) @ B^T), where column ``g * rank + r`` of B meets column
r of group g's t. ``bind_inv_rope`` takes the output of attention before its rotation is taken back, and does that in
f32 while it quantises. The result lies in the scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, Target, used_on
from b12x._runtime.scratch import Layout, ScratchBufferSpec
from b12x.gemm import _linear, _rows, _weights
from b12x.gemm._parts import FUSED_M
from b12x.gemm.blockscaled import api as blockscaled
from b12x.gemm.blockscaled.fused import FusedPlan, plan_fused
from b12x.gemm.wo_projection import planner
from b12x.gemm.wo_projection.planner import Caps
from b12x.quantization.mxfp8 import api as mxfp8
from b12x.quantization.mxfp8 import planner as mxfp8_planner
from b12x.quantization.mxfp8.api import MXFP8Rows
from b12x.quantization.mxfp8.planner import Rope
from b12x.quantization.mxfp8.spec import CACHE_DTYPES

OP = planner.OP
META = registry.find_op(OP)

_DTYPE = "bfloat16"
_POSITIONS = ("int32", "int64")
#: The scratch and what is read, without a rope and with one: names, and alignment in bytes.
_WEIGHTS = tuple((f"weights.{name}", 16) for name in ("wo_a values", "wo_a scales", "wo_b values", "wo_b scales"))
_MEMORY = (("scratch", 16), *_WEIGHTS, ("source_tgd", 16))
_MEMORY_HEADS = (("scratch", 16), *_WEIGHTS, ("o", 16), ("positions", 4), ("cos_sin_cache", 16))


@dataclass(frozen=True, repr=False, eq=False)
class Weights:
    """Prepared weights: ``wo_a`` rows of G groups ``[rank, D, G]``, ``wo_b`` rows ``[hidden, G * rank]``.

    ``sfb_k_replicated`` says that scales are equal within 128 x 128 blocks.
    """

    wo_a: MXFP8Rows
    wo_b: MXFP8Rows
    groups: int
    group_width: int
    rank: int
    hidden: int
    sfb_k_replicated: bool = False

    @cached_property
    def operands(self) -> tuple[_rows.Operand, _rows.Operand]:
        """Values ``[N, K, L]`` and swizzled scales of WO-A and WO-B."""
        first = self.wo_a.values
        if first.ndim == 2:
            first = first.unsqueeze(-1)
        return (first, self.wo_a.scale_mma), (self.wo_b.values.unsqueeze(-1), self.wo_b.scale_mma)

    def __repr__(self) -> str:
        sizes = f"groups={self.groups}, group_width={self.group_width}, rank={self.rank}, hidden={self.hidden}"
        return f"Weights({sizes}, on {self.wo_a.values.device})"


class Binding(NamedTuple):
    """Checked launches, in their order; none where there are no tokens."""

    launches: tuple[Launch, ...]
    output: torch.Tensor

    def __repr__(self) -> str:
        return f"Binding(launches={self.launches!r}, output={checks.described(self.output)})"


class Plan:
    """Resolved kernels for every token count up to ``caps.max_tokens``, with and without a rope."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)
        # By the dtype of the rope's cache, None without a rope.
        ropes: dict[str | None, Rope | None] = {None: None}
        ropes |= {rope.cache_dtype: rope for rope in planner.ROPES}
        self.fused_first = {dtype: plan_fused(planner.fused_first(caps, rope)) for dtype, rope in ropes.items()}
        self.fused_second = plan_fused(planner.fused_second(caps))
        self.quantizers: dict[str | None, mxfp8.Plan] = {}
        self.apart: tuple[blockscaled.Plan, mxfp8.Plan, blockscaled.Plan] | None = None
        if caps.max_tokens > FUSED_M:
            first, inner, second = planner.first(caps), planner.inner_quantizer(caps), planner.second(caps)
            self.apart = blockscaled.plan(first), mxfp8.plan(inner), blockscaled.plan(second)
            self.quantizers = {d: mxfp8.plan(planner.input_quantizer(caps, rope)) for d, rope in ropes.items()}
        self._turned: Callable[[Rope], tuple[FusedPlan, mxfp8.Plan | None]]
        self._turned = lru_cache(maxsize=64)(partial(_with_rope, self.fused_first, self.quantizers))
        self.layout = _layout(caps.max_tokens, caps.groups, caps.group_width, caps.rank, caps.hidden)
        self._specs = self.layout.specs(self.target.device)
        self._checked = lru_cache(maxsize=1024)(partial(_check, self))
        self._checked_heads = lru_cache(maxsize=1024)(partial(_check_heads, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def scratch_specs(self) -> tuple[ScratchBufferSpec, ...]:
        """The one buffer to allocate for a binding."""
        return self._specs

    def shapes_and_dtypes(self) -> _rows.Shapes:
        """What lies in the scratch, at ``layout.offsets``."""
        caps = self.caps
        return _shapes(caps.max_tokens, caps.groups, caps.group_width, caps.rank, caps.hidden)

    def bind(
        self,
        *,
        scratch: Any,
        source_tgd: torch.Tensor,
        weights: Weights,
        return_3d: bool = False,
        expected_m: int | None = None,
    ) -> Binding:
        """Check the tensors of one run.

        ``source_tgd`` bf16 ``[T, G, D]``. The result is ``[T, hidden]``, with ``return_3d`` ``[T, hidden, 1]``; it lies
        in the scratch. ``expected_m`` is a hint that changes nothing. Raises TypeError for what is no tensor or of a
        wrong dtype, ValueError for shape, stride, device, capacity or overlap, KeyError where a mapping lacks the
        scratch.
        """
        _linear.check_hint(OP, expected_m)
        buffer = _rows.select(OP, self._specs, scratch)
        tokens, size = self._checked(checks.facts(source_tgd))
        self._check_memory(_MEMORY, buffer, self.layout, weights, (source_tgd,), (size,))
        return self._bound(buffer, self.layout, tokens, source_tgd, weights, return_3d)

    def bind_inv_rope(
        self,
        *,
        scratch: Any,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        weights: Weights,
        heads_per_group: int,
        nope_dim: int = 448,
        rope_dim: int = 64,
        return_3d: bool = False,
        expected_m: int | None = None,
    ) -> Binding:
        """As :meth:`bind`, for ``o`` bf16 ``[T, G * heads_per_group, head_dim]`` whose rotation is taken back.

        ``positions`` int32 or int64 ``[T]``; ``cos_sin_cache`` f32 or bf16 ``[positions, rope_dim]``, cosines, then
        sines, of interleaved pairs. The last ``rope_dim`` of each head's ``nope_dim + rope_dim`` columns are rotated.
        """
        _linear.check_hint(OP, expected_m)
        buffer = _rows.select(OP, self._specs, scratch)
        rotation = self.rotation(cos_sin_cache, heads_per_group, nope_dim, rope_dim)
        return self.bound_inv_rope(buffer, self.layout, o, positions, cos_sin_cache, weights, rotation, return_3d)

    def rotation(self, cos_sin_cache: torch.Tensor, heads_per_group: int, nope_dim: int, rope_dim: int) -> Rope:
        """The rope of heads that fill a group."""
        return _rope(cos_sin_cache, self.caps.group_width, heads_per_group, nope_dim, rope_dim)

    def bound_inv_rope(
        self,
        buffer: torch.Tensor,
        layout: Layout,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        weights: Weights,
        rope: Rope,
        return_3d: bool,
        output: torch.Tensor | None = None,
    ) -> Binding:
        """As :meth:`bind_inv_rope`, with a checked scratch of some layout, and an output outside it if given."""
        read = (o, positions, cos_sin_cache)
        tokens, sizes, strides = self._checked_heads(rope, *map(checks.facts, read))
        self._check_memory(_MEMORY_HEADS, buffer, layout, weights, read, sizes)
        source = o.as_strided((tokens, self.caps.groups, self.caps.group_width), strides)
        rotation = {"positions": positions, "cos_sin_cache": cos_sin_cache}
        return self._bound(buffer, layout, tokens, source, weights, return_3d, rope, rotation, output)

    def _bound(
        self,
        buffer: torch.Tensor,
        layout: Layout,
        tokens: int,
        source: torch.Tensor,
        weights: Weights,
        return_3d: bool,
        rope: Rope | None = None,
        rotation: dict[str, torch.Tensor] | None = None,
        output: torch.Tensor | None = None,
    ) -> Binding:
        caps, rotation = self.caps, rotation or {}
        wo_a, wo_b = weights.operands
        plain = buffer.view(torch.bfloat16)
        base = plain.storage_offset()
        if output is None:
            at = base + layout.offsets["output"] // 2
            output = plain.as_strided((tokens, caps.hidden, 1), (caps.hidden, 1, 1), at)
        result = output if return_3d else output[..., 0]
        if tokens == 0:
            return Binding((), result)
        at = base + layout.offsets["tmp"] // 2
        tmp = plain.as_strided((tokens, caps.rank, caps.groups), (caps.rank, 1, tokens * caps.rank), at)
        if tokens <= FUSED_M:
            bound = self._bound_fused(source, wo_a, tmp, wo_b, output, rope, rotation)
        else:
            bound = self._bound_apart(buffer, layout, source, wo_a, tmp, wo_b, output, rope, rotation)
        return Binding(bound, result)

    def _bound_fused(
        self,
        source: torch.Tensor,
        wo_a: _rows.Operand,
        tmp: torch.Tensor,
        wo_b: _rows.Operand,
        output: torch.Tensor,
        rope: Rope | None,
        rotation: dict[str, torch.Tensor],
    ) -> tuple[Launch, ...]:
        """Two launches, each of which quantises what it reads."""
        fused = self.fused_first[None] if rope is None else self._turned(rope)[0]
        first = fused.bind(source=source, b=wo_a[0], sfb=wo_a[1], out=tmp, **rotation)
        return _linear.launches(first, self.fused_second.bind(source=tmp, b=wo_b[0], sfb=wo_b[1], out=output))

    def _bound_apart(
        self,
        buffer: torch.Tensor,
        layout: Layout,
        source: torch.Tensor,
        wo_a: _rows.Operand,
        tmp: torch.Tensor,
        wo_b: _rows.Operand,
        output: torch.Tensor,
        rope: Rope | None,
        rotation: dict[str, torch.Tensor],
    ) -> tuple[Launch, ...]:
        """Quantise, WO-A, quantise, WO-B."""
        assert self.apart is not None
        first, inner, second = self.apart
        quantizer = self.quantizers[None] if rope is None else self._turned(rope)[1]
        assert quantizer is not None
        caps, tokens = self.caps, source.shape[0]
        x = _rows.operand(buffer, layout, "x_q", tokens, caps.group_width, caps.groups)
        t = _rows.operand(buffer, layout, "tmp_q", tokens, caps.inner)
        return _linear.launches(
            quantizer.bind(source=source, values=x[0], scale_mma=x[1], **rotation),
            first.bind(lhs=x, rhs=wo_a, out=tmp),
            inner.bind(source=tmp, values=t[0], scale_mma=t[1]),
            second.bind(lhs=t, rhs=wo_b, out=output),
        )

    def _check_memory(
        self,
        arguments: tuple[tuple[str, int], ...],
        buffer: torch.Tensor,
        layout: Layout,
        weights: Any,
        read: tuple[torch.Tensor, ...],
        sizes: tuple[int, ...],
    ) -> None:
        """Check the weights, and that the scratch holds nothing that a launch reads."""
        self._check_weights(weights)
        prepared = [tensor for operand in weights.operands for tensor in operand]
        nbytes = (layout.nbytes, *(tensor.nbytes for tensor in prepared), *sizes)
        checks.memory(OP, arguments, (buffer, *prepared, *read), nbytes, 1)

    def _check_weights(self, weights: Any) -> None:
        if not isinstance(weights, Weights):
            found = type(weights).__name__
            raise TypeError(f"{OP}: weights is a {found}; needed is a Weights: make one with pack_weights")
        for name in ("groups", "group_width", "rank", "hidden"):
            found, wanted = getattr(weights, name), getattr(self.caps, name)
            if found != wanted:
                raise ValueError(
                    f"{OP}: weights have {name} {found}; needed is {wanted}, that of the plan: plan for these weights"
                )
        place = weights.wo_a.values.device
        if checks.device_name(place) != self.target.device:
            raise ValueError(
                f"{OP}: weights are on {place}; needed is {self.target.device}, the device of the plan: pack them "
                f"there, or plan for {place}"
            )


def pack_weights(
    wo_a_weight: torch.Tensor,
    wo_a_scale: torch.Tensor,
    wo_b_weight: torch.Tensor,
    wo_b_scale: torch.Tensor,
    *,
    groups: int,
    group_width: int,
    rank: int,
    hidden: int,
) -> Weights:
    """Prepare ``wo_a`` E4M3 ``[G * rank, D]`` and ``wo_b`` E4M3 ``[hidden, G * rank]``.

    Scales, one for each 128 x 128 block, are as in ``gemm.block_fp8_linear``, and so is what becomes of them: powers of
    two are kept, else the weights are quantised again. Raises TypeError for a wrong dtype, ValueError for shapes,
    devices, NaN, or factors that are negative or not finite.
    """
    for name, value in (("groups", groups), ("group_width", group_width), ("rank", rank), ("hidden", hidden)):
        checks.whole(OP, name, value)
    planner.check_dimensions(groups, group_width, rank)
    for name, weight, wanted in (
        ("wo_a_weight", wo_a_weight, (groups * rank, group_width)),
        ("wo_b_weight", wo_b_weight, (hidden, groups * rank)),
    ):
        _linear.no_tensor(OP, name, weight, "float8_e4m3fn")
        if tuple(weight.shape) != wanted:
            raise ValueError(
                f"{OP}: {name} has shape {tuple(weight.shape)}; needed is {wanted} for {groups} groups of width "
                f"{group_width}, rank {rank} and hidden {hidden}: correct the dimension that is wrong"
            )
    first = _weights.square_block_rows(OP, "wo_a_weight", wo_a_weight, "wo_a_scale", wo_a_scale, groups)
    second = _weights.square_block_rows(OP, "wo_b_weight", wo_b_weight, "wo_b_scale", wo_b_scale)
    return Weights(first, second, groups, group_width, rank, hidden, sfb_k_replicated=True)


def plan(caps: Caps) -> Plan:
    """Resolve every kernel these Caps can need.

    Raises KernelResolutionFrozenError where one is in no pack and resolution is frozen.
    """
    return Plan(caps)


def bind(plan: Plan, **tensors: Any) -> Binding:
    """As :meth:`Plan.bind`: scratch, source_tgd, weights, return_3d and expected_m."""
    return plan.bind(**tensors)


def bind_inv_rope(plan: Plan, **tensors: Any) -> Binding:
    """As :meth:`Plan.bind_inv_rope`."""
    return plan.bind_inv_rope(**tensors)


def run(
    source_tgd: torch.Tensor | None = None,
    weights: Weights | None = None,
    *,
    return_3d: bool = False,
    binding: Binding | None = None,
    expected_m: int | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Launch a binding, whose shape of the result was chosen when it was bound, and return that result."""
    if binding is None:
        raise TypeError(f"{OP}: run got no binding; needed is one: make it with plan(caps).bind(scratch=..., ...)")
    if source_tgd is not None or weights is not None:
        raise ValueError(f"{OP}: run got a binding and tensors that the binding already holds; pass the binding alone")
    _linear.check_hint(OP, expected_m)
    return _shaped(_linear.run(OP, binding, stream), return_3d)


def run_inv_rope(
    o: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    weights: Weights | None = None,
    *,
    heads_per_group: int | None = None,
    nope_dim: int = 448,
    rope_dim: int = 64,
    return_3d: bool = False,
    binding: Binding | None = None,
    expected_m: int | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Launch a binding; or, one-shot, all of ``o``, ``positions``, ``cos_sin_cache``, ``weights``, ``heads_per_group``.

    One-shot, the result is a new tensor. Arguments and errors are those of :meth:`Plan.bind_inv_rope`.
    """
    _linear.check_hint(OP, expected_m)
    given = (o, positions, cos_sin_cache, weights, heads_per_group)
    if binding is not None:
        if any(value is not None for value in given):
            raise ValueError(
                f"{OP}: run_inv_rope got a binding and what the binding already holds; pass one or the other"
            )
        return _shaped(_linear.run(OP, binding, stream), return_3d)
    if o is None or positions is None or cos_sin_cache is None or weights is None or heads_per_group is None:
        raise TypeError(
            f"{OP}: run_inv_rope needs either binding, or all of o, positions, cos_sin_cache, weights and "
            "heads_per_group: pass one"
        )
    _linear.no_tensor(OP, "o", o, _DTYPE)
    if not isinstance(weights, Weights):
        raise TypeError(f"{OP}: weights is a {type(weights).__name__}; needed is a Weights: make one with pack_weights")
    kept = _plan(target.current_target(o.device), weights.groups, weights.group_width, weights.rank, weights.hidden)
    rope = kept.rotation(cos_sin_cache, heads_per_group, nope_dim, rope_dim)
    tokens = o.shape[0] if o.ndim else 0
    layout = _layout(tokens, weights.groups, weights.group_width, weights.rank, 0)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=o.device)
    output = torch.empty((tokens, weights.hidden, 1), dtype=torch.bfloat16, device=o.device)
    bound = kept.bound_inv_rope(buffer, layout, o, positions, cos_sin_cache, weights, rope, return_3d, output)
    result = _linear.run(OP, bound, stream)
    used_on(stream, buffer, output)
    return result


def quantize_input(source_tgd: torch.Tensor, *, out: MXFP8Rows | None = None) -> MXFP8Rows:
    """``[T, G, D]`` as WO-A reads it: values ``[T, D, G]``, scales ``[G, T, D/32]`` and swizzled; into ``out`` if
    given."""
    groups, width = _extents("source_tgd", source_tgd, "[T, G, D]")
    caps = mxfp8_planner.Caps(device=_device(source_tgd), m=checks.LARGEST, k=width, groups=groups)
    return _rows.quantise(caps, source_tgd, out)


def quantize_input_inv_rope(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
    out: MXFP8Rows | None = None,
) -> MXFP8Rows:
    """``[T, G * heads_per_group, head_dim]``, its rotation taken back, as WO-A reads it; into ``out`` if given."""
    _extents("o", o, "[T, heads, head_dim]")
    checks.whole(OP, "groups", groups)
    rope = _rope(cos_sin_cache, None, heads_per_group, nope_dim, rope_dim)
    width = heads_per_group * rope.head_dim
    tokens, _, strides = _heads(checks.facts(o), groups, heads_per_group, rope.head_dim, _device(o))
    caps = mxfp8_planner.Caps(device=_device(o), m=checks.LARGEST, k=width, groups=groups, rope=rope)
    source = o.as_strided((tokens, groups, width), strides)
    return _rows.quantise(caps, source, out, positions=positions, cos_sin_cache=cos_sin_cache)


def quantize_input_b(source_trg: torch.Tensor, *, out: MXFP8Rows | None = None) -> MXFP8Rows:
    """``[T, rank, G]``, physically ``[G, T, rank]``, as WO-B reads it: values ``[T, G * rank]`` and their scales."""
    rank, groups = _extents("source_trg", source_trg, "[T, rank, G]")
    caps = mxfp8_planner.Caps(device=_device(source_trg), m=checks.LARGEST, k=groups * rank, span=rank)
    return _rows.quantise(caps, source_trg, out)


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


def clear_caches() -> None:
    """Forget the plans that one-shot functions keep."""
    _plan.cache_clear()
    _rows.clear_caches()


@lru_cache(maxsize=4096)
def _plan(where: Target, groups: int, group_width: int, rank: int, hidden: int) -> Plan:
    """The plan that is kept on a target for its static choices; the token count is not one of them."""
    tokens, device = checks.LARGEST, where.device
    return Plan(
        Caps(device=device, max_tokens=tokens, groups=groups, group_width=group_width, rank=rank, hidden=hidden)
    )


def _shapes(tokens: int, groups: int, group_width: int, rank: int, hidden: int) -> _rows.Shapes:
    return {
        **_rows.shapes("x_q", tokens, group_width, groups),
        "tmp": ((groups, tokens, rank), torch.bfloat16),
        **_rows.shapes("tmp_q", tokens, groups * rank),
        "output": ((tokens, hidden), torch.bfloat16),
    }


@lru_cache(maxsize=1024)
def _layout(tokens: int, groups: int, group_width: int, rank: int, hidden: int) -> Layout:
    return Layout(_rows.sizes(_shapes(tokens, groups, group_width, rank, hidden)))


def _shaped(result: torch.Tensor, return_3d: bool) -> torch.Tensor:
    """A bound result ``[T, hidden]``, or as it was bound; also ``[T, hidden, 1]`` where that is asked for now."""
    return result.unsqueeze(-1) if return_3d and result.ndim == 2 else result


def _device(x: torch.Tensor) -> str:
    return checks.device_name(x.device)


def _extents(name: str, x: torch.Tensor, form: str) -> tuple[int, int]:
    """The inner extents of a tensor of rank 3."""
    _linear.no_tensor(OP, name, x, _DTYPE)
    if x.ndim != 3:
        raise ValueError(f"{OP}: {name} has shape {tuple(x.shape)}; needed is {form}: reshape it")
    return x.shape[1], x.shape[2]


def _rope(
    cos_sin_cache: torch.Tensor, group_width: int | None, heads_per_group: int, nope_dim: int, rope_dim: int
) -> Rope:
    """The rope of heads, which have to fill a group."""
    _linear.no_tensor(OP, "cos_sin_cache", cos_sin_cache, CACHE_DTYPES)
    checks.whole(OP, "heads_per_group", heads_per_group)
    checks.whole(OP, "nope_dim", nope_dim, least=0)
    checks.whole(OP, "rope_dim", rope_dim)
    head_dim = nope_dim + rope_dim
    if group_width is not None and heads_per_group * head_dim != group_width:
        raise ValueError(
            f"{OP}: heads_per_group is {heads_per_group}, nope_dim {nope_dim} and rope_dim {rope_dim}, so a group has "
            f"{heads_per_group * head_dim} columns; needed are {group_width}, the group_width: correct the one that is "
            "wrong"
        )
    dtype = checks.dtype_name(cos_sin_cache.dtype)
    return Rope(head_dim=head_dim, nope_dim=nope_dim, rope_dim=rope_dim, cache_dtype=dtype)


def _with_rope(
    fused: dict[str | None, FusedPlan], quantizers: dict[str | None, mxfp8.Plan], rope: Rope
) -> tuple[FusedPlan, mxfp8.Plan | None]:
    """The parts that read the input, for heads of these dimensions."""
    dtype = rope.cache_dtype
    return fused[dtype].with_rope(rope), quantizers[dtype].with_rope(rope) if quantizers else None


def _check(plan: Plan, source: Facts) -> tuple[int, int]:
    """Tokens of ``source_tgd``, and its bytes."""
    caps = plan.caps
    shape, strides = (None, caps.groups, caps.group_width), checks.ANY if 0 in source[1] else (None, None, 1)
    device = plan.target.device
    size = checks.layout(OP, "source_tgd", source, dtype=_DTYPE, shape=shape, strides=strides, device=device)
    return _check_capacity(caps, "source_tgd", source[1][0]), size


def _check_heads(
    plan: Plan, rope: Rope, o: Facts, positions: Facts, cache: Facts
) -> tuple[int, tuple[int, ...], tuple[int, int, int]]:
    """Tokens of ``o``, bytes of it, the positions and the cache, and its strides as ``[T, G, D]``."""
    caps, device = plan.caps, plan.target.device
    heads_per_group = caps.group_width // rope.head_dim
    tokens, size, strides = _heads(o, caps.groups, heads_per_group, rope.head_dim, device)
    _check_capacity(caps, "o", tokens)
    fix = "pass one position for each token of o"
    places = checks.layout(OP, "positions", positions, dtype=_POSITIONS, shape=(tokens,), device=device, fix=fix)
    shape = (None, rope.rope_dim)
    table = checks.layout(OP, "cos_sin_cache", cache, dtype=rope.cache_dtype, shape=shape, device=device)
    return tokens, (size, places, table), strides


def _heads(
    o: Facts, groups: int, heads_per_group: int, head_dim: int, device: str
) -> tuple[int, int, tuple[int, int, int]]:
    """Tokens of ``o``, its bytes, and its strides as ``[T, G, D]``.

    The heads of a token lie one after another, those of a group are one row.
    """
    shape = (None, groups * heads_per_group, head_dim)
    strides = checks.ANY if 0 in o[1] else (None, head_dim, 1)
    size = checks.layout(OP, "o", o, dtype=_DTYPE, shape=shape, strides=strides, device=device)
    width = heads_per_group * head_dim
    return o[1][0], size, (o[2][0] if o[1][0] > 1 else groups * width, width, 1)


def _check_capacity(caps: Caps, name: str, tokens: int) -> int:
    if tokens > caps.max_tokens:
        raise ValueError(
            f"{OP}: {name} has {tokens} tokens, more than the plan's max_tokens = {caps.max_tokens}; plan with a "
            "larger max_tokens"
        )
    return tokens
