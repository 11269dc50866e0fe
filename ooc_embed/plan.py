"""What a table will take, and how fast it will train: `plan`, and how that is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import listing
from .cache import AUTO_SHARE, slots_for
from .cgroups import usable_memory
from .creation import check_cache, check_count, check_sizes, dtype_name
from .footprint import Footprint
from .listing import human, size
from .manifest import Layout, record_fields
from .prediction import Rates, Speed, predict, traffic
from .rule import Rule, check_is_rule
from .rules import SparseAdam
from .workloads import DISTRIBUTIONS


@dataclass(frozen=True)
class Plan(Footprint):
    """What a table will take, from `ooc_embed.plan`; printed, or in a notebook, it is a table.

    Attributes:
        num_embeddings, embedding_dim, rule, dtype: of the table.
        fields: columns of a record by the name of the field.
        batch, commit_every: ids of a step, and steps from one commit to the next.
        memory: bytes that the process may use, files' pages included.
        slots: rows that the cache can hold.
        layout: the sizes of the files.
        rates: of the disk and the machine, or None.

    Beside them it has bytes, named ``..._bytes``: of weights, state, table and logs, of the disk
    while a merge runs and at most, of map, cache, batch and merge in memory, and in RAM without
    this package.
    """

    rates: Rates | None = None

    def hit_rate(self, ids: str, cache_bytes: int | None = None) -> float:
        """The part of a batch's different rows that a full cache has.

        Args:
            ids: "uniform", or "zipf": the k-th most frequent row comes in proportion to 1/k.
            cache_bytes: another size of the cache.

        Raises:
            ValueError: other ids, or no size.
        """
        if ids not in DISTRIBUTIONS:
            raise ValueError(f"ids must be one of {', '.join(DISTRIBUTIONS)}, got {ids!r}")
        if cache_bytes is not None and cache_bytes < 0:
            raise ValueError(f"cache_bytes must not be negative, got {cache_bytes}")
        slots = self.slots if cache_bytes is None else max(1, cache_bytes // self.slot_bytes)
        moved = traffic(ids, self.num_embeddings, self.batch, slots, self.commit_every)
        return moved.hit_rate

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """What training comes to, with uniform and with Zipf ids, each without and with look-ahead;
        empty if no disk was measured."""
        if self.rates is None:
            return ()
        return tuple(
            speed
            for ids in DISTRIBUTIONS
            for speed in predict(
                ids,
                self.layout,
                self.rates,
                batch=self.batch,
                slots=self.slots,
                page_cache_bytes=self.page_cache_bytes,
                commit_every=self.commit_every,
            )
        )

    def __str__(self) -> str:
        return listing.as_text(self._title, self._sections())

    def _repr_html_(self) -> str:
        return listing.as_html(self._title, self._sections())

    @property
    def _title(self) -> str:
        return (
            f"{self.num_embeddings:,} rows x {self.embedding_dim:,}, "
            f"{dtype_name(self.dtype)}, {self.rule.name}, batches of {self.batch:,} ids"
        )

    def _sections(self) -> list[listing.Section]:
        sections = [self._on_disk(), self._in_memory(), self._instead(), self._hits()]
        if self.rates is not None:
            sections += [_measured(self.rates), self._expected()]
        return sections

    def _on_disk(self) -> listing.Section:
        chunks = f"{self.layout.num_chunks:,} files of {human(self.layout.chunk_bytes)}"
        records = f"{self.log_records:,} records at most"
        return "on disk", [
            size("weights", self.weight_bytes),
            size("the rule's state", self.state_bytes, ", ".join(self.state_fields) or "none"),
            size("table, with a version a row", self.table_bytes, chunks),
            size("log, when a merge begins", self.log_bytes, records),
            size("log, at most", self.log_bound_bytes, "without commits"),
            size("all, while a merge runs", self.merging_bytes, "table and two logs"),
            size("all, at most", self.most_bytes, f"{self.layout.num_files:,} files"),
        ]

    def _in_memory(self) -> listing.Section:
        a_row = self.map_bytes // self.num_embeddings
        cached = f"{self.slots:,} rows, {self.slots / self.num_embeddings:.1%} of all"
        return f"in memory, {human(self.memory)} of which may be used", [
            size("map from rows to places", self.map_bytes, f"{a_row} a row"),
            size("cache", self.cache_bytes, cached),
            size("batch", self.batch_bytes, "rows, gradient, sums, ids"),
            size("merge", self.merge_bytes, "while one runs"),
            size("together", self.memory_bytes, "beside Python, torch and the model"),
            size("recommended cache", self.recommended_cache_bytes),
        ]

    def _instead(self) -> listing.Section:
        entries = [
            size("SparseAdam, sparse gradient", self.sparse_adam_bytes),
            size("Adam, dense gradient", self.dense_adam_bytes),
        ]
        if self.in_ram_bytes != self.sparse_adam_bytes:
            entries.append(size(f"{self.rule.name}, sparse gradient", self.in_ram_bytes))
        return "in RAM or VRAM instead, as nn.Embedding with", entries

    def _hits(self) -> listing.Section:
        def entry(label: str, cache_bytes: int) -> listing.Entry:
            uniform, zipf = (
                f"{self.hit_rate(ids, cache_bytes):.2f} {ids}" for ids in DISTRIBUTIONS
            )
            return label, uniform, zipf, ""

        return "hits among the rows of a batch", [
            entry("this cache", self.cache_bytes),
            entry("recommended cache", self.recommended_cache_bytes),
        ]

    def _expected(self) -> listing.Section:
        entries = []
        for speed in self.speeds:
            label = f"{speed.ids} ids" + (", look-ahead" if speed.lookahead else "")
            terms = ("compute", "disk", "commit", "merge")
            values = (f"{name} {1e3 * getattr(speed, name + '_seconds'):.3g}" for name in terms)
            samples = f"{speed.samples_per_second:,.0f} samples/s"
            rows = f"{speed.rows_per_second:,.0f} rows/s"
            entries.append((label, rows, samples, f"ms a step: {', '.join(values)}"))
        return f"expected, with merges and a commit every {self.commit_every:,} steps", entries


def _measured(rates: Rates) -> listing.Section:
    return "measured", [
        ("write", f"{human(rates.write)}/s", "", "large blocks"),
        ("read", f"{human(rates.read)}/s", "", "large blocks"),
        ("read while as much is written", f"{human(rates.mixed)}/s", "", "large blocks"),
        ("lookups from the disk", f"{rates.reads:,.0f} rows/s", "", ""),
        ("lookups from the page cache", f"{rates.cached_reads:,.0f} rows/s", "", ""),
        *(
            (f"step, {ids} ids, all cached", f"{1e3 * seconds:.3g} ms", "", "")
            for ids, seconds in rates.steps.items()
        ),
    ]


def plan(
    num_embeddings: int,
    embedding_dim: int,
    optimizer: Rule | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 16384,
    commit_every: int = 100,
    cache_bytes: int | str = "auto",
    memory: int | None = None,
    disk: str | Path | Rates | None = None,
) -> Plan:
    """What a table will take on disk and in memory, before it is made.

    Args:
        num_embeddings, embedding_dim, optimizer, dtype, cache_bytes: as of `DiskEmbedding`.
        batch: ids of a step.
        commit_every: steps from one commit to the next.
        memory: bytes that the process may use, files' pages included. None is what this one may
            use: the machine's, or its cgroup's limit.
        disk: a folder on the disk that the table is to be on: its rates, and those of a step, are
            measured there in about 20 s with a few GB of files, which are removed. Or the
            ``rates`` of another plan with records and batches of the same size, and the same rule.
            Without it the plan has no ``speeds``.

    Raises:
        ValueError, TypeError: an argument is wrong, or no process could map such a table.
        OSError: the disk has too little room, or refuses O_DIRECT.

    Examples::

        >>> import ooc_embed
        >>> table = ooc_embed.plan(10_000_000, 128)
        >>> table.weight_bytes, table.state_bytes, table.map_bytes
        (5120000000, 10240000000, 40000000)
    """
    check_sizes(num_embeddings, embedding_dim, None)
    check_cache(cache_bytes)
    memory = usable_memory() if memory is None else memory
    for name, value in {"batch": batch, "commit_every": commit_every, "memory": memory}.items():
        check_count(name, value)
    rule = SparseAdam() if optimizer is None else optimizer
    check_is_rule(rule)
    num_embeddings, embedding_dim = int(num_embeddings), int(embedding_dim)
    fields = record_fields(embedding_dim, rule)
    dtype_of_files = np.dtype(dtype_name(dtype)).newbyteorder("<")
    layout = Layout.plan(num_embeddings, sum(fields.values()), dtype_of_files)
    layout.check()
    nbytes = memory // AUTO_SHARE if isinstance(cache_bytes, str) else cache_bytes
    if not (disk is None or isinstance(disk, (str, Path, Rates))):
        raise TypeError(f"disk must be a folder or the rates of a plan, got {disk!r}")
    if isinstance(disk, (str, Path)):
        from .calibration import measure  # and with it all that measures, which few plans need

        disk = measure(Path(disk), num_embeddings, embedding_dim, rule, dtype, int(batch))
    if disk is not None and (disk.record_bytes, disk.batch) != (layout.record_bytes, batch):
        raise ValueError(
            f"these rates are of records of {disk.record_bytes} bytes and batches of {disk.batch}, "
            f"the plan has {layout.record_bytes} and {batch}: measure again"
        )
    return Plan(
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        rule=rule,
        dtype=dtype,
        fields=fields,
        batch=int(batch),
        commit_every=int(commit_every),
        memory=int(memory),
        slots=slots_for(nbytes, num_embeddings, layout.record_bytes),
        layout=layout,
        rates=disk,
    )
