"""``gemm.bmm`` on the chosen target: exact weights, every layout, and its refusals."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import b12x
from b12x._runtime import counters
from b12x.gemm import _bmm, bmm, can_implement_bmm, is_bmm_supported, prewarm_bmm
from b12x.gemm._bmm import planner, reference
from tests.gemm.bmm_data import BF16, check, dequantise, random_rows, random_weights, weights

SPEC = {
    "a_dtype": "bfloat16",
    "b_dtype": "float8_e4m3fn",
    "sf_dtype": "float8_e8m0fnu",
    "c_dtype": "bfloat16",
    "sf_vec_size": 32,
}
MAJORS = ("n", "k")
MS = (1, 7, 8, 9, 16, 17, 40, 130)


def spec(major: str) -> dict:
    return {**SPEC, "b_major": major, "sf_axis": major}


def poisoned(batch: int, m: int, n: int) -> torch.Tensor:
    return torch.full((batch, m, n), float("nan"), dtype=torch.bfloat16)


def multiply(lhs: torch.Tensor, pair: tuple, major: str, n: int) -> torch.Tensor:
    out = poisoned(lhs.shape[0], lhs.shape[1], n)
    assert bmm(lhs, pair, out, **spec(major)) is out
    return out


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(m, (192, 512, 224)[i % 3], (96, 256, 512)[i % 3]) for i, m in enumerate(MS)]
)
def test_products(target, rng, major, m, k, n):
    w = random_weights(rng, 2, k, n, major)
    lhs = random_rows(rng, 2, m, k)
    check(multiply(lhs, w.pair, major, n), lhs, w.matrix(major))


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize(
    ("major", "k", "n"), [("n", 16, 32), ("n", 80, 352), ("k", 32, 8), ("k", 96, 13), ("k", 160, 201)]
)
def test_smallest_and_ragged_sizes(target, rng, m, major, k, n):
    w = random_weights(rng, 1, k, n, major)
    lhs = random_rows(rng, 1, m, k)
    check(multiply(lhs, w.pair, major, n), lhs, w.matrix(major))


@pytest.mark.parametrize("m", [4, 20])
@pytest.mark.parametrize("major", MAJORS)
def test_one_hot_rows_read_weights_bitwise(target, major, m):
    """All finite codes under E8M0 bytes 0, 1, 254 and others. Where a product is infinite, other rows of its column
    are NaN, so those are one-hot at that place."""
    k, n = 64, 256
    shape = (1, k, n) if major == "n" else (1, n, k)
    rows, width = shape[1:]
    codes = (np.arange(rows)[:, None] * 3 + np.arange(width) * 7).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scales = np.array([0, 1, 2, 60, 127, 200, 240], np.uint8)[np.arange(rows * width // 32) % 7].reshape(rows, -1)
    hot = np.arange(m) * 13 % k
    overflowing = hot[1]
    if major == "n":
        scales[overflowing] = 254
    else:
        scales[5, overflowing // 32] = 254
        block = slice(overflowing // 32 * 32, overflowing // 32 * 32 + 32)
        codes[5, block] = 0x05
        codes[5, overflowing] = 0x7E
    w = weights(codes[None], scales[None])
    lhs = torch.zeros(1, m, k, dtype=torch.bfloat16)
    lhs[0, torch.arange(m), torch.tensor(hot)] = 1
    found = multiply(lhs, w.pair, major, n)[0].cpu().double().numpy()
    matrix = w.matrix(major)[0]
    infinite = np.isinf(matrix[overflowing])
    assert infinite.any()
    np.testing.assert_array_equal(found[:, ~infinite], matrix[hot][:, ~infinite])
    np.testing.assert_array_equal(found[1], matrix[overflowing])
    assert np.isnan(found[np.ix_(hot != overflowing, infinite)]).all()
    assert 0 < np.nanmin(np.where(found == 0, np.nan, np.abs(found))) < 2.0**-126


@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("major", MAJORS)
def test_nan_codes_and_scales_reach_their_columns_only(target, rng, major, m):
    k, n = 64, 64
    w = random_weights(rng, 1, k, n, major)
    if major == "n":
        w.scales[0, 17, 1] = 255
        wanted = np.arange(n) >= 32
    else:
        w.scales[0, 17, 1] = 255
        wanted = np.arange(n) == 17
    codes = w.values.view(torch.uint8)
    codes[0, 3, 5] = 0xFF
    wanted[5 if major == "n" else 3] = True
    out = multiply(random_rows(rng, 1, m, k), w.pair, major, n)[0].cpu()
    assert (out.isnan().numpy() == wanted).all()


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("infinite", ["token", "weight"])
def test_infinity_at_a_ragged_end_of_k_stays_infinite(target, m, infinite):
    """What stands in for k past the end is zero on both sides: no infinity is multiplied by it."""
    k, n = 96, 16
    codes, scale_codes = np.full((1, n, k), 0x38, np.uint8), np.full((1, n, k // 32), 127, np.uint8)
    lhs = torch.ones(1, m, k, dtype=torch.bfloat16)
    if infinite == "token":
        lhs[..., -16:] = float("inf")
    else:
        codes[..., -16:], scale_codes[..., -1] = 0x7E, 254
    w = weights(codes, scale_codes)
    assert (multiply(lhs, w.pair, "k", n) == float("inf")).all()


@pytest.mark.parametrize("m", [5, 33])
@pytest.mark.parametrize("major", MAJORS)
def test_layouts(target, rng, major, m):
    """Outputs transposed, with pitches that are even, odd, or start at an odd element; scales as float8_e8m0fnu."""
    batch, k, n = 3, 96, 160
    w = random_weights(rng, batch, k, n, major)
    lhs = random_rows(rng, m, batch, k).transpose(0, 1)
    plain = multiply(lhs, w.pair, major, n)
    check(plain, lhs, w.matrix(major))
    for pitch, first in ((n, 0), (n + 8, 0), (n + 3, 0), (n + 8, 1)):
        for order in ((0, 1), (1, 0)):
            extents = (batch, m) if order == (0, 1) else (m, batch)
            buffer = torch.full((extents[0] * extents[1] * pitch + 8,), float("nan"), dtype=torch.bfloat16)
            storage = buffer[first : first + extents[0] * extents[1] * pitch].view(*extents, pitch)
            out = storage[..., :n].permute(*order, 2)
            bmm(lhs, (w.values, w.scales.view(torch.float8_e8m0fnu)), out, **spec(major))
            assert torch.equal(out, plain)
            assert storage[..., n:].isnan().all()
            assert buffer[:first].isnan().all()
            assert buffer[first + storage.numel() :].isnan().all()


@pytest.mark.parametrize("m", [8, 24])
def test_slices_of_one_pack(target, rng, m):
    """Both projections of latent attention from one ``[B * 448, 512]`` pack, nothing copied."""
    heads = 2
    codes = rng.integers(0, 0x7F, (heads * 448, 512)).astype(np.uint8)
    scale_codes = rng.integers(122, 130, (heads * 448, 16)).astype(np.uint8)
    pack = torch.tensor(codes).view(torch.float8_e4m3fn).view(heads, 448, 512)
    scales = torch.tensor(scale_codes).view(heads, 448, 16)
    exact = dequantise(codes, scale_codes).reshape(heads, 448, 512)
    q = random_rows(rng, heads, m, 192)
    check(multiply(q, (pack[:, :192], scales[:, :192]), "n", 512), q, exact[:, :192])
    latent = random_rows(rng, heads, m, 512)
    found = multiply(latent, (pack[:, 192:], scales[:, 192:]), "k", 256)
    check(found, latent, exact[:, 192:].transpose(0, 2, 1))


@pytest.mark.parametrize("major", MAJORS)
def test_a_row_depends_on_neither_m_nor_its_place(target, rng, major):
    """Bitwise, within the rows that one kernel serves; and runs repeat."""
    k, n = 224, 96
    w = random_weights(rng, 1, k, n, major)
    lhs = random_rows(rng, 1, 70, k)
    for counts in ((1, 5, 8, 13, 16), (17, 40, 64, 70)):
        whole = multiply(lhs[:, : counts[-1]], w.pair, major, n)
        assert torch.equal(whole, multiply(lhs[:, : counts[-1]], w.pair, major, n))
        for m in counts:
            part = multiply(lhs[:, counts[-1] - m : counts[-1]].contiguous(), w.pair, major, n)
            assert torch.equal(part, whole[:, counts[-1] - m :])


def test_no_rows(target, rng):
    w = random_weights(rng, 1, 32, 32, "n")
    before = counters.launches.copy()
    out = multiply(torch.zeros(1, 0, 32, dtype=torch.bfloat16), w.pair, "n", 32)
    assert out.shape == (1, 0, 32)
    assert counters.launches == before


def test_plan_bind_run(target, rng):
    """A binding is launched again after its operands changed; every M is served by what the plan listed."""
    w = random_weights(rng, 2, 64, 96, "n")
    plan = _bmm.plan(_bmm.Caps(device=target.device, batch=2, max_m=40, n=96, k=64, b_major="n", sf_axis="n"))
    assert set(plan.kernels) == {"decode", "prefill"}
    assert plan.explain().count("gemm.bmm:") >= 2
    for m in (1, 16, 17, 40):
        lhs, out = random_rows(rng, 2, m, 64), poisoned(2, m, 96)
        binding = plan.bind(lhs=lhs, rhs=w.pair, out=out)
        assert _bmm.run(binding=binding) is out
        check(out, lhs, w.exact)
        lhs *= 2
        _bmm.run(binding=binding)
        check(out, lhs, w.exact)
        assert repr(binding).startswith("Binding(launch=")


def test_m_is_in_no_key(target, rng):
    """Frozen after a prewarm: every M is served."""
    w = random_weights(rng, 2, 64, 96, "k")
    b12x.clear_all_caches()
    assert prewarm_bmm(w.pair, [1, 2, 16], **spec("k")) == 1
    assert prewarm_bmm(w.pair, range(1, 33), **spec("k")) == 2
    with pytest.raises(TypeError, match="m_values is 3, a int; needed are several ints: pass a tuple"):
        prewarm_bmm(w.pair, 3, **spec("k"))
    resolved = counters.compiles
    b12x.freeze_kernel_resolution("test")
    try:
        for m in (1, 2, 31, 200):
            multiply(random_rows(rng, 2, m, 64), w.pair, "k", 96)
    finally:
        b12x.unfreeze_kernel_resolution()
    assert counters.compiles == resolved


def test_functions_of_the_group() -> None:
    assert inspect.isfunction(b12x.gemm.bmm)
    for name in ("bmm", "prewarm_bmm", "can_implement_bmm", "is_bmm_supported"):
        assert getattr(b12x.gemm, name) is getattr(_bmm, name)
    assert b12x.find_op("gemm.bmm") is _bmm.META
    assert b12x.find_op("gemm.bmm").module == "b12x.gemm._bmm"
    for name in ("Binding", "Caps", "Plan", "bind", "plan", "run"):
        assert getattr(bmm, name) is getattr(_bmm, name)


def test_can_implement(target) -> None:
    assert is_bmm_supported(target.device)
    good = {"batch": 11, "max_m": 4096, "n": 96, "k": 224, **spec("n"), "device": target.device}
    assert can_implement_bmm(**good)
    assert can_implement_bmm(**good | {"a_dtype": torch.bfloat16})
    for change in (
        {"n": 80},
        {"k": 200},
        {"a_dtype": "float16"},
        {"c_dtype": "float32"},
        {"sf_vec_size": 16},
        {"sf_axis": "k"},
        {"b_major": "m"},
        {"batch": 70000},
        {"max_m": 0},
    ):
        assert not can_implement_bmm(**good | change)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"a_dtype": "float16"}, NotImplementedError, ["a_dtype is 'float16'", "'bfloat16' only", "convert"]),
        ({"b_dtype": "float8_e5m2"}, NotImplementedError, ["b_dtype is 'float8_e5m2'", "float8_e4m3fn"]),
        ({"sf_dtype": "float32"}, NotImplementedError, ["sf_dtype is 'float32'", "float8_e8m0fnu"]),
        ({"c_dtype": "float16"}, NotImplementedError, ["c_dtype is 'float16'", "bfloat16"]),
        ({"sf_vec_size": 16}, NotImplementedError, ["sf_vec_size is 16", "32 only"]),
        ({"sf_axis": "n", "b_major": "k"}, NotImplementedError, ["sf_axis is 'n' with b_major 'k'", "pack"]),
        ({"b_major": "x"}, ValueError, ["b_major is 'x'", "'n' or 'k'"]),
        ({"n": 80}, ValueError, ["n is 80", "multiple of 32", "n-major", "pad"]),
        ({"k": 40}, ValueError, ["k is 40", "multiple of 16", "pad"]),
        ({"b_major": "k", "sf_axis": "k", "k": 48}, ValueError, ["k is 48", "multiple of 32", "k-major"]),
        ({"b_major": "k", "sf_axis": "k", "n": 7}, ValueError, ["n is 7", "8 to"]),
        ({"batch": 65536}, ValueError, ["batch is 65536", "65535", "split"]),
        ({"max_m": 0}, ValueError, ["max_m is 0", "1 to"]),
        ({"n": 96.0}, TypeError, ["n is 96.0, a float", "int"]),
    ],
)
def test_plan_refusals(change, error, words):
    with pytest.raises(error) as caught:
        _bmm.Caps(**{"batch": 2, "max_m": 8, "n": 96, "k": 64, **spec("n")} | change)
    assert all(word in str(caught.value) for word in ["gemm.bmm", *words])


def _refused(lhs: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> dict:
    """Arguments of ``bmm`` by the name of what is wrong with them."""
    wide = torch.zeros(2, 4, 68, dtype=torch.bfloat16)
    return {
        "pair": (lhs, values, out),
        "lhs dtype": (lhs.half(), (values, scales), out),
        "lhs shape": (lhs[:, :, :32].contiguous(), (values, scales), out),
        "lhs stride": (wide[..., :64], (values, scales), out),
        "lhs inner": (torch.zeros(2, 64, 4, dtype=torch.bfloat16).transpose(1, 2), (values, scales), out),
        "lhs pointer": (torch.zeros(2 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 4, 64), (values, scales), out),
        "values dtype": (lhs, (values.view(torch.uint8), scales), out),
        "values rank": (lhs, (values[0], scales), out),
        "values list": (lhs, ([1.0], scales), out),
        "scales dtype": (lhs, (values, scales.view(torch.int8)), out),
        "scales shape": (lhs, (values, scales[:, :, :1]), out),
        "out shape": (lhs, (values, scales), out[:, :3]),
        "out dtype": (lhs, (values, scales), out.float()),
        "out broadcast": (lhs, (values, scales), out[:1].expand(2, 4, 96)),
        "out interleaved": (lhs, (values, scales), out.as_strided((2, 4, 96), (96, 96, 1))),
        "out over lhs": (lhs, (values, scales), lhs.view(-1)[:384].as_strided((2, 4, 96), (0, 0, 1))),
        "overlap": (lhs.new_zeros(1024)[:512].view(2, 4, 64), (values, scales), None),
        "meta": (lhs.to("meta"), (values, scales), out),
    }


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("pair", TypeError, ["rhs is a Tensor", "(values, scales)"]),
        ("lhs dtype", TypeError, ["lhs", "float16", "bfloat16"]),
        ("lhs shape", ValueError, ["lhs", "(2, 4, 32)", "(2, any, 64)"]),
        ("lhs stride", ValueError, ["lhs", "(272, 68, 1)", "multiples of 8"]),
        ("lhs inner", ValueError, ["lhs", "strides", "copy it"]),
        ("lhs pointer", ValueError, ["lhs", "multiple of 16"]),
        ("values dtype", TypeError, ["rhs values", "uint8", "float8_e4m3fn"]),
        ("values rank", ValueError, ["rhs values", "(64, 96)", "reshape"]),
        ("values list", TypeError, ["rhs values", "list", "tensor"]),
        ("scales dtype", TypeError, ["rhs scales", "int8", "uint8 or float8_e8m0fnu"]),
        ("scales shape", ValueError, ["rhs scales", "(2, 64, 1)", "(2, 64, 3)"]),
        ("out shape", ValueError, ["out", "(2, 3, 96)", "(2, 4, 96)"]),
        ("out dtype", TypeError, ["out", "float32", "bfloat16"]),
        ("out broadcast", ValueError, ["out", "(0, 96, 1)", "overlap"]),
        ("out interleaved", ValueError, ["out", "(96, 96, 1)", "overlap"]),
        ("out over lhs", ValueError, ["out", "(0, 0, 1)", "overlap"]),
        ("meta", ValueError, ["lhs is on meta"]),
    ],
)
def test_refusals(target, what, error, words):
    lhs = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    values = torch.zeros(2, 64, 96, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales, out = torch.zeros(2, 64, 3, dtype=torch.uint8), poisoned(2, 4, 96)
    arguments = _refused(lhs, values, scales, out)[what]
    with pytest.raises(error) as caught:
        bmm(*arguments, **spec("n"))
    assert all(word in str(caught.value) for word in ["gemm.bmm", *words])


def test_refuses_overlap_capacity_and_other_bindings(target):
    buffer = torch.zeros(2048, dtype=torch.bfloat16)
    values = torch.zeros(2, 64, 96, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pair = (values, torch.zeros(2, 64, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"out and lhs overlap.*pass a copy"):
        bmm(buffer[:512].view(2, 4, 64), pair, buffer[504 : 504 + 768].view(2, 4, 96), **spec("n"))
    plan = _bmm.plan(_bmm.Caps(device=target.device, batch=2, max_m=4, n=96, k=64, b_major="n", sf_axis="n"))
    with pytest.raises(ValueError, match="5 rows, more than the plan's max_m = 4"):
        plan.bind(lhs=torch.zeros(2, 5, 64, dtype=torch.bfloat16), rhs=pair, out=poisoned(2, 5, 96))
    with pytest.raises(TypeError, match="binding is a int; needed is a Binding"):
        _bmm.run(binding=1)


@pytest.mark.parametrize("m", range(1, 301))
def test_every_m_has_one_kernel(m):
    """The choice, and a grid that covers every row and column once."""
    roles = {role.name: role for role in planner.roles(planner.Caps(batch=3, max_m=m, n=160, k=64))}
    chosen = roles[planner.choose(m)].candidates[0]
    rows, columns, batch = planner.grid(chosen, 3, m, 160)
    assert (rows - 1) * chosen.tokens < m <= rows * chosen.tokens
    assert (columns - 1) * chosen.tile_n < 160 <= columns * chosen.tile_n
    assert batch == 3


def test_reference_is_the_contract():
    """Every code under every scale, against ml_dtypes."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    np.testing.assert_array_equal(reference.dequantise(codes, scales), dequantise(codes, scales))
    x = np.linspace(-500, 500, 4001).astype(BF16).astype(np.float32)
    wanted = torch.tensor(x).mul(torch.tensor(1 / np.float32(0.7))).clamp(-448, 448).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(reference.quantise(x, 0.7), wanted.view(torch.uint8).cpu().numpy())
