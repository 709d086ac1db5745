"""What inspection refuses, on kernels that are compiled to be refused, and the cubin reader against ptxas itself."""

from __future__ import annotations

import contextlib
import io
import re
import struct
from functools import cache
from pathlib import Path

import pytest

from b12x.build_tools.compile_one import ArchBuild, CompiledArtifact, assemble, compile_arch, compile_spec
from b12x.build_tools.cubin import read_cubin
from b12x.build_tools.errors import BuildError, RefusedError
from tests.build_tools.conftest import TOYS, part_of_b12x


@cache
def built(variant: str) -> ArchBuild:
    """A toy kernel as the DSL compiles it, before inspection."""
    with part_of_b12x(TOYS):
        from b12x.toy.scale.spec import ScaleSpec

        return compile_arch(ScaleSpec(variant=variant), "sm_120a")


def inspected(variant: str, *, builds: list[ArchBuild] | None = None) -> CompiledArtifact:
    """The spec of a variant with its own kernel, or with the builds of another."""
    with part_of_b12x(TOYS):
        from b12x.toy.scale.spec import ScaleSpec

        return assemble(ScaleSpec(variant=variant), builds or [built(variant)])


def changed(build: ArchBuild, **changes: object) -> ArchBuild:
    return ArchBuild(**{**vars(build), **changes})


@pytest.mark.parametrize("variant", ["good", "smem_fits", "smem_limit", "static"])
def test_accepted(variant: str) -> None:
    artifact = inspected(variant)
    assert artifact.entry in artifact.ptx
    assert artifact.resources["sm_120a"].local_bytes == 0
    assert artifact.resources["sm_120a"].static_smem == (512 if variant == "static" else 0)


REFUSED = [
    ("params", ["takes (.u64, .u64, .f32, .u32)", "declares (x .u64, y .u64, alpha .f32, n .u64)"]),
    ("align", ["assumes 16-byte alignment of x", "the spec promises 4", "raise the spec's align"]),
    ("block", ["requires a block of (64, 1, 1)", "declares (128, 1, 1)"]),
    ("smem", ["allocates 4096 bytes", "declares 1024"]),
    ("smem_over", ["102400 bytes of shared memory (0 static, 102400 dynamic)", "at most 101376"]),
    (
        "local",
        ["272 bytes of local memory per thread with 40 registers, 0 allowed", "allow_local_memory with a reason"],
    ),
    ("cluster", ["launched with clusters of (2, 1, 1)", "declares (1, 1, 1)"]),
    ("programmatic", ["programmatic_launch=True", "declares False"]),
]


@pytest.mark.parametrize(("variant", "parts"), REFUSED)
def test_refused(variant: str, parts: list[str]) -> None:
    with pytest.raises(RefusedError) as caught:
        inspected(variant)
    assert str(caught.value).startswith(f"toy.scale:variant={variant},block=64 is refused: ")
    for part in parts:
        assert part in str(caught.value)


def test_static_and_dynamic_shared_memory_add_up() -> None:
    with pytest.raises(RefusedError, match=r"101888 bytes of shared memory \(512 static, 101376 dynamic\)"):
        inspected("smem_limit", builds=[built("static")])


def test_local_memory_with_a_reason_is_accepted(toys: Path) -> None:
    from b12x.toy.scale.spec import LocalSpec

    artifact = compile_spec(LocalSpec(), ["sm_120a"])
    assert artifact.resources["sm_120a"].local_bytes == 272


def test_every_fault_is_named_at_once() -> None:
    bad = changed(built("local"), ptx=built("local").ptx.replace(".reqntid 64", ".reqntid 32"))
    with pytest.raises(RefusedError, match=r"takes \(.*; the PTX requires a block of .*; sm_120a: 272 bytes of local"):
        inspected("params", builds=[bad])


def test_entries_must_be_one_and_the_same() -> None:
    good = built("good")
    name = inspected("good").entry
    with pytest.raises(RefusedError, match=r"the PTX has 0 entries \(none\), expected exactly one"):
        inspected("good", builds=[changed(good, ptx=good.ptx.replace(".entry", ".func"))])
    with pytest.raises(RefusedError, match=rf"the cubin's entries are {name}, expected other"):
        inspected("good", builds=[changed(good, ptx=good.ptx.replace(name, "other"))])


