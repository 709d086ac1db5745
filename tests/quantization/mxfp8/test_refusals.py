"""What ``quantization.mxfp8`` refuses: bad input never reaches the kernel, and the message says what to do."""

from __future__ import annotations

import pytest
import torch

from b12x.quantization import mxfp8

BF16, U8 = torch.bfloat16, torch.uint8
ROPE = {"head_dim": 64, "nope_dim": 32, "rope_dim": 32}


def arguments(plan: mxfp8.Plan) -> dict:
    rows = mxfp8.allocate_outputs(plan)
    return {
        "source": torch.zeros(4, 64, dtype=BF16),
        "values": rows.values,
        "scale_rows": rows.scale_rows,
        "scale_mma": rows.scale_mma,
    }


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda: {"source": torch.zeros(4, 64)}, TypeError, ["source", "float32", "bfloat16"]),
        (lambda: {"source": [1.0]}, TypeError, ["source", "list", "tensor"]),
        (lambda: {"source": torch.zeros(4, 128, dtype=BF16)}, ValueError, ["source", "(4, 128)", "(any, 64)"]),
        (lambda: {"source": torch.zeros(9, 64, dtype=BF16)}, ValueError, ["9 rows", "m = 8", "larger m"]),
        (lambda: {"source": torch.zeros(64, 4, dtype=BF16).T}, ValueError, ["source", "strides (1, 4)", "copy"]),
        (lambda: {"source": torch.zeros(4, 68, dtype=BF16)[:, :64]}, ValueError, ["strides (68, 1)", "multiples of 8"]),
        (lambda: {"source": torch.zeros(257, dtype=BF16)[1:].view(4, 64)}, ValueError, ["source", "multiple of 16"]),
        (lambda: {"source": torch.zeros(4, 64, dtype=BF16, device="meta")}, ValueError, ["on meta", "plan"]),
        (lambda: {"values": torch.zeros(8, 64)}, TypeError, ["values", "float32", "float8_e4m3fn or uint8"]),
        (lambda: {"values": torch.zeros(8, 32, dtype=U8)}, ValueError, ["values", "(8, 32)", "(any, 64)"]),
        (lambda: {"values": torch.zeros(8, 80, dtype=U8)[:, :64]}, ValueError, ["values", "strides (80, 1)"]),
        (lambda: {"values": torch.zeros(3, 64, dtype=U8)}, ValueError, ["values", "3 rows", "source 4", "allocate"]),
        (lambda: {"scale_rows": torch.zeros(8, 4, dtype=U8)}, ValueError, ["scale_rows", "(8, 4)", "(any, 2)"]),
        (lambda: {"scale_rows": torch.zeros(2, 2, dtype=U8)}, ValueError, ["scale_rows", "2 rows", "source 4"]),
        (lambda: {"scale_rows": torch.zeros(8, 2)}, TypeError, ["scale_rows", "float32", "uint8 or float8_e8m0fnu"]),
        (lambda: {"scale_mma": torch.zeros(511, dtype=U8)}, ValueError, ["scale_mma", "512 contiguous", "allocate"]),
        (lambda: {"scale_mma": torch.zeros(8, 64, dtype=U8)}, ValueError, ["scale_mma", "[1, 1, 1, 32, 4, 4]"]),
        (lambda: {"scale_mma": torch.zeros(1, 0, 1, 32, 4, 4, dtype=U8)}, ValueError, ["scale_mma", "swizzled"]),
        (lambda: {"positions": torch.zeros(4, dtype=torch.int32)}, ValueError, ["positions", "rope", "leave them out"]),
    ],
)
def test_refusals(target, change, error, words):
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=8, k=64))
    with pytest.raises(error) as caught:
        plan.bind(**(arguments(plan) | change()))
    assert all(word in str(caught.value) for word in ["quantization.mxfp8", *words]), caught.value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: {"source": torch.zeros(4, 64, dtype=BF16)}, ["source", "(4, 64)", "(any, 2, 64)"]),
        (lambda: {"values": torch.zeros(8, 64, dtype=U8)}, ["values", "(8, 64)", "(any, 64, 2)"]),
        (lambda: {"values": torch.zeros(2, 2, 64, dtype=U8).permute(1, 2, 0)}, ["values", "2 rows", "source 4"]),
        (
            lambda: {"values": torch.zeros(516, dtype=U8).as_strided((4, 64, 2), (64, 1, 252))},
            ["252 bytes apart", "of 8"],
        ),
        (lambda: {"scale_rows": torch.zeros(1, 8, 2, dtype=U8)}, ["scale_rows", "(1, 8, 2)", "(2, any, 2)"]),
        (lambda: {"scale_mma": torch.zeros(2048, dtype=U8)}, ["scale_mma", "1024 contiguous bytes"]),
    ],
)
def test_refusals_with_groups(target, change, words):
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=8, k=64, groups=2))
    with pytest.raises(ValueError, match="needed") as caught:
        plan.bind(**(arguments(plan) | {"source": torch.zeros(4, 2, 64, dtype=BF16)} | change()))
    assert all(word in str(caught.value) for word in ["quantization.mxfp8", *words]), caught.value


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"positions": None}, TypeError, ["positions", "NoneType", "int32 or int64"]),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, ValueError, ["positions", "(3,)", "(4,)", "each row"]),
        ({"positions": torch.zeros(4)}, TypeError, ["positions", "float32", "int32 or int64"]),
        ({"cos_sin_cache": None}, TypeError, ["cos_sin_cache", "NoneType"]),
        ({"cos_sin_cache": torch.zeros(9, 64)}, ValueError, ["cos_sin_cache", "(9, 64)", "(any, 32)"]),
        ({"cos_sin_cache": torch.zeros(9, 32, dtype=BF16)}, TypeError, ["cos_sin_cache", "bfloat16", "float32"]),
    ],
)
def test_refusals_with_a_rope(target, change, error, words):
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=8, k=64, rope=mxfp8.Rope(**ROPE)))
    rope = {"positions": torch.zeros(4, dtype=torch.int64), "cos_sin_cache": torch.zeros(9, 32)} | change
    moved = {name: value if value is None else value.to(target.device) for name, value in rope.items()}
    with pytest.raises(error) as caught:
        plan.bind(**arguments(plan), **moved)
    assert all(word in str(caught.value) for word in ["quantization.mxfp8", *words]), caught.value


