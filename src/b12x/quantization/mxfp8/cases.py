"""Numerical cases of ``quantization.mxfp8``: values, both forms of the scales and pads against the reference, byte for
byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from b12x._runtime.spec import Role
from b12x.quantization import scales
from b12x.quantization.mxfp8 import api, planner, reference
from b12x.quantization.mxfp8.planner import BLOCK, Rope
from b12x.verify.case import Case, Judgement, Prepared, Tally

_POISON = 0xA5
#: Rows of a cos/sin cache.
_POSITIONS = 97


@dataclass(frozen=True, kw_only=True)
class Mxfp8Case(Case):
    """``m`` live rows of ``k`` columns, ``k_out`` of them written, under a plan for ``capacity`` rows.

    Values: ``blocks`` differ by octaves, zero blocks among them; ``bits`` are any finite bit patterns. A group's rows
    lie among the others' (``rows`` is then ``[M, G, K]``), and a ``span`` apart from its neighbour; ``layout`` says
    whether there are scale rows.
    """

    m: int
    k: int
    capacity: int
    dtype: str = "bfloat16"
    values: str = "blocks"
    k_out: int | None = None
    groups: int = 1
    span: int = 0
    rope: Rope | None = None
    position_dtype: str = "int64"
    scale_rows: bool = True

    @property
    def name(self) -> str:
        parts = [f"{self.m}x{self.k} of {self.capacity} {self.dtype} {self.values}"]
        if self.k_out is not None:
            parts.append(f"to {self.k_out}")
        if self.groups > 1:
            parts.append(f"{self.groups} groups")
        if self.span:
            parts.append(f"span {self.span}")
        if self.rope is not None:
            parts.append(
                f"rope {self.rope.nope_dim}+{self.rope.rope_dim} {self.rope.cache_dtype} {self.position_dtype}"
            )
        if not self.scale_rows:
            parts.append("swizzled only")
        return ", ".join(parts)

    @property
    def caps(self) -> planner.Caps:
        return self._caps(None)

    def _caps(self, device: object) -> planner.Caps:
        return planner.Caps(
            device=device,
            m=self.capacity,
            k=self.k,
            dtype=self.dtype,
            k_out=self.k_out,
            groups=self.groups,
            span=self.span,
            rope=self.rope,
        )

    def roles(self) -> tuple[Role, ...]:
        return planner.roles(self.caps)

    def prepare(self, device: str, generator: torch.Generator) -> Prepared:
        """``matrices`` is what is quantised, ``[G, M, K]``; the source holds it in the order of the case."""
        matrices = self._matrices(generator)
        source = matrices.permute(1, 0, 2).contiguous() if self.groups > 1 else matrices[0]
        if self.span:
            pieces = source.view(self.m, self.k // self.span, self.span)
            source = pieces.permute(1, 0, 2).contiguous().permute(1, 2, 0)
        plan = api.plan(self._caps(device))
        rows = api.allocate_outputs(plan)
        for part in (rows.values, rows.scale_rows, rows.scale_mma):
            part.view(torch.uint8).fill_(_POISON)
        extra = {}
        if self.rope is not None:
            shape = (_POSITIONS, self.rope.rope_dim)
            angles = torch.rand(shape, generator=generator, device=device) * 2 - 1
            extra["cos_sin_cache"] = angles.to(getattr(torch, self.rope.cache_dtype))
            positions = torch.randint(0, _POSITIONS, (self.m,), generator=generator, device=device)
            extra["positions"] = positions.to(getattr(torch, self.position_dtype))
        scale_rows = rows.scale_rows if self.scale_rows else None
        binding = plan.bind(source=source, values=rows.values, scale_mma=rows.scale_mma, scale_rows=scale_rows, **extra)
        columns = plan.caps.columns
        blocks = self.groups * self.m * columns // BLOCK
        return Prepared(
            launch=lambda: api.run(binding=binding),
            judge=lambda: self._judge(matrices, rows, extra),
            flops=0,
            bytes=matrices.nbytes
            + blocks * (BLOCK + self.scale_rows)
            + scales.storage_bytes(self.m, columns // BLOCK, self.groups),
        )

    def _matrices(self, generator: torch.Generator) -> torch.Tensor:
        shape, device = (self.groups, self.m, self.k), generator.device
        dtype = getattr(torch, self.dtype)
        if self.values == "bits":
            bits = torch.randint(-(2**15), 2**15, shape, generator=generator, device=device).to(torch.int16)
            if self.rope is not None:
                bits &= ~0x4000  # magnitudes below 2, whose sums are finite
            x = bits.view(dtype)
            return torch.where(x.isfinite(), x, torch.zeros_like(x))
        blocks = (self.groups, self.m, -(-self.k // BLOCK), 1)
        x = torch.randn((*blocks[:3], BLOCK), generator=generator, device=device)
        x *= torch.exp2(torch.randint(-12, 6, blocks, generator=generator, device=device).float())
        x *= torch.randint(0, 8, blocks, generator=generator, device=device) > 0
        return x.view(self.groups, self.m, -1)[..., : self.k].to(dtype).contiguous()

    def _judge(self, matrices: torch.Tensor, rows: api.MXFP8Rows, extra: dict[str, torch.Tensor]) -> Judgement:
        columns = self.k if self.k_out is None else self.k_out
        x = matrices.float().cpu().view(-1, self.k).numpy()
        if self.rope is not None:
            positions = extra["positions"].cpu().repeat(self.groups).numpy()
            cache = extra["cos_sin_cache"].float().cpu().numpy()
            x = reference.inverse_rope(x, positions, cache, head_dim=self.rope.head_dim, nope_dim=self.rope.nope_dim)
        x = np.pad(x, ((0, 0), (0, columns - self.k)))
        shape = (self.groups, self.m, -1)
        codes, linear = (torch.from_numpy(part).view(shape) for part in reference.quantize(x))
        values = rows.values.view(torch.uint8).cpu()
        values = values[None] if self.groups == 1 else values.permute(2, 0, 1)
        written = rows.scale_rows.cpu()
        storage = rows.scale_mma.permute(5, 2, 4, 0, 1, 3).cpu()
        wanted = scales.swizzle(linear, pad=scales.PAD_E8M0)
        tally = Tally()
        for found, expected in (
            (values[:, : self.m], codes),
            (values[:, self.m :], torch.full_like(values[:, self.m :], _POISON)),
            (written[:, : self.m], linear if self.scale_rows else torch.full_like(linear, _POISON)),
            (written[:, self.m :], torch.full_like(written[:, self.m :], _POISON)),
            (storage[:, : wanted.shape[1]], wanted),
            (storage[:, wanted.shape[1] :], torch.full_like(storage[:, wanted.shape[1] :], _POISON)),
        ):
            tally.add(found, expected.double())
        return tally.judgement()


def _cases() -> Iterator[Mxfp8Case]:
    case = partial(Mxfp8Case, size="small")
    for dtype in ("bfloat16", "float16"):
        yield case(m=131, k=160, capacity=300, dtype=dtype)
        yield case(m=7, k=32, capacity=7, dtype=dtype, scale_rows=False)
        yield case(m=131, k=256, capacity=131, dtype=dtype, values="bits")
        yield case(m=35, k=72, capacity=64, dtype=dtype, k_out=256, groups=3)
        yield case(m=130, k=192, capacity=140, dtype=dtype, span=48)
        yield Mxfp8Case(size="model", m=4096, k=7168, capacity=4096, dtype=dtype)
    yield Mxfp8Case(size="model", m=777, k=4096, capacity=1024, span=1024)
    for cache_dtype in ("float32", "bfloat16"):
        narrow = Rope(head_dim=96, nope_dim=32, rope_dim=64, cache_dtype=cache_dtype)
        yield case(m=131, k=192, capacity=140, groups=2, rope=narrow, position_dtype="int32")
        yield case(m=37, k=192, capacity=37, k_out=256, rope=narrow, values="bits")
        wide = Rope(head_dim=512, nope_dim=448, rope_dim=64, cache_dtype=cache_dtype)
        yield Mxfp8Case(size="model", m=1003, k=4096, capacity=1024, groups=4, rope=wide)


CASES = tuple(_cases())
