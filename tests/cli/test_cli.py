"""The commands: what they print, as text and as JSON, and their exit status."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import b12x
from b12x._runtime import jit
from b12x.cli import doctor, sass
from b12x.quantization.nvfp4.spec import Nvfp4QuantizeSpec
from tests.runtime.fakes import FakeDriver, ToySpec, make_artifact, make_pack

from .conftest import Result

Command = Callable[..., Result]
SRC = Path(__file__).parents[2] / "src"
SPEC = Nvfp4QuantizeSpec(dtype="bfloat16")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "unavailable", lambda: "nothing to compile with")


@pytest.fixture
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0" if name == "torch" else real(name))


@pytest.fixture
def demo(install: Callable[..., None], tmp_path: Path) -> Path:
    folder = make_pack(tmp_path / "demo", SPEC, Nvfp4QuantizeSpec(dtype="float16"), name="demo")
    install(folder)
    return folder


def test_ops(b12x_command: Command) -> None:
    text = b12x_command("ops")
    assert text.status == 0
    assert text.out.splitlines()[0].split() == ["op", "style", "recipes", "status", "notes"]
    names = [line.split()[0] for line in text.out.splitlines()[1:]]
    assert names == [op.qualname for op in b12x.list_ops()]
    listed = b12x_command("ops", "--json").json
    assert [op["qualname"] for op in listed] == names
    assert listed[0]["entry_points"] == list(b12x.list_ops()[0].entry_points)


def test_kernels_lists_and_filters(install: Callable[..., None], tmp_path: Path, b12x_command: Command) -> None:
    half = make_pack(tmp_path / "half", ToySpec(tile=32, smem=5000), name="half", archs=("sm_120a",))
    install(make_pack(tmp_path / "full", ToySpec(tile=64), SPEC, name="full"), half)
    text = b12x_command("kernels")
    assert text.status == 0
    assert text.out.splitlines()[0].split() == ["key", "pack", "archs", "registers", "smem", "spills", "bytes"]
    assert text.out.splitlines()[-1] == "3 kernels"
    row = next(line for line in text.out.splitlines() if "tile=32" in line)
    artifact, _ = make_artifact(ToySpec(tile=32, smem=5000), ("sm_120a",))
    size = artifact.cubins["sm_120a"].bytes
    assert row.split() == [ToySpec(tile=32, smem=5000).key, "half", "sm_120a", "40", "5000", "0", str(size)]

    def keys(*arguments: str) -> list[str]:
        return [kernel["key"] for kernel in b12x_command("kernels", "--json", *arguments).json]

    assert keys() == sorted([ToySpec(tile=32, smem=5000).key, ToySpec(tile=64).key, SPEC.key])
    assert keys("tile=64") == [ToySpec(tile=64).key]
    assert keys("toy*smem=5000") == [ToySpec(tile=32, smem=5000).key]
    assert keys("--arch", "sm_121a") == sorted([ToySpec(tile=64).key, SPEC.key])
    assert keys("nothing") == []


def test_show(demo: Path, b12x_command: Command) -> None:
    artifact, _ = make_artifact(SPEC)
    text = b12x_command("show", SPEC.key)
    assert text.status == 0
    for word in (
        SPEC.key,
        str(demo),
        f"b12x {b12x.__version__}, DSL 4.8.1, ptxas 13.4.59",
        "toy_entry",
        " x ".join(map(str, SPEC.abi().launch.block)),
        artifact.fingerprint,
        artifact.ptx,
        artifact.cubins["sm_120a"].blob,
        artifact.cubins["sm_121a"].blob,
    ):
        assert word in text.out
    parameters = [line.split()[:3] for line in text.out.splitlines()]
    assert ["packed", "Pointer", "uint8"] in parameters
    assert ["m", "Scalar", "int32"] in parameters
    shown = b12x_command("show", SPEC.key, "--json").json
    assert shown["key"] == SPEC.key
    assert shown["packs"] == [str(demo)]
    assert shown["cubins"]["sm_120a"] == vars(artifact.cubins["sm_120a"])
    assert [p["name"] for p in shown["abi"]["params"]] == [p.name for p in SPEC.abi().params]


def test_show_unknown_key_offers_near_ones(demo: Path, b12x_command: Command) -> None:
    wrong = SPEC.key.replace("bfloat16", "bfloat17")
    text = b12x_command("show", wrong)
    assert (text.status, text.out) == (1, "")
    for word in (f"no installed pack holds {wrong!r}", "`b12x kernels` lists", SPEC.key):
        assert word in text.err
    assert wrong in b12x_command("show", wrong, "--json").json["error"]


@pytest.fixture
def nvdisasm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program of that name on PATH that prints its last argument's contents."""
    program = tmp_path / "bin" / "nvdisasm"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor last; do :; done\necho "SASS of $(cat "$last")"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return program


