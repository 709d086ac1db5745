"""The table of ops and its agreement with the ops' modules."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace

import pytest

import b12x


def test_ops_are_sorted_and_found_by_name() -> None:
    ops = b12x.list_ops()
    assert isinstance(ops, tuple)
    assert [op.qualname for op in ops] == sorted(op.qualname for op in ops)
    assert {"gemm.blockscaled", "quantization.nvfp4"} <= {op.qualname for op in ops}
    for op in ops:
        assert isinstance(op, b12x.OpMeta)
        assert b12x.find_op(op.qualname) is op
        assert op.archs == ("sm120a", "sm121a")
        assert op.qualname == f"{op.group}.{op.name}"


def test_unknown_op_lists_what_there_is() -> None:
    with pytest.raises(KeyError) as caught:
        b12x.find_op("gemm.blockscale")
    for word in ("unknown op 'gemm.blockscale'", "quantization.nvfp4", "did you mean 'gemm.blockscaled'?"):
        assert word in str(caught.value)


@pytest.mark.parametrize("op", b12x.list_ops(), ids=lambda op: op.qualname)
def test_modules_export_what_the_table_says(op: b12x.OpMeta) -> None:
    module = importlib.import_module(op.module)
    assert module.META is op
    assert set(module.__all__) == {*op.entry_points, "META"}
    assert all(hasattr(module, name) for name in module.__all__)
    assert callable(module.is_supported)


@pytest.mark.parametrize("op", b12x.list_ops(), ids=lambda op: op.qualname)
def test_no_group_function_hides_an_op_module(op: b12x.OpMeta) -> None:
    group = getattr(b12x, op.group)
    module = importlib.import_module(op.module)
    found = getattr(group, op.name)
    if op.module == f"b12x.{op.qualname}":
        assert inspect.ismodule(found)
    else:  # the group's function has the op's name
        assert inspect.isfunction(found)
        assert found is getattr(module, op.name)


def test_clearing_caches_calls_imported_ops_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    monkeypatch.setitem(sys.modules, "b12x.gemm.blockscaled", SimpleNamespace(clear_caches=lambda: cleared.append(1)))
    monkeypatch.delitem(sys.modules, "b12x.quantization.nvfp4", raising=False)
    b12x.clear_all_caches()
    assert cleared == [1]
    assert "b12x.quantization.nvfp4" not in sys.modules
