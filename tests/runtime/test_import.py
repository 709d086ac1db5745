"""What importing the package may not do, in fresh processes with as little around them as possible."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import types
from functools import partial
from pathlib import Path

import pytest

import b12x

SRC = Path(__file__).parents[2] / "src"
FORBIDDEN = ("torch", "cuda", "cutlass", "numpy", "triton", "ctypes", "fcntl")

REPORT = """
import builtins, io, json, os, sys
before = set(sys.modules)
opened = []
sys.addaudithook(lambda event, args: opened.append([event, str(args[0])]) if event in EVENTS else None)
import b12x
after = sorted(set(sys.modules) - before)
print(json.dumps({"modules": after, "events": opened, "dir": dir(b12x)}))
"""
EVENTS = (
    "open",
    "os.mkdir",
    "os.listdir",
    "os.scandir",
    "os.putenv",
    "socket.connect",
    "subprocess.Popen",
    "ctypes.dlopen",
)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose environment has nothing but what is given, and the package's source."""
    command = [sys.executable, "-S", "-c", code]
    environment = {"PYTHONPATH": str(SRC), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_import_loads_nothing_else_and_touches_nothing() -> None:
    done = python(f"EVENTS = {EVENTS!r}\n{REPORT}")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [name for name in report["modules"] if name.split(".")[0] in FORBIDDEN] == []
    assert [name for name in report["modules"] if name.startswith("b12x")] == ["b12x"]
    touched = [event for event in report["events"] if not event[1].startswith((str(SRC), sys.base_prefix, sys.prefix))]
    assert touched == []
    assert {event for event, _ in report["events"]} <= {"open", "os.listdir", "os.scandir"}


def test_everything_public_is_there_without_torch_cuda_or_the_dsl() -> None:
    code = """
import sys, b12x
for name in b12x.__all__: getattr(b12x, name)
b12x.list_ops(); b12x.find_op("gemm.blockscaled"); b12x.gemm; b12x.quantization
b12x.freeze_kernel_resolution("x"); b12x.clear_all_caches()
with b12x.target("emulator"): pass
print(sorted({m.split(".")[0] for m in sys.modules} & {"torch", "cuda", "cutlass", "triton"}))
"""
    done = python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("module", ["gemm.blockscaled.planner", "quantization.nvfp4.planner"])
def test_planners_import_no_torch(module: str) -> None:
    code = f"import sys, b12x.{module}; print(sorted(set(sys.modules) & {{'torch', 'cuda', 'cutlass', 'numpy'}}))"
    done = python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_import_time() -> None:
    code = "import time; t = time.perf_counter(); import b12x; print(time.perf_counter() - t)"
    times = [float(python(code).stdout) for _ in range(5)]
    assert statistics.median(times) < 0.050


USE = """
import json, warnings
warnings.simplefilter("error")
import b12x
from b12x._runtime import resolve
from b12x._runtime.emulator_target import EmulatorTarget
from b12x.quantization.nvfp4.spec import Nvfp4QuantizeSpec
b12x.freeze_kernel_resolution()
found = resolve.find(Nvfp4QuantizeSpec(dtype="bfloat16"), EmulatorTarget())
from b12x.cli import main
print(found[1].name, main(["kernels"]))
"""


def listed_pack(folder: Path) -> Path:
    from b12x.quantization.nvfp4.spec import Nvfp4QuantizeSpec

    from .fakes import make_pack

    return make_pack(folder, Nvfp4QuantizeSpec(dtype="bfloat16"), name="listed")


def test_listed_kernels_resolve_without_any_home(tmp_path: Path) -> None:
    done = python(USE, B12X_PACK_PATH=str(listed_pack(tmp_path / "p")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "listed 0"


def test_listed_kernels_resolve_with_a_read_only_home_and_write_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o555)
    done = python(USE, HOME=str(home), B12X_PACK_PATH=str(listed_pack(tmp_path / "p")))
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []


def everyone_can_read(path: Path) -> bool:
    return all(p.stat().st_mode & 0o005 == 0o005 for p in [path, *path.parents])


def test_user_without_a_passwd_row_and_without_a_home() -> None:
    setpriv = shutil.which("setpriv")
    interpreters = [Path(p).resolve() for p in (sys.executable, "/usr/bin/python3") if Path(p).exists()]
    python3 = next((str(p) for p in interpreters if everyone_can_read(p)), None)
    if setpriv is None or os.geteuid() != 0 or python3 is None:
        pytest.skip("needs root, setpriv, and a Python that every user can run")
    command = [setpriv, "--reuid", "54321", "--regid", "54321", "--clear-groups", python3, "-S", "-B", "-c"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(SRC / "b12x", folder / "b12x", ignore=shutil.ignore_patterns("__pycache__", "packs"))
        environment = {"PYTHONPATH": name, "B12X_PACK_PATH": str(listed_pack(folder / "p"))}
        run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=False, timeout=120)
        done = run([*command, USE])
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["listed 0"]), done.stderr
        done = run([*command, "from b12x._runtime import jit; print(jit.cache_folder())"])
        assert done.stdout.strip() == "None", done.stderr
        assert "there is no home folder" in done.stderr


def test_attributes_of_an_op_are_looked_up_once() -> None:
    code = """
import b12x.gemm.blockscaled.planner, b12x.gemm.blockscaled as op, b12x.gemm as group
from b12x._runtime.lazy import attach
names = {"Caps": ".planner", "planner": ".planner"}
get = attach("b12x.gemm.blockscaled", names)
assert "Caps" not in vars(op)
assert get("Caps") is op.planner.Caps is vars(op)["Caps"] and get("planner") is op.planner
try: get("absent")
except AttributeError as error: print(error)
"""
    done = python(code)
    assert done.stdout.strip() == "module 'b12x.gemm.blockscaled' has no attribute 'absent'", done.stderr


def test_aliases_are_the_same_objects() -> None:
    assert b12x.freeze_compilation is b12x.freeze_kernel_resolution
    assert b12x.unfreeze_compilation is b12x.unfreeze_kernel_resolution
    assert b12x.compilation_frozen is b12x.kernel_resolution_frozen


def test_freezing_is_process_wide_and_keeps_the_last_reason() -> None:
    from b12x._runtime import freeze

    assert not b12x.kernel_resolution_frozen()
    b12x.freeze_kernel_resolution("one")
    b12x.freeze_kernel_resolution("two")
    assert b12x.kernel_resolution_frozen()
    assert freeze.freeze_reason() == "two"
    b12x.unfreeze_kernel_resolution()
    assert not b12x.kernel_resolution_frozen()
    assert freeze.freeze_reason() is None


def test_error_types() -> None:
    for name in ("KernelResolutionFrozenError", "KernelNotFoundError", "PackError", "DriverError"):
        assert issubclass(getattr(b12x, name), RuntimeError)
    assert issubclass(b12x.PackConflictError, b12x.PackError)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="'b12x' has no attribute 'nothing'"):
        _ = b12x.nothing
    assert {"gemm", "quantization", "list_ops", "target"} <= set(dir(b12x))
    assert isinstance(b12x.gemm, types.ModuleType)
