"""``gemm.bmm``: ``out[b] = lhs[b] @ W[b]`` with bf16 activations and MXFP8 weights, dequantised exactly to bf16.

>>> b12x.gemm.bmm(lhs, (values, scales), out, a_dtype="bfloat16", b_dtype="float8_e4m3fn", sf_dtype="float8_e8m0fnu",
...               c_dtype="bfloat16", sf_vec_size=32, b_major="n", sf_axis="n")

``plan``, ``bind`` and ``run`` split it where one binding is launched many times. As ``b12x.gemm.bmm`` is the function,
they are attributes of it: ``bmm.plan(bmm.Caps(...))``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, LoadedKernel, Target
from b12x.gemm._bmm import operands, planner
from b12x.gemm._bmm.operands import Strides
from b12x.gemm._bmm.planner import Caps

OP = planner.OP
META = registry.find_op(OP)

Weights = tuple[torch.Tensor, torch.Tensor]
_NAMES = ("rhs values", "rhs scales")
#: Arguments and their alignment in bytes, the output first.
_ARGUMENTS = (("out", 2), ("lhs", 16), (_NAMES[0], 16), (_NAMES[1], 1))
_NONE = Strides(0, 0, 0)


class Plan:
    """Resolved kernels for every live M up to ``caps.max_m``."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)
        self.checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def bind(self, *, lhs: torch.Tensor, rhs: Weights, out: torch.Tensor) -> Binding:
        """As :func:`bind`."""
        return bind(self, lhs=lhs, rhs=rhs, out=out)


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


def bind(plan: Plan, *, lhs: torch.Tensor, rhs: Weights, out: torch.Tensor) -> Binding:
    """Check the tensors of one launch; M is taken from ``lhs``.

    ``lhs`` bf16 ``[B, M, K]`` with a dense last dimension and outer strides that are multiples of 8. ``rhs = (values,
    scales)``: E4M3 ``[B, K, N]`` or ``[B, N, K]`` by ``b_major``, rows and entries at multiples of 16 bytes, and E8M0
    codes (also as uint8) with 32 values to a scale along the last dimension. ``out`` bf16 ``[B, M, N]`` with a dense
    last dimension and any strides that keep its elements apart. All may be views. Raises TypeError for what is no
    tensor or of a wrong dtype, ValueError for shape, stride, device, alignment, capacity or overlap.
    """
    values, scales = checks.pair(OP, "rhs", "(values, scales)", rhs)
    facts = checks.facts
    checked = plan.checked(facts(out), facts(lhs), facts(values), facts(scales))
    checks.memory(OP, _ARGUMENTS, (out, lhs, values, scales), checked.sizes, 1)
    if checked.kernel is None:
        return Binding(None, out)
    caps = plan.caps
    launch = operands.prepare(
        checked.kernel,
        {"lhs": lhs, "weight": values, "scales": scales, "rope": None, "q_scale": None, "out": out},
        checked.strides,
        (caps.batch, checked.m, caps.n, caps.k),
        0,
        checked.vector,
    )
    return Binding(launch, out)


def run(*, binding: Binding, stream: Any = None) -> torch.Tensor:
    """Launch a binding on ``stream`` (the current one by default) and return its output."""
    try:
        launch, out = binding.launch, binding.out
    except AttributeError:
        raise checks.no_binding(OP, binding) from None
    if launch is not None:
        launch.launch(stream)
    return out


def bmm(
    lhs: torch.Tensor,
    rhs: Weights,
    out: torch.Tensor,
    *,
    a_dtype: str,
    b_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    b_major: str = "k",
    sf_axis: str = "k",
    stream: Any = None,
) -> torch.Tensor:
    """One-shot product into ``out``, which is returned. Operands as in :func:`bind`, choices and limits as in
    :class:`Caps`; any M, which is part of no key."""
    where, batch, n, k = _sizes(rhs, b_major)
    static = (a_dtype, b_dtype, sf_dtype, c_dtype, sf_vec_size, b_major, sf_axis)
    return run(binding=bind(_plan(where, batch, n, k, *static), lhs=lhs, rhs=rhs, out=out), stream=stream)


