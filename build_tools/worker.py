"""The loop of a worker process: reads tasks as JSON lines from standard input, answers each with one JSON line.

The answers go to a copy of standard output; what the DSL and the libraries below it print goes to standard error, which
the driver keeps and shows when the process dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from b12x._runtime import counters
from b12x._runtime.spec import spec_from_key

from .compile_one import compile_arch, import_dsl
from .errors import BuildError


def main() -> int:
    """Answer tasks until standard input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        # Ahead of the first task, so that its time is a compilation's alone. What is wrong, the task's answer will say.
        with contextlib.suppress(BuildError):
            import_dsl()
        for line in sys.stdin:
            task = json.loads(line)
            answers.write(json.dumps(answer(task["key"], task["archs"])) + "\n")
            answers.flush()
    return 0


def answer(key: str, archs: Sequence[str]) -> dict[str, Any]:
    """Compile the spec of a key, and say how many ``cute.compile`` calls and seconds that took."""
    counters.reset()
    started = time.perf_counter()
    result: dict[str, Any] = {}
    try:
        spec = spec_from_key(key)
        result["builds"] = [compile_arch(spec, arch).to_json() for arch in archs]
    except BuildError as error:
        result["error"] = str(error)
    result["compiles"] = counters.compiles
    result["seconds"] = time.perf_counter() - started
    return result
