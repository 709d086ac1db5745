"""The cuda target: cubins loaded per device and launched through cuda-python.

Cubins are loaded when a plan resolves them, into the device's primary context (torch's), and never unloaded: a captured
graph may hold them.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from b12x._runtime import driver, packs, tensor_map
from b12x._runtime.abi import Dim3, KernelABI, LaunchContract
from b12x._runtime.errors import DeviceNotSupportedError, DriverError, PackError
from b12x._runtime.launch import NO_MAPS, Launch, MapShape, ParamBlock
from b12x._runtime.pack import Artifact, Pack
from b12x._runtime.spec import KernelSpec

#: The architecture whose cubins a device of some compute capability runs. Checked before anything is loaded, because a
#: cubin of another architecture loads without an error and fails at its launch.
ARCHS = {(12, 0): "sm_120a", (12, 1): "sm_121a"}

#: Targets that are never chosen by the device, only by name, and the compute capability each needs.
REHOSTS = {"rehost:sm_90a": (9, 0)}

#: Shared memory that a kernel gets without asking for more.
_DEFAULT_SMEM = 48 * 1024

#: INVALID_CONTEXT, INVALID_HANDLE, CONTEXT_IS_DESTROYED: what a launch gives where another context is current.
_CONTEXT_ERRORS = (201, 400, 709)

_lock = threading.Lock()
_targets: dict[tuple[int, str | None], CudaTarget] = {}
_current_raw_stream: Any = None


def cuda_target(ordinal: int, rehost: str | None = None) -> CudaTarget:
    """The target of a device; one object per device and choice.

    Parameters
    ----------
    ordinal
        The device.
    rehost
        A name from :data:`REHOSTS` where that target was chosen; None takes the architecture of the device.

    Raises
    ------
    DriverError
        No driver, one that is too old, or no such device.
    DeviceNotSupportedError
        The device's architecture is not among :data:`ARCHS`, or not the one that ``rehost`` needs.
    """
    known = _targets.get((ordinal, rehost))
    if known is not None:
        return known
    with _lock:
        if (ordinal, rehost) not in _targets:
            capability = device_capability(ordinal)
            if rehost is None:
                arch = ARCHS.get(capability)
                if arch is None:
                    raise DeviceNotSupportedError(_unsupported(ordinal, capability))
            else:
                arch = rehost
                if capability != REHOSTS[rehost]:
                    raise DeviceNotSupportedError(_not_rehosted(ordinal, capability, rehost))
            _targets[ordinal, rehost] = CudaTarget(ordinal, arch)
        return _targets[ordinal, rehost]


def device_count() -> int:
    """Number of devices that the driver shows (DriverError when there is none to ask)."""
    (count,) = driver.check("cuDeviceGetCount", driver.ready().cuDeviceGetCount())
    return int(count)


def device_name(ordinal: int) -> str:
    """A device's product name."""
    cu = driver.ready()
    (raw,) = driver.check("cuDeviceGetName", cu.cuDeviceGetName(256, _device(cu, ordinal)))
    return bytes(raw).split(b"\0")[0].decode()


