"""What the original instruction of a case gives, in a process without torch: it is imported by worker processes."""

from __future__ import annotations

import numpy as np
import paths  # noqa: F401

from b12x.build_tools.rehost.case_data import Words
from b12x.build_tools.rehost.cases import Case, all_cases, emulate, expected_results


def inputs(case: Case, number: int, seed: int) -> Words:
    """The case's inputs in the run of this seed."""
    return case.inputs(np.random.default_rng([seed, number]))


def results(number: int, seed: int) -> tuple[Words, Words | None]:
    """Results of case ``number``, and for sums what bounds their sums of magnitudes."""
    case = all_cases()[number]
    words = inputs(case, number, seed)
    bounds = emulate(case.ptx, case.magnitudes(words), case.results) if case.magnitudes else None
    return expected_results(case, words), bounds
