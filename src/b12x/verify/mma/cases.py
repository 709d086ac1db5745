"""Operands of the MMA probe, and its numerical cases: a chain of MMAs against float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from b12x._runtime import resolve, target
from b12x._runtime.spec import Role
from b12x.verify.case import Case, Judgement, Prepared, Tally, half_ulp
from b12x.verify.mma import planner
from b12x.verify.mma.spec import KINDS
from b12x.verify.operands import DISTRIBUTIONS, dequantise, quantise

_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "mxf8f6f4": torch.float8_e4m3fn}
#: Block scales of ``octaves``, as powers of two: from the lowest, below the highest.
_OCTAVES = (-3, 4)
_UE8M0_ONE = 127


@dataclass(frozen=True)
class Matrix:
    """``codes`` uint8 ``[tiles, rows, bytes]``, ``scales`` int32 words ``[tiles, rows, steps]``, ``values`` float64
    ``[tiles, rows, K]``."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def random_matrix(generator: torch.Generator, kind: str, tiles: int, rows: int, k: int, distribution: str) -> Matrix:
    """Seeded operand of a kind; ``normal`` N(0, 1), ``mean1`` N(1, 0.1), ``octaves`` N(0, 1) times a power of two for
    each MMA (kinds without scales), or with block scales that spread likewise; ``positive``: the magnitudes of that."""
    device = generator.device
    k_mma, _ = KINDS[kind]
    steps = k // k_mma
    x = torch.randn((tiles, rows, k), generator=generator, device=device)
    if distribution == "mean1":
        x = 1 + 0.1 * x
    elif distribution == "positive":
        x = x.abs()
    blocks = (tiles, rows, k // 16) if kind == "mxf4nvf4" else (tiles, rows, steps)
    octaves = torch.randint(*_OCTAVES, blocks, generator=generator, device=device)
    if distribution in ("normal", "mean1"):
        octaves.zero_()
    if kind == "mxf4nvf4":
        codes, linear = quantise(x)
        linear = (linear.int() + 8 * octaves).clamp(0, 0x7E).to(torch.uint8)  # 8 codes of E4M3 are an octave
        return Matrix(codes, linear.view(torch.int32), dequantise(codes, linear))
    factor = torch.exp2(octaves.float()).repeat_interleave(k_mma, dim=-1)
    words = torch.zeros((tiles, rows, steps), dtype=torch.int32, device=device)
    if kind == "mxf8f6f4":
        elements = x.to(_DTYPES[kind])
        words += (octaves + _UE8M0_ONE).int()
        values = elements.double() * factor
    else:
        elements = (x * factor).to(_DTYPES[kind])
        values = elements.double()
    return Matrix(elements.view(torch.uint8), words, values)


def fragments(a: Matrix, b: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's words of A ``[tiles, 16, K]`` and B ``[tiles, 8, K]``.

    Lane ``4 g + t``: register ``2 h + r`` of A holds row ``g + 8 r``, word ``4 h + t`` of the row's step; register h of
    B column g, that word. Scales: lanes ``4 g`` and ``4 g + 1`` hold rows g and g + 8 of A, lane ``4 g`` column g of B.
    """
    tiles, _, steps = a.scales.shape
    a_words = a.codes.contiguous().view(torch.int32).view(tiles, 2, 8, steps, 2, 4).permute(0, 3, 2, 5, 4, 1)
    b_words = b.codes.contiguous().view(torch.int32).view(tiles, 8, steps, 2, 4).permute(0, 2, 1, 4, 3)
    rest = torch.zeros((tiles, steps, 8, 4, 2), dtype=torch.int32, device=a.codes.device)
    rest[:, :, :, :2, 0] = a.scales.view(tiles, 2, 8, steps).permute(0, 3, 2, 1)
    rest[:, :, :, 0, 1] = b.scales.permute(0, 2, 1)
    return a_words.reshape(tiles, steps, 32, 4).contiguous(), torch.cat([b_words, rest], dim=-1).contiguous()


@dataclass(frozen=True, kw_only=True)
class MmaCase(Case):
    """``tiles`` independent m16n8 accumulators over K."""

    kind: str
    tiles: int
    k: int
    distribution: str

    @property
    def name(self) -> str:
        return f"{self.tiles}x16x8x{self.k} {self.kind} {self.distribution}"

    def roles(self) -> tuple[Role, ...]:
        return planner.roles(planner.Caps(kind=self.kind))

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        return self.chain(device, generator).prepared()

    def chain(self, device: str, generator: torch.Generator) -> Chain:
        """The launch with its operands and result at hand."""
        return Chain(self, device, generator)


class Chain:
    """A bound launch; ``reference`` and ``magnitude`` (the sum of ``|a b|``) are float64 ``[tiles, 16, 8]``."""

    def __init__(self, case: MmaCase, device: str, generator: torch.Generator) -> None:
        self.case = case
        a, b = (random_matrix(generator, case.kind, case.tiles, rows, case.k, case.distribution) for rows in (16, 8))
        self.reference = a.values @ b.values.mT
        self.magnitude = a.values.abs() @ b.values.abs().mT
        self._operands = fragments(a, b)
        self._words = torch.full((case.tiles, 8, 4, 2, 2), torch.nan, device=device)
        caps = planner.Caps(device=device, kind=case.kind)
        kernels = resolve.resolve_all("verify.mma", planner.roles(caps), target.current_target(device), caps)
        a_words, b_words = self._operands
        steps = case.k // KINDS[case.kind][0]
        self._launch = kernels["chain"].loaded.prepare({"a": a_words, "b": b_words, "d": self._words, "steps": steps})
        self._launch.grid = (case.tiles, 1, 1)

    def launch(self) -> None:
        self._launch.launch()

    def result(self) -> torch.Tensor:
        """f32 ``[tiles, 16, 8]``: registers 0, 1 are row g, columns 2 t, 2 t + 1, registers 2, 3 row g + 8."""
        return self._words.permute(0, 3, 1, 2, 4).reshape(self.case.tiles, 16, 8)

    def prepared(self) -> Prepared:
        return Prepared(
            launch=self.launch,
            judge=self._judge,
            flops=2 * self.case.tiles * 16 * 8 * self.case.k,
            bytes=sum(words.nbytes for words in self._operands) + self._words.nbytes,
        )

    def _judge(self) -> Judgement:
        accumulation = (4 + self.case.k / KINDS[self.case.kind][0]) * 2.0**-23 * self.magnitude
        bound = half_ulp(self.reference.abs() + accumulation, "float32") + accumulation
        tally = Tally()
        tally.add(self.result(), self.reference, bound)
        return tally.judgement()


CASES = tuple(
    case
    for kind in KINDS
    for distribution in DISTRIBUTIONS
    for case in (
        MmaCase(size="small", kind=kind, tiles=2, k=576, distribution=distribution),
        MmaCase(size="model", kind=kind, tiles=256, k=7168, distribution=distribution),
    )
)
