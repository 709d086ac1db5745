"""``gemm.block_fp8_linear``: ``y = x @ W^T (+ bias)`` for FP8 weights with a scale for each 128 x 128 block.

>>> weight = block_fp8_linear.pack_weight(values, scales)  # once, when the model is loaded
>>> y = block_fp8_linear.run(x, weight, bias=bias)

It runs as MXFP8: the rows of x are quantised with a scale for 32 values, and the weight's scales, which become powers
of two when it is packed, are repeated. Products are summed in f32, rounded to the dtype of x, and the bias is added
with a rounding of its own. ``plan``, ``bind`` and ``run(binding=...)`` are the planned form, with scratch and output of
the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from b12x._runtime import checks, registry, target
from b12x._runtime.launch import Target
from b12x.gemm import _linear, _parts, _rows, _weights
from b12x.gemm._linear import Binding, Plan
from b12x.gemm._parts import OUTPUTS
from b12x.gemm.block_fp8_linear import planner
from b12x.gemm.block_fp8_linear.planner import Caps
from b12x.quantization.mxfp8 import planner as mxfp8
from b12x.quantization.mxfp8.api import MXFP8Rows

OP = planner.OP
META = registry.find_op(OP)

_BLOCK = (_weights.SQUARE, _weights.SQUARE)


@dataclass(frozen=True, repr=False, eq=False)
class Weight:
    """A prepared weight: MXFP8 rows whose scales are those of the blocks, repeated."""

    weight: MXFP8Rows
    in_features: int
    out_features: int
    block_size: tuple[int, int] = _BLOCK

    @cached_property
    def operand(self) -> _rows.Operand:
        """Values ``[N, K, 1]`` and swizzled scales."""
        return self.weight.values.unsqueeze(-1), self.weight.scale_mma

    def __repr__(self) -> str:
        return f"Weight({self.out_features} x {self.in_features}, values={checks.described(self.weight.values)})"


def pack_weight(weight: torch.Tensor, weight_scale: torch.Tensor, *, block_size: tuple[int, int] = _BLOCK) -> Weight:
    """Prepare a weight, E4M3 ``[N, K]`` with K a multiple of 128, and its scales ``[ceil(N/128), K/128]``.

    Scales are E8M0 (or its bytes as uint8), f32 or bf16 factors; a leading extent of 1 is accepted. Where all of them
    are normal powers of two the values are kept. Else the weight is quantised again, each block to the power of two
    that its largest value needs: a value moves by half a step of E4M3 at most. Raises TypeError for a wrong dtype,
    ValueError for shapes, devices, NaN, or factors that are negative or not finite.
    """
    found = checks.wholes(OP, "block_size", block_size)
    if found != _BLOCK:
        raise ValueError(
            f"{OP}: block_size is {found}; needed is {_BLOCK}: scales of other blocks have to be repeated "
            "or merged into such"
        )
    rows = _weights.square_block_rows(OP, "weight", weight, "weight_scale", weight_scale)
    n, k = weight.shape
    return Weight(rows, k, n)


def plan(caps: Caps) -> Plan:
    """Resolve every kernel these Caps can need.

    Raises KernelResolutionFrozenError where one is in no pack and resolution is frozen.
    """
    return Plan(caps, planner.roles(caps), Weight)


def bind(plan: Plan, **tensors: Any) -> Binding:
    """As :meth:`Plan.bind`: scratch, source, packed_weight, output, bias and expected_m."""
    return plan.bind(**tensors)


def run(
    source: torch.Tensor | None = None,
    packed_weight: Weight | None = None,
    *,
    bias: torch.Tensor | None = None,
    binding: Binding | None = None,
    expected_m: int | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """Launch ``binding`` and return its output ``[..., N]``; or, one-shot, ``source`` and ``packed_weight``.

    One-shot: ``source [..., K]`` bf16 or fp16, viewable as rows, to a new ``[..., N]`` of its dtype. ``expected_m`` is
    a hint that changes no result. Arguments and errors are those of :meth:`Plan.bind`.
    """
    if binding is not None:
        if source is not None or packed_weight is not None or bias is not None:
            raise ValueError(
                f"{OP}: run got a binding and tensors that the binding already holds; pass one or the other"
            )
        _linear.check_hint(OP, expected_m)
        return _linear.run(OP, binding, stream)
    if source is None or packed_weight is None:
        raise TypeError(f"{OP}: run needs either binding, or source and packed_weight: pass one")
    _linear.no_tensor(OP, "source", source, OUTPUTS)
    kept = _kept(source.device, packed_weight, source.dtype)
    return _linear.one_shot(kept, source, packed_weight, bias, expected_m, stream)


def quantize_input(source_tk: torch.Tensor, *, out: MXFP8Rows | None = None) -> MXFP8Rows:
    """Rows ``[T, K]`` as the linear quantises them: values ``[T, K]``, scales ``[1, T, K/32]`` and swizzled.

    Into ``out`` where it is given.
    """
    _linear.no_tensor(OP, "source_tk", source_tk, OUTPUTS)
    if source_tk.ndim != 2 or source_tk.shape[1] % _parts.COLUMNS:
        raise ValueError(
            f"{OP}: source_tk has shape {tuple(source_tk.shape)}; needed is [T, K] with K a multiple of "
            f"{_parts.COLUMNS}: reshape it to the linear's rows"
        )
    device, dtype = checks.device_name(source_tk.device), checks.dtype_name(source_tk.dtype)
    caps = mxfp8.Caps(device=device, m=checks.LARGEST, k=source_tk.shape[1], dtype=dtype)
    return _rows.quantise(caps, source_tk, out)


def prewarm(
    packed_weight: Weight,
    token_counts: Iterable[int],
    *,
    output_dtype: str | torch.dtype = "bfloat16",
    expected_m: int | None = None,
    stream: Any = None,
) -> int:
    """Resolve what one-shot calls with this weight and dtype need, and return the number of kernels.

    They serve every token count, so ``token_counts`` are only checked. Nothing is launched.
    """
    _linear.check_hint(OP, expected_m)
    return _linear.prewarmed(OP, token_counts, lambda: _kept(None, packed_weight, output_dtype))


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


def clear_caches() -> None:
    """Forget the plans that the one-shot form keeps."""
    _plan.cache_clear()
    _rows.clear_caches()


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
