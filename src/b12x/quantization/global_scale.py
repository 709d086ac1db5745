"""The global scale of an NVFP4 tensor under a name that says which way it goes.

Checkpoints store it either as the factor that block-scaled values are multiplied by (ModelOpt: ``weight_scale_2``,
``input_scale``), or as the one that they are divided by (compressed-tensors: ``weight_global_scale``,
``input_global_scale``). Taking one for the other gives finite numbers that are wrong by its square, so nothing here
takes a tensor without its convention:

>>> activation, weight = Divisor(checkpoint["input_global_scale"]), Divisor(checkpoint["weight_global_scale"])
>>> rows = nvfp4.quantize(x, quantizer_scale(activation))
>>> blockscaled.mm((rows.packed_a_view, rows.scale_view), w, alpha=gemm_alpha(activation, weight), ...)

These functions prepare weights: they read the values, so they wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False, eq=False)
class _GlobalScale:
    """One factor, or one for each matrix of a batch."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        import torch

        name, value = type(self).__name__, self.tensor
        if isinstance(value, _GlobalScale):
            raise TypeError(f"quantization.{name}: it got {value}, which has its convention already: use that one")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(
                f"quantization.{name}: it got a {found}; needed is a tensor of floats: make one with torch.tensor"
            )
        if value.ndim > 1 or value.numel() == 0:
            raise ValueError(
                f"quantization.{name}: the tensor has shape {tuple(value.shape)}; needed is one factor, or one for "
                "each matrix in one dimension: reshape it"
            )
        wrong = ~(value.isfinite() & (value > 0))
        if wrong.any():
            raise ValueError(
                f"quantization.{name}: the tensor holds {value.flatten()[wrong.flatten()][0].item()}; needed are "
                "finite numbers above 0: check where the checkpoint keeps its global scale"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tensor.flatten().tolist()})"


class Multiplier(_GlobalScale):
    """A value is ``code * block scale * tensor``, as in ModelOpt checkpoints."""


class Divisor(_GlobalScale):
    """A value is ``code * block scale / tensor``, as in compressed-tensors checkpoints and in the quantiser."""


def quantizer_scale(scale: Multiplier | Divisor) -> torch.Tensor:
    """The ``global_scale`` that ``quantization.nvfp4`` takes, G in ``code * block scale / G``: f32 ``[1]``, or ``[L]``.

    Raises TypeError for a scale without its convention, ValueError where G is not an f32.
    """
    value = _factor(scale)
    return _rounded("quantizer_scale", value.reciprocal())


def gemm_alpha(a: Multiplier | Divisor, b: Multiplier | Divisor) -> torch.Tensor:
    """The ``alpha`` of ``gemm.blockscaled`` for operands of these scales: f32 ``[1]``, or ``[L]``.

    Raises TypeError for a scale without its convention, ValueError where the product is not an f32.
    """
    return _rounded("gemm_alpha", _factor(a) * _factor(b))


def _factor(scale: Any) -> torch.Tensor:
    """What codes times block scales are multiplied by, f64 in one dimension."""
    if isinstance(scale, Multiplier):
        return scale.tensor.double().reshape(-1)
    if isinstance(scale, Divisor):
        return scale.tensor.double().reshape(-1).reciprocal()
    return _refuse(scale)


def _rounded(name: str, value: torch.Tensor) -> torch.Tensor:
    result = value.float()
    if not bool((result.isfinite() & (result > 0)).all()):
        raise ValueError(
            f"quantization.{name}: the result is {value.tolist()}, out of the range of float32; needed are scales "
            "whose product and reciprocals are in it: check their conventions"
        )
    return result


def _refuse(found: Any) -> NoReturn:
    raise TypeError(
        f"quantization: a global scale is a {type(found).__name__} without its convention; needed is "
        "Multiplier(tensor) for a factor that codes and block scales are multiplied by (ModelOpt: weight_scale_2, "
        "input_scale) or Divisor(tensor) for one that they are divided by (compressed-tensors: weight_global_scale, "
        "input_global_scale): wrap the tensor in the one of its checkpoint"
    )
