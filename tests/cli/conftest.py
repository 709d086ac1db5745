"""The runtime's fixtures, and running the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from b12x.cli import main
from tests.runtime.conftest import clean_runtime, fake_driver, install

__all__ = ["clean_runtime", "fake_driver", "install"]


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def b12x_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run ``b12x ARGS...`` in this process."""

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as stop:
            status = int(stop.code or 0)
        return Result(status, *capsys.readouterr())

    return run
