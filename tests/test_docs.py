"""The README and the docs: code runs, commands exist, links and names lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import ooc_embed
from ooc_embed import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
# In the line before a block that no test runs: <!-- not run: needs a GPU -->
REASON = re.compile(r"<!-- not run: \S.* -->\n\Z")
# In the line before a block that .ci/run takes from the README: <!-- command: tests -->
OF_CI = re.compile(r"<!-- command: (?P<name>\w+) -->\n\Z")
DIRECTIVE = re.compile(r"\{[\w-]+\}.*")


class Block(NamedTuple):
    """A fenced block, its first line's number, and what stands before it on the page."""

    language: str
    text: str
    line: int
    before: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(found["language"], found["text"], line, text[: found.start()])


def commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def run_command(words: list[str]) -> None:
    """Run a command on a store that the page has made; see that any other is one that exists."""
    assert words[0] == "ooc-embed", f"say why this is not run: {shlex.join(words)}"
    args = cli._parser().parse_args(words[1:])
    if (Path(getattr(args, "path", None) or "") / "zarr.json").exists():
        assert cli.main(words[1:]) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # workers that are forked
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_in_order_in_an_empty_folder(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs, commands on stores run, other commands are parsed, or a reason is given."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        if REASON.search(block.before) or OF_CI.search(block.before):
            continue
        if block.language == "python":
            # Blank lines before it, so that a traceback names the page's own line.
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(page), "exec"), namespace)
        elif block.language == "bash":
            for words in commands(block):
                run_command(words)
        else:
            known = block.language == "text" or DIRECTIVE.fullmatch(block.language)
            assert known, f"line {block.line}: ```{block.language} is no python, bash or text"


def test_commands_that_are_left_to_ci_are_ones_that_it_takes_from_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for page in PAGES:
        for block in blocks(page):
            if found := OF_CI.search(block.before):
                assert page.name == "README.md"
                assert f"readme_command {found['name']}" in script


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    prose = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", prose):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    described = re.findall(r"^\.\. auto\w+:: (\S+)$", page, re.MULTILINE)
    names = {name.removeprefix("ooc_embed.") for name in described}
    assert names == set(ooc_embed.__all__) - {"__version__"}
