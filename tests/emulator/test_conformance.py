"""Every opcode that is registered, and every modifier that its decoder accepts, has to be in a test that ran."""

from __future__ import annotations

import pytest

from . import coverage


def test_every_accepted_form_has_a_test(whole_folder: bool) -> None:
    if not whole_folder:
        pytest.skip("needs a run of the whole folder")
    missing = coverage.missing()
    assert not missing, f"{len(missing)} forms without a test: {'; '.join(missing)}"
