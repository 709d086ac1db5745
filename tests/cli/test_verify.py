"""``b12x verify``: the table, the report, its exit status, and a pack with a fault."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import b12x
from b12x._runtime import counters, packs
from b12x._runtime import target as targets
from b12x._runtime.pack import Pack, cubin_blob, index_bytes, ptx_blob, write_pack
from b12x.gemm.blockscaled.cases import BlockscaledCase
from b12x.verify import probe, report, runner, timing
from b12x.verify.case import Judgement
from b12x.verify.mma.spec import KINDS
from b12x.verify.runner import CaseResult, KernelResult
from tests.runtime.fakes import FakeDriver, ToySpec, make_pack

from .conftest import Result

Command = Callable[..., Result]
QUANTISE = "quantization.nvfp4:dtype=float16"
GEMM = "gemm.blockscaled:recipe=nvfp4,c_dtype=float16,tile_m=64,tile_n=64,groups=1"


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_TARGET", "emulator")


@pytest.fixture
def changed_pack(base_pack: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the base pack, of the keys that match, in which the PTX of one kernel was edited and sealed again."""

    def make(only: str, key: str = "", pattern: str = "", replacement: str = "") -> Path:
        source = Pack.open(base_pack)
        entries, blobs = {}, {}
        for name in source.keys():  # noqa: SIM118
            if not re.search(only, name):
                continue
            artifact = source.get(name)
            assert artifact is not None
            ptx = source.ptx(artifact)
            if name == key:
                ptx, count = re.subn(pattern, replacement, ptx, count=1)
                assert count == 1
            digest, file, data = ptx_blob(ptx)
            entries[name], blobs[file] = replace(artifact, ptx=digest), data
            for arch in artifact.cubins:
                _, file, data = cubin_blob(source.cubin(artifact, arch))
                blobs[file] = data
        index = index_bytes(
            name=source.name,
            dsl=source.dsl,
            ptxas=source.ptxas,
            archs=source.archs,
            manifests=source.manifests,
            entries=entries,
        )
        write_pack(tmp_path / "changed", index, blobs)
        return tmp_path / "changed"

    return make


@pytest.mark.usefixtures("emulated")
def test_every_kernel_of_the_pack(
    install: Callable[..., None], base_pack: Path, b12x_command: Command, tmp_path: Path
) -> None:
    install(base_pack)
    out = tmp_path / "report.json"
    text = b12x_command("verify", "--quick", "--json", str(out))
    assert text.status == 0, text.out
    keys = {key for pack in packs.installed() for key in pack.keys()}  # noqa: SIM118
    lines = text.out.splitlines()
    assert lines[0].split() == ["op", "key", "result", "cases", "error", "of", "bound", "time", "GB/s", "TFLOP/s"]
    assert f"{len(keys)} of {len(keys)} kernels passed on emulator" in text.out
    # The emulator says nothing of speed.
    assert all(line.split()[-3:] == ["-", "-", "-"] for line in lines[1 : 1 + len(keys)])
    assert re.search(r"\[(\d+)/\1\]", text.err)
    found = json.loads(out.read_text())
    assert found["ok"]
    assert {kernel["key"] for kernel in found["kernels"]} == keys
    for kernel in found["kernels"]:
        assert kernel["status"] == "passed"
        assert len(kernel["ptx"]) == 64
        assert kernel["cases"]
        for case in kernel["cases"]:
            assert case["passed"]
            assert case["wrong"] == 0 < case["total"]
            assert "seconds" not in case
    assert found["target"] == {"name": "emulator", "arch": "sm_120a", "sm_count": 8}
    assert found["versions"]["b12x"] == b12x.__version__
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert [pack["path"] for pack in found["packs"]] == [str(base_pack)]
    assert not b12x.kernel_resolution_frozen()


