"""``gemm.block_fp8_linear`` on the chosen target against float64, judged element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import b12x
from b12x._runtime import counters
from b12x.gemm import block_fp8_linear, blockscaled
from tests.gemm import linear_data as data

TOKENS = [1, 2, 3, 8, 9, 15, 16, 17, 32, 99]
RECIPE = {"ab_dtype": "float8_e4m3fn", "sf_dtype": "float8_e8m0fnu", "sf_vec_size": 32}
BF16 = torch.bfloat16


def make(rng, n: int, k: int, powers: bool = False) -> tuple[block_fp8_linear.Weight, np.ndarray, np.ndarray]:
    """A packed weight, its float64 values, and those of the checkpoint that it was packed from."""
    codes, shape = data.weight_codes(rng, n, k), (-(-n // 128), k // 128)
    scale = np.exp2(rng.integers(-9, -4, shape) if powers else rng.uniform(-9, -4, shape)).astype(np.float32)
    weight = block_fp8_linear.pack_weight(data.as_weight(codes), torch.tensor(scale))
    packed = (weight.weight.values, weight.weight.scale_rows)
    values, linear = (part.view(torch.uint8).cpu().numpy() for part in packed)
    exact = data.from_e4m3(codes) * np.repeat(np.repeat(scale.astype(np.float64), 128, 0)[:n], 128, 1)
    return weight, data.dequantise(values, linear[0]), exact


def check(y: torch.Tensor, x: torch.Tensor, w: np.ndarray, dtype: str, bias: torch.Tensor | None = None) -> None:
    term = None if bias is None else bias.double().cpu().numpy()
    data.check(y.reshape(-1, len(w)), *data.tolerance(data.quantised(x).reshape(-1, w.shape[1]), w, dtype, bias=term))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("n", "k", "dtype"), [(132, 384, "bfloat16"), (48, 256, "float16")])
def test_token_counts(target, rng, tokens, n, k, dtype):
    """Every regime, with bias, and N whose rows are not 16-byte aligned; scales that are no powers of two."""
    weight, w, _ = make(rng, n, k)
    x = data.activations(rng, (tokens, k), "octaves", dtype)
    bias = torch.tensor(rng.standard_normal(n)).to(data.DTYPES[dtype])
    check(block_fp8_linear.run(x, weight, bias=bias), x, w, dtype, bias)


@pytest.mark.parametrize("distribution", data.DISTRIBUTIONS)
@pytest.mark.parametrize(("tokens", "n", "k"), [(5, 136, 256), (33, 8, 512), (70, 200, 128)])
def test_distributions(target, rng, distribution, tokens, n, k):
    weight, w, _ = make(rng, n, k, powers=True)
    x = data.activations(rng, (tokens, k), distribution, "bfloat16")
    check(block_fp8_linear.run(x, weight), x, w, "bfloat16")


@pytest.mark.parametrize("tokens", [4, 40])
def test_scales_that_are_no_powers_of_two(target, rng, tokens):
    """Within 4 % of the product with the float weight of the checkpoint; scales that are rounded while the values stay
    would be off by far more."""
    weight, _, exact = make(rng, 136, 512)
    x = data.activations(rng, (tokens, 512), "normal", "bfloat16")
    y = block_fp8_linear.run(x, weight).double().cpu().numpy()
    wanted = data.quantised(x) @ exact.T
    assert np.linalg.norm(y - wanted) / np.linalg.norm(wanted) < 0.04


@pytest.mark.parametrize("lead", [(), (2, 3), (2, 1, 9)])
def test_leading_dimensions(target, rng, lead):
    weight, w, _ = make(rng, 40, 128)
    x = data.activations(rng, (*lead, 128), "normal", "bfloat16")
    y = block_fp8_linear.run(x, weight)
    assert y.shape == (*lead, 40)
    check(y, x, w, "bfloat16")


@pytest.mark.parametrize("tokens", [9, 20])
def test_equals_its_parts(target, rng, tokens):
    """Bit for bit what ``quantize_input`` and a GEMM give, so no option is lost on the way."""
    weight, _, _ = make(rng, 72, 256)
    x = data.activations(rng, (tokens, 256), "octaves", "bfloat16")
    bias = torch.tensor(rng.standard_normal(72)).bfloat16()
    rows = block_fp8_linear.quantize_input(x)
    wanted = blockscaled.mm(
        (rows.values.unsqueeze(-1), rows.scale_mma), weight.operand, c_dtype="bfloat16", bias=bias, **RECIPE
    )
    assert torch.equal(block_fp8_linear.run(x, weight, bias=bias, expected_m=7), wanted[..., 0])


@pytest.mark.parametrize("dtype", data.DTYPES)
def test_quantized_input(target, rng, dtype):
    """Bytes of values and scales, in new tensors and in ones that are there."""
    x = data.activations(rng, (35, 256), "octaves", dtype)
    values, codes = data.quantise(x.double().cpu().numpy())
    rows = block_fp8_linear.quantize_input(x)
    for given in (rows, block_fp8_linear.quantize_input(x, out=rows)):
        np.testing.assert_array_equal(given.values.view(torch.uint8).cpu().numpy(), values)
        np.testing.assert_array_equal(given.scale_rows.cpu().numpy(), codes[None])
        np.testing.assert_array_equal(data.view_bytes(given.scale_mma), data.swizzled(codes[None]))
    assert given is rows
    with pytest.raises(
        ValueError, match=r"source_tk has shape \(35, 160\); needed is \[T, K\] with K a multiple of 128"
    ):
        block_fp8_linear.quantize_input(x[:, :160])
    with pytest.raises(TypeError, match="source_tk has dtype float32"):
        block_fp8_linear.quantize_input(x.float())


def test_no_tokens(target, rng):
    weight, _, _ = make(rng, 40, 128)
    before = counters.launches.total()
    assert block_fp8_linear.run(torch.empty(2, 0, 128, dtype=BF16), weight).shape == (2, 0, 40)
    assert block_fp8_linear.quantize_input(torch.empty(0, 128, dtype=BF16)).values.shape == (0, 128)
    assert counters.launches.total() == before


def planned(target, max_tokens=99, n=72, k=256, dtype="bfloat16"):
    return block_fp8_linear.plan(
        block_fp8_linear.Caps(
            device=target.device, max_tokens=max_tokens, in_features=k, out_features=n, output_dtype=dtype
        )
    )


def test_planned_form(target, rng):
    """One plan and one scratch for every token count, poisoned; nothing beside output and scratch is written."""
    plan = planned(target)
    weight, w, _ = make(rng, 72, 256)
    (spec,) = plan.scratch_specs()
    assert plan.shapes_and_dtypes() == {
        "x_q_values": ((99, 256), torch.float8_e4m3fn),
        "x_q_scale_rows": ((1, 99, 8), torch.uint8),
        "x_q_scale_mma": ((1, 1, 2, 32, 4, 4), torch.uint8),
    }
    assert plan.layout.offsets == {"x_q_values": 0, "x_q_scale_rows": 25 * 1024, "x_q_scale_mma": 26 * 1024}
    assert spec.nbytes == plan.layout.nbytes == 26 * 1024 + 2 * 512
    scratch = data.poisoned(spec.nbytes)
    bias = torch.tensor(rng.standard_normal(72)).bfloat16()
    for tokens in (99, 17, 3):
        scratch[: spec.nbytes] = 0xFF
        x = data.activations(rng, (tokens, 256), "octaves", "bfloat16")
        output, buffer = data.guarded(tokens, 72, "bfloat16")
        binding = block_fp8_linear.bind(
            plan, scratch=scratch, source=x, packed_weight=weight, output=output, bias=bias, expected_m=4
        )
        y = block_fp8_linear.run(binding=binding)
        assert y.data_ptr() == output.data_ptr()
        check(y, x, w, "bfloat16", bias)
        assert data.guards_intact(buffer)
        assert (scratch[spec.nbytes :] == 0xFF).all()


def test_two_bindings_over_one_scratch(target, rng):
    plan = planned(target)
    weight, _, _ = make(rng, 72, 256)
    scratch = data.poisoned(plan.layout.nbytes)
    bindings, first = [], []
    for tokens in (40, 12):
        x = data.activations(rng, (tokens, 256), "octaves", "bfloat16")
        output, _ = data.guarded(tokens, 72, "bfloat16")
        bindings.append(plan.bind(scratch=[scratch], source=x, packed_weight=weight, output=output))
        first.append(block_fp8_linear.run(x, weight))
    for index in (0, 1, 1, 0, 1, 0):
        assert torch.equal(block_fp8_linear.run(binding=bindings[index]), first[index])


@pytest.mark.parametrize("counts", [(8, 5, 1), (16, 9), (64, 17)])
def test_a_row_does_not_depend_on_its_batch(target, rng, counts):
    """Inside one variant a row's bits are the same alone, among others, and at another position."""
    weight, _, _ = make(rng, 72, 384)
    x = data.activations(rng, (counts[0], 384), "octaves", "bfloat16")
    whole = block_fp8_linear.run(x, weight)
    for count in counts[1:]:
        assert torch.equal(block_fp8_linear.run(x[-count:], weight), whole[-count:])


