"""DiskEmbeddingBag: sums, means and maxima of rows, as torch.nn.EmbeddingBag. Knows no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import creation, passes
from .arguments import LayerArguments
from .errors import FormatError
from .gradients import sort_rows
from .ids import check_range, flat_ids
from .layer import DiskLayer
from .rule import Rule
from .table import Table


class DiskEmbeddingBag(DiskLayer):
    """A table on disk that takes the place of ``torch.nn.EmbeddingBag``.

    Each row of a batch is fetched once, and torch reduces them: results, gradients and errors are
    its own. Else it is as `DiskEmbedding`: ``loss.backward()`` steps, ``commit()`` makes durable.

    Args:
        num_embeddings, embedding_dim: the table's shape.
        max_norm, norm_type: as of `DiskEmbedding`.
        scale_grad_by_freq: divide a row's gradient by how often it is in the batch; not with max.
        mode: ``"sum"``, ``"mean"`` or ``"max"`` of each bag.
        sparse: accepted for compatibility; only rows that were looked up move either way.
        include_last_offset: ``offsets`` ends with the number of ids.
        padding_idx: ids that are left out of their bags and not trained.
        path, optimizer, step_on, max_grad_norm, max_grad_value, nonfinite: as of `DiskEmbedding`.
        init, seed, cache_bytes, keep_commits, dtype, overwrite, chunk_rows: as of `DiskEmbedding`.

    Shape:
        - Input: ``(N,)`` ids with ``offsets`` ``(B,)``, where each bag begins; or ``(B, L)``, bags
          of one length.
        - per_sample_weights: the input's shape, the output's dtype; only with ``mode="sum"``.
        - Output: ``(B, embedding_dim)``, on the ids' device. An empty bag gives zeros.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing is written.
        FileExistsError: ``path`` exists.
        OSError: the disk is full, or failed.

    Examples::

        >>> import tempfile, torch, ooc_embed
        >>> folder = tempfile.TemporaryDirectory()
        >>> bag = ooc_embed.DiskEmbeddingBag(
        ...     1000, 2, mode="sum", path=f"{folder.name}/bag.zarr", init="zeros"
        ... )
        >>> bag(torch.tensor([1, 2, 2]), offsets=torch.tensor([0, 1])).sum().backward()
        >>> bag(torch.tensor([[1, 2]]))
        tensor([[-0.0020, -0.0020]], grad_fn=<EmbeddingBagBackward0>)
        >>> bag.close()
        >>> folder.cleanup()
    """

    _in_ram = nn.EmbeddingBag

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        path: str | Path,
        optimizer: Rule | None = None,
        step_on: str = "backward",
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        nonfinite: str = "raise",
        init: Any = None,
        seed: int = 0,
        cache_bytes: int | str = "auto",
        keep_commits: int = 1,
        dtype: torch.dtype = torch.float32,
        overwrite: bool = False,
        chunk_rows: int | None = None,
    ) -> None:
        self._begin(
            lambda: creation.create_table(
                Path(path).absolute(),
                (num_embeddings, embedding_dim),
                LayerArguments(
                    max_norm, norm_type, scale_grad_by_freq, step_on, mode, include_last_offset
                ),
                padding_idx=padding_idx,
                rule=optimizer,
                group_options={
                    "max_grad_norm": max_grad_norm,
                    "max_grad_value": max_grad_value,
                    "nonfinite": nonfinite,
                },
                init=init,
                seed=seed,
                dtype=dtype,
                cache_bytes=cache_bytes,
                keep_commits=keep_commits,
                chunk_rows=chunk_rows,
                overwrite=overwrite,
            )
        )

    def _adopt(self, table: Table) -> None:
        module = table.manifest.module
        if module.bag is None:
            table.close()
            raise FormatError(f"{table.store.path} is the table of a DiskEmbedding, which opens it")
        super()._adopt(table)
        self.mode = module.bag
        self.include_last_offset = module.include_last_offset

    @passes.uncompiled
    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - nn.EmbeddingBag's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look bags up; see the class for shapes.

        Raises:
            TypeError: no tensor, or of another dtype.
            IndexError: an id below 0 or not below ``num_embeddings``.
            ValueError, NotImplementedError: the shapes do not fit, or the mode has no weights.
            RuntimeError: a ``torch.func`` transform is running.
        """
        passes.refuse_transforms(self)
        ids = flat_ids(input)
        check_range(ids, self.num_embeddings)
        shape = input.shape
        self._check_bags(shape, offsets, per_sample_weights)
        if len(shape) == 2 and not shape[1]:
            # torch finds no bags where they are all empty.
            shape = ids.shape
            count = len(input) + self.include_last_offset
            offsets = torch.zeros(count, dtype=torch.int64, device=input.device)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.reshape(shape)
        unique, inverse, _, bounds = sort_rows(ids)

        def stage(grads: torch.Tensor, rows: torch.Tensor, _: torch.Tensor) -> None:
            if self.scale_grad_by_freq:  # torch's own counts are wrong for bags on the CPU
                grads = grads / bounds.diff().unsqueeze(1)
            self._stage(grads, rows, bounds)

        rows = self._look_up(unique, input.device, stage)
        padding = None
        if self.padding_idx is not None:
            found = (unique == self.padding_idx).nonzero()
            padding = int(found) if len(found) else None
        return functional.embedding_bag(
            inverse.reshape(shape).to(input.device),
            rows,
            None if offsets is None else offsets.to(input.device, torch.int64),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def _check_bags(
        self, shape: torch.Size, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> None:
        """Refuse, before any row moves, what torch refuses, or takes for memory that it is not."""
        if len(shape) not in (1, 2):
            raise ValueError(f"ids must have the shape (N,) or (B, L), got {tuple(shape)}")
        if (offsets is None) != (len(shape) == 2):
            raise ValueError("ids (N,) need offsets, and ids (B, L) take none")
        if weights is not None:
            if self.mode != "sum":
                raise NotImplementedError(f"per_sample_weights need mode='sum', got {self.mode!r}")
            if weights.shape != shape:
                raise ValueError(
                    f"per_sample_weights must have the shape of the ids {tuple(shape)}, got "
                    f"{tuple(weights.shape)}"
                )
        if offsets is not None:
            self._check_offsets(offsets, shape[0])

    def _check_offsets(self, offsets: torch.Tensor, count: int) -> None:
        if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1:
            raise ValueError(
                f"offsets must be 1-d int32 or int64, got {offsets.dim()}-d {offsets.dtype}"
            )
        if not len(offsets):
            if count or self.include_last_offset:
                raise ValueError(f"{count} ids are in no bag: offsets are empty")
            return
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last > count or bool((offsets.diff() < 0).any()):
            raise ValueError(
                f"offsets must ascend from 0 to {count} at most, got {len(offsets)} from {first} "
                f"to {last}"
            )
        if self.include_last_offset and last != count:
            raise ValueError(f"the last offset must be the number of ids {count}, got {last}")

    def extra_repr(self) -> str:
        return super().extra_repr().replace(", path=", f", mode={self.mode!r}, path=", 1)
