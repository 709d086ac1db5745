"""Compiling at run time: the disk cache, its lock, unsafe and missing places, what is said when it cannot be done."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import b12x
from b12x._runtime import counters, jit, resolve

from .fakes import RecordingTarget, ToySpec, make_pack, role
from .toolchain import DSL_VERSION, FakeToolchain

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]) -> FakeToolchain:
    """A working compiler and no packs."""
    install()
    fake = FakeToolchain()
    fake.install(monkeypatch.setattr)
    return fake


def get(spec: ToySpec | None = None, arch: str = "sm_120a") -> tuple[str, bytes]:
    """Origin and machine code of a spec, as a new process would get them."""
    spec = spec or ToySpec()
    artifact, pack, origin = jit.obtain(spec, arch, "missed")
    return origin, pack.cubin(artifact, arch)


def test_compiled_once_then_from_the_cache(tools: FakeToolchain, tmp_path: Path) -> None:
    first, again = get(), get()
    assert (first[0], again[0]) == ("jit", "jit-cache")
    assert first[1] == again[1]
    assert tools.compiled == [(ToySpec().key, ["sm_120a"])]
    (folder,) = [p for p in (tmp_path / "cache" / "jit").iterdir() if p.is_dir()]
    assert sorted(p.name for p in folder.iterdir()) == ["blobs", "index.json"]
    assert stat.S_IMODE((tmp_path / "cache" / "jit").stat().st_mode) == 0o700


def test_resolution_order_ends_in_the_jit(tools: FakeToolchain, install: Callable[..., None], tmp_path: Path) -> None:
    origins = []
    for _ in range(2):
        target = RecordingTarget()
        origins += [resolve.resolve(role(ToySpec()), target, "toy.copy").origin for _ in range(2)]
    install(make_pack(tmp_path / "p", ToySpec(), name="late"))
    origins.append(resolve.resolve(role(ToySpec()), RecordingTarget(), "toy.copy").origin)
    assert origins == ["jit", "memory", "jit-cache", "memory", "pack:late"]
    assert counters.compiles == 1


def test_frozen_does_not_look_at_the_disk_cache(tools: FakeToolchain) -> None:
    get()
    b12x.freeze_kernel_resolution("serving")
    with pytest.raises(b12x.KernelResolutionFrozenError):
        resolve.resolve(role(ToySpec()), RecordingTarget(), "toy.copy")
    b12x.unfreeze_kernel_resolution()
    assert resolve.resolve(role(ToySpec()), RecordingTarget(), "toy.copy").origin == "jit-cache"


def test_spec_arch_sources_and_dsl_are_the_cache_key_and_nothing_else(
    tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    get()
    monkeypatch.setenv("B12X_ANYTHING", "1")
    monkeypatch.setenv("B12X_PRINT_COMPILE_PROGRESS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    assert get()[0] == "jit-cache"
    assert get(ToySpec(tile=1))[0] == "jit"
    assert get(arch="sm_121a")[0] == "jit"
    tools.source = "2" * 64
    assert get()[0] == "jit"
    tools.source = "1" * 64
    assert get()[0] == "jit-cache"
    tools.compile_one.DSL_VERSION = "10"
    tools.install(monkeypatch.setattr, "10")
    assert get()[0] == "jit"


@pytest.mark.parametrize("what", ["index.json", "*.cubin", "*.ptx.gz"])
@pytest.mark.parametrize("damage", [b"", b"rubbish", None])
def test_damaged_cache_entry_is_compiled_again(
    tools: FakeToolchain, tmp_path: Path, what: str, damage: bytes | None
) -> None:
    _, good = get()
    (file,) = (tmp_path / "cache" / "jit").rglob(what)
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    with pytest.warns(RuntimeWarning, match=r"compiles a cached kernel again: .*" + file.name):
        origin, data = get()
    assert (origin, data) == ("jit", good)
    assert get()[0] == "jit-cache", "the entry was repaired"


@pytest.mark.parametrize(
    ("version", "found"), [(None, "is not installed"), ("4.5.0", "found nvidia-cutlass-dsl 4.5.0")]
)
def test_missing_or_other_dsl_says_what_to_install(
    tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch, version: str | None, found: str
) -> None:
    tools.install(monkeypatch.setattr, version)
    with pytest.raises(b12x.KernelNotFoundError) as caught:
        resolve.resolve(role(ToySpec()), RecordingTarget(), "toy.copy", "max_m = 8")
    for word in (
        found,
        f"needed is {DSL_VERSION}",
        "pip install 'b12x[jit]'",
        "or build a pack",
        ToySpec().key,
        "max_m = 8",
    ):
        assert word in str(caught.value)
    assert tools.compiled == []


def test_missing_build_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'b12x.build_tools'")

    monkeypatch.setattr(jit, "_toolchain", missing)
    with pytest.raises(b12x.KernelNotFoundError, match=r"No module named 'b12x.build_tools'.*reinstall"):
        get()


def test_kernel_that_does_not_compile_is_named(tools: FakeToolchain, tmp_path: Path) -> None:
    tools.error = RuntimeError("spills 8 bytes")
    with pytest.raises(b12x.KernelNotFoundError, match="cannot be compiled for sm_120a: spills 8 bytes") as caught:
        get()
    assert ToySpec().key in str(caught.value)
    assert not [p for p in (tmp_path / "cache" / "jit").iterdir() if p.is_dir()], "nothing half is left"
    tools.error = None
    assert get()[0] == "jit"


def memory_only(words: str) -> None:
    """One warning with these words for several compiles; nothing is kept."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert [get()[0], get()[0]] == ["jit", "jit"]
    (warning,) = seen
    assert words in str(warning.message)
    assert "in memory only" in str(warning.message)
    assert issubclass(warning.category, RuntimeWarning)


