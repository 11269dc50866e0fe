"""Every Python block of the README and the docs runs, in order, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block that cannot run in a test is marked with its reason: <!-- not run: needs a GPU -->
BLOCK = re.compile(r"(<!-- not run: .+? -->\s*)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # workers that are forked
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        if block[1] is None:
            # Blank lines before it, so that a traceback names the page's own line.
            before = "\n" * text.count("\n", 0, block.start(2))
            exec(compile(before + block[2], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
