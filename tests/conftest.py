"""Fixtures that make tables on disk and check each store when its test ends; knows no test."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import crash_child
import hypothesis
import pytest
import store_files
import torch
import zarr
from ram_reference import RamTable

import ooc_embed
from ooc_embed import blocks, report

for _profile, _examples in (("nightly", 5000), ("ci", 100)):
    hypothesis.settings.register_profile(_profile, max_examples=_examples, deadline=None)
# `--hypothesis-profile=nightly` comes later, and wins.
hypothesis.settings.load_profile("ci")


class Stores:
    """The tables of one test. Each is closed and its store fully checked at teardown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables: list[ooc_embed.DiskEmbedding] = []
        self.paths: list[Path] = []
        self._names = (folder / f"table{n}.zarr" for n in itertools.count())

    def new_path(self) -> Path:
        """A path that nothing occupies; what the test puts there is checked."""
        path = next(self._names)
        self.paths.append(path)
        return path

    def make(
        self,
        num_embeddings: int = 10,
        embedding_dim: int = 2,
        *args: object,
        path: Path | None = None,
        **options: object,
    ) -> ooc_embed.DiskEmbedding:
        """A new table; arguments are the constructor's, `path` is found if not given."""
        path = self.new_path() if path is None else Path(path)
        table = ooc_embed.DiskEmbedding(num_embeddings, embedding_dim, *args, path=path, **options)
        return self._own(table)

    def open(self, path: Path, mode: str = "r+", **options: object) -> ooc_embed.DiskEmbedding:
        return self._own(ooc_embed.DiskEmbedding.open(path, mode=mode, **options))

    def expect_damage(self, path: Path) -> None:
        """Leaves a store that the test broke on purpose out of the check."""
        self.paths = [kept for kept in self.paths if kept != Path(path)]

    def _own(self, table: ooc_embed.DiskEmbedding) -> ooc_embed.DiskEmbedding:
        self.tables.append(table)
        if table.path not in self.paths:
            self.paths.append(table.path)
        return table

    def check(self) -> None:
        for table in self.tables:
            if not table.closed and table.path in self.paths:
                list_members(table.path)
        for table in self.tables:
            table.close()
        for path in self.paths:
            if (path / "zarr.json").exists():
                list_members(path)
                assert report.verify(path) == []


def list_members(path: Path) -> None:
    """Lists the store as a zarr reader would; anything that zarr warns of is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = [name for name, _ in zarr.open_group(path, mode="r").members(max_depth=None)]
    assert "table" in names


@pytest.fixture(params=["compiled", "torch"])
def each_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the step that numba compiles, and with the one by torch's operations."""
    if request.param == "compiled":
        pytest.importorskip("numba", reason="the compiled step needs the extra `fast`")
    else:
        monkeypatch.setattr(blocks, "_fused_step", lambda rule: None)
    return str(request.param)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: for tests that fail calls, not disks."""
    with store_files.quick_folder(tmp_path) as folder:
        yield folder


@pytest.fixture(scope="session")
def weight(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The initial rows of the tables of tests/workload.py."""
    with crash_child.create(str(tmp_path_factory.mktemp("seeded") / "t.zarr"), 1 << 20) as emb:
        return emb.weight[:]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path)
    yield stores
    stores.check()


@pytest.fixture
def make_table(stores: Stores):
    """`make_table(num_embeddings=10, embedding_dim=2, **constructor_options)`."""
    return stores.make


@pytest.fixture
def open_table(stores: Stores):
    """`open_table(path, mode="r+", **options)`, closed at the end of the test."""
    return stores.open


@pytest.fixture
def store_path(stores: Stores) -> Path:
    """A path for one store; nothing is there yet."""
    return stores.new_path()


@pytest.fixture
def both(make_table: Callable[..., ooc_embed.DiskEmbedding]):
    """A float64 table of 10 rows, and torch's own in RAM with the same rows and rate."""
    initial = torch.randn(10, 2, dtype=torch.float64)
    rule = ooc_embed.SparseAdam(lr=0.1)
    emb = make_table(init=initial, dtype=torch.float64, optimizer=rule, chunk_rows=1024)
    return emb, RamTable(initial, lr=0.1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same random numbers, alone or in the suite."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """These tables are so small that a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
