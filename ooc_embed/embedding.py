"""DiskEmbedding: rows of a table by their ids, as torch.nn.Embedding. Knows no file and no slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import conversion, creation, passes
from .arguments import LayerArguments
from .ids import check_range, flat_ids
from .layer import DiskLayer
from .rule import Rule


class DiskEmbedding(DiskLayer):
    """An embedding table on disk that takes the place of ``torch.nn.Embedding``.

    ``forward`` fetches the rows of the batch, and ``loss.backward()`` runs the optimizer on them:
    the table takes one step for each backward, over all its lookups in that pass. Rows in frequent
    use stay in a cache in RAM. What was committed (`commit`, `flush`, `close`, ``state_dict``)
    survives a kill or a power cut at any moment.

    The constructor creates the store at ``path``; `open` goes on with one.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of a weight.
        padding_idx: a row that is not trained, and is zero at the start. Negative counts from the
            end.
        max_norm: rows that are looked up and have a larger norm are scaled down to it, in the
            table, also under ``no_grad`` and ``eval``, as torch does.
        norm_type: p of that norm.
        scale_grad_by_freq: divide a row's gradient by how often the row is in the lookup.
        sparse: accepted for compatibility; only rows that were looked up move either way.
        path: the folder of the store, a zarr group. It keeps all these arguments but
            ``cache_bytes``.
        optimizer: the rule of the step, with its hyper-parameters.
        step_on: ``"backward"``, each ``loss.backward()`` is a step; or ``"optimizer"``, gradients
            add up until ``emb.optimizer.step()``.
        max_grad_norm: clip the 2-norm of a step's gradients, all its rows together, to this.
        max_grad_value: clip each element to plus or minus this, before the norm.
        nonfinite: what to do where a gradient is infinite or NaN: ``"raise"``, or ``"skip"`` the
            step.
        init: ``"normal"`` (N(0, 1), as nn.Embedding), ``"uniform"``, ``"zeros"``, or `Normal`,
            `Uniform`, `Zeros` with parameters; rows then cost nothing until they are trained. Or a
            tensor or array of the full shape, which is streamed in. None is ``"normal"``, for rules
            on the Poincaré ball ``Uniform(-1e-3, 1e-3)``.
        seed: of the initial rows.
        cache_bytes: memory for hot rows; ``"auto"`` is a quarter of what this process may use.
        keep_commits: how many of the newest commits `rollback` can return to.
        dtype: ``torch.float32`` or ``torch.float64``.
        overwrite: replace a store that is at ``path``; it is deleted first.
        chunk_rows: rows in a file of the store, a multiple of 1024, no more than the table needs;
            None chooses about 32 MiB.

    Attributes:
        weight: the rows, a `RowView` of shape (num_embeddings, embedding_dim).
        state: the optimizer's fields, name to `RowView`.
        version: how often each row was written, a `RowView` of shape (num_embeddings,).
        optimizer: a ``torch.optim.Optimizer`` with live ``param_groups``, for schedulers.
        step: optimizer steps taken.
        kernel: what steps the rows, ``"numba"`` (with the extra ``fast``) or ``"torch"``.
        grad_scaler: the ``torch.amp.GradScaler`` of steps in backward, or None; may be set.
        keep_commits: as the argument; may be set.
        path: the folder of the store.
        read_only: whether it was opened to read.
        closed: whether `close` was called.

    Shape:
        - Input: ``(*)`` int32 or int64 ids, on any device.
        - Output: ``(*, embedding_dim)``, on the ids' device. ``model.half()`` and ``.to(dtype)``
          cast the output, never the table.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing is written.
        FileExistsError: ``path`` exists.
        OSError: the disk is full, or failed.

    Examples::

        >>> import tempfile, torch, ooc_embed
        >>> folder = tempfile.TemporaryDirectory()
        >>> emb = ooc_embed.DiskEmbedding(1000, 4, path=f"{folder.name}/emb.zarr", init="zeros")
        >>> emb(torch.tensor([[1, 2], [2, 3]])).sum().backward()
        >>> emb.weight[2]
        tensor([-0.0010, -0.0010, -0.0010, -0.0010])
        >>> emb.step
        1
        >>> emb.close()
        >>> folder.cleanup()
    """

    _in_ram = nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
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
                LayerArguments(max_norm, norm_type, scale_grad_by_freq, step_on),
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

    # Looking up

    @passes.uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Embedding's name
        """Look rows up.

        Args:
            input: ``(*)`` int32 or int64 ids.

        Returns:
            ``(*, embedding_dim)``.

        Raises:
            TypeError: no tensor, or of another dtype.
            IndexError: an id below 0 or not below ``num_embeddings``.
            RuntimeError: a ``torch.func`` transform is running.
        """
        passes.refuse_transforms(self)
        ids = flat_ids(input)
        check_range(ids, self.num_embeddings)
        stage = self._stage_by_frequency if self.scale_grad_by_freq else self._stage
        rows = self._look_up(ids, input.device, stage)
        return rows.reshape(*input.shape, self.embedding_dim)

    def _stage_by_frequency(
        self, grads: torch.Tensor, rows: torch.Tensor, bounds: torch.Tensor
    ) -> None:
        grads /= bounds.diff().to(grads.device).unsqueeze(1)
        self._stage(grads, rows, bounds)

    def to_embedding(self, rows: Any = None) -> tuple[nn.Embedding, torch.optim.SparseAdam | None]:
        """Copy the table, or some of its rows, into RAM: the layer and its optimizer.

        Args:
            rows: ``(n,)`` ids, which and in which order; None is all of them.

        Returns:
            An ``nn.Embedding(sparse=True)`` with these arguments, and the
            ``torch.optim.SparseAdam`` that goes on with its moments and step; None where that does
            not have the rule, or an option of its, such as ``row_weight_decay`` or clipping.

        Raises:
            IndexError: an id below 0 or not below ``num_embeddings``.
        """
        ids = None
        if rows is not None:
            ids = torch.as_tensor(rows, device="cpu")
            ids = flat_ids(ids if ids.numel() else ids.to(torch.int64))
            check_range(ids, self.num_embeddings)
        group = self.optimizer.param_groups[0]
        weight, optimizer = conversion.to_ram(self._table, group, ids)
        padding_idx = self.padding_idx
        if padding_idx is not None and ids is not None:
            places = (ids == padding_idx).nonzero()
            padding_idx = int(places[0]) if len(places) else None
        count, dim = weight.shape
        embedding = nn.Embedding(
            count,
            dim,
            padding_idx=padding_idx,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=True,
            _weight=weight.data,
        )
        embedding.weight = weight
        embedding.train(self.training).requires_grad_(self.anchor.requires_grad)
        return embedding, optimizer
