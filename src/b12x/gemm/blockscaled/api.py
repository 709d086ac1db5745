"""``gemm.blockscaled``: ``C = alpha * (A * SFA) (B * SFB)^T`` with block-scaled operands, f32 accumulation.

>>> plan = blockscaled.plan(blockscaled.Caps(device="cuda", c_dtype="bfloat16", max_m=4096, n=7168, k=2048))
>>> binding = plan.bind(lhs=(a, sfa), rhs=(b, sfb), out=out, alpha=alpha)
>>> blockscaled.run(binding=binding)

``mm`` is the one-shot form. Layouts (NVFP4): ``A [M, K/2, L]`` and ``B [N, K/2, L]`` are bytes of two E2M1 codes, low
nibble first, K innermost, physically ``[L, M, K/2]``; scales are E4M3 in the swizzled layout of
:mod:`b12x.quantization.scales`; ``C [M, N, L]`` is physically ``[L, M, N]``.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, LoadedKernel, MapShape, Target
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.planner import Caps
from b12x.quantization import scales

OP = planner.OP
META = registry.find_op(OP)

Operand = tuple[torch.Tensor, torch.Tensor]
_PACKED = ("uint8", "float4_e2m1fn_x2")
_SCALE = ("uint8", "float8_e4m3fn")
#: Arguments and their alignment in bytes, the output first.
_ARGUMENTS = (("out", 16), ("A", 16), ("SFA", 16), ("B", 16), ("SFB", 16), ("alpha", 4))


class Plan:
    """Resolved kernels for every live M up to ``caps.max_m``."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)
        self.sm_count = self.target.sm_count
        self.checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why."""
        return "\n".join(kernel.why for kernel in self.kernels.values())

    def bind(
        self,
        *,
        lhs: Operand,
        rhs: Operand,
        out: torch.Tensor,
        alpha: torch.Tensor | None = None,
        sm_count: int | None = None,
    ) -> Binding:
        """As :func:`bind`."""
        return bind(self, lhs=lhs, rhs=rhs, out=out, alpha=alpha, sm_count=sm_count)


class Binding(NamedTuple):
    """A checked launch; None where C has no elements."""

    launch: Launch | None
    out: torch.Tensor

    def __repr__(self) -> str:
        return f"Binding(launch={self.launch!r}, out={checks.described(self.out)})"


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
    for what is no tensor or of a wrong dtype, ValueError for shape, stride, device, alignment, capacity or overlap.
    """
    if type(lhs) is not tuple or type(rhs) is not tuple or len(lhs) != 2 or len(rhs) != 2:
        lhs, rhs = _pair("lhs", "(A, SFA)", lhs), _pair("rhs", "(B, SFB)", rhs)
    a, sfa = lhs
    b, sfb = rhs
    facts = checks.facts
    optional = () if alpha is None else (alpha,)
    checked = plan.checked(facts(out), facts(a), facts(sfa), facts(b), facts(sfb), *map(facts, optional))
    checks.memory(OP, _ARGUMENTS, (out, a, sfa, b, sfb, *optional), checked.sizes, 1)
    kernel = checked.kernel
    if kernel is None:
        return Binding(None, out)
    caps = plan.caps
    launch = kernel.prepare(
        {
            "a": a,
            "b": b,
            "sfa": sfa,
            "sfb": sfb,
            "alpha": alpha,
            "c": out,
            "m": checked.m,
            "n": caps.n,
            "k": caps.k,
            "batch": caps.batch,
            "alpha_count": checked.alpha_count,
        },
        checked.maps,
    )
    ctas = plan.sm_count if sm_count is None else checks.whole(OP, "sm_count", sm_count)
    launch.grid = (min(checked.tiles, ctas), 1, 1)
    return Binding(launch, out)


def run(*, binding: Binding, stream: Any = None) -> torch.Tensor:
    """Launch a binding on ``stream`` (the current one by default) and return its C."""
    try:
        launch, out = binding.launch, binding.out
    except AttributeError:
        found = type(binding).__name__
        raise TypeError(f"{OP}: binding is a {found}; needed is a Binding: make one with bind") from None
    if launch is not None:
        launch.launch(stream)
    return out


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
    a, b = _pair("lhs", "(A, SFA)", lhs)[0], _pair("rhs", "(B, SFB)", rhs)[0]
    try:
        (m, _, _), (n, width, batch), device = a.shape, b.shape, a.device
    except (AttributeError, ValueError):
        _no_matrices(a, b)
    k = 2 * width
    prepared = _plan(target.current_target(device), ab_dtype, sf_dtype, sf_vec_size, c_dtype, n, k, batch)
    if out is None:
        out = torch.empty_strided((m, n, batch), (n, 1, m * n), dtype=getattr(torch, c_dtype), device=device)
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
            max_m=checks.LARGEST,
            n=n,
            k=k,
            batch=batch,
        )
    )


class _Checked(NamedTuple):
    """What tensors of the same facts share; sizes are in the order of ``_ARGUMENTS``, and no kernel is for no rows."""

    m: int
    alpha_count: int
    sizes: tuple[int, ...]
    maps: dict[str, MapShape]
    tiles: int
    kernel: LoadedKernel | None


