"""``gemm.tensor_fp8_linear``: ``y = scale * (x @ W^T) (+ bias)`` of E4M3 activations and weights with static scales.

>>> weight = tensor_fp8_linear.pack_weight(values, input_scale * weight_scale)  # once, when the model is loaded
>>> y = tensor_fp8_linear.mm(x, weight, bias=bias)

Products are summed in f32, multiplied by the one scale and rounded; the bias is added with a rounding of its own.
``plan``, ``bind`` and ``run`` are the planned form, with an output of the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Target, used_on
from b12x.gemm import _linear, _weights
from b12x.gemm._linear import Binding
from b12x.gemm.blockscaled import api as blockscaled
from b12x.gemm.tensor_fp8_linear import planner
from b12x.gemm.tensor_fp8_linear.planner import Caps

OP = planner.OP
META = registry.find_op(OP)

_SOURCE = "float8_e4m3fn"


@dataclass(frozen=True, repr=False, eq=False)
class Weight:
    """A prepared weight: values ``[N, K]``, K padded to a multiple of 128 with zeros, and the factor of the product.

    ``scale_mma`` holds scales of 1 for kernels that need some; the ones here do not read it.
    """

    values: torch.Tensor
    scale_mma: torch.Tensor
    output_scale: torch.Tensor
    in_features: int
    padded_in_features: int
    out_features: int

    @cached_property
    def operand(self) -> tuple[torch.Tensor, None]:
        """Values ``[N, K, 1]``, without scales."""
        return self.values.unsqueeze(-1), None

    def __repr__(self) -> str:
        return f"Weight({self.out_features} x {self.in_features}, values={checks.described(self.values)})"


class Plan:
    """Resolved kernels for every token count up to ``caps.max_tokens``."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)
        self.gemm = blockscaled.plan(planner.product(caps))
        self._checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def bind(
        self,
        *,
        source: torch.Tensor,
        packed_weight: Weight,
        output: torch.Tensor,
        bias: torch.Tensor | None = None,
        expected_m: int | None = None,
    ) -> Binding:
        """Check the tensors of one run.

        ``source [..., K]`` E4M3, viewable as rows; ``output [T, N, 1]`` for its T tokens; ``bias [N]``. The weight's
        ``output_scale`` is read when the kernel runs. ``expected_m`` is a hint that changes nothing. Raises TypeError
        for what is no tensor or of a wrong dtype, ValueError for shape, stride, device, alignment, capacity or overlap.
        """
        _linear.check_hint(OP, expected_m)
        weight = _linear.check_weight(OP, packed_weight, Weight, self.caps, self.target.device)
        optional = () if bias is None else (bias,)
        tokens, pitch, lead, sizes = self._checked(*map(checks.facts, (source, output, *optional)))
        checks.memory(OP, _linear.ARGUMENTS, (output, source, *optional), sizes, 1)
        result = output.view(lead)
        if tokens == 0:
            return Binding((), result)
        lhs = source.as_strided((tokens, self.caps.in_features, 1), (pitch, 1, tokens * pitch)), None
        multiplied = self.gemm.bind(lhs=lhs, rhs=weight.operand, out=output, alpha=weight.output_scale, bias=bias)
        return Binding(_linear.launches(multiplied), result)


def pack_weight(weight: torch.Tensor, output_scale: torch.Tensor) -> Weight:
    """Prepare a weight, E4M3 ``[N, K]`` with K a multiple of 32, and ``output_scale`` f32 ``[1]``.

    The scale is the factor of the product, ``input_scale * weight_scale`` of the checkpoint. Raises TypeError for a
    wrong dtype, ValueError for shapes, devices, NaN, or a factor that is negative or not finite.
    """
    n, k = _weights.values_matrix(OP, weight)
    scale = _weights.output_scale(OP, output_scale, weight)
    values = _weights.padded_values(weight)
    padded = values.shape[1]
    return Weight(values, _weights.unit_scales(n, padded, weight.device), scale, k, padded, n)


def plan(caps: Caps) -> Plan:
    """Resolve every kernel these Caps can need.

    Raises KernelResolutionFrozenError where one is in no pack and resolution is frozen.
    """
    return Plan(caps)


def bind(plan: Plan, **tensors: Any) -> Binding:
    """As :meth:`Plan.bind`: source, packed_weight, output, bias and expected_m."""
    return plan.bind(**tensors)


def run(*, binding: Binding, stream: Any = None) -> torch.Tensor:
    """Launch a binding on ``stream`` (the current one by default) and return its output, ``[..., N]``."""
    return _linear.run(OP, binding, stream)


def mm(
    source: torch.Tensor,
    packed_weight: Weight,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: str | torch.dtype = "bfloat16",
    expected_m: int | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """One-shot linear: ``source [..., K]`` E4M3, viewable as rows, to a new ``[..., N]`` of ``out_dtype``.

    ``expected_m`` is a hint that changes no result. Arguments and errors are those of :meth:`Plan.bind`.
    """
    _linear.no_tensor(OP, "source", source, _SOURCE)
    kept = _kept(source.device, packed_weight, out_dtype)
    caps, device = kept.caps, source.device
    tokens = source.numel() // caps.in_features
    output = torch.empty((tokens, caps.out_features, 1), dtype=getattr(torch, caps.output_dtype), device=device)
    binding = kept.bind(source=source, packed_weight=packed_weight, output=output, bias=bias, expected_m=expected_m)
    result = _linear.run(OP, binding, stream)
    used_on(stream, output)
    return result


def prewarm(
    packed_weight: Weight,
    token_counts: Iterable[int],
    *,
    out_dtype: str | torch.dtype = "bfloat16",
    stream: Any = None,
) -> int:
    """Resolve what ``mm`` needs for this weight and dtype, and return the number of kernels.

    They serve every token count, so ``token_counts`` are only checked. Nothing is launched.
    """
    return _linear.prewarmed(OP, token_counts, lambda: _kept(None, packed_weight, out_dtype))


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


def clear_caches() -> None:
    """Forget the plans that ``mm`` keeps."""
    _plan.cache_clear()


def _kept(device: Any, packed_weight: Weight, dtype: Any) -> Plan:
    """The kept plan for a weight, on a device or the weight's."""
    k, n, place = _linear.features(OP, packed_weight)
    return _plan(target.current_target(device or place), k, n, checks.dtype_name(dtype))


@lru_cache(maxsize=4096)
def _plan(where: Target, in_features: int, out_features: int, dtype: str) -> Plan:
    """The plan that is kept on a target for its static choices; the token count is not one of them."""
    return plan(
        Caps(
            device=where.device,
            max_tokens=checks.LARGEST,
            in_features=in_features,
            out_features=out_features,
            output_dtype=dtype,
        )
    )


def _check(plan: Plan, source: Facts, output: Facts, bias: Facts | None = None) -> tuple[Any, ...]:
    """Tokens, row pitch, shape of the result, and bytes of the arguments in the order of ``_linear.ARGUMENTS``."""
    return _linear.check_linear(plan.caps, plan.target.device, _SOURCE, source, output, bias)
