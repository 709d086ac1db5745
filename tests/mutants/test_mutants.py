"""Broken kernels are noticed: by the emulator, or by the check of a numerical case."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import b12x
from b12x._runtime import packs
from b12x.build_tools.errors import BuildError
from b12x.build_tools.mutants.__main__ import main
from b12x.build_tools.mutants.families import FAMILIES, Family, family_of
from b12x.build_tools.mutants.judge import COMBINATIONS, CRASH, Run, find, first_finding, parsed
from b12x.build_tools.mutants.run import Report, judge_family, kernels_of
from b12x.build_tools.workers import default_jobs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEED = 1
#: Fewest mutants of a family, and the largest part of them that may survive.
ENOUGH, TOLERATED = 15, 0.1
KEY = "verify.mma:kind=f16"

by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kernel)


@pytest.fixture(scope="module", autouse=True)
def _installed(base_pack: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("B12X_PACK_PATH", str(base_pack))
        b12x.clear_all_caches()
        yield
    b12x.clear_all_caches()


@cache
def report_of(family: Family) -> Report:
    return judge_family(family, seed=SEED, count=family.count, jobs=default_jobs())


def listed(family: Family) -> dict[tuple[str, str, str, int, str], str]:
    """Survivors with a known reason, by the mutant's name."""
    table = tomllib.loads(Path(__file__).with_name("survivors.toml").read_text(encoding="utf-8"))
    return {
        (entry["key"], entry["operator"], entry["before"], entry.get("nth", 1), entry["after"]): entry["reason"]
        for entry in table["survivor"]
        if entry["key"] in family.keys
    }


@by_family
def test_kernels_as_they_are_raise_no_alarm(family):
    """Lockstep and random, eager and latest copies: every case passes on every key."""
    assert len(COMBINATIONS) == 4
    assert [f"{key}: {finding}" for key, finding in report_of(family).alarms] == []


@by_family
def test_mutants_are_noticed(family):
    """What survives is listed with its reason, what is listed survives, and that is at most a tenth."""
    report = report_of(family)
    assert len(report.outcomes) >= ENOUGH
    assert [str(outcome) for outcome in report.outcomes if outcome.crashed] == []
    survivors = {outcome.mutant.name for outcome in report.survivors}
    reasons = listed(family)
    assert sorted(survivors - set(reasons)) == [], "survived without a reason in survivors.toml"
    assert sorted(set(reasons) - survivors) == [], "listed in survivors.toml, but did not survive (or was not drawn)"
    assert all(reasons.values())
    assert len(survivors) <= TOLERATED * len(report.outcomes)


def test_every_family_is_listed():
    """A kernel of the default packs without mutants would be trusted for nothing."""
    held = {key.partition(":")[0] for pack in packs.installed() for key in pack.entries}
    assert held == {family.kernel for family in FAMILIES}
    for family in FAMILIES:
        assert {key.partition(":")[0] for key in family.keys} == {family.kernel}
        assert all(family.cases_of(key) for key in family.keys)
        assert family.count >= ENOUGH


def test_listed_survivors_name_keys_of_families():
    table = tomllib.loads(Path(__file__).with_name("survivors.toml").read_text(encoding="utf-8"))
    keys = {key for family in FAMILIES for key in family.keys}
    assert {entry["key"] for entry in table["survivor"]} <= keys


def test_endless_loops_end():
    text = kernels_of(family_of(KEY), KEY)[KEY].ptx
    spinning = text.replace("\tret;", "$spin: bra $spin;\n\tret;")
    assert find(KEY, parsed(spinning), Run(0, 0)).check == "StepLimit"
    assert find(KEY, None, Run(0, 0)).check is None


def test_failures_of_the_emulator_are_no_kills():
    finding = find(KEY, object(), Run(0, 0))
    assert finding.check == CRASH
    assert finding.text.startswith("AttributeError")


def test_text_that_does_not_parse_is_no_program():
    assert parsed("no PTX") is None


def test_a_key_without_cases_is_refused():
    with pytest.raises(BuildError, match=r"no case of verify\.mma launches verify\.mma:kind=bf16; list one"):
        first_finding("verify.mma:kind=bf16", None, [])


def test_command_prints_json(capsys):
    assert main([KEY, "--seed", "5", "--count", "4", "--operator", "drop-store", "--json", "-j", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["seed"], report["alarms"]) == ("verify.mma", 5, [])
    (mutant,) = report["mutants"]  # there is one store
    assert mutant["key"] == KEY
    assert mutant["operator"] == "drop-store"
    assert mutant["before"].startswith("st.global.v4.b32 ")
    assert mutant["killed_by"] == "WrongResult"
    assert mutant["run"].endswith("lockstep, late copies")


def test_command_prints_each_mutant_and_a_table(capsys):
    assert main(["verify.mma", "--seed", "5", "--count", "2", "--operator", "drop-store", "-j", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("WrongResult (3x16x8x") == 2
    assert out.rstrip().splitlines()[-1].startswith("verify.mma, seed 5: 2 of 2 mutants killed in ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemm.none", "mutants: no family 'gemm.none' has mutants; there are gemm.blockscaled, "),
        ("verify.mma:kind=none", "mutants: no installed pack holds verify.mma:kind=none; build manifests/base.toml"),
    ],
)
def test_command_refuses_unknown_kernels(capsys, name, message):
    assert main([name]) == 1
    assert capsys.readouterr().err.startswith(message)
