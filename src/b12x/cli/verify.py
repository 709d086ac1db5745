"""``b12x verify``: every kernel of the installed packs against its reference, on the GPU or in the emulator."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from b12x._runtime import cuda_target, packs, target
from b12x._runtime.errors import DeviceNotSupportedError, DriverError, PackError
from b12x.cli.output import CommandError, table

if TYPE_CHECKING:
    from b12x._runtime.launch import Target
    from b12x.verify.case import Case, Prepared
    from b12x.verify.probe import Reading
    from b12x.verify.runner import CaseResult, KernelResult


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    command.add_argument(
        "--target", help="cuda:N, emulator or rehost:sm_90a; default: cuda:0, or the emulator with B12X_TARGET=emulator"
    )
    command.add_argument("--quick", action="store_true", help="one case for each kernel, at most a minute")
    command.add_argument("--mma-probe", action="store_true", help="measure how the tensor cores accumulate, only that")
    command.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    command.add_argument("--json", type=Path, metavar="FILE", dest="report", help="write a report to attach to a bug")


def run(args: argparse.Namespace) -> int:
    """Verify; 0 when every case that ran passed, 1 otherwise."""
    try:
        from b12x.verify import runner
    except ImportError as error:
        raise CommandError(f"`b12x verify` cannot start: {error}; needed is torch: pip install b12x") from None
    if args.report is not None and not args.report.parent.is_dir():
        raise CommandError(f"{args.report.parent} is no folder; needed is one that exists, for the report")
    try:
        with runner.entered(args.target or ("emulator" if target.emulator_chosen() else "cuda:0")) as where:
            if not packs.installed():
                raise CommandError("no packs found; needed is one to verify (`b12x doctor` says where it looked)")
            found, text = (_probe if args.mma_probe else _verify)(where, args)
    except (DriverError, DeviceNotSupportedError, PackError, ValueError) as error:
        raise CommandError(str(error)) from None
    print(text)
    if args.report is not None:
        args.report.write_text(json.dumps(found, indent=1) + "\n")
        print(f"report: {args.report}")
    return 0 if found["ok"] else 1


def _verify(where: Target, args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The report, and what to print."""
    from b12x.verify import report

    started = time.perf_counter()
    kernels = _results(where, args)
    seconds = round(time.perf_counter() - started, 1)
    found = report.make(where, kernels, seed=args.seed, quick=args.quick, seconds=seconds)
    return found, "\n".join([_table(kernels), *_summary(found, seconds)])


def _results(where: Target, args: argparse.Namespace) -> list[KernelResult]:
    from b12x.verify import runner, timing

    on_gpu = where.device != "cpu"
    cases = runner.all_cases(("small", "model") if on_gpu and not args.quick else ("small",))
    if args.quick:
        cases = runner.one_for_each_key(where, cases)
    print(f"verifying on {where.name} ({where.arch}), {len(cases)} cases", file=sys.stderr)
    done = 0

    def progress(op: str, case: Case, result: CaseResult | None) -> None:
        nonlocal done
        if result is None:
            done += 1
            print(f"[{done}/{len(cases)}] {op} {case.name}", end=" ", file=sys.stderr, flush=True)
        else:
            print(result if result.passed else f"FAILED: {result}", file=sys.stderr, flush=True)

    def timer(prepared: Prepared) -> float:
        return timing.seconds_per_launch(prepared.launch, where.device)

    # Neither the emulator's speed nor that of a kernel rewritten for another GPU says anything of this one's.
    timed = timer if where.arch in cuda_target.ARCHS.values() and on_gpu else None
    return runner.run_cases(where, cases, seed=args.seed, timer=timed, progress=progress)


def _probe(where: Target, args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The report, and what to print."""
    from b12x.verify import probe, report

    readings = list(probe.measure(where, seed=args.seed, tiles=4 if where.device == "cpu" else 256))
    found = report.make(where, [], seed=args.seed, mma_probe=[reading.to_json() for reading in readings])
    found["ok"] = bool(readings)
    return found, _readings(readings) if readings else "no installed pack holds the probe's kernels"


def _table(kernels: Sequence[KernelResult]) -> str:
    head = ("op", "key", "result", "cases", "error", "of bound", "time", "GB/s", "TFLOP/s")
    return table(head, [_row(kernel) for kernel in sorted(kernels, key=lambda kernel: kernel.key)])


def _row(kernel: KernelResult) -> tuple[object, ...]:
    """The largest errors of a kernel, and the speed of its case with the most work."""
    from b12x.verify.runner import op_of

    judged = any(result.judgement is not None for result in kernel.results)
    error, bound = (f"{kernel.relative:.1e}", f"{kernel.worst:.2f}") if judged else ("-", "-")
    fields = (op_of(kernel.key), kernel.key.partition(":")[2], kernel.status, len(kernel.results), error, bound)
    timed = [result for result in kernel.results if result.seconds is not None]
    if not timed:
        return (*fields, "-", "-", "-")
    most = max(timed, key=lambda result: (result.flops, result.bytes))
    seconds = most.seconds
    assert seconds is not None
    rates = (f"{work / seconds / unit:.0f}" if work else "-" for work, unit in ((most.bytes, 1e9), (most.flops, 1e12)))
    return (*fields, f"{seconds * 1e6:.1f} us", *rates)


def _summary(found: dict[str, Any], seconds: float) -> list[str]:
    lines = [f"FAILED  {key}" for key in found["failed"]]
    for kernel in found["kernels"]:
        lines += [f"        {case['case']}: {_why(case)}" for case in kernel["cases"] if not case["passed"]]
    lines += [f"not run {key}" for key in found["not_run"]]
    count = len(found["kernels"])
    passed = count - len(found["failed"]) - len(found["not_run"])
    where = found["target"].get("card", found["target"]["name"])
    lines.append(f"{passed} of {count} kernels passed on {where} in {seconds} s")
    return lines


def _why(case: dict[str, Any]) -> str:
    return case["error"] if "error" in case else f"{case['wrong']} of {case['total']} elements wrong"


def _readings(readings: Sequence[Reading]) -> str:
    rows = [
        (r.kind, r.distribution, f"{r.relative:.1e}", f"{r.worst_of_sum:.1e}", f"{r.bias:+.2f}", r.looks_like or "-")
        for r in readings
    ]
    return table(("mma", "inputs", "norm of error", "worst |err|/sum|ab|", "bias", "looks like"), rows)
