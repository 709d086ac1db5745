"""What the targets share: argument values, the parameter block, and one prepared launch.

``prepare`` turns arguments into a parameter block once, at bind; ``launch`` then rewrites nothing but the live scalars
that were set since. Both run at every step of a serving loop, so they compare first and word messages on failure only.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn, Protocol

from b12x._runtime import counters
from b12x._runtime.abi import Dim3, KernelABI, Pointer, Scalar, TensorMap
from b12x._runtime.pack import Artifact, Pack
from b12x._runtime.spec import KernelSpec

_FORMAT = {"int32": "i", "int64": "q", "float32": "f"}
_NUMBERS = (int, float)
_MAP_BYTES = 128
_MAP_ALIGN = 64


#: How a tensor map covers its tensor: dims in elements of the map's dtype and strides in bytes, innermost first. The
#: innermost dimension is dense, so there is one stride less. Box, dtype and swizzle come from the spec.
MapShape = tuple[tuple[int, ...], tuple[int, ...]]
NO_MAPS: Mapping[str, MapShape] = {}


class Target(Protocol):
    """Where a plan runs. Equal targets are interchangeable: plans and kernels are kept by target."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """``cuda:N`` or ``emulator``."""

    @property
    def device(self) -> str:
        """Device of the tensors that it takes: ``cuda:N`` or ``cpu``."""

    @property
    def arch(self) -> str:
        """Architecture that kernels are compiled for, such as ``sm_120a``."""

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors that a launch may count on."""

    def missing(self, artifact: Artifact) -> str | None:
        """Why an artifact of the right key cannot run here, None when it can."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def load(self, artifact: Artifact, pack: Pack, spec: KernelSpec) -> LoadedKernel:
        """Make an artifact ready to launch."""


class LoadedKernel(Protocol):
    """A kernel that is ready to launch on its target."""

    @property
    def spec(self) -> KernelSpec:
        """The spec it was compiled from."""

    def prepare(self, args: Mapping[str, Any], maps: Mapping[str, MapShape] = NO_MAPS) -> Launch:
        """Bind arguments, by parameter name, in any order, all of them.

        A pointer takes a tensor, an integer address or None (null); a scalar takes a number; a tensor map takes a
        tensor, and its shape is in ``maps``. Raises TypeError for a missing, unknown or wrong kind of argument and
        ValueError for a misaligned address or a value out of range.
        """


class ParamBlock:
    """The layout of one kernel's parameters in host memory; made once per loaded kernel.

    One buffer holds the tensor maps (64-byte aligned), the 8-byte values, the 4-byte values, and the array of pointers
    to them in parameter order that the driver wants.
    """

    def __init__(self, key: str, abi: KernelABI) -> None:
        self.key = key
        self.count = counters.launch_counter(key)
        self.contract = abi.launch
        self.params = abi.params
        self.maps = tuple((key, p.name, p.dtype, p.box, p.swizzle) for p in abi.params if isinstance(p, TensorMap))
        self.pointers = tuple((p.name, p.align) for p in abi.params if isinstance(p, Pointer))
        scalars = sorted((p for p in abi.params if isinstance(p, Scalar)), key=lambda p: p.dtype != "int64")
        self.scalars = {p.name: struct.Struct(_FORMAT[p.dtype]) for p in scalars}
        offsets: dict[str, int] = {}
        cursor = 0
        for _, name, *_ in self.maps:
            offsets[name], cursor = cursor, cursor + _MAP_BYTES
        for name, _ in self.pointers:
            offsets[name], cursor = cursor, cursor + 8
        for name, form in self.scalars.items():
            offsets[name], cursor = cursor, cursor + form.size
        self.offsets = offsets
        self._order = [offsets[p.name] for p in abi.params]
        forms = ["128s"] * len(self.maps) + ["Q"] * len(self.pointers) + [_FORMAT[p.dtype] for p in scalars]
        self._array = struct.Struct(f"={len(abi.params)}Q")
        self.array_at = -(-cursor // 8) * 8
        pad = f"{self.array_at - cursor}x{self._array.size}s"
        self._values = struct.Struct("=" + "".join([*forms, pad]))
        self._type = ctypes.c_char * (self._values.size + _MAP_ALIGN)
        #: By the address of a block, since freed blocks' places are used again.
        self._pointers = lru_cache(maxsize=1024)(self._pointers_at)

    def read(self, args: Mapping[str, Any]) -> list[Any]:
        """Addresses, then scalars, in the order of the block, checked."""
        if len(args) != len(self.params):
            self._wrong_names(args)
        values = []
        try:
            for name, align in self.pointers:
                value = args[name]
                if value is None:
                    value = 0
                elif type(value) is not int:
                    value = value.data_ptr()
                if value % align:
                    raise ValueError(
                        f"{self.key}: {name} starts at {value:#x}, {value % align} bytes past a multiple of {align}; "
                        f"needed is a multiple of {align}: pass a view that starts at an aligned element, or a copy"
                    )
                values.append(value)
            for name in self.scalars:
                value = args[name]
                if type(value) not in _NUMBERS:  # a tensor would answer too, by a copy from the device
                    self.check_scalar(name, value)
                values.append(value)
        except KeyError:
            self._wrong_names(args)
        except AttributeError:
            found = type(args[name]).__name__
            raise TypeError(f"{self.key}: {name} is a {found}; needed is a tensor, an address or None") from None
        return values

    def fill(self, args: Mapping[str, Any], maps: Mapping[str, MapShape], encode: Any) -> tuple[Any, int, int]:
        """A buffer with the parameter block in it, the address where the block starts, and its offset in the buffer.

        ``encode`` is :func:`b12x._runtime.tensor_map.encode`.
        """
        values = self.read_maps(args, maps, encode)
        values += self.read(args)
        buffer = self._type()
        address = ctypes.addressof(buffer)
        skew = -address % _MAP_ALIGN
        base = address + skew
        try:
            self._values.pack_into(buffer, skew, *values, self._pointers(base))
        except (struct.error, OverflowError):
            for name in self.scalars:
                self.check_scalar(name, args[name])
            raise
        return buffer, base, skew

    def read_maps(self, args: Mapping[str, Any], maps: Mapping[str, MapShape], make: Any) -> list[Any]:
        """What ``make``, a function of :mod:`b12x._runtime.tensor_map`, gives for each tensor map."""
        if len(maps) != len(self.maps):
            self._wrong_maps(maps)
        made = []
        for fixed in self.maps:
            name = fixed[1]
            try:
                dims, strides = maps[name]
                address = args[name].data_ptr()
            except KeyError:
                self._wrong_maps(maps)
                self._wrong_names(args)
            except AttributeError:
                found = type(args[name]).__name__
                raise TypeError(f"{self.key}: {name} is a {found}; needed is a tensor") from None
            made.append(make(*fixed, address, dims, strides))
        return made

    def _pointers_at(self, base: int) -> bytes:
        return self._array.pack(*[base + offset for offset in self._order])

    def check_scalar(self, name: str, value: Any) -> None:
        """Raise for a name that is no scalar of the kernel (TypeError) or a value that it cannot hold."""
        if name not in self.scalars:
            raise TypeError(
                f"{self.key}: {name!r} is no scalar of this kernel; those are {', '.join(self.scalars) or 'none'}"
            )
        dtype = next(p.dtype for p in self.params if p.name == name and isinstance(p, Scalar))
        if not isinstance(value, (int, float) if dtype == "float32" else int):
            kind = "float" if dtype == "float32" else "int"
            raise TypeError(f"{self.key}: {name} is a {type(value).__name__}; needed is a Python {kind} for {dtype}")
        try:
            self.scalars[name].pack(value)
        except (struct.error, OverflowError):
            raise ValueError(f"{self.key}: {name} is {value}; needed is a value that {dtype} holds") from None

    def _wrong_maps(self, maps: Mapping[str, MapShape]) -> None:
        """Raise if ``maps`` does not have exactly the tensor maps' names."""
        needed = [name for _, name, *_ in self.maps]
        if sorted(maps) != sorted(needed):
            raise TypeError(f"{self.key}: maps has the shapes of {sorted(maps)}; needed are those of {needed}")

    def _wrong_names(self, args: Mapping[str, Any]) -> NoReturn:
        needed = [p.name for p in self.params]
        missing = [name for name in needed if name not in args]
        unknown = [name for name in args if name not in needed]
        raise TypeError(f"{self.key}: missing arguments {missing}, unknown arguments {unknown}; needed are {needed}")


