"""``gemm.mla_query_projection``: ``out[m, h] = [q_nope[h, m] @ W_UK[h], q_pe[m, h]]``, in bf16 or quantised to E4M3.

>>> mla_query_projection.run(q_nope, (values, scales), q_pe, out, q_scale=q_scale)

is the one-shot form; ``bind(plan, ...)`` and ``run(binding=...)`` split it where one binding is launched many times.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, LoadedKernel, Target
from b12x.gemm._bmm import operands
from b12x.gemm._bmm.operands import Strides
from b12x.gemm._bmm.planner import choose
from b12x.gemm.mla_query_projection import planner
from b12x.gemm.mla_query_projection.planner import Caps

OP = planner.OP
META = registry.find_op(OP)

#: bf16 ``[H, K, N]``, or E4M3 of that shape with E8M0 scales ``[H, K, N/32]``.
Weight: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_NAMES = ("weight values", "weight scales")
#: Arguments after the output, and their alignment in bytes; q_scale and the scales may be absent.
_ALIGN = {"q_nope": 16, "q_pe": 4, "weight": 16, "weight values": 16, "weight scales": 1, "q_scale": 4}


class Plan:
    """Resolved kernels for every live M up to ``caps.max_m``."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)
        names = ["q_nope", "q_pe", *(_NAMES if caps.weight_format == "mxfp8" else ("weight",))]
        if caps.output_dtype == "float8_e4m3fn":
            names.append("q_scale")
        out = ("out", 4 if caps.output_dtype == "bfloat16" else 2)
        self.arguments = (out, *((name, _ALIGN[name]) for name in names))
        self.checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def bind(
        self,
        *,
        q_nope: torch.Tensor,
        weight: Weight,
        q_pe: torch.Tensor,
        out: torch.Tensor,
        q_scale: torch.Tensor | None = None,
    ) -> Binding:
        """As :func:`bind`."""
        return bind(self, q_nope=q_nope, weight=weight, q_pe=q_pe, out=out, q_scale=q_scale)


class Binding(NamedTuple):
    """A checked launch; None where there are no rows."""

    launch: Launch | None
    out: torch.Tensor

    def __repr__(self) -> str:
        return f"Binding(launch={self.launch!r}, out={checks.described(self.out)})"


def plan(caps: Caps) -> Plan:
    """Resolve every kernel these Caps can need.

    Raises KernelResolutionFrozenError where one is in no pack and resolution is frozen.
    """
    return Plan(caps)


def bind(
    plan: Plan,
    *,
    q_nope: torch.Tensor,
    weight: Weight,
    q_pe: torch.Tensor,
    out: torch.Tensor,
    q_scale: torch.Tensor | None = None,
) -> Binding:
    """Check the tensors of one launch; M is taken from ``q_nope``.

    ``q_nope`` bf16 ``[H, M, K]`` with outer strides that are multiples of 8; ``weight`` bf16 ``[H, K, N]``, or the pair
    of E4M3 values ``[H, K, N]`` and E8M0 codes ``[H, K, N/32]`` (also as uint8), rows and entries of values at
    multiples of 16 bytes; ``q_pe`` bf16 ``[M, H, R]`` and ``out`` ``[M, H, N + R]`` of the plan's output dtype, both
    with even outer strides. All last dimensions are dense. ``q_scale`` f32 ``[1]`` is read when the kernel runs; E4M3
    output needs it, bf16 output does not look at it. Raises TypeError for what is missing, no tensor or of a wrong
    dtype, ValueError for shape, stride, device, alignment, capacity or overlap.
    """
    caps, facts = plan.caps, checks.facts
    values, scales = weight, None
    if caps.weight_format == "mxfp8":
        values, scales = checks.pair(OP, "weight", "(values, scales)", weight)
    tensors = [out, q_nope, q_pe, values]
    if scales is not None:
        tensors.append(scales)
    if caps.output_dtype == "float8_e4m3fn":
        if q_scale is None:
            raise TypeError(f"{OP}: q_scale is missing; E4M3 output needs it: pass a float32 tensor of shape (1,)")
        tensors.append(q_scale)
    else:
        q_scale = None
    checked = plan.checked(*map(facts, tensors))
    checks.memory(OP, plan.arguments, tensors, checked.sizes, 1)
    if checked.kernel is None:
        return Binding(None, out)
    launch = operands.prepare(
        checked.kernel,
        {"lhs": q_nope, "weight": values, "scales": scales, "rope": q_pe, "q_scale": q_scale, "out": out},
        checked.strides,
        (caps.num_heads, checked.m, caps.latent_dim, caps.nope_dim),
        checked.rope_words,
        checked.vector,
    )
    return Binding(launch, out)


