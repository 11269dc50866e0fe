"""The notebooks are committed as they were run: in order, with their outputs, without an error.

Running them is left to `.ci/run`, which does it with SMOKE_TEST=1.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A line that shows something whenever its cell runs: it is in no function and no branch.
SHOWS = re.compile(r"^(print|plt\.show|display)\(", re.MULTILINE)
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/[\w.-]+/[\w.-]+")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def text_of(output: nbformat.NotebookNode) -> str:
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def test_the_readme_lists_all_notebooks() -> None:
    listed = re.findall(r"\]\(notebooks/([^)]+)\)", (ROOT / "README.md").read_text())
    assert listed == [path.name for path in NOTEBOOKS]


@each_notebook
def test_a_notebook_is_valid_and_begins_with_its_title(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")
    assert notebook.metadata.kernelspec.name == "python3"


@each_notebook
def test_a_notebook_was_run_from_top_to_bottom(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@each_notebook
def test_a_cell_that_shows_something_has_it(path: Path) -> None:
    cells = code_cells(path)
    silent = [cell.source for cell in cells if SHOWS.search(cell.source) and not cell.outputs]
    assert silent == []
    drawn = [cell for cell in cells if "plt.show()" in cell.source]
    assert all(any("image/png" in out.get("data", {}) for out in cell.outputs) for cell in drawn)


@each_notebook
def test_outputs_have_no_error_no_warning_and_no_path_of_a_machine(path: Path) -> None:
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "execute_result",
        "display_data",
    }
    assert [text_of(output) for output in outputs if output.get("name") == "stderr"] == []
    assert [text for text in map(text_of, outputs) if ABSOLUTE_PATH.search(text)] == []
