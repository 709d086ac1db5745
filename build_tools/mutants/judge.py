"""Runs one kernel, as it is or broken, on its family's cases: what the emulator or a case's check finds first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

import b12x
from b12x import emulator
from b12x._runtime import resolve
from b12x._runtime.emulator_target import EmulatorKernel
from b12x._runtime.launch import Target
from b12x._runtime.spec import Role, spec_from_key
from b12x.emulator import EmulatorError, Options, Program
from b12x.verify.runner import EMULATED_SMS, packs_only

from ..errors import BuildError
from .families import family_of

#: Several times what the longest case takes; a kernel that goes on beyond has lost its way.
_MAX_STEPS = 300_000
#: How a kernel is run: warps together or in random order, copies as late as allowed or at once; races as PTX has them.
COMBINATIONS = tuple(
    Options(schedule=schedule, copies=copies, races="strict", max_steps=_MAX_STEPS)
    for schedule in ("lockstep", "random")
    for copies in ("late", "eager")
)
#: The checks of a finding that are no error of the emulator's about the kernel: a case's own check, and the emulator's
#: own failure.
WRONG, CRASH = "WrongResult", "Crash"


@dataclass(frozen=True)
class Run:
    """A case of a family under one of :data:`COMBINATIONS`, both by index."""

    case: int
    combination: int


@dataclass(frozen=True)
class Finding:
    """What one run found. ``check`` is the emulator's error by name, :data:`WRONG` or :data:`CRASH`; None where nothing
    was found. ``where`` names the run."""

    check: str | None
    text: str
    where: str


def runs_of(key: str) -> list[Run]:
    """Every case of a kernel under every combination, what is cheap first: cases in their order, lockstep first."""
    count = len(family_of(key).cases_of(key))
    return [Run(case, k) for k in range(len(COMBINATIONS)) for case in range(count)]


def parsed(ptx: str) -> Program | None:
    """The program of a mutant; None where it is none."""
    try:
        return emulator.parse(ptx)
    except EmulatorError:
        return None


def first_finding(key: str, program: Program | None, runs: Sequence[Run]) -> Finding:
    """What the first of some runs that finds anything finds, or the last run's nothing.

    ``program`` takes the place of the kernel of the installed packs; None runs that as it is.
    """
    finding = None
    for run in runs:
        finding = find(key, program, run)
        if finding.check is not None:
            break
    if finding is None:
        raise BuildError(f"no case of {family_of(key).kernel} launches {key}; list one in its family's row")
    return finding


def find(key: str, program: Program | None, run: Run) -> Finding:
    """One run. Everything that a broken kernel may do to the emulator is a finding."""
    torch.set_num_threads(1)  # the tensors are small, and other processes judge other mutants
    case, options = family_of(key).cases_of(key)[run.case], COMBINATIONS[run.combination]
    where = f"{case.name}, {options.schedule}, {options.copies} copies"
    with packs_only(), b12x.target("emulator", sm_count=EMULATED_SMS, options=options) as target:
        prepared = case.prepare(target.device, case.generator(target.device, 0))
        try:
            with _running(key, target, program):
                prepared.launch()
            judgement = prepared.judge()
        except EmulatorError as error:
            return Finding(type(error).__name__, str(error).partition("\n")[0], where)
        except Exception as error:  # a fault of the emulator must not end the run of the other mutants
            return Finding(CRASH, f"{type(error).__name__}: {error}", where)
    return Finding(WRONG if judgement.wrong else None, str(judgement), where)


@contextmanager
def _running(key: str, target: Target, program: Program | None) -> Iterator[None]:
    """A loaded kernel runs another program inside."""
    loaded = resolve.resolve(_role(key), target, family_of(key).kernel).loaded
    assert isinstance(loaded, EmulatorKernel)
    own = loaded.program
    loaded.program = program or own
    try:
        yield
    finally:
        loaded.program = own


@lru_cache(maxsize=64)
def _role(key: str) -> Role:
    return Role("mutant", (spec_from_key(key),))
