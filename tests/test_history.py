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
from ooc_embed.history import Commit, Facts, History
from ooc_embed.log import LogState

LOG = LogState(0)
PATH = Path("t.zarr")


def facts(step: int) -> Facts:
    return Facts(step=step, rows_written=0, param_groups=[{"lr": 0.1}], num_embeddings=100)


def commit(number: int, *logs: LogState) -> Commit:
    return Commit.now(number, facts(10 * number), logs or (LOG,))


def history(*numbers: int, keep: int = 1) -> History:
    return History(tuple(commit(number) for number in numbers), keep)


def numbers(kept: History) -> list[int]:
    return [commit.number for commit in kept.commits]


def more(kept: History, count: int = 1, branch: str = "a") -> History:
    """With commits behind the newest, in its logs."""
    for _ in range(count):
        kept = kept.added(facts(10 * kept.next_number), kept.newest.logs, branch)
    return kept


def back(kept: History, number: int) -> History:
    return kept.rolled_back(kept.find(number, PATH))


def prefix(records: int, generation: int = 0) -> LogState:
    return LogState(generation, records)


# What is kept


@pytest.mark.parametrize(("keep", "want"), [(1, [9]), (2, [8, 9]), (4, [6, 7, 8, 9])])
def test_as_many_of_the_newest_are_kept_as_asked(keep: int, want: list[int]) -> None:
    kept = more(history(0, keep=keep), 9)
    assert numbers(kept) == want
    assert kept.newest.number == 9


def test_fewer_are_kept_as_soon_as_asked_and_more_only_from_then_on() -> None:
    kept = history(3, 4, 5, 6, keep=4).keeping(2)
    assert numbers(kept) == [5, 6]
    assert numbers(kept.keeping(4)) == [5, 6]
    assert numbers(more(kept.keeping(4))) == [5, 6, 7]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_two_commits_handed_out_last_stay_beyond_the_others(keep: int) -> None:
    kept = more(history(0, keep=keep).handed_out(), 7)
    assert numbers(kept) == [0, *range(8 - keep, 8)]
    kept = more(kept.handed_out(), 5)
    assert numbers(kept) == [0, 7, *range(13 - keep, 13)]
    assert kept.checkpoints == (0, 7)
    kept = kept.handed_out()
    assert kept.checkpoints == (7, 12)
    assert kept.handed_out() == kept
    assert numbers(more(kept.keeping(1))) == [7, 12, 13]


def test_a_number_is_never_given_twice() -> None:
    kept = history(2, 3, 4, 5, keep=9)
    assert kept.next_number == 6
    kept = back(kept, 3)
    assert kept.next_number == 6
    kept = back(more(kept), 2)
    assert kept.next_number == 7
    assert back(kept, 2).next_number == 7


def test_each_commit_has_the_word_of_its_writer_until_a_rollback_takes_it_back() -> None:
    kept = more(more(history(0, keep=9), 2, "a"), 2, "b")
    words = [kept.branch_of(number) for number in range(6)]
    assert words == [None, "a", "a", "b", "b", None]
    kept = back(kept, 2)
    assert [kept.branch_of(number) for number in range(6)] == [None, "a", "a", None, None, None]
    kept = more(kept, 2, "c")
    assert numbers(kept) == [0, 1, 2, 5, 6]
    assert [kept.branch_of(number) for number in range(2, 7)] == ["a", "c", "c", "c", "c"]
    kept = back(kept, 1)
    assert kept.branches == ((1, "a"),)
    assert back(kept, 0).branches == ()


def test_words_do_not_grow_without_bound() -> None:
    kept = history(0)
    for number in range(1, 1000):
        kept = more(kept, branch=f"word {number}")
        assert kept.branch_of(number) == f"word {number}"
        kept.check()
    assert 100 < len(kept.branches) < 300


def test_a_number_between_words_that_were_dropped_has_none() -> None:
    """Else one that a rollback took back would count as the word before it."""
    kept = back(more(more(history(0)).handed_out(), 300), 1)
    for number in range(600):
        kept = more(kept, branch=f"word {number}")
    assert kept.branch_of(1) == "a"
    assert kept.branch_of(200) not in ("a", "word 0")
    kept.check()
    assert History.from_json(json.loads(json.dumps(kept.to_json()))) == kept


