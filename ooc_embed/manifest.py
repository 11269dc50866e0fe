"""What a store's metadata say: manifest and layout. Knows JSON; touches no file."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import gradients, initializers, rules
from .arguments import LayerArguments
from .errors import FormatError
from .history import Commit, History
from .log import ALIGNMENT, LogShape
from .parsing import integer, optional, text
from .rule import Rule, check_group, hyperparameters

FORMAT = 1
# Of the group, under which it is.
ATTRIBUTE = "ooc_embed"
VERSION_FIELD = "version"
_CHECKSUM = "crc32"
_OF_WRONG_VALUES = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)
_CHUNK_BYTES = 32 << 20
_MOST_CHUNKS = 4096
_LOG_ROWS_PER_FILE = 1 << 20
_SMALLEST_LOG = 8 * ALIGNMENT
# Addresses that a process has, on most machines; and far more files than one can have open.
_MOST_BYTES = 1 << 47
_MOST_MAPPED_FILES = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """The state of a store, as ``zarr.json`` holds it.

    Args:
        table_id: a uuid that stays with the table.
        fields: field name to columns, in the order of a record.
        rule, init: plain descriptions of the optimizer rule and of the initial rows; this module
            passes them through.
        module: the layer's arguments.
        history: the commits that are kept.
        checksums: crc32 of each chunk file that exists.
        merged: crc32 of those that have the sealed log's records already, while not all have.
    """

    table_id: str
    embedding_dim: int
    padding_idx: int | None
    dtype: str
    fields: dict[str, int]
    rule: dict[str, Any]
    init: dict[str, Any]
    seed: int
    module: LayerArguments
    history: History
    checksums: dict[int, int] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)

    @property
    def commit(self) -> Commit:
        """The newest commit."""
        return self.history.newest

    @property
    def num_embeddings(self) -> int:
        return self.commit.num_embeddings

    @property
    def width(self) -> int:
        return sum(self.fields.values())

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    def to_json(self) -> dict[str, Any]:
        value = {
            "format": FORMAT,
            "table_id": self.table_id,
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "padding_idx": self.padding_idx,
            "dtype": self.dtype,
            "fields": list(self.fields.items()),
            "rule": self.rule,
            "init": self.init,
            "seed": self.seed,
            "module": self.module.to_json(),
            "chunk_crc32": _checksums_to_json(self.checksums),
            "merged_crc32": _checksums_to_json(self.merged),
            **self.history.to_json(),
        }
        return {**value, _CHECKSUM: _crc32(value)}

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        """Parse a manifest; older versions wrote none of its own checksum.

        Raises:
            FormatError: another format, a field is missing or of another type, or the manifest is
                not what was written.
        """
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else value
            raise FormatError(f"format {found!r} is not format {FORMAT}, which this version reads")
        try:
            if _CHECKSUM in value and (found := _crc32(value)) != value[_CHECKSUM]:
                raise ValueError(
                    f"its checksum is {found}, {value[_CHECKSUM]!r} was written: it was changed by "
                    f"hand, or bits flipped. Put the file back from a copy"
                )
            manifest = cls(
                table_id=text(value["table_id"]),
                embedding_dim=integer(value["embedding_dim"], 1),
                padding_idx=optional(integer, value["padding_idx"]),
                dtype=text(value["dtype"]),
                fields={text(name): integer(width, 1) for name, width in value["fields"]},
                rule=dict(value["rule"]),
                init=dict(value["init"]),
                seed=integer(value["seed"], -(2**63), 2**63),
                module=LayerArguments.from_json(value["module"]),
                history=History.from_json(value),
                checksums=_checksums_from_json(value["chunk_crc32"]),
                merged=_checksums_from_json(value.get("merged_crc32", {})),
            )
            if (rows := value["num_embeddings"]) != manifest.num_embeddings:
                raise ValueError(
                    f"num_embeddings is {rows!r}, the newest commit has {manifest.num_embeddings}"
                )
            manifest.check()
        except _OF_WRONG_VALUES as error:
            what = error if type(error) is ValueError else repr(error)
            raise FormatError(f"the manifest is damaged: {what}") from error
        return manifest

    def check(self) -> None:
        """Raise a ValueError where parts of the manifest contradict each other."""
        rule = rules.from_json(self.rule)
        initializers.from_json(self.init)
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype {self.dtype!r} is neither float32 nor float64")
        if self.fields != record_fields(self.embedding_dim, rule):
            raise ValueError(
                f"the fields {self.fields} are not those of {rule.name} for "
                f"embedding_dim={self.embedding_dim}"
            )
        if self.merged and self.commit.sealed is None:
            raise ValueError(f"chunks {sorted(self.merged)} are merged, and no log is sealed")
        if self.padding_idx is not None and self.padding_idx >= self.num_embeddings:
            raise ValueError(f"padding_idx {self.padding_idx} is no row")
        for group in (group for commit in self.history.commits for group in commit.param_groups):
            group = {**hyperparameters(rule), **gradients.GRADIENT_OPTIONS, **group}
            check_group(rule, group)
            gradients.check_options(group)


def _crc32(value: dict[str, Any]) -> int:
    """The checksum of a manifest without it, however the file is laid out."""
    value = {name: _plain(part) for name, part in value.items() if name != _CHECKSUM}
    return zlib.crc32(json.dumps(value, sort_keys=True, allow_nan=False).encode())


def _plain(value: Any) -> Any:
    """Whole floats as integers: not everyone who writes JSON again tells 1.0 from 1."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _checksums_to_json(checksums: dict[int, int]) -> dict[str, int]:
    return {str(index): crc for index, crc in sorted(checksums.items())}


