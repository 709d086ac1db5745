"""Records which instruction forms the tests of this folder run, and lets the test that judges this run last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from . import coverage

LAST = "test_every_accepted_form_has_a_test"
HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def record_forms() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        coverage.install(patch)
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    last = [item for item in items if item.name == LAST]
    if last:
        items[:] = [item for item in items if item.name != LAST] + last


@pytest.fixture
def whole_folder(request: pytest.FixtureRequest) -> bool:
    """Whether every test of the folder is part of this run."""
    files = {item.path for item in request.session.items}
    narrowed = request.config.option.keyword or request.config.option.markexpr or "::" in "".join(request.config.args)
    return not narrowed and all(path in files for path in HERE.glob("test_*.py"))
