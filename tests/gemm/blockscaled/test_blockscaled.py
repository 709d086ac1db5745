"""``gemm.blockscaled`` on the chosen target against float64, judged element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import b12x
from b12x._runtime import counters
from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.reference import tolerance
from b12x.quantization import scales
from tests.nvfp4_data import Operand, operand, random_operand

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RECIPE = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "sf_vec_size": 16}


def product(a: Operand, b: Operand, alpha=1.0) -> np.ndarray:
    """float64 ``[L, M, N]``."""
    return np.asarray(alpha).reshape(-1, 1, 1) * np.einsum("lmk,lnk->lmn", a.values, b.values)


def check(out: torch.Tensor, a: Operand, b: Operand, c_dtype: str, alpha=1.0) -> None:
    """Every element within half a unit of the output plus the bound on f32 accumulation."""
    reference = product(a, b, alpha)
    got = out.permute(2, 0, 1).to(torch.float64).cpu().numpy()
    factors = np.broadcast_to(np.asarray(alpha), (len(reference),))
    for index, factor in enumerate(factors):
        bound = tolerance(a.values[index], b.values[index], float(factor), c_dtype)
        worst = np.abs(got[index] - reference[index]) - bound
        assert (worst <= 0).all(), f"batch {index}: off by {worst.max():.3g} beyond the bound at {worst.argmax()}"


def guarded(m: int, n: int, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned C ``[M, N, L]`` inside a larger buffer, and the buffer."""
    margin = 64
    buffer = torch.full((batch * m * n + 2 * margin,), float("nan"), dtype=dtype)
    return buffer[margin : margin + batch * m * n].view(batch, m, n).permute(1, 2, 0), buffer


def served_by(target, role: str, m: int, n: int, k: int, c_dtype: str) -> blockscaled.Plan:
    """A plan that gives all rows to one kernel."""
    caps = blockscaled.Caps(device=target.device, c_dtype=c_dtype, max_m=max(m, 65), n=n, k=k)
    return blockscaled.plan(caps, table=[planner.Choice(None, role, 1)])


def tensors(a: Operand, b: Operand, c_dtype: str) -> dict:
    """The arguments of ``bind``, with a poisoned C."""
    out, _ = guarded(a.tensor.shape[0], b.tensor.shape[0], a.tensor.shape[2], DTYPES[c_dtype])
    return {"lhs": a.pair, "rhs": b.pair, "out": out}


