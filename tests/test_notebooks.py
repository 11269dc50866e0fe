"""The notebooks as they are committed: run from top to bottom, with outputs, and of no machine.

That they run is seen by `.ci/run`, which runs each with ``SMOKE_TEST=1``.
"""

import json
import re
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = [
    "01_quickstart",
    "02_inspect_the_store",
    "03_resume_and_rollback",
    "04_knowledge_graph",
    "05_hyperbolic",
    "06_how_big_how_fast",
    "07_recommender",
]
# Where outputs show a store's path, it was replaced by one below /home/you, as in the docs.
OWN_PATH = re.compile(r"(?<![\w.:/<])/(?!home/you\b)[\w.-]+/[\w.-]+")


def test_there_are_seven_notebooks_and_the_readme_lists_them() -> None:
    files = [f"{name}.ipynb" for name in NAMES]
    assert sorted(path.name for path in FOLDER.iterdir() if path.suffix) == files
    readme = (FOLDER.parent / "README.md").read_text()
    assert re.findall(r"\]\(notebooks/([^)]+)\)", readme) == files


@pytest.fixture(params=NAMES)
def notebook(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    return nbformat.reads((FOLDER / f"{request.param}.ipynb").read_text(), as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def test_notebook_is_valid(notebook: nbformat.NotebookNode) -> None:
    nbformat.validate(notebook)


def test_notebook_begins_with_a_title_and_can_run_in_seconds(
    notebook: nbformat.NotebookNode,
) -> None:
    title, code = notebook.cells[:2]
    assert title.cell_type == "markdown" and re.match(r"# \S.*\n\n", title.source)
    assert 'SMOKE_TEST = os.environ.get("SMOKE_TEST") == "1"' in code.source


def test_notebook_was_run_from_top_to_bottom(notebook: nbformat.NotebookNode) -> None:
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    kinds = {output.output_type for output in outputs(notebook)}
    assert "stream" in kinds and "error" not in kinds
    assert any("image/png" in output.get("data", ()) for output in outputs(notebook))


def test_outputs_are_of_no_machine_and_no_time(notebook: nbformat.NotebookNode) -> None:
    assert not any(cell.metadata for cell in notebook.cells)
    for output in outputs(notebook):
        assert output.get("name") != "stderr"  # progress bars, warnings
        text = json.dumps(output.get("text") or {**output.data, "image/png": None})
        assert not OWN_PATH.search(text)


def test_a_path_of_ones_own_is_found() -> None:
    own = ("/tmp/tmpab/x.zarr", "at '/home/me/x'", "/data/x", "/Users/me/x")
    assert all(OWN_PATH.search(text) for text in own)
    assert not any(OWN_PATH.search(text) for text in ("/home/you/x", "rows/tmp/s", "</tmp>"))
