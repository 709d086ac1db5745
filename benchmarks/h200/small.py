"""Section for compute-sanitizer: every kernel, at the smallest sizes with two tiles, a tail and several stages."""

from __future__ import annotations

from pathlib import Path

from cases import judge
from operands import DEVICE
from report import Report

from b12x._runtime import target
from b12x.verify import runner


def run(prepared: Path, seed: int, report: Report) -> None:
    where = target.current_target(DEVICE)
    judge(runner.one_for_each_key(where, runner.all_cases(("small",))), seed, report)
