"""Section: the ops' own numerical cases, those that tests, `b12x verify` and the check records run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from operands import DEVICE
from report import Report

from b12x._runtime import target
from b12x.verify import runner
from b12x.verify.case import Case


def run(prepared: Path, seed: int, report: Report) -> None:
    judge(runner.every_case(), seed, report)


def judge(cases: Iterable[tuple[str, Case]], seed: int, report: Report) -> None:
    """Run cases and report each."""

    def add(op: str, case: Case, result: runner.CaseResult | None) -> None:
        if result is not None:
            report.add(f"{op} {case.name}", result.passed, keys=result.keys, **result.figures())

    runner.run_cases(target.current_target(DEVICE), cases, seed=seed, progress=add)
