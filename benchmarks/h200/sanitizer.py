"""What compute-sanitizer found, as data: which kernel, which instructions, and whether a control explains it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: cuda-python asks the driver for functions that a release does not have: an API error each, and none of memory.
OPTIONS = {"memcheck": ["--report-api-errors", "no"]}
NOTES = {
    "memcheck": "errors of API calls are not reported: cuda-python probes the driver for functions, and the runtime "
    "checks the result of every call it makes"
}
MARK = "-- done: "

_FINDING = re.compile(r"========= (?! |COMPUTE-SANITIZER|\w+ SUMMARY|LEAK)(\S.*)")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_PLACE = re.compile(r"(Write access|Read access)? ?at (\S+?)\+(0x[0-9a-f]+)(?: in \S+)?(?: \[(\d+) hazards\])?")
#: An opcode of SASS text, after its offset and its predicate.
_OPCODE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_TOUCHES_MEMORY = ("UBLK", "UTMA", "LD", "ST", "SYNCS", "ATOM", "RED")

Opcodes = Mapping[str, str]


def opcodes(sass: str) -> dict[str, str]:
    """Instructions that touch memory, by offset, of one kernel's disassembly."""
    return {hex(int(at, 16)): name for at, name in _OPCODE.findall(sass) if name.startswith(_TOUCHES_MEMORY)}


def summary(output: str) -> int | None:
    """The number of findings that the tool itself names, None where it did not come to that."""
    counts = [int(count) for count in _SUMMARY.findall(output)]
    return sum(counts) if counts else None


def findings(output: str, keys: Mapping[str, Iterable[str]], sass: Mapping[str, Opcodes]) -> list[dict[str, Any]]:
    """Every finding of a run.

    ``keys`` has the kernels that each case launched; a case prints its name after :data:`MARK` when its kernels have
    ended, so a finding belongs to the case whose name comes next. ``sass`` has the opcodes of each kernel.
    """
    found: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for line in output.splitlines():
        if line.startswith(MARK):
            case = line.removeprefix(MARK)
            for finding in waiting:
                finding["case"] = case
            waiting = []
        elif match := _FINDING.match(line):
            text = _PLACE.sub("", match[1]).strip()
            waiting.append({"what": text, "case": None, "kernel": None, "accesses": []})
            found.append(waiting[-1])
        if line.startswith("=========") and found and (place := _PLACE.search(line)):
            access, kernel, offset, hazards = place.groups()
            entry = {"access": access, "offset": offset, "hazards": int(hazards) if hazards else None}
            found[-1]["kernel"] = found[-1]["kernel"] or kernel
            found[-1]["accesses"].append(entry)
    for finding in found:
        candidates = list(keys.get(finding["case"] or "", ()))
        finding["keys"] = candidates
        for entry in finding["accesses"]:
            names = {sass.get(key, {}).get(entry["offset"]) for key in candidates}
            entry["opcode"] = names.pop() if len(names) == 1 else None
    return found


def explain(found: Iterable[dict[str, Any]], controls: Iterable[dict[str, Any]]) -> None:
    """Set ``explained_by`` of each finding: the controls of which the tool says the same, by pairs of instructions.

    A control is right by the memory model, so what is found in one is a limit of the tool. None: nothing explains it.
    """
    known: dict[tuple[str, str], set[str]] = {}
    for control in controls:
        for pair in _pairs(control):
            known.setdefault(pair, set()).add(str(control["case"]))
    for finding in found:
        pairs = _pairs(finding)
        explained = bool(pairs) and all(pair in known for pair in pairs)
        names = sorted(set().union(*(known[pair] for pair in pairs))) if explained else []
        finding["explained_by"] = f"the same in {', '.join(names)}" if names else None


def _pairs(finding: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The instructions, without their modifiers, that race; empty where one is unknown."""
    names = [str(entry["opcode"] or "").partition(".")[0] for entry in finding["accesses"]]
    first, *others = names or [""]
    return {(first, other) for other in others} if all(names) else set()
