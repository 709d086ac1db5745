"""The emulator target: the kernel's PTX, run on CPU tensors by :mod:`b12x.emulator`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from b12x._runtime import tensor_map
from b12x._runtime.abi import ITEMSIZE, Access, ArgumentValue, KernelABI, Pointer, Region, TensorMap
from b12x._runtime.launch import NO_MAPS, Launch, MapShape, ParamBlock
from b12x._runtime.pack import Artifact, Pack
from b12x._runtime.spec import KernelSpec


@dataclass(frozen=True)
class EmulatorTarget:
    """The CPU, taken for a GPU of ``sm_count`` multiprocessors. ``options`` go to :func:`b12x.emulator.launch`."""

    sm_count: int = 170
    options: Any = None

    name = "emulator"
    device = "cpu"
    arch = "sm_120a"

    def missing(self, artifact: Artifact) -> str | None:
        return "has it without PTX, which the emulator runs" if artifact.ptx is None else None

    def capturing(self) -> bool:
        return False

    def load(self, artifact: Artifact, pack: Pack, spec: KernelSpec) -> EmulatorKernel:
        """Parse the PTX, its sha256 checked, unless that was done before."""
        return EmulatorKernel(self, spec, spec.abi(), artifact.entry, _parsed(pack.ptx(artifact)))


class EmulatorKernel:
    """A parsed kernel."""

    def __init__(self, target: EmulatorTarget, spec: KernelSpec, abi: KernelABI, entry: str, program: Any) -> None:
        self.target = target
        self.spec = spec
        self.abi = abi
        self.entry = entry
        self.program = program
        self.block = ParamBlock(spec.key, abi)

    def prepare(self, args: Mapping[str, Any], maps: Mapping[str, MapShape] = NO_MAPS) -> EmulatorLaunch:
        return EmulatorLaunch(self, args, maps)


class EmulatorLaunch(Launch):
    """A kernel with its arguments and the regions that it may touch."""

    __slots__ = ("_kernel", "_regions", "_values")

    def __init__(self, kernel: EmulatorKernel, args: Mapping[str, Any], maps: Mapping[str, MapShape]) -> None:
        super().__init__(kernel.block, args)
        self._kernel = kernel
        block = kernel.block
        names = [*(name for name, _ in block.pointers), *block.scalars]
        values: dict[str, ArgumentValue] = dict(zip(names, block.read(args), strict=True))
        for name in block.scalars:
            block.check_scalar(name, values[name])
        described = block.read_maps(args, maps, tensor_map.describe)
        values.update({name: value for (_, name, *_), value in zip(block.maps, described, strict=True)})
        self._values = values
        self._regions = _regions(kernel.abi, block.key, args)

    def set(self, name: str, value: int | float) -> None:
        self._block.check_scalar(name, value)
        self._values[name] = value

    def launch(self, stream: Any = None) -> None:
        from b12x import emulator

        kernel, contract = self._kernel, self._block.contract
        emulator.launch(
            kernel.program,
            kernel.entry,
            grid=self.grid,
            block=contract.block,
            cluster=self.cluster,
            dynamic_smem=contract.dynamic_smem,
            params=[self._values[p.name] for p in kernel.abi.params],
            regions=self._regions,
            options=kernel.target.options,
        )
        self._block.count()


def _regions(abi: KernelABI, key: str, args: Mapping[str, Any]) -> list[Region]:
    regions: list[Region] = []
    for p in abi.params:
        if isinstance(p, (Pointer, TensorMap)) and hasattr(args[p.name], "data_ptr"):
            regions.append(_region(key, p.name, p.dtype, p.access, args[p.name]))
    return regions


def _region(key: str, name: str, dtype: str, access: Access, tensor: Any) -> Region:
    size = tensor.element_size()
    if size != ITEMSIZE[dtype]:
        raise TypeError(
            f"{key}: {name} has elements of {size} bytes; needed are those of {dtype}, {ITEMSIZE[dtype]} bytes"
        )
    return Region(
        name=name,
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * size for stride in tensor.stride()),
        dtype=dtype,
        access=access,
        initialised=access != "w",
    )


@lru_cache(maxsize=256)
def _parsed(ptx: str) -> Any:
    from b12x import emulator

    return emulator.parse(ptx)