def used_on(stream: Any, *tensors: Any) -> None:
    """Keep tensors, made on the current stream, from being handed out again before ``stream`` has used them.

    For what an op allocates itself and then launches on a stream of the caller's, None being the current one.
    """
    if stream is None:
        return
    import torch

    for tensor in tensors:
        if tensor.is_cuda:
            known = isinstance(stream, torch.cuda.Stream)
            handle = getattr(stream, "cuda_stream", stream)
            tensor.record_stream(stream if known else torch.cuda.ExternalStream(int(handle), tensor.device))


class Launch:
    """A kernel with its arguments bound. Set :attr:`grid`, set live scalars, launch; as often as wanted.

    It holds on to the arguments, so their memory stays valid while it lives.
    """

    __slots__ = ("_args", "_block", "_cluster", "_grid")

    def __init__(self, block: ParamBlock, args: Mapping[str, Any]) -> None:
        self._block = block
        self._args = args
        self._grid: Dim3 | None = None
        self._cluster = block.contract.cluster

    @property
    def cluster(self) -> Dim3:
        """The cluster shape; set it before the grid, where the launch contract leaves it to the launch."""
        return self._cluster

    @cluster.setter
    def cluster(self, value: Dim3) -> None:
        largest = self._block.contract.max_cluster
        if not 1 <= value[0] <= largest or value[1:] != (1, 1):
            raise ValueError(f"{self._block.key}: cluster is {value}; this kernel takes (1, 1, 1) to ({largest}, 1, 1)")
        self._cluster = value
        self._configure()

    def _configure(self) -> None:
        """The cluster shape has changed."""

    @property
    def grid(self) -> Dim3:
        """CTAs in x, y and z; positive multiples of the cluster shape. An op skips an empty launch itself."""
        if self._grid is None:
            raise RuntimeError(f"{self._block.key}: set .grid before the launch")
        return self._grid

    @grid.setter
    def grid(self, value: Dim3) -> None:
        x, y, z = value
        cluster_x, cluster_y, cluster_z = cluster = self._cluster
        if x < 1 or not 1 <= y <= 65535 or not 1 <= z <= 65535 or x % cluster_x or y % cluster_y or z % cluster_z:
            raise ValueError(
                f"{self._block.key}: grid is {value}; needed are positive multiples of the cluster shape {cluster}, at "
                "most 65535 in y and z"
            )
        self._grid = (x, y, z)

    def set(self, name: str, value: int | float) -> None:
        """Set a live scalar for the next launches."""
        raise NotImplementedError

    def launch(self, stream: Any = None) -> None:
        """Launch once.

        ``stream`` is a raw integer handle, an object that has or is one, or None for torch's current stream.
        """
        raise NotImplementedError
