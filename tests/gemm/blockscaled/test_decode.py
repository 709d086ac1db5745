"""The decode kernel: every recipe and dtype, every M, splits of K, and what must not matter."""

from __future__ import annotations

import math

import pytest
import torch

import b12x
from b12x import emulator
from b12x._runtime import counters
from b12x.gemm import blockscaled
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.decode_spec import DecodeSpec
from b12x.gemm.blockscaled.recipes import BY_DTYPES, C_DTYPES, RECIPES
from b12x.quantization import scales
from b12x.verify.case import Tally, half_ulp
from b12x.verify.operands import ENCODINGS, Operand, random_operand

_DTYPES = {recipe: dtypes for dtypes, recipe in BY_DTYPES.items()} | {"fp8": ("float8_e4m3fn", "float8_e8m0fnu", 32)}
_GUARD = 64

#: M, N, K, L and split: one K step; tails on N of 8, 4 and none; more steps than the stages of all warps, fewer than
#: parts of K, and a number that does not divide by them; a batch.
_SHAPES = (
    (1, 72, 128, 1, 1),
    (16, 132, 2304, 1, 1),
    (9, 136, 1408, 3, 2),
    (8, 72, 1152, 1, 3),
    (2, 132, 256, 2, 4),
    (15, 256, 1536, 1, 4),
    (16, 40, 1408, 1, 8),
)


def caps(recipe: str, c_dtype: str, m: int, n: int, k: int, batch: int = 1) -> planner.Caps:
    ab_dtype, sf_dtype, vec = _DTYPES[recipe]
    return planner.Caps(
        device=torch.get_default_device(),
        ab_dtype=ab_dtype,
        sf_dtype=sf_dtype,
        sf_vec_size=vec,
        c_dtype=c_dtype,
        max_m=m,
        n=n,
        k=k,
        batch=batch,
        plain_fp8=recipe == "fp8",
    )


def operands(seed: int, recipe: str, m: int, n: int, k: int, batch: int = 1, distribution: str = "normal"):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    a = random_operand(generator, m, k, distribution, batch, recipe)
    b = random_operand(generator, n, k, distribution, batch, recipe, 128 if recipe == "block_fp8" else 1)
    return a, b


def multiply(a: Operand, b: Operand, recipe: str, c_dtype: str, split: int = 1, **more) -> torch.Tensor:
    """C ``[L, M, N]`` by the decode kernel, in a guarded buffer."""
    (m, width, batch), n = a.codes.shape, b.codes.shape[0]
    k = width * 8 // RECIPES[recipe].bits
    count = batch * m * n
    buffer = torch.full((count + 2 * _GUARD,), math.nan, dtype=getattr(torch, c_dtype))
    c = buffer[_GUARD : _GUARD + count].view(batch, m, n)
    plan = blockscaled.plan(caps(recipe, c_dtype, m, n, k, batch), table=[planner.Choice(16, "decode", split)])
    binding = plan.bind(lhs=a.pair, rhs=b.pair, out=c.permute(1, 2, 0), **more)
    assert binding.launch.cluster == (split, 1, 1)
    blockscaled.run(binding=binding)
    assert buffer[:_GUARD].isnan().all()
    assert buffer[-_GUARD:].isnan().all()
    return c


