"""The NVFP4 linear layers of the demo, and that its judgement sees one wrong scale."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from b12x._runtime import counters
from b12x.quantization.nvfp4 import reference as nvfp4_reference
from demo import judge
from demo.encoder import fp32_linear
from demo.linears import (
    EXPONENT_BITS,
    FORMAT_MAX,
    HEADROOM,
    KernelLinear,
    Recorded,
    ReferenceLinear,
    activation_scales,
    choose_flip,
    products_on_equal_inputs,
)


class StandIn:
    """Sums in float32 and rounds to bf16, as the kernels do; its weights may differ from the reference's."""

    def __init__(self, weights, x_scales):
        self._values = {name: torch.from_numpy(weight.values()).float() for name, weight in weights.items()}
        self._x_scales = x_scales
        self.recorded = {}

    def __call__(self, projection, x):
        scale = self._x_scales[projection.name]
        quantized = nvfp4_reference.quantize(x.to(torch.bfloat16).float().numpy(), scale)
        values = torch.from_numpy(nvfp4_reference.dequantize(*quantized, scale)).float()
        y = (values @ self._values[projection.name].T).to(torch.bfloat16).float()
        self.recorded[projection.name] = Recorded(x, y)
        return y + projection.bias


def with_scale(weight, row, column, code):
    """A copy of a weight with one scale replaced."""
    codes = weight.scales.copy()
    codes[row, column] = code
    return dataclasses.replace(weight, scales=codes)


@pytest.fixture(scope="session")
def reference(weights, x_scales):
    return ReferenceLinear(weights, x_scales)


@pytest.fixture(scope="session")
def equal_run(encoder, batch, weights, x_scales, reference):
    """Each projection's input in a run with the right weights, and the reference's product of it."""
    stand_in = StandIn(weights, x_scales)
    encoder.embed(batch, stand_in)
    products = products_on_equal_inputs(reference, encoder.projections(), stand_in.recorded)
    assert min(judge.worst_channels(batch, stand_in.recorded, products)) >= judge.REFERENCE_COSINE
    return {name: recorded.x for name, recorded in stand_in.recorded.items()}, products


def test_activation_scales_come_from_fp32_maxima(encoder):
    sentences = ["A short sentence.", "Another one, somewhat longer."]
    amax = {}

    def observe(projection, x):
        amax[projection.name] = float(x.abs().max())
        return fp32_linear(projection, x)

    encoder.embed(encoder.tokenize(sentences), observe)
    expected = {name: FORMAT_MAX / (HEADROOM * value) for name, value in amax.items()}
    assert activation_scales(encoder, sentences) == expected


def test_weights_use_the_whole_range(encoder, weights):
    for projection in encoder.projections():
        weight = weights[projection.name]
        assert weight.scales.max() == 0x7E
        error = np.abs(weight.values() - projection.weight.numpy())
        assert error.max() <= float(projection.weight.abs().max()) / 6


def test_format_keeps_the_meaning(encoder, batch, reference):
    fp32 = encoder.embed(batch, fp32_linear)
    nvfp4 = encoder.embed(batch, reference)
    assert float((fp32 * nvfp4).sum(dim=1).min()) >= judge.FORMAT_COSINE
    assert judge.nearest(nvfp4) == judge.nearest(fp32)


@pytest.mark.parametrize("bit", EXPONENT_BITS)
def test_one_flipped_bit_is_seen(encoder, batch, weights, x_scales, equal_run, rng, bit):
    """Any exponent bit, in every projection: a random block each."""
    inputs, products = equal_run
    for projection in encoder.projections():
        name = projection.name
        codes = weights[name].scales
        row, column = rng.choice(np.argwhere((codes != 0) & ((codes ^ bit) != 0x7F)))
        stand_in = StandIn({name: with_scale(weights[name], row, column, codes[row, column] ^ bit)}, x_scales)
        stand_in(projection, inputs[name])
        lowest = min(judge.worst_channels(batch, stand_in.recorded, {name: products[name]}))
        assert lowest < judge.REFERENCE_COSINE, f"{name}, channel {row}, block {column}"


def test_choice_of_a_flip(weights):
    flips = [choose_flip(weights, seed) for seed in range(200)]
    assert flips[3] == choose_flip(weights, 3)
    assert len({flip.projection for flip in flips}) > 30
    for flip in flips:
        assert weights[flip.projection].scales[flip.row, flip.column] == flip.before != 0
        assert flip.before ^ flip.after in EXPONENT_BITS
        assert flip.after & 0x7F != 0x7F


@pytest.mark.parametrize("index", [0, 33, 34, 35], ids=["384x384", "attention-out", "1536x384", "384x1536"])
def test_kernels_match_the_reference(target, encoder, weights, x_scales, reference, index):
    """One projection of each shape on the target, with fewer rows than planned."""
    projection = list(encoder.projections())[index]
    name, (n, k) = projection.name, projection.weight.shape
    linear = KernelLinear([projection], weights, x_scales, max_rows=16, device=target.device)
    assert len(linear.resolved) == 2
    x = FORMAT_MAX / x_scales[name] * (torch.rand((11, k), generator=torch.Generator().manual_seed(index)) - 0.5)
    before = counters.launches.total()
    y = linear(projection, x)
    assert counters.launches.total() == before + 2
    assert y.shape == (11, n)
    torch.testing.assert_close(linear.recorded[name].y, reference.product(projection, x), rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(y, linear.recorded[name].y + projection.bias)


def test_kernels_with_a_flip_differ_in_its_channel_only(target, encoder, weights, x_scales):
    projection = next(iter(encoder.projections()))
    flip = choose_flip({projection.name: weights[projection.name]}, 5)
    right, wrong = (
        KernelLinear([projection], weights, x_scales, max_rows=8, device=target.device, flip=f) for f in (None, flip)
    )
    x = torch.randn((8, 384), generator=torch.Generator().manual_seed(0))
    differs = (right(projection, x) != wrong(projection, x)).any(dim=0)
    assert differs.nonzero().flatten().tolist() == [flip.row]
