"""``gemm.blockscaled``: ``C = alpha * (A * SFA) (B * SFB)^T + bias`` with block-scaled operands, f32 accumulation.

>>> plan = blockscaled.plan(blockscaled.Caps(device="cuda", c_dtype="bfloat16", max_m=4096, n=7168, k=2048))
>>> binding = plan.bind(lhs=(a, sfa), rhs=(b, sfb), out=out, alpha=alpha)
>>> blockscaled.run(binding=binding)

``mm`` is the one-shot form. Layouts: ``A [M, K', L]`` and ``B [N, K', L]`` have K innermost, physically ``[L, M, K']``:
FP4 is K' = K/2 bytes of two E2M1 codes, low nibble first, FP8 K' = K E4M3 codes. ``C [M, N, L]`` is physically
``[L, M, N]``. Scales, by recipe:

========= ================= ===========================================================================================
recipe    operands          scales
========= ================= ===========================================================================================
nvfp4     E2M1              E4M3 a block of 16, in the swizzled layout of :mod:`b12x.quantization.scales`
mxfp4     E2M1              E8M0 a block of 32, swizzled
mxfp8     E4M3              E8M0 a block of 32, swizzled
fp8       E4M3              none (``plain_fp8``); SFA and SFB may be None and are never read
block_fp8 E4M3              f32: ``SFA [M, K/128, L]``, physically ``[L, M, K/128]``;
                            ``SFB [ceil(N/128), K/128, L]`` alike
========= ================= ===========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch

from b12x._runtime import checks, registry, resolve, target
from b12x._runtime.abi import Dim3
from b12x._runtime.checks import Facts
from b12x._runtime.launch import Launch, LoadedKernel, MapShape, Target, used_on
from b12x.gemm.blockscaled import planner
from b12x.gemm.blockscaled.decode_spec import QUANTIZED, DecodeSpec
from b12x.gemm.blockscaled.planner import Caps, Choice
from b12x.gemm.blockscaled.recipes import RECIPES
from b12x.quantization import scales

OP = planner.OP
META = registry.find_op(OP)

Operand = tuple[torch.Tensor, torch.Tensor | None]
#: Dtypes of torch that hold an operand's or a scale's dtype.
_OPERAND = {"float4_e2m1fn": ("uint8", "float4_e2m1fn_x2"), "float8_e4m3fn": ("float8_e4m3fn", "uint8")}
_SCALE = {"float8_e4m3fn": ("uint8", "float8_e4m3fn"), "float8_e8m0fnu": ("uint8", "float8_e8m0fnu")}
#: Arguments and their alignment in bytes, the output first.
_ALIGNMENT = {"out": 16, "A": 16, "SFA": 16, "B": 16, "SFB": 16, "alpha": 4, "bias": 16}


class Plan:
    """Resolved kernels for every live M up to ``caps.max_m``."""

    def __init__(self, caps: Caps, table: Sequence[Choice] | None = None) -> None:
        if caps.source != QUANTIZED:
            raise ValueError(f"{OP}: source is {caps.source!r}; plan quantises no A: make FusedCaps and use plan_fused")
        self.caps = caps
        self.target = target.current_target(caps.device)
        self.kernels = resolve.resolve_all(OP, planner.roles(caps), self.target, caps)
        self.sm_count = self.target.sm_count
        self.table = planner.table(caps, self.sm_count) if table is None else planner.checked_table(caps, table)
        self.checked = lru_cache(maxsize=1024)(partial(_check, self))

    def explain(self) -> str:
        """Which kernel serves each role, and why; then which rows go where."""
        rows = (
            f"M {'above' if c.limit is None else f'up to {c.limit}'}: {c.role}, K split {c.split} ways"
            for c in self.table
            if c.role in self.kernels
        )
        return "\n".join([*(kernel.why for kernel in self.kernels.values()), *rows])

    def bind(
        self,
        *,
        lhs: Operand,
        rhs: Operand,
        out: torch.Tensor,
        alpha: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        sm_count: int | None = None,
    ) -> Binding:
        """As :func:`bind`."""
        return bind(self, lhs=lhs, rhs=rhs, out=out, alpha=alpha, bias=bias, sm_count=sm_count)


class Binding(NamedTuple):
    """A checked launch; None where C has no elements."""

    launch: Launch | None
    out: torch.Tensor

    def __repr__(self) -> str:
        return f"Binding(launch={self.launch!r}, out={checks.described(self.out)})"


def plan(caps: Caps, *, table: Sequence[Choice] | None = None) -> Plan:
    """Resolve every kernel these Caps can need.

    ``table`` says which rows go to which kernel, as :func:`b12x.gemm.blockscaled.planner.table` does by default. Raises
    KernelResolutionFrozenError where a kernel is in no pack and resolution is frozen.
    """
    return Plan(caps, table)


def bind(
    plan: Plan,
    *,
    lhs: Operand,
    rhs: Operand,
    out: torch.Tensor,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sm_count: int | None = None,
) -> Binding:
    """Check the tensors of one launch: ``lhs = (A, SFA)``, ``rhs = (B, SFB)``, ``out`` C, M taken from A.

    ``alpha`` is f32 ``[1]``, or ``[L]`` for one factor a batch entry, read when the kernel runs; None is 1. ``bias`` is
    ``[N]`` of C's dtype, added to C after its rounding, the sum rounded again. ``sm_count`` limits the CTAs
    of kernels that take several tiles each, to no less than one tile's.
    Rows of A and B may be pitched by a multiple of 16 bytes. Raises TypeError for what is no tensor or of a wrong
    dtype, ValueError for shape, stride, device, alignment, capacity or overlap.
    """
    if type(lhs) is not tuple or type(rhs) is not tuple or len(lhs) != 2 or len(rhs) != 2:
        lhs, rhs = checks.pair(OP, "lhs", "(A, SFA)", lhs), checks.pair(OP, "rhs", "(B, SFB)", rhs)
    a, sfa = lhs
    b, sfb = rhs
    if plan.caps.plain_fp8:
        sfa = sfb = None
    facts = checks.facts
    tensors = (out, a, sfa, b, sfb, alpha, bias)
    optional = [None if x is None else facts(x) for x in (sfa, sfb, alpha, bias)]
    checked = plan.checked(facts(out), facts(a), optional[0], facts(b), *optional[1:])
    checks.memory(OP, checked.arguments, [x for x in tensors if x is not None], checked.sizes, 1)
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
            "bias": bias,
            "c": out,
            "m": checked.m,
            "n": caps.n,
            "k": caps.k,
            "batch": caps.batch,
            "alpha_count": checked.alpha_count,
            "has_bias": int(bias is not None),
            **checked.pitches,
        },
        checked.maps,
    )
    split = checked.split
    if split > 1:
        launch.cluster = (split, 1, 1)
    ctas = plan.sm_count if sm_count is None else checks.whole(OP, "sm_count", sm_count)
    if checked.fixed_grid is None:
        launch.grid = (split * max(1, min(checked.tiles, ctas // split)), 1, 1)
    else:
        launch.grid = checked.fixed_grid
    return Binding(launch, out)


def run(*, binding: Binding, stream: Any = None) -> torch.Tensor:
    """Launch a binding on ``stream`` (the current one by default) and return its C."""
    try:
        launch, out = binding.launch, binding.out
    except AttributeError:
        raise checks.no_binding(OP, binding) from None
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
    plain_fp8: bool = False,
    block_fp8: bool = False,
    bias: torch.Tensor | None = None,
    **policy: Any,
) -> torch.Tensor:
    """One-shot GEMM; C ``[M, N, L]`` is allocated where ``out`` is None. Operands as in :func:`bind`.

    ``expected_m`` and ``sfb_k_replicated`` (all scales of B are equal within 128 x 128 blocks) are hints that change no
    result. Tile and load-path choices are this library's own: arguments that would force one are refused by name.
    """
    _refuse(cluster_shape_mn, alpha_dtype, expected_m, policy)
    a, b = checks.pair(OP, "lhs", "(A, SFA)", lhs)[0], checks.pair(OP, "rhs", "(B, SFB)", rhs)[0]
    try:
        (m, _, _), (n, width, batch), device = a.shape, b.shape, a.device
    except (AttributeError, ValueError):
        _no_matrices(a, b)
    static = (ab_dtype, sf_dtype, sf_vec_size, c_dtype, plain_fp8, block_fp8)
    prepared = _plan(target.current_target(device), *static, n, width, batch)
    c = out
    if c is None:
        c = torch.empty_strided((m, n, batch), (n, 1, m * n), dtype=getattr(torch, c_dtype), device=device)
    run(binding=bind(prepared, lhs=lhs, rhs=rhs, out=c, alpha=alpha, bias=bias, sm_count=sm_count), stream=stream)
    if out is None:
        used_on(stream, c)
    return c


def is_supported(device: Any = None) -> bool:
    """Whether a device (the current one by default) or the chosen verification target can run this op."""
    return target.is_supported(device)


def clear_caches() -> None:
    """Forget the plans that ``mm`` and its fused forms keep."""
    from b12x.gemm.blockscaled import fused  # which imports this module

    fused.clear_fused()
    _plan.cache_clear()


@lru_cache(maxsize=4096)
def _plan(
    where: Target,
    ab_dtype: str,
    sf_dtype: str,
    sf_vec_size: int,
    c_dtype: str,
    plain_fp8: bool,
    block_fp8: bool,
    n: int,
    width: int,
    batch: int,
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
            k=width if ab_dtype == "float8_e4m3fn" else 2 * width,
            batch=batch,
            plain_fp8=plain_fp8,
            block_fp8=block_fp8,
        )
    )


class _Checked(NamedTuple):
    """What tensors of the same facts share: the tensors that are there, with sizes, and the launch.

    No kernel is for no rows. ``fixed_grid`` is the grid of a kernel that is not persistent.
    """

    m: int
    alpha_count: int
    arguments: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]
    maps: dict[str, MapShape]
    pitches: dict[str, int]
    tiles: int
    split: int
    fixed_grid: Dim3 | None
    kernel: LoadedKernel | None


def _check(
    plan: Plan,
    out: Facts,
    a: Facts,
    sfa: Facts | None,
    b: Facts,
    sfb: Facts | None,
    alpha: Facts | None,
    bias: Facts | None,
) -> _Checked:
    caps, device = plan.caps, plan.target.device
    n, batch = caps.n, caps.batch
    a_size, a_map = _operand("A", a, None, caps.k_a or caps.k, caps, device)
    m = a[1][0]
    if m > caps.max_m:
        raise ValueError(f"{OP}: A has {m} rows, more than the plan's max_m = {caps.max_m}; plan with a larger max_m")
    b_size, b_map = _operand("B", b, n, caps.k, caps, device)
    shape, strides = (m, n, batch), (n, 1, m * n)
    sizes = {"out": checks.layout(OP, "out", out, dtype=caps.c_dtype, shape=shape, strides=strides, device=device)}
    sizes["A"] = a_size
    if not caps.plain_fp8:
        sizes["SFA"] = _scales("SFA", sfa, m, 1, caps, device)
    sizes["B"] = b_size
    if not caps.plain_fp8:
        sizes["SFB"] = _scales("SFB", sfb, n, 128, caps, device)
    alpha_count = 0
    if alpha is not None:
        alpha_count = 1 if math.prod(alpha[1]) == 1 else batch
        fix = "pass one factor, or one for each batch entry, as a 1-D tensor"
        sizes["alpha"] = checks.layout(
            OP, "alpha", alpha, dtype="float32", shape=(alpha_count,), device=device, fix=fix
        )
    if bias is not None:
        fix = "pass one term a column of C, of C's dtype"
        sizes["bias"] = checks.layout(OP, "bias", bias, dtype=caps.c_dtype, shape=(n,), device=device, fix=fix)
    arguments = tuple((name, _ALIGNMENT[name]) for name in sizes)
    checked = _Checked(m, alpha_count, arguments, tuple(sizes.values()), {}, {}, 0, 1, None, None)
    if m == 0:
        return checked
    choice = planner.choose(plan.table, m)
    kernel = plan.kernels[choice.role]
    checked = checked._replace(tiles=planner.tiles(kernel.spec, m, n, batch), split=choice.split, kernel=kernel.loaded)
    if isinstance(kernel.spec, DecodeSpec):
        (_, a_pitches), (_, b_pitches) = a_map, b_map
        pitches = dict(zip(("a_row", "a_batch", "b_row", "b_batch"), (*a_pitches, *b_pitches), strict=True))
        grid = (kernel.spec.tiles(n) * choice.split, batch, 1)
        return checked._replace(pitches=pitches, fixed_grid=grid)
    return checked._replace(maps={"a": a_map, "b": b_map})


def _operand(name: str, x: Facts, rows: int | None, k: int, caps: Caps, device: str) -> tuple[int, MapShape]:
    """Check an operand ``[rows, K', L]``, of any number of rows for None, and describe it to TMA."""
    width, batch = RECIPES[caps.recipe].row_bytes(k), caps.batch
    dtype = _OPERAND[caps.ab_dtype]
    size = checks.layout(OP, name, x, dtype=dtype, shape=(rows, width, batch), strides=(None, 1, None), device=device)
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


def _scales(name: str, x: Facts | None, rows: int, block_rows: int, caps: Caps, device: str) -> int:
    """Check the scales of an operand; float ones have a row for each ``block_rows`` rows of it.

    Swizzled ones are the 6-D logical view, or contiguous storage, 6-D or flat (for one matrix also a larger one). Any
    other shape is refused, since linear scales may have as many bytes.
    """
    if x is None:
        raise TypeError(f"{OP}: {name} is None; needed are the scales of {caps.recipe}: only plain_fp8 has none")
    batch, block = caps.batch, RECIPES[caps.recipe].block
    columns = caps.k // block
    if caps.sf_dtype == "float32":
        count = -(-rows // block_rows)
        dense = (columns, 1, count * columns)
        return checks.layout(OP, name, x, dtype="float32", shape=(count, columns, batch), strides=dense, device=device)
    size = checks.layout(OP, name, x, dtype=_SCALE[caps.sf_dtype], shape=None, strides=checks.ANY, device=device)
    _, shape, strides, _ = x
    needed = scales.storage_bytes(rows, columns, batch)
    if len(shape) == 1 or scales.is_storage(shape, columns, batch):
        swizzled = checks.contiguous(x)
    else:
        swizzled = scales.is_view(shape, strides, columns, batch)
    if not swizzled or size < needed or (batch > 1 and size != needed):
        storage = scales.storage_shape(rows, columns, batch)
        _, row_tiles, column_tiles, *_ = storage
        raise ValueError(
            f"{OP}: {name} has shape {tuple(shape)}, strides {tuple(strides)}; needed are the swizzled scales of "
            f"{rows} rows, as contiguous storage {list(storage)}, as its {needed} contiguous bytes in one dimension, "
            f"or as the view [32, 4, {row_tiles}, 4, {column_tiles}, {batch}]: b12x.quantization.scales.swizzle makes "
            f"them of linear scales [{rows}, {columns}]"
        )
    return size


def _no_matrices(a: Any, b: Any) -> NoReturn:
    """A or B of a one-shot call is no tensor of rank 3."""
    for name, x in (("A", a), ("B", b)):
        found = checks.facts(x)
        device = "cuda" if found[0] is None else str(found[3])
        known = tuple(dtype for dtypes in _OPERAND.values() for dtype in dtypes)
        checks.layout(OP, name, found, dtype=known, shape=None, strides=checks.ANY, device=device)
    raise ValueError(
        f"{OP}: A has shape {tuple(a.shape)} and B {tuple(b.shape)}; needed are [M, K', L] and [N, K', L]: "
        "unsqueeze(-1) makes one of a matrix"
    )


def _refuse(
    cluster_shape_mn: tuple[int, int],
    alpha_dtype: str | None,
    expected_m: int | None,
    policy: dict[str, Any],
) -> None:
    """Arguments of the contract that this op does not act on: harmless values pass, others are named."""
    if cluster_shape_mn not in ((1, 1), [1, 1]):
        raise ValueError(f"{OP}: cluster_shape_mn is {cluster_shape_mn}; needed is (1, 1): leave it out")
    if alpha_dtype not in (None, "float32"):
        raise ValueError(
            f"{OP}: alpha_dtype is {alpha_dtype!r}; alpha is read as 'float32': convert it and leave this out"
        )
    if expected_m is not None:
        checks.whole(OP, "expected_m", expected_m, fix="leave the hint out, or take the M that is most common")
    known = ("mma_tiler_mn", "load_path", "swap_ab", "rhs_values_tiled")
    for name, value in policy.items():
        if name not in known:
            raise TypeError(f"{OP}: mm has no argument {name!r}")
        if value is not None and value is not False:
            raise ValueError(f"{OP}: {name}={value!r} is not available; leave it out and the library chooses")
