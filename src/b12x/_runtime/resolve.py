"""From a role of a plan to a kernel that is ready to launch.

Order: process memory, packs, the JIT's disk cache, a JIT compile; frozen: the first two only. Of a role's candidates
the first that is present is taken, whether or not it is in memory already, so the choice does not depend on history.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from b12x import __version__
from b12x._runtime import freeze, jit, packs
from b12x._runtime.errors import KernelNotFoundError, KernelResolutionFrozenError, PackError
from b12x._runtime.launch import LoadedKernel, Target
from b12x._runtime.pack import Artifact, Pack
from b12x._runtime.spec import KernelSpec, Role

_lock = threading.RLock()
#: Held while a kernel is compiled, one at a time; taken before ``_lock``, so that others resolve what is there.
_compiling = threading.Lock()


class _Kept(NamedTuple):
    """A loaded kernel, and where it came from when it was loaded."""

    kernel: LoadedKernel
    source: str


_memory: dict[tuple[Target, str], _Kept] = {}


@dataclass(frozen=True)
class ResolvedKernel:
    """A kernel that a plan uses and why; ``origin`` is ``memory``, ``pack:<name>``, ``jit-cache`` or ``jit``."""

    spec: KernelSpec
    loaded: LoadedKernel
    origin: str
    why: str


def resolve_all(op: str, roles: Iterable[Role], target: Target, caps: Any) -> dict[str, ResolvedKernel]:
    """Resolve every role of a plan; see :func:`resolve`."""
    return {role.name: resolve(role, target, op, lambda: manifest_hint(op, caps)) for role in roles}


def resolve(role: Role, target: Target, op: str, manifest_hint: str | Callable[[], str] = "") -> ResolvedKernel:
    """Find and load the kernel of one role.

    Parameters
    ----------
    role
        Candidate specs in order of preference.
    target
        Where it will run.
    op
        Qualified name of the op, for messages.
    manifest_hint
        The manifest lines that would put the kernel into a pack, or a function that makes them.

    Raises
    ------
    KernelResolutionFrozenError
        No candidate is in memory or in a pack, and resolution is frozen.
    KernelNotFoundError
        The same while it is not frozen, but it cannot be compiled here; or the current stream is being captured, and
        the kernel is not in memory.
    PackError
        A pack is damaged, or was made by another version or for another ABI.
    """
    ready = _memory.get((target, role.candidates[0].key))
    if ready is not None:
        return _resolved(role, target, role.candidates[0], "memory")
    notes: list[str] = []
    present = _present(role, target, op, notes)
    if present is not None:
        return present
    hint = manifest_hint() if callable(manifest_hint) else manifest_hint
    missed = _missed(role, target, op, notes, hint)
    with _compiling:
        # While this thread waited, another may have compiled the kernel, or frozen resolution.
        present = _present(role, target, op, [])
        if present is not None:
            return present
        missed = _missed(role, target, op, notes, hint)
        spec = role.candidates[0]
        artifact, pack, origin = jit.obtain(spec, target.arch, missed)
        with _lock:
            _memory[target, spec.key] = _Kept(target.load(artifact, pack, spec), origin)
            return _resolved(role, target, spec, origin)


def _present(role: Role, target: Target, op: str, notes: list[str]) -> ResolvedKernel | None:
    """The first candidate that is in memory or in a pack, loaded."""
    with _lock:
        for spec in role.candidates:
            if (target, spec.key) in _memory:
                return _resolved(role, target, spec, "memory")
            found = find(spec, target, notes)
            if found is not None:
                artifact, pack = found
                if target.capturing():
                    raise KernelNotFoundError(
                        f"{op}: {spec.key} is in pack {pack.name!r} but not loaded on {target.name}, and nothing is "
                        "loaded during CUDA-graph capture: plan, or call the one-shot once, before the capture"
                    )
                _memory[target, spec.key] = _Kept(target.load(artifact, pack, spec), f"pack:{pack.name}")
                return _resolved(role, target, spec, f"pack:{pack.name}")
    return None


def _missed(role: Role, target: Target, op: str, notes: list[str], hint: str) -> str:
    """What to say should a compile fail; raises where none may be tried."""
    if freeze.kernel_resolution_frozen():
        reason = freeze.freeze_reason() or "none given"
        state = f"kernel resolution is frozen (reason: {reason}), so cute.compile may not add one"
        raise KernelResolutionFrozenError(_miss(role, target, op, notes, hint, state))
    if target.capturing():
        state = "compile miss during CUDA-graph capture: plan, or call the one-shot once, before the capture"
        raise KernelNotFoundError(_miss(role, target, op, notes, hint, state))
    return _miss(role, target, op, notes, hint, "it would have to be compiled here")


def find(spec: KernelSpec, target: Target, notes: list[str] | None = None) -> tuple[Artifact, Pack] | None:
    """The artifact that a pack holds for a spec and target, without loading it.

    ``notes`` gets a line for every pack that holds the spec in a form which the target cannot use. Raises PackError
    when a pack was made for another ABI, PackConflictError when two packs differ.
    """
    for pack, artifact in packs.holders(spec.key):
        check_abi(spec, artifact, pack)
        missing = target.missing(artifact)
        if missing is None:
            return artifact, pack
        if notes is not None:
            notes.append(f"pack {pack.name!r} {missing}: {spec.key}")
    return None


def check_abi(spec: KernelSpec, artifact: Artifact, pack: Pack) -> None:
    """Raise PackError where a pack's kernel was made for another ABI than the spec has in the running code."""
    expected = spec.abi().fingerprint
    if artifact.fingerprint != expected:
        raise PackError(
            f"pack {pack.name!r} at {pack.path} (b12x {pack.b12x_version}, DSL {pack.dsl}) holds {spec.key} with "
            f"ABI fingerprint {artifact.fingerprint}, but this code (b12x {__version__}) expects {expected}; build "
            "the pack again from this source with `b12x build`, or reinstall b12x"
        )


