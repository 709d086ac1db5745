"""Compile one spec: trace its device module once per arch, take PTX and cubin, inspect, and hand the artifact back.

Needs the pinned DSL, but no GPU and no driver, and leaves no file behind. The build calls this in worker processes, the
JIT in the user's process.
"""

from __future__ import annotations

import base64
import functools
import importlib
import os
import re
import shlex
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from b12x._runtime import counters
from b12x._runtime.abi import LaunchContract
from b12x._runtime.spec import KernelSpec, spec_from_key

from .cubin import Cubin
from .errors import BuildError, RefusedError
from .inspection import inspect_kernel
from .ptx import normalise_target
from .sources import source_sha256
from .tracing import LaunchTrace

DSL_VERSION = "4.8.1"
DSL_REQUIREMENT = f"nvidia-cutlass-dsl[cu13]=={DSL_VERSION}"
#: The DSL's other back end (cu12) carries ptxas 12.9, whose code for these kernels is much slower.
PTXAS_MAJOR = 13

# The DSL keeps a compilation's state in module globals, and importing it here changes the environment for a moment.
_lock = threading.RLock()

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class ArchBuild:
    """One spec compiled for one arch, as the DSL gave it: not inspected yet."""

    arch: str
    ptx: str
    cubin: bytes
    launch: LaunchContract

    def to_json(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "ptx": self.ptx,
            "cubin": base64.b64encode(self.cubin).decode(),
            "launch": vars(self.launch).copy(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ArchBuild:
        launch = dict(data["launch"])
        for name in ("block", "cluster"):
            launch[name] = tuple(launch[name])
        return cls(data["arch"], data["ptx"], base64.b64decode(data["cubin"]), LaunchContract(**launch))


@dataclass(frozen=True)
class CompiledArtifact:
    """One spec, compiled for every arch asked for and inspected. ``ptx`` has its target line normalised."""

    key: str
    abi: dict[str, object]
    fingerprint: str
    source: str
    entry: str
    ptx: str
    cubins: Mapping[str, bytes]
    resources: Mapping[str, Cubin]
    dsl: str
    ptxas: str


def compile_spec(spec_or_key: KernelSpec | str, archs: Sequence[str]) -> CompiledArtifact:
    """Compile a spec, or the spec of a key, for each arch, and inspect the result.

    Raises BuildError, naming the spec, when the DSL is missing or of another version, when the kernel does not compile,
    or when inspection refuses it.
    """
    spec = spec_from_key(spec_or_key) if isinstance(spec_or_key, str) else spec_or_key
    return assemble(spec, [compile_arch(spec, arch) for arch in archs])


def compile_arch(spec: KernelSpec, arch: str) -> ArchBuild:
    """Trace and compile a spec for one arch. Each call is one ``cute.compile`` call."""
    with _lock:
        ptx, cubin, launch = _compile(spec, arch)
    try:
        normalised, target = normalise_target(ptx)
    except ValueError as error:
        raise RefusedError(f"{spec.key} is refused: {error}") from error
    if target != arch:
        raise RefusedError(f"{spec.key} is refused: the PTX is for {target}, expected {arch}")
    return ArchBuild(arch, normalised, cubin, launch)


def _compile(spec: KernelSpec, arch: str) -> tuple[str, bytes, LaunchContract]:
    try:
        cute = import_dsl()
    except BuildError as error:
        raise BuildError(f"{spec.key} cannot be compiled: {error}") from error
    define = _device_definition(spec)
    trace = LaunchTrace()
    with tempfile.TemporaryDirectory(prefix="b12x-build-") as dump, warnings.catch_warnings():
        # The DSL's advice is not for users; under a filter that raises, it would take its own warning for a fault.
        warnings.simplefilter("ignore")
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {shlex.quote(dump)}"
        try:
            function, arguments = define(spec)
            counters.count_compile()
            compiled = cute.compile(function, *arguments, options=options, trace_finalize_hooks=trace.on_trace)
            ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
            launch = trace.contract(compiled.ir_module)
        except BuildError as error:
            raise BuildError(f"{spec.key}: {error}") from error
        except Exception as error:
            # The DSL raises many types, some of them its own; whatever it is, the spec is what the reader needs.
            text = _ANSI.sub("", str(error)).strip()
            raise BuildError(f"{spec.key} does not compile for {arch}: {type(error).__name__}: {text}") from error
    return ptx, cubin, launch


def assemble(spec: KernelSpec, builds: Iterable[ArchBuild]) -> CompiledArtifact:
    """Join the archs of one spec to an artifact. Raises RefusedError where inspection or the join refuses."""
    first, *others = builds
    for other in others:
        if other.ptx != first.ptx:
            raise RefusedError(
                f"{spec.key} is refused: its PTX for {other.arch} differs from that for {first.arch} beyond the target "
                f"line ({_first_difference(first.ptx, other.ptx)}); a pack stores one PTX for all archs"
            )
    cubins = {build.arch: build.cubin for build in (first, *others)}
    inspected = inspect_kernel(spec, first.ptx, cubins, first.launch)
    versions = {cubin.ptxas for cubin in inspected.cubins.values()}
    ptxas = versions.pop()
    if versions or ptxas.split(".")[0] != str(PTXAS_MAJOR):
        raise RefusedError(
            f"{spec.key} is refused: assembled by ptxas {', '.join(sorted({ptxas, *versions}))}, expected "
            f"{PTXAS_MAJOR}.x; pip install '{DSL_REQUIREMENT}'"
        )
    abi = spec.abi()
    return CompiledArtifact(
        key=spec.key,
        abi=abi.to_json(),
        fingerprint=abi.fingerprint,
        source=source_sha256(spec),
        entry=inspected.entry,
        ptx=first.ptx,
        cubins=cubins,
        resources=inspected.cubins,
        dsl=DSL_VERSION,
        ptxas=ptxas,
    )


def _first_difference(a: str, b: str) -> str:
    pairs = zip(a.splitlines(), b.splitlines(), strict=False)
    for number, (left, right) in enumerate(pairs, start=1):
        if left != right:
            return f"line {number}: {left.strip()!r} and {right.strip()!r}"
    return f"{len(a)} and {len(b)} characters"


def _device_definition(spec: KernelSpec) -> Any:
    name = f"b12x.kernels.{spec.device_module}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise BuildError(f"{spec.key}: cannot import its device module {name}: {error}") from error
    try:
        return module.define
    except AttributeError as error:
        raise BuildError(f"{spec.key}: {name} has no define(spec) -> (jit function, example arguments)") from error


@functools.cache
def import_dsl() -> Any:
    """The DSL's ``cute`` module, deaf to the DSL settings of the environment: they would change what is compiled.

    Raises BuildError when the DSL is missing, of another version, or broken.
    """
    try:
        version = metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        raise BuildError(
            f"nvidia-cutlass-dsl is not installed, {DSL_VERSION} is needed; pip install 'b12x[jit]'"
        ) from None
    if version != DSL_VERSION:
        raise BuildError(
            f"found nvidia-cutlass-dsl {version}, {DSL_VERSION} is needed; pip install '{DSL_REQUIREMENT}'"
        )
    with tempfile.TemporaryDirectory(prefix="b12x-dsl-") as folder, _dsl_environment(folder):
        try:
            import cutlass.cute as cute
        except ImportError as error:
            raise BuildError(
                f"nvidia-cutlass-dsl {version} does not import: {error}; pip install '{DSL_REQUIREMENT}'"
            ) from error
    return cute


@contextmanager
def _dsl_environment(folder: str) -> Iterator[None]:
    """The DSL's variables while it is imported, which is when it reads them: none of the user's, two of ours."""
    found = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("CUTE_")}
    # It makes its cache folders, one for each of its two dialects, though nothing here is ever cached in them.
    ours = {
        "CUTE_DSL_CACHE_DIR": folder,
        "CUTE_EXPERIMENTAL_DSL_CACHE_DIR": folder,
        "CUTE_DSL_FILTER_STACKTRACE": "0",  # do not replace the process's exception hook
    }
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
        os.environ.update(found)
