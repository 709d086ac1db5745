"""Manifests: what they expand to, and where their errors point."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from b12x._runtime.registry import list_ops
from b12x.build_tools.errors import ManifestError
from b12x.build_tools.manifest import known_ops, load_manifest
from b12x.build_tools.toml_lines import key_lines
from tests.build_tools.conftest import ROOT, TOYS, part_of_b12x

GOOD = """\
name = "toys"
description = "for tests"

[[op]]
op = "toy.scale"
n = [1, 1000]
fast = true

[[model]]
name = "a model"
[[model.op]]
op = "toy.scale"
n = 64
"""


def load(folder: Path, text: str):
    path = folder / "m.toml"
    path.write_text(text)
    return load_manifest(path)


def error_of(folder: Path, text: str) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        load(folder, text)
    assert str(caught.value).startswith(f"{folder / 'm.toml'}:{caught.value.line}: ")
    return caught.value


def test_expansion_lists_every_candidate_of_every_role_once(toys: Path, tmp_path: Path) -> None:
    manifest = load(tmp_path, GOOD)
    assert (manifest.name, manifest.description) == ("toys", "for tests")
    assert [(r.op, r.caps.n, r.caps.fast, r.model, r.line) for r in manifest.requests] == [
        ("toy.scale", 1, True, None, 4),
        ("toy.scale", 1000, True, None, 4),
        ("toy.scale", 64, False, "a model", 11),
    ]
    # "many" has two candidates when fast, one of which serves "few" as well.
    assert [spec.key for spec in manifest.specs()] == [
        "toy.scale:variant=good,block=128",
        "toy.scale:variant=good,block=64",
    ]


def test_planners_never_see_a_device(toys: Path, tmp_path: Path) -> None:
    assert {request.caps.device for request in load(tmp_path, GOOD).requests} == {None}
    error = error_of(tmp_path, GOOD + 'device = "cuda:0"\n')
    assert error.line == 14
    assert "unknown field of toy.scale" in str(error)


ERRORS = [
    # text, line, key, parts of the message
    ('name = "Toys"\n' + GOOD[13:], 1, "name", ["found 'Toys'", "expected lower-case letters"]),
    (GOOD[GOOD.index("desc") :], 1, "", ["the key 'name' is missing", "expected a string"]),
    (GOOD.replace('"toys"', "3"), 1, "name", ["found 3", "expected a string"]),
    (GOOD.replace("description", "descripton"), 2, "descripton", ["did you mean 'description'?", "name, description"]),
    (GOOD.replace("toy.scale", "toy.scael", 1), 5, "op[0].op", ["unknown op 'toy.scael'", "did you mean 'toy.scale'?"]),
    (GOOD.replace("fast", "fasst"), 7, "op[0].fasst", ["did you mean 'fast'?", "one of fast, n, variant"]),
    (GOOD.replace("n = 64\n", ""), 11, "model[0].op[0]", ["toy.scale needs the field 'n'", "missing"]),
    (GOOD.replace("n = 64", 'n = "64"'), 13, "model[0].op[0].n", ["found '64'", "expected an integer"]),
    (GOOD.replace("1000]", "true]"), 6, "op[0].n", ["found True", "expected an integer"]),
    (GOOD.replace("fast = true", "fast = 1"), 7, "op[0].fast", ["found 1", "expected a boolean"]),
    (GOOD.replace("[1, 1000]", "[]"), 6, "op[0].n", ["found an empty list", "a list of values"]),
    (GOOD.replace("n = 64", "n = 0"), 13, "model[0].op[0].n", ["n is 0", "must be at least 1"]),
    (GOOD.replace('name = "a model"\n', ""), 9, "model[0]", ["the key 'name' is missing"]),
    (GOOD.replace("[[model.op]]", "[model.op]"), 11, "model[0].op", ["expected tables", "[[model.op]]"]),
    ('name = "toys"\nop = 3\n', 2, "op", ["expected tables", "[[op]]"]),
    ('name = "toys"\n', 1, "", ["names no op", "[[op]] or [[model.op]]"]),
    (GOOD + "n = 65\n", 14, "", ["not TOML", "14"]),
    (GOOD + "k = \n", 14, "", ["not TOML", "14"]),
]


@pytest.mark.parametrize(("text", "line", "key", "parts"), ERRORS)
def test_errors_carry_line_and_key(
    toys: Path, tmp_path: Path, text: str, line: int, key: str, parts: list[str]
) -> None:
    error = error_of(tmp_path, text)
    assert (error.line, error.key) == (line, key)
    for part in parts:
        assert part in str(error)


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"absent.toml:0: cannot be read: No such file .*expected a TOML manifest"):
        load_manifest(tmp_path / "absent.toml")
    (tmp_path / "bytes.toml").write_bytes(b'name = "toys"\n# caf\xe9\n')
    with pytest.raises(ManifestError, match=r"bytes.toml:2: byte 0xe9 is not UTF-8"):
        load_manifest(tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("base", {meta.qualname for meta in list_ops()} | {"verify.mma"}),
        ("demo", {"gemm.blockscaled", "quantization.nvfp4"}),
    ],
)
def test_the_manifests_of_the_repository(name: str, ops: set[str]) -> None:
    manifest = load_manifest(ROOT / "manifests" / f"{name}.toml")
    assert manifest.name == name
    assert {request.op for request in manifest.requests} == ops


def test_base_reaches_every_op_dtype_and_role() -> None:
    manifest = load_manifest(ROOT / "manifests" / "base.toml")
    assert set(known_ops()) == {request.op for request in manifest.requests}
    base = {spec.key for spec in manifest.specs()}
    assert {s.key for s in load_manifest(ROOT / "manifests" / "demo.toml").specs()} <= base
    from b12x.gemm.blockscaled.planner import LEAST_MAX_M
    from b12x.gemm.blockscaled.recipes import C_DTYPES, RECIPES
    from b12x.quantization.nvfp4.spec import DTYPES
    from b12x.verify.mma.spec import KINDS

    held = Counter(key.partition(":")[0] for key in base)
    variants = len(RECIPES) * len(C_DTYPES)
    assert held["gemm.blockscaled"] == variants * (len(LEAST_MAX_M) - 1)
    assert (
        len([key for key in base if key.startswith("gemm.blockscaled.decode:") and "source=quantized" in key])
        == variants
    )
    assert held["quantization.nvfp4"] == len(DTYPES)
    assert held["verify.mma"] == len(KINDS)
    assert len(base) <= 400


# ---- properties: any layout of the text, any combination of values ----

values = st.sampled_from(["good", "align", "local"])
tables = st.fixed_dictionaries(
    {"n": st.lists(st.integers(1, 200), min_size=1, max_size=3)},
    optional={
        "variant": st.lists(values, min_size=1, max_size=2),
        "fast": st.lists(st.booleans(), min_size=1, max_size=2),
    },
)


@st.composite
def layouts(draw: st.DrawFn):
    """A list of op tables, its text in some layout, and the line of every key in it."""
    content = draw(st.lists(tables, min_size=1, max_size=4))
    lines = ['name = "toys"']
    places: dict[tuple[int, str], int] = {}
    for index, table in enumerate(content):
        lines += draw(st.lists(st.sampled_from(["", "# n = 1", "  # [[op]]", '# "'])))
        lines.append(draw(st.sampled_from(["[[op]]", "[[ op ]]  # [x]", '[["op"]]'])))
        places[index, ""] = len(lines)
        entries = draw(st.permutations([("op", ["toy.scale"]), *table.items()]))
        for key, choices in entries:
            places[index, key] = len(lines) + 1
            written = draw(st.sampled_from([key, f'"{key}"', f"  {key}"]))
            texts = [_toml(value, draw) for value in choices]
            if len(texts) == 1 and (key == "op" or draw(st.booleans())):
                lines.append(f"{written} = {texts[0]} # a comment, ]")
            elif draw(st.booleans()):
                lines += [f"{written} = [ # n = 3", *(f"  {text}, # '" for text in texts), "]"]
            else:
                lines.append(f"{written}=[{', '.join(texts)}]")
    return content, "\n".join(lines) + "\n", places


def _toml(value: object, draw: st.DrawFn) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        quote = draw(st.sampled_from(['"', "'", '"""', "'''"]))
        return f"{quote}{value}{quote}"
    return str(value)


