"""Basic blocks of a decoded entry: where they end, which registers may be read before they are written, and the order
in which a block runs when all lanes are active (independent matrix multiplies gathered into batches)."""

from __future__ import annotations

from .decode import Code, Op
from .mma import batch
from .parse import Instr


def lay_out(code: Code) -> None:
    """Fills ``ends`` and ``undefined``; adds the final ``ret`` where the text leaves it out."""
    ops = code.ops
    targets = {t for op in ops for t in _targets(op)}
    if not ops[-1].kind or len(ops) in targets:
        ret = Instr("ret", (), (), None, False, ops[-1].ins.line, "ret")
        ops.append(Op(ret, _nothing, _nothing, kind="exit"))
    n = len(ops)
    leaders = (
        targets | {0} | {i + 1 for i, op in enumerate(ops) if op.kind} | {i for i, op in enumerate(ops) if op.leader}
    )
    code.ends = [0] * n
    nearest = n
    for i in range(n - 1, -1, -1):
        code.ends[i] = i if ops[i].kind else nearest
        if ops[i].kind or i in leaders:
            nearest = i
    code.undefined = _undefined(code, sorted(x for x in leaders if x < n))


def _nothing(g: object) -> None:
    pass


def _targets(op: Op) -> tuple[int, ...]:
    if op.kind == "bra":
        return (op.data[1],)
    if op.kind == "brx":
        return tuple(op.data[1])
    return ()


def _undefined(code: Code, leaders: list[int]) -> tuple[int, ...]:
    """Registers that some path reads before any write (forward must-assign analysis over bit sets)."""
    ops = code.ops
    bounds = list(zip(leaders, [*leaders[1:], len(ops)], strict=True))
    number = {start: k for k, (start, _) in enumerate(bounds)}
    successors: list[list[int]] = []
    written: list[int] = []
    for start, end in bounds:
        w = 0
        for op in ops[start:end]:
            if op.ins.guard is None:
                for r in op.dsts:
                    w |= 1 << r
        written.append(w)
        last = ops[end - 1]
        out = [number[t] for t in _targets(last) if t in number]
        falls = last.kind not in ("exit", "bra", "brx") or (last.ins.guard is not None)
        if falls and end < len(ops):
            out.append(number[end])
        successors.append(out)
    everything = -1
    known = [everything] * len(bounds)
    known[0] = 0
    work = [0]
    while work:
        k = work.pop()
        after = known[k] | written[k]
        for s in successors[k]:
            new = known[s] & after
            if new != known[s]:
                known[s] = new
                work.append(s)
    bad: set[int] = set()
    for k, (start, end) in enumerate(bounds):
        have = known[k]
        for op in ops[start:end]:
            for r in op.srcs:
                if not have >> r & 1 and r in code.registers:
                    bad.add(r)
            if op.ins.guard is None:
                for r in op.dsts:
                    have |= 1 << r
    return tuple(sorted(bad))


def steps(code: Code, pc: int) -> list[Op]:
    """The ops from ``pc`` to the end of its block, with independent MMAs run together as late as they can be."""
    found = code.steps.get(pc)
    if found is not None:
        return found
    out: list[Op] = []
    pending: list[Op] = []
    reads: set[int] = set()
    writes: set[int] = set()

    def flush() -> None:
        if pending:
            out.append(batch(pending) if len(pending) > 1 else pending[0])
        pending.clear()
        reads.clear()
        writes.clear()

    for op in code.ops[pc : code.ends[pc]]:
        if op.mma is not None and op.ins.guard is None:
            clash = not writes.isdisjoint(op.srcs) or not writes.isdisjoint(op.dsts)
            if pending and (clash or pending[0].mma.form != op.mma.form):
                flush()
            pending.append(op)
            reads.update(op.srcs)
            writes.update(op.dsts)
            continue
        clash = not writes.isdisjoint(op.srcs) or not writes.isdisjoint(op.dsts) or not reads.isdisjoint(op.dsts)
        if clash:
            flush()
        out.append(op)
    flush()
    code.steps[pc] = out
    return out
