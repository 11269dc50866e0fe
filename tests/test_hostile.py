"""Metadata that somebody wrote to do harm: an error names the file, and nothing else happens.

Memory is not taken for what is only claimed, and nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import small_store
import store_files
import torch
from hypothesis import HealthCheck, given, settings

from ooc_embed import DiskEmbedding, FormatError, StoreError, describe, report
from ooc_embed.arrays import array_facts
from ooc_embed.manifest import Layout

pytestmark = pytest.mark.usefixtures("one_thread")

METADATA = ["zarr.json", "table/zarr.json", "log/0/rows/zarr.json", "log/1/records/zarr.json"]
# What JSON may say in the place of any value.
TEXTS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1e300",
    "-1",
    "-0.0",
    "0",
    str(2**31),
    str(2**40),
    str(2**62),
    str(2**63 - 1),
    str(2**64),
    "9" * 400,
    "9" * 5000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 500 + "1" + "}" * 500,
    '"' + "x" * 1_000_000 + '"',
    '"../../../../evil"',
    r'"\u0000"',
    r'"\ud800"',
    '""',
    "true",
    "null",
    "[]",
    "{}",
    "[[1, 2], [1, 2]]",
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with store_files.quick_folder(tmp_path_factory.mktemp("stores")) as folder:
        yield small_store.train(folder / "t.zarr")


def _places(value: Any, *keys: Any) -> Iterator[tuple[Any, ...]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, part in items:
        yield (*keys, key)
        yield from _places(part, *keys, key)


def _with_text(whole: Any, keys: tuple[Any, ...], text: str, *, twice: bool) -> str:
    """A JSON text that says `text` in one place, or first in a name that comes twice."""
    target = whole
    for key in keys[:-1]:
        target = target[key]
    if twice and isinstance(target, dict):
        kept = target.pop(keys[-1])
        target["@"] = 0
        target[keys[-1]] = kept
        return json.dumps(whole).replace('"@": 0', f"{json.dumps(keys[-1])}: {text}")
    target[keys[-1]] = "@"
    return json.dumps(whole).replace('"@"', text)


def _use(path: Path) -> None:
    """All that reads what a manifest says; then a writer, whose store opens again."""
    with DiskEmbedding.open(path, mode="r") as emb:
        assert len(emb.weight[[1, 2]]) == 2
        repr(emb)
        emb.commits()
    describe(path)
    with DiskEmbedding.open(path) as emb:
        small_store.step(emb, [1, 2])
    with DiskEmbedding.open(path) as emb:
        emb.rollback()
        emb.resize(emb.num_embeddings + 1)
    with DiskEmbedding.open(path):
        pass


@given(data=st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_anywhere_is_refused_with_the_files_name_or_does_no_harm(
    template: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(METADATA))
    whole = store_files.metadata(template, name.removesuffix("zarr.json"))
    if name == "zarr.json":  # a checksum would refuse all; an older version wrote none
        del whole["attributes"]["ooc_embed"]["crc32"]
    place = data.draw(st.sampled_from(list(_places(whole))))
    text = data.draw(st.sampled_from(TEXTS))
    written = _with_text(whole, place, text, twice=data.draw(st.booleans()))
    path = template.with_name("hostile.zarr")
    try:
        store_files.copied(template, path)
        (path / name).write_text(written)
        with store_files.untouched(path):
            problems = report.verify(path)
            try:
                DiskEmbedding.open(path, mode="r").close()
            except (StoreError, OSError) as error:
                assert str(path) in str(error)
                assert problems
                with pytest.raises((StoreError, OSError)):
                    DiskEmbedding.open(path)
                return
        _use(path)
    finally:
        shutil.rmtree(path)
    assert {entry.name for entry in template.parent.iterdir()} == {"t.zarr"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(value=json_values)
@settings(deadline=None)
def test_a_manifest_of_any_json_is_a_format_error(template: Path, value: Any) -> None:
    file = template / "zarr.json"
    kept = file.read_bytes()
    try:
        for whole in (value, {"attributes": value}, {"attributes": {"ooc_embed": value}}):
            file.write_text(json.dumps(whole))
            with pytest.raises(FormatError, match="zarr.json"):
                DiskEmbedding.open(template, mode="r")
            with pytest.raises(FormatError, match="zarr.json"):
                DiskEmbedding.open(template)
    finally:
        file.write_bytes(kept)


# Claims of size. The files stay as small as they are.


def _claim(path: Path, rows: int, dim: int, chunk_rows: int, row_ids: int) -> None:
    """Make manifest and arrays agree on sizes, of a table whose rows are all still initial."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["num_embeddings"], manifest["embedding_dim"] = rows, dim
        for field in manifest["fields"][:-1]:
            field[1] = dim
        manifest["commits"][-1]["num_embeddings"] = rows
        manifest["commits"][-1]["logs"] = [{"generation": 0}]
        manifest["chunk_crc32"] = {}

    store_files.edit_manifest(path, change)
    layout = Layout(rows, 3 * dim + 1, np.dtype("<f4"), chunk_rows, row_ids)
    for name, facts in array_facts(layout).items():
        described = {**store_files.metadata(path, name), **facts}
        (path / name / "zarr.json").write_text(json.dumps(described))


