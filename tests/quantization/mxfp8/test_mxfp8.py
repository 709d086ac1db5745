"""``quantization.mxfp8`` on the chosen target: byte-exact with the contract's chain, whatever is around the rows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from b12x.quantization import mxfp8, scales
from tests.mxfp8_data import golden_inverse_rope, golden_quantize
from tests.nvfp4_data import swizzle, swizzled_offsets

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
POISON = 0xA5


def rows_of(rng: np.random.Generator, m: int, k: int, dtype: str = "bfloat16") -> torch.Tensor:
    """Rows whose blocks differ by octaves, with zero blocks (of -0 too), blocks of one value, and small values."""
    blocks = (m, -(-k // 32))
    x = rng.standard_normal((m, blocks[1] * 32)) * np.exp2(rng.integers(-12, 6, blocks).repeat(32, axis=1))
    kind = rng.integers(0, 8, blocks).repeat(32, axis=1)
    x = np.select([kind == 0, kind == 1, kind == 2], [0.0 * x, 0.875, x * 2.0**-14], x)
    return torch.tensor(x[:, :k]).to(DTYPES[dtype])


def poisoned(plan: mxfp8.Plan, m: int | None = None) -> mxfp8.MXFP8Rows:
    rows = mxfp8.allocate_outputs(plan, m=m)
    for part in (rows.values, rows.scale_rows, rows.scale_mma):
        part.view(torch.uint8).fill_(POISON)
    return rows


def launch(plan: mxfp8.Plan, source: torch.Tensor, rows: mxfp8.MXFP8Rows, **rest: torch.Tensor) -> None:
    arguments = {"values": rows.values, "scale_rows": rows.scale_rows, "scale_mma": rows.scale_mma} | rest
    mxfp8.run(binding=plan.bind(source=source, **arguments))


def numpy_of(x: torch.Tensor) -> np.ndarray:
    return x.float().cpu().numpy()


def check(rows: mxfp8.MXFP8Rows, x: np.ndarray, live: int | None = None) -> None:
    """``x`` f32 ``[G, M, K]`` is what the outputs hold; bytes that no row owns still hold the poison."""
    groups, m, k = x.shape
    codes, linear = golden_quantize(x.reshape(-1, k))
    codes, linear = codes.reshape(x.shape), linear.reshape(groups, m, -1)
    values = rows.values.view(torch.uint8).cpu().numpy()
    values = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    np.testing.assert_array_equal(values[:, :m], codes)
    assert (values[:, m:] == POISON).all()
    written = rows.scale_rows.cpu().numpy()
    np.testing.assert_array_equal(written[:, :m], linear)
    assert (written[:, m:] == POISON).all()
    storage = rows.scale_mma.permute(5, 2, 4, 0, 1, 3).reshape(groups, -1).cpu().numpy()
    wanted = swizzle(linear, 127).reshape(groups, -1)
    np.testing.assert_array_equal(storage[:, : wanted.shape[1]], wanted)
    assert (storage[:, wanted.shape[1] :] == POISON).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [(1, 32), (7, 96), (8, 128), (33, 64), (128, 128), (129, 160), (300, 320)])
def test_bytes(target, rng, dtype, m, k):
    """Values, rows of scales and swizzled scales equal the contract's chain; pads of the last tiles are 127."""
    x = rows_of(rng, m, k, dtype)
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=m, k=k, dtype=dtype))
    rows = poisoned(plan)
    launch(plan, x, rows)
    check(rows, numpy_of(x)[None])


def test_live_rows_below_capacity(target, rng):
    """A plan serves every row count up to its capacity and touches only the tiles that hold live rows."""
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=300, k=64))
    for live in (0, 1, 31, 32, 33, 127, 128, 131, 300):
        x = rows_of(rng, live, 64)
        rows = poisoned(plan)
        launch(plan, x, rows)
        if live:
            check(rows, numpy_of(x)[None])
        else:
            assert all((part.view(torch.uint8) == POISON).all() for part in rows[:3])


@pytest.mark.parametrize(("k", "k_out"), [(32, 160), (96, 128), (40, 64), (8, 32), (136, 256)])
def test_columns_beyond_the_source_are_zero(target, rng, k, k_out):
    """As if the rows went on with zeros, though what is behind them in memory is NaN; a block may end in them."""
    m = 35
    wide = torch.full((m, k + 24), float("nan"), dtype=torch.bfloat16, device=target.device)
    wide[:, :k] = rows_of(rng, m, k).to(target.device)
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=m, k=k, k_out=k_out))
    rows = poisoned(plan)
    launch(plan, wide[:, :k], rows)
    check(rows, np.pad(numpy_of(wide[:, :k]), ((0, 0), (0, k_out - k)))[None])


