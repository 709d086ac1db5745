"""``quantization.nvfp4`` on the chosen target: byte-exact with the contract's chain, and its refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from b12x.gemm import blockscaled
from b12x.gemm.blockscaled.reference import tolerance
from b12x.quantization import nvfp4, scales
from tests.nvfp4_data import golden_quantize, operand, pack, random_operand, swizzled_offsets

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def rows_of(rng: np.random.Generator, m: int, k: int, dtype: str) -> torch.Tensor:
    """Rows whose blocks differ by octaves, with zero blocks, blocks of one value, and subnormal block scales."""
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-12, 6, (m, k // 16)).repeat(16, axis=1))
    kind = rng.integers(0, 8, (m, k // 16)).repeat(16, axis=1)
    x = np.where(kind == 0, 0.0, np.where(kind == 1, 0.75, x))
    return torch.tensor(x).to(DTYPES[dtype])


def expected(x: torch.Tensor, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    codes, scale_bytes = golden_quantize(x.float().cpu().numpy(), global_scale)
    return pack(codes), scale_bytes


def poisoned(plan: nvfp4.Plan) -> nvfp4.Outputs:
    outputs = nvfp4.allocate_outputs(plan)
    outputs.packed_a_storage.fill_(0xA5)
    outputs.scale_storage.fill_(0xA5)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [(1, 64), (7, 192), (128, 128), (129, 64), (300, 320)])
@pytest.mark.parametrize("global_scale", [1.0, 448 * 6 / 5.25, 1e-3])
def test_bytes(target, rng, dtype, m, k, global_scale):
    """Payload and scales equal the contract's chain; scales of the missing rows of the last tile are zero."""
    x = rows_of(rng, m, k, dtype)
    plan = nvfp4.plan(m, k, device=target.device, dtype=dtype)
    outputs = poisoned(plan)
    nvfp4.run(plan=plan, x=x, global_scale=torch.tensor([global_scale]), outputs=outputs)

    packed, scale_bytes = expected(x, global_scale)
    np.testing.assert_array_equal(outputs.packed_a_storage[0].cpu().numpy(), packed)
    storage = outputs.scale_storage.cpu().numpy()
    offsets = swizzled_offsets(1, m, k // 16)
    np.testing.assert_array_equal(storage[offsets][0], scale_bytes)
    pads = np.setdiff1d(np.arange(storage.size), offsets)
    assert not storage[pads].any()


def test_views_and_linear_scales(target, rng):
    """The views are the operands of the GEMM; unswizzle gives the linear scales back."""
    x = rows_of(rng, 130, 128, "bfloat16")
    out = nvfp4.quantize(x, torch.tensor([2.0]))
    packed, scale_bytes = expected(x, 2.0)
    assert out.packed_a_view.shape == (130, 64, 1)
    np.testing.assert_array_equal(out.packed_a_view[:, :, 0].cpu().numpy(), packed)
    assert out.scale_view.shape == (32, 4, 2, 4, 2, 1)
    np.testing.assert_array_equal(scales.unswizzle(out.scale_storage, 130, 8)[0].cpu().numpy(), scale_bytes)
    row, column = 71, 6
    assert out.scale_view[row % 32, row // 32, 0, column % 4, column // 4, 0] == scale_bytes[row, column]


def test_live_rows_below_capacity(target, rng):
    """A plan serves every row count up to its capacity and touches only the tiles that hold live rows."""
    plan = nvfp4.plan(300, 64, device=target.device)
    for live in (0, 1, 128, 131):
        x = rows_of(rng, live, 64, "bfloat16")
        outputs = poisoned(plan)
        nvfp4.run(plan=plan, x=x, global_scale=torch.ones(1), outputs=outputs)
        packed, scale_bytes = expected(x, 1.0) if live else (np.empty((0, 32)), np.empty((0, 4)))
        np.testing.assert_array_equal(outputs.packed_a_storage[0, :live].cpu().numpy(), packed)
        assert (outputs.packed_a_storage[0, live:] == 0xA5).all()
        owned = -(-live // 128) * 512
        assert (outputs.scale_storage[owned:] == 0xA5).all()
        np.testing.assert_array_equal(outputs.scale_storage.cpu().numpy()[swizzled_offsets(1, live, 4)][0], scale_bytes)


def test_bind_once_run_often(target, rng):
    """A binding reads its tensors when it runs."""
    x, global_scale = rows_of(rng, 5, 64, "float16"), torch.ones(1)
    plan = nvfp4.plan(8, 64, device=target.device, dtype=torch.float16)
    outputs = poisoned(plan)
    binding = plan.bind(x=x, global_scale=global_scale, outputs=outputs)
    for factor in (1.0, 8.0):
        global_scale.fill_(factor)
        x.neg_()
        nvfp4.run(binding=binding)
        np.testing.assert_array_equal(outputs.packed_a_storage[0, :5].cpu().numpy(), expected(x, factor)[0])


def test_zero_global_scale_gives_zero(target, rng):
    out = nvfp4.quantize(rows_of(rng, 3, 64, "bfloat16"), torch.zeros(1))
    assert not out.packed_a_storage.any()
    assert not out.scale_storage.any()


@pytest.mark.parametrize("global_scale", [-0.0, -2.0, float("-inf"), float("nan")])
def test_global_scale_that_is_no_positive_number_gives_zero(target, rng, global_scale):
    """Zero codes and zero scales, in the pads too."""
    x = rows_of(rng, 3, 64, "bfloat16").to(target.device)
    out = nvfp4.quantize(x, torch.tensor([global_scale], device=target.device))
    assert not out.packed_a_storage.any()
    assert not out.scale_storage.any()


@pytest.mark.parametrize("global_scale", [1e38, float("inf")])
def test_zeros_stay_zero_where_the_reciprocal_overflows(target, global_scale):
    x = torch.zeros(2, 64, dtype=torch.bfloat16, device=target.device)
    x[0, 3] = 1e-38
    out = nvfp4.quantize(x, torch.tensor([global_scale], device=target.device))
    codes = out.packed_a_storage[0].cpu()
    assert codes[0, 1] >> 4 != 0
    codes[0, 1] = 0
    assert not codes.any()
    assert not scales.unswizzle(out.scale_storage.cpu(), 2, 4)[0, 1].any()


def test_saturation_and_negative_zero(target):
    """Scales stop at 448 (0x7e), payload at 6, and no -0 code appears."""
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[0, :16] = torch.linspace(-1e38, 1e38, 16)
    x[1, 16:32] = -1e-4
    x[1, 16] = 1.0
    out = nvfp4.quantize(x, torch.ones(1))
    packed = out.packed_a_storage[0].cpu().numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(2, 64)
    assert out.scale_storage.max() == 0x7E
    assert {codes[0, 0], codes[0, 15]} == {15, 7}
    assert not (codes == 8).any()
    assert not codes[1, 17:32].any()


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2.0**-14, 0.37, 1.0, 3.1e4]), st.sampled_from(list(DTYPES)))
def test_random_bit_patterns(target, seed, global_scale, dtype):
    """Any finite bf16 or fp16 bit pattern, subnormals included."""
    rng = np.random.default_rng(seed)
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    bits = rng.integers(0, 2**16, (4, 64)).astype(np.uint16)
    values = bits.view(kind).astype(np.float32)
    bits[~np.isfinite(values)] = 0
    x = torch.tensor(bits.view(np.int16)).view(DTYPES[dtype])
    packed, scale_bytes = expected(x, global_scale)
    out = nvfp4.quantize(x, torch.tensor([global_scale]))
    np.testing.assert_array_equal(out.packed_a_storage[0].cpu().numpy(), packed)
    np.testing.assert_array_equal(scales.unswizzle(out.scale_storage, 4, 4)[0].cpu().numpy(), scale_bytes)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda: {"x": torch.zeros(4, 64)}, TypeError, ["x", "float32", "bfloat16"]),
        (lambda: {"x": torch.zeros(4, 128, dtype=torch.bfloat16)}, ValueError, ["x", "(4, 128)", "(any, 64)"]),
        (lambda: {"x": torch.zeros(9, 64, dtype=torch.bfloat16)}, ValueError, ["9 rows", "m = 8", "larger m"]),
        (lambda: {"x": torch.zeros(64, 4, dtype=torch.bfloat16).T}, ValueError, ["x", "strides", "contiguous"]),
        (lambda: {"x": torch.zeros(257, dtype=torch.bfloat16)[1:].view(4, 64)}, ValueError, ["x", "multiple of 16"]),
        (lambda: {"x": torch.zeros(4, 64, dtype=torch.bfloat16, device="meta")}, ValueError, ["x is on meta", "plan"]),
        (lambda: {"global_scale": torch.ones(2)}, ValueError, ["global_scale", "(2,)", "(1,)"]),
        (lambda: {"global_scale": torch.ones(1).double()}, TypeError, ["global_scale", "float64", "float32"]),
        (lambda: {"x": [1.0]}, TypeError, ["x", "list", "tensor"]),
    ],
)
def test_refusals(target, change, error, words):
    """Bad input never reaches the kernel; the message says what was found and what is needed."""
    plan = nvfp4.plan(8, 64, device=target.device)
    arguments = {
        "x": torch.zeros(4, 64, dtype=torch.bfloat16),
        "global_scale": torch.ones(1),
        "outputs": nvfp4.allocate_outputs(plan),
    }
    with pytest.raises(error) as caught:
        nvfp4.run(plan=plan, **(arguments | change()))
    assert all(word in str(caught.value) for word in ["quantization.nvfp4", *words])


