"""Replaces the large embeddings of a model by tables on disk. Knows models; knows no table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import bulk, claim, conversion, durable
from .embedding import DiskEmbedding
from .embedding_bag import DiskEmbeddingBag
from .progress import progress
from .rule import Rule

_Layer = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True)
class Replacement:
    """What was done with one embedding of a model.

    Args:
        names: where it is in the model.
        num_embeddings, embedding_dim: its shape.
        path: its table, or None if it stays in RAM.
        reason: why it stays, or "".
        ram_bytes: of its weights and the two moments that Adam keeps of them.
    """

    names: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    path: Path | None
    reason: str
    ram_bytes: int

    def __str__(self) -> str:
        what = f"{', '.join(self.names)}: {self.num_embeddings:,} x {self.embedding_dim}"
        if self.path is None:
            return f"{what} stays in RAM: {self.reason}"
        return f"{what} is on disk at {self.path}, {self.ram_bytes / 1e6:,.1f} MB less in RAM"


def replace_embeddings(
    model: nn.Module,
    directory: str | Path,
    *,
    min_rows: int = 100_000,
    optimizer: torch.optim.Optimizer | Rule | None = None,
    **options: Any,
) -> list[Replacement]:
    """Replace every large ``nn.Embedding`` and ``nn.EmbeddingBag`` in a model by a table on disk.

    Each keeps its name, its rows and its arguments; one that is in the model several times stays
    one. Those stay in RAM, and are listed with the reason, whose weight another module uses too
    (tied weights), that have hooks, are of a subclass, on the device meta, or of another dtype than
    float32 and float64. Give the optimizer of the rest of the model ``model.parameters()`` anew
    afterwards.

    Args:
        model: is changed.
        directory: a folder, made where it is missing; each table becomes
            ``directory / (its name + ".zarr")``.
        min_rows: smaller ones stay in RAM, and are not listed.
        optimizer: as of `DiskEmbedding.from_embedding`, for all.
        options: others of `DiskEmbedding.from_embedding`.

    Returns:
        What was done with each; ``print(*result, sep="\\n")`` shows it.

    Raises:
        ValueError: the model is an embedding itself, or the optimizer does not have a weight, or
            its rule refuses rows, or a path is none; nothing has been replaced.
        TypeError: an optimizer whose numbers no rule here has; nothing has been replaced.
        FileExistsError: something is at a table's path; nothing has been replaced.
        OSError: the disk is full, or failed. Those before it are replaced.
    """
    if isinstance(model, _Layer):
        raise ValueError("the model is an embedding: DiskEmbedding.from_embedding(model) takes it")
    plans = _plan(model, Path(directory), min_rows)
    _check(model, plans, optimizer, overwrite=options.get("overwrite", False))
    if plans:
        durable.make_directory(Path(directory).absolute())
    for plan in progress(plans, "replacing", "embedding"):
        if plan.path is not None:
            layer: Any = model.get_submodule(plan.names[0])
            table = _kind(layer).from_embedding(layer, optimizer, path=plan.path, **options)
            for name in plan.names:
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, table)
    return plans


def _kind(layer: _Layer) -> type[DiskEmbedding | DiskEmbeddingBag]:
    return DiskEmbedding if isinstance(layer, nn.Embedding) else DiskEmbeddingBag


def _check(
    model: nn.Module,
    plans: list[Replacement],
    optimizer: torch.optim.Optimizer | Rule | None,
    *,
    overwrite: bool,
) -> None:
    """Raise what can be known before anything is replaced."""
    for plan in plans:
        if plan.path is None:
            continue
        layer: Any = model.get_submodule(plan.names[0])
        if isinstance(optimizer, torch.optim.Optimizer):
            conversion.read_optimizer(optimizer, layer.weight)
        elif optimizer is not None and optimizer.restricts:
            bulk.check_rows(layer.weight, optimizer, layer.weight.dtype)
        remedy = (
            f"model.set_submodule({plan.names[0]!r}, {_kind(layer).__name__}.open(path)) goes on "
            f"with it, overwrite=True replaces it by the rows of the model"
        )
        claim.check_free(plan.path.absolute(), overwrite=overwrite, remedy=remedy)


def _plan(model: nn.Module, directory: Path, min_rows: int) -> list[Replacement]:
    """What is to be done with each large embedding."""
    names: dict[_Layer, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _Layer) and module.num_embeddings >= min_rows:
            names.setdefault(module, []).append(name)
    users = Counter(
        id(weight) for module in model.modules() for weight in module._parameters.values()
    )
    plans = []
    for layer, found in names.items():
        reason = _reason_to_stay(layer, users[id(layer.weight)])
        plans.append(
            Replacement(
                names=tuple(found),
                num_embeddings=layer.num_embeddings,
                embedding_dim=layer.embedding_dim,
                path=None if reason else directory / f"{found[0]}.zarr",
                reason=reason,
                ram_bytes=3 * layer.weight.numel() * layer.weight.element_size(),
            )
        )
    return plans


def _reason_to_stay(layer: _Layer, users: int) -> str:
    """Why a table on disk could not take this layer's place unseen; "" where it can."""
    if users > 1:
        return "another module uses its weight"
    if type(layer) not in (nn.Embedding, nn.EmbeddingBag):
        return f"it is a {type(layer).__name__}, which may compute something else"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return "it has hooks"
    if layer.weight.is_meta:
        return "it has no rows, on the device meta: make a DiskEmbedding in its place"
    if layer.weight.dtype not in (torch.float32, torch.float64):
        return f"its rows are {layer.weight.dtype}"
    return ""