def test_groups_and_strides(target, rng):
    """Groups of pitched rows; outputs of another capacity, their groups further apart than needed."""
    m, groups, k = 130, 3, 96
    wide = torch.full((m, groups + 1, k + 8), float("nan"), dtype=torch.bfloat16, device=target.device)
    source = wide[:, :groups, :k]
    source.copy_(rows_of(rng, m * groups, k).view(m, groups, k))
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=140, k=k, groups=groups))
    rows = poisoned(plan)
    values = torch.full((groups, 150, k), POISON, dtype=torch.uint8, device=target.device)
    scale_rows = torch.full((groups, 150, 4), POISON, dtype=torch.uint8, device=target.device)
    storage = torch.full((groups, 3, 1, 32, 4, 4), POISON, dtype=torch.uint8, device=target.device)
    # Rows of 3 scales have no place in rows of 4: here the groups are apart, the rows are not.
    apart = scale_rows.view(groups, -1)[:, : 150 * 3].view(groups, 150, 3)
    rows = mxfp8.MXFP8Rows(values.permute(1, 2, 0), apart, storage.permute(3, 4, 1, 5, 2, 0))
    launch(plan, source, rows)
    check(rows, numpy_of(source).transpose(1, 0, 2))
    assert (scale_rows.view(groups, -1)[:, 150 * 3 :] == POISON).all()


@pytest.mark.parametrize("span", [8, 48, 64])
def test_span(target, rng, span):
    """Rows in pieces that lie a stride apart, as a grouped GEMM leaves them: ``[T, rank, G]`` of ``[G, T, rank]``."""
    m, k = 37, 192
    physical = torch.full((k // span, m + 3, span), float("nan"), dtype=torch.bfloat16, device=target.device)
    x = rows_of(rng, m, k).to(target.device)
    physical[:, :m] = x.view(m, k // span, span).permute(1, 0, 2)
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=m, k=k, span=span))
    rows = poisoned(plan)
    launch(plan, physical[:, :m].permute(1, 2, 0), rows)
    check(rows, numpy_of(x)[None])


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_inverse_rope(target, rng, cache_dtype, position_dtype):
    """The last columns of every head, turned back by each row's position before the scales are taken."""
    m, groups, head_dim, nope_dim = 9, 2, 96, 32
    k, positions = 2 * head_dim, torch.tensor(rng.integers(0, 50, m)).to(position_dtype)
    cache = torch.tensor(rng.uniform(-1, 1, (50, 64))).to(getattr(torch, cache_dtype))
    rope = mxfp8.Rope(head_dim=head_dim, nope_dim=nope_dim, rope_dim=64, cache_dtype=cache_dtype)
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=m, k=k, k_out=256, groups=groups, rope=rope))
    source = rows_of(rng, m, groups * k).view(m, groups, k)
    rows = poisoned(plan)
    launch(plan, source, rows, positions=positions, cos_sin_cache=cache)
    x = numpy_of(source).transpose(1, 0, 2)
    turned = np.stack(
        [golden_inverse_rope(x[g], positions.cpu().numpy(), numpy_of(cache), head_dim, nope_dim) for g in range(groups)]
    )
    check(rows, np.pad(turned, ((0, 0), (0, 0), (0, 256 - k))))