def test_refuses_overlap(target):
    plan = nvfp4.plan(8, 64, device=target.device)
    outputs = nvfp4.allocate_outputs(plan)
    x = outputs.packed_a_storage.view(-1).view(torch.bfloat16)[:64].view(1, 64)
    with pytest.raises(ValueError, match=r"packed_a_storage and x overlap.*pass a copy"):
        nvfp4.run(plan=plan, x=x, global_scale=torch.ones(1), outputs=outputs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"m": 0, "k": 64}, ["m is 0", "needed is 1 to 2147483392", "choose"]),
        ({"m": 4, "k": 96}, ["k is 96", "multiple of 64", "pass k_out"]),
        ({"m": 4, "k": 64, "dtype": "float32"}, ["float32", "bfloat16 or float16"]),
    ],
)
def test_plan_refusals(target, arguments, words):
    with pytest.raises(ValueError, match=words[0]) as caught:
        nvfp4.plan(**arguments, device=target.device)
    assert all(word in str(caught.value) for word in words)


def test_run_wants_one_form(target):
    plan = nvfp4.plan(8, 64, device=target.device)
    outputs = nvfp4.allocate_outputs(plan)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    binding = plan.bind(x=x, global_scale=torch.ones(1), outputs=outputs)
    with pytest.raises(ValueError, match="already holds"):
        nvfp4.run(binding=binding, x=x)
    with pytest.raises(TypeError, match="either binding, or all of"):
        nvfp4.run(plan=plan, x=x)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": 1.5}, "m is 1.5, a float; needed is an int: convert"),
        ({"m": True}, "m is True, a bool; needed is an int: convert"),
        ({"m": "1"}, "m is '1', a str; needed is an int: convert"),
        ({"k": 64.0}, "k is 64.0, a float; needed is an int: convert"),
    ],
)
def test_plan_takes_ints(target, change, words):
    with pytest.raises(TypeError, match=words):
        nvfp4.plan(**({"m": 4, "k": 64} | change), device=target.device)


