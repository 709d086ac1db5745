"""Which source files a kernel's machine code depends on, found without importing any of them.

Starting at the device module and the spec's module, imports are followed through the package by name. A module that is
named only at run time (``importlib.import_module``) is not seen; kernels do not do that.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import b12x.kernels  # noqa: F401  (module_file looks below it)
from b12x._runtime.spec import KernelSpec

from .errors import BuildError


def source_files(spec: KernelSpec) -> dict[str, Path]:
    """Module name to file of everything in ``b12x`` that the spec's kernel is made from."""
    device = f"b12x.kernels.{spec.device_module}"
    if module_file(device) is None:
        raise BuildError(
            f"{spec.key} names the device module {device}, which does not exist; expected "
            f"kernels/{spec.device_module.replace('.', '/')}.py with define(spec)"
        )
    found: dict[str, Path] = {}
    waiting = [device, type(spec).__module__]
    while waiting:
        name = waiting.pop()
        path = module_file(name)
        if name in found or path is None:
            continue
        found[name] = path
        waiting += _imports(name, path)
    return found


def source_sha256(spec: KernelSpec) -> str:
    """One hash over the names and contents of :func:`source_files`; folders and times do not enter it."""
    digest = hashlib.sha256()
    for name, path in sorted(source_files(spec).items()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def module_file(name: str) -> Path | None:
    """The file of a module of this package; None when there is none. Imports nothing.

    Looked up on the search path of the nearest package that is imported already: in a source tree or an editable
    install ``b12x.kernels`` does not lie in the folder of ``b12x``.
    """
    parts = name.split(".")
    if parts[0] != "b12x":
        return None
    for cut in range(len(parts), 0, -1):
        package = sys.modules.get(".".join(parts[:cut]))
        for root in getattr(package, "__path__", ()):
            base = Path(root, *parts[cut:])
            for path in (base / "__init__.py", base.with_suffix(".py")):
                if path.is_file() and (cut < len(parts) or path.name == "__init__.py"):
                    return path
    return None


def _imports(name: str, path: Path) -> tuple[str, ...]:
    return _parsed_imports(name, path, path.stat().st_mtime_ns)


@cache
def _parsed_imports(name: str, path: Path, _mtime: int) -> tuple[str, ...]:
    tree = ast.parse(path.read_bytes(), filename=str(path))
    return tuple(dict.fromkeys(n for n in _imported_names(name, path, tree) if n.startswith("b12x.")))


def _imported_names(name: str, path: Path, tree: ast.Module) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield base
            # "from package import name" may name a module as well as an attribute.
            yield from (f"{base}.{alias.name}" for alias in node.names)
