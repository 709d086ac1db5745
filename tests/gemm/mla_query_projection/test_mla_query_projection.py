"""``gemm.mla_query_projection`` on the chosen target: the same bits as ``gemm.bmm`` and torch, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import b12x
from b12x._runtime import counters
from b12x.gemm import bmm, mla_query_projection
from b12x.gemm.mla_query_projection import Caps
from tests.gemm.bmm_data import check, random_rows, random_weights

OUTPUTS = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
MS = (1, 7, 8, 9, 16, 17, 40, 130)


def quantised(x: torch.Tensor, q_scale: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes of bf16 values, as torch computes them."""
    codes = (x.float() * (1.0 / q_scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8)


def expected(nope: torch.Tensor, q_pe: torch.Tensor, q_scale: torch.Tensor | None) -> torch.Tensor:
    """Bytes of ``[M, H, N + R]`` from the product ``[H, M, N]`` in bf16."""
    joined = torch.cat([nope.transpose(0, 1), q_pe], dim=2)
    return joined.contiguous().view(torch.uint8) if q_scale is None else quantised(joined, q_scale)


def output(m: int, heads: int, width: int, dtype: str, pad: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned ``out`` with pitched rows, and the storage around it as bytes."""
    itemsize = OUTPUTS[dtype].itemsize
    storage = torch.full((m, heads, (width + pad) * itemsize), 0x7F, dtype=torch.uint8)
    return storage.view(OUTPUTS[dtype])[..., :width], storage


def taken(out: torch.Tensor) -> torch.Tensor:
    return out.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(m, (192, 512, 224)[i % 3], (512, 256, 96)[i % 3]) for i, m in enumerate(MS)]
)
def test_mxfp8_is_bmm_cat_and_quantise(target, rng, dtype, m, k, n):
    """Bitwise; the output is pitched (584 columns for 512 + 64), and nothing else is written."""
    heads, rope = 2, 64
    w = random_weights(rng, heads, k, n, "n")
    q_nope, q_pe = random_rows(rng, heads, m, k), random_rows(rng, m, heads, rope)
    nope = torch.empty(heads, m, n, dtype=torch.bfloat16)
    static = {"a_dtype": "bfloat16", "b_dtype": "float8_e4m3fn", "sf_dtype": "float8_e8m0fnu", "c_dtype": "bfloat16"}
    bmm(q_nope, w.pair, nope, **static, sf_vec_size=32, b_major="n", sf_axis="n")
    check(nope, q_nope, w.exact)
    q_scale = torch.tensor([float(nope.float().abs().max()) / 300]) if dtype == "float8_e4m3fn" else None
    out, storage = output(m, heads, n + rope, dtype)
    assert mla_query_projection.run(q_nope, w.pair, q_pe, out, q_scale=q_scale) is out
    assert torch.equal(taken(out), expected(nope, q_pe, q_scale))
    assert (storage[..., (n + rope) * out.itemsize :] == 0x7F).all()


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize(
    ("heads", "m", "k", "n"), [(11, 3, 192, 64), (2, 16, 80, 520), (2, 40, 224, 136), (1, 70, 16, 8)]
)
def test_bf16_weights(target, rng, dtype, heads, m, k, n):
    weight, rope = random_rows(rng, heads, k, n), 10
    q_nope, q_pe = random_rows(rng, heads, m, k), random_rows(rng, m, heads, rope)
    out, _ = output(m, heads, n + rope, "bfloat16")
    mla_query_projection.run(q_nope, weight, q_pe, out)
    check(out[..., :n].transpose(0, 1), q_nope, weight.cpu().double().numpy())
    assert torch.equal(out[..., n:], q_pe)
    if dtype == "float8_e4m3fn":
        q_scale = torch.tensor([0.021])
        codes, _ = output(m, heads, n + rope, dtype)
        mla_query_projection.run(q_nope, weight, q_pe, codes, q_scale=q_scale)
        assert torch.equal(taken(codes), quantised(out, q_scale))


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("m", [5, 20])
@pytest.mark.parametrize("pad", [0, 2, 8])
def test_layouts(target, rng, dtype, m, pad):
    """q_nope as a transposed view, q_pe as a slice, pitches that are a multiple of two elements only."""
    heads, k, n, rope = 3, 96, 64, 6
    w = random_weights(rng, heads, k, n, "n")
    q = random_rows(rng, m, heads, k + rope + 2)[..., : k + rope]
    q_nope, q_pe = random_rows(rng, m, heads, k).transpose(0, 1), q[..., k:]
    q_scale = torch.tensor([3.0]) if dtype == "float8_e4m3fn" else None
    plain, _ = output(m, heads, n + rope, dtype, 8)
    mla_query_projection.run(q_nope.contiguous(), w.pair, q_pe.contiguous(), plain, q_scale=q_scale)
    out, storage = output(m, heads, n + rope, dtype, pad)
    mla_query_projection.run(q_nope, w.pair, q_pe, out, q_scale=q_scale)
    assert torch.equal(taken(out), taken(plain))
    assert (storage[..., (n + rope) * out.itemsize :] == 0x7F).all()


def test_q_scale_is_read_when_the_kernel_runs(target, rng):
    w = random_weights(rng, 1, 32, 32, "n")
    q_nope, q_pe = random_rows(rng, 1, 4, 32), random_rows(rng, 4, 1, 8)
    caps = {"num_heads": 1, "nope_dim": 32, "latent_dim": 32}
    plain = torch.empty(4, 1, 40, dtype=torch.bfloat16)
    mla_query_projection.run(q_nope, w.pair, q_pe, plain)
    plan = mla_query_projection.plan(Caps(device=target.device, max_m=4, output_dtype="float8_e4m3fn", **caps))
    assert set(plan.kernels) == {"decode"}
    assert "decode" in plan.explain()
    q_scale = torch.tensor([1.0])
    out = torch.empty(4, 1, 40, dtype=torch.float8_e4m3fn)
    binding = plan.bind(q_nope=q_nope, weight=w.pair, q_pe=q_pe, out=out, q_scale=q_scale)
    for value in (1.0, 0.3, 1e-3, 40.0):
        q_scale.fill_(value)
        assert mla_query_projection.run(binding=binding) is out
        assert torch.equal(taken(out), quantised(plain, q_scale))
    assert repr(binding).startswith("Binding(launch=")


def test_saturation_and_specials(target):
    """Values beyond 448 * q_scale stop there, infinities too; NaN stays NaN; -0 keeps its sign."""
    weight = torch.zeros(1, 16, 8, dtype=torch.bfloat16)
    weight[0, 0, :4] = torch.tensor([1e30, -1e30, 448.0, -0.0], dtype=torch.bfloat16)
    q_nope = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    q_nope[0, 0, 0] = 1
    q_pe = torch.tensor([[[float("inf"), -float("inf"), float("nan"), -0.0]]], dtype=torch.bfloat16)
    out = torch.empty(1, 1, 12, dtype=torch.float8_e4m3fn)
    mla_query_projection.run(q_nope, weight, q_pe, out, q_scale=torch.tensor([0.5]))
    codes = taken(out).flatten().tolist()
    assert codes[:3] == [0x7E, 0xFE, 0x7E]
    assert codes[8:10] == [0x7E, 0xFE]
    assert codes[10] & 0x7F == 0x7F
    assert codes[11] == 0x80


def test_no_rope_and_no_rows(target, rng):
    w = random_weights(rng, 1, 32, 32, "n")
    q_nope = random_rows(rng, 1, 3, 32)
    out = torch.empty(3, 1, 32, dtype=torch.bfloat16)
    mla_query_projection.run(q_nope, w.pair, torch.empty(3, 1, 0, dtype=torch.bfloat16), out)
    check(out.transpose(0, 1), q_nope, w.exact)
    before = counters.launches.copy()
    empty = torch.empty(0, 1, 40, dtype=torch.bfloat16)
    mla_query_projection.run(q_nope[:, :0], w.pair, torch.empty(0, 1, 8, dtype=torch.bfloat16), empty)
    assert counters.launches == before


def test_m_is_in_no_key(target, rng):
    w = random_weights(rng, 1, 32, 32, "n")
    b12x.clear_all_caches()
    for dtype in ("bfloat16", torch.float8_e4m3fn):
        assert mla_query_projection.prewarm(w.pair, range(1, 33), output_dtype=dtype) == 2
    assert mla_query_projection.prewarm(w.pair, [3], output_dtype="bfloat16", synchronize=False) == 1
    b12x.freeze_kernel_resolution("test")
    try:
        for m in (1, 2, 31, 90):
            out = torch.empty(m, 1, 40, dtype=torch.bfloat16)
            mla_query_projection.run(random_rows(rng, 1, m, 32), w.pair, random_rows(rng, m, 1, 8), out)
    finally:
        b12x.unfreeze_kernel_resolution()


def test_can_implement(target):
    good = {"num_heads": 11, "max_m": 500, "nope_dim": 192, "latent_dim": 512, "output_dtype": torch.bfloat16}
    good["device"] = target.device
    assert mla_query_projection.can_implement(**good)
    assert mla_query_projection.can_implement(**good | {"latent_dim": 520, "weight_format": "bfloat16"})
    for name in ("bf16", "bfloat16"):
        assert mla_query_projection.can_implement(**good | {"weight_format": name})
        assert Caps(**good | {"output_dtype": "bfloat16", "weight_format": name}).weight_format == "bfloat16"
    with pytest.raises(TypeError, match="m_values is 3, a int; needed are several ints"):
        mla_query_projection.prewarm(torch.zeros(1, 16, 8), 3, output_dtype="bfloat16")
    for change in (
        {"latent_dim": 520},
        {"nope_dim": 200},
        {"output_dtype": "float16"},
        {"weight_format": "nvfp4"},
        {"num_heads": 0},
    ):
        assert not mla_query_projection.can_implement(**good | change)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"output_dtype": "float16"}, NotImplementedError, ["output_dtype is 'float16'", "bfloat16 or float8_e4m3fn"]),
        ({"weight_format": "nvfp4"}, NotImplementedError, ["weight_format is 'nvfp4'", "mxfp8 or bfloat16"]),
        ({"latent_dim": 48}, ValueError, ["latent_dim is 48", "multiple of 32", "pad"]),
        ({"latent_dim": 12, "weight_format": "bfloat16"}, ValueError, ["latent_dim is 12", "multiple of 8"]),
        ({"nope_dim": 24}, ValueError, ["nope_dim is 24", "multiple of 16"]),
        ({"num_heads": 70000}, ValueError, ["num_heads is 70000", "65535"]),
    ],
)
def test_plan_refusals(change, error, words):
    caps = {"num_heads": 2, "max_m": 8, "nope_dim": 32, "latent_dim": 64, "output_dtype": "bfloat16"}
    with pytest.raises(error) as caught:
        Caps(**caps | change)
    assert all(word in str(caught.value) for word in ["gemm.mla_query_projection", *words])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda: {"q_scale": None}, TypeError, ["q_scale is missing", "float32"]),
        (lambda: {"q_scale": torch.ones(2)}, ValueError, ["q_scale", "(2,)", "(1,)"]),
        (lambda: {"q_scale": torch.ones(1).double()}, TypeError, ["q_scale", "float64"]),
        (
            lambda: {"q_nope": torch.zeros(2, 4, 36, dtype=torch.bfloat16)[..., :32]},
            ValueError,
            ["q_nope", "multiples of 8"],
        ),
        (lambda: {"q_nope": None}, TypeError, ["either binding, or all of q_nope, weight, q_pe and out"]),
        (
            lambda: {"q_pe": torch.zeros(4, 2, 7, dtype=torch.bfloat16)},
            ValueError,
            ["q_pe", "strides", "multiples of 2"],
        ),
        (
            lambda: {"q_pe": torch.zeros(4, 2, 8, dtype=torch.bfloat16)[..., :7]},
            ValueError,
            ["q_pe has 7 columns", "even"],
        ),
        (
            lambda: {"q_pe": torch.zeros(2, 4, 8, dtype=torch.bfloat16)},
            ValueError,
            ["q_pe", "(2, 4, 8)", "(4, 2, any)"],
        ),
        (lambda: {"q_pe": torch.zeros(4, 2, 9, dtype=torch.bfloat16)[..., 1:]}, ValueError, ["q_pe", "multiples of 2"]),
        (
            lambda: {"out": torch.zeros(4, 2, 40, dtype=torch.float16)},
            NotImplementedError,
            ["output_dtype is 'float16'"],
        ),
        (lambda: {"out": [1.0]}, NotImplementedError, ["output_dtype"]),
        (
            lambda: {"out": torch.zeros(4, 2, 41, dtype=torch.uint8)[..., :40].view(torch.float8_e4m3fn)},
            ValueError,
            ["out", "of 2"],
        ),
        (
            lambda: {"out": torch.zeros(4, 2, 38, dtype=torch.uint8).view(torch.float8_e4m3fn)},
            ValueError,
            ["out", "(4, 2, 40)"],
        ),
        (lambda: {"weight": torch.zeros(2, 32, 32)}, TypeError, ["weight", "float32", "bfloat16"]),
        (
            lambda: {"weight": torch.zeros(32, 32, dtype=torch.bfloat16)},
            ValueError,
            ["weight", "(32, 32)", "[H, K, N]"],
        ),
        (lambda: {"weight": (torch.zeros(2, 32, 32), torch.zeros(2, 32, 1))}, TypeError, ["weight values", "float32"]),
        (lambda: {"weight": (torch.zeros(2, 32, 32),)}, TypeError, ["weight is a tuple of 1", "(values, scales)"]),
        (lambda: {"weight": 3}, TypeError, ["weight", "int"]),
    ],
)
def test_refusals(target, change, error, words):
    arguments = {
        "q_nope": torch.zeros(2, 4, 32, dtype=torch.bfloat16),
        "weight": torch.zeros(2, 32, 32, dtype=torch.bfloat16),
        "q_pe": torch.zeros(4, 2, 8, dtype=torch.bfloat16),
        "out": torch.zeros(4, 2, 40, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "q_scale": torch.ones(1),
    } | change()
    with pytest.raises(error) as caught:
        mla_query_projection.run(**arguments)
    assert all(word in str(caught.value) for word in ["gemm.mla_query_projection", *words])


def test_refuses_overlap_capacity_and_two_forms(target):
    weight = torch.zeros(1, 32, 32, dtype=torch.bfloat16)
    buffer = torch.zeros(1024, dtype=torch.bfloat16)
    q_nope, q_pe, out = buffer[:128].view(1, 4, 32), torch.zeros(4, 1, 8, dtype=torch.bfloat16), buffer[112:272]
    with pytest.raises(ValueError, match="out and q_nope overlap"):
        mla_query_projection.run(q_nope, weight, q_pe, out.view(4, 1, 40))
    caps = {"num_heads": 1, "nope_dim": 32, "latent_dim": 32, "output_dtype": "bfloat16", "weight_format": "bfloat16"}
    plan = mla_query_projection.plan(Caps(device=target.device, max_m=3, **caps))
    out = torch.zeros(4, 1, 40, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="4 rows, more than the plan's max_m = 3"):
        plan.bind(q_nope=q_nope, weight=weight, q_pe=q_pe, out=out)
    with pytest.raises(ValueError, match="already holds"):
        mla_query_projection.run(q_nope, weight, q_pe, out, binding=mla_query_projection.Binding(None, out))
    with pytest.raises(TypeError, match="binding is a int; needed is a Binding"):
        mla_query_projection.run(binding=1)


def test_rows_and_positions(target, rng):
    """A row depends on neither M nor its place; runs repeat."""
    w = random_weights(rng, 1, 208, 64, "n")
    q_nope, q_pe = random_rows(rng, 1, 40, 208), random_rows(rng, 40, 1, 8)
    for whole, part in ((16, 5), (40, 17)):
        outs = [torch.empty(m, 1, 72, dtype=torch.bfloat16) for m in (whole, whole, part)]
        for out in outs:
            rows = slice(whole - len(out), whole)
            mla_query_projection.run(q_nope[:, rows].contiguous(), w.pair, q_pe[rows], out)
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0][whole - part :], outs[2])
        assert np.isfinite(outs[0].float().cpu().numpy()).all()