def test_rope_of_tiny_values_gives_zero_blocks(target):
    """Where the largest magnitude over 448 is below every f32, the scale is 127 and no code is -0."""
    x = torch.full((1, 32), -(2.0**-133), dtype=torch.bfloat16)
    cache = torch.full((1, 32), 2.0**-14)
    rope = mxfp8.Rope(head_dim=32, nope_dim=0, rope_dim=32)
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=1, k=32, rope=rope))
    rows = poisoned(plan)
    launch(plan, x, rows, positions=torch.zeros(1, dtype=torch.int32), cos_sin_cache=cache)
    assert not rows.values.view(torch.uint8).any()
    assert rows.scale_rows.tolist() == [[[127]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_boundaries_of_scales(target, dtype):
    """Maxima at 448 * 2^k and their neighbours, every power of two, the smallest and the largest numbers."""
    values = np.arange(2**15, dtype=np.uint16).view(KINDS[dtype]).astype(np.float32)
    finite = np.isfinite(values)
    mantissa = np.frexp(np.where(finite, values, 1))[0]
    beside = {m * (1 + d) for m in (0.5, 0.875) for d in (0, 2.0**-10, 2.0**-8, 2.0**-7, -(2.0**-10), -(2.0**-8))}
    chosen = values[finite & np.isin(mantissa, np.float32([*beside]))]
    edges = np.concatenate([chosen, values[finite][:40], values[finite][-4:]])
    edges = np.resize(edges, -(-len(edges) // 4) * 4)
    x = np.zeros((len(edges) // 4, 128), np.float32)
    x[:, 5::32] = edges.reshape(-1, 4)
    x[:, 7::32] = -edges.reshape(-1, 4) / 2
    source = torch.tensor(x).to(DTYPES[dtype])
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=len(x), k=128, dtype=dtype))
    rows = poisoned(plan)
    launch(plan, source, rows)
    check(rows, numpy_of(source)[None])


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from(list(DTYPES)))
def test_random_bit_patterns(target, seed, dtype):
    """Any finite bf16 or fp16 bit pattern, subnormals included."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**16, (4, 64)).astype(np.uint16)
    bits[~np.isfinite(bits.view(KINDS[dtype]).astype(np.float32))] = 0
    x = torch.tensor(bits.view(np.int16)).view(DTYPES[dtype])
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=4, k=64, dtype=dtype))
    rows = poisoned(plan)
    launch(plan, x, rows)
    check(rows, numpy_of(x)[None])


def test_one_shot(target, rng):
    """``quantize_rows`` takes either form of each output, and scale rows may be left out."""
    x = rows_of(rng, 130, 96)
    wanted_values, linear = golden_quantize(numpy_of(x))
    values = torch.full((130, 96), 0.0).to(torch.float8_e4m3fn)
    for scale_rows in (torch.zeros(130, 3, dtype=torch.uint8), torch.zeros(1, 130, 3, dtype=torch.uint8), None):
        for scale_mma in (
            torch.zeros(scales.storage_bytes(130, 3), dtype=torch.uint8),
            torch.zeros(scales.storage_shape(130, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu),
        ):
            mxfp8.quantize_rows(x, values, scale_rows, scale_mma)
            np.testing.assert_array_equal(values.view(torch.uint8).cpu().numpy(), wanted_values)
            if scale_rows is not None:
                np.testing.assert_array_equal(scale_rows.view(130, 3).cpu().numpy(), linear)
            storage = scale_mma.view(torch.uint8).view(-1).cpu().numpy()
            np.testing.assert_array_equal(storage[swizzled_offsets(1, 130, 3)][0], linear)
    mxfp8.clear_caches()


def test_error_of_a_normal_row(target, rng):
    """What a value loses by being quantised: half a unit in the last place of E4M3, and never by saturation."""
    x = torch.tensor(rng.standard_normal((5, 256)) / 4).to(torch.bfloat16)
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=5, k=256))
    rows = poisoned(plan)
    launch(plan, x, rows)
    scale = rows.scale_rows[0].view(torch.float8_e8m0fnu).double().repeat_interleave(32, dim=1)
    assert ((rows.values.double() * scale - x.double()).abs() < 0.05).all()


def test_bind_once_run_often(target, rng):
    """A binding reads its tensors when it runs."""
    x = rows_of(rng, 5, 64, "float16").to(target.device)
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=8, k=64, dtype="float16"))
    rows = poisoned(plan)
    binding = plan.bind(source=x, values=rows.values, scale_rows=rows.scale_rows, scale_mma=rows.scale_mma)
    for _ in range(2):
        x.neg_()
        mxfp8.run(binding=binding)
        check(rows, numpy_of(x)[None])


def test_outputs_of_a_plan(target):
    """Shapes of the operands of a GEMM, and their text, which holds no values."""
    plan = mxfp8.plan(mxfp8.Caps(device=target.device, m=130, k=160, groups=2))
    rows = mxfp8.allocate_outputs(plan)
    assert (rows.values.shape, rows.values.stride()) == ((130, 160, 2), (160, 1, 130 * 160))
    assert rows.scale_rows.shape == (2, 130, 5)
    assert rows.scale_mma.shape == (32, 4, 2, 4, 2, 2)
    assert rows.values_tiled is None
    assert mxfp8.allocate_outputs(plan, m=7).values.shape == (7, 160, 2)
    device = rows.values.device
    assert repr(rows) == (
        f"MXFP8Rows(values=float8_e4m3fn[130, 160, 2] on {device}, scale_rows=uint8[2, 130, 5] on {device}, "
        f"scale_mma=uint8[32, 4, 2, 4, 2, 2] on {device})"
    )
    assert "quantization.mxfp8:dtype=bfloat16,rope=none" in plan.explain()
