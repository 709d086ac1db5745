"""``run`` launches the library's kernels and nothing else: a dispatch mode sees every operation of torch inside it.

Every op of the registry is held to it. One with kernels of its own is bound and run by its numerical cases, as a caller
does; one that is made of other ops has an entry in ``EXAMPLES``. An op with neither fails.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import b12x
from b12x import emulator
from b12x._runtime import counters, emulator_target, registry
from b12x._runtime.spec import module_name
from b12x.gemm import block_fp8_linear, mxfp8_linear, tensor_fp8_linear, wo_projection
from b12x.verify import runner

OPS = [meta.qualname for meta in registry.list_ops() if "run" in meta.entry_points]
#: Token counts on both sides of every regime.
TOKENS = (1, 8, 9, 16, 17, 80)


class Seen(TorchDispatchMode):
    """Notes operations of torch; a view launches nothing and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Watch:
    """Calls of ``bind`` and ``run``, and what torch did inside."""

    def __init__(self) -> None:
        self.calls = {"bind": 0, "run": 0}
        self.seen: dict[str, list[str]] = {"bind": [], "run": []}

    def over(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, watched."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            with Seen() as mode:
                result = function(*args, **kwargs)
            self.seen[name] += mode.names
            return result

        return call


#: What binds, and what runs the binding.
Example = tuple[Callable[[], Any], Callable[..., Any]]


def linear(op: Any, weight: Any, source_dtype: torch.dtype, device: str) -> Iterator[Example]:
    """A linear of 256 to 72 features, with a bias."""
    caps = op.Caps(device=device, max_tokens=max(TOKENS), in_features=256, out_features=72)
    plan = op.plan(caps)
    bias = torch.zeros(72, dtype=torch.bfloat16)
    scratch = {}
    if hasattr(plan, "scratch_specs"):
        (spec,) = plan.scratch_specs()
        scratch["scratch"] = torch.empty(spec.shape, dtype=spec.dtype)
    for tokens in TOKENS:
        source = torch.zeros((tokens, 256), dtype=source_dtype)
        output = torch.empty((tokens, 72, 1), dtype=torch.bfloat16)
        arguments = {**scratch, "source": source, "packed_weight": weight, "output": output, "bias": bias}
        yield lambda arguments=arguments: op.bind(plan, **arguments), op.run


def of_mxfp8(device: str) -> Iterator[Example]:
    scale = torch.full((72, 8), 127, dtype=torch.uint8)
    return linear(mxfp8_linear, mxfp8_linear.pack_weight(e4m3(72, 256), scale), torch.bfloat16, device)


def of_block_fp8(device: str) -> Iterator[Example]:
    weight = block_fp8_linear.pack_weight(e4m3(72, 256), torch.ones(1, 2))
    return linear(block_fp8_linear, weight, torch.bfloat16, device)


def of_tensor_fp8(device: str) -> Iterator[Example]:
    weight = tensor_fp8_linear.pack_weight(e4m3(72, 256), torch.ones(1))
    return linear(tensor_fp8_linear, weight, torch.float8_e4m3fn, device)


def of_wo(device: str) -> Iterator[Example]:
    """Two groups of one head with 64 columns that stay and 64 that rotate."""
    sizes = {"groups": 2, "group_width": 128, "rank": 64, "hidden": 72}
    ones = torch.ones(1, 1)
    weights = wo_projection.pack_weights(e4m3(128, 128), ones, e4m3(72, 128), ones, **sizes)
    plan = wo_projection.plan(wo_projection.Caps(device=device, max_tokens=max(TOKENS), **sizes))
    (spec,) = plan.scratch_specs()
    scratch = torch.empty(spec.shape, dtype=spec.dtype)
    heads = {"heads_per_group": 1, "nope_dim": 64, "rope_dim": 64}
    for tokens in TOKENS:
        x = torch.zeros((tokens, 2, 128), dtype=torch.bfloat16)
        turned = {"positions": torch.zeros(tokens, dtype=torch.int64), "cos_sin_cache": torch.ones(4, 64)}
        shared = {"scratch": scratch, "weights": weights}
        plain, inverse = {**shared, "source_tgd": x}, {**shared, "o": x, **turned, **heads}
        yield lambda arguments=plain: wo_projection.bind(plan, **arguments), wo_projection.run
        yield lambda arguments=inverse: wo_projection.bind_inv_rope(plan, **arguments), wo_projection.run_inv_rope


def e4m3(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns).to(torch.float8_e4m3fn)


#: Ops that are made of others.
EXAMPLES: dict[str, Callable[[str], Iterator[Example]]] = {
    "gemm.block_fp8_linear": of_block_fp8,
    "gemm.mxfp8_linear": of_mxfp8,
    "gemm.tensor_fp8_linear": of_tensor_fp8,
    "gemm.wo_projection": of_wo,
}


@pytest.fixture
def launches_only(target: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the emulator kernels are neither decoded nor run: only what surrounds them is looked at."""
    if target.name == "emulator":
        monkeypatch.setattr(emulator_target, "_parsed", lambda ptx: None)
        monkeypatch.setattr(emulator, "launch", lambda *args, **kwargs: emulator.Stats())
        b12x.clear_all_caches()
    yield
    if target.name == "emulator":
        b12x.clear_all_caches()


def one_case_for_each_kernel(op: str) -> list[Any]:
    """Small cases of an op that between them reach every kernel that its small cases reach."""
    seen: set[tuple[str, ...]] = set()
    chosen = []
    for case in runner.cases_of(op):
        keys = tuple(sorted(role.candidates[0].key for role in case.roles()))
        if case.size == "small" and keys not in seen:
            seen.add(keys)
            chosen.append(case)
    return chosen


def run_cases(op: str, device: str, watch: Watch) -> None:
    """Through the op's module, whose functions are watched."""
    module = importlib.import_module(f"{module_name(op)}.api")
    with pytest.MonkeyPatch.context() as patch:
        for name in watch.calls:
            patch.setattr(module, name, watch.over(name, getattr(module, name)))
        for case in one_case_for_each_kernel(op):
            prepared = case.prepare(device, case.generator(device, 1))
            before = counters.launches.total(), watch.calls["run"]
            prepared.launch()
            assert counters.launches.total() > before[0], f"{op} {case.name} launched no kernel"
            assert watch.calls["run"] > before[1], f"{op} {case.name} does not call its api.run"


@pytest.mark.parametrize("op", OPS)
def test_run_launches_no_operation_of_torch(op: str, target: Any, launches_only: None) -> None:
    """Nor does ``bind`` compute anything, and each ``run`` launches at least one kernel."""
    watch = Watch()
    if op not in EXAMPLES:
        run_cases(op, target.device, watch)
    for bind, run in EXAMPLES[op](target.device) if op in EXAMPLES else ():
        binding = watch.over("bind", bind)()
        before = counters.launches.total()
        watch.over("run", run)(binding=binding)
        assert counters.launches.total() > before, f"{op} launched no kernel"
    assert all(watch.calls.values()), f"{op} has neither small cases nor an entry in EXAMPLES: {watch.calls} calls"
    assert watch.seen == {"bind": [], "run": []}


def test_the_mode_sees_what_would_launch() -> None:
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    with Seen() as mode:
        x.view(16).unsqueeze(0).t()
        assert mode.names == []
        (x + 1).contiguous()
        x.copy_(y.t())
        torch.empty(3)
    assert mode.names == ["aten.add.Tensor", "aten.copy_.default", "aten.empty.memory_format"]