CLAIMS = {
    "rows": (2**40, 4, 2**30, 2**20),
    "all the rows there are": (2**61, 4, 2**50, 2**50),
    "rows in many files": (2**40, 4, 1024, 1024),
    "columns": (5000, 2**31, 1024, 2**14),
    "fewer columns": (5000, 2**26, 1024, 2**14),
    "rows a chunk": (5000, 4, 2**40, 2**14),
    "bytes of a chunk that 64 bits do not hold": (5000, 4, 2**60, 2**14),
    "row ids a file": (5000, 4, 1024, 2**42),
    "row ids of a file that 64 bits do not hold": (5000, 4, 1024, 2**61),
}
CHILD = """
import json, resource, sys, torch
from pathlib import Path
from ooc_embed import DiskEmbedding, StoreError, describe, report

def pages():
    return int(Path("/proc/self/statm").read_text().split()[0])

torch.ones(10).sum()
limit = pages() * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    said = []
    for act in (
        lambda: DiskEmbedding.open(path, mode="r"),
        lambda: DiskEmbedding.open(path, cache_bytes=1 << 20),
        lambda: describe(path),
    ):
        try:
            act()
            said.append("fine")
        except (StoreError, OSError) as error:
            said.append(f"{type(error).__name__}: {error}")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([said, grown << 10]))
"""


def test_sizes_that_are_only_claimed_take_no_memory_and_are_named(
    template: Path, quick: Path
) -> None:
    """In a process that may use a GiB of addresses more than Python and torch take."""
    paths = []
    for number, sizes in enumerate(CLAIMS.values()):
        paths.append(store_files.copied(template, quick / f"{number}.zarr"))
        _claim(paths[-1], *sizes)
    with store_files.untouched(quick):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *map(str, paths)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for (title, sizes), path, (said, grown) in zip(CLAIMS.items(), paths, lines, strict=True):
        for words in said:
            assert str(path) in words, (title, said)
            assert f"{sizes[0]:,}" in words, (title, said)
        assert grown < 64 << 20, title


@pytest.mark.parametrize("rows", [2**40, 2**61])
def test_rows_that_the_arrays_do_not_have_are_refused_with_both_numbers(
    template: Path, quick: Path, rows: int
) -> None:
    path = store_files.copied(template, quick / "t.zarr")

    def change(manifest: dict[str, Any]) -> None:
        manifest["num_embeddings"] = manifest["commits"][-1]["num_embeddings"] = rows

    store_files.edit_manifest(path, change)
    for mode in ("r", "r+"):
        with store_files.untouched(path), pytest.raises(FormatError) as error:
            DiskEmbedding.open(path, mode=mode)
        text = str(error.value).replace(",", "")
        assert str(rows) in text
        assert "1024" in text or "5000" in text


@pytest.mark.parametrize("shape", [(2**62, 4), (5000, 2**45)])
def test_a_table_that_no_process_can_map_is_refused_before_anything_is_made(
    quick: Path, shape: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=f"{shape[0]:,} rows of .* are possible"):
        DiskEmbedding(*shape, path=quick / "t.zarr")
    assert list(quick.iterdir()) == []


# Checkpoints


def _word(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8)


def _words() -> st.SearchStrategy[Any]:
    """What a checkpoint may hold where the word for a table is."""
    texts = st.sampled_from([text for text in TEXTS if len(text) < 10_000])
    keys = st.sampled_from(["table_id", "commit", "branch", "step"])
    of_one = st.tuples(keys, texts).map(lambda pair: ("one", *pair))
    return st.one_of(
        of_one,
        st.sampled_from(TEXTS).map(_word),
        json_values,
        json_values.map(json.dumps).map(_word),
        st.binary().map(lambda data: torch.tensor(list(data), dtype=torch.uint8)),
        st.sampled_from(
            [
                torch.tensor(2**40),
                torch.tensor(10),
                torch.tensor([[1, 2]], dtype=torch.uint8),
                torch.tensor([300, -1]),
                torch.tensor([0.5]),
                torch.empty(0),
                torch.zeros(1_000_000, dtype=torch.uint8),
                np.array(["x"]),
                b"{}",
                object(),
            ]
        ),
    )


