"""A driver that is missing, too old or without a fitting device: what is said, and that nothing is loaded."""

from __future__ import annotations

import builtins
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as bindings

import b12x
from b12x._runtime import cuda_target, driver, target

from .fakes import FakeDriver, ToySpec, make_pack

EMULATOR = "every op on CPU tensors with B12X_TARGET=emulator"


def test_missing_driver_is_named_with_what_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search.')

    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuDriverGetVersion=missing))
    with pytest.raises(b12x.DriverError) as caught:
        target.current_target("cuda:0")
    for word in (
        "NVIDIA driver not found",
        "can only be found via system search",
        "needed is driver R580 or newer",
        "install it",
        "`b12x show`",
        EMULATOR,
    ):
        assert word in str(caught.value)


def test_this_machines_own_bindings_report_a_missing_driver() -> None:
    try:
        bindings.cuDriverGetVersion()
    except RuntimeError:
        with pytest.raises(b12x.DriverError, match="NVIDIA driver not found"):
            driver.ready()
    else:
        assert driver.version() > 0


@pytest.mark.parametrize("options", [{"version": 0}, {"fail": {"cuInit": bindings.CUresult.CUDA_ERROR_STUB_LIBRARY}}])
def test_stub_library_counts_as_missing(fake_driver: Callable[..., FakeDriver], options: dict[str, Any]) -> None:
    fake_driver(**options)
    with pytest.raises(b12x.DriverError, match=r"NVIDIA driver not found \(.*needed is driver R580"):
        driver.ready()


def test_missing_cuda_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_cuda(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_cuda)
    with pytest.raises(b12x.DriverError, match=r"cuda-python not found .*version 13 .*pip install 'cuda-python>=13'"):
        driver.ready()


@pytest.mark.parametrize(("version", "found"), [(12020, "12.2"), (12080, "12.8"), (12090, "12.9")])
def test_old_driver_is_refused_with_found_and_needed(
    fake_driver: Callable[..., FakeDriver], version: int, found: str
) -> None:
    fake = fake_driver(version=version)
    with pytest.raises(b12x.DriverError) as caught:
        target.current_target("cuda:0")
    for word in (
        "too old",
        f"CUDA {found}",
        "needed is CUDA 13.0 (driver R580 or newer)",
        "update the driver",
        EMULATOR,
    ):
        assert word in str(caught.value)
    assert not fake.named("cuInit"), "an old driver is not initialised"


@pytest.mark.parametrize("version", [13000, 13010, 14000])
def test_new_drivers_are_taken(fake_driver: Callable[..., FakeDriver], version: int) -> None:
    fake_driver(version=version)
    assert target.current_target("cuda:0").arch == "sm_120a"


def test_no_device_is_refused(fake_driver: Callable[..., FakeDriver]) -> None:
    fake_driver(fail={"cuInit": bindings.CUresult.CUDA_ERROR_NO_DEVICE})
    with pytest.raises(
        b12x.DriverError, match=r"no usable GPU: cuInit says CUDA_ERROR_NO_DEVICE \(100\).*SM120 or SM121"
    ):
        driver.ready()


def test_device_that_does_not_exist_is_refused(fake_driver: Callable[..., FakeDriver]) -> None:
    fake_driver(capabilities=((12, 0), (12, 0)))
    with pytest.raises(b12x.DriverError, match=r"cuda:2 does not exist; the driver shows 2 .CUDA_VISIBLE_DEVICES"):
        target.current_target("cuda:2")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (11, 0), (12, 2), (8, 9)])
def test_device_of_another_arch_is_refused_before_anything_is_loaded(
    fake_driver: Callable[..., FakeDriver], install: Callable[..., None], tmp_path: Path, capability: tuple[int, int]
) -> None:
    fake = fake_driver(capabilities=((12, 0), capability))
    install(make_pack(tmp_path / "p", ToySpec()))
    with pytest.raises(b12x.DeviceNotSupportedError) as caught:
        target.current_target("cuda:1")
    for word in (
        "cuda:1 is a Toy GPU",
        f"compute capability {capability[0]}.{capability[1]}",
        "needed is 12.0 (sm_120a) or 12.1 (sm_121a)",
        "The installed packs hold sm_120a, sm_121a",
        "Choose another device",
        "B12X_TARGET=emulator",
    ):
        assert word in str(caught.value)
    assert not fake.named("cuLibraryLoadData", "cuDevicePrimaryCtxRetain")
    assert target.current_target("cuda:0").arch == "sm_120a", "the other device is served"


def test_a_damaged_pack_does_not_hide_the_arch_refusal(
    fake_driver: Callable[..., FakeDriver], install: Callable[..., None], tmp_path: Path
) -> None:
    fake_driver(capabilities=((9, 0),))
    install(tmp_path / "nothing")
    with pytest.raises(b12x.DeviceNotSupportedError, match=r"capability 9\.0"):
        target.current_target("cuda:0")


