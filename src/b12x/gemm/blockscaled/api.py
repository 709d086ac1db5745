"""``gemm.blockscaled``: ``C = alpha * (A * SFA) (B * SFB)^T`` with block-scaled operands, f32 accumulation.

>>> plan = blockscaled.plan(blockscaled.Caps(device="cuda", c_dtype="bfloat16", max_m=4096, n=7168, k=2048))
>>> binding = plan.bind(lhs=(a, sfa), rhs=(b, sfb), out=out, alpha=alpha)
>>> blockscaled.run(binding=binding)

``mm`` is the one-shot form. Layouts (NVFP4): ``A [M, K/2, L]`` and ``B [N, K/2, L]`` are bytes of two E2M1 codes, low
nibble first, K innermost, physically ``[L, M, K/2]``; scales are E4M3 in the swizzled layout of
:mod:`b12x.quantization.scales`; ``C [M, N, L]`` is physically ``[L, M, N]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.launch import Launch, Target, TensorMapArg
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.planner import Caps
from b12x.quantization import scales

OP = "gemm.blockscaled"
META = registry.find_op(OP)

Operand = tuple[torch.Tensor, torch.Tensor]
_PACKED = ("uint8", "float4_e2m1fn_x2")
_SCALE = ("uint8", "float8_e4m3fn")


class Plan:
    """Resolved kernels for every live M up to ``caps.max_m``."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def bind(self, **tensors: Any) -> Binding:
        return bind(self, **tensors)


@dataclass(frozen=True)
class Binding:
    """A checked launch; None where C has no elements."""

    launch: Launch | None
    out: torch.Tensor


def plan(caps: Caps) -> Plan:
    """Resolve every kernel these Caps can need.

    Raises KernelResolutionFrozenError where one is in no pack and resolution is frozen.
    """
    return Plan(caps)


def bind(
    plan: Plan,
    *,
    lhs: Operand,
    rhs: Operand,
    out: torch.Tensor,
    alpha: torch.Tensor | None = None,
    sm_count: int | None = None,
) -> Binding:
    """Check the tensors of one launch: ``lhs = (A, SFA)``, ``rhs = (B, SFB)``, ``out`` C, M taken from A.

    ``alpha`` is f32 ``[1]``, or ``[L]`` for one factor a batch entry, read when the kernel runs; None is 1.
    ``sm_count`` limits the number of CTAs. Rows of A and B may be pitched by a multiple of 16 bytes. Raises TypeError
    for a wrong dtype, ValueError for shape, stride, device, alignment, capacity or overlap.
    """
    caps, device = plan.caps, plan.target.device
    (a, sfa), (b, sfb) = lhs, rhs
    n, k, batch = caps.n, caps.k, caps.batch
    m = a.shape[0] if a.ndim else 0
    if m > caps.max_m:
        raise ValueError(f"{OP}: A has {m} rows, more than the plan's max_m = {caps.max_m}; plan with a larger max_m")
    a_map, b_map = _operand("A", a, m, k, batch, device), _operand("B", b, n, k, batch, device)
    _scales("SFA", sfa, m, k, batch, device)
    _scales("SFB", sfb, n, k, batch, device)
    checks.tensor(OP, "out", out, dtype=caps.c_dtype, shape=(m, n, batch), strides=(n, 1, m * n), device=device)
    inputs = {"A": a, "SFA": sfa, "B": b, "SFB": sfb}
    if alpha is not None:
        count = 1 if alpha.numel() == 1 else batch
        checks.tensor(OP, "alpha", alpha, dtype="float32", shape=(count,), device=device, align=4)
        inputs["alpha"] = alpha
    checks.no_overlap(OP, outputs={"out": out}, inputs=inputs)
    if m == 0:
        return Binding(None, out)
    kernel = plan.kernels[planner.choose(m)]
    launch = kernel.loaded.prepare(
        {
            "a": a_map,
            "b": b_map,
            "sfa": sfa,
            "sfb": sfb,
            "alpha": alpha,
            "c": out,
            "m": m,
            "n": n,
            "k": k,
            "batch": batch,
            "alpha_count": 0 if alpha is None else alpha.numel(),
        }
    )
    launch.grid = (planner.grid(kernel.spec, m, n, batch, sm_count or plan.target.sm_count), 1, 1)
    return Binding(launch, out)


def run(*, binding: Binding, stream: Any = None) -> torch.Tensor:
    """Launch a binding on ``stream`` (the current one by default) and return its C."""
    if binding.launch is not None:
        binding.launch.launch(stream)
    return binding.out


