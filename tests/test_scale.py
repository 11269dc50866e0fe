"""Tests that memory and disk follow what is touched, not the size, in processes of their own."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import ooc_embed

# Anonymous memory is what the process itself allocates: pages of mapped files are not in it.
PROBE = """
import os, sys, threading, numpy as np, torch, ooc_embed, ooc_embed.fused

class Peak(threading.Thread):
    '''How far memory that is no file's has grown at most, looked at all the time.'''

    def __init__(self):
        super().__init__(daemon=True)
        self.start_bytes, self.bytes, self.over = 0, 0, threading.Event()
        self.look()
        self.start_bytes, self.bytes = self.bytes, 0

    def run(self):
        while not self.over.wait(0.002):
            self.look()

    def look(self):
        with open("/proc/self/status") as status:
            kinds = [line.split() for line in status if line.startswith(("RssAnon", "RssShmem"))]
        now = sum(int(kib) * 1024 for _, kib, _ in kinds)
        self.bytes = max(self.bytes, now - self.start_bytes)

peak = Peak()
peak.start()
"""
END = """
peak.over.set()
peak.join()
peak.look()
print(peak.bytes)
"""
ALLOWANCE = 300_000_000  # a merge's chunks and other buffers, which do not grow with the table


@pytest.fixture(autouse=True)
def room_given_back(tmp_path: Path) -> Iterator[None]:
    """Takes gigabytes off the disk once they are checked; pytest would keep them for three runs."""
    yield
    shutil.rmtree(tmp_path)


def run_probe(body: str, *arguments: object, prefix: tuple[str, ...] = ()) -> int:
    """Runs the script and gives back by how many bytes its memory grew at most."""
    command = [*prefix, sys.executable, "-W", "error", "-c", PROBE + body + END]
    command += [str(argument) for argument in arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-3000:]}"
    return int(result.stdout)


def disk_bytes(path: Path) -> int:
    """What the store takes on disk; holes and reserved ranges that were never made do not count."""
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*"))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads RssAnon from Linux's /proc"
)


# Creation


def test_new_table_of_any_size_takes_no_disk(make_table):
    """10 million rows of 128 are 15 GB of records; nothing of it is there yet."""
    emb = make_table(10_000_000, 128)
    assert disk_bytes(emb.path) < 2_000_000
    assert not list((emb.path / "table").glob("c.*"))
    assert zarr.open_group(emb.path, mode="r")["table"].shape == (10_000_000, 385)
    emb.close()
    assert disk_bytes(emb.path) < 2_000_000


def test_few_rows_of_a_large_table_take_few_chunks(make_table):
    emb = make_table(10_000_000, 16, chunk_rows=4096)
    for ids in ([1], [4_095], [9_999_999, 5_000_000]):
        emb(torch.tensor(ids)).sum().backward()
    emb.flush()
    chunks = {file.name for file in (emb.path / "table").glob("c.*")}
    assert chunks == {"c.0.0", f"c.{9_999_999 // 4096}.0", f"c.{5_000_000 // 4096}.0"}
    assert disk_bytes(emb.path) < 3 * 4096 * 49 * 4 + 4_000_000
    table = zarr.open_group(emb.path, mode="r")["table"]
    assert [int(table[row, -1]) for row in (0, 1, 9_999_999, 5_000_000)] == [0, 1, 1, 1]


@needs_proc
def test_creating_a_large_table_takes_less_memory_than_two_of_its_chunks(store_path):
    rows = 20_000_000
    body = f"""
emb = ooc_embed.DiskEmbedding({rows}, 128, path=sys.argv[1], cache_bytes=1 << 20)
emb.close()
"""
    peak = run_probe(body, store_path)
    chunk_rows, width = zarr.open_group(store_path, mode="r")["table"].chunks
    assert peak < 2 * chunk_rows * width * 4


@needs_proc
def test_casting_and_moving_a_model_of_a_40_gigabyte_table_takes_no_memory(store_path):
    body = """
import warnings
warnings.filterwarnings("ignore", message=".* GB free")  # the disk need not have room for it
emb = ooc_embed.DiskEmbedding(10_000_000, 1024, path=sys.argv[1], cache_bytes=1 << 20)
peak.look()
peak.start_bytes, peak.bytes = peak.start_bytes + peak.bytes, 0
model = torch.nn.Sequential(emb)
model.half()
model.double()
model.to("cpu", torch.bfloat16)
model.to("meta")
assert emb.weight.shape == (10_000_000, 1024)
assert emb.weight.dtype == torch.float32
peak.look()
"""
    assert run_probe(body, store_path) < 1_000_000


# Searching


@needs_proc
def test_topk_over_a_million_rows_takes_three_blocks_and_finds_what_all_at_once_would(
    store_path, tmp_path
):
    """A block is what `blocks` reads at once: 65,536 records."""
    body = """
