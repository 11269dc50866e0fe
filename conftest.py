"""Runs the package's doctests, and the tests beside them, where they may write; knows no test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def doctests_run_in_a_temporary_directory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path)