@pytest.mark.parametrize(
    ("key", "pattern", "replacement", "words"),
    [
        # The scales of another row of A: wrong numbers, nothing that an access check would see.
        (GEMM, r"(mma\.sync.*\{%r\d+\}), \{0, 0\}(, \{%r\d+\}, \{0, \d\};)", r"\1, {0, 1}\2", "elements wrong"),
        # 16 MB beyond: an access outside every tensor.
        (
            QUANTISE,
            r"st\.global\.v2\.b32 \[(%rd\d+)\]",
            r"st.global.v2.b32 [\1+16777216]",
            "OutOfBounds: PTX line",
        ),
    ],
    ids=["scale selector", "store address"],
)
@pytest.mark.usefixtures("emulated")
def test_a_seeded_fault_is_found_and_its_kernel_named(
    install: Callable[..., None],
    changed_pack: Callable[..., Path],
    b12x_command: Command,
    tmp_path: Path,
    key: str,
    pattern: str,
    replacement: str,
    words: str,
) -> None:
    install(changed_pack("float16", key, pattern, replacement))
    out = tmp_path / "report.json"
    text = b12x_command("verify", "--quick", "--json", str(out))
    assert text.status == 1
    assert f"FAILED  {key}" in text.out
    assert "FAILED: " in text.err
    found = json.loads(out.read_text())
    assert found["failed"] == [key]
    (case,) = next(kernel["cases"] for kernel in found["kernels"] if kernel["key"] == key)
    assert not case["passed"]
    assert words in case.get("error", "elements wrong")


@pytest.mark.usefixtures("emulated")
def test_a_kernel_that_no_case_reaches_is_listed(
    install: Callable[..., None], changed_pack: Callable[..., Path], b12x_command: Command, tmp_path: Path
) -> None:
    toy = make_pack(tmp_path / "toy", ToySpec(), name="toy")
    install(changed_pack("quantization.nvfp4"), toy)
    text = b12x_command("verify", "--quick")
    assert text.status == 0
    assert f"not run {ToySpec().key}" in text.out
    assert "2 of 3 kernels passed" in text.out
    install(toy)
    assert b12x_command("verify").status == 1, "nothing was verified"


@pytest.mark.usefixtures("emulated")
def test_a_partial_pack_is_verified_without_compiling(
    install: Callable[..., None], changed_pack: Callable[..., Path]
) -> None:
    """A plan of many rows also needs kernels that this pack lacks: its cases are left out, nothing is compiled."""
    install(changed_pack("nvfp4,c_dtype=float16,tile_m=128"))
    with runner.entered("emulator") as where:
        found = [item for item in runner.all_cases(("small",)) if isinstance(item[1], BlockscaledCase)]
        cases = [(op, case) for op, case in found if (case.role, case.recipe) == ("prefill", "nvfp4")]
    assert cases
    with runner.entered("emulator") as where:
        kernels = runner.run_cases(where, cases)
    assert {kernel.status for kernel in kernels} == {"not run"}
    assert counters.compiles == 0


@pytest.mark.usefixtures("emulated")
def test_a_case_that_launches_another_kernel_fails(install: Callable[..., None], base_pack: Path) -> None:
    install(base_pack)
    with runner.entered("emulator") as where:
        op, case = next(item for item in runner.all_cases(("small",)) if item[0] == "quantization.nvfp4")
        result = runner.run_case(where, op, case, ("another",))
    assert result is not None
    assert result.error == "launched quantization.nvfp4:dtype=bfloat16"
    assert not result.passed


def test_without_a_device_or_packs(
    install: Callable[..., None],
    base_pack: Path,
    b12x_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    fake_driver: Callable[..., FakeDriver],
    tmp_path: Path,
) -> None:
    install(base_pack)
    fake_driver(version=12080)
    text = b12x_command("verify")
    assert (text.status, text.out) == (1, "")
    assert "found one for CUDA 12.8, needed is CUDA 13.0" in text.err
    text = b12x_command("verify", "--target", "cpu")
    assert "unknown target 'cpu'; needed is 'emulator' or 'rehost:sm_90a'" in text.err
    monkeypatch.setenv("B12X_TARGET", "emulator")
    text = b12x_command("verify", "--json", str(tmp_path / "absent" / "r.json"))
    assert f"{tmp_path / 'absent'} is no folder; needed is one that exists" in text.err
    install()
    text = b12x_command("verify")
    assert (text.status, "no packs found; needed is one to verify" in text.err) == (1, True)


def test_report_of_a_card(fake_driver: Callable[..., FakeDriver], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(version=13010, capabilities=((12, 0),))
    address = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda ordinal: address)
    asked: list[Any] = []

    def smi(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout="580.65.06, 98.02.2E, 2407 MHz, 3090 MHz, 14001 MHz, 575.00 W, 31\n")

    monkeypatch.setattr(report.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(report.subprocess, "run", smi)
    found = report.target(targets.current_target("cuda:0"))
    assert (found["card"], found["capability"], found["driver"]) == ("Toy GPU", "12.0", "CUDA 13.1")
    assert found["nvidia_smi"]["driver_version"] == "580.65.06"
    assert found["nvidia_smi"]["clocks.max.sm"] == "3090 MHz"
    assert "--id=00000000:4b:00.0" in asked[0]
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    assert report.target(targets.current_target("cuda:0"))["nvidia_smi"] is None


def test_speed_in_the_table() -> None:
    from b12x.cli.verify import _row

    case = SimpleNamespace(name="a", size="model")
    judgement = Judgement(0, 4, 0.25, 1e-3)
    results = [
        CaseResult("gemm.x", case, ("gemm.x:a=1",), judgement, None, seconds, flops, bytes_)
        for seconds, flops, bytes_ in ((1e-6, 10**6, 10**6), (2e-4, 10**11, 10**8))
    ]
    row = _row(KernelResult("gemm.x:a=1", results))
    assert row == ("gemm.x", "a=1", "passed", 2, "1.0e-03", "0.25", "200.0 us", "500", "500")
    wrong = CaseResult("gemm.x", case, ("gemm.x:a=1",), Judgement(1, 4, math.inf, 1.0))
    assert _row(KernelResult("gemm.x:a=1", [*results, wrong]))[2:6] == ("FAILED", 3, "1.0e+00", "inf")


def test_a_broken_device_ends_the_run(
    install: Callable[..., None], base_pack: Path, monkeypatch: pytest.MonkeyPatch, emulated: None
) -> None:
    install(base_pack)
    monkeypatch.setattr(runner, "_usable", lambda where: False)
    with runner.entered("emulator") as where:
        cases = runner.all_cases(("small",))
        monkeypatch.setattr(type(cases[0][1]), "prepare", lambda *arguments: 1 / 0)
        kernels = runner.run_cases(where, cases)
    assert sorted(kernel.status for kernel in kernels)[:2] == ["FAILED", "not run"]
    assert sum(len(kernel.results) for kernel in kernels) == 1


def test_timing_replays_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the replays' times, for one launch; without a GPU, with events that say what time it is."""
    clock = iter([0.0, 2.0, 4.0, 104.0, 106.0, 108.0, 110.0, 112.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.time = math.nan

        def record(self) -> None:
            self.time = next(clock)

        def elapsed_time(self, other: Event) -> float:
            return other.time - self.time

    class Nothing:
        def __init__(self, *arguments: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...
        def replay(self) -> None: ...

    fake = SimpleNamespace(device=Nothing, CUDAGraph=Nothing, graph=Nothing, Event=Event, synchronize=lambda: None)
    monkeypatch.setattr(timing.torch, "cuda", fake)
    launches: list[int] = []
    assert timing.seconds_per_launch(lambda: launches.append(1), "cuda:0") == pytest.approx(2e-3 / 20)
    assert len(launches) == 21


@pytest.mark.usefixtures("emulated")
def test_mma_probe(
    install: Callable[..., None],
    changed_pack: Callable[..., Path],
    b12x_command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "K", 1024)
    install(changed_pack("verify"))
    text = b12x_command("verify", "--mma-probe")
    assert text.status == 0
    lines = [line.split() for line in text.out.splitlines()]
    assert {line[0] for line in lines[1:]} == set(KINDS)
    assert len(lines) == 1 + 4 * len(KINDS)
    assert {line[-1] for line in lines if line[1] == "positive"} <= {"rounding", "exact"}
    assert ["mxf4nvf4", "normal", "0.0e+00", "0.0e+00", "+0.00", "exact"] in lines


@pytest.mark.usefixtures("emulated")
def test_mma_probe_without_its_kernels(
    install: Callable[..., None], changed_pack: Callable[..., Path], b12x_command: Command
) -> None:
    install(changed_pack("quantization"))
    text = b12x_command("verify", "--mma-probe")
    assert (text.status, text.out.strip()) == (1, "no installed pack holds the probe's kernels")