def test_show_sass(demo: Path, b12x_command: Command, nvdisasm: Path) -> None:
    text = b12x_command("show", SPEC.key, "--sass")
    assert (text.status, f"SASS of cubin {SPEC.key} sm_120a" in text.out) == (0, True)
    other = b12x_command("show", SPEC.key, "--sass", "--arch", "sm_121a", "--json").json
    assert other["sass"].startswith(f"SASS of cubin {SPEC.key} sm_121a")
    wrong = b12x_command("show", SPEC.key, "--sass", "--arch", "sm_90a")
    assert (wrong.status, "no machine code for 'sm_90a'; it has sm_120a, sm_121a" in wrong.err) == (1, True)


def test_show_sass_with_a_failing_nvdisasm(demo: Path, b12x_command: Command, nvdisasm: Path) -> None:
    nvdisasm.write_text("#!/bin/sh\necho 'unknown sm_120a' >&2\nexit 3\n")
    text = b12x_command("show", SPEC.key, "--sass")
    assert text.status == 1
    assert f"{nvdisasm} failed: unknown sm_120a; needed is one of CUDA 13 or newer" in text.err


def test_show_sass_without_nvdisasm_says_how_to_get_it(
    demo: Path, b12x_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sass, "DISTRIBUTION", "no-such-distribution")
    text = b12x_command("show", SPEC.key, "--sass")
    assert text.status == 1
    assert "nvdisasm not found on PATH" in text.err
    assert "pip install no-such-distribution" in text.err


def test_nvdisasm_is_found_in_its_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    files = [SimpleNamespace(name="LICENSE"), SimpleNamespace(name="nvdisasm", locate=lambda: tmp_path / "nvdisasm")]
    monkeypatch.setattr(importlib.metadata, "files", lambda name: files if name == "nvidia-cuda-nvdisasm" else None)
    assert sass.find_nvdisasm() == str(tmp_path / "nvdisasm")


def test_show_reports_a_damaged_cubin(demo: Path, b12x_command: Command, nvdisasm: Path) -> None:
    for file in (demo / "blobs").glob("*.cubin"):
        file.write_bytes(b"x")
    text = b12x_command("show", SPEC.key, "--sass")
    assert (text.status, "is damaged: its sha256 is" in text.err) == (1, True)


def test_commands_report_a_damaged_pack(demo: Path, b12x_command: Command) -> None:
    (demo / "index.json").write_bytes(b"{}")
    for command in (("kernels",), ("show", SPEC.key)):
        text = b12x_command(*command)
        assert (text.status, text.out) == (1, "")
        assert "truncated or damaged (2 bytes)" in text.err


@pytest.mark.usefixtures("no_compiler", "torch_with_cuda")
def test_doctor_on_a_supported_device(
    demo: Path, b12x_command: Command, fake_driver: Callable[..., FakeDriver]
) -> None:
    fake = fake_driver(version=13010, capabilities=((12, 1), (9, 0)))
    text = b12x_command("doctor")
    assert text.status == 0, text.out
    assert text.out.splitlines()[-1] == "kernels can run here"
    for word in (
        "CUDA 13.1",
        "Toy GPU",
        "12.1",
        "sm_121a",
        "not supported; needed is capability 12.0, 12.1",
        str(demo),
    ):
        assert word in text.out
    report = b12x_command("doctor", "--json").json
    assert report["ok"] is True
    assert report["problems"] == []
    assert report["b12x"] == b12x.__version__
    assert report["cuda_python"] == importlib.metadata.version("cuda-bindings")
    assert [d["arch"] for d in report["devices"]] == ["sm_121a", None]
    ((pack),) = report["packs"]
    assert (pack["name"], pack["kernels"], pack["archs"]) == ("demo", 2, ["sm_120a", "sm_121a"])
    assert pack["from"] == "B12X_PACK_PATH"
    (resolution,) = report["resolution"]
    assert resolution["target"] == "cuda:0"
    assert set(resolution["kernels"]) == {meta.qualname for meta in b12x.list_ops()}
    assert {op: count for op, count in resolution["kernels"].items() if count} == {"quantization.nvfp4": 2}
    assert {op: packs for op, packs in resolution["served_by"].items() if packs} == {"quantization.nvfp4": {"demo": 2}}
    assert ["cuda:0", "sm_121a", "quantization.nvfp4", "2", "demo", "2"] in [
        line.split() for line in text.out.splitlines()
    ]
    assert report["frozen"] is False
    assert report["jit"] == "nothing to compile with"
    assert report["environment"]["B12X_PACK_PATH"] == str(demo)
    assert not fake.named("cuLibraryLoadData", "cuDevicePrimaryCtxRetain"), "looking does not occupy the device"