def test_few_tokens_need_one_kernel(target, rng):
    """A plan for at most 8 tokens holds the GEMM that quantises its input, and is one launch."""
    plan = planned(target, max_tokens=8, k=256)
    assert list(plan.kernels) == ["fused.fused"]
    weight, w, _ = make(rng, 72, 256)
    x = data.activations(rng, (8, 256), "normal", "bfloat16")
    output, _ = data.guarded(8, 72, "bfloat16")
    scratch = data.poisoned(plan.layout.nbytes)
    before = counters.launches.total()
    y = block_fp8_linear.run(binding=plan.bind(scratch=scratch, source=x, packed_weight=weight, output=output))
    assert counters.launches.total() == before + 1
    check(y, x, w, "bfloat16")
    assert (scratch == 0xFF).all()


def test_frozen(target, rng, monkeypatch):
    """After prewarming every token count works frozen, whatever the hint; what is in no pack is refused."""
    weight, w, _ = make(rng, 24, 128)
    before = counters.launches.total()
    assert block_fp8_linear.prewarm(weight, [1, 16, 64]) >= 2
    assert counters.launches.total() == before
    x = data.activations(rng, (1, 128), "normal", "bfloat16")
    b12x.freeze_kernel_resolution("serving")
    try:
        compiles = counters.compiles
        for tokens in (1, 8, 9, 16, 17, 64, 65, 99):
            x = data.activations(rng, (tokens, 128), "normal", "bfloat16")
            y = block_fp8_linear.run(x, weight)
            check(y, x, w, "bfloat16")
            assert torch.equal(block_fp8_linear.run(x, weight, expected_m=128), y)
        assert counters.compiles == compiles
        data.hide_packs(monkeypatch)
        for miss in (
            lambda: planned(target),
            lambda: block_fp8_linear.run(x, weight),
            lambda: block_fp8_linear.prewarm(weight, [1]),
        ):
            with pytest.raises(b12x.KernelResolutionFrozenError, match=r"gemm\.block_fp8_linear.*serving"):
                miss()
    finally:
        b12x.unfreeze_kernel_resolution()
        monkeypatch.undo()
        b12x.clear_all_caches()


