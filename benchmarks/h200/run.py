"""The H200 run: rehosted kernels judged on real hardware. Needs torch, numpy and cuda-bindings, and a prepared folder.

    PYTHONPATH=src python3 benchmarks/h200/run.py --seed 1 --out h200.json
    PYTHONPATH=src python3 benchmarks/h200/run.py --seed 1 --sanitize --out sanitize.json

Every section runs in a process of its own with a time limit, so that a fault on the GPU ends one section and not the
run; results are merged after each. The exit status is 0 when every entry of every section is right.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sanitizer
from paths import HERE, ROOT

#: Section -> its time limit in seconds.
SECTIONS = {
    "cases": 300,
    "expansions": 120,
    "agreement": 90,
    "graphs": 60,
    "contexts": 60,
    "overhead": 60,
    "models": 150,
    "rows": 120,
    "gemm": 300,
}
#: Sections that run under the tools.
_SANITIZED = ("small", "controls")
_TOOL_LIMIT = 120
_OUTPUT_KEPT = 20_000
_NAMES_PRINTED = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, default=ROOT / "build" / "h200", help="folder that prepare.py wrote")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="JSON")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="run this section only; may be repeated")
    parser.add_argument("--sanitize", action="store_true", help="run the small section under compute-sanitizer instead")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        _run_section(arguments.section, arguments.prepared, arguments.seed, arguments.out)
        return 0
    results: dict[str, Any] = {
        "seed": arguments.seed,
        "prepared": json.loads((arguments.prepared / "about.json").read_text()),
        "machine": _machine(),
        "sections": {},
    }
    if arguments.sanitize:
        _sanitize(arguments, results)
    else:
        for name in arguments.only or SECTIONS:
            results["sections"][name] = _child(arguments, name, SECTIONS[name], [])
            _write(arguments.out, results)
    results["keys_not_run"] = _not_run(results)
    _write(arguments.out, results)
    wrong = {name: section["wrong"] for name, section in results["sections"].items() if section["wrong"]}
    if results["keys_not_run"]:
        wrong["keys_not_run"] = results["keys_not_run"]
    for name, found in wrong.items():
        print(f"WRONG {name}: {len(found)}, the first: {'; '.join(map(str, found[:_NAMES_PRINTED]))}")
    print(f"{len(results['sections'])} sections, {len(wrong)} with something wrong; {arguments.out}")
    return 1 if wrong else 0


def _child(arguments: argparse.Namespace, name: str, limit: float, prefix: list[str]) -> dict[str, Any]:
    """Run one section in a process of its own and collect what it wrote, however it ended; ``output`` is its text."""
    part = arguments.out.with_name(f".{arguments.out.stem}.{name}.json")
    part.unlink(missing_ok=True)
    command = [*prefix, sys.executable, str(HERE / "run.py"), "--section", name, "--seed", str(arguments.seed)]
    command += ["--prepared", str(arguments.prepared), "--out", str(part)]
    print(f"== {' '.join([*prefix, name])}", flush=True)
    started = time.perf_counter()
    status, output = _run_limited(command, limit)
    seconds = time.perf_counter() - started
    found: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {"entries": [], "failures": []}
    part.unlink(missing_ok=True)
    wrong = list(found["failures"])
    if status != "0":
        wrong.append(f"exit status {status}")
    elif not found["entries"]:
        wrong.append("no entries")
    section = {"status": status, "seconds": round(seconds, 2), "wrong": wrong, **found}
    section["output"] = output
    print(f"   {len(found['entries'])} entries, {len(wrong)} wrong, {seconds:.1f} s", flush=True)
    if status != "0":
        print(output[-1500:], flush=True)
    return section


def _run_limited(command: list[str], limit: float) -> tuple[str, str]:
    """Exit status (or "timeout") and output. A process over its limit is ended with the workers that it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = str(process.wait(limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "timeout"
        output.seek(0)
        return status, output.read()


def _run_section(name: str, prepared: Path, seed: int, out: Path) -> None:
    from report import Report

    import b12x

    os.environ["B12X_PACK_PATH"] = str(prepared / "pack")
    b12x.freeze_kernel_resolution("the run launches what was prepared, nothing else")
    report = Report(out, mark=name in _SANITIZED)
    section = importlib.import_module(name)
    with b12x.target("rehost:sm_90a"):
        section.run(prepared, seed, report)


def _sanitize(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    program = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if program is None:
        results["sections"]["compute-sanitizer"] = {"wrong": ["compute-sanitizer is not on the PATH"]}
        return
    sass = json.loads((arguments.prepared / "opcodes.json").read_text())
    for tool in sanitizer.TOOLS:
        options = ["--tool", tool, "--print-limit", "1000", *sanitizer.OPTIONS.get(tool, [])]
        section, found = _sanitized(arguments, "small", [program, *options], sass)
        controls: list[dict[str, Any]] = []
        if tool == "racecheck":
            judged, controls = _sanitized(arguments, "controls", [program, *options], sass)
            results["sections"]["racecheck controls"] = judged
        sanitizer.explain(found, controls)
        open_ones = [f"{finding['case']}: {finding['what']}" for finding in found if not finding["explained_by"]]
        section["wrong"] += open_ones
        if section["count"] != len(found):
            section["wrong"].append(f"the tool counts {section['count']} findings, its text has {len(found)}")
        section["note"] = sanitizer.NOTES.get(tool)
        results["sections"][tool] = section
        print(f"   {tool}: {len(found)} findings, {len(open_ones)} without an explanation", flush=True)
        _write(arguments.out, results)


def _sanitized(
    arguments: argparse.Namespace, name: str, prefix: list[str], sass: dict[str, dict[str, str]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One section under the tool. What is found in the controls is no fault: they say what the tool does not model."""
    section = _child(arguments, name, _TOOL_LIMIT, prefix)
    keys = {entry["name"]: entry.get("keys", [entry["name"]]) for entry in section["entries"]}
    section["findings"] = sanitizer.findings(section["output"], keys, sass)
    section["count"] = sanitizer.summary(section["output"])
    if section["count"] is None:
        section["wrong"].append("the tool did not finish")
    return section, section["findings"]


def _not_run(results: dict[str, Any]) -> list[str]:
    """Kernels of the pack that no section launched through its op."""
    launched = {key for section in results["sections"].values() for key in section.get("launches", {})}
    return sorted(set(results["prepared"]["kernels"]) - launched)


def _machine() -> dict[str, Any]:
    """In a process of its own, so that this one holds no GPU."""
    code = (
        "import json, machine, torch, numpy; d = machine.describe(); d['torch'] = torch.__version__; "
        "d['numpy'] = numpy.__version__; d['device'] = torch.cuda.get_device_name(0); print(json.dumps(d))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        return {"error": done.stderr[-2000:], "python": platform.python_version()}
    described: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return described


def _write(path: Path, results: dict[str, Any]) -> None:
    for section in results["sections"].values():
        if "output" in section:
            section["output_tail"] = section.pop("output")[-_OUTPUT_KEPT:]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1, default=str) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
