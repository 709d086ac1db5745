"""Host side that the fused linears share: checking sources, and an MXFP8 linear as two launches or one.

A linear takes ``source [..., K]`` as rows without copying, quantises them into scratch, multiplies with a prepared
weight and adds the bias in the GEMM's epilogue. Where the batch is small enough for it, one kernel does all of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from b12x._runtime import checks, resolve, target
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, used_on
from b12x._runtime.scratch import Layout, ScratchBufferSpec
from b12x._runtime.spec import Role
from b12x.gemm import _parts, _rows
from b12x.gemm.blockscaled import api as blockscaled
from b12x.gemm.blockscaled.fused import plan_fused
from b12x.quantization.mxfp8 import api as mxfp8


class Weight(Protocol):
    """What a linear needs of a prepared weight."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def operand(self) -> _rows.Operand:
        """Values ``[N, K, 1]`` and swizzled scales."""
        ...


class Binding(NamedTuple):
    """Checked launches, in their order; none where there are no tokens."""

    launches: tuple[Launch, ...]
    output: torch.Tensor

    def __repr__(self) -> str:
        return f"Binding(launches={self.launches!r}, output={checks.described(self.output)})"


class Plan:
    """Resolved kernels of a linear with MXFP8 rows, for every token count up to ``caps.max_tokens``."""

    def __init__(self, caps: _parts.LinearCaps, roles: Sequence[Role], weight_type: type) -> None:
        self.op = caps.op
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(self.op, roles, self.target, caps)
        self.fused = plan_fused(_parts.fused(caps))
        self.apart: tuple[mxfp8.Plan, blockscaled.Plan] | None = None
        if caps.max_tokens > _parts.FUSED_M:
            self.apart = mxfp8.plan(_parts.quantizer(caps)), blockscaled.plan(_parts.product(caps))
        self.weight_type = weight_type
        self.layout = _rows.layout(caps.max_tokens, caps.padded_in_features)
        self._specs = self.layout.specs(self.target.device)
        self._checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def scratch_specs(self) -> tuple[ScratchBufferSpec, ...]:
        """The one buffer to allocate for :meth:`bind`."""
        return self._specs

    def shapes_and_dtypes(self) -> _rows.Shapes:
        """What lies in the scratch, at ``layout.offsets``."""
        return _rows.shapes("x_q", self.caps.max_tokens, self.caps.padded_in_features)

    def bind(
        self,
        *,
        scratch: Any,
        source: torch.Tensor,
        packed_weight: Any,
        output: torch.Tensor,
        bias: torch.Tensor | None = None,
        expected_m: int | None = None,
    ) -> Binding:
        """Check the tensors of one run.

        ``source [..., K]`` of the plan's dtype, viewable as rows; ``output [T, N, 1]`` for its T tokens; ``bias [N]``.
        ``expected_m`` is a hint that changes nothing. Raises TypeError for what is no tensor or of a wrong dtype,
        ValueError for shape, stride, device, alignment, capacity or overlap, KeyError where a mapping has no scratch.
        """
        buffer = _rows.select(self.op, self._specs, scratch)
        return self.bound(buffer, self.layout, source, packed_weight, output, bias, expected_m)

    def bound(
        self,
        buffer: torch.Tensor,
        layout: Layout,
        source: torch.Tensor,
        packed_weight: Any,
        output: torch.Tensor,
        bias: torch.Tensor | None,
        expected_m: int | None,
    ) -> Binding:
        """As :meth:`bind`, with a checked scratch of some layout."""
        check_hint(self.op, expected_m)
        weight = self.check_weight(packed_weight)
        optional = () if bias is None else (bias,)
        tokens, pitch, lead, sizes = self._checked(*map(checks.facts, (source, output, *optional)))
        values, scale_mma = weight.operand
        first, second, *last = sizes
        nbytes = (first, layout.nbytes, second, values.nbytes, scale_mma.nbytes, *last)
        checks.memory(self.op, _MEMORY, (output, buffer, source, values, scale_mma, *optional), nbytes, 2)
        result = output.view(lead)
        if tokens == 0:
            return Binding((), result)
        rows = source.as_strided((tokens, self.caps.in_features), (pitch, 1))
        if tokens <= _parts.FUSED_M:
            fused = self.fused.bind(source=rows, b=values, sfb=scale_mma, out=output, bias=bias)
            return Binding(launches(fused), result)
        assert self.apart is not None
        quantizer, gemm = self.apart
        a, sfa = _rows.operand(buffer, layout, "x_q", tokens, self.caps.padded_in_features)
        quantised = quantizer.bind(source=rows, values=a, scale_mma=sfa)
        multiplied = gemm.bind(lhs=(a, sfa), rhs=weight.operand, out=output, bias=bias)
        return Binding(launches(quantised, multiplied), result)

    def check_weight(self, packed_weight: Any) -> Weight:
        """Refuse what is no weight for this plan."""
        weight: Weight = check_weight(self.op, packed_weight, self.weight_type, self.caps, self.target.device)
        return weight