def run(
    q_nope: torch.Tensor | None = None,
    weight: Weight | None = None,
    q_pe: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    q_scale: torch.Tensor | None = None,
    binding: Binding | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Launch on ``stream`` (the current one by default) and return ``out``.

    Either the tensors of :func:`bind`, with any M, which is part of no key, or ``binding``.
    """
    if binding is None:
        if q_nope is None or weight is None or q_pe is None or out is None:
            raise TypeError(f"{OP}: run needs either binding, or all of q_nope, weight, q_pe and out: pass one")
        kept = _plan(*_static(weight, getattr(out, "dtype", None)))
        binding = bind(kept, q_nope=q_nope, weight=weight, q_pe=q_pe, out=out, q_scale=q_scale)
    elif any(x is not None for x in (q_nope, weight, q_pe, out, q_scale)):
        raise ValueError(f"{OP}: run got a binding and tensors that the binding already holds; pass one or the other")
    try:
        launch, result = binding.launch, binding.out
    except AttributeError:
        raise checks.no_binding(OP, binding) from None
    if launch is not None:
        launch.launch(stream)
    return result


def prewarm(
    weight: Weight,
    m_values: Iterable[int],
    *,
    output_dtype: Any,
    stream: Any = None,
    synchronize: bool = True,
) -> int:
    """Plan and resolve what :func:`run` needs for this weight, and return how many kernels these M use.

    Nothing is launched, so ``stream`` and ``synchronize`` change nothing. One call serves every M.
    """
    used = {choose(m) for m in checks.wholes(OP, "m_values", m_values)}
    _plan(*_static(weight, output_dtype))
    return len(used)


def can_implement(
    *,
    num_heads: int,
    max_m: int,
    nope_dim: int,
    latent_dim: int,
    output_dtype: Any,
    weight_format: str = "mxfp8",
    device: Any = None,
) -> bool:
    """Whether :func:`run` takes these sizes and choices on a device (the current one by default)."""
    try:
        Caps(
            num_heads=num_heads,
            max_m=max_m,
            nope_dim=nope_dim,
            latent_dim=latent_dim,
            output_dtype=checks.dtype_name(output_dtype),
            weight_format=weight_format,
        )
    except (ValueError, NotImplementedError):
        return False
    return is_supported(device)


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


def clear_caches() -> None:
    """Forget the plans that ``run`` keeps."""
    _plan.cache_clear()


def _static(weight: Weight, output_dtype: Any) -> tuple[Target, int, int, int, str, str]:
    """Target, H, K, N, output dtype and weight format of a one-shot call."""
    packed = isinstance(weight, (tuple, list))
    values: Any = checks.pair(OP, "weight", "(values, scales)", weight)[0] if packed else weight
    try:
        (heads, k, n), device = values.shape, values.device
    except (AttributeError, ValueError):
        found = checks.facts(values)
        place = "cuda" if found[0] is None else str(found[3])
        checks.layout(
            OP,
            _NAMES[0] if packed else "weight",
            found,
            dtype="float8_e4m3fn" if packed else "bfloat16",
            shape=(None,) * 3,
            strides=checks.ANY,
            device=place,
            fix="reshape it to [H, K, N]",
        )
        raise
    kind = "mxfp8" if packed else "bfloat16"
    return target.current_target(device), heads, k, n, checks.dtype_name(output_dtype), kind


@lru_cache(maxsize=4096)
def _plan(where: Target, heads: int, k: int, n: int, output_dtype: str, weight_format: str) -> Plan:
    """The plan ``run`` keeps on a target for its static choices; M is not one of them."""
    return Plan(
        Caps(
            device=where.device,
            num_heads=heads,
            max_m=checks.LARGEST,
            nope_dim=k,
            latent_dim=n,
            output_dtype=output_dtype,
            weight_format=weight_format,
        )
    )


class _Checked(NamedTuple):
    """What tensors of the same facts share; sizes are in the order of the plan's arguments, and no kernel is for no
    rows."""

    m: int
    rope_words: int
    sizes: tuple[int, ...]
    strides: dict[str, Strides]
    vector: bool
    kernel: LoadedKernel | None


def _check(plan: Plan, out: Facts, q_nope: Facts, q_pe: Facts, values: Facts, *others: Facts) -> _Checked:
    caps, device = plan.caps, plan.target.device
    heads, n, k = caps.num_heads, caps.latent_dim, caps.nope_dim
    left = operands.batched(OP, "q_nope", q_nope, "bfloat16", (heads, None, k), device, 8)
    m = q_nope[1][1]
    if m > caps.max_m:
        raise ValueError(
            f"{OP}: q_nope has {m} rows, more than the plan's max_m = {caps.max_m}; plan with a larger max_m"
        )
    rope = operands.batched(OP, "q_pe", q_pe, "bfloat16", (m, heads, None), device, 2, rows=0)
    width = q_pe[1][2]
    if width % 2:
        raise ValueError(f"{OP}: q_pe has {width} columns; needed is an even number: pad it and out with a column")
    scaled = caps.weight_format == "mxfp8"
    names, scales = (_NAMES, others[0]) if scaled else (("weight", ""), None)
    weight, scale = operands.weights(OP, names, values, scales, "n", (heads, n, k), device)
    result, vector = operands.output(OP, "out", out, caps.output_dtype, (m, heads, n + width), device, 2, 0)
    sizes = [result.size, left.size, rope.size, weight.size]
    if scaled:
        sizes.append(scale.size)
    if caps.output_dtype == "float8_e4m3fn":
        sizes.append(checks.layout(OP, "q_scale", others[-1], dtype="float32", shape=(1,), device=device))
    kernel = plan.kernels[choose(m)].loaded if m else None
    strides = {"lhs": left, "weight": weight, "scale": scale, "rope": rope, "out": result}
    return _Checked(m, width // 2, tuple(sizes), strides, vector, kernel)
