"""Prepared weights, byte for byte against numpy, and what is refused when they are prepared. Nothing is launched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from b12x.gemm import _weights, block_fp8_linear, mxfp8_linear, tensor_fp8_linear, wo_projection
from tests.gemm import linear_data as data

E8M0 = torch.float8_e8m0fnu


def assert_rows(rows, codes: np.ndarray, linear: np.ndarray) -> None:
    """Packed rows ``[N, K]`` hold these codes and scale bytes ``[N, K/32]``, and pads of 127."""
    n, k = codes.shape
    assert rows.values.dtype == torch.float8_e4m3fn
    assert rows.values.is_contiguous()
    np.testing.assert_array_equal(rows.values.view(torch.uint8).numpy(), codes)
    assert rows.scale_rows.shape == (1, n, k // 32)
    np.testing.assert_array_equal(rows.scale_rows.numpy()[0], linear)
    assert rows.scale_mma.shape == (32, 4, -(-n // 128), 4, k // 128, 1)
    np.testing.assert_array_equal(data.view_bytes(rows.scale_mma), data.swizzled(linear[None]))
    assert rows.values_tiled is None


@pytest.mark.parametrize(("n", "k"), [(8, 32), (132, 160), (130, 192), (256, 384)])
@pytest.mark.parametrize("dtype", [torch.uint8, E8M0])
def test_mxfp8(rng, n, k, dtype):
    """K is padded to 128 with zeros and scales of 1; scales beyond the weight are not read."""
    codes = data.weight_codes(rng, n, k)
    scale = rng.integers(0, 255, (n, k // 32)).astype(np.uint8)
    wide = np.full((n + 3, k // 32 + 2), 255, np.uint8)
    wide[:n, : k // 32] = scale
    weight = mxfp8_linear.pack_weight(data.as_weight(codes), torch.tensor(wide).view(dtype))
    padded = -(-k // 128) * 128
    assert (weight.in_features, weight.padded_in_features, weight.out_features) == (k, padded, n)
    wanted, linear = np.zeros((n, padded), np.uint8), np.full((n, padded // 32), 127, np.uint8)
    wanted[:, :k], linear[:, : k // 32] = codes, scale
    assert_rows(weight.weight, wanted, linear)


def test_mxfp8_of_a_view(rng):
    """A weight may be any view: a shard of columns, or a transpose."""
    codes = data.weight_codes(rng, 40, 256)
    scale = torch.tensor(rng.integers(100, 140, (40, 8)).astype(np.uint8))
    whole = data.as_weight(codes)
    shard = mxfp8_linear.pack_weight(whole[:, 128:], scale[:, 4:])
    turned = mxfp8_linear.pack_weight(
        whole.view(torch.uint8).t().contiguous().t().view(whole.dtype)[:, 128:], scale[:, 4:]
    )
    for weight in (shard, turned):
        assert_rows(weight.weight, codes[:, 128:], scale[:, 4:].numpy())


@pytest.mark.parametrize(("n", "k"), [(8, 128), (128, 256), (200, 384), (300, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, E8M0])
def test_powers_of_two_keep_the_values(rng, n, k, dtype):
    codes = data.weight_codes(rng, n, k)
    blocks = rng.integers(1, 255, (-(-n // 128), k // 128)).astype(np.uint8)
    blocks[0, 0] = 254
    if dtype in (torch.uint8, E8M0):
        blocks[-1, -1] = 0
        scale = torch.tensor(blocks).view(dtype)
    else:
        scale = torch.tensor(data.powers(blocks)).to(dtype)
    for given in (scale, scale[None]):
        weight = block_fp8_linear.pack_weight(data.as_weight(codes), given)
        assert (weight.in_features, weight.out_features, weight.block_size) == (k, n, (128, 128))
        assert_rows(weight.weight, codes, data.block_rows(blocks, n))


@pytest.mark.parametrize("case", ["spread", "one odd scale", "zero scale", "subnormal scale", "bf16"])
@pytest.mark.parametrize(("n", "k"), [(200, 384), (128, 128), (2200, 128)])
def test_requantised(rng, n, k, case):
    """Bytes of blocks and values as numpy has them; 2200 rows are more than one part."""
    codes = data.weight_codes(rng, n, k)
    codes[:128, :128] = rng.choice(np.array([0, 0x80], np.uint8), codes[:128, :128].shape)  # a block of zeros
    shape = (-(-n // 128), k // 128)
    scale = np.exp2(rng.uniform(-20, 3, shape)).astype(np.float32)
    if case == "one odd scale":
        scale = np.exp2(np.floor(np.log2(scale)))
        scale[-1, -1] = 0.75
    elif case == "zero scale":
        scale[-1, -1] = 0
    elif case == "subnormal scale":
        scale[-1, -1] = 2.0**-130
    given = torch.tensor(scale).to(torch.bfloat16 if case == "bf16" else torch.float32)
    weight = block_fp8_linear.pack_weight(data.as_weight(codes), given)
    fresh, blocks = data.requantise(codes, given.float().numpy())
    assert blocks[0, 0] == 127
    assert_rows(weight.weight, fresh, data.block_rows(blocks, n))


@pytest.mark.parametrize("exact", [448.0, 224.0, np.nextafter(np.float32(448), np.float32(0)), 448 * 2.0**-140, 3e-45])
def test_requantised_at_the_edges(exact):
    """Largest weights at and beside 448 * 2^k, and ones whose 1/448 is subnormal or 0."""
    codes = np.zeros((128, 128), np.uint8)
    codes[5, 7], codes[6, 6] = 0x38, 0xB0  # 1 and -0.5
    scale = torch.full((1, 2), 1.0)
    scale[0, 0], scale[0, 1] = float(exact), 3.0
    codes = np.concatenate([codes, codes], axis=1)
    weight = block_fp8_linear.pack_weight(data.as_weight(codes), scale)
    fresh, blocks = data.requantise(codes, scale.numpy())
    assert_rows(weight.weight, fresh, data.block_rows(blocks, 128))


def test_requantised_weights_are_near(rng):
    """Scales that are no powers of two: the packed weight is within 4 % of the float one, and within half a step of
    E4M3 at each element."""
    n, k = 256, 256
    codes, scale = data.weight_codes(rng, n, k), np.exp2(rng.uniform(-6, 2, (2, 2))).astype(np.float32)
    weight = block_fp8_linear.pack_weight(data.as_weight(codes), torch.tensor(scale)).weight
    exact = data.from_e4m3(codes) * np.kron(scale.astype(np.float64), np.ones((128, 128)))
    linear = weight.scale_rows.numpy()[0]
    packed = data.dequantise(weight.values.view(torch.uint8).numpy(), linear)
    assert np.linalg.norm(packed - exact) / np.linalg.norm(exact) < 0.04
    smallest = 2.0**-10 * np.repeat(data.powers(linear), 32, axis=1)
    assert (np.abs(packed - exact) <= np.maximum(np.abs(exact) / 16, smallest) * (1 + 1e-6)).all()


def test_groups_of_a_projection(rng):
    """WO-A's rows are those of the flat weight, and each group's scales are swizzled by themselves."""
    groups, rank, width, hidden = 4, 96, 256, 72
    a, b = data.weight_codes(rng, groups * rank, width), data.weight_codes(rng, hidden, groups * rank)
    a_scale = torch.tensor(np.exp2(rng.uniform(-4, 0, (3, 2))).astype(np.float32))
    b_scale = torch.tensor(rng.integers(110, 130, (1, 3)).astype(np.uint8))
    weights = wo_projection.pack_weights(
        data.as_weight(a),
        a_scale,
        data.as_weight(b),
        b_scale,
        groups=groups,
        group_width=width,
        rank=rank,
        hidden=hidden,
    )
    fresh, blocks = data.requantise(a, a_scale.numpy())
    rows = data.block_rows(blocks, groups * rank).reshape(groups, rank, width // 32)
    assert weights.wo_a.values.shape == (rank, width, groups)
    assert weights.wo_a.values.stride() == (width, 1, rank * width)
    np.testing.assert_array_equal(
        weights.wo_a.values.permute(2, 0, 1).view(torch.uint8).numpy(), fresh.reshape(groups, rank, width)
    )
    np.testing.assert_array_equal(weights.wo_a.scale_rows.numpy(), rows)
    np.testing.assert_array_equal(data.view_bytes(weights.wo_a.scale_mma), data.swizzled(rows))
    assert_rows(weights.wo_b, b, data.block_rows(b_scale.numpy(), hidden))
    assert weights.sfb_k_replicated


@pytest.mark.parametrize(("n", "k"), [(132, 160), (8, 128)])
def test_tensor_fp8(rng, n, k):
    codes = data.weight_codes(rng, n, k)
    for scale in (torch.tensor([0.03125]), torch.tensor(0.25)):
        weight = tensor_fp8_linear.pack_weight(data.as_weight(codes), scale)
        padded = -(-k // 128) * 128
        assert (weight.in_features, weight.padded_in_features, weight.out_features) == (k, padded, n)
        wanted = np.zeros((n, padded), np.uint8)
        wanted[:, :k] = codes
        np.testing.assert_array_equal(weight.values.view(torch.uint8).numpy(), wanted)
        assert (weight.scale_mma == 127).all()
        assert weight.scale_mma.shape == (32, 4, -(-n // 128), 4, padded // 128, 1)
        assert weight.output_scale.shape == (1,)
        assert float(weight.output_scale) == float(scale)


def _weight(n=8, k=128):
    return torch.zeros((n, k), dtype=torch.uint8).view(torch.float8_e4m3fn)


def _nan_weight():
    codes = torch.zeros((8, 128), dtype=torch.uint8)
    codes[3, 5] = 0xFF
    return codes.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("pack", "error", "words"),
    [
        (lambda: mxfp8_linear.pack_weight(_weight().float(), None), TypeError, ["weight has dtype float32", "convert"]),
        (lambda: mxfp8_linear.pack_weight(3, None), TypeError, ["weight is a int", "float8_e4m3fn tensor"]),
        (lambda: mxfp8_linear.pack_weight(_weight(), None), TypeError, ["weight_scale is a NoneType", "uint8"]),
        (
            lambda: mxfp8_linear.pack_weight(_weight(8, 360), torch.zeros(8, 12, dtype=torch.uint8)),
            ValueError,
            ["weight has shape (8, 360)", "K a multiple of 32", "pad"],
        ),
        (
            lambda: mxfp8_linear.pack_weight(_weight(), torch.zeros(7, 4, dtype=torch.uint8)),
            ValueError,
            ["weight_scale has shape (7, 4)", "(8, 4)", "not swizzled"],
        ),
        (
            lambda: mxfp8_linear.pack_weight(_weight(), torch.full((8, 4), 255, dtype=torch.uint8)),
            ValueError,
            ["weight_scale holds the E8M0 byte 255", "0 to 254"],
        ),
        (
            lambda: mxfp8_linear.pack_weight(_nan_weight(), torch.zeros(8, 4, dtype=torch.uint8)),
            ValueError,
            ["weight holds NaN", "checkpoint"],
        ),
        (
            lambda: block_fp8_linear.pack_weight(_weight(8, 160), torch.ones(1, 2)),
            ValueError,
            ["weight has shape (8, 160)", "multiple of 128"],
        ),
        (
            lambda: block_fp8_linear.pack_weight(_weight(), torch.ones(1, 1), block_size=(1, 128)),
            ValueError,
            ["block_size is (1, 128)", "(128, 128)", "repeated"],
        ),
        (
            lambda: block_fp8_linear.pack_weight(_weight(200, 128), torch.ones(1, 1)),
            ValueError,
            ["weight_scale has shape (1, 1)", "needed is (2, 1)", "(200, 128)"],
        ),
        (
            lambda: block_fp8_linear.pack_weight(_weight(), torch.tensor([[-0.5]])),
            ValueError,
            ["weight_scale holds a value that is negative", "0 or more"],
        ),
        (
            lambda: block_fp8_linear.pack_weight(_weight(), torch.tensor([[torch.inf]])),
            ValueError,
            ["weight_scale holds a value", "not finite"],
        ),
        (
            lambda: block_fp8_linear.pack_weight(_weight(), torch.ones(1, 1, dtype=torch.float64)),
            TypeError,
            ["weight_scale has dtype float64", "float32 or bfloat16"],
        ),
        (
            lambda: block_fp8_linear.pack_weight(
                torch.full((8, 128), 448.0).to(torch.float8_e4m3fn), torch.tensor([[3e38]])
            ),
            ValueError,
            ["weight times weight_scale exceeds", "inverse"],
        ),
        (
            lambda: block_fp8_linear.pack_weight(_weight(), torch.ones(1, 1, device="meta")),
            ValueError,
            ["weight_scale is on meta", "cpu"],
        ),
        (
            lambda: tensor_fp8_linear.pack_weight(_weight(), torch.tensor([-1.0])),
            ValueError,
            ["output_scale is -1.0", "finite factor of 0 or more"],
        ),
        (
            lambda: tensor_fp8_linear.pack_weight(_weight(), torch.tensor([torch.nan])),
            ValueError,
            ["output_scale is nan", "input_scale"],
        ),
        (
            lambda: tensor_fp8_linear.pack_weight(_weight(), torch.ones(2)),
            ValueError,
            ["output_scale has shape (2,)", "(1,)"],
        ),
        (
            lambda: tensor_fp8_linear.pack_weight(_weight(), torch.ones(1, dtype=torch.float16)),
            TypeError,
            ["output_scale has dtype float16", "float32"],
        ),
        (
            lambda: tensor_fp8_linear.pack_weight(_weight(8, 360), torch.ones(1)),
            ValueError,
            ["weight has shape (8, 360)", "multiple of 32"],
        ),
    ],
)
def test_refusals(pack, error, words):
    with pytest.raises(error) as caught:
        pack()
    assert all(word in str(caught.value) for word in ["gemm.", *words]), caught.value


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"groups": 0}, ValueError, ["groups is 0"]),
        ({"rank": 100}, ValueError, ["rank is 100", "multiple of 8"]),
        ({"group_width": 96}, ValueError, ["group_width is 96", "multiple of 128"]),
        ({"hidden": 64}, ValueError, ["wo_b_weight has shape (40, 128)", "(64, 128)", "hidden 64"]),
        ({"groups": 4}, ValueError, ["wo_a_weight has shape (128, 256)", "(256, 256)", "4 groups"]),
        ({"wo_a_weight": None}, TypeError, ["wo_a_weight is a NoneType"]),
        ({"wo_a_scale": torch.ones(2, 2)}, ValueError, ["wo_a_scale has shape (2, 2)", "(1, 2)"]),
        ({"wo_b_scale": torch.ones(1, 1) * -1}, ValueError, ["wo_b_scale holds a value that is negative"]),
    ],
)
def test_projection_refusals(change, error, words):
    arguments = {
        "wo_a_weight": _weight(128, 256),
        "wo_a_scale": torch.ones(1, 2),
        "wo_b_weight": _weight(40, 128),
        "wo_b_scale": torch.ones(1, 1),
        "groups": 2,
        "group_width": 256,
        "rank": 64,
        "hidden": 40,
    }
    with pytest.raises(error) as caught:
        wo_projection.pack_weights(**(arguments | change))
    assert all(word in str(caught.value) for word in ["gemm.wo_projection", *words]), caught.value


def test_integer_rule_is_the_rounding_up(rng):
    """The packers' bytes are those of numpy for every exponent, at powers of two and beside them."""
    exponents = np.exp2(np.arange(-140, 120).astype(np.float64)).astype(np.float32)
    s = np.concatenate([exponents, np.nextafter(exponents, np.float32(0)), np.nextafter(exponents, np.float32(1e38))])
    fraction, exponent = np.frexp(s)
    wanted = np.where(s == 0, 127, np.maximum(exponent - (fraction == 0.5) + 127, 1))
    np.testing.assert_array_equal(_weights.e8m0_codes(torch.tensor(s)).numpy(), wanted)


def test_weights_are_compared_by_identity():
    """Tensors have no truth value, and no hash of their values."""
    weight, ones = _weight(128, 128), torch.ones(1, 1)
    sizes = {"groups": 1, "group_width": 128, "rank": 128, "hidden": 128}
    for make in (
        lambda: mxfp8_linear.pack_weight(weight, torch.full((128, 4), 127, dtype=torch.uint8)),
        lambda: block_fp8_linear.pack_weight(weight, ones),
        lambda: tensor_fp8_linear.pack_weight(weight, torch.ones(1)),
        lambda: wo_projection.pack_weights(weight, ones, weight, ones, **sizes),
    ):
        first, second = make(), make()
        assert first == first
        assert first != second
        assert len({first, second}) == 2
