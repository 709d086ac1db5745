"""What crosses the border between host and kernel: typed parameters, the launch contract and argument values.

A :class:`KernelSpec` declares its parameters with the classes here; the build compares them with the parameter list of
the compiled PTX entry, the loader compares fingerprints, and both targets (driver and emulator) take their argument
values in the forms defined here. Nothing here imports torch, CUDA or the DSL.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

Access = Literal["r", "w", "rw"]
Swizzle = Literal["none", "32B", "64B", "128B"]
Dim3 = tuple[int, int, int]

#: Bytes per element of the dtypes that kernel parameters name. Packed FP4 is described as uint8, two values a byte.
ITEMSIZE = {
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
}


@dataclass(frozen=True)
class Pointer:
    """A tensor's base address in global memory; PTX ``.u64``."""

    name: str
    dtype: str
    access: Access
    align: int = 16

    def ptx(self) -> str:
        return ".u64"


@dataclass(frozen=True)
class Scalar:
    """A launch-time number; PTX ``.u32`` (int32), ``.u64`` (int64) or ``.f32`` (float32)."""

    name: str
    dtype: Literal["int32", "int64", "float32"]

    def ptx(self) -> str:
        return {"int32": ".u32", "int64": ".u64", "float32": ".f32"}[self.dtype]


@dataclass(frozen=True)
class TensorMap:
    """A TMA tensor map (CUtensorMap, 128 bytes, 64-byte aligned) over the tensor that is the argument of this name.

    ``box`` counts elements, innermost dimension first. ``swizzle`` is ``none``, ``32B``, ``64B`` or ``128B``. Elements
    outside the tensor read as zero.
    """

    name: str
    dtype: str
    box: tuple[int, ...]
    swizzle: Swizzle = "none"
    access: Access = "r"

    def ptx(self) -> str:
        return ".align 64 .b8[128]"


Param = Pointer | Scalar | TensorMap


@dataclass(frozen=True)
class LaunchContract:
    """What the PTX does not carry: block and cluster shape, dynamic shared memory (bytes), launch attributes.

    Where ``max_cluster`` is above 1, each launch says how many CTAs along x form a cluster, up to that many, and the
    kernel reads the number from ``%cluster_nctarank``; ``cluster`` is then left at its default.
    """

    block: Dim3
    dynamic_smem: int = 0
    cluster: Dim3 = (1, 1, 1)
    programmatic_launch: bool = False
    max_cluster: int = 1


@dataclass(frozen=True)
class KernelABI:
    """Parameters in PTX order and the launch contract of one kernel."""

    params: tuple[Param, ...]
    launch: LaunchContract

    def to_json(self) -> dict[str, object]:
        return {
            "params": [{"kind": type(p).__name__, **vars(p)} for p in self.params],
            "launch": vars(self.launch).copy(),
        }

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON; the loader refuses a pack whose value differs from the running code's."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class TensorMapValue:
    """The data of one tensor map: the driver target encodes it, the emulator executes it.

    ``dims`` are in elements and ``strides`` in bytes, innermost first; ``strides`` has one entry less than ``dims``,
    since the innermost dimension is dense.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"


@dataclass(frozen=True)
class Region:
    """A tensor a kernel may touch, as the emulator checks it: every byte outside the strided elements is out of bounds.

    ``strides`` are in bytes. ``initialised`` is False for outputs and scratch, whose bytes are tainted until a kernel
    writes them. ``dtype`` is a name from :data:`ITEMSIZE`.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    access: Access
    initialised: bool


ArgumentValue = int | float | TensorMapValue
