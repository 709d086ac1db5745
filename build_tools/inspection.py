"""Inspection: what a compiled kernel must be before it may enter a pack.

Refused are an entry that is missing or not alone, an ABI or launch contract that differs from the spec's, local memory
(spills), more shared memory than an SM120 block can have, a cubin of another arch, and line info. A spec may allow
local memory with a reason, in ``allow_local_memory: ClassVar[str]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from b12x._runtime.abi import LaunchContract, Pointer
from b12x._runtime.spec import KernelSpec

from .cubin import Cubin, read_cubin
from .errors import BuildError, RefusedError
from .ptx import PtxEntry, entries, has_line_info

#: Shared memory one block can have on SM120 and SM121 (99 KiB), static and dynamic together.
MAX_SHARED_MEMORY = 101_376


@dataclass(frozen=True)
class Inspected:
    """What inspection found: the entry's name and each arch's resources."""

    entry: str
    cubins: Mapping[str, Cubin]


def inspect_kernel(spec: KernelSpec, ptx: str, cubins: Mapping[str, bytes], traced: LaunchContract) -> Inspected:
    """Check one kernel's PTX and cubins against its spec.

    ``traced`` is the launch that the device module's jit function asks for. Raises RefusedError, which names the spec
    and lists every fault with what was found and what is needed.
    """
    faults: list[str] = []
    entry = _find_entry(ptx, faults)
    if entry is not None:
        faults += _parameter_faults(spec, entry)
        faults += _launch_faults(spec, entry, traced)
    if has_line_info(ptx):
        faults.append("the PTX has line info, which embeds absolute paths; compile without CUTE_DSL_LINEINFO")
    read: dict[str, Cubin] = {}
    for arch, data in cubins.items():
        try:
            read[arch] = read_cubin(data)
        except BuildError as error:
            faults.append(f"{arch}: {error}")
            continue
        faults += [f"{arch}: {fault}" for fault in _cubin_faults(spec, arch, read[arch], entry)]
    if faults or entry is None:
        raise RefusedError(f"{spec.key} is refused: " + "; ".join(faults))
    return Inspected(entry.name, read)


def _find_entry(ptx: str, faults: list[str]) -> PtxEntry | None:
    try:
        found = entries(ptx)
    except ValueError as error:
        faults.append(f"{error}; use the parameter kinds of b12x._runtime.abi")
        return None
    if len(found) != 1:
        names = ", ".join(e.name for e in found) or "none"
        faults.append(f"the PTX has {len(found)} entries ({names}), expected exactly one; a spec is one kernel")
        return None
    return found[0]


def _parameter_faults(spec: KernelSpec, entry: PtxEntry) -> list[str]:
    declared = spec.abi().params
    wanted, found = [p.ptx() for p in declared], [p.type for p in entry.params]
    if wanted != found:
        needed = ", ".join(f"{p.name} {p.ptx()}" for p in declared)
        return [f"the PTX entry takes ({', '.join(found)}), the spec declares ({needed})"]
    return [
        f"the PTX assumes {compiled.pointee_align}-byte alignment of {p.name}, the spec promises {p.align}; raise "
        f"the spec's align or lower assumed_align in the device module"
        for p, compiled in zip(declared, entry.params, strict=True)
        if isinstance(p, Pointer) and compiled.pointee_align > p.align
    ]


def _launch_faults(spec: KernelSpec, entry: PtxEntry, traced: LaunchContract) -> list[str]:
    declared, faults = spec.abi().launch, []
    if entry.block != declared.block:
        faults.append(f"the PTX requires a block of {entry.block}, the spec declares {declared.block}")
    if traced.cluster != declared.cluster:
        faults.append(f"the kernel is launched with clusters of {traced.cluster}, the spec declares {declared.cluster}")
    if traced.programmatic_launch != declared.programmatic_launch:
        faults.append(
            f"the kernel is launched with programmatic_launch={traced.programmatic_launch}, the spec declares "
            f"{declared.programmatic_launch}"
        )
    if traced.dynamic_smem > declared.dynamic_smem:
        faults.append(
            f"the kernel allocates {traced.dynamic_smem} bytes of dynamic shared memory, the spec declares "
            f"{declared.dynamic_smem}"
        )
    return faults


def _cubin_faults(spec: KernelSpec, arch: str, cubin: Cubin, entry: PtxEntry | None) -> list[str]:
    faults = []
    if cubin.arch != arch:
        faults.append(f"the cubin is for {cubin.arch}, expected {arch}")
    if entry is not None and cubin.entries != (entry.name,):
        names = ", ".join(cubin.entries) or "none"
        faults.append(f"the cubin's entries are {names}, expected {entry.name}")
    dynamic = spec.abi().launch.dynamic_smem
    total = cubin.static_smem + dynamic
    if total > MAX_SHARED_MEMORY:
        faults.append(
            f"{total} bytes of shared memory ({cubin.static_smem} static, {dynamic} dynamic), at most "
            f"{MAX_SHARED_MEMORY} fit a block"
        )
    if cubin.local_bytes and not getattr(spec, "allow_local_memory", ""):
        faults.append(
            f"{cubin.local_bytes} bytes of local memory per thread with {cubin.registers} registers, 0 allowed; "
            f"reduce live values, or give the spec allow_local_memory with a reason"
        )
    return faults
