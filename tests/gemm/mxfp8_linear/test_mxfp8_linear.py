"""``gemm.mxfp8_linear`` on the chosen target against float64, judged element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import b12x
from b12x._runtime import counters
from b12x.gemm import blockscaled, mxfp8_linear
from b12x.quantization import mxfp8
from tests.gemm import linear_data as data

OP = "gemm.mxfp8_linear"
TOKENS = [1, 2, 3, 8, 9, 15, 16, 17, 32, 99]
RECIPE = {"ab_dtype": "float8_e4m3fn", "sf_dtype": "float8_e8m0fnu", "sf_vec_size": 32}


def make(rng, n: int, k: int) -> tuple[mxfp8_linear.Weight, np.ndarray]:
    """A packed weight of seeded values and scales over eight octaves, and its float64 values."""
    codes, scale = data.weight_codes(rng, n, k), rng.integers(115, 123, (n, k // 32)).astype(np.uint8)
    return mxfp8_linear.pack_weight(data.as_weight(codes), torch.tensor(scale)), data.dequantise(codes, scale)


def check(y: torch.Tensor, x: torch.Tensor, w: np.ndarray, dtype: str, bias: torch.Tensor | None = None) -> None:
    term = None if bias is None else bias.double().cpu().numpy()
    data.check(y.reshape(-1, len(w)), *data.tolerance(data.quantised(x).reshape(-1, w.shape[1]), w, dtype, bias=term))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("n", "k"), [(132, 160), (48, 384)])
def test_token_counts(target, rng, tokens, n, k):
    """Every regime, N whose rows are not 16-byte aligned, and K that is no multiple of a tile."""
    weight, w = make(rng, n, k)
    x = data.activations(rng, (tokens, k), "octaves", "bfloat16")
    bias = torch.tensor(rng.standard_normal(n)).bfloat16()
    check(mxfp8_linear.mm(x, weight, bias=bias), x, w, "bfloat16", bias)


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("distribution", data.DISTRIBUTIONS)
@pytest.mark.parametrize(("tokens", "n", "k"), [(5, 136, 192), (40, 8, 512), (70, 132, 128)])
def test_distributions(target, rng, dtype, distribution, tokens, n, k):
    weight, w = make(rng, n, k)
    x = data.activations(rng, (tokens, k), distribution, dtype)
    y = mxfp8_linear.mm(x, weight)
    assert y.dtype == data.DTYPES[dtype]
    check(y, x, w, dtype)


def test_one_hot_rows_read_the_weight_back(target, rng):
    weight, w = make(rng, 48, 160)
    x = torch.zeros(160, 160, dtype=torch.bfloat16)
    x.fill_diagonal_(0.5)
    y = mxfp8_linear.mm(x, weight)
    np.testing.assert_array_equal(y.double().cpu().numpy(), torch.tensor(0.5 * w.T).bfloat16().double().cpu().numpy())


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 9)])
def test_leading_dimensions(target, rng, lead):
    weight, w = make(rng, 40, 160)
    x = data.activations(rng, (*lead, 160), "normal", "bfloat16")
    y = mxfp8_linear.mm(x, weight)
    assert y.shape == (*lead, 40)
    assert y.is_contiguous()
    check(y, x, w, "bfloat16")


def test_pitched_rows(target, rng):
    """Rows may lie further apart; what lies between is not read."""
    weight, w = make(rng, 40, 160)
    x = data.activations(rng, (2, 5, 160), "normal", "bfloat16")
    wide = torch.full((2, 5, 200), float("nan"), dtype=torch.bfloat16)
    wide[..., :160] = x
    check(mxfp8_linear.mm(wide[..., :160], weight), x, w, "bfloat16")
    check(mxfp8_linear.mm(x[:, 1:2], weight), x[:, 1:2], w, "bfloat16")


def test_equals_its_parts(target, rng):
    """Bit for bit what a quantizer and a GEMM give, so no option is lost on the way."""
    weight, _ = make(rng, 72, 256)
    bias = torch.tensor(rng.standard_normal(72)).to(torch.float16)
    for tokens in (3, 20, 70):
        x = data.activations(rng, (tokens, 256), "octaves", "float16")
        rows = mxfp8.allocate_outputs(mxfp8.plan(mxfp8.Caps(device=target.device, m=tokens, k=256, dtype="float16")))
        mxfp8.quantize_rows(x, rows.values, rows.scale_rows, rows.scale_mma)
        wanted = blockscaled.mm(
            (rows.values.unsqueeze(-1), rows.scale_mma),
            (weight.weight.values.unsqueeze(-1), weight.weight.scale_mma),
            c_dtype="float16",
            bias=bias,
            **RECIPE,
        )
        assert torch.equal(mxfp8_linear.mm(x, weight, bias=bias, expected_m=7), wanted[..., 0])


def test_no_tokens(target, rng):
    weight, _ = make(rng, 40, 160)
    before = counters.launches.total()
    for shape in ((0, 160), (2, 0, 160)):
        y = mxfp8_linear.mm(torch.empty(shape, dtype=torch.bfloat16), weight, bias=torch.zeros(40).bfloat16())
        assert y.shape == (*shape[:-1], 40)
    assert counters.launches.total() == before


def planned(target, max_tokens=99, n=72, k=160, dtype="bfloat16"):
    return mxfp8_linear.plan(
        mxfp8_linear.Caps(
            device=target.device, max_tokens=max_tokens, in_features=k, out_features=n, output_dtype=dtype
        )
    )


def test_planned_form(target, rng):
    """One plan and one scratch for every token count, poisoned; nothing beside output and scratch is written."""
    plan = planned(target)
    weight, w = make(rng, 72, 160)
    (spec,) = plan.scratch_specs()
    assert spec.nbytes == plan.layout.nbytes
    names = list(plan.shapes_and_dtypes())
    assert names == ["x_q_values", "x_q_scale_rows", "x_q_scale_mma"]
    assert [plan.layout.offsets[name] for name in names] == [0, 25 * 1024, 26 * 1024]
    assert plan.layout.nbytes == 26 * 1024 + 2 * 512
    scratch = data.poisoned(spec.nbytes)
    bias = torch.tensor(rng.standard_normal(72)).bfloat16()
    for tokens in (99, 17, 3):
        scratch[: spec.nbytes] = 0xFF
        x = data.activations(rng, (tokens, 160), "octaves", "bfloat16")
        output, buffer = data.guarded(tokens, 72, "bfloat16")
        binding = plan.bind(scratch=scratch, source=x, packed_weight=weight, output=output, bias=bias)
        y = mxfp8_linear.run(binding=binding)
        assert y.data_ptr() == output.data_ptr()
        check(y, x, w, "bfloat16", bias)
        assert data.guards_intact(buffer)
        assert (scratch[spec.nbytes :] == 0xFF).all()


def test_two_bindings_over_one_scratch(target, rng):
    plan = planned(target)
    weight, _ = make(rng, 72, 160)
    scratch = data.poisoned(plan.layout.nbytes)
    bindings, first = [], []
    for tokens in (40, 7):
        x = data.activations(rng, (tokens, 160), "octaves", "bfloat16")
        output, _ = data.guarded(tokens, 72, "bfloat16")
        bindings.append(plan.bind(scratch={"scratch": scratch}, source=x, packed_weight=weight, output=output))
        first.append(mxfp8_linear.mm(x, weight))
    for index in (0, 1, 1, 0, 1, 0):
        assert torch.equal(mxfp8_linear.run(binding=bindings[index]), first[index])


@pytest.mark.parametrize("counts", [(16, 9, 1), (64, 17)])
def test_a_row_does_not_depend_on_its_batch(target, rng, counts):
    """Inside one variant a row's bits are the same alone, among others, and at another position."""
    weight, _ = make(rng, 72, 384)
    x = data.activations(rng, (counts[0], 384), "octaves", "bfloat16")
    whole = mxfp8_linear.mm(x, weight)
    for count in counts[1:]:
        assert torch.equal(mxfp8_linear.mm(x[-count:], weight), whole[-count:])


def test_few_tokens_need_one_kernel(target, rng):
    """A plan for at most 8 tokens holds the GEMM that quantises its input, and is one launch."""
    plan = planned(target, max_tokens=8, k=256)
    assert list(plan.kernels) == ["fused.fused"]
    weight, w = make(rng, 72, 256)
    x = data.activations(rng, (8, 256), "normal", "bfloat16")
    output, _ = data.guarded(8, 72, "bfloat16")
    scratch = data.poisoned(plan.layout.nbytes)
    before = counters.launches.total()
    y = mxfp8_linear.run(binding=plan.bind(scratch=scratch, source=x, packed_weight=weight, output=output))
    assert counters.launches.total() == before + 1
    check(y, x, w, "bfloat16")
    assert (scratch == 0xFF).all()


def test_frozen(target, rng, monkeypatch):
    """After a plan every token count works frozen; what is in no pack is refused by plan and by the first call."""
    weight, w = make(rng, 24, 128)
    plan = planned(target, 99, 24, 128)
    x = data.activations(rng, (1, 128), "normal", "bfloat16")
    mxfp8_linear.mm(x, weight)
    b12x.freeze_kernel_resolution("serving")
    try:
        scratch = data.poisoned(plan.layout.nbytes)
        for tokens in (1, 16, 17, 64, 65, 99):
            x = data.activations(rng, (tokens, 128), "normal", "bfloat16")
            output, _ = data.guarded(tokens, 24, "bfloat16")
            bound = plan.bind(scratch=scratch, source=x, packed_weight=weight, output=output)
            check(mxfp8_linear.run(binding=bound), x, w, "bfloat16")
            assert torch.equal(mxfp8_linear.mm(x, weight), output[..., 0])
        data.hide_packs(monkeypatch)
        for miss in (lambda: planned(target), lambda: mxfp8_linear.mm(x, weight)):
            with pytest.raises(b12x.KernelResolutionFrozenError, match=r"gemm\.mxfp8_linear.*serving"):
                miss()
    finally:
        b12x.unfreeze_kernel_resolution()
        monkeypatch.undo()
        b12x.clear_all_caches()


