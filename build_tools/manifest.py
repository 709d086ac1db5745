"""Manifests: TOML that names ops with their Caps, expanded by the ops' own planners to the specs to build.

::

    name = "demo"
    description = "..."

    [[op]]
    op = "gemm.blockscaled"
    c_dtype = ["bfloat16", "float16"]      # a list stands for each of its values
    max_m = 8192
    n = 384
    k = 384

    [[model]]
    name = "all-MiniLM-L6-v2"
    [[model.op]]                           # the same, grouped under a model
    op = "quantization.nvfp4"
    m = 8192
    k = 384

An op's other keys are the fields of its Caps, all but the device. Two entries may reach the same spec.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import itertools
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import b12x
from b12x._runtime.spec import KernelSpec, module_name

from .errors import ManifestError
from .toml_lines import TomlPath, key_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_TOP_KEYS = ("name", "description", "op", "model")
_MODEL_KEYS = ("name", "description", "op")
_TYPE_NAMES = {int: "an integer", str: "a string", bool: "a boolean", float: "a number"}


@dataclass(frozen=True)
class OpRequest:
    """One set of Caps of one op, from one combination of a table's values."""

    op: str
    caps: Any
    model: str | None
    line: int


@dataclass(frozen=True)
class Manifest:
    """A validated manifest. ``requests`` are in the order of the file."""

    path: Path
    name: str
    description: str
    sha256: str
    requests: tuple[OpRequest, ...]

    def specs(self) -> tuple[KernelSpec, ...]:
        """Every candidate of every role that the manifest's Caps reach, each once, sorted by key."""
        found: dict[str, KernelSpec] = {}
        for request in self.requests:
            for role in _planner(request.op).roles(request.caps):
                found.update((spec.key, spec) for spec in role.candidates)
        return tuple(found[key] for key in sorted(found))


def load_manifest(path: Path) -> Manifest:
    """Read and validate a manifest. Raises ManifestError with file, line and key."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(path, 0, "", f"cannot be read: {error.strerror}; expected a TOML manifest") from None
    try:
        text = data.decode()
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ManifestError(path, line, "", f"byte {data[error.start]:#04x} is not UTF-8; TOML is UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise ManifestError(path, line, "", f"not TOML: {error}") from None
    reader = _Reader(path, key_lines(text))
    return reader.manifest(document, hashlib.sha256(data).hexdigest())


def known_ops() -> tuple[str, ...]:
    """Ops that have a planner, by their files; nothing is imported."""
    found = {
        f"{planner.parent.parent.name}.{planner.parent.name.lstrip('_')}"
        for root in b12x.__path__
        for planner in Path(root).glob("[a-z]*/[_a-z]*/planner.py")
        if (planner.parent / "spec.py").is_file()
    }
    return tuple(sorted(found))


class _Reader:
    def __init__(self, path: Path, lines: Mapping[TomlPath, int]) -> None:
        self._path = path
        self._lines = lines

    def manifest(self, document: dict[str, Any], sha256: str) -> Manifest:
        self._check_keys(document, (), _TOP_KEYS)
        name = self._string(document, (), "name")
        if not _NAME.fullmatch(name):
            raise self._error(
                ("name",),
                f"found {name!r}, expected lower-case letters, digits, '-' and '_', starting with a letter or digit",
            )
        requests = list(self._requests(document, (), None))
        for index, model in enumerate(self._tables(document, (), "model")):
            where: TomlPath = ("model", index)
            self._check_keys(model, where, _MODEL_KEYS)
            requests += self._requests(model, where, self._string(model, where, "name"))
        if not requests:
            raise self._error((), "names no op; expected at least one [[op]] or [[model.op]] table")
        return Manifest(
            path=self._path,
            name=name,
            description=self._string(document, (), "description", default=""),
            sha256=sha256,
            requests=tuple(requests),
        )

    def _requests(self, parent: dict[str, Any], where: TomlPath, model: str | None) -> Iterator[OpRequest]:
        for index, table in enumerate(self._tables(parent, where, "op")):
            yield from self._expand(table, (*where, "op", index), model)

    def _expand(self, table: dict[str, Any], where: TomlPath, model: str | None) -> Iterator[OpRequest]:
        op = self._string(table, where, "op")
        if op not in known_ops():
            raise self._error((*where, "op"), f"unknown op {op!r}; {_expected(op, known_ops())}")
        caps_type = _planner(op).Caps
        fields = {f.name: f for f in dataclasses.fields(caps_type) if f.name != "device"}
        choices = {name: value for name, value in table.items() if name != "op"}
        for name in choices:
            if name not in fields:
                raise self._error((*where, name), f"unknown field of {op}; {_expected(name, sorted(fields))}")
        for name, field in fields.items():
            if name not in choices and field.default is field.default_factory is dataclasses.MISSING:
                raise self._error(where, f"{op} needs the field {name!r}, which is missing")
        types = typing.get_type_hints(caps_type)
        values = [self._choices((*where, name), value, types[name]) for name, value in choices.items()]
        device = {"device": None} if "device" in {f.name for f in dataclasses.fields(caps_type)} else {}
        for combination in itertools.product(*values):
            arguments = dict(zip(choices, combination, strict=True))
            try:
                caps = caps_type(**device, **arguments)
                _planner(op).roles(caps)
            except (ValueError, TypeError) as error:
                blamed = next((name for name in choices if re.search(rf"\b{name}\b", str(error))), None)
                raise self._error((*where, blamed) if blamed else where, str(error)) from error
            yield OpRequest(op, caps, model, self._line(where))

    def _choices(self, where: TomlPath, value: Any, wanted: Any) -> list[Any]:
        """The values a key stands for, each checked against the field's type where that is a plain one."""
        values = value if isinstance(value, list) else [value]
        if not values:
            raise self._error(where, "found an empty list, expected a value or a list of values")
        for item in values:
            fits = type(item) is wanted or (wanted is float and type(item) is int)
            if wanted in _TYPE_NAMES and not fits:
                raise self._error(where, f"found {item!r}, expected {_TYPE_NAMES[wanted]} or a list of such")
        return [tuple(item) if isinstance(item, list) else item for item in values]

    def _check_keys(self, table: dict[str, Any], where: TomlPath, allowed: Sequence[str]) -> None:
        for key in table:
            if key not in allowed:
                raise self._error((*where, key), f"unknown key; {_expected(key, allowed)}")

    def _tables(self, parent: dict[str, Any], where: TomlPath, key: str) -> list[dict[str, Any]]:
        found = parent.get(key, [])
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            header = ".".join([*(part for part in where if isinstance(part, str)), key])
            raise self._error((*where, key), f"expected tables, each written [[{header}]]")
        return found

    def _string(self, table: dict[str, Any], where: TomlPath, key: str, default: str | None = None) -> str:
        value = table.get(key, default)
        if value is None:
            raise self._error(where, f"the key {key!r} is missing, expected a string")
        if not isinstance(value, str):
            raise self._error((*where, key), f"found {value!r}, expected a string")
        return value

    def _line(self, where: TomlPath) -> int:
        """The line of a key, or, where it has none of its own, of the nearest table around it."""
        while where and where not in self._lines:
            where = where[:-1]
        return self._lines.get(where, 1)

    def _error(self, where: TomlPath, text: str) -> ManifestError:
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
        return ManifestError(self._path, self._line(where), key, text)


def _planner(op: str) -> ModuleType:
    return importlib.import_module(f"{module_name(op)}.planner")


def _expected(found: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(found, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}expected one of {', '.join(known)}"