@pytest.mark.parametrize("c_dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["normal", "octaves", "mean1"])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 72, 128), (70, 136, 384), (33, 40, 1152)])
def test_distributions(target, rng, c_dtype, distribution, m, n, k):
    """Ragged M and N, few rows and many, alpha from memory, poisoned scale pads and C."""
    a, b = random_operand(rng, 1, m, k, distribution), random_operand(rng, 1, n, k, distribution)
    alpha = 0.37
    out, buffer = guarded(m, n, 1, DTYPES[c_dtype])
    plan = blockscaled.plan(blockscaled.Caps(device=target.device, c_dtype=c_dtype, max_m=m, n=n, k=k))
    binding = plan.bind(lhs=a.pair, rhs=b.pair, out=out, alpha=torch.tensor([alpha]))
    assert blockscaled.run(binding=binding) is out
    check(out, a, b, c_dtype, np.float32(alpha))
    assert buffer[:64].isnan().all()
    assert buffer[-64:].isnan().all()


@pytest.mark.parametrize(("role", "m", "n", "k"), [("middle", 64, 64, 1408), ("prefill", 129, 132, 896)])
def test_many_k_steps(target, rng, role, m, n, k):
    """More K steps than stages plus one, and no multiple of them, so that the ring wraps at another place each time."""
    caps = blockscaled.Caps(c_dtype="float32", max_m=m, n=n, k=k)
    stages, steps = planner.spec(caps, role).stages, k // 128
    assert steps > stages + 1
    assert steps % stages
    a, b = random_operand(rng, 1, m, k, "distinct"), random_operand(rng, 1, n, k, "distinct")
    out = blockscaled.run(binding=served_by(target, role, m, n, k, "float32").bind(**tensors(a, b, "float32")))
    check(out, a, b, "float32")


@pytest.mark.parametrize(
    ("role", "m", "n", "c_dtype"), [("prefill", 300, 260, "bfloat16"), ("middle", 50, 300, "float16")]
)
def test_more_tiles_than_ctas(target, rng, role, m, n, c_dtype):
    """Each persistent CTA takes several tiles, and the ring of stages runs on across them.

    Nine tiles for two CTAs are also an odd number for the two consumer groups of one.
    """
    a, b = random_operand(rng, 1, m, 384, "octaves"), random_operand(rng, 1, n, 384, "octaves")
    binding = served_by(target, role, m, n, 384, c_dtype).bind(**tensors(a, b, c_dtype), sm_count=2)
    assert binding.launch.grid == (2, 1, 1)
    check(blockscaled.run(binding=binding), a, b, c_dtype)


def test_batch_in_one_launch(target, rng):
    """L = 3 with one alpha an entry: one launch, and no entry reads another's rows, columns or scales."""
    m, n, k = 66, 40, 256
    a, b = random_operand(rng, 3, m, k, "distinct"), random_operand(rng, 3, n, k, "distinct")
    alpha = torch.tensor([1.0, -0.5, 3.0])
    before = counters.launches.total()
    out = blockscaled.mm(a.pair, b.pair, c_dtype="float32", alpha=alpha, **RECIPE)
    assert counters.launches.total() == before + 1
    check(out, a, b, "float32", alpha.cpu().numpy())


@pytest.mark.parametrize("rows", [64, 1024])
def test_one_hot_rows(target, rng, rows):
    """A one-hot row at every (row % 16, k % 64), on both tiles, reads B back exactly with a scale of its own.

    So no fragment, lane, nibble or scale is misplaced: any would bring another column's or block's value.
    """
    k, n, total = 128, 72, 16 * 64
    b = random_operand(rng, 1, n, k, "distinct")
    row = np.arange(total)
    hot = row // 16 % 64 + 64 * (row // 512)
    codes, scale_bytes = np.zeros((1, total, k), np.uint8), np.full((1, total, k // 16), 0x7E, np.uint8)
    codes[0, row, hot] = rng.integers(1, 8, total)
    scale_bytes[0, row, hot // 16] = 0x28 + rng.integers(0, 32, total)
    assert len({(r % 16, h % 64) for r, h in zip(row.tolist(), hot.tolist(), strict=True)}) == total
    for first in range(0, total, rows):
        part = slice(first, first + rows)
        a = operand(codes[:, part], scale_bytes[:, part], rng)
        out = blockscaled.mm(a.pair, b.pair, c_dtype="float32", **RECIPE)
        np.testing.assert_array_equal(out[:, :, 0].to(torch.float64).cpu().numpy(), product(a, b)[0])


def test_exact_grid_is_bit_exact(target, rng):
    """Where every partial sum is representable in f32, C is the correctly rounded product."""
    codes_a = rng.integers(0, 16, (1, 100, 256)).astype(np.uint8)
    codes_b = rng.integers(0, 16, (1, 130, 256)).astype(np.uint8)
    a, b = (operand(c, np.full((1, c.shape[1], 16), 0x38, np.uint8), rng) for c in (codes_a, codes_b))
    for c_dtype, dtype in DTYPES.items():
        out = blockscaled.mm(a.pair, b.pair, c_dtype=c_dtype, **RECIPE)
        assert torch.equal(out[:, :, 0], torch.tensor(product(a, b)[0]).to(dtype))


def test_row_does_not_depend_on_its_batch(target, rng):
    """A row's bits are the same alone, at another position, and under another grid."""
    a, b = random_operand(rng, 1, 40, 256, "octaves"), random_operand(rng, 1, 72, 256, "octaves")
    whole = blockscaled.mm(a.pair, b.pair, c_dtype="float32", **RECIPE)
    again = blockscaled.mm(a.pair, b.pair, c_dtype="float32", sm_count=1, **RECIPE)
    assert torch.equal(whole, again)
    tail = blockscaled.mm((a.tensor[7:8], _row_scales(a, 7)), b.pair, c_dtype="float32", **RECIPE)
    assert torch.equal(tail[0], whole[7])


def _row_scales(a: Operand, row: int) -> torch.Tensor:
    """Swizzled scales of one row moved to row 0."""
    view = a.scales.view(1, 1, -1, 32, 4, 4)
    moved = torch.full_like(view, 0xFF)
    moved[:, :, :, 0, 0] = view[:, :, :, row % 32, row // 32]
    return moved


def test_pitched_operands(target, rng):
    """Rows of A and B may lie at a pitch of any multiple of 16 bytes; what lies between is not read."""
    a, b = random_operand(rng, 1, 20, 128, "distinct"), random_operand(rng, 1, 24, 128, "distinct")
    wide = torch.full((20, 64 + 16, 1), 0x77, dtype=torch.uint8)
    wide[:, :64] = a.tensor
    out = blockscaled.mm((wide[:, :64], a.scales), b.pair, c_dtype="float32", **RECIPE)
    check(out, a, b, "float32")


def test_scale_operand_forms(target, rng):
    """Scales come as the 6-D view, as flat bytes, or as E4M3; the result is the same."""
    a, b = random_operand(rng, 1, 9, 128, "distinct"), random_operand(rng, 1, 40, 128, "distinct")
    view = a.scales.view(1, 1, 2, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
    results = [
        blockscaled.mm((a.tensor, form), b.pair, c_dtype="bfloat16", **RECIPE)
        for form in (a.scales, view, a.scales.view(torch.float8_e4m3fn))
    ]
    assert all(torch.equal(r, results[0]) for r in results)


def test_empty_m(target, rng):
    """M = 0 launches nothing and returns an empty C."""
    b = random_operand(rng, 1, 40, 128, "normal")
    a = (torch.empty(0, 64, 1, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
    before = counters.launches.total()
    out = blockscaled.mm(a, b.pair, c_dtype="bfloat16", **RECIPE)
    assert out.shape == (0, 40, 1)
    assert counters.launches.total() == before


def test_alpha_is_read_at_run_time(target, rng):
    a, b = random_operand(rng, 1, 4, 128, "normal"), random_operand(rng, 1, 8, 128, "normal")
    plan = blockscaled.plan(blockscaled.Caps(device=target.device, c_dtype="float32", max_m=4, n=8, k=128))
    alpha, out = torch.ones(1), torch.empty(1, 4, 8).permute(1, 2, 0)
    binding = plan.bind(lhs=a.pair, rhs=b.pair, out=out, alpha=alpha)
    first = blockscaled.run(binding=binding).clone()
    alpha.fill_(2.0)
    assert torch.equal(blockscaled.run(binding=binding), 2 * first)


def test_group_function_is_the_op():
    assert b12x.gemm.mm is blockscaled.mm


def test_every_live_m_uses_a_planned_kernel(target, rng):
    """Sweep live M under one plan: each launch's key is one the plan lists."""
    plan = blockscaled.plan(blockscaled.Caps(device=target.device, c_dtype="bfloat16", max_m=200, n=16, k=128))
    planned = {kernel.spec.key for kernel in plan.kernels.values()}
    b = random_operand(rng, 1, 16, 128, "normal")
    used = set()
    assert {choice.role for choice in plan.table} <= set(plan.kernels)
    for m in (1, 16, 17, 63, 64, 65, 128, 200):
        a = random_operand(rng, 1, m, 128, "normal")
        counters.reset()
        blockscaled.run(binding=plan.bind(lhs=a.pair, rhs=b.pair, out=guarded(m, 16, 1, torch.bfloat16)[0]))
        used |= set(counters.launches)
    assert used <= planned
    assert len(used) >= 2


@pytest.fixture
def arguments(target, rng):
    """A valid plan and its tensors: M = 4 of at most 8, N = 24, K = 256."""
    a, b = random_operand(rng, 1, 4, 256, "normal"), random_operand(rng, 1, 24, 256, "normal")
    plan = blockscaled.plan(blockscaled.Caps(device=target.device, c_dtype="bfloat16", max_m=8, n=24, k=256))
    out = torch.empty(1, 4, 24, dtype=torch.bfloat16).permute(1, 2, 0)
    return plan, {"lhs": a.pair, "rhs": b.pair, "out": out}


U8 = torch.uint8


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda t: {"lhs": (t["lhs"][0].float(), t["lhs"][1])},
            TypeError,
            ["A has dtype float32", "uint8", "convert it"],
        ),
        (
            lambda t: {"lhs": (t["lhs"][0][:, :64], t["lhs"][1])},
            ValueError,
            ["A has shape (4, 64, 1)", "(any, 128, 1)", "reshape"],
        ),
        (
            lambda t: {"lhs": (torch.zeros(9, 128, 1, dtype=U8), t["lhs"][1])},
            ValueError,
            ["9 rows", "max_m = 8", "plan with a larger max_m"],
        ),
        (
            lambda t: {"lhs": (torch.zeros(4, 136, 1, dtype=U8)[:, :128], t["lhs"][1])},
            ValueError,
            ["row stride of 136 bytes", "multiple of 16", "copy it"],
        ),
        (
            lambda t: {"lhs": (torch.zeros(128, 4, 1, dtype=U8).transpose(0, 1), t["lhs"][1])},
            ValueError,
            ["A", "strides (1, 4, 1)", "(any, 1, any)", "copy it"],
        ),
        (
            lambda t: {"lhs": (torch.zeros(4 * 128 + 8, dtype=U8)[8:].view(4, 128, 1), t["lhs"][1])},
            ValueError,
            ["A starts", "multiple of 16", "or a copy"],
        ),
        (
            lambda t: {"lhs": (t["lhs"][0].to("meta"), t["lhs"][1])},
            ValueError,
            ["A is on meta", "device of the plan", "move it"],
        ),
        (lambda t: {"lhs": (t["lhs"][0], t["lhs"][1][:-512])}, ValueError, ["SFA", "2048 contiguous bytes", "swizzle"]),
        (
            lambda t: {"rhs": (t["rhs"][0], t["rhs"][1].int())},
            TypeError,
            ["SFB has dtype int32", "float8_e4m3fn", "convert it"],
        ),
        (lambda t: {"out": t["out"].float()}, TypeError, ["out has dtype float32", "bfloat16", "convert it"]),
        (
            lambda t: {"out": t["out"].permute(1, 0, 2)},
            ValueError,
            ["out has shape (24, 4, 1)", "(4, 24, 1)", "reshape"],
        ),
        (
            lambda t: {"out": torch.empty(4, 32, 1, dtype=torch.bfloat16)[:, :24]},
            ValueError,
            ["out", "strides (32, 1, 1)", "(24, 1, 96)", "copy it"],
        ),
        (lambda t: {"alpha": torch.ones(2)}, ValueError, ["alpha has shape (2,)", "(1,)", "pass one factor"]),
        (
            lambda t: {"alpha": torch.ones(1, dtype=torch.float64)},
            TypeError,
            ["alpha", "float64", "float32", "convert it"],
        ),
    ],
)
def test_refusals(arguments, change, error, words):
    """Each message names the argument, what was found, what is needed and what to do."""
    plan, tensors = arguments
    with pytest.raises(error) as caught:
        plan.bind(**(tensors | change(tensors)))
    assert all(word in str(caught.value) for word in ["gemm.blockscaled", *words]), caught.value


def test_what_was_checked_before_is_not_taken_for_granted(arguments):
    """Tensors like those of an earlier binding, and unlike them in one thing: their place, or any single fact."""
    plan, tensors = arguments
    for _ in range(2):
        plan.bind(**tensors)
        (a, sfa), out = tensors["lhs"], tensors["out"]
        shifted = torch.zeros(a.numel() + 4, dtype=U8)[4:].as_strided(a.shape, a.stride())
        with pytest.raises(ValueError, match="A starts at an address 4 bytes past a multiple of 16"):
            plan.bind(**tensors | {"lhs": (shifted, sfa)})
        storage = torch.zeros(a.numel(), dtype=U8)
        inside = storage[: 2 * out.numel()].view(torch.bfloat16).as_strided(out.shape, out.stride())
        with pytest.raises(ValueError, match="output out and A overlap"):
            plan.bind(**tensors | {"lhs": (storage.as_strided(a.shape, a.stride()), sfa), "out": inside})
        with pytest.raises(TypeError, match="out has dtype float16"):
            plan.bind(**tensors | {"out": out.view(torch.float16)})
        with pytest.raises(ValueError, match="out is on meta"):
            plan.bind(**tensors | {"out": out.to("meta")})


def test_refuses_overlap(arguments):
    plan, tensors = arguments
    storage = tensors["lhs"][0].permute(2, 0, 1).reshape(-1).view(torch.bfloat16)
    tensors["out"] = storage[:96].view(1, 4, 24).permute(1, 2, 0)
    tensors["lhs"] = (storage.view(U8).view(4, 128, 1), tensors["lhs"][1])
    with pytest.raises(ValueError, match=r"output out and A overlap.*pass a copy"):
        plan.bind(**tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 192}, ["k is 192", "multiple of 128", "pad the weight"]),
        ({"c_dtype": "float64"}, ["c_dtype is 'float64'", "'bfloat16', 'float16', 'float32'", "convert C"]),
        ({"sf_vec_size": 32}, ["no recipe", "32", "nvfp4", "choose"]),
        ({"n": 0}, ["n is 0", "needed is 1 to 2147483392", "choose"]),
    ],
)
def test_caps_refusals(change, words):
    with pytest.raises(ValueError, match=words[0]) as caught:
        blockscaled.Caps(**({"c_dtype": "bfloat16", "max_m": 1, "n": 8, "k": 128} | change))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cluster_shape_mn": (2, 1)}, ValueError, "cluster_shape_mn"),
        ({"swap_ab": True}, ValueError, "swap_ab=True is not available"),
        ({"plain_fp8": True}, ValueError, "plain_fp8 goes with"),
        ({"tile": 3}, TypeError, "no argument 'tile'"),
        ({"alpha_dtype": "float16"}, ValueError, "read as 'float32'"),
        ({"expected_m": 0}, ValueError, "needed is 1 to .*leave the hint out"),
    ],
)
def test_mm_refuses_what_it_does_not_do(target, rng, change, error, words):
    a, b = random_operand(rng, 1, 4, 128, "normal"), random_operand(rng, 1, 8, 128, "normal")
    with pytest.raises(error, match=words):
        blockscaled.mm(a.pair, b.pair, c_dtype="bfloat16", **RECIPE, **change)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: {"lhs": t["lhs"][0]}, TypeError, ["lhs is a Tensor", "a pair of tensors", "pass lhs=(A, SFA)"]),
        (lambda t: {"lhs": None}, TypeError, ["lhs is a NoneType", "a pair of tensors", "pass lhs=(A, SFA)"]),
        (lambda t: {"rhs": (*t["rhs"], 1)}, TypeError, ["rhs is a tuple of 3", "a pair", "pass rhs=(B, SFB)"]),
        (lambda t: {"lhs": ([1], t["lhs"][1])}, TypeError, ["A is a list", "needed is a uint8", "make one"]),
        (lambda t: {"lhs": (t["lhs"][0], None)}, TypeError, ["SFA is None", "needed are the scales", "only plain_fp8"]),
        (
            lambda t: {"lhs": (torch.tensor(1, dtype=U8), t["lhs"][1])},
            ValueError,
            ["A has shape ()", "needed is (any, 128, 1)", "reshape"],
        ),
        (lambda t: {"out": None}, TypeError, ["out is a NoneType", "needed is a bfloat16 tensor", "make one"]),
        (lambda t: {"alpha": 0.5}, TypeError, ["alpha is a float", "needed is a float32 tensor", "make one"]),
        (lambda t: {"alpha": torch.tensor(1.0)}, ValueError, ["alpha has shape ()", "needed is (1,)", "1-D tensor"]),
        (lambda t: {"alpha": torch._neg_view(torch.ones(1))}, ValueError, ["alpha", "memory holds", "resolve_neg"]),
        (lambda t: {"sm_count": 0}, ValueError, ["sm_count is 0", "needed is 1 to", "choose"]),
        (lambda t: {"sm_count": -1}, ValueError, ["sm_count is -1", "needed is 1 to", "choose"]),
        (lambda t: {"sm_count": "2"}, TypeError, ["sm_count is '2'", "needed is an int", "convert"]),
        (lambda t: {"sm_count": 2.5}, TypeError, ["sm_count is 2.5", "needed is an int", "convert"]),
    ],
)
def test_wrong_types_are_refused(arguments, change, error, words):
    plan, tensors = arguments
    with pytest.raises(error) as caught:
        plan.bind(**(tensors | change(tensors)))
    assert all(word in str(caught.value) for word in ["gemm.blockscaled: ", *words]), caught.value


