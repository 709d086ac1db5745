"""Compiling one spec: what comes out, what is left behind, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from b12x._runtime import counters
from b12x.build_tools import compile_one
from b12x.build_tools.compile_one import ArchBuild, compile_arch, compile_spec
from b12x.build_tools.errors import BuildError
from b12x.build_tools.sources import source_files, source_sha256
from tests.build_tools.conftest import ROOT, TOYS

# What a user's process does, with settings of the DSL that would change the result if they were heard.
SCRIPT = f"""\
import sys
sys.path[:0] = [{str(ROOT / "src")!r}]
import b12x
b12x.__path__ += [{str(ROOT)!r}, {str(TOYS)!r}]
import b12x.kernels
b12x.kernels.__path__.append({str(TOYS / "kernels")!r})
from b12x.build_tools.compile_one import compile_spec
artifact = compile_spec("toy.scale:variant=good,block=64", ["sm_120a", "sm_121a"])
print(artifact.ptx, end="")
"""


def test_the_artifact(toys: Path) -> None:
    from b12x.toy.scale.spec import ScaleSpec

    counters.reset()
    artifact = compile_spec("toy.scale:variant=good,block=64", ["sm_120a", "sm_121a"])
    assert counters.compiles == 2
    spec = ScaleSpec()
    assert artifact.key == spec.key
    assert artifact.fingerprint == spec.abi().fingerprint
    assert artifact.abi == spec.abi().to_json()
    assert artifact.source == source_sha256(spec)
    assert artifact.dsl == metadata.version("nvidia-cutlass-dsl")
    assert set(artifact.cubins) == set(artifact.resources) == {"sm_120a", "sm_121a"}
    assert {arch: cubin.arch for arch, cubin in artifact.resources.items()} == {
        "sm_120a": "sm_120a",
        "sm_121a": "sm_121a",
    }
    assert ".target sm_120a\n" in artifact.ptx


def test_builds_survive_json(toys: Path) -> None:
    from b12x.toy.scale.spec import ScaleSpec

    build = compile_arch(ScaleSpec(variant="cluster"), "sm_121a")
    assert build.launch.cluster == (2, 1, 1)
    assert ArchBuild.from_json(build.to_json()) == build


def test_no_file_is_left_and_no_setting_of_the_dsl_is_heard(toys: Path, tmp_path: Path) -> None:
    quiet = compile_spec("toy.scale:variant=good,block=64", ["sm_120a"]).ptx
    temporary, work = tmp_path / "temporary", tmp_path / "work"
    temporary.mkdir()
    work.mkdir()
    settings = {
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_KEEP": "all",
        "CUTE_DSL_PRINT_IR": "1",
        "CUTE_DSL_DUMP_DIR": str(work),
        "CUTE_DSL_COMPILER_OPT": "remarks",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=work,
        env={**os.environ, **settings, "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == quiet
    assert done.stderr == ""
    assert list(temporary.rglob("*")) + list(work.rglob("*")) == []


def test_the_dsl_must_be_there_and_the_pinned_one(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from b12x.toy.scale.spec import ScaleSpec

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    compile_one.import_dsl.cache_clear()
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(BuildError) as caught:
        compile_arch(ScaleSpec(), "sm_120a")
    assert str(caught.value) == (
        "toy.scale:variant=good,block=64 cannot be compiled: nvidia-cutlass-dsl is not installed, 4.8.1 is needed; "
        "pip install 'b12x[jit]'"
    )
    monkeypatch.setattr(metadata, "version", lambda name: "4.7.0")
    with pytest.raises(
        BuildError, match=r"found nvidia-cutlass-dsl 4\.7\.0, 4\.8\.1 is needed; pip install .*==4\.8\.1"
    ):
        compile_arch(ScaleSpec(), "sm_120a")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("raises", r"block=64 does not compile for sm_120a: ValueError: this definition raises"),
        ("two", r"block=64: the jit function launches 2 kernels, expected exactly one"),
    ],
)
def test_kernels_that_do_not_compile_are_named(toys: Path, variant: str, message: str) -> None:
    from b12x.toy.scale.spec import ScaleSpec

    with pytest.raises(BuildError, match=rf"toy\.scale:variant={variant},{message}"):
        compile_spec(ScaleSpec(variant=variant), ["sm_120a"])


def test_device_modules_that_are_missing_or_define_nothing(toy_tree: Path) -> None:
    from b12x.toy.scale.spec import LocalSpec

    module = toy_tree / "kernels" / "toy" / "scale_local.py"
    module.write_text("")
    with pytest.raises(BuildError, match=r"b12x\.kernels\.toy\.scale_local has no define\(spec\) -> "):
        compile_arch(LocalSpec(), "sm_120a")
    module.unlink()
    with pytest.raises(BuildError, match=r"scale_local, which does not exist; expected kernels/toy/scale_local\.py"):
        source_sha256(LocalSpec())


def test_sources_follow_imports_and_nothing_else(toy_tree: Path) -> None:
    from b12x.toy.scale.spec import LocalSpec, ScaleSpec

    files = source_files(LocalSpec())
    assert {
        "b12x.kernels.toy.scale_local",
        "b12x.kernels.toy.scale",
        "b12x.kernels.toy.helper",
        "b12x.toy.scale.spec",
        "b12x._runtime.abi",
        "b12x._runtime.spec",
    } <= set(files)
    assert "b12x.toy.scale.planner" not in files
    assert not any(name.startswith(("b12x.emulator", "b12x.kernels.gemm")) for name in files)

    spec = ScaleSpec()
    before = source_sha256(spec)
    (toy_tree / "toy" / "scale" / "planner.py").write_text("# a planner is not part of a kernel\n")
    assert source_sha256(spec) == before
    helper = toy_tree / "kernels" / "toy" / "helper.py"
    helper.write_text(helper.read_text() + "\n# changed\n")
    assert source_sha256(spec) != before
