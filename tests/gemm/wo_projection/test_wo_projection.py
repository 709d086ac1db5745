"""``gemm.wo_projection`` on the chosen target: WO-A from the input, WO-B from what WO-A wrote, each against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import b12x
from b12x._runtime import counters, resolve
from b12x.gemm import wo_projection
from tests.gemm import linear_data as data

BF16 = torch.bfloat16
#: Groups, group width, rank and hidden: WO-A with N below 64, N that is no multiple of 16, a rank that is none of a
#: scale's 32 values, and one group.
SHAPES = [(2, 256, 64, 72), (4, 128, 96, 40), (16, 128, 8, 132), (1, 512, 128, 128)]
#: Heads in a group, columns that stay, columns that rotate: 128 columns or twice as many in a group.
HEADS = [(1, 64, 64), (2, 96, 32)]


@dataclass(frozen=True)
class Model:
    weights: wo_projection.Weights
    a: np.ndarray
    b: np.ndarray

    def caps(self, target, max_tokens: int) -> wo_projection.Caps:
        w = self.weights
        return wo_projection.Caps(
            device=target.device,
            max_tokens=max_tokens,
            groups=w.groups,
            group_width=w.group_width,
            rank=w.rank,
            hidden=w.hidden,
        )


def make(rng, groups: int, width: int, rank: int, hidden: int) -> Model:
    """Weights with scales that are no powers of two for WO-A, and the float64 values of both."""
    a, b = data.weight_codes(rng, groups * rank, width), data.weight_codes(rng, hidden, groups * rank)
    a_scale = np.exp2(rng.uniform(-12, -8, (-(-groups * rank // 128), width // 128))).astype(np.float32)
    b_scale = np.exp2(rng.integers(-12, -8, (-(-hidden // 128), groups * rank // 128))).astype(np.float32)
    weights = wo_projection.pack_weights(
        data.as_weight(a),
        torch.tensor(a_scale),
        data.as_weight(b),
        torch.tensor(b_scale),
        groups=groups,
        group_width=width,
        rank=rank,
        hidden=hidden,
    )
    fresh, codes = data.requantise(a, a_scale)
    first = data.dequantise(fresh, data.block_rows(codes, groups * rank)).reshape(groups, rank, width)
    blocks = (np.log2(b_scale) + 127).astype(np.uint8)
    return Model(weights, first, data.dequantise(b, data.block_rows(blocks, hidden)))


def rotated_back(o: torch.Tensor, positions: np.ndarray, cache: torch.Tensor, nope: int, rope: int) -> np.ndarray:
    """f32 ``[T, heads, head_dim]``: pairs of the last ``rope`` columns, one f32 rounding a product and one a sum."""
    x = o.detach().cpu().float().numpy()
    table = cache.detach().cpu().float().numpy()[positions]
    cos, sin = table[:, None, : rope // 2], table[:, None, rope // 2 :]
    even, odd = x[..., nope::2], x[..., nope + 1 :: 2]
    out = x.copy()
    for start, own, other, sign in ((nope, even, odd, 1.0), (nope + 1, odd, even, -1.0)):
        kept = (own * cos).astype(np.float64)
        out[..., start::2] = (sign * other.astype(np.float64) * sin + kept).astype(np.float32)
    return out


def check(model: Model, x: np.ndarray, tmp: torch.Tensor, y: torch.Tensor) -> None:
    """``x`` f32 ``[T, G, D]``, ``tmp`` ``[G, T, rank]``, ``y`` ``[T, hidden]``."""
    rows = data.dequantise(*data.quantise(x)).transpose(1, 0, 2)
    data.check(tmp, *data.tolerance(rows, model.a, "bfloat16"))
    inner = tmp.permute(1, 0, 2).reshape(len(x), -1)
    data.check(y, *data.tolerance(data.quantised(inner), model.b, "bfloat16"))


def tmp_of(plan: wo_projection.Plan, scratch: torch.Tensor, tokens: int) -> torch.Tensor:
    caps = plan.caps
    start = plan.layout.offsets["tmp"]
    return scratch[start : start + 2 * caps.groups * tokens * caps.rank].view(BF16).view(caps.groups, tokens, caps.rank)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16, 17])
def test_token_counts(target, rng, shape, tokens):
    """Every regime, in poisoned scratch of a plan for more tokens."""
    model = make(rng, *shape)
    groups, width, _, hidden = shape
    plan = wo_projection.plan(model.caps(target, 20))
    scratch = data.poisoned(plan.layout.nbytes)
    x = data.activations(rng, (tokens, groups, width), "octaves", "bfloat16")
    y = wo_projection.run(binding=plan.bind(scratch=scratch, source_tgd=x, weights=model.weights, expected_m=4))
    assert y.shape == (tokens, hidden)
    assert y.data_ptr() == scratch.data_ptr() + plan.layout.offsets["output"]
    check(model, x.float().cpu().numpy(), tmp_of(plan, scratch, tokens), y)
    assert (scratch[plan.layout.nbytes :] == 0xFF).all()


@pytest.mark.parametrize("distribution", data.DISTRIBUTIONS)
@pytest.mark.parametrize("tokens", [5, 70])
def test_distributions(target, rng, distribution, tokens):
    model = make(rng, 2, 384, 64, 200)
    plan = wo_projection.plan(model.caps(target, tokens))
    scratch = data.poisoned(plan.layout.nbytes)
    x = data.activations(rng, (tokens, 2, 384), distribution, "bfloat16")
    y = wo_projection.run(binding=plan.bind(scratch=scratch, source_tgd=x, weights=model.weights))
    check(model, x.float().cpu().numpy(), tmp_of(plan, scratch, tokens), y)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [3, 12])
def test_inverse_rope(target, rng, heads, cache_dtype, position_dtype, tokens):
    """The rotation is taken back in f32, without a rounding to bf16 before the quantisation."""
    model, rotation, arguments = rotated(rng, heads, cache_dtype, position_dtype, tokens)
    plan = wo_projection.plan(model.caps(target, 12))
    scratch = data.poisoned(plan.layout.nbytes)
    binding = plan.bind_inv_rope(scratch=scratch, weights=model.weights, **arguments)
    y = wo_projection.run_inv_rope(binding=binding)
    check(model, rotation, tmp_of(plan, scratch, tokens), y)
    names = ("o", "positions", "cos_sin_cache")
    dims = {name: value for name, value in arguments.items() if name not in names}
    alone = wo_projection.run_inv_rope(*(arguments[name] for name in names), model.weights, **dims)
    assert torch.equal(alone, y)
    assert alone.untyped_storage().nbytes() == alone.nbytes


def rotated(rng, heads, cache_dtype, position_dtype, tokens, groups=2):
    """A model of these heads, its input rotated back as f32 ``[T, G, D]``, and the arguments of a call."""
    per_group, nope, rope = heads
    width = per_group * (nope + rope)
    model = make(rng, groups, width, 64, 40)
    o = data.activations(rng, (tokens, groups * per_group, nope + rope), "normal", "bfloat16")
    angles = rng.uniform(0, 6.28, (50, rope // 2))
    cache = torch.tensor(np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).to(getattr(torch, cache_dtype))
    positions = rng.integers(0, 50, tokens)
    arguments = {
        "o": o,
        "positions": torch.tensor(positions, dtype=position_dtype),
        "cos_sin_cache": cache,
        "heads_per_group": per_group,
        "nope_dim": nope,
        "rope_dim": rope,
    }
    return model, rotated_back(o, positions, cache, nope, rope).reshape(tokens, groups, width), arguments


def assert_rows(rows, x: np.ndarray, groups: int) -> None:
    """Bytes of quantised ``[G, T, K]``."""
    values, codes = data.quantise(x)
    found = rows.values.permute(2, 0, 1) if groups > 1 else rows.values.reshape(1, *rows.values.shape[:2])
    np.testing.assert_array_equal(found.view(torch.uint8).cpu().numpy(), values)
    np.testing.assert_array_equal(rows.scale_rows.cpu().numpy(), codes)
    np.testing.assert_array_equal(data.view_bytes(rows.scale_mma), data.swizzled(codes))


@pytest.mark.parametrize("groups", [1, 3])
def test_quantized_inputs(target, rng, groups):
    """Bytes of what the projection's GEMMs read, in new tensors and in ones that are there."""
    x = data.activations(rng, (35, groups, 128), "octaves", "bfloat16")
    rows = wo_projection.quantize_input(x)
    assert_rows(rows, x.float().cpu().numpy().transpose(1, 0, 2), groups)
    assert wo_projection.quantize_input(x, out=rows) is rows
    tmp = data.activations(rng, (groups, 35, 128), "octaves", "bfloat16")
    inner = wo_projection.quantize_input_b(tmp.permute(1, 2, 0))
    assert_rows(inner, tmp.float().cpu().numpy().transpose(1, 0, 2).reshape(1, 35, -1), 1)