@pytest.mark.parametrize("rank", [2, 3])
def test_linear_scales_are_refused(arguments, rank):
    """Those of enough bytes too, which would be read as if they were swizzled."""
    plan, tensors = arguments
    linear = torch.full((128, 16), 0x38, dtype=U8)
    form = linear if rank == 2 else linear[None]
    for name, scale in (("lhs", "SFA"), ("rhs", "SFB")):
        with pytest.raises(ValueError, match=f"{scale} has shape") as caught:
            plan.bind(**(tensors | {name: (tensors[name][0], form)}))
        for word in ("swizzled scales", "[1, 1, 4, 32, 4, 4]", "2048 contiguous bytes", "scales.swizzle makes them"):
            assert word in str(caught.value)
    plan.bind(**(tensors | {"lhs": (tensors["lhs"][0], scales.swizzle(form))}))
    with pytest.raises(ValueError, match="swizzle makes them of linear scales"):
        scales.unswizzle(form, 128, 16)


@pytest.mark.parametrize("binding", [None, 1])
def test_run_needs_a_binding(binding):
    with pytest.raises(TypeError, match=r"binding is a .*; needed is a Binding: make one with bind"):
        blockscaled.run(binding=binding)


def test_mm_needs_tensors(target, rng):
    a, b = random_operand(rng, 1, 4, 128, "normal"), random_operand(rng, 1, 8, 128, "normal")
    for lhs, error, words in (
        (None, TypeError, r"lhs is a NoneType; needed is a pair of tensors: pass lhs=\(A, SFA\)"),
        ((1, 2), TypeError, "A is a int; needed is a uint8 or float4_e2m1fn_x2 or float8_e4m3fn"),
        ((a.tensor[:, :, 0], a.scales), ValueError, r"A has shape \(4, 64\) .*needed are .*unsqueeze"),
    ):
        with pytest.raises(error, match=words):
            blockscaled.mm(lhs, b.pair, c_dtype="bfloat16", **RECIPE)