def test_doctor_on_the_emulator(
    demo: Path, b12x_command: Command, monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    monkeypatch.setenv("B12X_TARGET", "emulator")
    report = b12x_command("doctor", "--json")
    assert report.status == 0
    (resolution,) = report.json["resolution"]
    assert (resolution["target"], resolution["kernels"]["quantization.nvfp4"]) == ("cpu", 2)
    assert b12x_command("doctor").out.splitlines()[-1] == "kernels can run here"


def doctor_problem(b12x_command: Command) -> str:
    text = b12x_command("doctor")
    assert text.status == 1
    assert text.out.splitlines()[-1] == "kernels cannot run here"
    report = b12x_command("doctor", "--json")
    assert report.status == 1
    assert report.json["ok"] is False
    problems: list[str] = report.json["problems"]
    assert all(f"problem: {problem}" in text.out for problem in problems)
    return "\n".join(problems)


def test_doctor_without_device_or_target(
    demo: Path, b12x_command: Command, fake_driver: Callable[..., FakeDriver]
) -> None:
    fake_driver(version=12080)
    assert "no device or target can run kernels" in doctor_problem(b12x_command)
    assert "too old: found one for CUDA 12.8" in b12x_command("doctor").out


def test_doctor_without_kernels(
    install: Callable[..., None], b12x_command: Command, fake_driver: Callable[..., FakeDriver], no_compiler: None
) -> None:
    fake_driver()
    install()
    assert "no pack holds a kernel for any device or target" in doctor_problem(b12x_command)
    assert "no packs found" in b12x_command("doctor").out


def test_doctor_with_packs_for_another_arch(
    install: Callable[..., None],
    tmp_path: Path,
    b12x_command: Command,
    fake_driver: Callable[..., FakeDriver],
    no_compiler: None,
) -> None:
    fake_driver(capabilities=((12, 1),))
    install(make_pack(tmp_path / "p", SPEC, archs=("sm_120a",)))
    assert "no pack holds a kernel for any device or target" in doctor_problem(b12x_command)


def test_doctor_goes_on_past_a_damaged_pack(
    install: Callable[..., None], tmp_path: Path, b12x_command: Command, fake_driver: Callable[..., FakeDriver]
) -> None:
    fake_driver()
    bad = make_pack(tmp_path / "bad", SPEC)
    (bad / "index.json").write_bytes(b"{")
    install(bad, make_pack(tmp_path / "good", SPEC, name="good"))
    assert f"{bad / 'index.json'} is truncated or damaged" in doctor_problem(b12x_command)
    packs = b12x_command("doctor", "--json").json["packs"]
    assert [pack["name"] for pack in packs] == [None, "good"]


def test_doctor_names_conflicts(
    install: Callable[..., None], tmp_path: Path, b12x_command: Command, fake_driver: Callable[..., FakeDriver]
) -> None:
    fake_driver()
    install(make_pack(tmp_path / "1", SPEC, name="one"), make_pack(tmp_path / "2", SPEC, name="two", salt="2"))
    problem = doctor_problem(b12x_command)
    for word in ("'one'", "'two'", SPEC.key):
        assert word in problem
    assert len(b12x_command("doctor", "--json").json["conflicts"]) == 1


@pytest.mark.usefixtures("no_compiler", "torch_with_cuda")
def test_doctor_says_which_pack_serves_what(
    install: Callable[..., None], tmp_path: Path, b12x_command: Command, fake_driver: Callable[..., FakeDriver]
) -> None:
    """A key in two packs is served by the first that has it for the device."""
    fake_driver(capabilities=((12, 0), (12, 1)))
    half = Nvfp4QuantizeSpec(dtype="float16")
    one = make_pack(tmp_path / "one", SPEC, name="one", archs=("sm_120a",))
    install(one, make_pack(tmp_path / "two", SPEC, half, name="two"))
    report = b12x_command("doctor", "--json").json
    served = [r["served_by"]["quantization.nvfp4"] for r in report["resolution"]]
    assert served == [{"one": 1, "two": 1}, {"two": 2}]
    assert [r["kernels"]["quantization.nvfp4"] for r in report["resolution"]] == [2, 2]


@pytest.mark.usefixtures("no_compiler", "torch_with_cuda")
@pytest.mark.parametrize("blob", ["*.cubin", "*.ptx.gz"])
def test_doctor_reads_every_blob(
    demo: Path, b12x_command: Command, fake_driver: Callable[..., FakeDriver], blob: str
) -> None:
    fake_driver()
    file = sorted((demo / "blobs").glob(blob))[-1]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    problem = doctor_problem(b12x_command)
    assert str(file) in problem
    assert "reinstall the wheel or build the pack again" in problem
    file.unlink()
    assert f"{file} is missing" in doctor_problem(b12x_command)


@pytest.mark.usefixtures("no_compiler", "torch_with_cuda")
def test_doctor_compares_the_abi(
    install: Callable[..., None], tmp_path: Path, b12x_command: Command, fake_driver: Callable[..., FakeDriver]
) -> None:
    fake_driver()
    install(make_pack(tmp_path / "old", SPEC, name="old", edit=lambda entry: replace(entry, fingerprint="5" * 64)))
    problem = doctor_problem(b12x_command)
    for word in ("pack 'old'", SPEC.key, "ABI fingerprint 555", "expects", "build the pack again"):
        assert word in problem


def test_doctor_needs_torch(demo: Path, b12x_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_TARGET", "emulator")
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert "torch is not installed" in (problem := doctor_problem(b12x_command))
    assert "pip install 'torch>=2.12'" in problem


def test_doctor_needs_a_torch_with_cuda_for_a_device(
    demo: Path, b12x_command: Command, monkeypatch: pytest.MonkeyPatch, fake_driver: Callable[..., FakeDriver]
) -> None:
    fake_driver()
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0+cpu")
    assert "torch 2.13.0+cpu has no CUDA" in (problem := doctor_problem(b12x_command))
    assert "needed is a torch built for CUDA 13" in problem


def test_doctor_names_a_wrong_target(demo: Path, b12x_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_TARGET", "simulator")
    assert "B12X_TARGET is 'simulator'; needed is 'emulator'" in doctor_problem(b12x_command)


def test_unknown_arch_names_those_there_are(demo: Path, b12x_command: Command) -> None:
    text = b12x_command("kernels", "--arch", "sm_77")
    assert (text.status, text.out) == (1, "")
    assert "unknown architecture 'sm_77'; needed is one of sm_120a, sm_121a: leave --arch out" in text.err
    text = b12x_command("show", SPEC.key, "--arch", "sm_77")
    assert (text.status, text.out) == (1, "")
    assert "no machine code for 'sm_77'; it has sm_120a, sm_121a: choose one" in text.err


def test_real_sass(base_pack: Path, install: Callable[..., None], b12x_command: Command) -> None:
    """With NVIDIA's nvdisasm and the machine code of a real kernel."""
    install(base_pack)
    text = b12x_command("show", SPEC.key, "--sass")
    assert text.status == 0, text.err
    assert "EXIT" in text.out
    assert "LDG" in text.out


def test_build_without_the_build_tools_says_what_to_install(
    b12x_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "b12x.build_tools", None)
    text = b12x_command("build", "demo.toml")
    assert (text.status, text.out) == (1, "")
    assert "pip install 'b12x[jit]'" in text.err
    assert "pip install" in b12x_command("build", "demo.toml", "--json").json["error"]


def test_build_hands_over_to_the_build_tools(b12x_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(args: Any) -> int:
        seen.append(args)
        return 7

    cli = SimpleNamespace(add_arguments=lambda parser: parser.add_argument("manifest"), run=run)
    monkeypatch.setitem(sys.modules, "b12x.build_tools", SimpleNamespace(cli=cli))
    monkeypatch.setitem(sys.modules, "b12x.build_tools.cli", cli)
    assert b12x_command("build", "demo.toml").status == 7
    assert seen[0].manifest == "demo.toml"
    assert b12x_command("build").status == 2
    assert "usage: b12x build" in b12x_command("build", "--help").out


def test_usage(b12x_command: Command) -> None:
    assert b12x_command("--version").out.strip() == f"b12x {b12x.__version__}"
    assert b12x_command().status == 2
    wrong = b12x_command("kernel")
    assert (wrong.status, "invalid choice: 'kernel'" in wrong.err) == (2, True)
    shown = b12x_command("--help")
    assert all(name in shown.out for name in ("doctor", "ops", "kernels", "show", "build"))


def test_runs_as_a_module_without_torch_or_driver() -> None:
    """No site-packages, so neither torch nor cuda-python is there; nor is a home."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-B", "-m", "b12x", *arguments]
        environment = {"PYTHONPATH": str(SRC)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

    assert run("ops").returncode == 0
    assert run("kernels", "--json").returncode == 0
    doctor = run("doctor")
    assert doctor.returncode == 1
    assert "cuda-python not found" in doctor.stdout
    assert "torch" in doctor.stdout
    assert (run("show", "x").returncode, run("show", "x").stderr.startswith("b12x: ")) == (1, True)


def test_closed_pipe_is_no_traceback() -> None:
    code = f"{shlex.quote(sys.executable)} -m b12x ops --json | true"
    done = subprocess.run(
        code, shell=True, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
