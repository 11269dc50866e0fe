"""ArchiveEmbedding: rows of an archive by their ids, read only. Knows archives, and no store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .archive import open_archive
from .gradients import sort_rows
from .ids import check_range, flat_ids


class ArchiveEmbedding(nn.Module):
    """The rows of an archive, read where it is, in the place of a trained ``torch.nn.Embedding``.

    Each lookup reads and decompresses the chunks that its rows lie in; nothing is kept. There is no
    gradient. A copy in a DataLoader's worker, forked or pickled, opens the archive for itself.

    Args:
        path: the folder of an archive with weights, see `export_table`.

    Attributes:
        padding_idx: of the table, whose row is as any other.

    Shape:
        - Input: ``(*)`` int32 or int64 ids, on any device.
        - Output: ``(*, embedding_dim)`` of the table's dtype, on the ids' device.
          ``model.half()`` and ``.to(dtype)`` cast it.

    Raises:
        FileNotFoundError: there is nothing.
        FormatError: it is no archive, or an unfinished one, or has no weights.
        CorruptStoreError: a file is missing.

    Examples::

        >>> import tempfile, torch, ooc_embed
        >>> folder = tempfile.TemporaryDirectory()
        >>> with ooc_embed.DiskEmbedding(9, 2, path=f"{folder.name}/t.zarr", init="zeros") as emb:
        ...     emb.weight[4] = torch.tensor([1.0, 2.0])
        ...     ooc_embed.export_table(emb, f"{folder.name}/out.zarr")
        >>> ooc_embed.ArchiveEmbedding(f"{folder.name}/out.zarr")(torch.tensor([4, 0]))
        tensor([[1., 2.],
                [0., 0.]])
        >>> folder.cleanup()
    """

    anchor: torch.Tensor

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        archive = open_archive(Path(path).absolute(), needed=("weight",))
        manifest = archive.description.manifest
        self.path = archive.path
        self.num_embeddings = manifest.num_embeddings
        self.embedding_dim = manifest.embedding_dim
        self.padding_idx = manifest.padding_idx
        self.max_norm = manifest.module.max_norm
        self.norm_type = manifest.module.norm_type
        self._weight = archive.arrays["weight"]
        # What casts of a model apply to.
        anchor = torch.empty(0, dtype=getattr(torch, manifest.dtype))
        self.register_buffer("anchor", anchor, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Embedding's name
        """Look rows up.

        Args:
            input: ``(*)`` int32 or int64 ids.

        Returns:
            ``(*, embedding_dim)``.

        Raises:
            TypeError: no tensor, or of another dtype.
            IndexError: an id below 0 or not below ``num_embeddings``.
            CorruptStoreError: a chunk fails its checksum.
        """
        ids = flat_ids(input)
        check_range(ids, self.num_embeddings)
        unique, inverse, _, _ = sort_rows(ids)
        rows = self._read(unique).to(input.device).index_select(0, inverse.to(input.device))
        return rows.reshape(*input.shape, self.embedding_dim)

    def blocks(self, block_rows: int = 1 << 16) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ``(start, weights)`` from the first row to the last, in bounded memory.

        Args:
            block_rows: rows in a block; the last may have fewer.
        """
        for start in range(0, self.num_embeddings, block_rows):
            yield start, self._stored(slice(start, start + block_rows))

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        """Weights of sorted unique rows; those beyond ``max_norm`` are scaled down to it, as a
        table would have them after a lookup."""
        if not len(rows):
            return self.anchor.new_empty(0, self.embedding_dim, device="cpu")
        weights = self._stored(rows.numpy())
        if self.max_norm is not None:
            norms = weights.norm(self.norm_type, dim=1, keepdim=True)
            scale = torch.where(norms > self.max_norm, self.max_norm / (norms + 1e-7), 1.0)
            weights = weights * scale
        return weights

    def _stored(self, rows: slice | np.ndarray) -> torch.Tensor:
        """Weights of a range, or of ascending rows, as they are in the archive."""
        return torch.from_numpy(self._weight[rows]).to(self.anchor.dtype)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return f"{self.num_embeddings}, {self.embedding_dim}, {padding}path={str(self.path)!r}"

    def __reduce__(self) -> Any:
        return _reopen, (type(self), str(self.path), self.anchor.dtype, self.training)


def _reopen(
    layer: type[ArchiveEmbedding], path: str, dtype: torch.dtype, training: bool
) -> ArchiveEmbedding:
    return layer(path).to(dtype).train(training)
