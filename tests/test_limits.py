"""The system's limits of a process: maps, memory, open files. What fails says why, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts maps as Linux has them")

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("limit", "calls"),
    [
        ("maps", {"open", "reader", "creation"}),
        ("files", {"flush", "open", "creation"}),
        ("memory", {"open"}),
    ],
)
def test_a_table_at_a_limit_of_the_system_says_so_loses_nothing_and_goes_on(
    quick: Path, limit: str, calls: set[str]
) -> None:
    """Each call of its life is refused with what to do, or done; and is made again without."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    done = subprocess.run(
        [sys.executable, str(HERE / "limited_child.py"), limit, str(quick)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    refused = json.loads(done.stdout)
    assert calls <= set(refused), refused
