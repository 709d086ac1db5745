"""``pytest --target``: an absent GPU is one clear message, and the summary says what ran where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from b12x.verify.runner import every_case

ROOT = Path(__file__).parent.parent


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["cuda", "rehost:sm_90a"])
def test_a_target_that_is_not_there(name: str) -> None:
    done = run_pytest("--target", name, "tests/verify/test_cases.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = (done.stdout + done.stderr).strip().splitlines()
    assert line.startswith(f"ERROR: --target {name} has no GPU to run on: ")
    assert "needed is driver R580 or newer" in line


def test_summary(base_pack: Path) -> None:
    done = run_pytest(
        "--pack", str(base_pack), "tests/verify/test_cases.py", "-k", "(quantization.nvfp4 and 131x192) or tally"
    )
    assert done.returncode == 0, done.stdout
    assert "target emulator" in done.stdout
    assert "4 tests passed" in done.stdout
    assert "4 numerical cases ran (small)" in done.stdout
    left = sum(case.size == "model" for _, case in every_case())
    assert f"{left} model cases are for other targets: rehost:sm_90a, cuda" in done.stdout