@pytest.mark.parametrize(("m", "k"), [(2**31 - 255, 64), (2**40, 64), (4, 2**31)])
def test_plan_has_a_largest_size(target, m, k):
    with pytest.raises(ValueError, match="needed is 1 to 2147483392: choose"):
        nvfp4.plan(m, k, device=target.device)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ([1], TypeError, "x is a list; needed is a bfloat16 or float16 tensor: make one"),
        (None, TypeError, "x is a NoneType; needed is a bfloat16 or float16 tensor: make one"),
        (torch.zeros(64, dtype=torch.bfloat16), ValueError, r"x has shape \(64,\); needed is \(any, any\): reshape"),
        (
            torch._neg_view(torch.ones(4, 64, dtype=torch.bfloat16)),
            ValueError,
            r"x is a tensor that torch negates .*pass x.resolve_neg\(\)",
        ),
    ],
)
def test_quantize_needs_rows(target, x, error, words):
    if isinstance(x, torch.Tensor):
        x = torch._neg_view(-x.resolve_neg().to(target.device)) if x.is_neg() else x.to(target.device)
    with pytest.raises(error, match=words):
        nvfp4.quantize(x, torch.ones(1))


def test_wrong_outputs_and_bindings_are_refused(target):
    plan = nvfp4.plan(8, 64, device=target.device)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"outputs is a tuple; needed is an Outputs: make one with allocate_outputs"):
        nvfp4.run(plan=plan, x=x, global_scale=torch.ones(1), outputs=(1, 2))
    with pytest.raises(TypeError, match="binding is a int; needed is a Binding: make one with bind"):
        nvfp4.run(binding=1)


