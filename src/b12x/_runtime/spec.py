"""KernelSpec: everything that is fixed when one kernel is compiled, as plain data.

A spec is a frozen dataclass of strings, integers and booleans. Its canonical text is the key under which a pack stores
the compiled artifact and under which ``plan`` asks for it. Quantities that live launches change (tokens, batch,
lengths, pages, problem sizes) are never fields of a spec. This module imports neither torch nor CUDA nor the DSL, so
the build and every planner can use it anywhere.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from b12x._runtime.abi import KernelABI

FieldValue = str | int | bool

#: Ops whose module has a name of its own, since a function of their group has theirs.
_MODULES = {"gemm.bmm": "gemm._bmm"}
_RESERVED = frozenset(",=: \n")


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Base of all specs.

    A subclass sets ``kernel``, the dotted name ``<group>.<op>`` or ``<group>.<op>.<variant family>``. Its device code
    is the module ``b12x.kernels.<group>.<file>``, where ``<file>`` is the rest of the name joined by underscores; that
    module has one function ``define(spec) -> (jit function, example arguments)`` that the build hands to
    ``cute.compile``. The subclass lives in the op's module ``spec`` and is listed there in ``SPECS``.
    """

    kernel: ClassVar[str]

    @cached_property
    def key(self) -> str:
        """Canonical text: ``kernel:field=value,field=value`` in the order of declaration."""
        fields = (f"{f.name}={_text(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{self.kernel}:{','.join(fields)}"

    @property
    def device_module(self) -> str:
        """Name of the module that holds the device code, relative to ``b12x.kernels``."""
        group, *rest = self.kernel.split(".")
        return f"{group}.{'_'.join(rest)}"

    def abi(self) -> KernelABI:
        """The kernel's parameters in PTX order and its launch contract."""
        raise NotImplementedError(f"{type(self).__name__} does not declare its ABI")


@dataclass(frozen=True)
class Role:
    """One kernel an op needs: candidates in order of preference, the last of which every complete pack holds."""

    name: str
    candidates: tuple[KernelSpec, ...]


def module_name(op: str) -> str:
    """Full name of the module of ``<group>.<op>``, whether or not there is such an op."""
    return f"b12x.{_MODULES.get(op, op)}"


def spec_from_key(key: str) -> KernelSpec:
    """Rebuild a spec from its key.

    Raises ValueError when the kernel, a field or a value is unknown, or when the text is not canonical.
    """
    kernel, colon, tail = key.partition(":")
    parts = kernel.split(".")
    if not colon or len(parts) < 2:
        raise ValueError(f"not a kernel key: {key!r}; expected '<group>.<op>:field=value,...'")
    module = f"{module_name('.'.join(parts[:2]))}.spec"
    try:
        specs: tuple[type[KernelSpec], ...] = importlib.import_module(module).SPECS
    except ModuleNotFoundError as error:
        raise ValueError(f"kernel key {key!r} names an op this version of b12x does not have ({module})") from error
    for cls in specs:
        if cls.kernel == kernel:
            break
    else:
        raise ValueError(f"unknown kernel {kernel!r} in key {key!r}; {module} has {[c.kernel for c in specs]}")
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    values: dict[str, FieldValue] = {}
    for item in tail.split(","):
        name, _, text = item.partition("=")
        if name not in fields:
            raise ValueError(f"unknown field {name!r} in kernel key {key!r}; {kernel} has {sorted(fields)}")
        values[name] = _parse(text, str(fields[name]))
    try:
        spec = cls(**values)
    except TypeError as error:
        raise ValueError(f"kernel key {key!r} misses a field of {kernel}: {error}") from error
    if spec.key != key:
        raise ValueError(f"kernel key {key!r} is not canonical; expected {spec.key!r}")
    return spec


def _text(value: FieldValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if not _RESERVED.isdisjoint(text):
        raise ValueError(f"spec value {value!r} holds a character that keys reserve")
    return text


def _parse(text: str, annotation: str) -> FieldValue:
    if annotation == "bool":
        return {"true": True, "false": False}[text] if text in ("true", "false") else text
    if annotation == "int":
        return int(text) if text.lstrip("-").isdigit() else text
    return text
