"""The MMA probe: its operands' layout, its figures, and the command on the emulator."""

from __future__ import annotations

import pytest
import torch

from b12x.verify import probe
from b12x.verify.mma.cases import MmaCase, fragments, random_matrix
from b12x.verify.mma.spec import KINDS, MmaSpec


@pytest.mark.parametrize("kind", KINDS)
def test_one_hot_row_reads_b_back(target, kind):
    """Every row of A and every k: no fragment, lane or scale is misplaced."""
    k_mma, bits = KINDS[kind]
    one = {"f16": 0x3C00, "bf16": 0x3F80, "e4m3": 0x38, "mxf8f6f4": 0x38, "mxf4nvf4": 2}[kind]
    generator = torch.Generator(target.device).manual_seed(1)
    case = MmaCase(size="small", kind=kind, tiles=4, k=4 * k_mma, distribution="octaves")
    chain = case.chain(target.device, generator)
    a, b = (random_matrix(generator, kind, 4, rows, 4 * k_mma, "octaves") for rows in (16, 8))
    codes = torch.zeros_like(a.codes)
    hot = (torch.arange(4 * 16).view(4, 16) * 5) % (4 * k_mma)
    for tile in range(4):
        for row in range(16):
            at = int(hot[tile, row]) * bits
            for byte in range(max(bits // 8, 1)):
                codes[tile, row, at // 8 + byte] = (one << at % 8) >> 8 * byte & 0xFF
    a_words, b_words = fragments(type(a)(codes, a.scales, a.values), b)
    chain._operands[0].copy_(a_words)
    chain._operands[1].copy_(b_words)
    chain.launch()
    # What A's one value is worth with its block scale.
    ones = torch.ones((4, 16, 4 * k_mma), dtype=torch.float64)
    if kind == "mxf8f6f4":
        ones *= torch.exp2((a.scales - 127).double()).repeat_interleave(k_mma, dim=-1)
    elif kind == "mxf4nvf4":
        ones *= a.scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, dim=-1)
    factor = ones.gather(-1, hot.unsqueeze(-1))
    wanted = factor * b.values.gather(-1, hot.unsqueeze(1).expand(4, 8, 16)).mT
    assert torch.equal(chain.result().double(), wanted)


def truncated(a: torch.Tensor, b: torch.Tensor, step: int) -> torch.Tensor:
    """Sums over K in f32 that lose what does not fit, a step at a time."""
    total = torch.zeros(a.shape[:-1], dtype=torch.float64, device="cpu")
    for start in range(0, a.shape[-1], step):
        part = slice(start, start + step)
        total += (a[..., part] * b[..., part]).sum(-1)
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp(torch.trunc(mantissa * 2.0**24), exponent - 24)
    return total.float()


def test_figures_tell_truncation_from_rounding():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn((500, 7168), generator=generator, device="cpu").abs().half().double() for _ in range(2))
    reference = (a * b).sum(-1)
    rounded = torch.zeros(500, device="cpu")
    for start in range(0, 7168, 16):
        rounded = (rounded.double() + (a * b)[:, start : start + 16].sum(-1)).float()
    readings = {
        name: probe.read("f16", "positive", found, reference, reference)
        for name, found in (
            ("truncated", truncated(a, b, 16)),
            ("rounded", rounded),
            ("exact", reference.float()),
        )
    }
    assert {name: reading.looks_like for name, reading in readings.items()} == {
        "truncated": "truncation",
        "rounded": "rounding",
        "exact": "exact",
    }
    assert readings["truncated"].bias == -1.0
    assert readings["truncated"].relative > 10 * readings["rounded"].relative
    assert readings["truncated"].worst_of_sum == pytest.approx(readings["truncated"].relative, rel=0.2)
    # Signs that cancel hide which way sums were rounded, so nothing is said.
    assert probe.read("f16", "normal", rounded, reference, reference).looks_like == ""


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"has the kinds f16, bf16, e4m3, mxf8f6f4, mxf4nvf4, not 'tf32'"):
        MmaSpec(kind="tf32")