def reference(a: Operand, b: Operand, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 C and the bound on its accumulation in f32."""
    rows, columns = a.values(), b.values().mT
    accumulation = (4 + rows.shape[-1] / RECIPES[recipe].mma_k) * 2.0**-23 * (rows.abs() @ columns.abs())
    return rows @ columns, accumulation


def assert_close(found: torch.Tensor, wanted: torch.Tensor, accumulation: torch.Tensor, c_dtype: str) -> None:
    tally = Tally()
    tally.add(found, wanted, half_ulp(wanted.abs() + accumulation, c_dtype) + accumulation)
    judgement = tally.judgement()
    assert not judgement.wrong, judgement


@pytest.mark.parametrize("c_dtype", C_DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes(target, recipe, c_dtype):
    for seed, (m, n, k, batch, split) in enumerate(_SHAPES):
        a, b = operands(seed, recipe, m, n, k, batch)
        wanted, accumulation = reference(a, b, recipe)
        small = 2.0**-14 if (recipe, c_dtype) == ("block_fp8", "float16") else 1.0  # its weights are any codes
        found = multiply(a, b, recipe, c_dtype, split, alpha=torch.full((1,), small))
        assert_close(found, small * wanted, small * accumulation, c_dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_do_not_depend_on_m_or_position(target, recipe):
    """Every M from 1 to 16: a row has the bits that it has among 16, wherever it stands; K split or not.

    On a grid: the emulator's MMA adds in an order that depends on how many it does at once.
    """
    a, b = operands(1, recipe, 16, 40, 384, distribution="grid")
    rows = a.codes
    for split in (1, 2):
        whole = multiply(a, b, recipe, "float32", split)
        for m in range(1, 17):
            part = Operand(a.encoding, rows[-m:], _of_rows(a, range(16 - m, 16)), a.linear[:, -m:])
            assert torch.equal(multiply(part, b, recipe, "float32", split), whole[:, -m:]), m


def _of_rows(a: Operand, chosen: range) -> torch.Tensor | None:
    """Scales of some rows."""
    if a.scales is None:
        return None
    linear = a.linear[:, list(chosen)].contiguous()
    return linear.permute(1, 2, 0) if a.encoding.scale == "f32" else scales.swizzle(linear)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_hot_rows_read_every_weight(target, recipe):
    """A one in each of the 128 places of a K step brings back B, rounded to f32 where its scales are of that dtype: no
    fragment, chunk or scale is misplaced."""
    n, k, bits = 136, 256, RECIPES[recipe].bits
    _, b = operands(2, recipe, 1, n, k, distribution="octaves")
    encoding = ENCODINGS[recipe]
    unit = {"e4m3": 0x38, "e8m0": 127}.get(encoding.scale, 1.0)
    linear = torch.full((1, 16, k // encoding.block), unit, dtype=torch.uint8 if encoding.scale[0] == "e" else None)
    if encoding.scale == "f32":
        taken = linear.permute(1, 2, 0)
    else:
        taken = None if encoding.scale == "none" else scales.swizzle(linear)
    weights, row = b.values()[0].T, torch.arange(16)
    for start in range(64, 192, 16):
        hot = start + row * 5 % 16
        codes = torch.zeros((16, k * bits // 8), dtype=torch.uint8)
        if bits == 4:
            codes[row, hot // 2] = torch.where(hot % 2 == 0, 0x02, 0x20).to(torch.uint8)
        else:
            codes[row, hot] = 0x38
            codes = codes.view(torch.float8_e4m3fn)
        a = Operand(encoding, codes.unsqueeze(-1), taken, linear)
        assert torch.equal(multiply(a, b, recipe, "float32")[0], weights[hot].float())


def test_repeats_to_the_bit_and_in_rank_order(target):
    """The same bits again; and parts of K that are added first to last: (1 + e) - 1 is not 1 + (e - 1)."""
    a, b = operands(3, "nvfp4", 3, 72, 1536, distribution="octaves")
    for split in (1, 2, 4, 8):
        assert torch.equal(multiply(a, b, "nvfp4", "float32", split), multiply(a, b, "nvfp4", "float32", split))
    # Of four parts of K, the first has 448^2, the second 2^-12, the third -448^2 and the fourth 2^-12 again.
    row = torch.zeros((1, 512, 1), dtype=torch.uint8)
    row[0, ::128, 0] = torch.tensor([0x7E, 0x08, 0x7E, 0x08], dtype=torch.uint8)
    column = row.clone()
    column[0, 256] = 0xFE
    one, other = (
        Operand(ENCODINGS["fp8"], codes.view(torch.float8_e4m3fn), None, torch.ones((1, 1, 4)))
        for codes in (row, column)
    )
    assert multiply(one, other, "fp8", "float32", 4).item() == 2.0**-12


@pytest.mark.parametrize("split", range(1, DecodeSpec.max_split + 1))
def test_every_split(target, split):
    """Any number of CTAs divides the K steps, also where there are fewer, or where they do not divide by it."""
    for steps in (1, 2, 7, 19):
        a, b = operands(steps, "nvfp4", 3, 40, 128 * steps)
        assert_close(multiply(a, b, "nvfp4", "float32", split), *reference(a, b, "nvfp4"), "float32")


@pytest.mark.parametrize("n", [72, 133])
def test_alpha_and_bias(target, n):
    """One factor an entry or one for all, read when the kernel runs; the bias is added to the rounded product."""
    a, b = operands(4, "mxfp8", 5, n, 256, 3)
    product, accumulation = reference(a, b, "mxfp8")
    alpha = torch.tensor([0.5, -2.0, 1.25])
    bias = torch.linspace(-3, 3, n).bfloat16()
    plain = multiply(a, b, "mxfp8", "bfloat16", 2, alpha=alpha)
    factors = alpha.double().view(3, 1, 1)
    assert_close(plain, factors * product, factors.abs() * accumulation, "bfloat16")
    shifted = multiply(a, b, "mxfp8", "bfloat16", 2, alpha=alpha, bias=bias)
    assert torch.equal(shifted, (plain.float() + bias.float()).bfloat16())
    single = multiply(a, b, "mxfp8", "float32", 1, alpha=alpha[1:2])
    assert torch.equal(single, -2 * multiply(a, b, "mxfp8", "float32", 1))


def test_strides(target):
    """Rows and entries of both operands further apart than they need; what lies between holds NaN codes."""
    a, b = operands(5, "mxfp8", 7, 72, 256, 2)

    def apart(x: torch.Tensor) -> torch.Tensor:
        rows, width, batch = x.shape
        wide = torch.full((batch, rows + 3, width + 48), 0xFF, dtype=torch.uint8)
        view = wide[:, :rows, :width]
        view.copy_(x.view(torch.uint8).permute(2, 0, 1))
        return view.permute(1, 2, 0).view(torch.float8_e4m3fn)

    wanted = multiply(a, b, "mxfp8", "float32")
    spread = [Operand(x.encoding, apart(x.codes), x.scales, x.linear) for x in (a, b)]
    assert torch.equal(multiply(*spread, "mxfp8", "float32"), wanted)


@pytest.mark.parametrize("recipe", ["nvfp4", "block_fp8"])
def test_any_order_of_the_warps(target, recipe):
    """Warps in random order, copies at once or as late as may be: the same bits, and no race."""
    if target.name != "emulator":
        pytest.skip("the order of warps is the emulator's to choose")
    results = []
    for seed, copies in enumerate(("late", "eager", "late")):
        schedule = emulator.Options(schedule="random", seed=seed, copies=copies, races="strict")
        with b12x.target("emulator", options=schedule):
            a, b = operands(6, recipe, 9, 72, 1664)
            results.append(multiply(a, b, recipe, "float32", 2))
    assert all(torch.equal(result, results[0]) for result in results)


def test_one_launch(target):
    a, b = operands(7, "nvfp4", 4, 72, 512)
    before = counters.launches.total()
    multiply(a, b, "nvfp4", "bfloat16", 4)
    assert counters.launches.total() == before + 1


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_row_has_one_cta(recipe, tokens):
    """The tiles of N hold every row once, and none is empty."""
    spec = DecodeSpec(recipe=recipe, c_dtype="bfloat16", tokens=tokens)
    for n in range(1, 300):
        rows = []
        for tile in range(spec.tiles(n)):
            block, place = divmod(tile, 128 // spec.rows)
            first = block * 128 + place % 4 * 8 + place // 4 * 64
            mine = [first + local % 8 + local // 8 * 32 for local in range(spec.rows)]
            assert mine[0] < n
            rows += [row for row in mine if row < n]
        assert sorted(rows) == list(range(n))


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_stages(recipe, tokens):
    """Two CTAs share an SM, and each asks for at least 16 KiB of weights before it waits."""
    spec = DecodeSpec(recipe=recipe, c_dtype="bfloat16", tokens=tokens)
    smem = spec.abi().launch.dynamic_smem
    assert 2 * (smem + 1024) <= 100 * 1024
    assert spec.warps * spec.stages * spec.rows * spec.row_bytes >= 16 * 1024
    assert spec.stages >= 2


def test_refused_specs():
    for wrong in (
        {"recipe": "fp6"},
        {"c_dtype": "float64"},
        {"tokens": 4},
        {"source": "bfloat16"},
        {"source": "bfloat16", "recipe": "mxfp8"},
        {"rope": "float32"},
        {"source": "float32", "recipe": "mxfp8", "tokens": 8},
    ):
        with pytest.raises(ValueError, match=r"gemm\.blockscaled\.decode"):
            DecodeSpec(**({"recipe": "nvfp4", "c_dtype": "bfloat16"} | wrong))