@given(layouts())
def test_any_layout_expands_to_the_product_of_its_values(tmp_path_factory: pytest.TempPathFactory, layout) -> None:
    content, text, _ = layout
    expected = [(n, variant, fast) for table in content for n, variant, fast in _product(table)]
    with part_of_b12x(TOYS):
        manifest = load(tmp_path_factory.mktemp("m"), text)
        found = [(r.caps.n, r.caps.variant, r.caps.fast) for r in manifest.requests]
        assert sorted(found) == sorted(expected)
        blocks = {(variant, 64) for _, variant, _ in expected}
        blocks |= {(variant, 128) for n, variant, _ in expected if n > 64}
        assert {(spec.variant, spec.block) for spec in manifest.specs()} == blocks


def _product(table: dict[str, list]) -> itertools.product:
    return itertools.product(table["n"], table.get("variant", ["good"]), table.get("fast", [False]))


@given(layouts(), st.data())
def test_any_layout_has_its_errors_where_they_are(
    tmp_path_factory: pytest.TempPathFactory, layout, data: st.DataObject
) -> None:
    _, text, places = layout
    index, key = data.draw(st.sampled_from(sorted(place for place in places if place[1])))
    line = places[index, key]
    assert key_lines(text)["op", index, key] == line
    lines = text.split("\n")
    lines[line - 1] = re.sub(rf'(\s*"?){key}', r"\1wrong", lines[line - 1], count=1)
    with part_of_b12x(TOYS):
        error = error_of(tmp_path_factory.mktemp("m"), "\n".join(lines))
    if key == "op":
        assert (error.line, error.key) == (places[index, ""], f"op[{index}]")
        assert "the key 'op' is missing" in str(error)
    else:
        assert (error.line, error.key) == (line, f"op[{index}].wrong")
        assert "expected one of fast, n, variant" in str(error)
