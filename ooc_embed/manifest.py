"""What a store's metadata say: manifest, commit and layout. Knows JSON; touches no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import FormatError
from .log import ALIGNMENT, LogShape, LogState

FORMAT = 1
VERSION_FIELD = "version"
_CHUNK_BYTES = 32 << 20
_MOST_CHUNKS = 4096
_LOG_ROWS_PER_FILE = 1 << 20
_SMALLEST_LOG = 8 * ALIGNMENT


@dataclass(frozen=True)
class Commit:
    """One commit of the store: what a crash after it cannot lose.

    Args:
        number: counts commits from 0, the creation.
        step: optimizer steps taken.
        param_groups: hyper-parameters in force.
        logs: the logs' prefixes, the sealed one (if there is one) before the active one.
        rows_written: rows whose version is above 0.
        created: seconds since the epoch.
        library: version of ooc_embed that wrote it.
    """

    number: int
    step: int
    rows_written: int
    param_groups: list[dict[str, Any]]
    logs: tuple[LogState, ...]
    created: float
    library: str


@dataclass(frozen=True)
class Manifest:
    """The state of a store, as ``zarr.json`` holds it.

    Args:
        table_id: a uuid that stays with the table.
        fields: field name to columns, in the order of a record.
        rule, init, module: plain descriptions of the optimizer rule, of the initial rows and of the
            layer's arguments; this module passes them through.
        checksums: crc32 of each chunk file that exists.
    """

    table_id: str
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    dtype: str
    fields: dict[str, int]
    rule: dict[str, Any]
    init: dict[str, Any]
    seed: int
    module: dict[str, Any]
    commit: Commit
    checksums: dict[int, int] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return sum(self.fields.values())

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    def to_json(self) -> dict[str, Any]:
        commit = self.commit
        return {
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
            "module": self.module,
            "chunk_crc32": {str(index): crc for index, crc in sorted(self.checksums.items())},
            "commits": [
                {
                    "commit": commit.number,
                    "step": commit.step,
                    "rows_written": commit.rows_written,
                    "param_groups": commit.param_groups,
                    "num_embeddings": self.num_embeddings,
                    "logs": [
                        {
                            "generation": log.generation,
                            "records": log.records,
                            "rows_crc32": log.rows_crc32,
                            "records_crc32": log.records_crc32,
                        }
                        for log in commit.logs
                    ],
                    "created": commit.created,
                    "library": commit.library,
                }
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        """Parse a manifest.

        Raises:
            FormatError: another format, or a field is missing or of another type.
        """
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else value
            raise FormatError(f"format {found!r} is not format {FORMAT}, which this version reads")
        try:
            newest = value["commits"][-1]
            commit = Commit(
                number=int(newest["commit"]),
                step=int(newest["step"]),
                rows_written=int(newest["rows_written"]),
                param_groups=list(newest["param_groups"]),
                logs=tuple(LogState(**log) for log in newest["logs"]),
                created=float(newest["created"]),
                library=str(newest["library"]),
            )
            manifest = cls(
                table_id=str(value["table_id"]),
                num_embeddings=int(value["num_embeddings"]),
                embedding_dim=int(value["embedding_dim"]),
                padding_idx=value["padding_idx"],
                dtype=str(value["dtype"]),
                fields={str(name): int(width) for name, width in value["fields"]},
                rule=dict(value["rule"]),
                init=dict(value["init"]),
                seed=int(value["seed"]),
                module=dict(value["module"]),
                commit=commit,
                checksums={int(index): int(crc) for index, crc in value["chunk_crc32"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FormatError(f"the manifest is damaged: {error!r}") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        generations = [log.generation for log in self.commit.logs]
        if self.dtype not in ("float32", "float64"):
            raise FormatError(f"dtype {self.dtype!r} is neither float32 nor float64")
        if min(self.num_embeddings, self.embedding_dim, *self.fields.values()) < 1:
            raise FormatError("the manifest names a size below 1")
        if len(generations) not in (1, 2) or generations != list(
            range(generations[0], generations[0] + len(generations))
        ):
            raise FormatError(f"log generations {generations} are not one or two in a row")
        if any(log.records < 0 or log.generation < 0 for log in self.commit.logs):
            raise FormatError(f"a log has a negative size: {self.commit.logs}")


@dataclass(frozen=True)
class Layout:
    """Sizes that follow from the number of rows and the record.

    Args:
        num_embeddings: rows of the table.
        width: columns of a record.
        dtype: element type.
        chunk_rows: rows in a chunk file of the table.
    """

    num_embeddings: int
    width: int
    dtype: np.dtype
    chunk_rows: int

    @classmethod
    def plan(cls, manifest: Manifest, chunk_rows: int | None = None) -> Layout:
        """Choose the chunk size: 32 MiB, larger where that would make too many files."""
        rows, record = manifest.num_embeddings, manifest.width * manifest.numpy_dtype.itemsize
        if chunk_rows is None:
            wanted = max(_CHUNK_BYTES // record, -(-rows // _MOST_CHUNKS), 1)
            chunk_rows = min(_up(wanted), _up(rows))
        return cls(rows, manifest.width, manifest.numpy_dtype, chunk_rows)

    @property
    def record_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * self.record_bytes

    @property
    def num_chunks(self) -> int:
        return -(-self.num_embeddings // self.chunk_rows)

    @property
    def log_limit(self) -> int:
        """Positions at which a commit seals the log."""
        return max(self.num_embeddings // 2, ALIGNMENT)

    @property
    def log(self) -> LogShape:
        # Room for every row once as a full log is rolled over, then for a step on every row, and
        # an eighth of both for positions skipped at run ends.
        capacity = _up(2 * self.num_embeddings + self.num_embeddings // 4 + _SMALLEST_LOG)
        records = min(self.chunk_rows, capacity)
        return LogShape(
            capacity, min(_LOG_ROWS_PER_FILE, capacity), records, self.width, self.dtype
        )


def _up(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT
