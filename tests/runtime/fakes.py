"""What runtime tests stand on: a small kernel spec, packs of it, and a driver that records instead of launching."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cuda.bindings import driver as bindings

from b12x._runtime.abi import KernelABI, LaunchContract, Pointer, Scalar, TensorMap
from b12x._runtime.pack import Artifact, Cubin, Pack, cubin_blob, index_bytes, ptx_blob, write_pack
from b12x._runtime.spec import KernelSpec, Role

BOTH = ("sm_120a", "sm_121a")


@dataclass(frozen=True, kw_only=True)
class ToySpec(KernelSpec):
    """A kernel with every kind of parameter."""

    kernel: ClassVar[str] = "toy.copy"

    dtype: str = "bfloat16"
    tile: int = 64
    smem: int = 1024
    cluster: int = 1
    pdl: bool = False

    def abi(self) -> KernelABI:
        return KernelABI(
            params=(
                Scalar("m", "int32"),
                TensorMap("x", self.dtype, (64, 32), "128B"),
                Pointer("y", "uint8", "w"),
                Scalar("stride", "int64"),
                Pointer("scale", "float32", "r", align=4),
                Scalar("alpha", "float32"),
            ),
            launch=LaunchContract((128, 1, 1), self.smem, (self.cluster, 1, 1), self.pdl),
        )


#: Bytes of the parameters of a ToySpec, in order.
TOY_SIZES = (4, 128, 8, 8, 8, 4)


def role(*specs: KernelSpec) -> Role:
    return Role("main", specs)


def make_artifact(
    spec: KernelSpec, archs: tuple[str, ...] = BOTH, *, salt: str = "", ptx: bool = True
) -> tuple[Artifact, dict[str, bytes]]:
    """An entry and its blobs; the machine code is made up, and differs with ``salt``."""
    blobs: dict[str, bytes] = {}
    cubins = {}
    for arch in archs:
        data = f"cubin {spec.key} {arch} {salt}".encode() * 9
        digest, name, content = cubin_blob(data)
        blobs[name] = content
        cubins[arch] = Cubin(digest, len(data), registers=40, static_smem=0, spill_bytes=0)
    digest = None
    if ptx:
        digest, name, content = ptx_blob(f".target sm_120a\n// {spec.key} {salt}\n")
        blobs[name] = content
    abi = spec.abi()
    return Artifact(abi.to_json(), abi.fingerprint, "0" * 64, digest, "toy_entry", cubins), blobs


def make_pack(
    folder: Path,
    *specs: KernelSpec,
    name: str = "toys",
    archs: tuple[str, ...] = BOTH,
    salt: str = "",
    ptx: bool = True,
    edit: Any = None,
) -> Path:
    """Write a pack of specs; ``edit`` may change each entry."""
    entries, blobs = {}, {}
    for spec in specs:
        artifact, own = make_artifact(spec, archs, salt=salt, ptx=ptx)
        entries[spec.key] = edit(artifact) if edit else artifact
        blobs.update(own)
    index = index_bytes(name=name, dsl="4.8.1", ptxas="13.4.59", archs=archs, manifests={}, entries=entries)
    write_pack(folder, index, blobs)
    return folder


@dataclass(frozen=True)
class RecordingKernel:
    spec: KernelSpec
    pack: Pack


@dataclass(eq=False)
class RecordingTarget:
    """A target that loads nothing but remembers what it was asked to."""

    arch: str = "sm_120a"
    in_capture: bool = False
    loads: list[str] = field(default_factory=list)
    name: str = "recorder"
    device: str = "cpu"
    sm_count: int = 1

    def missing(self, artifact: Artifact) -> str | None:
        return None if self.arch in artifact.cubins else f"has it for {', '.join(artifact.cubins)} only"

    def capturing(self) -> bool:
        return self.in_capture

    def load(self, artifact: Artifact, pack: Pack, spec: KernelSpec) -> Any:
        self.loads.append(spec.key)
        return RecordingKernel(spec, pack)


class FakeDriver:
    """Stands for ``cuda.bindings.driver``: enums and structs are the real ones, calls are recorded.

    ``capabilities`` has one entry per device. ``fail`` maps a call's name to the result code it gives.
    """

    def __init__(
        self,
        *,
        version: int = 13000,
        capabilities: tuple[tuple[int, int], ...] = ((12, 0),),
        sm_count: int = 170,
        fail: dict[str, Any] | None = None,
        param_sizes: tuple[int, ...] = TOY_SIZES,
    ) -> None:
        self.version = version
        self.capabilities = capabilities
        self.sm_count = sm_count
        self.fail = fail or {}
        self.param_sizes = param_sizes
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[dict[str, Any]] = []
        self.contexts = threading.local()
        self.functions: dict[int, int] = {}
        self._lock = threading.Lock()
        self._handles = 1000

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]

    def _result(self, name: str, *args: Any, value: Any = ()) -> tuple[Any, ...]:
        with self._lock:
            self.calls.append((name, *args))
        code = self.fail.get(name, bindings.CUresult.CUDA_SUCCESS)
        values = value if isinstance(value, tuple) else (value,)
        return (code, *values)

    def _handle(self) -> int:
        with self._lock:
            self._handles += 1
            return self._handles

    def _stack(self) -> list[int]:
        if not hasattr(self.contexts, "stack"):
            self.contexts.stack = []
        return self.contexts.stack

    def cuDriverGetVersion(self) -> Any:
        return self._result("cuDriverGetVersion", value=self.version)

    def cuInit(self, flags: int) -> Any:
        return self._result("cuInit", flags)

    def cuDeviceGetCount(self) -> Any:
        return self._result("cuDeviceGetCount", value=len(self.capabilities))

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._result("cuDeviceGet", ordinal, value=bindings.CUdevice(ordinal))

    def cuDeviceGetName(self, length: int, device: Any) -> Any:
        return self._result("cuDeviceGetName", int(device), value=b"Toy GPU\0\0\0")

    def cuDeviceGetAttribute(self, kind: Any, device: Any) -> Any:
        kinds = bindings.CUdevice_attribute
        major, minor = self.capabilities[int(device)]
        value = {
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: self.sm_count,
        }[kind]
        return self._result("cuDeviceGetAttribute", kind.name, int(device), value=value)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return self._result("cuDevicePrimaryCtxRetain", int(device), value=bindings.CUcontext(7000 + int(device)))

    def cuCtxGetCurrent(self) -> Any:
        stack = self._stack()
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUcontext(stack[-1] if stack else 0)

    def cuCtxPushCurrent(self, context: Any) -> Any:
        self._stack().append(int(context))
        return self._result("cuCtxPushCurrent", int(context))

    def cuCtxPopCurrent(self) -> Any:
        return self._result("cuCtxPopCurrent", value=bindings.CUcontext(self._stack().pop()))

    def _context(self) -> int:
        stack = self._stack()
        return stack[-1] if stack else 0

    def cuLibraryLoadData(self, image: bytes, *options: Any) -> Any:
        assert options == ([], [], 0, [], [], 0)
        return self._result("cuLibraryLoadData", image, self._context(), value=bindings.CUlibrary(self._handle()))

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> Any:
        return self._result("cuLibraryGetKernel", int(library), name, value=bindings.CUkernel(self._handle()))

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: Any, device: Any) -> Any:
        return self._result("cuKernelSetAttribute", attribute.name, value, int(kernel), int(device))

    def cuKernelGetFunction(self, kernel: Any) -> Any:
        handle = self._handle()
        self.functions[handle] = self._context()
        return self._result("cuKernelGetFunction", int(kernel), self._context(), value=bindings.CUfunction(handle))

    def cuTensorMapEncodeTiled(self, *args: Any) -> Any:
        encoded = bindings.CUtensorMap()
        address = args[2]
        encoded.opaque = [bindings.cuuint64_t(address + i) for i in range(16)]
        plain = [[int(v) for v in a] if isinstance(a, list) else getattr(a, "name", a) for a in args]
        return self._result("cuTensorMapEncodeTiled", *plain, value=encoded)

    def cuLaunchKernel(self, function: Any, *args: Any) -> Any:
        grid, block, (smem, stream, params, extra) = args[:3], args[3:6], args[6:]
        assert extra == 0
        self._launched(function, grid, block, smem, int(stream), params, {})
        return self._launch_result("cuLaunchKernel", function)

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        assert extra == 0
        ids = bindings.CUlaunchAttributeID
        attributes = {}
        for attribute in config.attrs:
            if attribute.id == ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                dim = attribute.value.clusterDim
                attributes["cluster"] = (dim.x, dim.y, dim.z)
            if attribute.id == ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
                attributes["pdl"] = attribute.value.programmaticStreamSerializationAllowed
        assert config.numAttrs == len(attributes)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        self._launched(function, grid, block, config.sharedMemBytes, int(config.hStream), params, attributes)
        return self._launch_result("cuLaunchKernelEx", function)

    def _launch_result(self, name: str, function: Any) -> tuple[Any, ...]:
        """As the driver, refuses to launch where the function's context is not current."""
        current = self._context()
        code, *_ = self._result(name, int(function), current)
        if current == 0:
            return (bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if current != self.functions[int(function)]:
            return (bindings.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        return (code,)

    def _launched(
        self, function: Any, grid: Any, block: Any, smem: int, stream: int, params: int, attributes: dict[str, Any]
    ) -> None:
        if self._context() != self.functions[int(function)]:
            return
        pointers = (ctypes.c_uint64 * len(self.param_sizes)).from_address(params)
        with self._lock:
            self.launches.append(
                {
                    "function": int(function),
                    "grid": tuple(grid),
                    "block": tuple(block),
                    "smem": smem,
                    "stream": stream,
                    "context": self._context(),
                    "addresses": list(pointers),
                    "params": [ctypes.string_at(p, n) for p, n in zip(pointers, self.param_sizes, strict=True)],
                    "attributes": attributes,
                }
            )