@pytest.mark.parametrize("name", ["max_m", "n", "k", "batch"])
@pytest.mark.parametrize("value", [1.5, 128.0, True, "4"])
def test_caps_take_ints(name, value):
    with pytest.raises(TypeError, match=f"{name} is {value!r}, a {type(value).__name__}; needed is an int: convert"):
        blockscaled.Caps(**({"c_dtype": "bfloat16", "max_m": 1, "n": 8, "k": 128} | {name: value}))


@pytest.mark.parametrize(
    ("name", "most", "beyond"), [*((n, 2**31 - 256, 2**31 - 255) for n in ("max_m", "n", "k")), ("batch", 65535, 65536)]
)
def test_largest_caps(name, most, beyond):
    sizes = {"c_dtype": "bfloat16", "max_m": 1, "n": 8, "k": 128}
    assert getattr(blockscaled.Caps(**(sizes | {name: most})), name) == most
    with pytest.raises(ValueError, match=f"{name} is {beyond}; needed is 1 to {most}: choose"):
        blockscaled.Caps(**(sizes | {name: beyond}))


def test_binding_does_not_print_its_tensors(arguments):
    plan, tensors = arguments
    assert repr(plan.bind(**tensors)).endswith(f"out=bfloat16[4, 24, 1] on {tensors['out'].device})")
