"""The rehost target: only by name, only on its own kind of device, only from packs made for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import b12x
from b12x._runtime import cuda_target, packs, resolve, target

from .fakes import FakeDriver, ToySpec, make_pack, role
from .toolchain import FakeToolchain

REHOST = "rehost:sm_90a"


@pytest.fixture(autouse=True)
def torch_sees_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_only_by_name(fake_driver: Callable[..., FakeDriver]) -> None:
    fake_driver(capabilities=((9, 0), (12, 0)))
    with pytest.raises(b12x.DeviceNotSupportedError, match=r"needed is 12\.0"):
        target.current_target("cuda:0")
    with b12x.target(REHOST) as chosen:
        assert target.current_target("cuda:0") is chosen
        assert (chosen.device, chosen.arch) == ("cuda:0", REHOST)
        assert target.is_supported("cuda:0")
        assert not target.is_supported("cuda:1")
        with pytest.raises(ValueError, match="'cpu' has no GPU kernels"):
            target.current_target("cpu")
    assert not target.is_supported("cuda:0")


def test_only_on_its_device(fake_driver: Callable[..., FakeDriver]) -> None:
    fake_driver(capabilities=((12, 0),))
    with pytest.raises(b12x.DeviceNotSupportedError, match=rf"target {REHOST} needs one of 9\.0"), b12x.target(REHOST):
        pass
    assert cuda_target.cuda_target(0).arch == "sm_120a"


def test_only_from_its_packs(
    fake_driver: Callable[..., FakeDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(capabilities=((9, 0),))
    b12x.freeze_kernel_resolution("a miss is an error")
    with b12x.target(REHOST) as chosen:
        monkeypatch.setenv("B12X_PACK_PATH", str(make_pack(tmp_path / "plain", ToySpec())))
        packs.clear()
        with pytest.raises(b12x.KernelResolutionFrozenError, match=f"needs {REHOST}"):
            resolve.resolve(role(ToySpec()), chosen, "toy.copy")
        monkeypatch.setenv("B12X_PACK_PATH", str(make_pack(tmp_path / "rehosted", ToySpec(), archs=(REHOST,))))
        packs.clear()
        assert resolve.resolve(role(ToySpec()), chosen, "toy.copy").origin == "pack:toys"


def test_nothing_is_compiled_for_it(
    fake_driver: Callable[..., FakeDriver],
    install: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_driver(capabilities=((9, 0),))
    install(make_pack(tmp_path / "plain", ToySpec()))
    compiler = FakeToolchain()
    compiler.install(monkeypatch.setattr)
    with b12x.target(REHOST) as chosen, pytest.raises(b12x.KernelNotFoundError) as caught:
        resolve.resolve(role(ToySpec()), chosen, "toy.copy")
    for word in (ToySpec().key, f"needs {REHOST}", "nothing is compiled for it", "b12x.build_tools.rehost PACK"):
        assert word in str(caught.value)
    assert compiler.compiled == []
    assert not (tmp_path / "cache").exists()
