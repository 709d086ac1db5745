"""Running the ops' cases on a target, and what each kernel of the installed packs did in them."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import b12x
from b12x._runtime import counters, freeze, packs, resolve, target
from b12x._runtime.errors import KernelResolutionFrozenError
from b12x._runtime.launch import Target
from b12x._runtime.spec import module_name
from b12x.verify.case import Case, Judgement, Prepared, Size

#: Targets by name: which device each takes, and the sizes that suit it.
TARGETS: dict[str, tuple[str, tuple[Size, ...]]] = {
    "emulator": ("cpu", ("small",)),
    "rehost:sm_90a": ("cuda", ("small", "model")),
    "cuda": ("cuda", ("small", "model")),
}
#: Multiprocessors of the emulated GPU: few, so that persistent kernels take several tiles each.
EMULATED_SMS = 8


@dataclass(frozen=True)
class CaseResult:
    """What one case found. ``error`` says why there is no judgement; ``seconds`` is a launch's time where measured."""

    op: str
    case: Case
    keys: tuple[str, ...]
    judgement: Judgement | None = None
    error: str | None = None
    seconds: float | None = None
    flops: int = 0
    bytes: int = 0

    @property
    def passed(self) -> bool:
        return self.judgement is not None and not self.judgement.wrong

    def __str__(self) -> str:
        return str(self.judgement) if self.error is None else self.error

    def to_json(self) -> dict[str, Any]:
        return {"case": self.case.name, "size": self.case.size, "passed": self.passed, **self.figures()}

    def figures(self) -> dict[str, Any]:
        """What there is of error text, judgement and time, as JSON data."""
        return {
            **({} if self.error is None else {"error": self.error}),
            **({} if self.judgement is None else self.judgement.to_json()),
            **({} if self.seconds is None else {"seconds": self.seconds, "flops": self.flops, "bytes": self.bytes}),
        }


@dataclass
class KernelResult:
    """All results of one kernel; none means that no case reached it."""

    key: str
    results: list[CaseResult] = field(default_factory=list)

    @property
    def status(self) -> str:
        if not self.results:
            return "not run"
        return "passed" if all(result.passed for result in self.results) else "FAILED"

    @property
    def worst(self) -> float:
        """The largest error as a part of its bound."""
        return max((r.judgement.worst for r in self.results if r.judgement is not None), default=0.0)

    @property
    def relative(self) -> float:
        """The largest norm of a case's error over that of its reference."""
        return max((r.judgement.relative for r in self.results if r.judgement is not None), default=0.0)


@contextmanager
def entered(name: str) -> Iterator[Target]:
    """A target of :data:`TARGETS`, or ``cuda:N``, chosen for plans inside (errors as :func:`b12x.target`)."""
    if name.startswith("cuda"):
        yield target.current_target("cuda:0" if name == "cuda" else name)
        return
    with b12x.target(name, sm_count=EMULATED_SMS) as chosen:
        yield chosen


def op_of(key: str) -> str:
    """The op that a kernel belongs to."""
    return ".".join(key.partition(":")[0].split(".")[:2])


def cases_of(op: str) -> tuple[Case, ...]:
    """The cases of an op; none where there is no such op, or it has no module ``cases``."""
    name = f"{module_name(op)}.cases"
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return ()
    if found is None:
        return ()
    cases: tuple[Case, ...] = importlib.import_module(name).CASES
    return cases


def every_case() -> list[tuple[str, Case]]:
    """The cases of every op that there is, whatever the packs hold, with the op."""
    folders = {path.parent for root in b12x.__path__ for path in Path(root).glob("*/*/cases.py")}
    # A module whose name is taken by a function of its group has an underscore before it.
    ops = sorted(f"{f.parent.name}.{f.name.lstrip('_')}" for f in folders if (f / "planner.py").exists())
    return [(op, case) for op in ops for case in cases_of(op)]


def all_cases(sizes: Iterable[Size]) -> list[tuple[str, Case]]:
    """Every case of these sizes, with its op: also of ops that are made of other ops' kernels."""
    return [(op, case) for op, case in every_case() if case.size in sizes]


def one_for_each_key(where: Target, cases: Iterable[tuple[str, Case]]) -> list[tuple[str, Case]]:
    """The first case that reaches each kernel, for a quick run."""
    seen: set[str] = set()
    chosen = []
    for op, case in cases:
        keys = set(keys_of(case, where) or ())
        if not keys <= seen:
            seen |= keys
            chosen.append((op, case))
    return chosen


def keys_of(case: Case, where: Target) -> tuple[str, ...] | None:
    """The kernels that a case launches with the installed packs; None where they lack one that it needs."""
    keys = []
    for role in case.roles():
        present = next((spec.key for spec in role.candidates if resolve.find(spec, where) is not None), None)
        if present is None:
            return None
        keys.append(present)
    return tuple(keys)


def run_cases(
    where: Target,
    cases: Iterable[tuple[str, Case]],
    *,
    seed: int = 0,
    timer: Callable[[Prepared], float] | None = None,
    progress: Callable[[str, Case, CaseResult | None], None] = lambda op, case, result: None,
) -> list[KernelResult]:
    """Run cases on kernels of the installed packs only, and collect results for every kernel that these hold.

    A case whose kernels the packs lack is left out. ``timer`` gives the seconds of one launch, for ``model`` cases.
    ``progress`` is called before each case, without a result, and after it. A fault that leaves the GPU unusable ends
    the run.
    """
    kernels = {key: KernelResult(key) for pack in packs.installed() for key in sorted(pack.entries)}
    with packs_only():
        for op, case in cases:
            keys = keys_of(case, where)
            if keys is None:
                continue
            progress(op, case, None)
            result = run_case(where, op, case, keys, seed=seed, timer=timer)
            if result is None:
                continue
            progress(op, case, result)
            for key in keys:
                kernels[key].results.append(result)
            if result.error is not None and not _usable(where):
                break
    return list(kernels.values())


def run_case(
    where: Target,
    op: str,
    case: Case,
    keys: tuple[str, ...],
    *,
    seed: int = 0,
    timer: Callable[[Prepared], float] | None = None,
) -> CaseResult | None:
    """Run one case, which launches ``keys``; None where the packs lack another kernel of its plan."""
    try:
        prepared = case.prepare(where.device, case.generator(where.device, seed))
        before = Counter(counters.launches)
        prepared.launch()
        launched = tuple((counters.launches - before).keys())
        judgement = prepared.judge()
        if set(launched) != set(keys):
            return CaseResult(op, case, keys, error=f"launched {', '.join(launched) or 'nothing'}")
        seconds = timer(prepared) if timer is not None and case.size == "model" and not judgement.wrong else None
    except KernelResolutionFrozenError:
        return None
    except Exception as error:  # whatever a broken kernel raises belongs into its row, and the others still run
        return CaseResult(op, case, keys, error=f"{type(error).__name__}: {error}")
    return CaseResult(op, case, keys, judgement, None, seconds, prepared.flops, prepared.bytes)


def _usable(where: Target) -> bool:
    if where.device == "cpu":
        return True
    try:
        torch.cuda.synchronize(where.device)
    except RuntimeError:
        return False
    return True


@contextmanager
def packs_only() -> Iterator[None]:
    """Nothing is compiled inside."""
    frozen = freeze.kernel_resolution_frozen()
    if not frozen:
        freeze.freeze_kernel_resolution("verifying what the packs hold")
    try:
        yield
    finally:
        if not frozen:
            freeze.unfreeze_kernel_resolution()
