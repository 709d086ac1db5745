"""``python -m b12x.build_tools.rehost PACK -o FOLDER``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from b12x._runtime.errors import PackError

from ..errors import BuildError
from ..workers import default_jobs
from .pack import rehost_pack
from .rewrite import Rehosted


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m b12x.build_tools.rehost", description=__doc__)
    parser.add_argument("pack", type=Path, help="folder of the pack to rehost")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder of the new pack")
    parser.add_argument("--key", action="append", metavar="KEY", help="only this kernel; may be repeated")
    parser.add_argument("-j", "--jobs", type=int, default=default_jobs(), metavar="N")
    chosen = parser.parse_args(arguments)
    try:
        pack = rehost_pack(chosen.pack, chosen.output, keys=chosen.key, jobs=chosen.jobs, progress=_report)
    except (BuildError, PackError) as error:
        print(f"rehost: {error}", file=sys.stderr)
        return 1
    print(f"{pack.path}: {len(pack.keys())} kernels for {', '.join(pack.archs)}")
    return 0


def _report(key: str, rehosted: Rehosted) -> None:
    used = ", ".join(f"{count} x {title}" for title, count in rehosted.expansions.items()) or "nothing to expand"
    print(f"{key}: {used}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
