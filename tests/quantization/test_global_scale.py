"""Global scales go in under the name of their convention, and give the quantiser's G and the GEMM's alpha."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from b12x import quantization
from b12x.quantization import Divisor, Multiplier, gemm_alpha, nvfp4, quantizer_scale, scales
from b12x.quantization.nvfp4 import reference


def test_one_scale_by_both_names():
    """G is the divisor; a multiplier is its reciprocal, rounded once."""
    divisor = torch.tensor([448 * 6 / 5.25])
    assert torch.equal(quantizer_scale(Divisor(divisor)), divisor)
    assert quantizer_scale(Multiplier(torch.tensor(0.25))).tolist() == [4.0]
    third = np.float32(1) / np.float32(3)
    assert quantizer_scale(Multiplier(torch.tensor([3.0])))[0] == third


@pytest.mark.parametrize("a", [Multiplier(torch.tensor([0.5])), Divisor(torch.tensor([2.0]))])
@pytest.mark.parametrize("b", [Multiplier(torch.tensor(0.125)), Divisor(torch.tensor(8.0))])
def test_alpha_is_the_product_of_the_multipliers(a, b):
    alpha = gemm_alpha(a, b)
    assert (alpha.dtype, alpha.tolist()) == (torch.float32, [0.0625])


def test_alpha_of_a_batch():
    alpha = gemm_alpha(Divisor(torch.tensor([2.0])), Multiplier(torch.tensor([1.0, 3.0], dtype=torch.bfloat16)))
    assert alpha.tolist() == [0.5, 1.5]


def test_alpha_is_rounded_once():
    """Reciprocals and product are in f64: G = 3 and 1/3 cancel."""
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert gemm_alpha(Divisor(torch.tensor([3.0])), Divisor(third)).tolist() == [1.0]


@pytest.mark.parametrize("scale", [Divisor(torch.tensor([37.5])), Multiplier(torch.tensor([1 / 37.5]))])
def test_quantised_rows_have_the_values_that_the_scale_says(target, rng, scale):
    """By either name, ``code * block scale * multiplier`` is the row again, up to its rounding."""
    x = torch.tensor(rng.standard_normal((4, 64))).to(torch.bfloat16)
    rows = nvfp4.quantize(x, quantizer_scale(scale).to(target.device))
    linear = scales.unswizzle(rows.scale_storage.cpu(), 4, 4)[0].numpy()
    blocks = reference.dequantize(rows.packed_a_storage[0].cpu().numpy(), linear)
    real = blocks / 37.5
    assert np.abs(real - x.double().cpu().numpy()).max() < 0.5


@pytest.mark.parametrize(
    "call",
    [quantizer_scale, lambda s: gemm_alpha(s, Divisor(torch.ones(1))), lambda s: gemm_alpha(Divisor(torch.ones(1)), s)],
)
@pytest.mark.parametrize(("scale", "found"), [(torch.ones(1), "a Tensor"), (1.0, "a float"), (None, "a NoneType")])
def test_unnamed_scales_are_refused(call, scale, found):
    with pytest.raises(TypeError, match="without its convention") as caught:
        call(scale)
    words = [found, "Multiplier(tensor)", "weight_scale_2", "Divisor(tensor)", "weight_global_scale", "wrap the tensor"]
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("kind", [Multiplier, Divisor])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (2.0, TypeError, ["a float", "tensor of floats", "torch.tensor"]),
        (torch.ones(1, dtype=torch.int32), TypeError, ["torch.int32", "tensor of floats"]),
        (Divisor(torch.ones(1)), TypeError, ["Divisor([1.0])", "already", "use that one"]),
        (torch.ones(2, 2), ValueError, ["(2, 2)", "one factor", "reshape"]),
        (torch.ones(0), ValueError, ["(0,)", "one factor"]),
        (torch.tensor([1.0, 0.0]), ValueError, ["holds 0.0", "above 0"]),
        (torch.tensor(-2.0), ValueError, ["holds -2.0", "above 0"]),
        (torch.tensor([float("nan")]), ValueError, ["holds nan", "finite"]),
        (torch.tensor([float("inf")]), ValueError, ["holds inf", "finite"]),
    ],
)
def test_what_is_no_scale_is_refused(kind, value, error, words):
    with pytest.raises(error) as caught:
        kind(value)
    assert all(word in str(caught.value) for word in [f"quantization.{kind.__name__}", *words])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: quantizer_scale(Multiplier(torch.tensor([1e-40]))), "quantizer_scale"),
        (lambda: gemm_alpha(Multiplier(torch.tensor([1e-30])), Divisor(torch.tensor([1e30]))), "gemm_alpha"),
    ],
)
def test_results_out_of_range_are_refused(call, name):
    with pytest.raises(ValueError, match=rf"quantization\.{name}: the result is .*range of float32.*conventions"):
        call()


def test_scales_are_compared_by_identity():
    """Tensors of several factors have no truth value, and equal conventions are no equal scales."""
    first, second = (Divisor(torch.ones(2)) for _ in range(2))
    assert first != second
    assert len({first, second}) == 2


def test_names_are_imported_when_asked_for():
    """Importing the group imports neither torch nor the module."""
    assert set(quantization.__all__) >= {"Divisor", "Multiplier", "gemm_alpha", "quantizer_scale", "global_scale"}
    code = "import sys, b12x.quantization as q; q.Divisor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