def test_refuses_overlap(target):
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=8, k=64))
    given = arguments(plan)
    given["source"] = given["values"].view(U8).view(-1).view(BF16)[:64].view(1, 64)
    with pytest.raises(ValueError, match=r"values and source overlap.*pass a copy"):
        plan.bind(**given)


@pytest.mark.parametrize(
    ("caps", "error", "words"),
    [
        ({"m": 0}, ValueError, ["m is 0", "needed is 1 to 2147483392", "choose"]),
        ({"m": 1.5}, TypeError, ["m is 1.5, a float", "convert"]),
        ({"k": 40}, ValueError, ["k is 40", "multiple of 32", "k_out", "pad"]),
        ({"k": 36}, ValueError, ["k is 36", "multiple of 32", "pad"]),
        ({"k": 36, "k_out": 64}, ValueError, ["k is 36", "multiple of 8"]),
        ({"k_out": 32}, ValueError, ["k_out is 32 and k 64", "not less than k", "round"]),
        ({"k_out": 72}, ValueError, ["k_out is 72", "multiple of 32"]),
        ({"dtype": "float32"}, ValueError, ["float32", "bfloat16 or float16", "convert"]),
        ({"groups": 0}, ValueError, ["groups is 0", "1 to 65535"]),
        ({"span": 12}, ValueError, ["span is 12", "multiple of 8", "copy"]),
        ({"span": 24}, ValueError, ["span is 24", "divides k", "copy"]),
        ({"span": 32, "groups": 2}, ValueError, ["span is 32", "groups 2", "one group"]),
        ({"rope": 3}, TypeError, ["rope is a int", "make one"]),
        ({"rope": ROPE, "k": 96}, ValueError, ["head_dim 64", "k is 96", "whole heads"]),
        ({"rope": ROPE, "dtype": "float16"}, ValueError, ["float16", "bfloat16"]),
        ({"rope": ROPE | {"nope_dim": 64}}, ValueError, ["rope.head_dim is 64", "is 96", "equal"]),
        ({"rope": ROPE | {"rope_dim": 16}}, ValueError, ["rope.rope_dim is 16", "multiple of 32"]),
        ({"rope": ROPE | {"cache_dtype": "float16"}}, ValueError, ["rope.cache_dtype", "float32 or bfloat16"]),
    ],
)
def test_caps_refusals(caps, error, words):
    with pytest.raises(error) as caught:
        mxfp8.Caps(**({"m": 4, "k": 64} | caps))
    assert all(word in str(caught.value) for word in ["quantization.mxfp8", *words]), caught.value


def test_rope_of_a_mapping():
    """As a manifest gives it; its text is what a manifest says."""
    caps = mxfp8.Caps(m=4, k=64, rope=ROPE)
    assert caps.rope == mxfp8.Rope(**ROPE)
    assert str(caps.rope) == '{ head_dim = 64, nope_dim = 32, rope_dim = 32, cache_dtype = "float32" }'


def test_one_shot_refusals(target):
    values, scale_mma = torch.zeros(4, 64, dtype=U8), torch.zeros(512, dtype=U8)
    source = torch.zeros(4, 64, dtype=BF16)
    with pytest.raises(ValueError, match=r"value_order is 'trellis_native_mma'; needed is 'linear'.*leave it out"):
        mxfp8.quantize_rows(source, values, None, scale_mma, value_order="trellis_native_mma")
    for bad in (None, [1.0]):
        with pytest.raises(TypeError, match=r"source is a .*; needed is a bfloat16 or float16 tensor: make one"):
            mxfp8.quantize_rows(bad, values, None, scale_mma)
    with pytest.raises(ValueError, match=r"source has shape \(256,\); needed is \(any, any\): reshape"):
        mxfp8.quantize_rows(source.view(-1), values, None, scale_mma)
    with pytest.raises(TypeError, match="binding is a int; needed is a Binding: make one with bind"):
        mxfp8.run(binding=1)


def test_spec_refusals():
    from b12x.quantization.mxfp8.spec import Mxfp8QuantizeSpec

    with pytest.raises(ValueError, match=r"reads .* not 'float32'"):
        Mxfp8QuantizeSpec(dtype="float32")
    with pytest.raises(ValueError, match=r"a cache of .* not 'float16'"):
        Mxfp8QuantizeSpec(dtype="bfloat16", rope="float16")