def mm(
    lhs: Operand,
    rhs: Operand,
    out: torch.Tensor | None = None,
    *,
    ab_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    sm_count: int | None = None,
    cluster_shape_mn: tuple[int, int] = (1, 1),
    alpha: torch.Tensor | None = None,
    alpha_dtype: str | None = None,
    expected_m: int | None = None,
    sfb_k_replicated: bool = False,
    stream: Any = None,
    **policy: Any,
) -> torch.Tensor:
    """One-shot GEMM; C ``[M, N, L]`` is allocated where ``out`` is None. Operands as in :func:`bind`.

    ``expected_m`` is a hint that changes no result. Tile and load-path choices are this library's own: arguments that
    would force one, and recipes it does not have, are refused by name.
    """
    _refuse(cluster_shape_mn, alpha_dtype, expected_m, sfb_k_replicated, policy)
    a, b = lhs[0], rhs[0]
    if a.ndim != 3 or b.ndim != 3:
        raise ValueError(
            f"{OP}: A has shape {tuple(a.shape)} and B {tuple(b.shape)}; [M, K/2, L] and [N, K/2, L] are needed "
            "(unsqueeze(-1) for one matrix)"
        )
    m, n, k, batch = a.shape[0], b.shape[0], 2 * b.shape[1], b.shape[2]
    prepared = _plan(target.current_target(a.device), ab_dtype, sf_dtype, sf_vec_size, c_dtype, n, k, batch)
    if out is None:
        storage = torch.empty((batch, m, n), dtype=getattr(torch, c_dtype), device=a.device)
        out = storage.permute(1, 2, 0)
    return run(binding=bind(prepared, lhs=lhs, rhs=rhs, out=out, alpha=alpha, sm_count=sm_count), stream=stream)


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


def clear_caches() -> None:
    """Forget the plans that ``mm`` keeps."""
    _plan.cache_clear()


@lru_cache(maxsize=4096)
def _plan(
    where: Target, ab_dtype: str, sf_dtype: str, sf_vec_size: int, c_dtype: str, n: int, k: int, batch: int
) -> Plan:
    """The plan ``mm`` keeps on a target for its static choices; M is not one of them."""
    return Plan(
        Caps(
            device=where.device,
            ab_dtype=ab_dtype,
            sf_dtype=sf_dtype,
            sf_vec_size=sf_vec_size,
            c_dtype=c_dtype,
            max_m=2**31 - 1,
            n=n,
            k=k,
            batch=batch,
        )
    )


def _operand(name: str, x: torch.Tensor, rows: int, k: int, batch: int, device: str) -> TensorMapArg:
    """Check a packed operand ``[rows, K/2, L]`` and describe it to TMA."""
    width = k // 2
    checks.tensor(OP, name, x, dtype=_PACKED, shape=(rows, width, batch), strides=(None, 1, None), device=device)
    pitch = x.stride(0) if rows > 1 else width
    step = x.stride(2) if batch > 1 else max(rows, 1) * pitch
    for label, value, least in (("row", pitch, width), ("batch", step, width)):
        if value < least or value % 16:
            raise ValueError(
                f"{OP}: {name} has a {label} stride of {value} bytes; at least {least} and a multiple of 16 is needed"
            )
    return TensorMapArg(x, dims=(width, rows, batch), strides=(pitch, step))


def _scales(name: str, x: torch.Tensor, rows: int, k: int, batch: int, device: str) -> None:
    """Check swizzled scales: the 6-D logical view, or contiguous storage (which may be larger for one matrix)."""
    checks.tensor(OP, name, x, dtype=_SCALE, shape=None, strides=(None,) * x.ndim, device=device)
    needed = scales.storage_bytes(rows, k // 16, batch)
    _, row_tiles, column_tiles, *_ = scales.storage_shape(rows, k // 16, batch)
    if x.ndim == 6 and x.shape == (32, 4, x.shape[2], 4, column_tiles, batch):
        x = x.permute(5, 2, 4, 0, 1, 3)
    if not x.is_contiguous() or x.numel() < needed or (batch > 1 and x.numel() != needed):
        raise ValueError(
            f"{OP}: {name} has shape {tuple(x.shape)}, strides {x.stride()}; the swizzled scales of {rows} rows need "
            f"the view [32, 4, {row_tiles}, 4, {column_tiles}, {batch}] or {needed} contiguous bytes "
            "(b12x.quantization.scales.swizzle makes them)"
        )


def _refuse(
    cluster_shape_mn: tuple[int, int],
    alpha_dtype: str | None,
    expected_m: int | None,
    sfb_k_replicated: bool,
    policy: dict[str, Any],
) -> None:
    """Arguments of the contract that this op does not act on: harmless values pass, others are named."""
    if tuple(cluster_shape_mn) != (1, 1):
        raise ValueError(f"{OP}: cluster_shape_mn is {cluster_shape_mn}; only (1, 1) is valid")
    if alpha_dtype not in (None, "float32"):
        raise ValueError(f"{OP}: alpha_dtype is {alpha_dtype!r}; alpha is read as 'float32'")
    if expected_m is not None and expected_m < 1:
        raise ValueError(f"{OP}: expected_m is {expected_m}; a hint is at least 1, or None")
    if sfb_k_replicated:
        raise ValueError(f"{OP}: sfb_k_replicated is for FP8 weights with 128 x 128 blocks, not for NVFP4")
    known = ("mma_tiler_mn", "load_path", "swap_ab", "rhs_values_tiled", "plain_fp8", "block_fp8")
    for name, value in policy.items():
        if name not in known:
            raise TypeError(f"{OP}: mm has no argument {name!r}")
        if value not in (None, False):
            raise ValueError(f"{OP}: {name}={value!r} is not available; leave it out and the library chooses")