@pytest.mark.parametrize(("capability", "arch"), [((12, 0), "sm_120a"), ((12, 1), "sm_121a")])
def test_capability_decides_the_arch(
    fake_driver: Callable[..., FakeDriver], capability: tuple[int, int], arch: str
) -> None:
    fake_driver(capabilities=(capability,))
    found = target.current_target("cuda:0")
    assert (found.arch, found.name, found.device) == (arch, "cuda:0", "cuda:0")


def test_failed_calls_name_call_code_and_kernel(
    fake_driver: Callable[..., FakeDriver], install: Callable[..., None], tmp_path: Path
) -> None:
    from b12x._runtime import resolve

    from .fakes import role

    fake = fake_driver(fail={"cuLibraryLoadData": bindings.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU})
    folder = make_pack(tmp_path / "p", ToySpec())
    install(folder)
    with pytest.raises(b12x.DriverError) as caught:
        resolve.resolve(role(ToySpec()), cuda_target.cuda_target(0), "toy.copy")
    for word in ("cuLibraryLoadData failed", "CUDA_ERROR_NO_BINARY_FOR_GPU (209)", "toy_entry", str(folder), "cuda:0"):
        assert word in str(caught.value)
    fake.fail = {"cuLibraryGetKernel": bindings.CUresult.CUDA_ERROR_NOT_FOUND}
    with pytest.raises(
        b12x.PackError, match=r"has no entry 'toy_entry' \(CUDA_ERROR_NOT_FOUND \(500\)\).*build the pack"
    ):
        resolve.resolve(role(ToySpec()), cuda_target.cuda_target(0), "toy.copy")
    assert fake.cuCtxGetCurrent()[1].__int__() == 0, "the context is popped after a failure"


def test_a_failed_initialisation_is_tried_again(fake_driver: Callable[..., FakeDriver]) -> None:
    fake = fake_driver(version=12000)
    with pytest.raises(b12x.DriverError):
        driver.ready()
    fake.version = 13000
    assert driver.ready() is fake


def test_threads_initialise_once(fake_driver: Callable[..., FakeDriver]) -> None:
    fake = fake_driver()
    quick = fake.cuInit

    def slow(flags: int) -> Any:
        time.sleep(0.05)
        return quick(flags)

    fake.cuInit = slow  # type: ignore[method-assign]
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        driver.ready()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.named("cuInit")) == 1


def test_is_supported_never_raises(fake_driver: Callable[..., FakeDriver], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_driver(capabilities=((9, 0), (12, 0), (12, 1)))
    assert [target.is_supported(f"cuda:{n}") for n in range(4)] == [False, True, True, False]
    assert not target.is_supported("cpu")
    assert not target.is_supported("meta")
    assert target.is_supported(1)
    fake.version = 12000
    monkeypatch.setattr(driver, "_ready", None)
    assert not target.is_supported("cuda:1")
    assert not target.is_supported()
    with b12x.target("emulator"):
        assert target.is_supported()
        assert target.is_supported("cpu")
    monkeypatch.setenv("B12X_TARGET", "emulator")
    assert target.is_supported("cpu")


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "rehost"])
@pytest.mark.parametrize("error", [AssertionError("Torch not compiled"), RuntimeError("too old (found version 12020)")])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"version": 0}, ("NVIDIA driver not found", "needed is driver R580 or newer", "install it")),
        ({"version": 12020}, ("too old: found one for CUDA 12.2", "needed is CUDA 13.0 (driver R580", "update")),
        (
            {"fail": {"cuInit": bindings.CUresult.CUDA_ERROR_NO_DEVICE}},
            ("no usable GPU", "needed is an SM120 or SM121 device", "check nvidia-smi"),
        ),
        ({}, ("torch cannot use the GPU: found torch 2", "needed is a torch built for CUDA 13", "install that one")),
    ],
)
def test_current_device_is_refused_in_the_words_of_this_library(
    fake_driver: Callable[..., FakeDriver],
    monkeypatch: pytest.MonkeyPatch,
    device: Any,
    error: Exception,
    options: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    """``cuda`` without an index asks torch first, whose errors say neither what is needed nor what to do."""

    def fails() -> int:
        raise error

    fake_driver(**options)
    monkeypatch.setattr(torch.cuda, "current_device", fails)
    choice = b12x.target("rehost:sm_90a") if device == "rehost" else contextlib.nullcontext()
    with pytest.raises(b12x.DriverError) as caught, choice:
        target.current_target(device)
    for word in words:
        assert word in str(caught.value)
    assert not target.is_supported()
    assert not target.is_supported("cuda")


@pytest.mark.parametrize("device", ["cuda:x", "cuda:", "cuda:-1", "cuda:0:1", "", [1], object(), -1, True])
def test_is_supported_takes_anything(fake_driver: Callable[..., FakeDriver], device: Any) -> None:
    fake_driver()
    assert target.is_supported(device) is False
