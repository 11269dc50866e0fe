"""A table that is open: its store, its cache, who may use them, and which commit it is at.

Knows the life of a table, from opening to closing; does not know lookups and steps.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from . import rules
from .blocks import BlockUpdate
from .cache import SLOT_BYTES, RowCache, slots_for
from .errors import CorruptStoreError, StoreError
from .evictor import Evictor
from .fetcher import RowFetcher
from .guard import Guard
from .history import Facts
from .interrupts import uninterrupted
from .manifest import VERSION_FIELD, Layout, Manifest
from .memory import Span
from .merging import Worker
from .rule import check_trains
from .snapshot import snapshot
from .stats import Counters
from .storage import Storage
from .store import Store

_READ_ATTEMPTS = 100


class OpenTable:
    """A store that is open, with the optimizer's rule.

    Args:
        store: an open store.
        cache_bytes: memory for hot rows, or ``"auto"``; readers have no cache.

    Attributes:
        step_count: optimizer steps taken.
        rollbacks: how often this object went back.
        counters: what it did since it was opened.
    """

    @torch.inference_mode(False)  # such a mode may be on, and its tensors could never be stepped
    def __init__(self, store: Store, cache_bytes: int | str) -> None:
        manifest = store.manifest
        self.store = store
        self.counters = Counters()
        self.rollbacks = 0
        self._cache_bytes = cache_bytes
        self._guard = Guard(store.path, writer=store.writable)
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)
        self.dim = manifest.embedding_dim
        self.rule = rules.from_json(manifest.rule)
        self.spans = field_spans(manifest.fields)
        self._update = BlockUpdate(self.rule, self.spans, self.dtype)
        self._version = self.spans[VERSION_FIELD].start
        self._load()

    @torch.inference_mode(False)
    def _load(self) -> None:
        """Be where the store's manifest is, with an empty cache."""
        store, layout, commit = self.store, self.store.layout, self.store.manifest.commit
        self.step_count = commit.step
        self.rows_written = commit.rows_written
        slots = 0
        if store.writable:
            slots = slots_for(self._cache_bytes, layout.num_embeddings, layout.record_bytes)
        rows, positions = layout.num_embeddings, 2 * layout.log.capacity
        try:
            self.cache = RowCache(rows, slots, layout.width, self.dtype, positions)
            self._storage = Storage(store, self.cache, self.counters)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise _no_room(store.path, layout, error) from error
        self._evictor = Evictor(self.cache, self._storage, self.counters)
        self._rows = RowFetcher(
            self.cache,
            self._storage,
            self._evictor,
            self.spans["weight"],
            self._version,
            [(self.spans[name], value) for name, value in self.rule.initial().items()],
            self.rule.confine,
            self.counters,
        )

    @classmethod
    def open(cls, path: Path, mode: str, cache_bytes: int | str, commit: int | None = None) -> Self:
        """Open a store: to write, after a crash too, or to read exactly one commit of it.

        Args:
            path, mode: as of `Store.open`.
            cache_bytes: memory for hot rows.
            commit: an earlier one, to read or to go back to; None is the newest.

        Raises:
            StoreError: that commit is not kept.
            CorruptStoreError: a file is missing, short, or fails its checksum.
            LockedError, FormatError, FileNotFoundError: as `Store.open`.
        """
        for _ in range(_READ_ATTEMPTS):
            store = Store.open(path, mode, commit if mode == "r" else None)
            table = None
            try:
                table = cls(store, cache_bytes)
                if store.writable:
                    check_trains(table.rule, path)
                    table._storage.recover()
                    store.name_holder()
                    if commit not in (None, table.manifest.commit.number):
                        table.rollback(commit)
                    table._storage.begin_merge()
                    return table
                # A reader took no lock: a merge may have replaced files while they were mapped.
                if not store.has_changed():
                    return table
                table.close()
            except BaseException as error:
                if table is not None:  # interrupted: no merge may go on without the lock
                    table._storage.stop_merge()
                store.close()
                reading = isinstance(error, CorruptStoreError) and mode == "r"
                if not (reading and store.has_changed()):
                    if isinstance(error, CorruptStoreError):
                        error.add_note(
                            f"`ooc-embed verify {path}` names all that is damaged, and with "
                            f"`--salvage OUT` makes a new store of the rest."
                        )
                    raise
        raise StoreError(f"{path} changed {_READ_ATTEMPTS} times while it was being opened")

    @property
    def manifest(self) -> Manifest:
        """The newest commit that this object made or opened."""
        return self._storage.manifest

    # Life

    def commit(
        self,
        param_groups: list[dict[str, Any]],
        *,
        flush: bool = False,
        checkpoint: bool = False,
    ) -> int:
        """Make all steps durable; return the commit's number.

        Args:
            param_groups: the hyper-parameters in force.
            flush: merge too, so that the zarr table has every row.
            checkpoint: one will name the commit: it is kept until two others are.

        Raises:
            OSError: the disk is full, or failed. Nothing is lost, and a later call may succeed.
            CorruptStoreError: a merge found a damaged chunk file.
        """
        with self.writing():
            self._commit(param_groups, flush=flush)
            self._storage.begin_merge()
            if checkpoint:  # last: of a call that raises, none comes
                self._storage.hand_out()
            return self.manifest.commit.number

    def _commit(self, param_groups: list[dict[str, Any]], **how: bool) -> None:
        self._evictor.finish()
        self._storage.commit(self._facts(param_groups), **how)

    def _facts(self, param_groups: list[dict[str, Any]]) -> Facts:
        """What a commit made now says."""
        return Facts(
            step=self.step_count,
            rows_written=self.rows_written,
            param_groups=param_groups,
            num_embeddings=self.manifest.num_embeddings,
        )

    def keep_commits(self, count: int) -> None:
        """Keep the newest ``count`` commits from now on."""
        with self.writing():
            self._storage.keep_commits(count)
            self._storage.begin_merge()  # one may have waited for commits that go

    def rollback(
        self,
        number: int | None,
        follow: Callable[[list[dict[str, Any]]], None] = lambda param_groups: None,
    ) -> None:
        """Go back to a commit, None for the newest; all that came after it is lost.

        Args:
            number: which.
            follow: takes the hyper-parameters of that commit, once it is gone back to: also where
                that is interrupted, or fails late.

        Raises:
            StoreError: it is not kept.
            OSError: the disk is full, or failed; nothing has changed.
        """
        with self.writing():
            if number is None:
                number = self.manifest.commit.number

            def gone_back() -> None:
                self.rollbacks += 1
                follow(self.manifest.commit.param_groups)

            self._change(partial(self._storage.rollback, number), gone_back)

    def resize(self, num_embeddings: int, param_groups: list[dict[str, Any]]) -> None:
        """Commit, with more rows.

        Raises:
            ValueError: fewer rows, or too many for the size of the table's files.
            OSError: the disk is full, or failed, or there is no memory for the map of so many rows;
                nothing is lost.
        """
        with self.writing():
            layout = self.store.grown(num_embeddings)
            if num_embeddings == self.manifest.num_embeddings:
                self._commit(param_groups)
                self._storage.begin_merge()
                return
            self._check_memory(layout)
            facts = replace(self._facts(param_groups), num_embeddings=num_embeddings)
            self._evictor.finish()
            self._storage.store_all()
            self._change(partial(self._storage.resize, facts))

    def _check_memory(self, layout: Layout) -> None:
        """See that a table of these sizes can be opened, beside what there is.

        Raises:
            OSError: there is no memory for its maps, or its cache.
        """
        rows, record_bytes = layout.num_embeddings, layout.record_bytes
        slots = slots_for(self._cache_bytes, rows, record_bytes)
        try:
            taken = (
                Span(layout.mapped_bytes, writable=False),
                RowCache.empty_map(rows, 2 * layout.log.capacity),
                Span(slots * (record_bytes + SLOT_BYTES), writable=True),
            )
        except OSError as error:
            outcome, remedy = "; nothing has changed", ", or grow it by fewer rows"
            raise _no_room(self.store.path, layout, error, outcome, remedy) from error
        del taken

    def _change(self, change: Callable[[], None], then: Callable[[], None] = lambda: None) -> None:
        """Name another state, and be there; a change that fails late has happened all the same."""
        self._evictor.finish()
        before = self.store.manifest
        with uninterrupted():
            try:
                change()
            except BaseException:
                if self.store.manifest is not before:
                    self._reload()
                    then()
                else:
                    self._storage.begin_merge()
                raise
            self._reload()
            then()

    def _reload(self) -> None:
        try:
            self._storage.close()
            self.cache.close()  # before there is memory for another
            self._load()
            self._storage.recover()
            self._storage.begin_merge()
        except BaseException:
            self._guard.closed = True
            self.store.close()
            raise

    def snapshot(self, path: Path, param_groups: list[dict[str, Any]]) -> None:
        """Commit, and make a store at ``path`` that has the same commits.

        Raises:
            FileExistsError: something is there.
            OSError: the disk is full, or failed; nothing is lost.
        """
        if not self.rule.trains:  # nobody writes to it
            with self._guard.reading():
                return snapshot(self.store, path)
        with self.writing():
            self._commit(param_groups)
            try:
                self._storage.put_merge_down()
                snapshot(self.store, path)
            finally:
                self._storage.begin_merge()

    @property
    def kernel(self) -> str:
        """What steps the rows, as `BlockUpdate.kernel` names it."""
        return self._update.kernel

    @property
    def read_only(self) -> bool:
        return not self._guard.writer

    @property
    def closed(self) -> bool:
        return self._guard.closed

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened it."""
        return self._guard.forked

    def writing(self) -> AbstractContextManager[None]:
        """For ``with``: do something that changes the table, alone.

        Raises:
            StoreError: this process may not write the table, or is in the middle of doing so, or
                the disk has failed for good.
        """

        def begin() -> None:
            self._storage.check()
            self._storage.settle()

        return self._guard.writing(begin)

    def close(
        self, param_groups: list[dict[str, Any]] | None = None, *, flush: bool = False
    ) -> None:
        """Commit (a writer, given ``param_groups``) and release; once closed it does nothing.

        A merge stops after the chunks in flight, and opening again goes on with it. One that failed
        is a warning, unless ``flush`` asks for it.

        Raises:
            StoreError: the disk had failed for good. The table is closed, at its last commit.
        """
        if self._guard.closed or self._guard.forked:
            return
        if isinstance(threading.current_thread(), Worker):
            # The cyclic collector ran a finalizer here, which never asks for a flush, and a thread
            # cannot wait for itself.
            close = partial(self.close_for_good, param_groups)
            threading.Thread(target=close, daemon=False).start()
            return
        with self._guard.reading():
            if param_groups is not None and self._guard.writer and not self._storage.failed:
                self._commit(param_groups, flush=flush, closing=True)
            self._release()
        self._storage.check()

    def close_for_good(self, param_groups: list[dict[str, Any]] | None) -> None:
        """Close, and release also where that fails or is interrupted: nobody can try again."""
        try:
            self.close(param_groups)
        except BaseException:
            self.close()
            raise

    def _release(self) -> None:
        self._evictor.finish()
        self._storage.stop_merge()
        with uninterrupted():
            self._guard.closed = True
            try:
                self._storage.close()
                self.cache.close()
            finally:
                self.store.close()


def _no_room(
    path: Path, layout: Layout, error: OSError, outcome: str = "", remedy: str = ""
) -> OSError:
    text = (
        f"{path}: a table of {layout.num_embeddings:,} rows has no room in this process ({error})"
    )
    if "vm.max_map_count" not in str(error):  # that says what to do
        outcome += f". Raise the limit of its memory, or open it with a smaller cache_bytes{remedy}"
    return OSError(error.errno, text + outcome)


def field_spans(fields: Mapping[str, int]) -> dict[str, slice]:
    """Field name to its columns in a record."""
    spans, start = {}, 0
    for name, width in fields.items():
        spans[name] = slice(start, start + width)
        start += width
    return spans