def _checksums_from_json(value: Any) -> dict[int, int]:
    return {integer(int(index)): integer(crc) for index, crc in value.items()}


def record_fields(dim: int, rule: Rule) -> dict[str, int]:
    """Field name to columns of a record, in order."""
    return {"weight": dim, **rule.fields(dim), VERSION_FIELD: 1}


@dataclass(frozen=True)
class Layout:
    """Sizes that follow from the number of rows and the record.

    Args:
        num_embeddings: rows of the table.
        width: columns of a record.
        dtype: element type.
        chunk_rows: rows in a chunk file of the table, and records in one of a log.
        log_rows_per_file: row ids in a file of a log.
    """

    num_embeddings: int
    width: int
    dtype: np.dtype
    chunk_rows: int
    log_rows_per_file: int

    @classmethod
    def plan(cls, rows: int, width: int, dtype: np.dtype, chunk_rows: int | None = None) -> Layout:
        """Choose the sizes of files: a chunk has 32 MiB, more where that would make too many."""
        record = width * dtype.itemsize
        if chunk_rows is not None:
            chunk_rows = min(chunk_rows, _up(rows))
        else:
            wanted = max(_CHUNK_BYTES // record, -(-rows // _MOST_CHUNKS), 1)
            chunk_rows = min(_up(wanted), _up(rows))
        row_ids = min(_LOG_ROWS_PER_FILE, _log_capacity(rows))
        return cls(rows, width, dtype, chunk_rows, row_ids)

    @property
    def record_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * self.record_bytes

    @property
    def num_chunks(self) -> int:
        return -(-self.num_embeddings // self.chunk_rows)

    def rows_of(self, index: int) -> str:
        """The rows of a chunk, in words."""
        stop = min((index + 1) * self.chunk_rows, self.num_embeddings)
        return f"rows {index * self.chunk_rows:,} to {stop - 1:,}"

    @property
    def num_files(self) -> int:
        """How many files the table and its logs can have."""
        return self.num_chunks + 2 * sum(self._log_files(self.log.capacity))

    def _log_files(self, positions: int) -> tuple[int, int]:
        """How many files a log of so many positions has: of row ids, of records."""
        return -(-positions // self.log_rows_per_file), -(-positions // self.chunk_rows)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table's files where all exist; the last one is as large as the others."""
        return self.num_chunks * self.chunk_bytes

    def log_bytes(self, positions: int) -> int:
        """Bytes of the files of a log of so many positions; a file has its full size at once."""
        of_ids, of_records = self._log_files(positions)
        return of_ids * self.log_rows_per_file * 8 + of_records * self.chunk_bytes

    @property
    def mapped_bytes(self) -> int:
        """Addresses that the files of the table and its logs take where all are mapped."""
        return self.table_bytes + 2 * self.log_bytes(self.log.capacity)

    def check(self) -> None:
        """Raise a ValueError where no process could have all of these files mapped."""
        if self.mapped_bytes > _MOST_BYTES or self.num_files > _MOST_MAPPED_FILES:
            raise ValueError(
                f"{self.num_embeddings:,} rows of {self.record_bytes:,} bytes, in files of "
                f"{self.chunk_rows:,} rows, would be up to {self.mapped_bytes:,} bytes in "
                f"{self.num_files:,} files with their logs: {_MOST_BYTES:,} bytes in "
                f"{_MOST_MAPPED_FILES:,} files are possible. Take larger chunk_rows, or fewer rows"
            )

    @property
    def log_limit(self) -> int:
        """Positions at which a commit seals the log."""
        return max(self.num_embeddings // 2, ALIGNMENT)

    @property
    def log(self) -> LogShape:
        return LogShape(
            _log_capacity(self.num_embeddings),
            self.log_rows_per_file,
            self.chunk_rows,
            self.width,
            self.dtype,
        )


def _log_capacity(rows: int) -> int:
    # Room for every row once as a full log is sealed and left, then for a step on every row, and an
    # eighth of both for positions skipped at run ends.
    return _up(2 * rows + rows // 4 + _SMALLEST_LOG)


def _up(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT
