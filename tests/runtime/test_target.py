"""Which target a plan gets, and the emulator target's regions and values (against a recording emulator)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import b12x
from b12x._runtime import counters, resolve, target
from b12x._runtime.abi import Region, TensorMapValue
from b12x._runtime.emulator_target import EmulatorTarget, _parsed

from .fakes import ToySpec, make_pack, role


def test_cpu_needs_the_emulator_to_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'cpu' has no GPU kernels") as caught:
        target.current_target("cpu")
    for word in ("B12X_TARGET=emulator", "with b12x.target('emulator'):", "CUDA device"):
        assert word in str(caught.value)
    monkeypatch.setenv("B12X_TARGET", "emulator")
    found = target.current_target(torch.device("cpu"))
    assert (found.name, found.device, found.arch, found.sm_count) == ("emulator", "cpu", "sm_120a", 170)


def test_context_chooses_and_restores() -> None:
    with b12x.target("emulator", sm_count=4) as outer:
        assert outer.sm_count == 4
        with b12x.target("emulator", sm_count=9, options="traced"):
            assert target.current_target("cpu") == EmulatorTarget(9, "traced")
        assert target.current_target("cpu") == outer
    with pytest.raises(ValueError, match="'cpu' has no GPU kernels"):
        target.current_target("cpu")


def test_context_is_of_one_thread() -> None:
    seen: list[bool] = []
    with b12x.target("emulator"):
        thread = threading.Thread(target=lambda: seen.append(target.is_supported("cpu")))
        thread.start()
        thread.join()
        assert target.is_supported("cpu")
    assert seen == [False]


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("gpu", 1, "unknown target 'gpu'"),
        ("emulator", 0, "sm_count is 0; needed is 1 to .*choose"),
        ("emulator", -1, "sm_count is -1"),
    ],
)
def test_wrong_choices_are_refused(name: str, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words), b12x.target(name, sm_count=count):
        pass


@pytest.mark.parametrize("count", [2.5, "2", True, None])
def test_sm_count_is_an_int(count: Any) -> None:
    with pytest.raises(TypeError) as caught, b12x.target("emulator", sm_count=count):
        pass
    for word in ("b12x.target: sm_count is", f"a {type(count).__name__}; needed is an int", "convert it"):
        assert word in str(caught.value)


def test_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_TARGET", "simulator")
    with pytest.raises(ValueError, match="B12X_TARGET is 'simulator'; needed is 'emulator'"):
        target.current_target("cpu")


@pytest.mark.parametrize("device", ["meta", "xpu:0", "cuda:x", "mps", torch.device("meta")])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="no target for device"):
        target.current_target(device)


class RecordingEmulator(ModuleType):
    def __init__(self) -> None:
        super().__init__("b12x.emulator")
        self.parsed: list[str] = []
        self.launches: list[dict[str, Any]] = []

    def parse(self, ptx: str) -> Any:
        self.parsed.append(ptx)
        return f"program {len(self.parsed)}"

    def launch(self, program: Any, entry: str, **options: Any) -> None:
        self.launches.append({"program": program, "entry": entry, **options})


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> RecordingEmulator:
    fake = RecordingEmulator()
    monkeypatch.setitem(sys.modules, "b12x.emulator", fake)
    monkeypatch.setattr(b12x, "emulator", fake, raising=False)
    _parsed.cache_clear()
    yield fake
    _parsed.cache_clear()


def test_values_and_regions_that_the_emulator_gets(
    install: Callable[..., None], tmp_path: Path, emulator: RecordingEmulator
) -> None:
    install(make_pack(tmp_path / "p", ToySpec(cluster=2)))
    with b12x.target("emulator", sm_count=3, options="checked"):
        kernel = resolve.resolve(role(ToySpec(cluster=2)), target.current_target("cpu"), "toy.copy").loaded
    x = torch.zeros(200, 192, dtype=torch.bfloat16)[:, :128]
    y, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(1)
    args = {
        "x": x,
        "y": y,
        "scale": scale,
        "m": 7,
        "stride": 1 << 33,
        "alpha": 0.5,
    }
    launch = kernel.prepare(args, {"x": ((128, 200), (384,))})
    launch.grid = (4, 1, 1)
    launch.launch()
    (seen,) = emulator.launches
    assert emulator.parsed == [f".target sm_120a\n// {ToySpec(cluster=2).key} \n"]
    assert seen == {
        "program": "program 1",
        "entry": "toy_entry",
        "grid": (4, 1, 1),
        "block": (128, 1, 1),
        "cluster": (2, 1, 1),
        "dynamic_smem": 1024,
        "options": "checked",
        "params": [
            7,
            TensorMapValue(x.data_ptr(), "bfloat16", (128, 200), (384,), (64, 32), "128B"),
            y.data_ptr(),
            1 << 33,
            scale.data_ptr(),
            0.5,
        ],
        "regions": [
            Region("x", x.data_ptr(), (200, 128), (384, 2), "bfloat16", "r", initialised=True),
            Region("y", y.data_ptr(), (4, 16), (16, 1), "uint8", "w", initialised=False),
            Region("scale", scale.data_ptr(), (1,), (4,), "float32", "r", initialised=True),
        ],
    }
    launch.set("m", 8)
    launch.launch(stream=123)
    assert emulator.launches[1]["params"][0] == 8
    assert emulator.launches[0]["params"][0] == 7
    assert counters.launches == {ToySpec(cluster=2).key: 2}
    with pytest.raises(ValueError, match="m is 2147483648; needed is a value that int32 holds"):
        launch.set("m", 1 << 31)


def test_null_pointer_has_no_region(install: Callable[..., None], tmp_path: Path, emulator: RecordingEmulator) -> None:
    install(make_pack(tmp_path / "p", ToySpec()))
    kernel = resolve.resolve(role(ToySpec()), EmulatorTarget(), "toy.copy").loaded
    y, maps = torch.zeros(4, dtype=torch.uint8), {"x": ((64, 64), (128,))}
    args = {"x": torch.zeros(64, 64, dtype=torch.bfloat16), "y": y, "scale": None, "m": 1, "stride": 1, "alpha": 1}
    launch = kernel.prepare(args, maps)
    launch.grid = (1, 1, 1)
    launch.launch()
    assert emulator.launches[0]["params"][4] == 0
    assert [region.name for region in emulator.launches[0]["regions"]] == ["x", "y"]
    with pytest.raises(TypeError, match="y has elements of 4 bytes; needed are those of uint8, 1 bytes"):
        kernel.prepare({**args, "y": torch.zeros(4)}, maps)
    with pytest.raises(ValueError, match=r"TMA cannot address x: .*strides of"):
        kernel.prepare(args, {"x": ((64, 64), (130,))})
    with pytest.raises(TypeError, match=r"missing arguments \['x'\]"):
        kernel.prepare({**{name: value for name, value in args.items() if name != "x"}, "z": 1}, maps)


def test_program_is_parsed_once_whatever_the_target(
    install: Callable[..., None], tmp_path: Path, emulator: RecordingEmulator
) -> None:
    install(make_pack(tmp_path / "p", ToySpec()))
    for count in (1, 2, 1):
        found = resolve.resolve(role(ToySpec()), EmulatorTarget(count), "toy.copy")
        assert found.loaded.target.sm_count == count
    assert len(emulator.parsed) == 1