def test_world_writable_folder_is_refused(
    tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o1777)
    monkeypatch.setenv("B12X_CACHE_DIR", str(root))
    memory_only(f"{root} is world-writable")
    root.chmod(0o755)
    assert [get()[0], get()[0]] == ["jit", "jit-cache"]
    (root / "jit").chmod(0o777)
    memory_only(f"{root / 'jit'} is world-writable")


def test_folder_of_another_user_is_refused(
    tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    get()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    memory_only(f"{tmp_path / 'cache'} belongs to user {os.getuid()}, not to 54321")


def test_folder_that_cannot_be_made_is_survived(
    tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("B12X_CACHE_DIR", str(tmp_path / "file" / "cache"))
    memory_only("cannot be used (Not a directory)")


def test_disk_that_is_full_is_survived(tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit, "write_pack", full)
    memory_only("cannot be written (No space left on device)")


def test_lock_that_cannot_be_made_is_survived(tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    memory_only("cannot be written (Read-only file system)")


def test_no_home_is_survived(tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("B12X_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    memory_only("there is no home folder; set B12X_CACHE_DIR")


def test_places_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("B12X_CACHE_DIR", str(tmp_path / "own"))
    assert jit.cache_folder() == tmp_path / "own" / "jit"
    monkeypatch.delenv("B12X_CACHE_DIR")
    assert jit.cache_folder() == tmp_path / "xdg" / "b12x" / "jit"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert jit.cache_folder() == tmp_path / "home" / ".cache" / "b12x" / "jit"


def test_progress_is_printed_when_asked_for(
    tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    get()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("B12X_PRINT_COMPILE_PROGRESS", "1")
    monkeypatch.setattr(jit, "HEARTBEAT", 0.05)
    monkeypatch.setattr(jit, "_compiles", 0)
    tools.seconds = 0.2
    get(ToySpec(tile=1))
    tools.error = RuntimeError("no")
    with pytest.raises(b12x.KernelNotFoundError):
        get(ToySpec(tile=2))
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    events = [line.split()[2] for line in lines]
    assert events.count("compile-running") >= 2
    assert [event for event in events if event != "compile-running"] == [
        "compile-start",
        "compile-done",
        "compile-start",
        "compile-failed",
    ]
    done = next(line for line in lines if "compile-done" in line)
    for word in (
        "[b12x cute.compile]",
        "number=1 ",
        "duration_s=0.",
        "total_compile_s=",
        ToySpec(tile=1).key,
        "sm_120a",
    ):
        assert word in done
    assert "number=2 " in lines[-1]


PROCESS = """
import sys
from pathlib import Path
from b12x._runtime import jit
from tests.runtime.fakes import ToySpec
from tests.runtime.toolchain import FakeToolchain

FakeToolchain(Path(sys.argv[1]), float(sys.argv[2])).install(setattr)
artifact, pack, origin = jit.obtain(ToySpec(), "sm_120a", "missed")
print(origin, artifact.cubins["sm_120a"].blob)
"""


def start(log: Path, seconds: float) -> subprocess.Popen[str]:
    """Another process that obtains the toy kernel."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PROCESS, str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_two_processes_compile_one_key_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    workers = [start(log, 1.0) for _ in range(2)]
    printed = sorted(worker.communicate(timeout=60)[0].split() for worker in workers)
    assert [origin for origin, _ in printed] == ["jit", "jit-cache"]
    assert printed[0][1] == printed[1][1]
    assert len(log.read_text().splitlines()) == 1


def test_killed_compiler_leaves_no_lock_and_no_half_pack(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = start(log, 300.0)
    deadline = time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline, "the first process did not begin"
        time.sleep(0.02)
    second = start(log, 0.0)
    time.sleep(0.3)
    assert second.poll() is None, "the second waits for the first"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert second.communicate(timeout=60)[0].split()[0] == "jit"
    assert len(log.read_text().splitlines()) == 2
    assert len([p for p in (tmp_path / "cache" / "jit").iterdir() if p.is_dir()]) == 1


def test_threads_compile_one_key_once(tools: FakeToolchain) -> None:
    tools.seconds = 0.1
    origins: list[str] = []
    target = RecordingTarget()

    def work() -> None:
        origins.append(resolve.resolve(role(ToySpec()), target, "toy.copy").origin)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(origins) == ["jit", "memory", "memory", "memory"]
    assert len(tools.compiled) == 1


def test_folders_are_private_under_any_umask(
    tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "new" / "cache" / "b12x"
    monkeypatch.setenv("B12X_CACHE_DIR", str(root))
    before = os.umask(0)
    try:
        assert [get()[0], get()[0]] == ["jit", "jit-cache"]
    finally:
        os.umask(before)
    for folder in (tmp_path / "new", tmp_path / "new" / "cache", root, root / "jit"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_dead_writers_left_is_removed_after_a_day(tools: FakeToolchain, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "jit"
    for name, age in ((".left.abc", 2 * jit.STALE), (".running.abc", 60.0)):
        (folder / name / "blobs").mkdir(parents=True)
        os.utime(folder / name, (time.time() - age,) * 2)
    folder.chmod(0o700)
    folder.parent.chmod(0o700)
    get()
    assert [path.name for path in folder.glob(".*")] == [".running.abc"]


def test_other_kernels_are_resolved_while_one_compiles(
    tools: FakeToolchain, install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(make_pack(tmp_path / "p", ToySpec(tile=7)))
    started, go_on = threading.Event(), threading.Event()
    real = jit.obtain

    def slow(*arguments: Any) -> Any:
        started.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(jit, "obtain", slow)
    target, origins = RecordingTarget(), []

    def compile_one() -> None:
        origins.append(resolve.resolve(role(ToySpec()), target, "toy.copy").origin)

    threads = [threading.Thread(target=compile_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    assert resolve.resolve(role(ToySpec(tile=7)), target, "toy.copy").origin == "pack:toys"
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(origins) == ["jit", "memory"]
    assert len(tools.compiled) == 1
