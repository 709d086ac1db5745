"""Which forms of which opcodes the decoders accept, and which of them ran in a test.

A decoder names every modifier that it accepts when it looks for it; those names are recorded while the tests decode
their PTX. A form counts as tested when a launch that held it came to its end, so that the test could look at results.
"""

from __future__ import annotations

from typing import Any

import pytest

from b12x import emulator
from b12x.emulator import decode, mma, ops_cvt

OFFERED: dict[str, set[str]] = {}
TESTED: dict[str, set[tuple[str, ...]]] = {}


class RecordingMods(decode.Mods):
    def offer(self, names: tuple[str, ...]) -> None:
        OFFERED.setdefault(self.ins.opcode, set()).update(names)

    def flag(self, *names: str) -> bool:
        self.offer(names)
        return super().flag(*names)

    def choice(self, *names: str, default: str = "") -> str:
        self.offer(names)
        return super().choice(*names, default=default)

    def type(self, *names: str) -> decode.Type:
        self.offer(names)
        return super().type(*names)


def install(patch: pytest.MonkeyPatch) -> None:
    """Records from now on."""
    launch, together = emulator.launch, emulator.launch_together

    def done(program: emulator.Program, entry: str | None) -> None:
        for op in program.codes[entry or next(iter(program.codes))].ops:
            TESTED.setdefault(op.ins.opcode, set()).add(op.ins.mods)

    def recording_launch(program: emulator.Program, entry: str | None = None, **more: Any) -> emulator.Stats:
        stats = launch(program, entry, **more)
        done(program, entry)
        return stats

    def recording_together(launches: Any, options: emulator.Options | None = None) -> emulator.Stats:
        stats = together(launches, options)
        for kernel in launches:
            done(kernel.program, kernel.entry)
        return stats

    patch.setattr(decode, "Mods", RecordingMods)
    patch.setattr(emulator, "launch", recording_launch)
    patch.setattr(emulator, "launch_together", recording_together)


def missing() -> list[str]:
    """Opcodes without a test, and accepted modifiers that no tested instruction of the opcode has."""
    OFFERED.setdefault("cvt", set()).update((*ops_cvt.INT, *ops_cvt.FLOAT, *ops_cvt.PACKED))
    OFFERED.setdefault("mma", set()).update(t for kind in mma.KINDS.values() for t in kind)
    out = []
    for opcode in sorted(decode.DECODERS):
        tested = TESTED.get(opcode)
        if tested is None:
            out.append(opcode)
            continue
        seen = {m for mods in tested for m in mods}
        out += [f"{opcode} .{m}" for m in sorted(OFFERED.get(opcode, set()) - seen)]
    forms = TESTED.get("mma", set())
    for kind, types in mma.KINDS.items():
        for t in types:
            if not any(
                (f"kind::{kind}" in m if kind else not any(x.startswith("kind") for x in m)) and t in m for m in forms
            ):
                out.append(f"mma kind::{kind or 'none'} .{t}")
    for kind, vec, scale in sorted(mma.SCALES):
        if not any(f"kind::{kind}" in m and f"scale_vec::{vec}X" in m and scale in m for m in forms):
            out.append(f"mma kind::{kind} scale_vec::{vec}X .{scale}")
    return out
