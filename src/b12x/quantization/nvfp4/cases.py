"""Numerical cases of ``quantization.nvfp4``: payload, scales and pads against the reference, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from b12x._runtime.spec import Role
from b12x.quantization import scales
from b12x.quantization.nvfp4 import api, planner, reference
from b12x.quantization.nvfp4.spec import DTYPES
from b12x.verify.case import Case, Judgement, Prepared, Tally

_POISON = 0xA5


@dataclass(frozen=True, kw_only=True)
class Nvfp4Case(Case):
    """``m`` live rows of ``k`` columns, outputs of ``k_out``, under a plan for ``capacity`` rows.

    Values: ``blocks`` differ by octaves, zero blocks among them; ``bits`` are any finite bit patterns.
    """

    m: int
    k: int
    capacity: int
    dtype: str
    values: str
    global_scale: float
    k_out: int | None = None

    @property
    def name(self) -> str:
        wide = f" to {self.k_out}" if self.k_out else ""
        return f"{self.m}x{self.k}{wide} of {self.capacity} {self.dtype} {self.values} G={self.global_scale:g}"

    def roles(self) -> tuple[Role, ...]:
        return planner.roles(planner.Caps(m=self.capacity, k=self.k, dtype=self.dtype, k_out=self.k_out))

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        x = self._rows(generator)
        global_scale = torch.tensor([self.global_scale], device=device)
        plan = api.plan(self.capacity, self.k, device=device, dtype=self.dtype, k_out=self.k_out)
        outputs = api.allocate_outputs(plan)
        for storage in (outputs.packed_a_storage, outputs.scale_storage):
            storage.fill_(_POISON)
        binding = plan.bind(x=x, global_scale=global_scale, outputs=outputs)
        return Prepared(
            launch=lambda: api.run(binding=binding),
            judge=lambda: self._judge(x, outputs),
            flops=0,
            bytes=x.nbytes + self.m * (self.k_out or self.k) // 2 + outputs.scale_storage.nbytes,
        )

    def _rows(self, generator: torch.Generator) -> torch.Tensor:
        shape, device = (self.m, self.k), generator.device
        dtype = getattr(torch, self.dtype)
        if self.values == "bits":
            bits = torch.randint(-(2**15), 2**15, shape, generator=generator, device=device).to(torch.int16)
            x = bits.view(dtype)
            return torch.where(x.isfinite(), x, torch.zeros_like(x))
        count = -(-self.k // reference.BLOCK)
        blocks = (self.m, count, 1)
        x = torch.randn((self.m, count, reference.BLOCK), generator=generator, device=device)
        x *= torch.exp2(torch.randint(-12, 6, blocks, generator=generator, device=device).float())
        x *= torch.randint(0, 8, blocks, generator=generator, device=device) > 0
        return x.view(self.m, -1)[:, : self.k].to(dtype).contiguous()

    def _judge(self, x: torch.Tensor, outputs: api.Outputs) -> Judgement:
        rows = torch.nn.functional.pad(x.float().cpu(), (0, (self.k_out or self.k) - self.k)).numpy()
        codes, linear = (torch.from_numpy(part) for part in reference.quantize(rows, self.global_scale))
        wanted = scales.swizzle(linear).view(-1)
        storage, found = outputs.scale_storage.cpu(), outputs.packed_a_storage[0].cpu()
        tally = Tally()
        for part, expected in (
            (found[: self.m], codes),
            (storage[: wanted.numel()], wanted),
            (found[self.m :], torch.full_like(found[self.m :], _POISON)),
            (storage[wanted.numel() :], torch.full_like(storage[wanted.numel() :], _POISON)),
        ):
            tally.add(part, expected.double())
        return tally.judgement()


def _cases(dtype: str) -> Iterator[Nvfp4Case]:
    case = partial(Nvfp4Case, dtype=dtype)
    yield case(size="small", m=131, k=192, capacity=300, values="blocks", global_scale=448 * 6 / 5.25)
    yield case(size="small", m=7, k=64, capacity=7, values="blocks", global_scale=1e-3)
    yield case(size="small", m=131, k=192, capacity=131, values="bits", global_scale=1.0)
    # Rows that end inside a block, and outputs with a scale tile more.
    yield case(size="small", m=70, k=360, k_out=512, capacity=70, values="blocks", global_scale=3.25)
    yield case(size="model", m=4096, k=7168, capacity=4096, values="blocks", global_scale=3.25)


CASES = tuple(case for dtype in DTYPES for case in _cases(dtype))
