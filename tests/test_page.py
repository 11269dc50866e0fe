"""`ooc-embed report`: what is on the page, that it needs nothing else, and where it is not put."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import ooc_embed
from ooc_embed import cli, plots

# Elements without an end.
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """The elements of a page, in order, each with its attributes; and its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def store(stores, tmp_path: Path) -> Path:
    """A closed store with a name that is no HTML, whose rows 1 and 3 were written."""
    path = tmp_path / "a & <b>.zarr"
    stores.make(10, 2, path=path)(torch.tensor([1, 3])).sum().backward()
    stores.tables[-1].close()
    return path


def test_report_is_one_page_with_card_and_plots(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert cli.main(["report", str(store), "--html", str(out)]) == 0
    assert capsys.readouterr().out == f"report: {out}\n"
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert [name for name, _ in page.elements].count("figure") == 3
    with ooc_embed.open_table(store) as table:
        drawn = [plots.norms(table), plots.updates(table), plots.touched(table)]
        card = Page(ooc_embed.describe(table)._repr_html_())
    labels = [picture["aria-label"] for picture in page.all("svg")]
    assert [ax.get_title() for ax in drawn] == labels[-3:]
    assert card.text in page.text
    assert "Verify" not in page.text
    assert ooc_embed.__version__ in page.text
    assert f"ooc-embed report '{store}' --html {out}" in page.text
    assert re.search(r"a & <b>\.zarr, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", page.text)
    assert [file.name for file in tmp_path.iterdir() if "report" in file.name] == ["report.html"]


def test_page_refers_to_nothing_outside_of_itself_and_runs_nothing(
    store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    assert cli.main(["report", str(store), "--html", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert "//" not in text.replace(str(tmp_path), "")
    assert "@import" not in text
    assert {name for name, _ in page.elements}.isdisjoint({"script", "link", "img", "iframe"})
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {
        f"#{attributes['id']}" for _, attributes in page.elements if "id" in attributes
    }
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert {"src", "srcset", "data", "action"}.isdisjoint(attributes)
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")


def test_names_of_paths_are_text_and_no_html(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "<i>.html"
    assert cli.main(["report", str(store), "--html", str(out)]) == 0
    page = Page(out.read_text(encoding="utf-8"))
    assert page.all("b") == page.all("i") == []
    assert "<i>.html" in page.text
    assert page.text.count("a & <b>.zarr") >= 3  # title, heading, card


def test_report_reads_beside_a_writer_and_replaces_the_last_one(
    store: Path, tmp_path: Path, stores
) -> None:
    out = tmp_path / "report.html"
    out.write_text("before")
    emb = stores.open(store)
    emb(torch.tensor([5])).sum().backward()
    assert cli.main(["report", str(store), "--html", str(out)]) == 0
    assert "20.0% of 10 rows" in out.read_text()  # those of the last commit
    emb.commit()
    assert cli.main(["report", str(store), "--html", str(out)]) == 0
    assert "30.0% of 10 rows" in out.read_text()


def test_report_with_verify_says_what_it_found(
    store: Path, tmp_path: Path, stores, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    command = ["report", str(store), "--html", str(out), "--verify"]
    assert cli.main(command) == 0
    assert "All of the store is sound." in Page(out.read_text()).text
    assert cli.main(["flush", str(store)]) == 0
    stores.expect_damage(store)
    chunk = store / "table" / "c.0.0"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    capsys.readouterr()
    assert cli.main(command) == 1
    assert capsys.readouterr().out.startswith("verify: problems, which the report names: 1\n")
    page = Page(out.read_text())
    assert len(page.all("li")) == 1
    assert "c.0.0" in page.text
    assert "a & <b>.zarr/table" in page.text


def test_report_is_put_nowhere_but_in_the_place_of_a_file(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "inside").symlink_to(store)
    for out, message in (
        (store, "choose a path beside"),
        (store / "report.html", "choose a path beside"),
        (store / "table" / "report.html", "choose a path beside"),
        (tmp_path / "inside" / "report.html", "choose a path beside"),
        (tmp_path / "folder", "is no file that a page could replace"),
        (tmp_path / "nowhere" / "report.html", "there is no folder"),
    ):
        assert cli.main(["report", str(store), "--html", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("ooc-embed report: ")
        assert message in captured.err
    assert cli.main(["report", str(tmp_path / "nothing"), "--html", str(tmp_path / "r.html")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_file_that_a_link_names_is_replaced_and_the_link_stays(store: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("before")
    link.symlink_to(target)
    assert cli.main(["report", str(store), "--html", str(link)]) == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")


def test_report_without_matplotlib_names_the_extra(
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(store), "--html", str(tmp_path / "report.html")]) == 2
    assert "pip install 'ooc_embed[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
