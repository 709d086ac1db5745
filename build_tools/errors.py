"""Errors of the build. Each message says what was found, what is needed and, where it is not plain, what to do."""

from __future__ import annotations

from pathlib import Path


class BuildError(Exception):
    """A kernel or a pack that cannot be built."""


class RefusedError(BuildError):
    """An artifact that inspection refuses."""


class ManifestError(BuildError):
    """A fault in a manifest, with its place."""

    def __init__(self, path: Path, line: int, key: str, text: str) -> None:
        super().__init__(f"{path}:{line}: {key}: {text}" if key else f"{path}:{line}: {text}")
        self.path = path
        self.line = line
        self.key = key


class BuildFailedError(BuildError):
    """Some kernels of a pack failed; ``failures`` maps each one's key to its reason."""

    def __init__(self, name: str, failures: dict[str, str], total: int) -> None:
        lines = [f"pack {name!r} was not written: {len(failures)} of {total} kernels failed"]
        lines += [f"  {key}\n    {reason}" for key, reason in sorted(failures.items())]
        super().__init__("\n".join(lines))
        self.failures = failures
