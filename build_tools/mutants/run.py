"""Judging many mutants in worker processes, and the report of it."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import b12x
from b12x._runtime import packs

from ..errors import BuildError
from .draw import Mutant, order
from .families import Family
from .judge import CRASH, Finding, find, first_finding, parsed, runs_of
from .kernel import Kernel


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    mutant: Mutant
    finding: Finding

    @property
    def survived(self) -> bool:
        return self.finding.check is None

    @property
    def crashed(self) -> bool:
        """Whether the emulator failed, rather than saying what is wrong."""
        return self.finding.check == CRASH

    def __str__(self) -> str:
        found = "SURVIVED" if self.survived else f"{self.finding.check} ({self.finding.where}): {self.finding.text}"
        return f"line {self.mutant.change.line}: {self.mutant}\n    {found}"

    def to_json(self) -> dict[str, Any]:
        change, finding = self.mutant.change, self.finding
        return {
            "key": self.mutant.key,
            "operator": self.mutant.operator,
            "line": change.line,
            "before": change.before,
            "nth": change.nth,
            "after": change.after,
            "killed_by": finding.check,
            "found": finding.text,
            "run": None if self.survived else finding.where,
        }


@dataclass
class Report:
    """What was drawn of a family. ``alarms`` are findings about kernels as they are; ``invalid`` mutants, which no
    longer parse, are counted and otherwise left out."""

    family: str
    seed: int
    alarms: list[tuple[str, Finding]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    invalid: int = 0
    seconds: float = 0.0

    @property
    def survivors(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.survived]

    def table(self) -> str:
        """How many mutants of each operator there were, and which checks found them."""
        by_operator: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            by_operator.setdefault(outcome.mutant.operator, Counter())[outcome.finding.check or "survived"] += 1
        lines = []
        for operator, checks in sorted(by_operator.items()):
            found = ", ".join(f"{count} {check}" for check, count in checks.most_common())
            lines.append(f"{operator:18} {checks.total():4}  {found}")
        killed = len(self.outcomes) - len(self.survivors)
        lines.append(
            f"{self.family}, seed {self.seed}: {killed} of {len(self.outcomes)} mutants killed in {self.seconds:.0f} s "
            f"({self.invalid} more did not parse)"
        )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "alarms": [{"key": key, "found": f.text, "check": f.check, "run": f.where} for key, f in self.alarms],
            "invalid": self.invalid,
            "mutants": [outcome.to_json() for outcome in self.outcomes],
        }


def kernels_of(family: Family, key: str | None = None) -> dict[str, Kernel]:
    """The kernels of a family, or the one under a key, from the installed packs (BuildError where they lack it)."""
    found = {}
    for wanted in family.keys if key is None else (key,):
        holders = packs.holders(wanted)
        if not holders:
            raise BuildError(
                f"no installed pack holds {wanted}; build manifests/base.toml and put the pack on B12X_PACK_PATH"
            )
        pack, artifact = holders[0]
        found[wanted] = Kernel(pack.ptx(artifact))
    return found


def judge_family(
    family: Family,
    *,
    seed: int,
    count: int,
    key: str | None = None,
    operators: Iterable[str] | None = None,
    jobs: int = 1,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Draw ``count`` mutants of a family's kernels, or of the one under ``key``, and judge each.

    ``progress`` is called with each in turn. The kernels as they are run first; their alarms are in the report.
    """
    started = time.perf_counter()
    report = Report(family.kernel, seed)
    kernels = kernels_of(family, key)
    with _workers(jobs) as submit:
        plain = [(name, submit(find, name, None, run)) for name in kernels for run in runs_of(name)]
        drawn = iter(order(kernels, seed, operators))
        waiting: list[tuple[Mutant, Future[Finding | None]]] = []
        while True:
            while len(waiting) + len(report.outcomes) < count and (mutant := next(drawn, None)) is not None:
                text = kernels[mutant.key].apply(mutant.change)
                waiting.append((mutant, submit(_judge, mutant.key, text)))
            if not waiting:
                break
            mutant, future = waiting.pop(0)
            finding = future.result()
            if finding is None:
                report.invalid += 1
                continue
            report.outcomes.append(Outcome(mutant, finding))
            progress(report.outcomes[-1])
        report.alarms = [(name, future.result()) for name, future in plain if future.result().check is not None]
    report.seconds = time.perf_counter() - started
    return report


def _judge(key: str, ptx: str) -> Finding | None:
    program = parsed(ptx)
    return None if program is None else first_finding(key, program, runs_of(key))


@contextmanager
def _workers(jobs: int) -> Iterator[Callable[..., Future[Any]]]:
    """``submit`` of that many processes."""
    # The children find modules where this process does, be the package installed or not, before they load a task.
    paths = {"b12x": list(b12x.__path__), "b12x.kernels": list(importlib.import_module("b12x.kernels").__path__)}
    boot = "import importlib\nfor name, path in paths.items(): importlib.import_module(name).__path__[:] = path"
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=exec, initargs=(boot, {"paths": paths}))
    try:
        yield pool.submit
    finally:
        pool.shutdown(cancel_futures=True)