@pytest.mark.parametrize("heads", HEADS)
def test_quantized_input_with_inverse_rope(target, rng, heads):
    _, rotation, arguments = rotated(rng, heads, "float32", torch.int64, 21)
    rows = wo_projection.quantize_input_inv_rope(**arguments, groups=2)
    assert_rows(rows, rotation.transpose(1, 0, 2), 2)


def test_strided_inputs(target, rng):
    """Tokens and groups may lie further apart."""
    model = make(rng, 2, 256, 64, 72)
    plan = wo_projection.plan(model.caps(target, 20))
    for tokens in (4, 20):
        x = data.activations(rng, (tokens, 2, 256), "normal", "bfloat16")
        wide = torch.full((tokens, 3, 264), float("nan"), dtype=BF16)
        wide[:, :2, :256] = x
        scratch = data.poisoned(plan.layout.nbytes)
        y = wo_projection.run(binding=plan.bind(scratch=scratch, source_tgd=wide[:, :2, :256], weights=model.weights))
        check(model, x.float().cpu().numpy(), tmp_of(plan, scratch, tokens), y)


def test_scratch(target, rng):
    model = make(rng, 2, 256, 64, 72)
    plan = wo_projection.plan(model.caps(target, 99))
    (spec,) = plan.scratch_specs()
    assert list(plan.shapes_and_dtypes().items()) == [
        ("x_q_values", ((2, 99, 256), torch.float8_e4m3fn)),
        ("x_q_scale_rows", ((2, 99, 8), torch.uint8)),
        ("x_q_scale_mma", ((2, 1, 2, 32, 4, 4), torch.uint8)),
        ("tmp", ((2, 99, 64), torch.bfloat16)),
        ("tmp_q_values", ((99, 128), torch.float8_e4m3fn)),
        ("tmp_q_scale_rows", ((1, 99, 4), torch.uint8)),
        ("tmp_q_scale_mma", ((1, 1, 1, 32, 4, 4), torch.uint8)),
        ("output", ((99, 72), torch.bfloat16)),
    ]
    cursor = 0
    for name, size in plan.layout.sizes.items():
        cursor = -(-cursor // 1024) * 1024
        assert plan.layout.offsets[name] == cursor
        cursor += size
    assert spec.nbytes == plan.layout.nbytes == cursor


def test_two_bindings_over_one_scratch(target, rng):
    """In turn, of few and of many tokens; each result lies in the scratch until the next run."""
    model = make(rng, 2, 256, 64, 72)
    plan = wo_projection.plan(model.caps(target, 20))
    scratch = data.poisoned(plan.layout.nbytes)
    bindings = []
    for tokens in (20, 5):
        x = data.activations(rng, (tokens, 2, 256), "octaves", "bfloat16")
        bindings.append(plan.bind(scratch={"scratch": scratch}, source_tgd=x, weights=model.weights, return_3d=True))
    first = [wo_projection.run(binding=binding).clone() for binding in bindings]
    assert [result.shape for result in first] == [(20, 72, 1), (5, 72, 1)]
    for index in (0, 1, 1, 0, 1):
        assert torch.equal(wo_projection.run(binding=bindings[index]), first[index])


@pytest.mark.parametrize("counts", [(8, 3, 1), (16, 9), (40, 17)])
def test_a_row_does_not_depend_on_its_batch(target, rng, counts):
    model = make(rng, 2, 256, 64, 72)
    plan = wo_projection.plan(model.caps(target, 40))
    x = data.activations(rng, (counts[0], 2, 256), "octaves", "bfloat16")

    def run(part):
        scratch = data.poisoned(plan.layout.nbytes)
        return wo_projection.run(binding=plan.bind(scratch=scratch, source_tgd=part, weights=model.weights))

    whole = run(x)
    for count in counts[1:]:
        assert torch.equal(run(x[-count:]), whole[-count:])


def test_no_tokens(target, rng):
    model, _, arguments = rotated(rng, HEADS[0], "float32", torch.int32, 0)
    plan = wo_projection.plan(model.caps(target, 20))
    scratch = data.poisoned(plan.layout.nbytes)
    before = counters.launches.total()
    x = torch.empty(0, 2, 128, dtype=BF16)
    assert wo_projection.run(binding=plan.bind(scratch=scratch, source_tgd=x, weights=model.weights)).shape == (0, 40)
    assert wo_projection.run_inv_rope(**arguments, weights=model.weights, return_3d=True).shape == (0, 40, 1)
    for rows in (wo_projection.quantize_input(x), wo_projection.quantize_input_inv_rope(**arguments, groups=2)):
        assert (rows.values.shape, rows.scale_rows.shape) == ((0, 128, 2), (2, 0, 4))
        assert rows.scale_mma.shape == (32, 4, 0, 4, 1, 2)
        assert wo_projection.quantize_input(x, out=rows) is rows
    inner = wo_projection.quantize_input_b(torch.empty(2, 0, 64, dtype=BF16).permute(1, 2, 0))
    assert (inner.values.shape, inner.scale_mma.shape) == ((0, 128), (32, 4, 0, 4, 1, 1))
    assert counters.launches.total() == before


def test_every_launch_is_planned(target, rng):
    """A sweep of token counts, with and without a rope, launches kernels of a plan, and no other."""
    model = make(rng, 1, 128, 128, 24)
    plan = wo_projection.plan(model.caps(target, 600))
    scratch = data.poisoned(plan.layout.nbytes)
    counters.reset()
    for tokens in (1, 8, 9, 17, 600):
        x = data.activations(rng, (tokens, 1, 128), "normal", "bfloat16")
        wo_projection.run(binding=plan.bind(scratch=scratch, source_tgd=x, weights=model.weights))
        for dtype in (torch.float32, BF16) if tokens < 17 else ():
            binding = plan.bind_inv_rope(
                scratch=scratch,
                o=x,
                positions=torch.zeros(tokens, dtype=torch.int32),
                cos_sin_cache=torch.ones(1, 64, dtype=dtype),
                weights=model.weights,
                heads_per_group=1,
                nope_dim=64,
            )
            wo_projection.run_inv_rope(binding=binding)
    assert set(counters.launches) <= {kernel.spec.key for kernel in plan.kernels.values()}
    # Three ways to quantise, in a GEMM and apart; kernels for up to 16, up to 64 and many.
    assert len(counters.launches) >= 2 * 3 + 3
    assert all(f"{role}: " in plan.explain() for role in plan.kernels)


def test_few_tokens_need_no_other_kernels(target, rng):
    """A plan for at most 8 tokens holds the GEMMs that quantise their input, and is two launches."""
    model = make(rng, 2, 128, 64, 40)
    plan = wo_projection.plan(model.caps(target, 8))
    assert all(role.startswith("fused_") for role in plan.kernels)
    scratch = data.poisoned(plan.layout.nbytes)
    x = data.activations(rng, (8, 2, 128), "normal", "bfloat16")
    before = counters.launches.total()
    y = wo_projection.run(binding=plan.bind(scratch=scratch, source_tgd=x, weights=model.weights))
    assert counters.launches.total() == before + 2
    check(model, x.float().cpu().numpy(), tmp_of(plan, scratch, 8), y)


def test_frozen(target, rng, monkeypatch):
    """After a plan every token count and every head works frozen; what is in no pack is refused."""
    model, rotation, arguments = rotated(rng, HEADS[0], "float32", torch.int32, 12)
    plan = wo_projection.plan(model.caps(target, 12))
    wo_projection.run_inv_rope(**arguments, weights=model.weights)
    b12x.freeze_kernel_resolution("serving")
    try:
        data_scratch = data.poisoned(plan.layout.nbytes)
        for tokens in (1, 8, 12):
            part = arguments | {"o": arguments["o"][:tokens], "positions": arguments["positions"][:tokens]}
            binding = plan.bind_inv_rope(scratch=data_scratch, weights=model.weights, **part)
            y = wo_projection.run_inv_rope(binding=binding)
            check(model, rotation[:tokens], tmp_of(plan, data_scratch, tokens), y)
            assert torch.equal(wo_projection.run_inv_rope(**part, weights=model.weights), y)
        data.hide_packs(monkeypatch)
        for miss in (
            lambda: wo_projection.plan(model.caps(target, 12)),
            lambda: wo_projection.run_inv_rope(**arguments, weights=model.weights),
        ):
            with pytest.raises(b12x.KernelResolutionFrozenError, match=r"gemm\.wo_projection.*serving"):
                miss()
    finally:
        b12x.unfreeze_kernel_resolution()
        monkeypatch.undo()
        b12x.clear_all_caches()


@pytest.fixture
def arguments(target, rng):
    """A valid plan, 9 tokens at most, and what both forms of bind take for 4."""
    model, _, rope = rotated(rng, HEADS[0], "float32", torch.int32, 4)
    plan = wo_projection.plan(model.caps(target, 9))
    common = {"scratch": torch.empty(plan.layout.nbytes, dtype=torch.uint8), "weights": model.weights}
    return plan, common, {"source_tgd": torch.zeros(4, 2, 128, dtype=BF16)}, rope


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda: {"scratch": {}}, KeyError, ["scratch"]),
        (lambda: {"weights": None}, TypeError, ["weights is a NoneType", "pack_weights"]),
        (lambda: {"source_tgd": torch.zeros(4, 2, 128)}, TypeError, ["source_tgd has dtype float32", "bfloat16"]),
        (
            lambda: {"source_tgd": torch.zeros(4, 256, dtype=BF16)},
            ValueError,
            ["source_tgd has shape (4, 256)", "(any, 2, 128)"],
        ),
        (lambda: {"source_tgd": torch.zeros(10, 2, 128, dtype=BF16)}, ValueError, ["10 tokens", "max_tokens = 9"]),
        (
            lambda: {"source_tgd": torch.zeros(4, 128, 2, dtype=BF16).mT},
            ValueError,
            ["source_tgd", "strides (256, 1, 2)"],
        ),
        (lambda: {"expected_m": 0}, ValueError, ["expected_m is 0"]),
    ],
)
def test_refusals(arguments, change, error, words):
    plan, common, source, _ = arguments
    with pytest.raises(error) as caught:
        plan.bind(**(common | source | change()))
    assert all(word in str(caught.value) for word in ["gemm.wo_projection", *words]), caught.value


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda: {"heads_per_group": 2}, ValueError, ["heads_per_group is 2", "256 columns; needed are 128"]),
        (lambda: {"nope_dim": 32}, ValueError, ["nope_dim 32", "96 columns; needed are 128"]),
        (
            lambda: {"cos_sin_cache": torch.zeros(50, 64).half()},
            TypeError,
            ["cos_sin_cache has dtype float16", "float32"],
        ),
        (lambda: {"cos_sin_cache": torch.zeros(50, 32)}, ValueError, ["cos_sin_cache has shape (50, 32)", "(any, 64)"]),
        (lambda: {"positions": torch.zeros(5, dtype=torch.int32)}, ValueError, ["positions has shape (5,)", "(4,)"]),
        (lambda: {"positions": torch.zeros(4)}, TypeError, ["positions has dtype float32", "int32 or int64"]),
        (
            lambda: {"o": torch.zeros(4, 2, 192, dtype=BF16)[..., :128]},
            ValueError,
            ["o of shape (4, 2, 128)", "(any, 128, 1)"],
        ),
        (lambda: {"o": torch.zeros(4, 3, 128, dtype=BF16)}, ValueError, ["o has shape (4, 3, 128)", "(any, 2, 128)"]),
    ],
)
def test_rope_refusals(arguments, change, error, words):
    plan, common, _, rope = arguments
    with pytest.raises(error) as caught:
        plan.bind_inv_rope(**(common | rope | change()))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "name", ["o", "positions", "cos_sin_cache", "wo_a values", "wo_a scales", "wo_b values", "wo_b scales"]
)
def test_what_is_read_is_not_in_the_scratch(arguments, name):
    """Where it lies in the scratch, what overlaps is named."""
    plan, common, _, rope = arguments
    common["scratch"] = scratch = torch.zeros(plan.layout.nbytes + 2 * 64 * 128, dtype=torch.uint8)

    def inside(x):
        return scratch[: x.nbytes].view(x.dtype).view(x.shape)

    change, weights = {}, common["weights"]
    if name in rope:
        change[name] = inside(rope[name])
    else:
        matrix, part = name.split()
        field = {"values": "values", "scales": "scale_mma"}[part]
        order = {2: (0, 1), 3: (2, 0, 1), 6: (5, 2, 4, 0, 1, 3)}[getattr(getattr(weights, matrix), field).ndim]
        old = getattr(weights, matrix)
        stored = inside(getattr(old, field).permute(order))
        new = old._replace(**{field: stored if len(order) == 6 else stored.permute(np.argsort(order).tolist())})
        change["weights"] = replace(weights, **{matrix: new})
    said = name if name in rope else f"weights.{name}"
    with pytest.raises(ValueError, match=f"output scratch and {said} overlap"):
        plan.bind_inv_rope(**(common | rope | change))