#: Arguments that a linear checks by itself, and their alignment in bytes, the output first.
ARGUMENTS = (("output", 16), ("source", 16), ("bias", 16))
#: The same with a scratch, and with the weight, which must not lie in it.
_MEMORY = (
    *(("output", 16), ("scratch", 16), ("source", 16)),
    *(("packed_weight values", 16), ("packed_weight scales", 16), ("bias", 16)),
)


def _check(plan: Plan, source: Facts, output: Facts, bias: Facts | None = None) -> tuple[Any, ...]:
    """Tokens, row pitch, shape of the result, and bytes of the arguments in the order of ``ARGUMENTS``."""
    caps = plan.caps
    return check_linear(caps, plan.target.device, caps.output_dtype, source, output, bias)


def check_linear(
    caps: _parts.LinearCaps, device: str, source_dtype: str, source: Facts, output: Facts, bias: Facts | None
) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Check the facts of one run: tokens, row pitch, shape of the result, and bytes of output, source and bias."""
    op, n = caps.op, caps.out_features
    source_size = checks.layout(op, "source", source, dtype=source_dtype, shape=None, strides=checks.ANY, device=device)
    tokens, pitch = as_rows(op, "source", source, caps.in_features)
    if tokens > caps.max_tokens:
        raise ValueError(
            f"{op}: source has {tokens} tokens, more than the plan's max_tokens = {caps.max_tokens}; plan with a "
            "larger max_tokens"
        )
    apart = pitch * int(source[0].itemsize)
    if apart % 16 and tokens > 1:
        raise ValueError(
            f"{op}: rows of source lie {apart} bytes apart; needed is a multiple of 16: call .contiguous() before"
        )
    shape, strides = (tokens, n, 1), (n, 1, None)
    size = checks.layout(op, "output", output, dtype=caps.output_dtype, shape=shape, strides=strides, device=device)
    sizes = [size, source_size]
    if bias is not None:
        sizes.append(checks.layout(op, "bias", bias, dtype=caps.output_dtype, shape=(n,), device=device))
    return tokens, pitch, (*source[1][:-1], n), tuple(sizes)


def as_rows(op: str, name: str, found: Facts, width: int) -> tuple[int, int]:
    """Rows of a tensor ``[..., width]`` seen as a matrix, and their pitch in elements; refused where it is none."""
    _, extents, steps, _ = found
    if not extents or extents[-1] != width:
        raise ValueError(
            f"{op}: {name} has shape {tuple(extents)}; needed is [..., {width}]: pass activations of the weight's "
            "in_features, or prepare the weight that belongs to them"
        )
    rows = math.prod(extents[:-1])
    if steps[-1] != 1 and width > 1 and rows:
        _no_rows(op, name, found)
    # A pitch may be 0, of rows that are one row repeated: None is that no dimension has given one yet.
    pitch: int | None = None
    covered = 0
    for extent, step in zip(reversed(extents[:-1]), reversed(steps[:-1]), strict=True):
        if extent == 1 or not rows:
            continue
        if step < width or (pitch is not None and step != covered):
            _no_rows(op, name, found)
        if pitch is None:
            pitch = step
        covered = step * extent
    return rows, width if pitch is None else pitch


def _no_rows(op: str, name: str, found: Facts) -> NoReturn:
    raise ValueError(
        f"{op}: {name} of shape {tuple(found[1])} has strides {tuple(found[2])}, so it is no matrix of rows; needed is "
        "a tensor whose leading dimensions can be seen as one, its rows apart in memory: call .contiguous() before"
    )


def check_hint(op: str, expected_m: int | None) -> None:
    """``expected_m`` changes nothing, but nonsense is refused."""
    if expected_m is not None:
        checks.whole(op, "expected_m", expected_m, fix="leave the hint out, or take the M that is most common")


def check_weight(op: str, found: Any, wanted: type, caps: _parts.LinearCaps, device: str) -> Any:
    """Check that a prepared weight is one for these Caps."""
    if not isinstance(found, wanted):
        raise TypeError(
            f"{op}: packed_weight is a {type(found).__name__}; needed is a {wanted.__name__}: make one with pack_weight"
        )
    weight: Any = found
    shape, needed = (weight.out_features, weight.in_features), (caps.out_features, caps.in_features)
    if shape != needed:
        raise ValueError(
            f"{op}: packed_weight is {shape[0]} x {shape[1]} (out_features x in_features); needed is {needed[0]} x "
            f"{needed[1]}: plan for this weight's features"
        )
    place = weight.operand[0].device
    if checks.device_name(place) != device:
        raise ValueError(
            f"{op}: packed_weight is on {place}; needed is {device}, the device of the plan: pack it there, or plan "
            f"for {place}"
        )
    return weight


def launches(*bindings: Any) -> tuple[Launch, ...]:
    """The launches of bindings of parts, in their order."""
    return tuple(binding.launch for binding in bindings if binding.launch is not None)


def run(op: str, binding: Any, stream: Any) -> torch.Tensor:
    """Launch a binding and return its output."""
    try:
        found, output = binding.launches, binding.output
    except AttributeError:
        raise checks.no_binding(op, binding) from None
    for launch in found:
        launch.launch(stream)
    result: torch.Tensor = output
    return result


def one_shot(
    plan: Plan, source: torch.Tensor, packed_weight: Any, bias: torch.Tensor | None, expected_m: int | None, stream: Any
) -> torch.Tensor:
    """Bind and run with scratch and output of its own."""
    caps, device = plan.caps, source.device
    tokens = source.numel() // caps.in_features
    layout = _rows.layout(tokens if tokens > _parts.FUSED_M else 0, caps.padded_in_features)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    output = torch.empty((tokens, caps.out_features, 1), dtype=getattr(torch, caps.output_dtype), device=device)
    binding = plan.bound(buffer, layout, source, packed_weight, output, bias, expected_m)
    result = run(plan.op, binding, stream)
    used_on(stream, buffer, output)
    return result


def no_tensor(op: str, name: str, value: Any, dtype: str | tuple[str, ...]) -> None:
    """Refuse what is no tensor of one of these dtypes, before there is a plan that could."""
    found = checks.facts(value)
    device = "cuda" if found[0] is None else checks.device_name(found[3])
    checks.layout(op, name, found, dtype=dtype, shape=None, strides=checks.ANY, device=device)


def features(op: str, packed_weight: Any) -> tuple[int, int, torch.device]:
    """K, N and device of a prepared weight, by which its plan is kept."""
    try:
        return packed_weight.in_features, packed_weight.out_features, packed_weight.operand[0].device
    except AttributeError:
        found = type(packed_weight).__name__
        raise TypeError(f"{op}: packed_weight is a {found}; needed is a Weight: make one with pack_weight") from None


def prewarmed(op: str, token_counts: Iterable[int], kept: Callable[[], Any]) -> int:
    """Check token counts, make the kept plan, and count its kernels."""
    checks.wholes(op, "token_counts", token_counts, least=0)
    return len({kernel.spec.key for kernel in kept().kernels.values()})