emb = ooc_embed.DiskEmbedding(1_000_000, 64, path=sys.argv[1], cache_bytes=1 << 20)
emb(torch.arange(0, 100_000, 10)).sum().backward()
emb.flush()
peak.look()
peak.start_bytes, peak.bytes = peak.start_bytes + peak.bytes, 0
query = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
torch.save((query, *emb.topk(query, 10)), sys.argv[2])
"""
    peak = run_probe(body, store_path, tmp_path / "found.pt")
    assert peak < 3 * 65_536 * (3 * 64 + 1) * 4
    query, scores, ids = torch.load(tmp_path / "found.pt")
    with ooc_embed.DiskEmbedding.open(store_path, mode="r") as emb:
        expected = (query @ emb.weight[:].T).topk(10)
    torch.testing.assert_close(scores, expected.values)
    assert torch.equal(ids, expected.indices)


# Training and importing


@needs_proc
def test_memory_in_training_is_the_cache_the_map_and_an_allowance(store_path):
    """2 million rows of 64 are 1.5 GB of records; a third of them is trained."""
    rows, cache_bytes = 2_000_000, 32_000_000
    body = f"""
emb = ooc_embed.DiskEmbedding({rows}, 64, path=sys.argv[1], cache_bytes={cache_bytes})
for step in range(40):
    emb(torch.randint(0, {rows}, (20_000,))).sum().backward()
emb.close(flush=True)
"""
    assert run_probe(body, store_path) <= cache_bytes + 8 * rows + ALLOWANCE


@needs_proc
def test_memory_in_an_import_does_not_hold_the_table(store_path, tmp_path):
    """The array is mapped from a file, so the weights that the process copies would show."""
    rows, dim, cache_bytes = 2_000_000, 64, 32_000_000
    given = np.lib.format.open_memmap(
        tmp_path / "given.npy", mode="w+", dtype=np.float32, shape=(rows, dim)
    )
    given[::1000] = np.arange(rows // 1000, dtype=np.float32)[:, None]
    given.flush()
    body = f"""
given = np.load(sys.argv[2], mmap_mode="r")
emb = ooc_embed.DiskEmbedding(
    {rows}, {dim}, path=sys.argv[1], init=given, cache_bytes={cache_bytes}
)
emb(torch.arange(0, {rows}, 1000)).sum().backward()
total = sum(float(block.double().sum()) for _, block in emb.weight.blocks())
emb.close(flush=True)
"""
    peak = run_probe(body, store_path, tmp_path / "given.npy")
    assert peak <= cache_bytes + 8 * rows + ALLOWANCE
    table = zarr.open_group(store_path, mode="r")["table"]
    for row in (0, 1, 1000, 1_999_000, 1_999_999):
        stepped = row % 1000 == 0
        expected = given[row] - np.float32(0.001 * stepped)
        np.testing.assert_allclose(table[row, :dim], expected, rtol=1e-6)
        assert table[row, -1] == 1 + stepped


# A table far larger than the memory there is


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A new cgroup with this limit, below this process's own, which no other process is in."""
    groups = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().split())
    mount = Path("/sys/fs/cgroup")
    if "memory" in groups:
        parent, limits = mount / "memory" / groups["memory"].strip("/"), "memory.limit_in_bytes"
    else:
        parent, limits = mount, "memory.max"  # a group with processes has no limited children
    group = parent / f"ooc-embed-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / limits).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


J1_ROWS, J1_STEPS = 20_000_000, 200


@needs_proc
def test_table_of_15_gigabytes_trains_in_1_gigabyte(store_path):
    """Row 7 is in every batch of 4,096 with gradient 1, so each step moves it by lr."""
    body = f"""
emb = ooc_embed.DiskEmbedding(
    {J1_ROWS}, 64, path=sys.argv[1], init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.001)
)
for step in range({J1_STEPS}):
    ids = torch.randint(8, {J1_ROWS}, (4096,))
    ids[0] = 7
    emb(ids).sum().backward()
emb.close()
"""
    try:
        with memory_cgroup(1_000_000_000) as group:
            # The shell joins the group before it becomes the process.
            enter = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"))
            run_probe(body, store_path, prefix=enter)
    except OSError as error:
        pytest.skip(f"no memory cgroup may be made here: {error}")
    with ooc_embed.DiskEmbedding.open(store_path, mode="r", cache_bytes=1 << 20) as emb:
        assert emb.step == J1_STEPS
        assert int(emb.version[7]) == J1_STEPS
        torch.testing.assert_close(
            emb.weight[7], torch.full((64,), -0.001 * J1_STEPS), rtol=1e-4, atol=0
        )
