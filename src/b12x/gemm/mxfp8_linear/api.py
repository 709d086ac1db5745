"""``gemm.mxfp8_linear``: ``y = x @ W^T (+ bias)`` for weights of an MXFP8 checkpoint.

>>> weight = mxfp8_linear.pack_weight(values, scales)  # once, when the model is loaded
>>> y = mxfp8_linear.mm(x, weight, bias=bias)

The rows of x are quantised to MXFP8; products are summed in f32, rounded to the dtype of x, and the bias is added with
a rounding of its own. ``plan``, ``bind`` and ``run`` are the planned form, with scratch and output of the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from b12x._runtime import checks, registry, target
from b12x._runtime.launch import Target
from b12x.gemm import _linear, _rows, _weights
from b12x.gemm._linear import Binding, Plan
from b12x.gemm._parts import OUTPUTS
from b12x.gemm.mxfp8_linear import planner
from b12x.gemm.mxfp8_linear.planner import Caps
from b12x.quantization.mxfp8.api import MXFP8Rows

OP = planner.OP
META = registry.find_op(OP)


@dataclass(frozen=True, repr=False, eq=False)
class Weight:
    """A prepared weight: K padded to a multiple of 128 with zeros and scales of 1."""

    weight: MXFP8Rows
    in_features: int
    padded_in_features: int
    out_features: int

    @cached_property
    def operand(self) -> _rows.Operand:
        """Values ``[N, K, 1]`` and swizzled scales."""
        return self.weight.values.unsqueeze(-1), self.weight.scale_mma

    def __repr__(self) -> str:
        return f"Weight({self.out_features} x {self.in_features}, values={checks.described(self.weight.values)})"


def pack_weight(weight: torch.Tensor, weight_scale: torch.Tensor) -> Weight:
    """Prepare a weight, E4M3 ``[N, K]`` with K a multiple of 32, and its E8M0 scales ``[N, K/32]``.

    Scales are E8M0 or uint8 bytes; further rows and columns of theirs are ignored. Raises TypeError for a wrong dtype,
    ValueError for shapes, devices or NaN.
    """
    rows = _weights.mxfp8_rows(OP, weight, weight_scale)
    n, k = weight.shape
    return Weight(rows, k, rows.values.shape[1], n)


def plan(caps: Caps) -> Plan:
    """Resolve every kernel these Caps can need.

    Raises KernelResolutionFrozenError where one is in no pack and resolution is frozen.
    """
    return Plan(caps, planner.roles(caps), Weight)


def bind(plan: Plan, **tensors: Any) -> Binding:
    """As :meth:`Plan.bind`: scratch, source, packed_weight, output, bias and expected_m."""
    return plan.bind(**tensors)


def run(*, binding: Binding, stream: Any = None) -> torch.Tensor:
    """Launch a binding on ``stream`` (the current one by default) and return its output, ``[..., N]``."""
    return _linear.run(OP, binding, stream)


def mm(
    source: torch.Tensor,
    packed_weight: Weight,
    *,
    bias: torch.Tensor | None = None,
    expected_m: int | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """One-shot linear: ``source [..., K]`` bf16 or fp16, viewable as rows, to a new ``[..., N]`` of its dtype.

    ``expected_m`` is a hint that changes no result. Arguments and errors are those of :meth:`Plan.bind`.
    """
    _linear.no_tensor(OP, "source", source, OUTPUTS)
    k, n, _ = _linear.features(OP, packed_weight)
    kept = _plan(target.current_target(source.device), k, n, checks.dtype_name(source.dtype))
    return _linear.one_shot(kept, source, packed_weight, bias, expected_m, stream)


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


def clear_caches() -> None:
    """Forget the plans that ``mm`` keeps."""
    _plan.cache_clear()


@lru_cache(maxsize=4096)
def _plan(where: Target, in_features: int, out_features: int, dtype: str) -> Plan:
    """The plan ``mm`` keeps on a target for its static choices; the token count is not one of them."""
    return plan(
        Caps(
            device=where.device,
            max_tokens=checks.LARGEST,
            in_features=in_features,
            out_features=out_features,
            output_dtype=dtype,
        )
    )
