"""Control flow of a disassembled kernel: basic blocks, dominators and natural loops."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from b12x.cli.sass import find_nvdisasm

#: Bytes of an instruction.
SIZE = 16
_TARGET = re.compile(r"(?:^|,)(0x[0-9a-f]+)$")
#: Branches of which nothing is known but that they go somewhere else.
_INDIRECT = ("BRX", "JMX")


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``predicate`` is its guard, such as ``@!P0``, or the empty text."""

    address: int
    opcode: str
    operands: str = ""
    predicate: str = ""

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        if self.name not in ("BRA", "JMP"):
            return None
        found = _TARGET.search(self.operands.replace(" ", ""))
        if found is None:
            raise ValueError(f"no target in {self.opcode} {self.operands} at {self.address:#x}")
        return int(found[1], 16)

    @property
    def conditional(self) -> bool:
        """Whether a branch or exit may not be taken: by its guard, or by a uniform predicate among its operands."""
        return self.predicate not in ("", "@PT", "@UPT") or bool(re.match(r"!?U?P\d", self.operands))

    @property
    def ends_block(self) -> bool:
        return self.name in ("BRA", "JMP", "EXIT", "RET")


@dataclass(frozen=True)
class Loop:
    """A natural loop: its head and the instructions of its blocks, in order of address."""

    head: int
    blocks: frozenset[int]
    body: tuple[Instruction, ...]

    def count(self, test: Callable[[Instruction], bool]) -> int:
        return sum(map(test, self.body))

    @property
    def size(self) -> int:
        """Instructions that issue; a NOP does too."""
        return len(self.body)


class Graph:
    """The basic blocks of one kernel, by the address of their first instruction.

    A call is one instruction: the compiler's subroutines, such as a division's rare cases, are in no loop.
    """

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self.instructions = tuple(instructions)
        if any(i.name in _INDIRECT for i in self.instructions):
            names = sorted({i.opcode for i in self.instructions if i.name in _INDIRECT})
            raise ValueError(f"the kernel has {', '.join(names)}, whose targets are not known")
        ends = [i for i in self.instructions if i.ends_block]
        leaders = {self.instructions[0].address}
        leaders |= {i.target for i in ends if i.target is not None}
        leaders |= {i.address + SIZE for i in ends}
        self.blocks: dict[int, list[Instruction]] = {}
        for i in self.instructions:
            if i.address in leaders:
                block = self.blocks[i.address] = []
            block.append(i)

    @cached_property
    def successors(self) -> dict[int, tuple[int, ...]]:
        found = {}
        for start, block in self.blocks.items():
            last = block[-1]
            after = last.address + SIZE
            out = []
            if last.target is not None:
                out.append(last.target)
            if (not last.ends_block or last.conditional) and after in self.blocks:
                out.append(after)
            found[start] = tuple(dict.fromkeys(out))
        return found

    @cached_property
    def order(self) -> list[int]:
        """Reachable blocks, each after its predecessors where there is no loop (reverse postorder)."""
        seen: set[int] = set()
        out: list[int] = []
        first = next(iter(self.blocks))
        stack = [(first, iter(self.successors[first]))]
        seen.add(first)
        while stack:
            block, rest = stack[-1]
            following = next((s for s in rest if s not in seen), None)
            if following is None:
                out.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.successors[following])))
        return out[::-1]

    @cached_property
    def predecessors(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for successor in self.successors[block]:
                found[successor].append(block)
        return found

    @cached_property
    def dominators(self) -> dict[int, frozenset[int]]:
        """Of each block, the blocks that every path to it passes, itself included."""
        everything = frozenset(self.order)
        found = dict.fromkeys(self.order, everything)
        found[self.order[0]] = frozenset(self.order[:1])
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                common = frozenset.intersection(*(found[p] for p in self.predecessors[block]))
                new = common | {block}
                if new != found[block]:
                    found[block], changed = new, True
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, those with the same head as one, inner ones before those around them."""
        bodies: dict[int, set[int]] = {}
        for block in self.order:
            for head in self.successors[block]:
                if head not in self.dominators[block]:
                    continue
                body = bodies.setdefault(head, {head})
                work = [block]
                while work:
                    member = work.pop()
                    if member not in body:
                        body.add(member)
                        work += self.predecessors[member]
        loops = [
            Loop(head, frozenset(body), tuple(i for start in sorted(body) for i in self.blocks[start]))
            for head, body in bodies.items()
        ]
        return sorted(loops, key=lambda loop: (loop.size, loop.head))

    def innermost(self, test: Callable[[Instruction], bool]) -> list[Loop]:
        """Loops that hold an instruction and no smaller loop that holds one."""
        holding = [loop for loop in self.loops if loop.count(test)]
        return [
            loop for loop in holding if not any(other.blocks < loop.blocks for other in holding if other is not loop)
        ]

    def opcodes(self) -> Counter[str]:
        return Counter(i.opcode for i in self.instructions)


def disassemble(cubin: bytes) -> tuple[Instruction, ...]:
    """The instructions of a cubin that holds one kernel; padding after its end is left out."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([find_nvdisasm(), "-c", "-json", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"nvdisasm failed: {done.stderr.strip()}")
    return parse(json.loads(done.stdout))


def parse(data: Any) -> tuple[Instruction, ...]:
    """What ``nvdisasm -c -json`` prints."""
    functions = data[1]
    if len(functions) != 1:
        raise ValueError(f"the cubin has {len(functions)} functions; needed is one")
    found = [
        Instruction(SIZE * n, i["opcode"], i.get("operands", ""), i.get("predicate", ""))
        for n, i in enumerate(functions[0]["sass-instructions"])
    ]
    while found and found[-1].name == "NOP":
        found.pop()
    return tuple(found)


def is_mma(i: Instruction) -> bool:
    """A multiply of the tensor cores: OMMA (FP4), QMMA (FP8), HMMA and their like."""
    return i.name in ("OMMA", "QMMA", "HMMA", "IMMA")


def is_bulk_copy(i: Instruction) -> bool:
    """A load by TMA or a bulk copy: what a producer's loop is known by."""
    return i.name in ("UTMALDG", "UBLKCP")


def is_global(i: Instruction) -> bool:
    """A thread's own access to global memory, LDGSTS (cp.async) among them."""
    return i.name in ("LDG", "STG", "LDGSTS", "RED", "ATOMG", "LD", "ST")


def width(i: Instruction) -> int:
    """Bytes of an access, from its modifiers; 4 where they say nothing."""
    for modifier in i.opcode.split(".")[1:]:
        if modifier in ("U8", "S8"):
            return 1
        if modifier in ("U16", "S16"):
            return 2
        if modifier in ("64", "128", "256"):
            return int(modifier) // 8
    return 4