def test_every_launch_is_planned(target, rng):
    plan = planned(target, 600, 24, 128)
    weight, _ = make(rng, 24, 128)
    counters.reset()
    for tokens in (1, 8, 9, 16, 17, 64, 65, 600):
        mxfp8_linear.mm(data.activations(rng, (tokens, 128), "normal", "bfloat16"), weight)
    assert set(counters.launches) <= {kernel.spec.key for kernel in plan.kernels.values()}
    # The quantizer, and kernels for few tokens, up to 16, up to 64 and many.
    assert len(counters.launches) >= 5
    assert all(f"{role}: " in plan.explain() for role in plan.kernels)


@pytest.fixture
def arguments(target, rng):
    """A valid plan, 9 tokens at most, and tensors of 4."""
    plan = planned(target, 9, 24, 160)
    weight, _ = make(rng, 24, 160)
    return plan, {
        "scratch": torch.empty(max(plan.layout.nbytes, 24 * 256), dtype=torch.uint8),
        "source": torch.zeros(4, 160, dtype=torch.bfloat16),
        "packed_weight": weight,
        "output": torch.empty(4, 24, 1, dtype=torch.bfloat16),
    }


BF16 = torch.bfloat16


def inside(tensors, x):
    """A contiguous tensor like ``x`` at the start of the scratch."""
    return tensors["scratch"][: x.nbytes].view(x.dtype).view(x.shape)


