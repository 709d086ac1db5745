"""What the build reads out of PTX text: entries, their parameters, block sizes, and the target line."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The target that stored PTX names, whatever arch it was compiled for.
CANONICAL_TARGET = "sm_120a"

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+(?P<points>\d+)\s+)?)?"
    r"[\w$%]+(?:\[(?P<count>\d+)\])?$"
)
_TARGET = re.compile(r"^\.target[ \t]+(\S+)[ \t]*$", re.M)
_REQNTID = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


@dataclass(frozen=True)
class PtxParam:
    """One parameter: its type in the spelling of :mod:`b12x._runtime.abi`, and the pointee alignment it assumes."""

    type: str
    pointee_align: int


@dataclass(frozen=True)
class PtxEntry:
    name: str
    params: tuple[PtxParam, ...]
    block: tuple[int, int, int] | None


def entries(ptx: str) -> tuple[PtxEntry, ...]:
    """The kernels of a PTX module, in order."""
    return tuple(_entry(*match.groups()) for match in _ENTRY.finditer(_without_comments(ptx)))


def normalise_target(ptx: str) -> tuple[str, str]:
    """The text with its target line naming :data:`CANONICAL_TARGET`, and the target that it named."""
    found = _TARGET.findall(ptx)
    if len(found) != 1:
        raise ValueError(f"PTX has {len(found)} .target lines, expected one")
    return _TARGET.sub(f".target {CANONICAL_TARGET}", ptx), found[0]


def has_line_info(ptx: str) -> bool:
    """Whether the text carries source locations, which embed absolute paths."""
    return re.search(r"^\s*\.(?:file|loc)\s", ptx, re.M) is not None


def _entry(name: str, params: str, directives: str) -> PtxEntry:
    required = _REQNTID.search(directives)
    block = None
    if required:
        x, y, z = (int(v) if v else 1 for v in required.groups())
        block = (x, y, z)
    declared = [text.strip() for text in params.split(",") if text.strip()]
    return PtxEntry(name, tuple(_param(text) for text in declared), block)


def _param(text: str) -> PtxParam:
    match = _PARAM.match(text)
    if match is None:
        raise ValueError(f"PTX parameter {text!r} is of a form this reader does not know")
    spelled = f".{match['type']}"
    if match["count"]:
        spelled = f".align {match['align'] or 1} {spelled}[{match['count']}]"
    # The DSL spells one 32-bit integer type; .s32 and .b32 would be the same register to the launcher.
    return PtxParam(
        {".s32": ".u32", ".b32": ".u32", ".s64": ".u64", ".b64": ".u64"}.get(spelled, spelled),
        int(match["points"] or 1),
    )


def _without_comments(ptx: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
