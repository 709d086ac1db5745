"""Launching an entry: parameters, memory, and one CTA or cluster after another."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from b12x._runtime.abi import Region, TensorMapValue

from . import tma
from .async_ import CopyQueue
from .decode import Code, decode
from .errors import LaunchError
from .machine import Cta, Dim3, RegisterFile
from .memory import GlobalMemory, SharedMemory, Space, share_shadows
from .options import Options, Stats
from .parse import Entry, Variable, parse_module
from .proxies import GlobalStores
from .races import Races
from .schedule import Scheduler

Array = NDArray[Any]
Argument = int | float | bytes | TensorMapValue


@dataclass
class Program:
    """A decoded PTX module; ``entries`` holds the parameter lists and block directives by entry name."""

    entries: dict[str, Entry]
    codes: dict[str, Code]
    variables: dict[str, Variable]


@dataclass(frozen=True)
class Launch:
    """One kernel for :func:`launch_together`; the fields are the arguments of :func:`launch`."""

    program: Program
    entry: str | None = None
    grid: Sequence[int] = (1,)
    block: Sequence[int] = (1,)
    cluster: Sequence[int] = (1, 1, 1)
    dynamic_smem: int = 0
    params: Sequence[Argument] = ()
    regions: Sequence[Region] = ()


def parse(ptx_text: str) -> Program:
    """Decodes PTX once; raises UnsupportedInstruction for anything that the emulator does not know."""
    entries, variables = parse_module(ptx_text)
    return Program(entries, {name: decode(entry, variables) for name, entry in entries.items()}, variables)


def launch(
    program: Program,
    entry: str | None = None,
    *,
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int] = (1, 1, 1),
    dynamic_smem: int = 0,
    params: Sequence[Argument] = (),
    regions: Sequence[Region] = (),
    options: Options | None = None,
) -> Stats:
    """Runs a grid to its end on the CPU.

    Parameters
    ----------
    program : Program
        What :func:`parse` returned.
    entry : str or None
        Name of the entry; None if the module has only one.
    grid, block, cluster : sequence of int
        Launch geometry, up to three numbers each.
    dynamic_smem : int
        Bytes of dynamic shared memory.
    params : sequence
        Arguments in PTX order: int, float (.f32), bytes (.b8 blobs) or TensorMapValue.
    regions : sequence of Region
        Every tensor that the kernel may touch; addresses are those of this process.
    options : Options or None
        Schedule, copies and checks; None is ``Options()``.

    Returns
    -------
    Stats
        Instructions, warp-group steps and seconds.

    Raises
    ------
    EmulatorError
        Whatever the kernel does wrong.
    """
    kernel = Launch(program, entry, grid, block, cluster, dynamic_smem, params, regions)
    start = time.perf_counter()
    job = _job(kernel, options or Options())
    with np.errstate(all="ignore"):
        job.run()
    job.stats.seconds = time.perf_counter() - start
    return job.stats


def launch_together(launches: Sequence[Launch], options: Options | None = None) -> Stats:
    """Runs kernels of several virtual devices at the same time, all their CTAs interleaved.

    The devices share this process's memory: a kernel reaches the tensors of its peers by address where its own
    ``regions`` list them. What one device has written is initialised for all. Kernels may wait for each other's flags
    (``ld.acquire.sys``, ``st.release.sys``, ``red.release.sys`` and atomics); warps that poll in vain are a deadlock.
    """
    start = time.perf_counter()
    options = options or Options()
    stats = Stats()
    jobs = [_job(kernel, options, stats) for kernel in launches]
    share_shadows([region for job in jobs for region in job.memory.regions])
    ctas: list[Cta] = []
    for device, job in enumerate(jobs):
        for cta in next(job.waves()):
            cta.device = device
            ctas.append(cta)
    with np.errstate(all="ignore"):
        Scheduler(ctas, options, stats, np.random.default_rng(options.seed)).run()
    stats.seconds = time.perf_counter() - start
    return stats


def _job(kernel: Launch, options: Options, stats: Stats | None = None) -> _Job:
    program, entry = kernel.program, kernel.entry
    if entry is None and len(program.codes) != 1:
        raise LaunchError(f"the module has {len(program.codes)} entries; name one of {sorted(program.codes)}")
    name = entry if entry is not None else next(iter(program.codes))
    if name not in program.codes:
        raise LaunchError(f"no entry {name!r}; there are {sorted(program.codes)}")
    grid, block, cluster = _dim3(kernel.grid), _dim3(kernel.block), _dim3(kernel.cluster)
    job = _Job(program, program.codes[name], grid, block, cluster, kernel.dynamic_smem, options, stats or Stats())
    job.bind(kernel.params, kernel.regions)
    return job


def _dim3(value: Sequence[int]) -> Dim3:
    x, y, z = (*value, 1, 1, 1)[:3]
    return int(x), int(y), int(z)


class _Job:
    def __init__(
        self,
        program: Program,
        code: Code,
        grid: Dim3,
        block: Dim3,
        cluster: Dim3,
        dynamic_smem: int,
        options: Options,
        stats: Stats,
    ) -> None:
        self.program = program
        self.code = code
        self.grid = grid
        self.block = block
        self.cluster = cluster
        self.options = options
        self.stats = stats
        entry = code.entry
        threads = block[0] * block[1] * block[2]
        if entry.reqntid is not None and entry.reqntid != block:
            raise LaunchError(f"{entry.name} requires blocks of {entry.reqntid}, not {block}")
        if entry.maxntid is not None and threads > math.prod(entry.maxntid):
            raise LaunchError(f"{entry.name} takes blocks of at most {entry.maxntid}, not {block}")
        if not 1 <= threads <= 1024:
            raise LaunchError(f"a block of {threads} threads")
        if entry.reqnctapercluster is not None and entry.reqnctapercluster != cluster:
            raise LaunchError(f"{entry.name} requires clusters of {entry.reqnctapercluster}, not {cluster}")
        if any(g % c for g, c in zip(grid, cluster, strict=True)) or min(grid) < 1:
            raise LaunchError(f"grid {grid} does not divide into clusters of {cluster}")
        self.threads = threads
        self.warps = -(-threads // 32)
        self.dynamic_smem = dynamic_smem
        self.shared_bytes = code.dynamic_offset + dynamic_smem if dynamic_smem else code.static_bytes
        self.buffers: dict[str, Array] = {}

    def bind(self, params: Sequence[Argument], regions: Sequence[Region]) -> None:
        """Checks the arguments against the entry's parameters and makes the parameter block."""
        extra = []
        for var in {**self.program.variables, **self.code.entry.variables}.values():
            if var.space in ("global", "const") and var.size:
                data = np.zeros(var.size + 256, np.uint8)
                lead = -data.ctypes.data % max(var.align, 128)
                data[lead : lead + len(var.data)] = np.frombuffer(var.data, np.uint8)
                self.buffers[var.name] = data[lead:]
                access: Any = "rw" if var.space == "global" else "r"
                extra.append(
                    Region(var.name, self.buffers[var.name].ctypes.data, (var.size,), (1,), "uint8", access, True)
                )
        self.memory = GlobalMemory([*regions, *extra], self.options.checks)
        if self.code.copies_global and self.options.races and self.options.checks:
            self.memory.stores = GlobalStores()
        decls = self.code.entry.params
        if len(params) != len(decls):
            raise LaunchError(f"{self.code.entry.name} takes {len(decls)} parameters, {len(params)} are given")
        block = bytearray(self.code.entry.param_bytes)
        self.maps: dict[int, Any] = {}
        for k, (decl, value) in enumerate(zip(decls, params, strict=True)):
            if isinstance(value, TensorMapValue):
                if decl.size != 128 or decl.align < 64:
                    raise LaunchError(f"parameter {k} ({decl.text}) is not a tensor map")
                region, offset = tma.check_map(f"of parameter {k}", value, self.memory.regions)
                self.maps[decl.offset] = (f"the tensor map of parameter {k}", value, region, offset)
                continue
            block[decl.offset : decl.offset + decl.size] = _pack(k, decl.text, decl.type, decl.size, value)
        self.params = np.frombuffer(bytes(block), np.uint8)

    def run(self) -> None:
        rng = np.random.default_rng(self.options.seed)
        for ctas in self.waves(max(1, self.options.concurrent // math.prod(self.cluster))):
            Scheduler(ctas, self.options, self.stats, rng).run()

    def waves(self, together: int | None = None) -> Iterator[list[Cta]]:
        """The CTAs of ``together`` clusters at a time, or of the whole grid; a wave takes its predecessor's place."""
        cx, cy, cz = self.cluster
        origins = [
            (x, y, z)
            for z in range(0, self.grid[2], cz)
            for y in range(0, self.grid[1], cy)
            for x in range(0, self.grid[0], cx)
        ]
        size = cx * cy * cz
        together = min(together or len(origins), len(origins))
        files = [RegisterFile(self.code.rows, self.warps) for _ in range(size * together)]
        shared = [SharedMemory(self.shared_bytes) for _ in files]
        for file in files:
            self._fill_constants(file)
        detectors: list[Races | None] = [None] * together
        if self.options.races and self.options.checks:
            strict = self.options.races == "strict"
            detectors = [Races(self.code, size, self.warps, self.shared_bytes, strict) for _ in range(together)]
        for first in range(0, len(origins), together):
            ctas: list[Cta] = []
            for races, origin in zip(detectors, origins[first : first + together], strict=False):
                members: list[Cta] = []
                for rank in range(size):
                    k = len(ctas)
                    place = (rank % cx, rank // cx % cy, rank // (cx * cy))
                    cta = self._cta(files[k], shared[k], rank, place, origin)
                    members.append(cta)
                    ctas.append(cta)
                    cta.cluster = members
                if races is not None:
                    races.start(members)
            self.stats.ctas += len(ctas)
            yield ctas

    def _cta(self, file: RegisterFile, shared: SharedMemory, rank: int, place: Dim3, origin: Dim3) -> Cta:
        cta = Cta(self.code, file, shared, self.memory, self.options)
        shared.reset()
        cta.ctaid = (origin[0] + place[0], origin[1] + place[1], origin[2] + place[2])
        cta.block = self.block
        cta.rank = rank
        cta.alive = (np.arange(self.warps * 32) < self.threads).reshape(self.warps, 32)
        cta.params = Space(self.params, None)
        cta.tensor_maps = self.maps
        cta.copies = CopyQueue(cta, self.options.copies == "eager")
        if file.shadows is not None:
            for s in file.shadows:
                s[...] = 0
        for rid in self.code.undefined if self.options.checks else ():
            file.shadow(rid)[...] = np.invert(file.shadow(rid))
            cta.mark(rid, f"register {self.code.registers[rid]}, which nothing has written")
        self._fill_specials(file, cta, place)
        return cta

    def _fill_constants(self, file: RegisterFile) -> None:
        for rid, value in self.code.constants.items():
            file.files[rid & 3][rid >> 2] = value
        for rid, (kind, what) in self.code.launch_values.items():
            row = file.files[rid & 3][rid >> 2]
            if kind == "param":
                offset, size = what
                row[...] = int.from_bytes(self.params[offset : offset + size].tobytes(), "little")
            elif kind == "variable":
                row[...] = self.buffers[what[0]].ctypes.data + what[1]

    def _fill_specials(self, file: RegisterFile, cta: Cta, place: Dim3) -> None:
        t = np.arange(self.warps * 32).reshape(self.warps, 32)
        lane = t % 32
        bx, by, _ = self.block
        cx, cy, cz = self.cluster
        one = np.uint64(1)
        bit = one << lane.astype(np.uint64)
        values: dict[str, Any] = {
            "laneid": lane,
            "warpid": t // 32,
            "nwarpid": self.warps,
            "smid": 0,
            "nsmid": 1,
            "gridid": 0,
            "lanemask_eq": bit,
            "lanemask_lt": bit - one,
            "lanemask_le": (bit - one) | bit,
            "lanemask_gt": ~((bit - one) | bit) & np.uint64(0xFFFFFFFF),
            "lanemask_ge": ~(bit - one) & np.uint64(0xFFFFFFFF),
            "cluster_ctarank": cta.rank,
            "cluster_nctarank": cx * cy * cz,
            "is_explicit_cluster": self.cluster != (1, 1, 1),
            "dynamic_smem_size": self.dynamic_smem,
            "total_smem_size": self.shared_bytes,
            "aggr_smem_size": self.shared_bytes,
        }
        threads = (t % bx, t // bx % by, t // (bx * by))
        for i, axis in enumerate("xyz"):
            values[f"tid.{axis}"] = threads[i]
            values[f"ntid.{axis}"] = self.block[i]
            values[f"ctaid.{axis}"] = cta.ctaid[i]
            values[f"nctaid.{axis}"] = self.grid[i]
            values[f"cluster_ctaid.{axis}"] = place[i]
            values[f"cluster_nctaid.{axis}"] = self.cluster[i]
            values[f"clusterid.{axis}"] = cta.ctaid[i] // self.cluster[i]
            values[f"nclusterid.{axis}"] = self.grid[i] // self.cluster[i]
        for rid, (kind, what) in self.code.launch_values.items():
            if kind == "special":
                file.files[rid & 3][rid >> 2] = values[what]
            elif kind == "carry":
                file.files[rid & 3][rid >> 2] = False


def _pack(index: int, text: str, kind: str, size: int, value: Argument) -> bytes:
    if isinstance(value, bytes):
        if len(value) != size:
            raise LaunchError(f"parameter {index} ({text}) takes {size} bytes, not {len(value)}")
        return value
    if isinstance(value, TensorMapValue):
        raise LaunchError(f"parameter {index} ({text}) is not a tensor map")
    if kind in ("f32", "f64"):
        return struct.pack("<f" if kind == "f32" else "<d", value)
    if isinstance(value, float):
        raise LaunchError(f"parameter {index} ({text}) takes an integer, not {value}")
    if size > 8:
        raise LaunchError(f"parameter {index} ({text}) takes {size} bytes")
    return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
