"""``quantization.nvfp4``: bf16/fp16 rows to packed E2M1 codes and swizzled E4M3 block scales.

>>> plan = nvfp4.plan(m=4096, k=7168, device="cuda")
>>> outputs = nvfp4.allocate_outputs(plan)
>>> nvfp4.run(plan=plan, x=x, global_scale=global_scale, outputs=outputs)

``bind(plan, ...)`` and ``run(binding=...)`` split the last call where one binding is launched many times;
``quantize`` is the one-shot form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, Target, used_on
from b12x.quantization import scales
from b12x.quantization.nvfp4 import planner
from b12x.quantization.nvfp4.planner import Caps
from b12x.quantization.nvfp4.spec import DTYPES

OP = planner.OP
META = registry.find_op(OP)

#: Arguments and their alignment in bytes, the outputs first.
_ARGUMENTS = (("outputs.packed_a_storage", 16), ("outputs.scale_storage", 16), ("x", 16), ("global_scale", 4))


class Plan:
    """Resolved kernel for up to ``caps.m`` rows of ``caps.k`` columns."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)
        self.checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def shapes_and_dtypes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each output storage."""
        return dict(_storage(self.caps.m, planner.width(self.caps)))

    def bind(self, *, x: torch.Tensor, global_scale: torch.Tensor, outputs: Outputs) -> Binding:
        """As :func:`bind`."""
        return bind(self, x=x, global_scale=global_scale, outputs=outputs)


@dataclass(frozen=True, repr=False, eq=False)
class Outputs:
    """Output storage and its views as operands of ``gemm.blockscaled``, which are made when they are asked for.

    ``packed_a_storage`` uint8 ``[1, M, K/2]``, two codes a byte, low nibble first; ``scale_storage`` uint8
    ``[up(M, 128) * up(K/16, 4)]`` in the swizzled layout.
    """

    packed_a_storage: torch.Tensor
    scale_storage: torch.Tensor

    @cached_property
    def packed_a_view(self) -> torch.Tensor:
        """``[M, K/2, 1]``."""
        return self.packed_a_storage.permute(1, 2, 0)

    @cached_property
    def scale_view(self) -> torch.Tensor:
        """``[32, 4, R, 4, C, 1]``."""
        _, m, width = self.packed_a_storage.shape
        return scales.view(self.scale_storage, m, width // 8)

    def __repr__(self) -> str:
        packed, scale = checks.described(self.packed_a_storage), checks.described(self.scale_storage)
        return f"Outputs(packed_a_storage={packed}, scale_storage={scale})"


class Binding(NamedTuple):
    """A checked launch; None where there are no rows."""

    launch: Launch | None
    outputs: Outputs


def plan(
    m: int, k: int, *, device: Any = "cuda", dtype: str | torch.dtype = "bfloat16", k_out: int | None = None
) -> Plan:
    """Plan for up to ``m`` rows of ``k`` columns (a multiple of 64) of ``dtype`` bf16 or fp16.

    ``k_out`` (a multiple of 64) makes the outputs wider, as if the rows went on with zeros; k is then any multiple of
    8. Raises ValueError for sizes or dtypes outside the contract, KernelResolutionFrozenError where the kernel is in no
    pack.
    """
    return Plan(Caps(device=device, m=m, k=k, dtype=checks.dtype_name(dtype), k_out=k_out))


def allocate_outputs(plan: Plan, *, device: Any = None) -> Outputs:
    """Uninitialised outputs of a plan's capacity, on the plan's device by default."""
    return _outputs(plan.caps.m, planner.width(plan.caps), device or plan.target.device)


def bind(plan: Plan, *, x: torch.Tensor, global_scale: torch.Tensor, outputs: Outputs) -> Binding:
    """Check the tensors of one launch: ``x`` ``[rows, K]`` contiguous with rows <= m, ``global_scale`` f32 ``[1]`` = G.

    Only the rows of ``x`` and the scale tiles that hold them are written; scales of the last tile's missing rows are 0.
    Raises TypeError for a wrong dtype, ValueError for shape, stride, device, alignment or overlap.
    """
    try:
        packed, scale_storage = outputs.packed_a_storage, outputs.scale_storage
    except AttributeError:
        found = type(outputs).__name__
        raise TypeError(
            f"{OP}: outputs is a {found}; needed is an Outputs: make one with allocate_outputs(plan)"
        ) from None
    facts = checks.facts
    rows, *sizes = plan.checked(facts(packed), facts(scale_storage), facts(x), facts(global_scale))
    checks.memory(OP, _ARGUMENTS, (packed, scale_storage, x, global_scale), sizes, 2)
    if rows == 0:
        return Binding(None, outputs)
    k, k_out = plan.caps.k, planner.width(plan.caps)
    launch = plan.kernels["quantize"].loaded.prepare(
        {
            "x": x,
            "global_scale": global_scale,
            "packed": packed,
            "scales": scale_storage,
            "m": rows,
            "k": k,
            "k_out": k_out,
        }
    )
    launch.grid = (planner.grid(rows, k_out), 1, 1)
    return Binding(launch, outputs)


def run(
    *,
    plan: Plan | None = None,
    x: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    outputs: Outputs | None = None,
    binding: Binding | None = None,
    stream: Any = None,
) -> None:
    """Quantise: either ``binding``, or ``plan``, ``x``, ``global_scale`` and ``outputs`` (bound and launched at
    once)."""
    if binding is None:
        if plan is None or x is None or global_scale is None or outputs is None:
            raise TypeError(f"{OP}: run needs either binding, or all of plan, x, global_scale and outputs: pass one")
        binding = bind(plan, x=x, global_scale=global_scale, outputs=outputs)
    elif plan is not None or x is not None or global_scale is not None or outputs is not None:
        raise ValueError(f"{OP}: run got a binding and tensors that the binding already holds; pass one or the other")
    try:
        launch = binding.launch
    except AttributeError:
        raise checks.no_binding(OP, binding) from None
    if launch is not None:
        launch.launch(stream)


def quantize(x: torch.Tensor, global_scale: torch.Tensor, *, k_out: int | None = None, stream: Any = None) -> Outputs:
    """One-shot: ``x`` ``[M, K]`` into new outputs of exactly M rows; arguments as in :func:`plan` and :func:`bind`."""
    try:
        m, k = x.shape
        device = x.device
    except (AttributeError, ValueError):
        found = checks.facts(x)
        fix, place = "reshape it to rows of K columns", "cuda" if found[0] is None else str(found[3])
        checks.layout(OP, "x", found, dtype=DTYPES, shape=(None, None), strides=checks.ANY, device=place, fix=fix)
        raise
    kept = _plan(target.current_target(device), k, checks.dtype_name(x.dtype), k_out)
    outputs = _outputs(m, planner.width(kept.caps), device)
    run(binding=bind(kept, x=x, global_scale=global_scale, outputs=outputs), stream=stream)
    used_on(stream, outputs.packed_a_storage, outputs.scale_storage)
    return outputs


def clear_caches() -> None:
    """Forget the plans that ``quantize`` keeps."""
    _plan.cache_clear()


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


@lru_cache(maxsize=4096)
def _plan(where: Target, k: int, dtype: str, k_out: int | None) -> Plan:
    """The plan ``quantize`` keeps on a target for its static choices; M is not one of them."""
    return Plan(Caps(device=where.device, m=checks.LARGEST, k=k, dtype=dtype, k_out=k_out))


def _check(plan: Plan, packed: Facts, scale_storage: Facts, x: Facts, global_scale: Facts) -> tuple[int, ...]:
    """Rows of x, then the bytes of each argument in the order of ``_ARGUMENTS``."""
    caps, device = plan.caps, plan.target.device
    m, k_out = caps.m, planner.width(caps)
    x_size = checks.layout(OP, "x", x, dtype=caps.dtype, shape=(None, caps.k), device=device)
    global_size = checks.layout(OP, "global_scale", global_scale, dtype="float32", shape=(1,), device=device)
    rows = x[1][0]
    if rows > m:
        raise ValueError(f"{OP}: x has {rows} rows, more than the plan's capacity m = {m}; plan with a larger m")
    name, shape = "outputs.packed_a_storage", (1, None, k_out // 2)
    packed_size = checks.layout(OP, name, packed, dtype="uint8", shape=shape, device=device)
    name = "outputs.scale_storage"
    scale_size = checks.layout(OP, name, scale_storage, dtype="uint8", shape=(None,), device=device)
    capacity, needed = packed[1][1], scales.storage_bytes(rows, k_out // 16)
    if capacity < rows or scale_size < needed:
        raise ValueError(
            f"{OP}: outputs hold {capacity} rows and {scale_size} scale bytes; {rows} rows of x need {rows} and "
            f"{needed}: allocate_outputs(plan) makes room for the plan's capacity"
        )
    return rows, packed_size, scale_size, x_size, global_size


@lru_cache(maxsize=1024)
def _storage(m: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "packed_a_storage": ((1, m, k // 2), torch.uint8),
        "scale_storage": ((scales.storage_bytes(m, k // 16),), torch.uint8),
    }


def _outputs(m: int, k: int, device: Any) -> Outputs:
    return Outputs(*[torch.empty(shape, dtype=dtype, device=device) for shape, dtype in _storage(m, k).values()])