def test_every_launch_is_planned(target, rng):
    """A sweep of token counts launches kernels of a plan, and no other."""
    plan = planned(target, 600, 24, 128)
    weight, _, _ = make(rng, 24, 128)
    counters.reset()
    for tokens in (1, 8, 9, 16, 17, 64, 65, 600):
        block_fp8_linear.run(data.activations(rng, (tokens, 128), "normal", "bfloat16"), weight)
    assert set(counters.launches) <= {kernel.spec.key for kernel in plan.kernels.values()}
    # The quantizer, and kernels for few tokens, up to 16, up to 64 and many.
    assert len(counters.launches) >= 5


def test_refusals(target, rng):
    weight, _, _ = make(rng, 24, 128)
    plan = planned(target, 9, 24, 128)
    x, output = torch.zeros(4, 128, dtype=BF16), torch.empty(4, 24, 1, dtype=BF16)
    scratch = torch.empty(plan.layout.nbytes, dtype=torch.uint8)
    binding = plan.bind(scratch=scratch, source=x, packed_weight=weight, output=output)
    for call, error, words in (
        (lambda: block_fp8_linear.run(), TypeError, "needs either binding, or source and packed_weight"),
        (lambda: block_fp8_linear.run(x, binding=binding), ValueError, "tensors that the binding already holds"),
        (lambda: block_fp8_linear.run(bias=x, binding=binding), ValueError, "pass one or the other"),
        (lambda: block_fp8_linear.run(binding=x), TypeError, "binding is a Tensor"),
        (lambda: block_fp8_linear.run(x, x), TypeError, "packed_weight is a Tensor"),
        (lambda: block_fp8_linear.run(x.float(), weight), TypeError, "source has dtype float32"),
        (lambda: block_fp8_linear.run(x, weight, expected_m=0), ValueError, "expected_m is 0"),
        (lambda: block_fp8_linear.run(x[:, :64], weight), ValueError, r"source has shape \(4, 64\)"),
        (lambda: block_fp8_linear.prewarm(weight, [-1]), ValueError, "token_counts is -1"),
        (lambda: block_fp8_linear.prewarm(weight, 3), TypeError, "token_counts is 3, a int; needed are several ints"),
        (
            lambda: block_fp8_linear.pack_weight(x, x, block_size=128),
            TypeError,
            "block_size is 128, a int; needed are several ints: pass a tuple",
        ),
        (lambda: block_fp8_linear.pack_weight(x, x, block_size=(64, 128)), ValueError, r"block_size is \(64, 128\)"),
        (
            lambda: block_fp8_linear.prewarm(weight, [1], output_dtype="float32"),
            ValueError,
            "output_dtype is 'float32'",
        ),
        (
            lambda: plan.bind(scratch=scratch, source=x.half(), packed_weight=weight, output=output),
            TypeError,
            "source has dtype float16; needed is bfloat16",
        ),
        (
            lambda: plan.bind(
                scratch=scratch, source=torch.zeros(10, 128, dtype=BF16), packed_weight=weight, output=output
            ),
            ValueError,
            "10 tokens, more than the plan's max_tokens = 9",
        ),
        (
            lambda: plan.bind(scratch=scratch, source=x.t().contiguous().t(), packed_weight=weight, output=output),
            ValueError,
            "no matrix of rows",
        ),
        (
            lambda: plan.bind(scratch=scratch, source=x, packed_weight=weight, output=x[:, :24].unsqueeze(-1)),
            ValueError,
            "output of shape",
        ),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "gemm.block_fp8_linear" in str(caught.value)


def test_caps():
    with pytest.raises(ValueError, match="in_features is 192; needed is a multiple of 128"):
        block_fp8_linear.Caps(max_tokens=1, in_features=192, out_features=8)
    assert block_fp8_linear.Caps(max_tokens=1, in_features=128, out_features=8).output_dtype == "bfloat16"
