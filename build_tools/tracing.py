"""The launch that a jit function asks for, read from the DSL's own module before and after lowering.

The PTX carries neither dynamic shared memory nor clusters nor launch attributes, so inspection compares these with the
spec. Walks operations of the pinned DSL version by name; one that is not found is an error, never a default.
"""

from __future__ import annotations

from typing import Any

from b12x._runtime.abi import Dim3, LaunchContract

from .errors import BuildError

# The launch configuration in the lowered host code: grid, block, dynamic shared memory, stream, attributes, count.
_CONFIG_TYPE = "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
_BLOCK_FIELD, _SMEM_FIELD = 1, 2


class LaunchTrace:
    """Collects the launch of one compilation; pass :meth:`on_trace` as the DSL's ``trace_finalize_hooks``."""

    def __init__(self) -> None:
        self._cluster: Dim3 = (1, 1, 1)
        self._programmatic = False
        self._launches = 0

    def on_trace(self, _dsl: Any, module: Any, _name: str) -> None:
        for op in _operations(module):
            if op.name == "cuda.launch_cfg.create":
                self._launches += 1
            elif op.name == "cuda.launch_cfg.cluster_dim":
                x, y, z = (_constant(v, "cluster shape") for v in list(op.operands)[1:4])
                self._cluster = (x, y, z)
            elif op.name == "cuda.launch_cfg.programmatic_stream_serialization_allowed":
                self._programmatic = _constant(list(op.operands)[1], "launch attribute") != 0

    def contract(self, lowered: Any) -> LaunchContract:
        """The launch contract, given the module after compilation."""
        if self._launches != 1:
            raise BuildError(f"the jit function launches {self._launches} kernels, expected exactly one")
        fields: dict[tuple[int, ...], int] = {}
        for op in _operations(lowered):
            if op.name != "llvm.getelementptr" or _CONFIG_TYPE not in str(op.attributes["elem_type"]):
                continue
            field = tuple(op.attributes["rawConstantIndices"])[1:]
            if field[0] not in (_BLOCK_FIELD, _SMEM_FIELD):
                continue
            stores = [use.owner for use in op.results[0].uses if use.owner.name == "llvm.store"]
            for store in stores:
                fields[field] = _constant(store.operands[0], "block shape or dynamic shared memory")
        try:
            x, y, z = (fields[_BLOCK_FIELD, axis] for axis in range(3))
            smem = fields[_SMEM_FIELD,]
        except KeyError as error:
            raise BuildError(
                "the DSL's host code holds no launch configuration in the form this version writes"
            ) from error
        return LaunchContract((x, y, z), smem, self._cluster, self._programmatic)


def _operations(module: Any) -> list[Any]:
    from cutlass._mlir import ir

    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _constant(value: Any, what: str) -> int:
    owner = value.owner
    if getattr(owner, "name", "") not in ("arith.constant", "llvm.mlir.constant"):
        raise BuildError(f"the {what} of the launch is not a compile-time constant")
    return int(owner.attributes["value"].value)