def test_line_info_is_refused() -> None:
    good = built("good")
    with pytest.raises(RefusedError, match="line info, which embeds absolute paths; compile without CUTE_DSL_LINEINFO"):
        inspected("good", builds=[changed(good, ptx=good.ptx + '.file 1 "/a/b.py"\n')])


def test_cubins_of_another_arch_are_refused() -> None:
    good = built("good")
    with pytest.raises(RefusedError, match=r"sm_121a: the cubin is for sm_120a, expected sm_121a"):
        inspected("good", builds=[changed(good, arch="sm_121a")])
    flags = struct.unpack_from("<I", good.cubin, 48)[0]
    foreign = bytearray(good.cubin)
    struct.pack_into("<I", foreign, 48, flags & ~0xFF00 | 90 << 8)
    with pytest.raises(RefusedError, match=r"the cubin is for sm_90a, expected sm_120a"):
        inspected("good", builds=[changed(good, cubin=bytes(foreign))])


def test_one_ptx_for_all_archs() -> None:
    good = built("good")
    other = changed(good, arch="sm_121a", ptx=good.ptx.replace("mul.f32", "add.f32"))
    with pytest.raises(
        RefusedError, match=r"PTX for sm_121a differs from that for sm_120a .*'mul\.f32.* and 'add\.f32"
    ):
        inspected("good", builds=[good, other])


def test_another_ptxas_is_refused() -> None:
    good = built("good")
    assert b"V13.4.59" in good.cubin
    old = changed(good, cubin=good.cubin.replace(b"V13.4.59", b"V12.9.59"))
    with pytest.raises(RefusedError, match=r"assembled by ptxas 12\.9\.59, expected 13\.x; pip install .*\[cu13\]"):
        inspected("good", builds=[old])


def test_damaged_cubins() -> None:
    good = built("good").cubin
    for size in (0, 63, 64, 500, len(good) // 2, len(good) - 400):
        with pytest.raises(BuildError, match=r"not a cubin|cut short or damaged"):
            read_cubin(good[:size])
    with pytest.raises(BuildError, match=r"ELF machine 62, ABI version 8; expected machine 190 \(CUDA\)"):
        read_cubin(good[:18] + struct.pack("<H", 62) + good[20:])
    with pytest.raises(BuildError, match=r"ELF machine 190, ABI version 7; .* ABI version 8"):
        read_cubin(good[:8] + b"\x07" + good[9:])
    with pytest.raises(RefusedError, match=r"sm_120a: not a cubin: starts with b'PK"):
        inspected("good", builds=[changed(built("good"), cubin=b"PK" + good)])


@pytest.mark.filterwarnings("ignore")  # the DSL is called directly here, with its advice
@pytest.mark.parametrize("variant", ["good", "smem_fits", "static", "local"])
def test_the_reader_agrees_with_what_ptxas_reports(toys: Path, tmp_path: Path, variant: str) -> None:
    import cutlass.cute as cute

    from b12x.kernels.toy.scale import define
    from b12x.toy.scale.spec import ScaleSpec

    function, arguments = define(ScaleSpec(variant=variant))
    report = io.StringIO()
    with contextlib.redirect_stdout(report), contextlib.redirect_stderr(report):
        options = f"--gpu-arch sm_120a --keep-cubin --dump-dir '{tmp_path}' remarks{{ptx}}"
        compiled = cute.compile(function, *arguments, options=options)
    text = report.getvalue()
    used = re.search(r"Used (\d+) registers(?:[^\n]*?, (\d+) bytes smem)?", text)
    stack = re.search(r"(\d+) bytes stack frame", text)
    assert used, text
    assert stack, text
    cubin = read_cubin(compiled.artifacts.CUBIN)
    assert (cubin.registers, cubin.static_smem, cubin.local_bytes) == (int(used[1]), int(used[2] or 0), int(stack[1]))
