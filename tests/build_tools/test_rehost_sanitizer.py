"""What the H200 run relies on and a machine without a GPU can show: the controls are right, findings are read right."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "h200"
NAMES = ("once", "threads", "warps")

RACE = """-- done: first
========= Error: Race reported between Write access at kernel_x+0xe00
=========     and Read access at kernel_x+0x1d60 [1488 hazards]
=========     and Read access at kernel_x+0x41e0 [3 hazards]
=========
========= Warning: Race reported between Read access at kernel_x+0x10
=========     and Write access at kernel_x+0xe00 [1 hazards]
-- done: second
========= RACECHECK SUMMARY: 2 hazards displayed (1 errors, 1 warnings)
"""
READ = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at kernel_y+0x120 in file.cu:7
=========     by thread (0,0,0) in block (0,0,0)
-- done: third
========= ERROR SUMMARY: 1 error
"""
SASS = {"key": {"0xe00": "UBLKCP.S.G", "0x1d60": "LDS", "0x41e0": "LDS.128", "0x10": "LDS"}}


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The folder's modules; afterwards the process is as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        patch.syspath_prepend(str(HERE))
        before = set(sys.modules)
        import controls
        import sanitizer

        found = ModuleType("scripts")
        found.controls, found.sanitizer = controls, sanitizer  # type: ignore[attr-defined]
        yield found
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(HERE)):
                del sys.modules[name]


@pytest.mark.parametrize("copy", ["bulk", "tensor"])
@pytest.mark.parametrize("form", NAMES)
def test_controls_are_right_with_all_checks(scripts: Any, rng: np.random.Generator, copy: str, form: str) -> None:
    control = scripts.controls.Control(copy, form)
    size = control.tiles * scripts.controls.TILE
    buffer = rng.integers(0, 256, size + 16, dtype=np.uint8)
    first = -buffer.ctypes.data % 16
    source = buffer[first : first + size]
    assert np.array_equal(scripts.controls.emulate(control, source), source)
    assert {c.name for c in scripts.controls.all_controls()} == {
        f"control_{copy}_{form}" for copy in ("bulk", "tensor") for form in NAMES
    }


def test_findings_name_kernel_case_and_instructions(scripts: Any) -> None:
    found = scripts.sanitizer.findings(RACE, {"first": ["other"], "second": ["key"]}, SASS)
    assert len(found) == scripts.sanitizer.summary(RACE) == 2
    assert found[0] == {
        "what": "Error: Race reported between",
        "case": "second",
        "kernel": "kernel_x",
        "keys": ["key"],
        "accesses": [
            {"access": "Write access", "offset": "0xe00", "hazards": None, "opcode": "UBLKCP.S.G"},
            {"access": "Read access", "offset": "0x1d60", "hazards": 1488, "opcode": "LDS"},
            {"access": "Read access", "offset": "0x41e0", "hazards": 3, "opcode": "LDS.128"},
        ],
    }
    (read,) = scripts.sanitizer.findings(READ, {"third": ["key"]}, SASS)
    assert (read["what"], read["kernel"], read["case"]) == (
        "Invalid __global__ read of size 4 bytes",
        "kernel_y",
        "third",
    )
    assert scripts.sanitizer.summary("killed") is None
    several = "ERROR SUMMARY: 2 errors\nRACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
    assert scripts.sanitizer.summary(several) == 5


@pytest.mark.parametrize(
    ("text", "pairs", "explained"),
    [
        (RACE, {"0x20": "UBLKCP.S.G", "0x30": "LDS.128"}, [True, False]),
        (RACE, {"0x20": "UTMALDG.3D", "0x30": "LDS"}, [False, False]),
        (RACE, {"0x20": "UBLKCP.S.G", "0x30": "LDSM.16.M88.4"}, [False, False]),
        (RACE, {}, [False, False]),
        (READ, {"0x20": "UBLKCP.S.G", "0x30": "LDS"}, [False]),
    ],
)
def test_only_a_control_with_the_same_instructions_explains(
    scripts: Any, text: str, pairs: dict[str, str], explained: list[bool]
) -> None:
    control = """========= Error: Race reported between Write access at control+0x20
=========     and Read access at control+0x30 [9 hazards]
-- done: control
"""
    known = scripts.sanitizer.findings(control, {"control": ["control"]}, {"control": pairs})
    found = scripts.sanitizer.findings(text, {"second": ["key"]}, SASS)
    scripts.sanitizer.explain(found, known)
    assert [finding["explained_by"] is not None for finding in found] == explained
    if any(explained):
        assert found[0]["explained_by"] == "the same in control"


def test_opcodes_are_those_that_touch_memory(scripts: Any) -> None:
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   IMAD.MOV.U32 R2, RZ, RZ, R1 ;
        /*0e00*/              @!UP0 UBLKCP.S.G [UR4], [UR6], UR8 ;
        /*1230*/               @P1 LDS.128 R4, [R2] ;
    """
    assert scripts.sanitizer.opcodes(sass) == {"0x0": "LDC", "0xe00": "UBLKCP.S.G", "0x1230": "LDS.128"}
