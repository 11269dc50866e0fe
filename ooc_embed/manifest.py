"""What a store's metadata say: manifest, commit and layout. Knows JSON; touches no file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from . import gradients, initializers, rules
from .arguments import LayerArguments
from .errors import FormatError
from .log import ALIGNMENT, LogShape, LogState

FORMAT = 1
VERSION_FIELD = "version"
_CHUNK_BYTES = 32 << 20
_MOST_CHUNKS = 4096
_LOG_ROWS_PER_FILE = 1 << 20
_SMALLEST_LOG = 8 * ALIGNMENT

_Value = TypeVar("_Value")


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
        rule, init: plain descriptions of the optimizer rule and of the initial rows; this module
            passes them through.
        module: the layer's arguments.
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
    module: LayerArguments
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
            "module": self.module.to_json(),
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
            manifest = cls(
                table_id=_text(value["table_id"]),
                num_embeddings=_integer(value["num_embeddings"], 1),
                embedding_dim=_integer(value["embedding_dim"], 1),
                padding_idx=_optional(_integer, value["padding_idx"]),
                dtype=_text(value["dtype"]),
                fields={_text(name): _integer(width, 1) for name, width in value["fields"]},
                rule=dict(value["rule"]),
                init=dict(value["init"]),
                seed=_integer(value["seed"], -(2**63)),
                module=LayerArguments.from_json(value["module"]),
                commit=_commit(value["commits"][-1]),
                checksums={
                    _integer(int(index)): _integer(crc)
                    for index, crc in value["chunk_crc32"].items()
                },
            )
            manifest.check()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FormatError(f"the manifest is damaged: {error!r}") from error
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
        if self.padding_idx is not None and self.padding_idx >= self.num_embeddings:
            raise ValueError(f"padding_idx {self.padding_idx} is no row")
        generations = [log.generation for log in self.commit.logs]
        if generations not in ([generations[0]], [generations[0], generations[0] + 1]):
            raise ValueError(f"log generations {generations} are not one or two in a row")
        for group in self.commit.param_groups:
            group = {**rules.hyperparameters(rule), **gradients.GRADIENT_OPTIONS, **group}
            rules.check_group(rule, group)
            gradients.check_options(group)


def record_fields(dim: int, rule: rules.Rule) -> dict[str, int]:
    """Field name to columns of a record, in order."""
    return {"weight": dim, **rule.fields(dim), VERSION_FIELD: 1}


def _commit(value: Any) -> Commit:
    logs = tuple(
        LogState(**{name: _integer(number) for name, number in log.items()})
        for log in value["logs"]
    )
    (group,) = value["param_groups"]
    return Commit(
        number=_integer(value["commit"]),
        step=_integer(value["step"]),
        rows_written=_integer(value["rows_written"]),
        param_groups=[dict(group)],
        logs=logs,
        created=_number(value["created"]),
        library=_text(value["library"]),
    )


def _integer(value: Any, low: int = 0) -> int:
    if type(value) is not int or not low <= value < 2**63:
        raise ValueError(f"{value!r} is no integer from {low} on")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _optional(parse: Callable[[Any], _Value], value: Any) -> _Value | None:
    return None if value is None else parse(value)


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
        if chunk_rows is not None:
            chunk_rows = min(chunk_rows, _up(rows))
        else:
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