def test_bind_resolves_nothing(arguments, monkeypatch):
    """Nor does the first bind with a rope, of any dimensions and of either dtype."""
    plan, common, source, rope = arguments

    def refuse(*args):
        raise AssertionError("a bind resolved kernels")

    monkeypatch.setattr(resolve, "resolve_all", refuse)
    plan.bind(**common, **source)
    nine = {"o": torch.zeros(9, 2, 128, dtype=BF16), "positions": torch.zeros(9, dtype=torch.int32)}
    for dtype in (torch.float32, BF16):
        for nope_dim in (64, 96):
            dims = {"nope_dim": nope_dim, "rope_dim": 128 - nope_dim}
            cache = {"cos_sin_cache": torch.ones(50, 128 - nope_dim, dtype=dtype)}
            for part in ({}, nine):
                assert plan.bind_inv_rope(**(common | rope | part | dims | cache)).launches


def test_other_refusals(arguments):
    plan, common, source, rope = arguments
    binding = plan.bind(**common, **source)
    inside = common["scratch"][: 4 * 2 * 128 * 2].view(BF16).view(4, 2, 128)
    other = dict(zip(("groups", "group_width", "rank", "hidden"), (2, 128, 64, 48), strict=True))
    wrong = wo_projection.Weights(common["weights"].wo_a, common["weights"].wo_b, **other)
    for call, error, words in (
        (lambda: wo_projection.run(source["source_tgd"], common["weights"]), TypeError, "run got no binding"),
        (lambda: wo_projection.run(source["source_tgd"], binding=binding), ValueError, "the binding alone"),
        (lambda: wo_projection.run_inv_rope(rope["o"]), TypeError, "needs either binding, or all of o"),
        (lambda: wo_projection.run_inv_rope(rope["o"], binding=binding), ValueError, "pass one or the other"),
        (lambda: wo_projection.run_inv_rope(**rope, weights=3), TypeError, "weights is a int"),
        (lambda: wo_projection.run(binding=3), TypeError, "binding is a int"),
        (lambda: plan.bind(**common, source_tgd=inside), ValueError, "output scratch and source_tgd overlap"),
        (
            lambda: plan.bind(**common | {"weights": wrong}, **source),
            ValueError,
            "weights have hidden 48; needed is 40",
        ),
        (lambda: wo_projection.quantize_input(rope["o"][0]), ValueError, r"source_tgd has shape \(2, 128\)"),
        (lambda: wo_projection.quantize_input_b(rope["o"].float()), TypeError, "source_trg has dtype float32"),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "gemm.wo_projection" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_width": 96}, ["group_width is 96", "multiple of 128"]),
        ({"rank": 20}, ["rank is 20", "multiple of 8"]),
        ({"groups": 3, "rank": 32}, ["groups 3", "128"]),
        ({"dtype": "float16"}, ["dtype is 'float16'", "'bfloat16'"]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
    ],
)
def test_caps(change, words):
    arguments = {"max_tokens": 4, "groups": 2, "group_width": 128, "rank": 64, "hidden": 8} | change
    with pytest.raises(ValueError, match=r"gemm\.wo_projection") as caught:
        wo_projection.Caps(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value
