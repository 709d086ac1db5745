"""Where each key and table of a TOML document stands. ``tomllib`` gives lines for syntax errors only."""

from __future__ import annotations

import re
from collections.abc import Iterator

#: The way to a value: keys, and indices into arrays of tables.
TomlPath = tuple[str | int, ...]

_KEY_PART = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)\s*\.?""")
_STRINGS = ('"""', "'''", '"', "'")


def key_lines(text: str) -> dict[TomlPath, int]:
    """Line numbers, from 1, of the keys and table headers of a valid document.

    Keys inside inline tables have none of their own.
    """
    lines: dict[TomlPath, int] = {}
    counts: dict[TomlPath, int] = {}
    table: TomlPath = ()
    for line, statement in _statements(text):
        if statement.startswith("[["):
            path = _resolve(_key_parts(statement[2:]), counts)
            index = counts.get(path, -1) + 1
            counts[path] = index
            table = (*path, index)
            lines[table] = line
            lines.setdefault(path, line)
        elif statement.startswith("["):
            table = _resolve(_key_parts(statement[1:]), counts)
            lines.setdefault(table, line)
        else:
            parts = _key_parts(statement)
            for end in range(1, len(parts) + 1):
                lines.setdefault((*table, *parts[:end]), line)
    return lines


def _resolve(parts: list[str], counts: dict[TomlPath, int]) -> TomlPath:
    """A header's path; names of arrays of tables before its end mean their latest table."""
    path: TomlPath = ()
    for position, part in enumerate(parts):
        path = (*path, part)
        if position < len(parts) - 1 and path in counts:
            path = (*path, counts[path])
    return path


def _key_parts(text: str) -> list[str]:
    parts: list[str] = []
    at = 0
    while match := _KEY_PART.match(text, at):
        part = match[1]
        parts.append(part[1:-1] if part[0] in "\"'" else part)
        at = match.end()
        if not match[0].rstrip().endswith("."):
            break
    return parts


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each key-value pair or header with the line it starts on; values may span lines."""
    at = start = 0
    depth = 0
    while at < len(text):
        opened = next((mark for mark in _STRINGS if text.startswith(mark, at)), None)
        if opened:
            at = _string_end(text, at, opened)
            continue
        char = text[at]
        if char == "#":
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            # A comment inside a value must not hide brackets; blanking it keeps positions.
            text = text[:at] + " " * (end - at) + text[end:]
            at = end
            continue
        depth += (char in "[{") - (char in "]}")
        if char == "\n" and depth == 0:
            yield from _statement(text, start, at)
            start = at + 1
        at += 1
    yield from _statement(text, start, len(text))


def _statement(text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    statement = text[start:end]
    stripped = statement.lstrip()
    if stripped:
        begin = start + len(statement) - len(stripped)
        yield text.count("\n", 0, begin) + 1, stripped


def _string_end(text: str, at: int, mark: str) -> int:
    """The position after the string that opens at ``at``."""
    at += len(mark)
    while at < len(text) and not text.startswith(mark, at):
        at += 2 if mark[0] == '"' and text[at] == "\\" else 1
    at += len(mark)
    # A multi-line string may end in up to two quotes of its own before the closing three.
    while len(mark) == 3 and text.startswith(mark[0], at):
        at += 1
    return at
