"""From the PTX of an artifact to PTX that Hopper runs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from .body import Body
from .errors import RehostError
from .scan import Instruction, instructions
from .table import expansion_of, refusal_of

#: The architecture that the rewritten text is assembled for, and the name that packs and targets give the result.
ARCH = "sm_90a"
TARGET = f"rehost:{ARCH}"

_TARGET_LINE = re.compile(r"^\.target[ \t]+\S+[ \t]*$", re.M)


@dataclass(frozen=True)
class Rehosted:
    """The rewritten text, line for line the original's, and how often each expansion was used."""

    ptx: str
    expansions: dict[str, int]


def rewrite(ptx: str) -> Rehosted:
    """Expand what Hopper lacks and set the target.

    Raises RehostError where an instruction is known to be missing there and has no expansion, or where the text cannot
    be followed.
    """
    targets = len(_TARGET_LINE.findall(ptx))
    if targets != 1:
        raise RehostError(f"PTX has {targets} .target lines, expected one")
    parts, done = [], 0
    used: Counter[str] = Counter()
    for ins in instructions(ptx):
        expansion = expansion_of(ins)
        refused = refusal_of(ins)
        if refused:
            raise RehostError(f"line {ins.line}: {ins.name}: Hopper has no such {refused}, and there is no expansion")
        if expansion is None:
            continue
        body = Body()
        try:
            expansion.write(ins, body)
        except (KeyError, IndexError, ValueError) as error:
            raise RehostError(f"line {ins.line}: {ins.name}: form without an expansion ({error})") from error
        used[expansion.title] += 1
        parts += [ptx[done : ins.start], body.text(ins, f"$rehost_{sum(used.values())}"), _newlines(ptx, ins)]
        done = ins.end
    text = "".join([*parts, ptx[done:]])
    return Rehosted(_TARGET_LINE.sub(f".target {ARCH}", text), dict(used))


def _newlines(ptx: str, ins: Instruction) -> str:
    """As many line ends as the replaced instruction spanned."""
    return "\n" * ptx.count("\n", ins.start, ins.end)
