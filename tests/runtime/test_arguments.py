"""Checks of tensor arguments and scratch: each refusal says op, argument, found, needed and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import b12x
from b12x._runtime import checks, scratch

GOOD: dict[str, Any] = {"dtype": ("uint8", "bfloat16"), "shape": (4, None), "device": "cpu"}


def check(value: Any, **changes: Any) -> None:
    checks.tensor("toy.copy", "x", value, **{**GOOD, **changes})


def test_what_fits_passes() -> None:
    x = torch.zeros(4, 32, dtype=torch.bfloat16)
    check(x)
    check(x, shape=None)
    check(x, strides=(32, 1))
    check(x, strides=(None, 1))
    check(x[:, :16], strides=(None, 1))
    check(torch.zeros(4, 1, dtype=torch.uint8).T.reshape(4, 1), strides=(1, 77))
    check(torch.zeros(4, 0, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("value", "changes", "error", "words"),
    [
        (None, {}, TypeError, ("x is a NoneType", "needed is a uint8 or bfloat16 tensor", "make one")),
        ([1, 2], {}, TypeError, ("x is a list", "make one with torch.tensor(..., device='cpu')")),
        (torch.zeros(4, 2), {}, TypeError, ("dtype float32", "needed is uint8 or bfloat16", "convert it")),
        (torch.zeros(4, 2), {"dtype": "float16"}, TypeError, ("dtype float32", "needed is float16", "convert it")),
        (
            torch.zeros(3, 2, dtype=torch.uint8),
            {},
            ValueError,
            ("shape (3, 2)", "needed is (4, any)", "reshape or slice it"),
        ),
        (torch.zeros(4, dtype=torch.uint8), {}, ValueError, ("shape (4,)", "needed is (4, any)", "plan for its shape")),
        (
            torch.zeros(4, 2, dtype=torch.uint8),
            {"device": "cuda:1"},
            ValueError,
            ("is on cpu", "needed is cuda:1", "move it or plan for cpu"),
        ),
        (
            torch.zeros(32, 4, dtype=torch.uint8).T,
            {},
            ValueError,
            ("strides (1, 4)", "needed is contiguous", ".contiguous()"),
        ),
        (
            torch.zeros(4, 32, dtype=torch.uint8),
            {"strides": (64, 1)},
            ValueError,
            ("strides (32, 1)", "needed is (64, 1)", "copy it"),
        ),
        (
            torch.zeros(4, 32, dtype=torch.uint8),
            {"strides": (64,)},
            ValueError,
            ("strides (32, 1)", "needed is (64,)", "copy it"),
        ),
        (
            torch.zeros(130, dtype=torch.uint8)[2:].view(4, 32),
            {},
            ValueError,
            ("2 bytes past a multiple of 16", "needed is a multiple of 16", "or a copy"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    value: Any, changes: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        check(value, **changes)
    for word in ("toy.copy: x ", *words):
        assert word in str(caught.value)


def test_what_torch_negates_when_it_reads_is_refused() -> None:
    negated = torch._neg_view(torch.ones(4, 2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x is a tensor that torch negates .*whose memory holds.*x.resolve_neg\(\)"):
        check(negated)
    check(negated.resolve_neg())


def test_sizes_are_ints_in_a_range() -> None:
    assert checks.whole("toy.copy", "m", 7) == 7
    for value in (1.5, 24.0, True, "4", None):
        with pytest.raises(TypeError) as caught:
            checks.whole("toy.copy", "m", value)
        for word in (f"toy.copy: m is {value!r}, a {type(value).__name__}", "needed is an int", "convert it"):
            assert word in str(caught.value)
    for value in (0, 2**31 - 255):
        with pytest.raises(ValueError, match=rf"toy.copy: m is {value}; needed is 1 to {2**31 - 256}: choose"):
            checks.whole("toy.copy", "m", value)


def test_largest_size_leaves_room_to_round_up() -> None:
    assert -(-checks.LARGEST // 128) * 128 + 128 < 2**31


def test_device_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    names = [
        checks.device_name(d) for d in ("cuda", "cuda:1", 2, torch.device("cuda:1"), "cpu", torch.device("cpu", 0))
    ]
    assert names == ["cuda:3", "cuda:1", "cuda:2", "cuda:1", "cpu", "cpu"]


def check_memory(outputs: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], align: int = 1) -> None:
    named = {**outputs, **inputs}
    loose: dict[str, Any] = {"dtype": ("uint8", "int16"), "shape": None, "device": "cpu", "strides": checks.ANY}
    sizes = [checks.layout("toy.copy", name, checks.facts(x), **loose) for name, x in named.items()]
    arguments = [(name, align) for name in (*named, "one that is optional")]
    checks.memory("toy.copy", arguments, list(named.values()), sizes, len(outputs))


def test_overlap_is_refused_by_name_and_range() -> None:
    storage = torch.zeros(256, dtype=torch.uint8)
    check_memory({"y": storage[:64], "z": storage[64:128]}, {"x": storage[128:]})
    check_memory({"y": storage[64:128]}, {"x": storage[:64], "z": storage[128:]})
    check_memory({"y": storage[:64]}, {"x": storage[10:10]})
    check_memory({}, {"a": storage, "b": storage})
    with pytest.raises(ValueError, match=r"output y and x overlap in memory .*separate tensors: pass a copy"):
        check_memory({"y": storage[:65]}, {"x": storage[64:]})
    with pytest.raises(ValueError, match="output y and z overlap"):
        check_memory({"y": storage, "z": storage[255:]}, {})


def test_alignment_of_every_argument_is_checked() -> None:
    storage = torch.zeros(300, dtype=torch.uint8)
    first = -storage.data_ptr() % 16
    check_memory({"y": storage[first : first + 64]}, {"x": storage[first + 64 :]}, align=16)
    for name, y, x in (("y", first + 1, first + 64), ("x", first, first + 66)):
        with pytest.raises(ValueError, match=rf"{name} starts at an address . bytes past a multiple of 16"):
            check_memory({"y": storage[y : y + 32]}, {"x": storage[x : x + 32]}, align=16)


def test_layout_gives_the_bytes_spanned() -> None:
    loose: dict[str, Any] = {"dtype": "int16", "shape": None, "device": "cpu", "strides": checks.ANY}
    x = torch.zeros(7, 9, dtype=torch.int16)
    for view, size in ((x, 126), (x[:, :4], 6 * 18 + 8), (x.T, 126), (x[:0], 0), (x[2:3, 3:4], 2), (x[0, 0], 2)):
        assert checks.layout("toy.copy", "x", checks.facts(view), **loose) == size


@given(extents=st.lists(st.integers(0, 3), max_size=4), strides=st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_contiguous_as_torch_says(extents: list[int], strides: list[int]) -> None:
    for steps in (strides[: len(extents)], torch.zeros(extents).stride()):
        x = torch.zeros(200).as_strided(extents, steps)
        assert checks.contiguous(checks.facts(x)) == x.is_contiguous()


@given(
    a=st.tuples(st.integers(0, 20), st.integers(0, 4), st.integers(0, 4), st.integers(1, 9)),
    b=st.tuples(st.integers(0, 20), st.integers(0, 4), st.integers(0, 4), st.integers(1, 9)),
)
def test_overlap_agrees_with_the_bytes_spanned(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    storage = torch.zeros(200, dtype=torch.int16)

    def view(start: int, rows: int, columns: int, pitch: int) -> tuple[torch.Tensor, set[int]]:
        x = storage.as_strided((rows, columns), (pitch, 1), start)
        elements = [start + r * pitch + c for r in range(rows) for c in range(columns)]
        return x, set(range(min(elements), max(elements) + 1)) if elements else set()

    (x, x_bytes), (y, y_bytes) = view(*a), view(*b)
    try:
        check_memory({"x": x}, {"y": y})
        overlap = False
    except ValueError:
        overlap = True
    assert overlap == bool(x_bytes & y_bytes)


def test_scratch_spec_is_what_the_caller_allocates() -> None:
    (spec,) = scratch.Layout({"a": 10, "b": 5}).specs("cpu")
    assert isinstance(spec, b12x.ScratchBufferSpec)
    assert (spec.name, spec.shape, spec.dtype, spec.device) == ("scratch", (1029,), torch.uint8, "cpu")
    assert spec.nbytes == 1029
    assert b12x.ScratchBufferSpec("s", (3, 4), "bfloat16", "cpu").nbytes == 24
    assert b12x.ScratchBufferSpec("s", (3,), torch.float32, "cpu").nbytes == 12
    assert scratch.Layout({}).specs("cpu")[0].shape == (1,)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 5000), max_size=6))
def test_sub_buffers_are_aligned_disjoint_and_inside(sizes: dict[str, int]) -> None:
    layout = scratch.Layout(sizes)
    buffer = torch.zeros(max(layout.nbytes, 1), dtype=torch.uint8)
    parts = layout.carve(buffer)
    assert list(parts) == list(sizes)
    for number, (name, part) in enumerate(parts.items(), start=1):
        assert part.shape == (sizes[name],)
        assert (part.storage_offset()) % 1024 == 0
        part += number
    assert int(buffer.sum()) == sum(number * size for number, size in enumerate(sizes.values(), start=1))
    assert layout.nbytes <= sum(-(-size // 1024) * 1024 for size in sizes.values())


def test_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' has -1 bytes"):
        scratch.Layout({"a": -1})


def test_scratch_comes_in_three_forms() -> None:
    layout = scratch.Layout({"a": 10})
    specs = layout.specs("cpu")
    buffer = torch.zeros(100, dtype=torch.uint8)
    for form in (buffer, {"scratch": buffer, "other": None}, [buffer], (buffer,), buffer.view(10, 10)):
        found = scratch.select("toy.copy", specs, form)
        assert found.shape == (10,)
        assert found.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize(
    ("form", "error", "words"),
    [
        ({"workspace": torch.zeros(10)}, KeyError, ("['workspace']", "needed is 'scratch'", "10 bytes")),
        ([], ValueError, ("sequence of 0 tensors", "exactly one")),
        ([torch.zeros(1)] * 2, ValueError, ("sequence of 2 tensors", "exactly one")),
        (torch.zeros(10), TypeError, ("dtype float32", "needed is uint8")),
        (None, TypeError, ("NoneType", "uint8 tensor")),
        (torch.zeros(9, dtype=torch.uint8), ValueError, ("has 9 bytes", "needed are 10", "plan.scratch_specs()")),
        (torch.zeros(20, dtype=torch.uint8)[::2], ValueError, ("strides (2,)", "contiguous")),
        (torch.zeros(10, dtype=torch.uint8, device="meta"), ValueError, ("is on meta", "needed is cpu")),
    ],
)
def test_wrong_scratch_is_refused(form: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    specs = scratch.Layout({"a": 10}).specs("cpu")
    with pytest.raises(error) as caught:
        scratch.select("toy.copy", specs, form)
    for word in ("toy.copy: ", *words):
        assert word in str(caught.value)