def manifest_hint(op: str, caps: Any) -> str:
    """The manifest lines that ask for what these Caps need."""
    lines = ["[[op]]", f'op = "{op}"']
    for field in dataclasses.fields(caps):
        value = getattr(caps, field.name)
        if field.name != "device" and value is not None:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines)


def nearest(spec: KernelSpec, limit: int = 3) -> list[tuple[Pack, str, dict[str, str]]]:
    """Keys of the same kernel in packs, with the fields that differ; the fewest differences come first."""
    wanted = _fields(spec.key)
    found = []
    for pack, key in packs.keys_of(spec.kernel):
        fields = _fields(key)
        names = [name for name in {**wanted, **fields} if wanted.get(name) != fields.get(name)]
        gap = sum(_gap(wanted.get(name, ""), fields.get(name, "")) for name in names)
        found.append((len(names), gap, key, pack, {name: fields.get(name, "-") for name in names}))
    found.sort(key=lambda item: item[:3])
    return [(pack, key, differing) for _, _, key, pack, differing in found[:limit]]


def clear() -> None:
    """Forget what was resolved."""
    with _lock:
        _memory.clear()


def _resolved(role: Role, target: Target, spec: KernelSpec, origin: str) -> ResolvedKernel:
    rank = role.candidates.index(spec)
    kept = _memory[target, spec.key]
    why = f"{role.name}: {spec.key} from {origin}"
    if origin == "memory":
        why += f", first from {kept.source}"
    if len(role.candidates) > 1:
        why += f", candidate {rank + 1} of {len(role.candidates)}"
    if rank:
        why += f"; no pack has {', '.join(better.key for better in role.candidates[:rank])} for {target.name}"
    return ResolvedKernel(spec, kept.kernel, origin, why)


def _miss(role: Role, target: Target, op: str, notes: list[str], hint: str, state: str) -> str:
    """What was looked for, where, what is near it, and how to add it; ``state`` is why that is not done now."""
    spec = role.candidates[0]
    lines = [f"{op}: no kernel for role {role.name!r} on {target.name} ({target.arch}); {state}"]
    for number, candidate in enumerate(role.candidates):
        digest = hashlib.sha256(candidate.key.encode()).hexdigest()[:12]
        lines.append(f"  {'or    ' if number else 'wanted'}: {candidate.key} (key sha256 {digest})")
    held = [
        f"{pack.name!r} ({', '.join(pack.archs)}; {len(pack.entries)} kernels) at {pack.path}"
        for pack in packs.installed()
    ]
    lines.append(f"  looked in: memory, packs {'; '.join(held) or 'none found'}")
    lines += [f"  but: {note}" for note in notes]
    near = nearest(spec)
    for pack, key, differing in near:
        fields = ", ".join(f"{name}={value}" for name, value in differing.items())
        lines.append(f"  nearest: {key} in pack {pack.name!r} (differs: {fields or 'nothing'})")
    if not near:
        lines.append(f"  nearest: none, no pack holds any {spec.kernel} kernel")
    lines.append(
        "  to add it: `b12x build my.toml -o dist`, then put dist/my on B12X_PACK_PATH (or --wheel, and install it)"
    )
    if hint:
        lines += ["  with my.toml as", '    name = "my"']
    lines += [f"    {line}" for line in hint.splitlines()]
    return "\n".join(lines)


def _fields(key: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in key.partition(":")[2].split(",") if "=" in item)


def _gap(a: str, b: str) -> float:
    """Relative distance of two numbers, 1 for other values."""
    try:
        x, y = float(a), float(b)
    except ValueError:
        return 1.0
    return abs(x - y) / max(abs(x), abs(y), 1.0)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
