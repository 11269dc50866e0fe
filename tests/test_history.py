"""Which commits are kept, and as what: without a file. And manifests that say nonsense about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_store
import store_files
import torch

from ooc_embed import DiskEmbedding, FormatError, StoreError, report
from ooc_embed.history import Commit, History
from ooc_embed.log import LogState

LOG = LogState(0)


def commit(number: int, *logs: LogState) -> Commit:
    return Commit(number, 10 * number, 0, [{"lr": 0.1}], 100, logs or (LOG,), 0.0, "1")


def history(*numbers: int, keep: int = 1) -> History:
    return History(tuple(commit(number) for number in numbers), keep)


def numbers(kept: History) -> list[int]:
    return [commit.number for commit in kept.commits]


def more(kept: History, *numbers: int) -> History:
    """With commits behind the newest, in its logs."""
    for number in numbers:
        kept = kept.added(replace(kept.newest, number=number))
    return kept


def prefix(records: int, generation: int = 0) -> LogState:
    return LogState(generation, records)


# What is kept


@pytest.mark.parametrize(("keep", "want"), [(1, [9]), (2, [8, 9]), (4, [6, 7, 8, 9])])
def test_as_many_of_the_newest_are_kept_as_asked(keep: int, want: list[int]) -> None:
    kept = history(0, keep=keep)
    for number in range(1, 10):
        kept = kept.added(commit(number))
    assert numbers(kept) == want
    assert kept.newest.number == 9


def test_fewer_are_kept_as_soon_as_asked_and_more_only_from_then_on() -> None:
    kept = history(3, 4, 5, 6, keep=4).keeping(2)
    assert numbers(kept) == [5, 6]
    assert numbers(kept.keeping(4)) == [5, 6]
    assert numbers(kept.keeping(4).added(commit(7))) == [5, 6, 7]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_commit_handed_out_last_stays_beyond_the_others(keep: int) -> None:
    kept = history(0, keep=keep).handed_out()
    for number in range(1, 8):
        kept = kept.added(commit(number))
    assert numbers(kept) == [0, *range(8 - keep, 8)]
    kept = kept.handed_out().added(commit(8))
    assert 0 not in numbers(kept)
    assert numbers(kept.keeping(1)) == [7, 8]


def test_a_number_is_never_given_twice() -> None:
    kept = history(2, 3, 4, 5, keep=9)
    assert kept.next_number == 6
    kept = kept.back_to(3)
    assert kept.next_number == 6
    kept = more(kept, 6).back_to(2)
    assert kept.next_number == 7
    assert kept.back_to(2).next_number == 7


def test_what_rollbacks_took_back_stays_known_and_nothing_else() -> None:
    kept = history(0, 1, 2, 3, 4, keep=9).back_to(2)
    kept = more(more(kept, 5, 6).back_to(5), 7)
    undone = [number for number in range(12) if kept.was_undone(number)]
    assert undone == [3, 4, 6]
    assert numbers(kept) == [0, 1, 2, 5, 7]
    kept = kept.back_to(1)
    assert [number for number in range(12) if kept.was_undone(number)] == [2, 3, 4, 5, 6, 7]
    assert len(kept.undone) == 1


def test_a_rollback_behind_the_commit_handed_out_forgets_that() -> None:
    kept = history(0, 1, 2, keep=9).handed_out().added(commit(3))
    assert kept.checkpoint == 2
    assert kept.back_to(2).checkpoint == 2
    assert kept.back_to(1).checkpoint is None


def test_a_commit_that_is_not_kept_is_an_error_that_names_those_that_are() -> None:
    kept = history(4, 7, keep=2)
    for attempt in (kept.find, kept.until, kept.back_to):
        with pytest.raises(StoreError, match=r"commit 5 .*4 \(step 40\), 7 \(step 70\)"):
            attempt(5)
    assert 7 in kept
    assert 5 not in kept


# Logs


def sealed_history() -> History:
    """Commits 1 to 4: within the sealed log, at its end, and two behind it."""
    sealed = prefix(50)
    return History(
        (
            commit(1, prefix(20)),
            commit(2, sealed),
            commit(3, sealed, prefix(0, 1)),
            commit(4, sealed, prefix(9, 1)),
        ),
        keep=9,
    )


def test_commits_that_lack_a_part_of_the_sealed_log_are_behind_it() -> None:
    kept = sealed_history()
    kept.check()
    assert [commit.number for commit in kept.behind] == [1]
    assert numbers(kept.given_up()) == [2, 3, 4]
    assert kept.given_up().behind == ()
    assert history(0, 1, 2, keep=3).behind == ()


def test_giving_up_the_commit_handed_out_forgets_it() -> None:
    kept = replace(sealed_history(), checkpoint=1)
    assert kept.given_up().checkpoint is None
    assert replace(kept, checkpoint=2).given_up().checkpoint == 2


def test_a_merge_leaves_every_commit_the_prefix_of_the_active_log_that_it_had() -> None:
    merged = sealed_history().given_up().merged()
    merged.check()
    assert [commit.logs for commit in merged.commits] == [
        (prefix(0, 1),),
        (prefix(0, 1),),
        (prefix(9, 1),),
    ]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_going_back_names_other_generations_in_the_same_folders(number: int) -> None:
    kept = sealed_history()
    back = kept.back_to(number)
    back.check()
    assert numbers(back) == list(range(1, number + 1))
    for old, new in zip(kept.commits, back.commits, strict=False):
        for was, is_now in zip(old.logs, new.logs, strict=False):
            assert is_now.records == was.records
            assert is_now.generation == was.generation + 2
    # Whose merge may have begun stays sealed; else the log takes appends again.
    assert len(back.newest.logs) == (1 if number == 1 else 2)


# JSON


def test_a_history_survives_json() -> None:
    kept = replace(sealed_history().back_to(2), checkpoint=1)
    assert History.from_json(json.loads(json.dumps(kept.to_json()))) == kept


Change = Callable[[dict[str, Any]], object]

NONSENSE: dict[str, Change] = {
    "out of order": lambda m: m["commits"].reverse(),
    "one twice": lambda m: m["commits"].insert(0, m["commits"][0]),
    "none": lambda m: m["commits"].clear(),
    "no list": lambda m: m.update(commits=7),
    "a commit of another kind": lambda m: m["commits"].insert(0, 7),
    "another generation": lambda m: m["commits"][0]["logs"][0].update(generation=2),
    "a log that nobody has": lambda m: m["commits"][0]["logs"][0].update(size=2),
    "longer than the newest": lambda m: m["commits"][0]["logs"][0].update(records=8000),
    "in no log": lambda m: m["commits"][0].update(logs=[]),
    "the newest in no log": lambda m: m["commits"][-1].update(logs=[]),
    "in more logs than the newest": lambda m: m["commits"][0]["logs"].append(
        {**m["commits"][-1]["logs"][0], "generation": 1, "records": 0}
    ),
    "a step that is no number": lambda m: m["commits"][0].update(step="5"),
    "a rate that no rule takes": lambda m: m["commits"][0]["param_groups"][0].update(lr=-1.0),
    "a checkpoint that is not there": lambda m: m.update(checkpoint=77),
    "a checkpoint that is no number": lambda m: m.update(checkpoint="2"),
    "keeping none": lambda m: m.update(keep_commits=0),
    "keeping a half": lambda m: m.update(keep_commits=1.5),
    "undone, a number": lambda m: m.update(undone=7),
    "undone, nothing": lambda m: m.update(undone=None),
    "undone, half a pair": lambda m: m.update(undone=[[7]]),
    "undone, no numbers": lambda m: m.update(undone=[["7", "8"]]),
    "undone, backwards": lambda m: m.update(undone=[[9, 7]]),
    "undone, and kept": lambda m: m.update(undone=[[1, 9]]),
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "t.zarr"
    with small_store.make(path, keep_commits=5) as emb:
        for seed in range(4):
            small_store.some_steps(emb, seed, 1)
            emb.state_dict()
    return path


def edit(path: Path, change: Change) -> None:
    metadata = json.loads((path / "zarr.json").read_text())
    change(metadata["attributes"]["ooc_embed"])
    (path / "zarr.json").write_text(json.dumps(metadata))


@pytest.mark.parametrize("name", NONSENSE)
def test_a_manifest_with_nonsense_about_its_commits_is_refused_and_left_alone(
    store: Path, name: str
) -> None:
    assert len(store_files.manifest(store)["commits"]) == 5
    edit(store, NONSENSE[name])
    with store_files.untouched(store):
        for mode in ("r", "r+"):
            with pytest.raises(FormatError, match="zarr.json"):
                DiskEmbedding.open(store, mode=mode)
        assert len(report.verify(store)) == 1


def test_a_manifest_from_before_there_was_a_history_opens_and_keeps_one_commit(
    store: Path,
) -> None:
    def age(manifest: dict[str, Any]) -> None:
        del manifest["commits"][:-1]
        for key in ("keep_commits", "checkpoint", "undone"):
            del manifest[key]
        for log in manifest["commits"][-1]["logs"]:
            del log["inherited"]

    edit(store, age)
    with store_files.untouched(store), DiskEmbedding.open(store, mode="r") as emb:
        before = emb.weight[:]
        assert emb.commits() == {4: 4}
    with DiskEmbedding.open(store) as emb:
        assert emb.keep_commits == 1
        assert torch.equal(emb.weight[:], before)
        small_store.some_steps(emb, 9, 2)
        emb.rollback()
        assert torch.equal(emb.weight[:], before)
        small_store.some_steps(emb, 9, 1)
        assert emb.commit() == 5
        assert emb.commits() == {5: 5}
    assert report.verify(store) == []