def device_capability(ordinal: int) -> tuple[int, int]:
    """A device's compute capability, such as (12, 0)."""
    cu = driver.ready()
    device = _device(cu, ordinal)
    kinds = cu.CUdevice_attribute
    major = _attribute(cu, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    return major, _attribute(cu, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)


class CudaTarget:
    """One device. Make it with :func:`cuda_target`, which checks the architecture."""

    def __init__(self, ordinal: int, arch: str) -> None:
        cu = driver.ready()
        self.ordinal = ordinal
        self.arch = arch
        self.name = self.device = f"cuda:{ordinal}"
        self.cu_device = _device(cu, ordinal)
        (self.context,) = driver.check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self.cu_device))
        self._context_handle = int(self.context)
        self._lock = threading.Lock()
        self._functions: dict[tuple[str, str, int], Any] = {}

    @property
    def sm_count(self) -> int:
        """Asked of the device each time, since partitioning (MIG, MPS) decides it, not the product."""
        cu = driver.ready()
        return _attribute(cu, cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self.cu_device)

    def missing(self, artifact: Artifact) -> str | None:
        if self.arch in artifact.cubins:
            return None
        return f"has it for {', '.join(artifact.cubins) or 'no architecture'} only, and {self.name} needs {self.arch}"

    def capturing(self) -> bool:
        import torch

        return torch.backends.cuda.is_built() and bool(torch.cuda.is_current_stream_capturing())

    def load(self, artifact: Artifact, pack: Pack, spec: KernelSpec) -> CudaKernel:
        """Load the cubin, its sha256 checked, unless the device has it already."""
        abi = spec.abi()
        cubin = artifact.cubins[self.arch]
        key = (cubin.blob, artifact.entry, abi.launch.dynamic_smem)
        with self._lock:
            if key not in self._functions:
                image = pack.cubin(artifact, self.arch)
                with self.current():
                    self._functions[key] = self._function(image, artifact.entry, abi, cubin.static_smem, pack)
        return CudaKernel(self, spec, abi, self._functions[key])

    def is_current(self) -> bool:
        """Whether the device's primary context is the thread's current one."""
        (context,) = driver.check("cuCtxGetCurrent", driver.ready().cuCtxGetCurrent())
        return int(context) == self._context_handle

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device's primary context is the thread's current one inside."""
        if self.is_current():
            yield
            return
        cu = driver.ready()
        driver.check("cuCtxPushCurrent", cu.cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            driver.check("cuCtxPopCurrent", cu.cuCtxPopCurrent())

    def _function(self, image: bytes, entry: str, abi: KernelABI, static_smem: int, pack: Pack) -> Any:
        cu = driver.ready()
        about = f"for {entry} of pack {pack.path} on {self.name}"
        loaded = cu.cuLibraryLoadData(image, [], [], 0, [], [], 0)
        (library,) = driver.check("cuLibraryLoadData", loaded, about)
        code, kernel = cu.cuLibraryGetKernel(library, entry.encode())
        if code != 0:
            raise PackError(
                f"a cubin of pack {pack.path} has no entry {entry!r} ({driver.error_text(code)}); the pack's index and "
                "blobs do not belong together: build the pack again with `b12x build`"
            )
        if abi.launch.dynamic_smem + static_smem > _DEFAULT_SMEM:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            result = cu.cuKernelSetAttribute(attribute, abi.launch.dynamic_smem, kernel, self.cu_device)
            driver.check(
                "cuKernelSetAttribute", result, f"for {abi.launch.dynamic_smem} bytes of shared memory, {about}"
            )
        (function,) = driver.check("cuKernelGetFunction", cu.cuKernelGetFunction(kernel), about)
        return function


class CudaKernel:
    """A kernel loaded on one device."""

    def __init__(self, target: CudaTarget, spec: KernelSpec, abi: KernelABI, function: Any) -> None:
        self.target = target
        self.spec = spec
        self.abi = abi
        self.function = function
        self.key = spec.key
        self.block = ParamBlock(self.key, abi)
        self.cu = driver.ready()
        self.shape = (*abi.launch.block, abi.launch.dynamic_smem)

    def prepare(self, args: Mapping[str, Any], maps: Mapping[str, MapShape] = NO_MAPS) -> CudaLaunch:
        return CudaLaunch(self, args, maps)


class CudaLaunch(Launch):
    """A kernel with its parameter block, for one device."""

    __slots__ = ("_buffer", "_config", "_kernel", "_params", "_skew")

    def __init__(self, kernel: CudaKernel, args: Mapping[str, Any], maps: Mapping[str, MapShape]) -> None:
        super().__init__(kernel.block, args)
        self._kernel = kernel
        self._buffer, base, self._skew = kernel.block.fill(args, maps, tensor_map.encode)
        self._params = base + kernel.block.array_at
        self._configure()

    def _configure(self) -> None:
        self._config = _launch_config(self._block.contract, self._cluster)

    def set(self, name: str, value: int | float) -> None:
        block = self._block
        at = self._skew + block.offsets.get(name, 0)
        if type(value) not in (int, float):
            block.check_scalar(name, value)
        try:
            data = block.scalars[name].pack(value)  # not pack_into, which clears the old value even when it fails
        except (KeyError, struct.error, OverflowError):
            block.check_scalar(name, value)
            raise
        self._buffer[at : at + len(data)] = data

    def launch(self, stream: Any = None) -> None:
        handle = _stream(raw_stream(stream, self._kernel.target.ordinal))
        code = self._enqueue(handle)
        if code:
            self._enqueue_elsewhere(handle, code)
        self._block.count()

    def _enqueue(self, stream: Any) -> Any:
        kernel, config, grid = self._kernel, self._config, self._grid or self.grid
        if config is None:
            return kernel.cu.cuLaunchKernel(kernel.function, *grid, *kernel.shape, stream, self._params, 0)[0]
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.hStream = stream
        return kernel.cu.cuLaunchKernelEx(config, kernel.function, self._params, 0)[0]

    def _enqueue_elsewhere(self, stream: Any, code: Any) -> None:
        """After a refused launch: once more in the device's context, where that was not the thread's current one.

        Asking which context is current before every launch costs time, and remembering it is not safe, since other code
        may change it between launches. The driver looks anyway: a function belongs to the context it was loaded into,
        and where another one or none is current, a launch runs in the function's own or is refused.
        """
        target, contract = self._kernel.target, self._block.contract
        if int(code) in _CONTEXT_ERRORS and not target.is_current():
            with target.current():
                code = self._enqueue(stream)
        if code:
            raise DriverError(
                f"launch of {self._kernel.key} on {target.name} failed: {driver.error_text(code)}; grid {self.grid}, "
                f"block {contract.block}, cluster {self.cluster}, {contract.dynamic_smem} bytes of dynamic shared "
                "memory"
            )


def raw_stream(stream: Any, ordinal: int) -> int:
    """The raw handle of a stream argument; None is torch's current stream on the device, not the legacy default."""
    global _current_raw_stream
    if stream is not None:
        return int(getattr(stream, "cuda_stream", stream))
    if _current_raw_stream is None:
        import torch

        _current_raw_stream = torch._C._cuda_getCurrentRawStream  # 0.2 us, where current_stream() takes 8
    raw: int = _current_raw_stream(ordinal)
    return raw


