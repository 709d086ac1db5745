"""All operators, every mutant of a kernel, and drawing some of them by seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from . import rules_address, rules_data, rules_sync
from .kernel import Change, Kernel

Operator = Callable[[Kernel], Iterator[Change]]


def _operators() -> dict[str, Operator]:
    rules: tuple[Operator, ...] = (
        rules_sync.drop_barrier,
        rules_sync.skip_wait,
        rules_sync.wrong_parity,
        rules_sync.drop_commit,
        rules_sync.drop_group_wait,
        rules_sync.drop_fence,
        rules_sync.drop_expect,
        rules_sync.change_expect,
        rules_sync.drop_arrive,
        rules_sync.change_arrivals,
        rules_sync.change_ring,
        rules_sync.early_release,
        rules_data.swap_scales,
        rules_data.shift_selector,
        rules_data.swap_fragment,
        rules_data.shift_lane,
        rules_data.swap_cvt,
        rules_data.swap_halves,
        rules_data.flip_guard,
        rules_data.flip_select,
        rules_data.drop_zero,
        rules_data.drop_store,
        rules_data.drop_copy,
        rules_address.off_by_one,
        rules_address.misalign,
        rules_address.change_offset,
        rules_address.change_stride,
        rules_address.narrow_address,
    )
    return {rule.__name__.replace("_", "-"): rule for rule in rules}


#: Operators by name; what each does is its docstring.
OPERATORS: Mapping[str, Operator] = _operators()


@dataclass(frozen=True)
class Mutant:
    """One change of the kernel under a key."""

    key: str
    operator: str
    change: Change

    @property
    def name(self) -> tuple[str, str, str, int, str]:
        """What tells it from the others, as long as the kernel's text stays."""
        return self.key, self.operator, self.change.before, self.change.nth, self.change.after

    def __str__(self) -> str:
        return f"{self.operator}: {self.change.before} -> {self.change.after or '(dropped)'}"


def mutants(key: str, kernel: Kernel, operators: Iterable[str] | None = None) -> Iterator[Mutant]:
    """Every mutant of a kernel, in the order of operators and text.

    Left out are changes that leave the statement as it was and those of results that nothing reads.
    """
    for name in OPERATORS if operators is None else operators:
        by_place = {ins.start: ins for ins in kernel.instructions}
        for change in OPERATORS[name](kernel):
            first = min(start for start, _, _ in change.edits)
            ins = by_place.get(first)
            if change.before != change.after and (ins is None or kernel.matters(ins)):
                yield Mutant(key, name, change)


def order(kernels: Mapping[str, Kernel], seed: int, operators: Iterable[str] | None = None) -> list[Mutant]:
    """All mutants of some kernels in an order drawn by seed: one of each operator that matches, then another of each.

    A prefix is a sample that leaves no operator out, however rare its places are.
    """
    rng = random.Random(seed)
    piles: dict[str, list[Mutant]] = {}
    for key, kernel in sorted(kernels.items()):
        for mutant in mutants(key, kernel, operators):
            piles.setdefault(mutant.operator, []).append(mutant)
    for pile in piles.values():
        rng.shuffle(pile)
    names = list(piles)
    rng.shuffle(names)
    out = []
    while names:
        out += [piles[name].pop() for name in names]
        names = [name for name in names if piles[name]]
    return out
