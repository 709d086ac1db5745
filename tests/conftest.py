"""What all tests share: the target that kernels run on (``--target``), and the pack that holds them."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

import b12x
from b12x._runtime import cuda_target
from b12x.verify.runner import TARGETS, entered, every_case

ROOT = Path(__file__).parent.parent

# How long an example takes says nothing of the code here: a busy machine must not fail it.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

try:
    importlib.import_module("b12x.build_tools")
except ModuleNotFoundError:
    # A source tree that is not installed: the build tools and the kernels are folders of its root.
    b12x.__path__.append(str(ROOT))


@dataclass(frozen=True)
class TargetUnderTest:
    """Device to allocate on, and the name of the target that serves it."""

    device: str
    name: str


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("b12x")
    group.addoption("--target", choices=sorted(TARGETS), default="emulator", help="where kernels run (%(default)s)")
    group.addoption("--pack", type=Path, help="pack whose kernels to test; default: manifests/base.toml, built here")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a target that is not there before anything runs."""
    name = config.getoption("--target")
    if name == "emulator":
        return
    try:
        cuda_target.device_count()
        with entered(name):
            torch.zeros(1, device="cuda")
    except (b12x.DriverError, b12x.DeviceNotSupportedError, RuntimeError, AssertionError) as error:
        raise pytest.UsageError(f"--target {name} has no GPU to run on: {error}") from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``op_case`` runs once for each case that suits the target."""
    if "op_case" in metafunc.fixturenames:
        _, sizes = TARGETS[metafunc.config.getoption("--target")]
        cases = [(op, case) for op, case in every_case() if case.size in sizes]
        metafunc.parametrize("op_case", cases, ids=lambda item: f"{item[0]} {item[1].name}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note what the summary counts."""
    names = {"target", "op_case"}.intersection(getattr(item, "fixturenames", ()))
    item.user_properties += [(name, True) for name in names]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How much ran on the target, and which cases do not suit it."""
    name = config.getoption("--target")
    _, sizes = TARGETS[name]
    results: Counter[str] = Counter()
    cases = 0
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            results[outcome] += "target" in properties
            cases += "op_case" in properties and outcome != "skipped"
    if not results.total():
        return
    left = Counter(case.size for _, case in every_case() if case.size not in sizes)
    terminalreporter.section(f"target {name}")
    terminalreporter.line(", ".join(f"{count} tests {outcome}" for outcome, count in results.items() if count))
    terminalreporter.line(f"{cases} numerical cases ran ({', '.join(sizes)})")
    for size, count in left.items():
        terminalreporter.line(f"{count} {size} cases are for other targets: {', '.join(_targets_for(size))}")


def _targets_for(size: str) -> list[str]:
    return [name for name, (_, sizes) in TARGETS.items() if size in sizes]


@pytest.fixture(scope="session")
def base_pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``--pack``, or the default manifest, built for this session (from the build cache where nothing changed)."""
    named: Path | None = request.config.getoption("--pack")
    if named is not None:
        return named.absolute()
    from b12x.build_tools.build import BuildOptions, build_pack
    from b12x.build_tools.manifest import load_manifest

    folder = tmp_path_factory.mktemp("packs")
    # Kernels that were changed a moment ago have no check record yet: these tests are how they are checked.
    options = replace(BuildOptions.from_environment(), allow_unchecked=True)
    built = build_pack(load_manifest(ROOT / "manifests" / "base.toml"), folder / "base", options).path
    if request.config.getoption("--target") != "rehost:sm_90a":
        return built
    from b12x.build_tools.rehost import rehost_pack

    return rehost_pack(built, folder / "rehosted").path


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, base_pack: Path) -> Iterator[TargetUnderTest]:
    """Kernels of the base pack on ``--target``. Tensors that a test makes without naming a device are made there."""
    name = request.config.getoption("--target")
    with pytest.MonkeyPatch.context() as patch, entered(name) as where:
        patch.setenv("B12X_PACK_PATH", str(base_pack))
        b12x.clear_all_caches()
        torch.set_default_device(where.device)
        yield TargetUnderTest(where.device, name)
        torch.set_default_device(None)
    b12x.clear_all_caches()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ between tests and repeat between runs."""
    seed = np.frombuffer(request.node.nodeid.encode(), np.uint8)
    return np.random.default_rng(seed)
