"""The driver: a manifest's specs to artifacts, through the cache and worker processes, and artifacts to a pack."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from b12x._runtime import jit
from b12x._runtime.spec import KernelSpec, spec_from_key

from . import checks
from .cache import BuildCache, default_folder
from .compile_one import ArchBuild, CompiledArtifact, assemble
from .errors import BuildError, BuildFailedError
from .manifest import Manifest
from .pack import pack_contents, publish
from .progress import Progress
from .workers import Task, default_jobs, run_tasks

ARCHS = ("sm_120a", "sm_121a")


@dataclass(frozen=True)
class BuildOptions:
    """How to build. ``cache`` of None means that everything is compiled and nothing is kept.

    ``allow_unchecked`` packs kernels that have no check record; the default is what the environment says.
    """

    archs: tuple[str, ...] = ARCHS
    jobs: int = field(default_factory=default_jobs)
    cache: Path | None = None
    allow_unchecked: bool = field(default_factory=checks.unchecked_allowed)

    def __post_init__(self) -> None:
        if not self.archs or not set(self.archs) <= set(ARCHS):
            raise BuildError(f"archs are {', '.join(self.archs) or 'none'}; expected one or more of {', '.join(ARCHS)}")
        if self.jobs < 1:
            raise BuildError(f"jobs is {self.jobs}; expected 1 or more")

    @classmethod
    def from_environment(cls) -> BuildOptions:
        """Options that ``B12X_BUILD_ARCHS``, ``B12X_BUILD_JOBS`` and ``B12X_BUILD_CACHE`` give; unset means default."""
        archs = names_in(os.environ.get("B12X_BUILD_ARCHS", "")) or ARCHS
        jobs = os.environ.get("B12X_BUILD_JOBS", "").strip()
        if jobs and not jobs.isdecimal():
            raise BuildError(f"B12X_BUILD_JOBS is {jobs!r}; expected a whole number from 1")
        return cls(archs=archs, jobs=int(jobs) if jobs else default_jobs(), cache=default_folder())


@dataclass
class BuildReport:
    """What a build did. ``compiles`` counts ``cute.compile`` calls: one for each kernel and arch not cached."""

    name: str
    path: Path
    archs: tuple[str, ...]
    specs: int = 0
    compiled: int = 0
    cached: int = 0
    compiles: int = 0
    seconds: float = 0.0
    bytes: int = 0
    kernel_seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path), "archs": list(self.archs)}


def build_pack(manifest: Manifest, folder: Path, options: BuildOptions) -> BuildReport:
    """Compile everything that a manifest reaches and write the pack at ``folder``.

    Raises BuildFailedError, after every kernel was tried, when any of them failed, and BuildError when one has no check
    record; ``folder`` is then left as it was.
    """
    started = time.perf_counter()
    report = BuildReport(manifest.name, folder, options.archs)
    artifacts = compile_specs(manifest.specs(), options, report)
    records = checks.load()
    if not options.allow_unchecked:
        checks.refuse_unchecked(manifest.name, artifacts, records)
    index, blobs = pack_contents(manifest.name, artifacts, {manifest.path.name: manifest.sha256}, records)
    publish(folder, index, blobs)
    report.bytes = len(index) + sum(len(data) for data in blobs.values())
    report.seconds = time.perf_counter() - started
    return report


def compile_specs(specs: Sequence[KernelSpec], options: BuildOptions, report: BuildReport) -> list[CompiledArtifact]:
    """Compile and inspect specs, taking from the cache what it has. Raises BuildFailedError when any failed."""
    with Progress(len(specs), report.name) as progress:
        collected = _Collected(BuildCache(options.cache), options, report, progress)
        for spec in specs:
            collected.start(spec)
        tasks = collected.tasks()
        problem = jit.unavailable() if tasks else None
        if problem is not None:
            raise BuildError(f"pack {report.name!r}: {len(tasks)} kernels have to be compiled, but {problem}")
        for answer in run_tasks(tasks, options.jobs, progress.waiting):
            report.compiles += answer.compiles
            if answer.error is None:
                collected.add(answer.task.key, [ArchBuild.from_json(data) for data in answer.builds], answer.seconds)
            else:
                collected.fail(answer.task.key, answer.error)
    if collected.failures:
        raise BuildFailedError(report.name, collected.failures, len(specs))
    return collected.artifacts


class _Collected:
    """What is there of each kernel so far: builds from the cache, builds that workers made, finished artifacts."""

    def __init__(self, cache: BuildCache, options: BuildOptions, report: BuildReport, progress: Progress) -> None:
        self.artifacts: list[CompiledArtifact] = []
        self.failures: dict[str, str] = {}
        self._cache = cache
        self._options = options
        self._report = report
        self._progress = progress
        self._started: dict[str, tuple[KernelSpec, dict[str, ArchBuild]]] = {}

    def start(self, spec: KernelSpec) -> None:
        """Look for a spec in the cache; what is missing there becomes a task."""
        self._report.specs += 1
        try:
            _check_key(spec)
            found = {arch: build for arch in self._options.archs if (build := self._cache.load(spec, arch))}
        except BuildError as error:
            self.fail(spec.key, str(error))
            return
        self._started[spec.key] = spec, found
        if len(found) == len(self._options.archs):
            self._report.cached += 1
            self._finish(spec.key, "cached")

    def tasks(self) -> list[Task]:
        tasks = []
        for key, (_, found) in self._started.items():
            missing = tuple(arch for arch in self._options.archs if arch not in found)
            if missing:
                tasks.append(Task(key, missing))
        return tasks

    def add(self, key: str, builds: Sequence[ArchBuild], seconds: float) -> None:
        """Take a worker's builds of a kernel."""
        spec, found = self._started[key]
        for build in builds:
            self._cache.store(spec, build)
            found[build.arch] = build
        self._report.compiled += 1
        self._report.kernel_seconds[key] = seconds
        self._finish(key, f"{seconds:.2f} s")

    def fail(self, key: str, reason: str) -> None:
        self.failures[key] = reason
        self._progress.finished(key, "FAILED")

    def _finish(self, key: str, note: str) -> None:
        """Inspect a kernel. What came from the cache too: so inspection's rules need not be part of the cache key."""
        spec, found = self._started[key]
        try:
            artifact = assemble(spec, [found[arch] for arch in self._options.archs])
        except BuildError as error:
            self.fail(key, str(error))
            return
        self.artifacts.append(artifact)
        self._progress.finished(key, note)


def names_in(text: str) -> tuple[str, ...]:
    """The names in a list separated by commas."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _check_key(spec: KernelSpec) -> None:
    """A worker rebuilds the spec from its key, as the runtime does; one that does not survive that has no use."""
    try:
        rebuilt = spec_from_key(spec.key)
    except ValueError as error:
        raise BuildError(f"{spec.key}: its key cannot be read back: {error}") from error
    if rebuilt != spec:
        raise BuildError(f"{spec.key}: its key reads back as {rebuilt}, the planner's spec is {spec}")
