"""How long does ``import b12x`` take, and what does it load? Target: 50 ms.

Fresh interpreters, started and timed one after another; the time is that of the import statement alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import machine

CODE = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import b12x
print(time.perf_counter() - start, len(set(sys.modules) - before))
"""


def measure(runs: int) -> dict[str, Any]:
    """Median and extremes over ``runs`` processes, after one that warms the file cache."""
    seconds, modules = [], 0
    for _ in range(runs + 1):
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        text, count = done.stdout.split()
        seconds.append(float(text))
        modules = int(count)
    seconds = seconds[1:]
    return {
        "benchmark": "import_time",
        "target_ms": 50,
        "median_ms": round(statistics.median(seconds) * 1e3, 3),
        "min_ms": round(min(seconds) * 1e3, 3),
        "max_ms": round(max(seconds) * 1e3, 3),
        "modules_loaded": modules,
        "runs": runs,
        "machine": machine.describe(),
    }


def main() -> int:
    """Print the result as JSON; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    result = measure(parser.parse_args().runs)
    print(json.dumps(result, indent=2))
    return 0 if result["median_ms"] <= result["target_ms"] else 1


if __name__ == "__main__":
    sys.exit(main())
