"""Records launches without a GPU: a stand-in for the driver, tensors without memory, and a pack without code.

Plans, bindings and launches go through the library's own cuda target, down to the driver call, whose grid, cluster,
block and shared memory are kept. Nothing is compiled: the stand-in for a kernel's machine code is its key.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as bindings

import b12x
from b12x._runtime import cuda_target, driver
from b12x._runtime.abi import Dim3
from b12x._runtime.pack import Artifact, Cubin, cubin_blob, index_bytes, write_pack
from b12x._runtime.spec import KernelSpec

ARCH = "sm_120a"
DEVICE = "cuda:0"
_SUCCESS = bindings.CUresult.CUDA_SUCCESS
#: Addresses of stand-in tensors: far apart, so that none overlaps another.
_GAP = 1 << 36


@dataclass(frozen=True)
class Recorded:
    """One launch as the driver was asked for it."""

    spec: KernelSpec
    grid: Dim3
    cluster: Dim3
    block: Dim3
    smem: int

    @property
    def ctas(self) -> int:
        return math.prod(self.grid)


class Array:
    """What the library asks of a tensor, over memory that is never touched."""

    _next = _GAP

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> None:
        self.dtype = dtype
        self.shape = shape
        self.device = torch.device(DEVICE)
        if strides is None:
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        self._strides = strides
        self._address = Array._next
        Array._next += _GAP

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_neg(self) -> bool:
        return False


@dataclass
class Driver:
    """Stands for ``cuda.bindings.driver`` with one SM120 device of ``sm_count`` multiprocessors; ``specs`` by key."""

    sm_count: int
    specs: Mapping[str, KernelSpec]
    launches: list[Recorded] = field(default_factory=list)
    _keys: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)

    def cuDriverGetVersion(self) -> Any:
        return _SUCCESS, driver.MINIMUM_DRIVER

    def cuInit(self, flags: int) -> Any:
        return (_SUCCESS,)

    def cuDeviceGetCount(self) -> Any:
        return _SUCCESS, 1

    def cuDeviceGet(self, ordinal: int) -> Any:
        return _SUCCESS, bindings.CUdevice(ordinal)

    def cuDeviceGetAttribute(self, kind: Any, device: Any) -> Any:
        kinds = bindings.CUdevice_attribute
        known = {
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 12,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: self.sm_count,
        }
        return _SUCCESS, known[kind]

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return _SUCCESS, bindings.CUcontext(1)

    def cuCtxGetCurrent(self) -> Any:
        return _SUCCESS, bindings.CUcontext(1)

    def cuCtxPushCurrent(self, context: Any) -> Any:
        return (_SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        return _SUCCESS, bindings.CUcontext(1)

    def cuLibraryLoadData(self, image: bytes, *options: Any) -> Any:
        self._keys.append(bytes(image).decode())
        return _SUCCESS, bindings.CUlibrary(len(self._keys))

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> Any:
        return _SUCCESS, bindings.CUkernel(int(library))

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: Any, device: Any) -> Any:
        return (_SUCCESS,)

    def cuKernelGetFunction(self, kernel: Any) -> Any:
        return _SUCCESS, bindings.CUfunction(int(kernel))

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> Any:
        return _SUCCESS, bindings.CUtensorMap()

    def cuLaunchKernel(self, function: Any, *arguments: Any) -> Any:
        x, y, z, block_x, block_y, block_z, smem, *_ = arguments
        return self._launched(function, (x, y, z), (1, 1, 1), (block_x, block_y, block_z), smem)

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        cluster = (1, 1, 1)
        for attribute in config.attrs:
            if attribute.id == bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                shape = attribute.value.clusterDim
                cluster = (shape.x, shape.y, shape.z)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        return self._launched(function, grid, cluster, block, config.sharedMemBytes)

    def _launched(self, function: Any, grid: Dim3, cluster: Dim3, block: Dim3, smem: int) -> Any:
        spec = self.specs[self._keys[int(function) - 1]]
        self.launches.append(Recorded(spec, grid, cluster, block, smem))
        return (_SUCCESS,)


def write_code_free_pack(folder: Path, specs: Iterable[KernelSpec]) -> None:
    """A pack that resolves the specs; the machine code of each is the text of its key."""
    entries, blobs = {}, {}
    for spec in specs:
        digest, name, content = cubin_blob(spec.key.encode())
        blobs[name] = content
        abi = spec.abi()
        cubin = Cubin(digest, len(spec.key), registers=0, static_smem=0, spill_bytes=0)
        entries[spec.key] = Artifact(abi.to_json(), abi.fingerprint, "0" * 64, None, "entry", {ARCH: cubin})
    versions = {"dsl": "none", "ptxas": "none"}
    write_pack(folder, index_bytes(name="no code", archs=(ARCH,), manifests={}, entries=entries, **versions), blobs)


@contextmanager
def recording(specs: Iterable[KernelSpec], sm_count: int) -> Iterator[Driver]:
    """Inside, device ``cuda:0`` is a GPU of ``sm_count`` multiprocessors that records, and these are its kernels."""
    stand_in = Driver(sm_count, {spec.key: spec for spec in specs})
    kept = driver._driver, driver._ready, cuda_target._targets
    path = os.environ.get("B12X_PACK_PATH")
    with tempfile.TemporaryDirectory() as folder:
        write_code_free_pack(Path(folder) / "pack", stand_in.specs.values())
        driver._driver, driver._ready, cuda_target._targets = lambda: stand_in, None, {}
        os.environ["B12X_PACK_PATH"] = str(Path(folder) / "pack")
        b12x.clear_all_caches()  # what was resolved with another driver or pack must not be found again
        try:
            yield stand_in
        finally:
            driver._driver, driver._ready, cuda_target._targets = kept
            os.environ.pop("B12X_PACK_PATH")
            if path is not None:
                os.environ["B12X_PACK_PATH"] = path
            b12x.clear_all_caches()
