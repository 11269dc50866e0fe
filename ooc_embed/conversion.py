"""Between tables on disk and torch's own layers in RAM. Knows both ends; knows no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import creation, rules
from .arguments import LayerArguments
from .gradients import GRADIENT_OPTIONS
from .rule import Rule
from .table import Table

_FIELDS = ("exp_avg", "exp_avg_sq")
# Hyper-parameters beside lr that the rule and torch's optimizer both have.
_SHARED = ("betas", "eps", "maximize")


@dataclass(frozen=True)
class Trained:
    """What a torch optimizer knows of an embedding.

    Args:
        rule: with its hyper-parameters; None is the default.
        rates: the rate in force, which may have become 0, and a scheduler's first.
        step: steps taken.
        state: the moments, name to ``(N, D)``; empty before the first step.
    """

    rule: Rule | None
    rates: Mapping[str, float]
    step: int
    state: Mapping[str, torch.Tensor]


def read_optimizer(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> Trained:
    """Find a weight's hyper-parameters, moments and step in a ``torch.optim.SparseAdam``.

    Raises:
        TypeError: another optimizer.
        ValueError: it does not have this weight.
    """
    if not isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            f"moments are taken from torch.optim.SparseAdam alone, got "
            f"{type(optimizer).__name__}: give a rule such as ooc_embed.SparseAdam() to begin anew"
        )
    for group in optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            break
    else:
        raise ValueError("the optimizer does not have this embedding's weight")
    # Of a tensor the default changes with it, and may have become 0.
    lr = float(optimizer.defaults["lr"]) or rules.SparseAdam.lr
    rule = rules.SparseAdam(lr, **{name: group[name] for name in _SHARED})
    state = optimizer.state.get(weight, {})
    moments = {name: state[name] for name in _FIELDS if name in state}
    return Trained(rule, _rates(group), int(state.get("step", 0)), moments)


def _rates(group: Mapping[str, Any]) -> dict[str, float]:
    """The learning rate in force, and the one that a scheduler began with."""
    return {name: float(group[name]) for name in ("lr", "initial_lr") if name in group}


def to_disk(
    embedding: nn.Embedding | nn.EmbeddingBag,
    optimizer: torch.optim.Optimizer | Rule | None,
    path: Path,
    *,
    step_on: str,
    cache_bytes: int | str,
    keep_commits: int,
    overwrite: bool,
    chunk_rows: int | None,
) -> Table:
    """Create a table that goes on where a layer in RAM and its optimizer are.

    Raises:
        TypeError, ValueError: as `read_optimizer`, or an argument is wrong; nothing is written.
    """
    weight = embedding.weight
    if isinstance(optimizer, torch.optim.Optimizer):
        trained = read_optimizer(optimizer, weight)
    else:
        trained = Trained(optimizer, {}, 0, {})
    return creation.create_table(
        path,
        (embedding.num_embeddings, embedding.embedding_dim),
        LayerArguments(
            embedding.max_norm,
            embedding.norm_type,
            embedding.scale_grad_by_freq,
            step_on,
            getattr(embedding, "mode", None),
            getattr(embedding, "include_last_offset", False),
        ),
        padding_idx=embedding.padding_idx,
        rule=trained.rule,
        group_options=trained.rates,
        init=weight,
        seed=0,
        dtype=weight.dtype,
        cache_bytes=cache_bytes,
        keep_commits=keep_commits,
        chunk_rows=chunk_rows,
        overwrite=overwrite,
        state=trained.state,
        step=trained.step,
    )


def to_ram(
    table: Table, group: Mapping[str, Any], rows: torch.Tensor | None
) -> tuple[nn.Parameter, torch.optim.SparseAdam | None]:
    """Copy weights, and where torch has the rule the optimizer too, into RAM.

    Args:
        table: what to copy.
        group: the hyper-parameters in force.
        rows: ``(n,) int64``, which and in which order; None is all.

    Returns:
        The weight, a parameter ``(n, D)``, and its ``torch.optim.SparseAdam``; None for a rule, or
        an option of its, that this does not have.
    """
    if rows is None:
        rows = torch.arange(table.manifest.num_embeddings, device="cpu")
    weight = nn.Parameter(table.read(rows, "weight"))
    rule = table.rule
    torchs = isinstance(rule, rules.SparseAdam) and rule.bias_correction == "table"
    usual = all(group[name] == value for name, value in GRADIENT_OPTIONS.items())
    if not torchs or not usual or group["row_weight_decay"]:
        return weight, None
    optimizer = torch.optim.SparseAdam(
        [weight], lr=float(rule.lr), **{name: group[name] for name in _SHARED}
    )
    optimizer.param_groups[0].update(_rates(group))
    if table.step_count:
        moments = {name: table.read(rows, name) for name in _FIELDS}
        optimizer.state[weight] = {"step": table.step_count, **moments}
    return weight, optimizer
