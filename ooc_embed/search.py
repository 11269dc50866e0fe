"""Nearest rows of a table by a walk over all of it, in bounded memory. Knows no table, no disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

# Takes queries (Q, D) and rows (n, D); gives what each pair scores (Q, n), more being nearer.
_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot": lambda queries, rows: queries @ rows.T,
    "cosine": lambda queries, rows: (
        functional.normalize(queries, dim=1) @ functional.normalize(rows, dim=1).T
    ),
    # By a product of matrices a row would be 3e-4 from itself.
    "l2": lambda queries, rows: (
        -torch.cdist(queries, rows, compute_mode="donot_use_mm_for_euclid_dist")
    ),
}


def check_query(query: Tensor, dim: int, k: int, num_rows: int, metric: str) -> None:
    """Refuse a search that makes no sense.

    Raises:
        TypeError: the query is no tensor.
        ValueError: its shape, ``k`` or the metric.
    """
    if not isinstance(query, Tensor):
        raise TypeError(f"a query is a tensor, such as emb.weight[row], got {type(query).__name__}")
    if query.dim() not in (1, 2) or query.shape[-1] != dim:
        raise ValueError(f"a query has the shape ({dim},) or (Q, {dim}), got {tuple(query.shape)}")
    if not 1 <= k <= num_rows:
        raise ValueError(f"k must be from 1 to {num_rows}, the rows of the table, got {k}")
    if metric not in _SCORES:
        raise ValueError(f"metric must be one of {', '.join(_SCORES)}, got {metric!r}")


def topk(
    blocks: Iterable[tuple[int, Tensor]], queries: Tensor, k: int, metric: str
) -> tuple[Tensor, Tensor]:
    """The k best rows of each query.

    Args:
        blocks: ``(start, rows)`` with ``(n, D)`` rows, from the first row of a table to the last.
        queries: ``(Q, D)``.
        k: how many.
        metric: ``"dot"``, ``"cosine"`` or ``"l2"``.

    Returns:
        Products, cosines or distances, the best first, and row ids: ``(Q, k)`` each.
    """
    best = queries.new_empty(len(queries), 0)
    ids = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start, rows in blocks:
        scores = _SCORES[metric](queries, rows.to(queries.device, queries.dtype))
        scores, places = scores.topk(min(k, scores.shape[1]), dim=1)
        scores, order = torch.cat([best, scores], 1).sort(dim=1, descending=True, stable=True)
        best = scores[:, :k]
        ids = torch.cat([ids, places + start], 1).gather(1, order[:, :k])
    return (-best if metric == "l2" else best), ids