def _check(plan: Plan, out: Facts, a: Facts, sfa: Facts, b: Facts, sfb: Facts, alpha: Facts | None = None) -> _Checked:
    caps, device = plan.caps, plan.target.device
    n, k, batch = caps.n, caps.k, caps.batch
    a_size, a_map = _operand("A", a, None, k, batch, device)
    m = a[1][0]
    if m > caps.max_m:
        raise ValueError(f"{OP}: A has {m} rows, more than the plan's max_m = {caps.max_m}; plan with a larger max_m")
    b_size, b_map = _operand("B", b, n, k, batch, device)
    sfa_size, sfb_size = _scales("SFA", sfa, m, k, batch, device), _scales("SFB", sfb, n, k, batch, device)
    shape, strides = (m, n, batch), (n, 1, m * n)
    c_size = checks.layout(OP, "out", out, dtype=caps.c_dtype, shape=shape, strides=strides, device=device)
    sizes = [c_size, a_size, sfa_size, b_size, sfb_size]
    alpha_count = 0
    if alpha is not None:
        alpha_count = 1 if math.prod(alpha[1]) == 1 else batch
        fix = "pass one factor, or one for each batch entry, as a 1-D tensor"
        sizes.append(checks.layout(OP, "alpha", alpha, dtype="float32", shape=(alpha_count,), device=device, fix=fix))
    if m == 0:
        return _Checked(0, alpha_count, tuple(sizes), {}, 0, None)
    kernel = plan.kernels[planner.choose(m)]
    tiles = planner.tiles(kernel.spec, m, n, batch)
    return _Checked(m, alpha_count, tuple(sizes), {"a": a_map, "b": b_map}, tiles, kernel.loaded)


def _operand(name: str, x: Facts, rows: int | None, k: int, batch: int, device: str) -> tuple[int, MapShape]:
    """Check a packed operand ``[rows, K/2, L]``, of any number of rows for None, and describe it to TMA."""
    width = k // 2
    size = checks.layout(OP, name, x, dtype=_PACKED, shape=(rows, width, batch), strides=(None, 1, None), device=device)
    rows = x[1][0]
    pitch = x[2][0] if rows > 1 else width
    step = x[2][2] if batch > 1 else max(rows, 1) * pitch
    for label, value, least in (("row", pitch, width), ("batch", step, width)):
        if value < least or value % 16:
            raise ValueError(
                f"{OP}: {name} has a {label} stride of {value} bytes; needed is at least {least} and a multiple of 16: "
                "copy it into a tensor of such strides"
            )
    return size, ((width, rows, batch), (pitch, step))


def _scales(name: str, x: Facts, rows: int, k: int, batch: int, device: str) -> int:
    """Check swizzled scales: the 6-D logical view, or contiguous storage, 6-D or flat (for one matrix also a larger
    one). Any other shape is refused, since linear scales may have as many bytes."""
    size = checks.layout(OP, name, x, dtype=_SCALE, shape=None, strides=checks.ANY, device=device)
    _, shape, strides, _ = x
    needed = scales.storage_bytes(rows, k // 16, batch)
    if len(shape) == 1 or scales.is_storage(shape, k // 16, batch):
        swizzled = checks.contiguous(x)
    else:
        swizzled = scales.is_view(shape, strides, k // 16, batch)
    if not swizzled or size < needed or (batch > 1 and size != needed):
        storage = scales.storage_shape(rows, k // 16, batch)
        _, row_tiles, column_tiles, *_ = storage
        raise ValueError(
            f"{OP}: {name} has shape {tuple(shape)}, strides {tuple(strides)}; needed are the swizzled scales of "
            f"{rows} rows, as contiguous storage {list(storage)}, as its {needed} contiguous bytes in one dimension, "
            f"or as the view [32, 4, {row_tiles}, 4, {column_tiles}, {batch}]: b12x.quantization.scales.swizzle makes "
            f"them of linear scales [{rows}, {k // 16}]"
        )
    return size


def _pair(name: str, form: str, found: Any) -> Operand:
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        what = f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, (tuple, list)) else "")
        raise TypeError(f"{OP}: {name} is {what}; needed is a pair of tensors: pass {name}={form}")
    return found[0], found[1]


def _no_matrices(a: Any, b: Any) -> NoReturn:
    """A or B of a one-shot call is no tensor of rank 3."""
    for name, x in (("A", a), ("B", b)):
        found = checks.facts(x)
        device = "cuda" if found[0] is None else str(found[3])
        checks.layout(OP, name, found, dtype=_PACKED, shape=None, strides=checks.ANY, device=device)
    raise ValueError(
        f"{OP}: A has shape {tuple(a.shape)} and B {tuple(b.shape)}; needed are [M, K/2, L] and [N, K/2, L]: "
        "unsqueeze(-1) makes one of a matrix"
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
        raise ValueError(f"{OP}: cluster_shape_mn is {cluster_shape_mn}; needed is (1, 1): leave it out")
    if alpha_dtype not in (None, "float32"):
        raise ValueError(
            f"{OP}: alpha_dtype is {alpha_dtype!r}; alpha is read as 'float32': convert it and leave this out"
        )
    if expected_m is not None:
        checks.whole(OP, "expected_m", expected_m, fix="leave the hint out, or take the M that is most common")
    if sfb_k_replicated:
        raise ValueError(
            f"{OP}: sfb_k_replicated is for FP8 weights with 128 x 128 blocks, not for NVFP4: leave it out"
        )
    known = ("mma_tiler_mn", "load_path", "swap_ab", "rhs_values_tiled", "plain_fp8", "block_fp8")
    for name, value in policy.items():
        if name not in known:
            raise TypeError(f"{OP}: mm has no argument {name!r}")
        if value not in (None, False):
            raise ValueError(f"{OP}: {name}={value!r} is not available; leave it out and the library chooses")
