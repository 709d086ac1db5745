"""``gemm.tensor_fp8_linear`` on the chosen target against float64, judged element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import b12x
from b12x._runtime import counters
from b12x.gemm import blockscaled, tensor_fp8_linear
from tests.gemm import linear_data as data

TOKENS = [1, 2, 3, 8, 9, 15, 16, 17, 32, 99]
E4M3 = torch.float8_e4m3fn
SCALE = 0.0137


def make(rng, n: int, k: int, distribution: str = "normal") -> tuple[tensor_fp8_linear.Weight, np.ndarray]:
    """A packed weight, and its float64 values."""
    codes = data.weight_codes(rng, n, k, distribution)
    return tensor_fp8_linear.pack_weight(data.as_weight(codes), torch.tensor([SCALE])), data.from_e4m3(codes)


def inputs(rng, shape: tuple[int, ...], distribution: str = "normal") -> torch.Tensor:
    x = data.activations(rng, shape, distribution, "bfloat16").float().cpu().numpy()
    return torch.tensor(data.to_e4m3(16 * x)).view(E4M3)


def check(y: torch.Tensor, x: torch.Tensor, w: np.ndarray, dtype: str, bias: torch.Tensor | None = None) -> None:
    term = None if bias is None else bias.double().cpu().numpy()
    rows = x.double().cpu().numpy().reshape(-1, w.shape[1])
    data.check(y.reshape(-1, len(w)), *data.tolerance(rows, w, dtype, float(np.float32(SCALE)), term))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("n", "k", "dtype"), [(132, 256, "bfloat16"), (48, 160, "bfloat16"), (136, 192, "float16")])
def test_token_counts(target, rng, tokens, n, k, dtype):
    """Every regime, with bias, N whose rows are not 16-byte aligned, and K that is no multiple of a tile."""
    weight, w = make(rng, n, k)
    x = inputs(rng, (tokens, k))
    bias = torch.tensor(rng.standard_normal(n)).to(data.DTYPES[dtype])
    y = tensor_fp8_linear.mm(x, weight, bias=bias, out_dtype=data.DTYPES[dtype], expected_m=tokens)
    assert y.dtype == data.DTYPES[dtype]
    check(y, x, w, dtype, bias)


@pytest.mark.parametrize("distribution", data.DISTRIBUTIONS)
@pytest.mark.parametrize(("tokens", "n", "k"), [(5, 8, 512), (33, 136, 384), (70, 200, 416)])
def test_distributions(target, rng, distribution, tokens, n, k):
    weight, w = make(rng, n, k, distribution)
    x = inputs(rng, (tokens, k), distribution)
    check(tensor_fp8_linear.mm(x, weight), x, w, "bfloat16")


@pytest.mark.parametrize("k", [160, 256])
def test_one_hot_rows_read_the_weight_back(target, rng, k):
    codes = data.weight_codes(rng, 48, k)
    weight = tensor_fp8_linear.pack_weight(data.as_weight(codes), torch.tensor([0.5]))
    y = tensor_fp8_linear.mm(torch.eye(k).to(E4M3), weight)
    np.testing.assert_array_equal(y.double().cpu().numpy(), 0.5 * data.from_e4m3(codes).T)


@pytest.mark.parametrize("tokens", [3, 40])
def test_scale_storage_is_not_read(target, rng, tokens):
    weight, w = make(rng, 72, 256)
    weight.scale_mma.fill_(0xFF)
    x = inputs(rng, (tokens, 256))
    check(tensor_fp8_linear.mm(x, weight), x, w, "bfloat16")


@pytest.mark.parametrize("tokens", [3, 40, 70])
def test_rows_end_where_they_end(target, rng, tokens):
    """With K = 160, rows of NaN above and below a row, and between rows, leave it as it is."""
    weight, w = make(rng, 40, 160)
    x = inputs(rng, (tokens, 160))
    wide = torch.full((tokens, 176), 0x7F, dtype=torch.uint8)
    wide[::2, :160] = x[::2].view(torch.uint8)
    y = tensor_fp8_linear.mm(wide.view(E4M3)[:, :160], weight)
    check(y[::2], x[::2], w, "bfloat16")
    assert y[1::2].isnan().all()


@pytest.mark.parametrize("tokens", [5, 40])
def test_scale_is_read_at_run_time(target, rng, tokens):
    for k in (128, 160):
        weight, _ = make(rng, 24, k)
        plan = planned(target, 40, 24, k)
        output, _ = data.guarded(tokens, 24, "bfloat16")
        binding = plan.bind(source=inputs(rng, (tokens, k)), packed_weight=weight, output=output)
        first = tensor_fp8_linear.run(binding=binding).clone()
        weight.output_scale.mul_(2)
        assert torch.equal(tensor_fp8_linear.run(binding=binding), 2 * first)


def test_equals_its_part(target, rng):
    """Bit for bit what the GEMM gives, so no option is lost on the way."""
    weight, _ = make(rng, 72, 256)
    bias = torch.tensor(rng.standard_normal(72)).half()
    for tokens in (3, 20, 70):
        x = inputs(rng, (tokens, 256))
        wanted = blockscaled.mm(
            (x.unsqueeze(-1), None),
            (weight.values.unsqueeze(-1), None),
            ab_dtype="float8_e4m3fn",
            sf_dtype="float8_e8m0fnu",
            sf_vec_size=32,
            plain_fp8=True,
            c_dtype="float16",
            alpha=weight.output_scale,
            bias=bias,
        )
        assert torch.equal(tensor_fp8_linear.mm(x, weight, bias=bias, out_dtype="float16"), wanted[..., 0])


@pytest.mark.parametrize("k", [160, 256])
@pytest.mark.parametrize("lead", [(), (2, 3), (2, 1, 9)])
def test_leading_dimensions(target, rng, lead, k):
    weight, w = make(rng, 40, k)
    x = inputs(rng, (*lead, k))
    y = tensor_fp8_linear.mm(x, weight)
    assert y.shape == (*lead, 40)
    check(y, x, w, "bfloat16")


def test_no_tokens(target, rng):
    weight, _ = make(rng, 40, 160)
    before = counters.launches.total()
    x = torch.empty(2, 0, 160, dtype=torch.uint8).view(E4M3)
    assert tensor_fp8_linear.mm(x, weight).shape == (2, 0, 40)
    assert counters.launches.total() == before


def planned(target, max_tokens=99, n=72, k=256, dtype="bfloat16"):
    return tensor_fp8_linear.plan(
        tensor_fp8_linear.Caps(
            device=target.device, max_tokens=max_tokens, in_features=k, out_features=n, output_dtype=dtype
        )
    )


@pytest.mark.parametrize("k", [160, 256])
def test_planned_form(target, rng, k):
    """One plan for every token count; nothing beside the output is written."""
    plan = planned(target, 99, 72, k)
    weight, w = make(rng, 72, k)
    for tokens in (99, 17, 3):
        x = inputs(rng, (tokens, k))
        output, buffer = data.guarded(tokens, 72, "bfloat16")
        y = tensor_fp8_linear.run(binding=plan.bind(source=x, packed_weight=weight, output=output, expected_m=4))
        assert y.data_ptr() == output.data_ptr()
        check(y, x, w, "bfloat16")
        assert data.guards_intact(buffer)


@pytest.mark.parametrize("k", [160, 256])
@pytest.mark.parametrize("counts", [(16, 9, 1), (64, 17)])
def test_a_row_does_not_depend_on_its_batch(target, rng, counts, k):
    weight, _ = make(rng, 72, k)
    x = inputs(rng, (counts[0], k))
    whole = tensor_fp8_linear.mm(x, weight)
    for count in counts[1:]:
        assert torch.equal(tensor_fp8_linear.mm(x[-count:], weight), whole[-count:])


@pytest.mark.parametrize("k", [160, 128])
@pytest.mark.parametrize("most", [1, 16, 17, 600])
def test_every_launch_is_planned(target, rng, k, most):
    """Sweeps of token counts launch kernels of a plan: for up to 16 where K is whole, for up to 64, and for many."""
    plan = planned(target, most, 24, k)
    weight, _ = make(rng, 24, k)
    counters.reset()
    for tokens in (1, 16, 17, 64, 65, 600):
        if tokens <= most:
            output, _ = data.guarded(tokens, 24, "bfloat16")
            tensor_fp8_linear.run(
                binding=plan.bind(source=inputs(rng, (tokens, k)), packed_weight=weight, output=output)
            )
    assert set(counters.launches) <= {kernel.spec.key for kernel in plan.kernels.values()}
    assert len(counters.launches) >= {1: 1, 16: 1, 17: 2, 600: 3}[most] - (k == 160 and most > 16)


@pytest.mark.parametrize("k", [160, 128])
def test_frozen(target, rng, monkeypatch, k):
    """After prewarming every token count works frozen; what is in no pack is refused."""
    weight, w = make(rng, 24, k)
    before = counters.launches.total()
    assert tensor_fp8_linear.prewarm(weight, [1, 64]) >= 2
    assert counters.launches.total() == before
    b12x.freeze_kernel_resolution("serving")
    try:
        for tokens in (1, 16, 17, 64, 65, 99):
            x = inputs(rng, (tokens, k))
            check(tensor_fp8_linear.mm(x, weight), x, w, "bfloat16")
        data.hide_packs(monkeypatch)
        for miss in (lambda: planned(target), lambda: tensor_fp8_linear.mm(x, weight)):
            with pytest.raises(b12x.KernelResolutionFrozenError, match=r"gemm\.tensor_fp8_linear.*serving"):
                miss()
    finally:
        b12x.unfreeze_kernel_resolution()
        monkeypatch.undo()
        b12x.clear_all_caches()


def test_refusals(target, rng):
    weight, _ = make(rng, 24, 160)
    plan = planned(target, 9, 24, 160)
    x, output = torch.zeros(4, 160).to(E4M3), torch.empty(4, 24, 1, dtype=torch.bfloat16)
    bound = {"source": x, "packed_weight": weight, "output": output}
    for call, error, words in (
        (lambda: tensor_fp8_linear.mm(x.bfloat16(), weight), TypeError, "source has dtype bfloat16.*float8_e4m3fn"),
        (lambda: tensor_fp8_linear.mm(x, x), TypeError, "packed_weight is a Tensor"),
        (lambda: tensor_fp8_linear.mm(x[:, :128], weight), ValueError, r"source has shape \(4, 128\)"),
        (lambda: tensor_fp8_linear.mm(x, weight, expected_m=0), ValueError, "expected_m is 0"),
        (lambda: tensor_fp8_linear.mm(x, weight, expected_m=-3), ValueError, "expected_m is -3"),
        (lambda: tensor_fp8_linear.mm(x, weight, out_dtype="float32"), ValueError, "output_dtype is 'float32'"),
        (lambda: tensor_fp8_linear.mm(x, weight, bias=torch.zeros(24)), TypeError, "bias has dtype float32"),
        (lambda: tensor_fp8_linear.prewarm(weight, [2.5]), TypeError, "token_counts is 2.5"),
        (lambda: tensor_fp8_linear.run(binding=x), TypeError, "binding is a Tensor"),
        (lambda: plan.bind(**bound | {"output": output[..., 0]}), ValueError, r"output has shape \(4, 24\)"),
        (lambda: plan.bind(**bound | {"source": x.repeat(3, 1)}), ValueError, "12 tokens, more than the plan's"),
        (
            lambda: plan.bind(**bound | {"source": torch.zeros(4, 168).to(E4M3)[:, :160]}),
            ValueError,
            "rows of source lie 168 bytes apart",
        ),
        (
            lambda: plan.bind(**bound | {"source": torch.zeros(648).to(E4M3)[8:].view(4, 160)}),
            ValueError,
            "source starts at an address 8 bytes past a multiple of 16",
        ),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "gemm.tensor_fp8_linear" in str(caught.value)


def test_caps():
    with pytest.raises(ValueError, match="in_features is 360; needed is a multiple of 32"):
        tensor_fp8_linear.Caps(max_tokens=1, in_features=360, out_features=8)