def test_storage_of_a_plan(target):
    """What ``allocate_outputs`` allocates, and its text, which holds no values."""
    plan = nvfp4.plan(130, 128, device=target.device)
    storage = plan.shapes_and_dtypes()
    assert storage == {
        "packed_a_storage": ((1, 130, 64), torch.uint8),
        "scale_storage": ((2 * 2 * 512,), torch.uint8),
    }
    outputs = nvfp4.allocate_outputs(plan)
    for name, (shape, dtype) in storage.items():
        assert (tuple(getattr(outputs, name).shape), getattr(outputs, name).dtype) == (shape, dtype)
    device = outputs.scale_storage.device
    packed, scale = f"uint8[1, 130, 64] on {device}", f"uint8[2048] on {device}"
    assert repr(outputs) == f"Outputs(packed_a_storage={packed}, scale_storage={scale})"


@pytest.mark.parametrize("k", [192, 360, 464, 720, 928, 1440, 1856, 2880])
def test_columns_that_a_prepared_weight_pads(target, rng, k):
    """K of models that is no multiple of a GEMM's step: the outputs go on with zeros, and what follows is not read."""
    k_out = -(-k // 128) * 128
    x = torch.tensor(rng.standard_normal((5, k)).astype(np.float32)).to(torch.bfloat16)
    outputs = nvfp4.quantize(x, torch.ones(1), k_out=k_out)
    wide = torch.nn.functional.pad(x, (0, k_out - k))
    codes, scale_bytes = golden_quantize(wide.float().cpu().numpy(), 1.0)
    np.testing.assert_array_equal(outputs.packed_a_storage[0].cpu().numpy(), pack(codes))
    linear = scales.unswizzle(outputs.scale_storage, 5, k_out // 16)[0]
    np.testing.assert_array_equal(linear.cpu().numpy(), scale_bytes)
    # The GEMM takes them as they are.
    weight = random_operand(rng, 1, 24, k_out, "distinct")
    names = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "sf_vec_size": 16}
    lhs = (outputs.packed_a_view, outputs.scale_view)
    found = blockscaled.mm(lhs, weight.pair, c_dtype="float32", **names)[:, :, 0].double().cpu().numpy()
    values = operand(codes[None], scale_bytes[None], rng).values[0]
    assert (np.abs(found - values @ weight.values[0].T) <= tolerance(values, weight.values[0], 1.0, "float32")).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 96}, "k is 96; a multiple of 64 is needed .*pass k_out, the K of the prepared weight"),
        ({"k": 68, "k_out": 128}, "k is 68 and k_out 128; needed are multiples of 8 and of 64"),
        ({"k": 128, "k_out": 160}, "k is 128 and k_out 160; needed are multiples of 8 and of 64"),
        ({"k": 128, "k_out": 64}, "k_out is 64; needed is 128 to"),
    ],
)
def test_widths_are_refused(target, change, words):
    with pytest.raises(ValueError, match=words):
        nvfp4.plan(**({"m": 4} | change), device=target.device)
