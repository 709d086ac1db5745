"""How commands print."""

from __future__ import annotations

from collections.abc import Sequence


class CommandError(Exception):
    """A command cannot do what it was asked to; the message goes to the user and the exit status is 1."""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns side by side, numbers to the right."""
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [all(isinstance(row[c], int) for row in rows) for c in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), *map(line, cells)])


def fields(pairs: Sequence[tuple[str, object]]) -> str:
    """Names and values, one pair a line."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)