@pytest.fixture(scope="module")
def table(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskEmbedding]:
    path = store_files.copied(template, tmp_path_factory.mktemp("table") / "t.zarr")
    with DiskEmbedding.open(path) as emb:
        emb.state_dict()
        yield emb


@given(given_word=_words())
@settings(deadline=None)
def test_any_word_of_a_checkpoint_is_refused_by_its_key_and_changes_nothing(
    table: DiskEmbedding, given_word: Any
) -> None:
    own = table.state_dict()["_extra_state"]
    if isinstance(given_word, tuple) and len(given_word) == 3:
        _, key, text = given_word
        words = json.loads(bytes(own.tolist()))
        words[key] = "@"
        given_word = _word(json.dumps(words).replace('"@"', text))
    step = table.step
    with store_files.untouched(table.path):
        with pytest.raises(RuntimeError, match="_extra_state: the checkpoint "):
            table.load_state_dict({"_extra_state": given_word})
        with pytest.raises(StoreError, match="the checkpoint "):
            table.set_extra_state(given_word)
        try:
            assert table.commit_of(given_word) in table.commits()
        except StoreError as error:
            assert "the checkpoint " in str(error) or "is not kept" in str(error)
    assert table.step == step
    table.load_state_dict({"_extra_state": own})


# Nothing is unpickled


class Evil:
    """Its pickle makes a folder when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.proof),)


@pytest.fixture
def unpickles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for module in (pickle, torch):
        monkeypatch.setattr(module, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)


@pytest.mark.usefixtures("unpickles")
def test_nothing_of_a_store_or_a_checkpoint_is_unpickled(template: Path, quick: Path) -> None:
    path = store_files.copied(template, quick / "t.zarr")
    assert report.verify(path) == []
    describe(path)
    with DiskEmbedding.open(path) as emb:
        saved = emb.state_dict()
        small_store.some_steps(emb, 1, 1)
        emb.rollback(emb.commit_of(saved["_extra_state"]))
        emb.load_state_dict(saved)
        emb.snapshot(quick / "copy.zarr")
        emb.flush()
    with DiskEmbedding.open(quick / "copy.zarr", mode="r") as emb:
        emb(torch.arange(100))


def _npy_of_objects(folder: Path, evil: Evil) -> Path:
    rows = np.empty((5, 2), dtype=object)
    rows[:] = evil
    np.save(folder / "rows.npy", rows, allow_pickle=True)
    return folder / "rows.npy"


def _npy_that_is_a_pickle(folder: Path, evil: Evil) -> Path:
    (folder / "rows.npy").write_bytes(pickle.dumps(evil))
    return folder / "rows.npy"


def _npy_that_is_an_archive(folder: Path, evil: Evil) -> Path:
    rows = np.empty((5, 2), dtype=object)
    rows[:] = evil
    np.savez(folder / "rows.npz", rows, allow_pickle=True)
    return (folder / "rows.npz").rename(folder / "rows.npy")


def _torch_file(folder: Path, evil: Evil) -> Path:
    torch.save(evil, folder / "rows.pt")
    return folder / "rows.pt"


def _safetensors_that_is_a_torch_file(folder: Path, evil: Evil) -> Path:
    return _torch_file(folder, evil).rename(folder / "rows.safetensors")


def _zarr_of_pickles(folder: Path, evil: Evil) -> Path:
    described = {
        "zarr_format": 2,
        "shape": [5, 2],
        "chunks": [5, 2],
        "dtype": "|O",
        "compressor": None,
        "fill_value": "",
        "order": "C",
        "filters": [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}],
    }
    path = folder / "rows.zarr"
    path.mkdir()
    (path / ".zarray").write_text(json.dumps(described))
    (path / "0.0").write_bytes(pickle.dumps(evil))
    return path


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize(
    "make",
    [
        _npy_of_objects,
        _npy_that_is_a_pickle,
        _npy_that_is_an_archive,
        _torch_file,
        _safetensors_that_is_a_torch_file,
        _zarr_of_pickles,
    ],
)
def test_a_source_of_pickles_is_refused_by_name_and_not_read(
    quick: Path, make: Callable[[Path, Evil], Path]
) -> None:
    source = make(quick, Evil(quick / "proof"))
    with pytest.raises(ValueError, match=source.name):
        DiskEmbedding.from_pretrained(source, path=quick / "t.zarr")
    assert {entry.name for entry in quick.iterdir()} == {source.name}