def test_the_words_of_commits_that_are_kept_stay_however_old() -> None:
    kept = more(history(0)).handed_out()
    for number in range(1000):
        kept = more(kept, branch=f"word {number}")
    assert numbers(kept) == [1, 1001]
    assert kept.branch_of(1) == "a"
    kept.check()


def test_a_rollback_behind_a_commit_handed_out_forgets_that() -> None:
    kept = more(more(history(0, 1, keep=9).handed_out()).handed_out())
    assert kept.checkpoints == (1, 2)
    assert back(kept, 2).checkpoints == (1, 2)
    assert back(kept, 1).checkpoints == (1,)
    assert back(kept, 0).checkpoints == ()


def test_a_commit_that_is_not_kept_is_an_error_that_names_those_that_are() -> None:
    kept = history(4, 7, keep=2)
    with pytest.raises(StoreError, match=r"commit 5 of t.zarr .*4 \(step 40\), 7 \(step 70\)"):
        kept.find(5, PATH)
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


def test_commits_that_lack_a_part_of_the_sealed_log_keep_it_from_being_merged() -> None:
    kept = sealed_history()
    kept.check()
    assert [commit.number for commit in kept.unmerged] == [1]
    assert numbers(kept.given_up()) == [2, 3, 4]
    assert kept.given_up().unmerged == ()
    assert history(0, 1, 2, keep=3).unmerged == ()


def test_giving_up_the_commit_handed_out_forgets_it() -> None:
    kept = replace(sealed_history(), checkpoints=(1, 3))
    assert kept.given_up().checkpoints == (3,)
    assert replace(kept, checkpoints=(2, 3)).given_up().checkpoints == (2, 3)


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
    gone_back = back(kept, number)
    gone_back.check()
    assert numbers(gone_back) == list(range(1, number + 1))
    for old, new in zip(kept.commits, gone_back.commits, strict=False):
        for was, is_now in zip(old.logs, new.logs, strict=False):
            assert is_now.records == was.records
            assert is_now.generation == was.generation + 2
    # Whose merge may have begun stays sealed; else the log takes appends again.
    assert len(gone_back.newest.logs) == (1 if number == 1 else 2)


# JSON


def test_a_history_survives_json() -> None:
    kept = more(replace(back(sealed_history(), 2), checkpoints=(1,)))
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
    "a checkpoint that is not there": lambda m: m.update(checkpoints=[77]),
    "a checkpoint that is no number": lambda m: m.update(checkpoints=["2"]),
    "checkpoints that are no list": lambda m: m.update(checkpoints=2),
    "keeping none": lambda m: m.update(keep_commits=0),
    "keeping a half": lambda m: m.update(keep_commits=1.5),
    "branches, a number": lambda m: m.update(branches=7),
    "branches, half a pair": lambda m: m.update(branches=[[1]]),
    "branches, no number": lambda m: m.update(branches=[["1", "a"]]),
    "branches, no word": lambda m: m.update(branches=[[1, 2]]),
    "branches, backwards": lambda m: m.update(branches=[[3, "a"], [1, "b"]]),
    "branches, not there yet": lambda m: m.update(branches=[[99, "a"]]),
    "a last number that is none": lambda m: m.update(last_number="9"),
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "t.zarr"
    with small_store.make(path, keep_commits=5) as emb:
        for seed in range(4):
            small_store.some_steps(emb, seed, 1)
            emb.state_dict()
    return path


@pytest.mark.parametrize("name", NONSENSE)
def test_a_manifest_with_nonsense_about_its_commits_is_refused_and_left_alone(
    store: Path, name: str
) -> None:
    assert len(store_files.manifest(store)["commits"]) == 5
    store_files.edit_manifest(store, NONSENSE[name])
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
        for key in ("keep_commits", "checkpoints", "branches", "last_number", "crc32"):
            del manifest[key]
        for log in manifest["commits"][-1]["logs"]:
            del log["inherited"]

    store_files.edit_manifest(store, age)
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