def in_scratch(tensors, part):
    """The weight with a part of it in the scratch."""
    weight = tensors["packed_weight"]
    old = getattr(weight.weight, part)
    new = inside(tensors, old.permute(5, 2, 4, 0, 1, 3) if part == "scale_mma" else old)
    return mxfp8_linear.Weight(weight.weight._replace(**{part: new}), 160, 256, 24)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: {"scratch": {}}, KeyError, ["scratch"]),
        (lambda t: {"scratch": [t["scratch"]] * 2}, ValueError, ["sequence of 2", "exactly one"]),
        (lambda t: {"scratch": t["scratch"].view(torch.int8)}, TypeError, ["int8", "uint8"]),
        (lambda t: {"scratch": t["scratch"][: 24 * 160]}, ValueError, ["bytes, needed are", "scratch_specs"]),
        (
            lambda t: {"scratch": torch.empty(len(t["scratch"]) + 8, dtype=torch.uint8)[8:]},
            ValueError,
            ["scratch starts", "multiple of 16"],
        ),
        (lambda t: {"source": t["source"].float()}, TypeError, ["source has dtype float32", "bfloat16", "convert"]),
        (lambda t: {"source": t["source"].half()}, TypeError, ["source has dtype float16", "bfloat16"]),
        (lambda t: {"source": 3}, TypeError, ["source is a int"]),
        (lambda t: {"source": t["source"][:, :128]}, ValueError, ["source has shape (4, 128)", "[..., 160]"]),
        (lambda t: {"source": torch.zeros(10, 160, dtype=BF16)}, ValueError, ["10 tokens", "max_tokens = 9"]),
        (
            lambda t: {"source": torch.zeros(2, 3, 160, dtype=BF16)[:, :2]},
            ValueError,
            ["source of shape (2, 2, 160)", "no matrix of rows", ".contiguous()"],
        ),
        (
            lambda t: {"source": torch.zeros(160, 4, dtype=BF16).t()},
            ValueError,
            ["strides (1, 4)", "no matrix of rows", ".contiguous()"],
        ),
        *(
            (
                lambda t, rows=rows: {"source": torch.zeros(rows, 160, dtype=BF16)[:2, None].expand(2, 2, 160)},
                ValueError,
                ["source of shape (2, 2, 160)", "strides (160, 0, 1)", "no matrix of rows", ".contiguous()"],
            )
            for rows in (2, 64)  # a storage that ends before four rows would, and one that does not
        ),
        (lambda t: {"source": t["source"][:1].expand(4, 160)}, ValueError, ["strides (0, 1)", "no matrix of rows"]),
        (
            lambda t: {"source": t["source"].as_strided((4, 160), (16, 1))},
            ValueError,
            ["strides (16, 1)", "no matrix of rows"],
        ),
        (lambda t: {"source": t["source"].to("meta")}, ValueError, ["source is on meta", "move it"]),
        (lambda t: {"packed_weight": t["source"]}, TypeError, ["packed_weight is a Tensor", "pack_weight"]),
        (
            lambda t: {"packed_weight": mxfp8_linear.Weight(t["packed_weight"].weight, 128, 128, 24)},
            ValueError,
            ["packed_weight is 24 x 128", "needed is 24 x 160"],
        ),
        (lambda t: {"output": t["output"][..., 0]}, ValueError, ["output has shape (4, 24)", "(4, 24, 1)"]),
        (lambda t: {"output": t["output"].half()}, TypeError, ["output has dtype float16", "bfloat16"]),
        (lambda t: {"output": t["output"][:3]}, ValueError, ["output has shape (3, 24, 1)"]),
        (
            lambda t: {"output": t["source"].view(-1)[:96].view(4, 24, 1)},
            ValueError,
            ["output output and source overlap", "copy"],
        ),
        (lambda t: {"bias": torch.zeros(25, dtype=BF16)}, ValueError, ["bias has shape (25,)", "(24,)"]),
        (lambda t: {"bias": torch.zeros(24)}, TypeError, ["bias has dtype float32", "bfloat16"]),
        *(
            (lambda t, name=name, x=x: {name: inside(t, x)}, ValueError, [f"scratch and {name} overlap", "copy"])
            for name, x in (("source", torch.zeros(4, 160, dtype=BF16)), ("bias", torch.zeros(24, dtype=BF16)))
        ),
        (
            lambda t: {"output": inside(t, t["output"])},
            ValueError,
            ["output output and scratch overlap", "copy"],
        ),
        *(
            (
                lambda t, part=part: {"packed_weight": in_scratch(t, part)},
                ValueError,
                [f"scratch and packed_weight {words} overlap", "copy"],
            )
            for part, words in (("values", "values"), ("scale_mma", "scales"))
        ),
        (lambda t: {"expected_m": 0}, ValueError, ["expected_m is 0", "leave the hint out"]),
        (lambda t: {"expected_m": 2.0}, TypeError, ["expected_m is 2.0", "int"]),
    ],
)
def test_refusals(arguments, change, error, words):
    """Each message names the argument, what was found, what is needed and what to do."""
    plan, tensors = arguments
    with pytest.raises(error) as caught:
        plan.bind(**(tensors | change(tensors)))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"in_features": 360}, ["in_features is 360", "multiple of 32", "pad"]),
        ({"output_dtype": "float32"}, ["output_dtype is 'float32'", "'bfloat16' or 'float16'"]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"out_features": 0}, ["out_features is 0"]),
    ],
)
def test_caps(change, words):
    arguments = {"max_tokens": 4, "in_features": 160, "out_features": 8} | change
    with pytest.raises(ValueError, match=OP) as caught:
        mxfp8_linear.Caps(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_caps_take_a_torch_dtype():
    caps = mxfp8_linear.Caps(max_tokens=1, in_features=32, out_features=8, output_dtype=torch.float16)
    assert caps.output_dtype == "float16"


def test_one_shot_refusals(target, rng):
    weight, _ = make(rng, 24, 160)
    x = torch.zeros(4, 160, dtype=BF16)
    for call, error, word in (
        (lambda: mxfp8_linear.mm(3, weight), TypeError, "source is a int"),
        (lambda: mxfp8_linear.mm(x.float(), weight), TypeError, "source has dtype float32"),
        (lambda: mxfp8_linear.mm(x, x), TypeError, "packed_weight is a Tensor"),
        (lambda: mxfp8_linear.mm(x[:, :128], weight), ValueError, r"source has shape \(4, 128\)"),
        (lambda: mxfp8_linear.mm(x, weight, expected_m=-1), ValueError, "expected_m is -1"),
        (lambda: mxfp8_linear.run(binding=x), TypeError, "binding is a Tensor"),
    ):
        with pytest.raises(error, match=word):
            call()
