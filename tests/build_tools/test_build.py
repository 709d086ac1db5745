"""The driver: cache, failures, atomic output, determinism, progress. Kernels are compiled in worker processes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from b12x._runtime.pack import Pack
from b12x._runtime.spec import KernelSpec
from b12x.build_tools import build, progress, workers
from b12x.build_tools.build import BuildOptions, build_pack
from b12x.build_tools.cache import BuildCache, cache_key, default_folder
from b12x.build_tools.errors import BuildError, BuildFailedError
from b12x.build_tools.manifest import Manifest, load_manifest
from b12x.build_tools.progress import Progress
from tests.build_tools.conftest import ROOT, TOYS

GOOD = '[[op]]\nop = "toy.scale"\nn = 1000\n'


def manifest_of(folder: Path, text: str = GOOD) -> Manifest:
    path = folder / "toys.toml"
    path.write_text('name = "toys"\n' + text)
    return load_manifest(path)


def tree_sha256(folder: Path) -> str:
    """One hash over the names and contents of all files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert files
    lines = [f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_a_pack_holds_what_the_manifest_reaches(toys: Path, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    report = build_pack(manifest, tmp_path / "out" / "toys", BuildOptions())
    assert (report.specs, report.compiled, report.cached, report.compiles) == (2, 2, 0, 4)
    assert set(report.kernel_seconds) == {spec.key for spec in manifest.specs()}
    pack = Pack.open(report.path)
    assert list(pack.keys()) == ["toy.scale:variant=good,block=128", "toy.scale:variant=good,block=64"]
    assert (pack.name, pack.archs, pack.dsl) == ("toys", ("sm_120a", "sm_121a"), "4.8.1")
    assert pack.manifests == {"toys.toml": hashlib.sha256(manifest.path.read_bytes()).hexdigest()}
    for spec in manifest.specs():
        artifact = pack.get(spec.key)
        assert artifact is not None
        assert artifact.fingerprint == spec.abi().fingerprint
        assert artifact.entry in pack.ptx(artifact)
        assert {arch: len(pack.cubin(artifact, arch)) for arch in pack.archs} == {
            arch: cubin.bytes for arch, cubin in artifact.cubins.items()
        }
    assert report.bytes == sum(path.stat().st_size for path in report.path.rglob("*") if path.is_file())


def test_an_unchanged_second_build_compiles_nothing(toys: Path, tmp_path: Path) -> None:
    options = BuildOptions(cache=tmp_path / "cache")
    first = build_pack(manifest_of(tmp_path), tmp_path / "a", options)
    second = build_pack(manifest_of(tmp_path), tmp_path / "b", options)
    assert (first.compiled, first.cached, first.compiles) == (2, 0, 4)
    assert (second.compiled, second.cached, second.compiles) == (0, 2, 0)
    assert tree_sha256(tmp_path / "a") == tree_sha256(tmp_path / "b")


def test_a_new_arch_compiles_that_arch_only(toys: Path, tmp_path: Path) -> None:
    one = BuildOptions(archs=("sm_120a",), cache=tmp_path / "cache")
    both = BuildOptions(cache=tmp_path / "cache")
    assert build_pack(manifest_of(tmp_path), tmp_path / "a", one).compiles == 2
    assert build_pack(manifest_of(tmp_path), tmp_path / "a", both).compiles == 2
    assert Pack.open(tmp_path / "a").archs == ("sm_120a", "sm_121a")


def test_without_a_cache_everything_is_compiled_again(toys: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert build_pack(manifest_of(tmp_path), tmp_path / "a", BuildOptions()).compiles == 4


def test_a_damaged_cache_entry_is_compiled_again(toys: Path, tmp_path: Path) -> None:
    options = BuildOptions(cache=tmp_path / "cache")
    build_pack(manifest_of(tmp_path), tmp_path / "a", options)
    entries = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(entries) == 4
    flipped = bytearray(entries[0].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    entries[0].write_bytes(flipped)
    entries[1].write_bytes(entries[1].read_bytes()[:100])
    entries[2].write_bytes(b"")
    report = build_pack(manifest_of(tmp_path), tmp_path / "b", options)
    assert report.compiles == 3
    assert tree_sha256(tmp_path / "a") == tree_sha256(tmp_path / "b")
    assert build_pack(manifest_of(tmp_path), tmp_path / "b", options).compiles == 0


def test_the_cache_key_hears_sources_and_nothing_of_the_environment(
    toy_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from b12x.toy.scale.spec import ScaleSpec

    spec = ScaleSpec()
    key = cache_key(spec, "sm_120a")
    assert cache_key(spec, "sm_121a") != key
    assert cache_key(ScaleSpec(block=128), "sm_120a") != key
    for name in ("B12X_TARGET", "CUTE_DSL_LINEINFO", "HOME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    assert cache_key(spec, "sm_120a") == key
    helper = toy_tree / "kernels" / "toy" / "helper.py"
    helper.write_text(helper.read_text().replace("value * alpha", "alpha * value"))
    assert cache_key(spec, "sm_120a") != key


def test_a_changed_helper_changes_the_kernel(toy_tree: Path, tmp_path: Path) -> None:
    options = BuildOptions(cache=tmp_path / "cache")
    before = build_pack(manifest_of(tmp_path), tmp_path / "a", options)
    helper = toy_tree / "kernels" / "toy" / "helper.py"
    helper.write_text(helper.read_text().replace("value * alpha", "value + alpha"))
    after = build_pack(manifest_of(tmp_path), tmp_path / "b", options)
    assert before.compiles == after.compiles == 4
    pack = Pack.open(tmp_path / "b")
    assert "add" in pack.ptx(pack.get("toy.scale:variant=good,block=64")).split("{", 1)[1]


def test_failures_name_their_spec_and_the_others_are_still_built(
    toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = BuildOptions(jobs=2, cache=tmp_path / "cache")
    text = GOOD + 'variant = ["good", "local", "raises", "dies", "two"]\n'
    with pytest.raises(BuildFailedError) as caught:
        build_pack(manifest_of(tmp_path, text), tmp_path / "out", options)
    message = str(caught.value)
    assert message.startswith("pack 'toys' was not written: 8 of 10 kernels failed\n")
    for block in (64, 128):
        reasons = {
            f"toy.scale:variant=local,block={block}": "bytes of local memory per thread",
            f"toy.scale:variant=raises,block={block}": "ValueError: this definition raises",
            f"toy.scale:variant=dies,block={block}": "was ended by signal 9; its last output: last words",
            f"toy.scale:variant=two,block={block}": "launches 2 kernels, expected exactly one",
        }
        for key, reason in reasons.items():
            assert reason in caught.value.failures[key]
            assert f"  {key}\n    " in message
    assert set(caught.value.failures) & {f"toy.scale:variant=good,block={block}" for block in (64, 128)} == set()
    printed = capsys.readouterr().err
    assert printed.count("FAILED") == 8
    assert "toy.scale:variant=good,block=64" in printed
    # The good ones were compiled; nothing of a pack is there.
    assert build_pack(manifest_of(tmp_path), tmp_path / "out", options).compiles == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out", "toys.toml"]


def test_a_failing_build_leaves_the_old_pack_alone(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BuildOptions(archs=("sm_120a",), cache=tmp_path / "cache")
    out = tmp_path / "packs" / "toys"
    build_pack(manifest_of(tmp_path), out, options)
    before = tree_sha256(out)
    with pytest.raises(BuildFailedError):
        build_pack(manifest_of(tmp_path, GOOD + 'variant = "align"\n'), out, options)
    assert tree_sha256(out) == before

    def full(file: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("b12x._runtime.pack._write_synced", full)
    for folder in (out, tmp_path / "packs" / "new"):
        with pytest.raises(OSError, match="No space left"):
            build_pack(manifest_of(tmp_path), folder, options)
    assert tree_sha256(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["toys"]


def test_a_folder_that_is_not_a_pack_is_not_replaced(toys: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    options = BuildOptions(archs=("sm_120a",))
    with pytest.raises(BuildError, match=r"home exists and is not a pack \(it has no index\.json\); choose another"):
        build_pack(manifest_of(tmp_path), tmp_path / "home", options)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter.txt"]


BUILD_SCRIPT = """\
import sys
from pathlib import Path
root, out, jobs = sys.argv[1:]
sys.path[:0] = [f"{root}/src"]
import b12x
b12x.__path__ += [root, f"{root}/toys"]
import b12x.kernels
b12x.kernels.__path__.append(f"{root}/toys/kernels")
from b12x.build_tools.build import BuildOptions, build_pack
from b12x.build_tools.manifest import load_manifest
build_pack(load_manifest(Path(root, "toys.toml")), Path(out), BuildOptions(jobs=int(jobs)))
"""


def test_two_builds_in_two_folders_give_the_same_bytes(tmp_path: Path) -> None:
    """The toys and a real kernel of each op; folders, hash seeds, job counts and clocks differ; there is no cache."""
    manifest = (
        f'name = "toys"\n{GOOD}variant = ["good", "smem_fits", "static"]\n'
        '[[op]]\nop = "quantization.nvfp4"\nm = 1\nk = 64\n'
        '[[op]]\nop = "gemm.blockscaled"\nc_dtype = "bfloat16"\nmax_m = 64\nn = 64\nk = 128\n'
    )
    packs = []
    for name, seed, jobs in (("one", "1", "1"), ("a longer folder name/two", "4711", "2")):
        root = tmp_path / name
        for folder in ("src", "kernels", "build_tools"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "packs"))
        shutil.copytree(TOYS, root / "toys", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "toys.toml").write_text(manifest)
        subprocess.run(
            [sys.executable, "-c", BUILD_SCRIPT, str(root), str(root / "out"), jobs],
            env={**os.environ, "PYTHONHASHSEED": seed, "TMPDIR": str(root)},
            check=True,
        )
        packs.append(root / "out")
    files = [sorted(path.relative_to(pack) for path in pack.rglob("*")) for pack in packs]
    assert files[0] == files[1]
    assert len(Pack.open(packs[0]).entries) == 10
    assert tree_sha256(packs[0]) == tree_sha256(packs[1])


def test_a_spec_whose_key_does_not_read_back_is_refused(toys: Path, tmp_path: Path) -> None:
    from b12x.toy.scale.spec import ScaleSpec

    class Twin(ScaleSpec):
        pass

    specs: list[KernelSpec] = [Twin()]
    report = build.BuildReport("toys", tmp_path, ("sm_120a",))
    with pytest.raises(BuildFailedError, match=r"its key reads back as ScaleSpec\(.*the planner's spec is .*Twin\("):
        build.compile_specs(specs, BuildOptions(archs=("sm_120a",)), report)
    assert report.compiles == 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that the test starts."""
    processes: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def recorded(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        processes.append(popen(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return processes


def test_workers_end_with_an_interrupted_build(toys: Path, started: list[subprocess.Popen[str]]) -> None:
    tasks = [workers.Task(f"toy.scale:variant=good,block={32 * n}", ("sm_120a",)) for n in range(1, 9)]

    def interrupt() -> None:
        for _ in workers.run_tasks(tasks, 2, lambda running: None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_workers_are_replaced_after_a_failure_and_after_their_share(
    toys: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "KERNELS_PER_WORKER", 2)
    variants = ["late", "good", "smem_fits", "static", "block"]
    tasks = [workers.Task(f"toy.scale:variant={v},block=64", ("sm_120a",)) for v in variants]
    answers = list(workers.run_tasks(tasks, 1, lambda running: None))
    assert [answer.task for answer in answers] == tasks
    assert [answer.error is None for answer in answers] == [False, True, True, True, True]
    assert len(started) == 3
    assert all(process.poll() == 0 for process in started)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"B12X_BUILD_ARCHS": "sm_90a"}, "archs are sm_90a; expected one or more of sm_120a, sm_121a"),
        ({"B12X_BUILD_JOBS": "many"}, "B12X_BUILD_JOBS is 'many'; expected a whole number from 1"),
        ({"B12X_BUILD_JOBS": "0"}, "jobs is 0; expected 1 or more"),
    ],
)
def test_options_of_the_environment_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BuildError) as caught:
        BuildOptions.from_environment()
    assert str(caught.value) == message


def test_options_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("B12X_BUILD_ARCHS", " sm_121a, ")
    monkeypatch.setenv("B12X_BUILD_JOBS", "3")
    monkeypatch.setenv("B12X_BUILD_CACHE", str(tmp_path))
    assert BuildOptions.from_environment() == BuildOptions(("sm_121a",), 3, tmp_path)
    monkeypatch.setenv("B12X_BUILD_CACHE", "")
    assert default_folder() is None
    monkeypatch.delenv("B12X_BUILD_CACHE")
    assert default_folder() == ROOT / "build" / "cache"


def test_an_unwritable_cache_is_an_error_of_its_own(toys: Path, tmp_path: Path) -> None:
    """Not one of the kernel: a file where the cache's folder should be."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(OSError, match="cache"):
        build_pack(manifest_of(tmp_path), tmp_path / "out", BuildOptions(cache=tmp_path / "cache"))
    assert not (tmp_path / "out").exists()


def test_the_cache_holds_nothing_when_there_is_none(toys: Path) -> None:
    from b12x.toy.scale.spec import ScaleSpec

    assert BuildCache(None).load(ScaleSpec(), "sm_120a") is None


# ---- progress ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar_with_count_name_and_eta() -> None:
    stream = Terminal()
    with Progress(4, "demo", stream) as bar:
        bar.waiting(["gemm:a"])
        bar.finished("gemm:a", "0.10 s")
        bar.finished("gemm:b", "cached")
    drawn = stream.getvalue().split("\r\x1b[K")
    assert drawn[1] == "demo [....................] 0/4 ETA -:-- gemm:a"
    assert drawn[2] == "demo [#####...............] 1/4 ETA 0:00 gemm:a"
    assert drawn[3].startswith("demo [##########..........] 2/4 ")
    assert drawn[-1] == ""
    assert "\n" not in stream.getvalue()


def test_progress_elsewhere_is_plain_lines_and_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    with Progress(2, "demo", stream) as lines:
        clock[0] = 9.0
        lines.waiting(["gemm:a"])
        clock[0] = 10.0
        lines.waiting(["gemm:a", "gemm:b"])
        lines.waiting(["gemm:a", "gemm:b"])
        lines.finished("gemm:a", "10.50 s")
    assert stream.getvalue() == "demo [0/2] 10 s, compiling gemm:a, gemm:b\ndemo [1/2] gemm:a 10.50 s\n"


def test_reports_are_json(tmp_path: Path) -> None:
    report = build.BuildReport("toys", tmp_path, ("sm_120a",), specs=2)
    assert json.loads(json.dumps(report.to_json()))["path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("version", "found"), [(None, "is not installed"), ("4.5.0", "found nvidia-cutlass-dsl 4.5.0")]
)
def test_without_the_compiler_one_message_says_what_to_install(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, found: str
) -> None:
    """Before any worker starts. What the cache holds needs no compiler."""
    cached = BuildOptions(cache=tmp_path / "cache")
    build_pack(manifest_of(tmp_path), tmp_path / "a", cached)

    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(build, "run_tasks", lambda tasks, *options: pytest.fail("work was started") if tasks else [])
    with pytest.raises(BuildError) as caught:
        build_pack(manifest_of(tmp_path), tmp_path / "b", BuildOptions())
    for word in ("pack 'toys': 2 kernels have to be compiled", found, "needed is 4.8.1", "pip install 'b12x[jit]'"):
        assert word in str(caught.value)
    assert build_pack(manifest_of(tmp_path), tmp_path / "b", cached).compiles == 0