@lru_cache(maxsize=1024)
def _stream(raw: int) -> Any:
    """cuda-python would make this object at every launch."""
    return driver.ready().CUstream(raw)


def _launch_config(contract: LaunchContract, shape: Dim3) -> Any:
    """The configuration of an extended launch; None where the plain one does."""
    cu = driver.ready()
    attributes = []
    if shape != (1, 1, 1):
        cluster = cu.CUlaunchAttribute()
        cluster.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = cluster.value.clusterDim
        dim.x, dim.y, dim.z = shape
        attributes.append(cluster)
    if contract.programmatic_launch:
        early = cu.CUlaunchAttribute()
        early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    if not attributes:
        return None
    config = cu.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = contract.block
    config.sharedMemBytes = contract.dynamic_smem
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _device(cu: Any, ordinal: int) -> Any:
    (count,) = driver.check("cuDeviceGetCount", cu.cuDeviceGetCount())
    if ordinal >= count:
        raise DriverError(
            f"device cuda:{ordinal} does not exist; the driver shows {count} (CUDA_VISIBLE_DEVICES decides which)"
        )
    (device,) = driver.check("cuDeviceGet", cu.cuDeviceGet(ordinal))
    return device


def _attribute(cu: Any, kind: Any, device: Any) -> int:
    (value,) = driver.check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(kind, device))
    return int(value)


def _unsupported(ordinal: int, capability: tuple[int, int]) -> str:
    needed = " or ".join(f"{major}.{minor} ({arch})" for (major, minor), arch in ARCHS.items())
    try:
        held = sorted({arch for pack in packs.installed() for arch in pack.archs})
    except PackError:
        held = []
    return (
        f"cuda:{ordinal} is a {device_name(ordinal)} of compute capability {capability[0]}.{capability[1]}; needed is "
        f"{needed}. The installed packs hold {', '.join(held) or 'nothing'}. Choose another device, or run CPU tensors "
        "with B12X_TARGET=emulator"
    )


def _not_rehosted(ordinal: int, capability: tuple[int, int], rehost: str) -> str:
    found, needed = (f"{major}.{minor}" for major, minor in (capability, REHOSTS[rehost]))
    return (
        f"cuda:{ordinal} is a {device_name(ordinal)} of compute capability {found}; target {rehost} needs one of "
        f"{needed}. It only verifies kernels: without it, plans take the architecture of the device"
    )
