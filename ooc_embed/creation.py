"""From the constructor's arguments to a new store. Knows which values make sense, not torch.nn.

All checks come before the first write.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from . import bulk, initializers, rules
from .arguments import LayerArguments
from .history import Commit, Facts, History
from .log import LogState
from .manifest import VERSION_FIELD, Layout, Manifest, record_fields
from .opened import field_spans
from .optimizer import first_group
from .rule import Rule, check_is_rule
from .store import Store
from .table import Table


def create_table(
    path: Path,
    shape: tuple[int, int],
    arguments: LayerArguments,
    *,
    padding_idx: int | None,
    rule: Rule | None,
    group_options: Mapping[str, Any],
    init: Any,
    seed: int,
    dtype: torch.dtype,
    cache_bytes: int | str,
    chunk_rows: int | None,
    overwrite: bool,
    keep_commits: int = 1,
    state: Mapping[str, Any] = MappingProxyType({}),
    step: int = 0,
) -> Table:
    """Create a store and open it; the other arguments are those of `DiskEmbedding`.

    Args:
        path: where.
        shape: ``(num_embeddings, embedding_dim)``.
        arguments: what the store keeps of the layer's.
        rule: None is `SparseAdam` with its defaults.
        group_options: what the first param group has beside the rule's values.
        state: fields to begin with, name to ``(N, columns)``: of the optimizer, beside an ``init``
            of the full shape; or all of them, where ``init`` is what rows of version 0 begin as.
        step: steps taken already.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing is written.
        FileExistsError: ``path`` exists.
        OSError: the disk is full, or failed.
    """
    check_sizes(*shape, chunk_rows)
    check_cache(cache_bytes)
    check_count("keep_commits", keep_commits)
    rule = rules.SparseAdam() if rule is None else rule
    check_is_rule(rule)
    group = first_group(rule, group_options)
    num_embeddings, embedding_dim = map(int, shape)  # JSON knows none of numpy's
    fields = record_fields(embedding_dim, rule)
    sources = dict(state)
    if hasattr(init, "shape"):
        sources["weight"] = init
    for name, source in sources.items():
        title = "init" if source is init else name
        bulk.check_source(title, source, (num_embeddings, fields[name]))
    if "weight" in sources and rule.restricts:
        bulk.check_rows(sources["weight"], rule, dtype)
    start = _start(rule, init, embedding_dim, dtype, given=hasattr(init, "shape"))
    manifest = Manifest(
        table_id=str(uuid.uuid4()),
        embedding_dim=embedding_dim,
        padding_idx=_padding(padding_idx, num_embeddings),
        dtype=dtype_name(dtype),
        fields=fields,
        rule=rules.to_json(rule),
        init=initializers.to_json(start),
        seed=_seed(seed),
        module=arguments,
        history=_beginning([group], step, num_embeddings, int(keep_commits)),
    )
    manifest.check()

    given = _GivenRows(rule, fields, sources)
    store = Store.create(
        path,
        manifest,
        chunk_rows,
        given.chunks if sources else None,
        overwrite=overwrite,
        finish=given.count,
    )
    try:
        table = Table(store, cache_bytes)
        store.name_holder()
        return table
    except BaseException:
        store.close()
        raise


class _GivenRows:
    """Gives the content of every chunk file, of rows that are given.

    With versions among the fields, a row of version 0 is none: it has its initial value. Versions
    that are no counts are a `ValueError`.
    """

    def __init__(self, rule: Rule, fields: Mapping[str, int], sources: Mapping[str, Any]) -> None:
        spans = field_spans(fields)
        self._version = spans[VERSION_FIELD].start
        self._versions_given = VERSION_FIELD in sources
        self._sources = [
            (spans[name], source, rule.admit if name == "weight" else None)
            for name, source in sources.items()
        ]
        constants = {**rule.initial(), VERSION_FIELD: 1.0}
        self._constants = [(spans[name], value) for name, value in constants.items()]
        self._written = 0

    def chunks(self, layout: Layout) -> Iterator[np.ndarray | None]:
        """Yield each chunk; None where there is no row in it."""
        for chunk in bulk.chunks(self._sources, self._constants, layout):
            versions = chunk[:, self._version]
            written = versions != 0
            if self._versions_given:
                if not (versions >= 0).all():
                    raise ValueError(f"versions are counts, got {versions.min()}")
                chunk[~written] = 0
            self._written += int(written.sum())
            yield chunk if written.any() else None

    def count(self, manifest: Manifest) -> Manifest:
        """The manifest with the number of rows that were given."""
        commit = replace(manifest.commit, rows_written=self._written)
        return replace(manifest, history=replace(manifest.history, commits=(commit,)))


def _start(
    rule: Rule, init: Any, dim: int, dtype: torch.dtype, *, given: bool
) -> initializers.Initializer:
    """What rows begin as that are not given."""
    if given:
        return initializers.Zeros()
    start = rule.default_init() if init is None else initializers.from_name(init)
    rule.check_init(start, dim, dtype)
    return start


def _beginning(
    param_groups: list[dict[str, Any]], step: int, num_embeddings: int, keep: int
) -> History:
    """The one commit that a table begins with."""
    facts = Facts(
        step=step,
        rows_written=0,
        param_groups=param_groups,
        num_embeddings=num_embeddings,
    )
    return History((Commit.now(0, facts, (LogState(0),)),), keep)


def check_sizes(num_embeddings: int, embedding_dim: int, chunk_rows: int | None) -> None:
    sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    if chunk_rows is not None:
        sizes["chunk_rows"] = chunk_rows
    for name, size in sizes.items():
        check_count(name, size)
    if chunk_rows is not None and chunk_rows % 1024:
        raise ValueError(f"chunk_rows must be a multiple of 1024, got {chunk_rows}")


def check_count(name: str, value: int) -> None:
    check_integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_cache(cache_bytes: int | str) -> None:
    if cache_bytes == "auto":
        return
    if isinstance(cache_bytes, (bool, str)) or not isinstance(cache_bytes, (int, np.integer)):
        raise TypeError(f"cache_bytes must be an integer or 'auto', got {cache_bytes!r}")
    if cache_bytes < 1:
        raise ValueError(f"cache_bytes must be at least 1, got {cache_bytes}")


def check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}")


def _padding(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    check_integer("padding_idx", padding_idx)
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(
            f"padding_idx must be within num_embeddings: got {padding_idx} for {num_embeddings}"
        )
    return int(padding_idx) % num_embeddings


def dtype_name(dtype: torch.dtype) -> str:
    if dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"dtype {dtype} is refused: with 16 bits eps=1e-8 is 0 and a second moment overflows, "
            f"which turns rows into NaN. Use float32; model.half() casts the output"
        )
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    return str(dtype).removeprefix("torch.")


def _seed(seed: int) -> int:
    check_integer("seed", seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit into 64 bits, got {seed}")
    return int(seed)