def prewarm_bmm(
    rhs: Weights,
    m_values: Iterable[int],
    *,
    a_dtype: str,
    b_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    b_major: str = "k",
    sf_axis: str = "k",
    stream: Any = None,
    synchronize: bool = True,
) -> int:
    """Plan and resolve what :func:`bmm` needs for these weights, and return how many kernels these M use.

    Nothing is launched, so ``stream`` and ``synchronize`` change nothing. One call serves every M.
    """
    used = {planner.choose(m) for m in checks.wholes(OP, "m_values", m_values)}
    where, batch, n, k = _sizes(rhs, b_major)
    _plan(where, batch, n, k, a_dtype, b_dtype, sf_dtype, c_dtype, sf_vec_size, b_major, sf_axis)
    return len(used)


def can_implement_bmm(
    *,
    batch: int,
    max_m: int,
    n: int,
    k: int,
    a_dtype: str,
    b_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    b_major: str = "k",
    sf_axis: str = "k",
    device: Any = None,
) -> bool:
    """Whether :func:`bmm` takes these sizes and choices on a device (the current one by default)."""
    names = [checks.dtype_name(dtype) for dtype in (a_dtype, b_dtype, sf_dtype, c_dtype)]
    dtypes = dict(zip(("a_dtype", "b_dtype", "sf_dtype", "c_dtype"), names, strict=True))
    try:
        Caps(batch=batch, max_m=max_m, n=n, k=k, sf_vec_size=sf_vec_size, b_major=b_major, sf_axis=sf_axis, **dtypes)
    except (ValueError, NotImplementedError):
        return False
    return is_supported(device)


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


is_bmm_supported = is_supported
# What other ops have as names of their module.
vars(bmm).update({name: globals()[name] for name in ("Binding", "Caps", "Plan", "bind", "plan", "run")})


def clear_caches() -> None:
    """Forget the plans that ``bmm`` keeps."""
    _plan.cache_clear()


def _sizes(rhs: Weights, b_major: str) -> tuple[Target, int, int, int]:
    """Target, B, N and K of weights."""
    values, _ = checks.pair(OP, "rhs", "(values, scales)", rhs)
    try:
        (batch, rows, width), device = values.shape, values.device
    except (AttributeError, ValueError):
        found = checks.facts(values)
        place = "cuda" if found[0] is None else str(found[3])
        fix = "reshape it to [B, K, N] or [B, N, K]"
        checks.layout(
            OP, _NAMES[0], found, dtype="float8_e4m3fn", shape=(None,) * 3, strides=checks.ANY, device=place, fix=fix
        )
        raise
    where = target.current_target(device)
    return (where, batch, width, rows) if b_major == "n" else (where, batch, rows, width)


@lru_cache(maxsize=4096)
def _plan(
    where: Target,
    batch: int,
    n: int,
    k: int,
    a_dtype: str,
    b_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    b_major: str,
    sf_axis: str,
) -> Plan:
    """The plan ``bmm`` keeps on a target for its static choices; M is not one of them."""
    return Plan(
        Caps(
            device=where.device,
            batch=batch,
            max_m=checks.LARGEST,
            n=n,
            k=k,
            a_dtype=checks.dtype_name(a_dtype),
            b_dtype=checks.dtype_name(b_dtype),
            sf_dtype=checks.dtype_name(sf_dtype),
            c_dtype=checks.dtype_name(c_dtype),
            sf_vec_size=sf_vec_size,
            b_major=b_major,
            sf_axis=sf_axis,
        )
    )


class _Checked(NamedTuple):
    """What tensors of the same facts share; sizes are in the order of ``_ARGUMENTS``, and no kernel is for no rows."""

    m: int
    sizes: tuple[int, ...]
    strides: dict[str, Strides]
    vector: bool
    kernel: LoadedKernel | None


def _check(plan: Plan, out: Facts, lhs: Facts, values: Facts, scales: Facts) -> _Checked:
    caps, device = plan.caps, plan.target.device
    batch, n, k = caps.batch, caps.n, caps.k
    left = operands.batched(OP, "lhs", lhs, "bfloat16", (batch, None, k), device, 8)
    m = lhs[1][1]
    if m > caps.max_m:
        raise ValueError(f"{OP}: lhs has {m} rows, more than the plan's max_m = {caps.max_m}; plan with a larger max_m")
    weight, scale = operands.weights(OP, _NAMES, values, scales, caps.b_major, (batch, n, k), device)
    result, vector = operands.output(OP, "out", out, "bfloat16", (batch, m, n), device, 1, 1)
    kernel = plan.kernels[planner.choose(m)].loaded if m else None
    strides = {"lhs": left, "weight": weight, "scale": scale, "rope": _NONE, "out": result}
    return _Checked(m, (result.size, left.size, weight.size, scale.size), strides, vector, kernel)
