"""What a table takes on disk and in memory, here and without this package. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cache import SLOT_BYTES, map_dtype
from .manifest import VERSION_FIELD, Layout
from .merging import most_doubled, threads_for
from .rule import Rule

_ID_BYTES = 8
# Python, torch, and what they load.
_PROCESS_BYTES = 512 << 20
# A recommended cache takes half of what the rest leaves, and holds at least so many batches.
_RECOMMENDED_SHARE = 2
_RECOMMENDED_BATCHES = 4


@dataclass(frozen=True)
class Footprint:
    """How many bytes a table takes, and what it would take in RAM.

    Args:
        num_embeddings, embedding_dim, rule, dtype: of the table.
        fields: columns of a record by the name of the field.
        batch, commit_every: ids of a step, and steps from one commit to the next.
        memory: bytes that the process may use, files' pages included.
        slots: rows that the cache can hold.
        layout: the sizes of the files.
    """

    num_embeddings: int
    embedding_dim: int
    rule: Rule
    dtype: torch.dtype
    fields: dict[str, int]
    batch: int
    commit_every: int
    memory: int
    slots: int
    layout: Layout

    # On disk

    @property
    def record_bytes(self) -> int:
        """A row with its state and its version."""
        return self.layout.record_bytes

    @property
    def weight_bytes(self) -> int:
        """The weights of all rows."""
        return self._bytes_of(self.embedding_dim)

    @property
    def state_bytes(self) -> int:
        """The rule's fields of all rows, for example the moments."""
        return self._bytes_of(sum(self.state_fields.values()))

    @property
    def state_fields(self) -> dict[str, int]:
        """The rule's fields: columns by name."""
        return {k: v for k, v in self.fields.items() if k not in ("weight", VERSION_FIELD)}

    @property
    def table_bytes(self) -> int:
        """The table's files once all exist: weights, state and versions, the last file whole."""
        return self.layout.table_bytes

    @property
    def log_records(self) -> int:
        """Records of a log that a commit seals, at most: half as many as the table has rows, and
        those of the steps since the commit before."""
        since = self.commit_every * min(self.batch, self.num_embeddings)
        return min(self.layout.log_limit + since, self.layout.log.capacity)

    @property
    def log_bytes(self) -> int:
        """A log that a commit seals, at most, so that it is merged."""
        return self.layout.log_bytes(self.log_records)

    @property
    def log_bound_bytes(self) -> int:
        """A log into which no more fits, as it becomes without commits."""
        return self.layout.log_bytes(self.layout.log.capacity)

    @property
    def merging_bytes(self) -> int:
        """All of it while one such log is merged and the next one fills up, at most."""
        return self.table_bytes + 2 * self.log_bytes + self._doubled_bytes

    @property
    def most_bytes(self) -> int:
        """All of it, at most: a full log is merged, and the next one is full."""
        return self.table_bytes + 2 * self.log_bound_bytes + self._doubled_bytes

    @property
    def _doubled_bytes(self) -> int:
        chunk = self.layout.chunk_bytes
        return min(most_doubled(chunk), self.layout.num_chunks) * chunk

    # In memory

    @property
    def map_bytes(self) -> int:
        """The map from rows to places."""
        places = max(2 * self.layout.log.capacity, self.slots)
        return self.num_embeddings * map_dtype(places).itemsize

    @property
    def cache_bytes(self) -> int:
        """The cache, once it is full."""
        return self.slots * self.slot_bytes

    @property
    def batch_bytes(self) -> int:
        """A batch of different ids: its rows, its gradient and its sums, and four ids of each."""
        return self.batch * (3 * self.embedding_dim * self.dtype.itemsize + 4 * _ID_BYTES)

    @property
    def merge_bytes(self) -> int:
        """A merge: a chunk for each of its threads, and two bytes for each record of the log."""
        chunk = self.layout.chunk_bytes
        return threads_for(chunk) * chunk + 2 * self.log_records

    @property
    def memory_bytes(self) -> int:
        """Map, cache, batch and merge."""
        return self.map_bytes + self.cache_bytes + self.batch_bytes + self.merge_bytes

    @property
    def page_cache_bytes(self) -> int:
        """What the process may use beyond that, and beyond Python and torch: for files' pages."""
        return max(0, self._bytes_for_rows - self.cache_bytes)

    @property
    def recommended_cache_bytes(self) -> int:
        """Half of the memory that map, batch, merge, Python and torch leave: the other half is for
        the model and for files' pages. At least four batches, at most all rows."""
        share = self._bytes_for_rows // _RECOMMENDED_SHARE
        least = _RECOMMENDED_BATCHES * self.batch * self.slot_bytes
        return min(max(share, least), self.num_embeddings * self.slot_bytes)

    @property
    def _bytes_for_rows(self) -> int:
        """What is left for the cache and for files' pages; below 0 if nothing is."""
        needed = self.map_bytes + self.batch_bytes + self.merge_bytes
        return self.memory - needed - _PROCESS_BYTES

    # Without this package

    @property
    def in_ram_bytes(self) -> int:
        """``nn.Embedding(sparse=True)`` with the rule's state, and a batch's gradient."""
        return self.weight_bytes + self.state_bytes + self._sparse_gradient_bytes

    @property
    def sparse_adam_bytes(self) -> int:
        """``nn.Embedding(sparse=True)`` with ``SparseAdam``'s moments, and a batch's gradient."""
        return 3 * self.weight_bytes + self._sparse_gradient_bytes

    @property
    def dense_adam_bytes(self) -> int:
        """``nn.Embedding`` with ``Adam``'s moments, and a gradient as large as the weights."""
        return 4 * self.weight_bytes

    @property
    def slot_bytes(self) -> int:
        """A row in the cache."""
        return self.record_bytes + SLOT_BYTES

    @property
    def _sparse_gradient_bytes(self) -> int:
        return self.batch * (_ID_BYTES + self.embedding_dim * self.dtype.itemsize)

    def _bytes_of(self, columns: int) -> int:
        return self.num_embeddings * columns * self.dtype.itemsize
