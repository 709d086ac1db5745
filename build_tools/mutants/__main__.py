"""Break a kernel by rule and see what notices: ``python -m b12x.build_tools.mutants KERNEL --seed N --count M``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from b12x._runtime.errors import PackError

from ..errors import BuildError
from ..workers import default_jobs
from .draw import OPERATORS
from .families import family_of
from .run import Outcome, judge_family


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutants; 0 when no kernel raised an alarm as it is and the emulator failed on no mutant, else 1."""
    parser = argparse.ArgumentParser(prog="python -m b12x.build_tools.mutants", description=__doc__)
    parser.add_argument("kernel", metavar="KERNEL", help="family, such as gemm.blockscaled, or key of one kernel")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which mutants are drawn (default: 0)")
    parser.add_argument("--count", type=int, default=20, metavar="M", help="how many at most (default: 20)")
    parser.add_argument("--operator", action="append", choices=sorted(OPERATORS), help="only this; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("-j", "--jobs", type=int, default=default_jobs(), metavar="N")
    chosen = parser.parse_args(arguments)
    try:
        report = judge_family(
            family_of(chosen.kernel),
            seed=chosen.seed,
            count=chosen.count,
            key=chosen.kernel if ":" in chosen.kernel else None,
            operators=chosen.operator,
            jobs=chosen.jobs,
            progress=_ignore if chosen.json else _print,
        )
    except (BuildError, PackError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        for key, finding in report.alarms:
            print(f"ALARM: {key} as it is: {finding.check} ({finding.where}): {finding.text}")
        print(report.table())
    return 1 if report.alarms or any(outcome.crashed for outcome in report.outcomes) else 0


def _print(outcome: Outcome) -> None:
    print(outcome, flush=True)


def _ignore(outcome: Outcome) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
