"""The layer's own arguments, which its store keeps so that it opens in one line. Knows JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Self

BAG_MODES = ("sum", "mean", "max")


@dataclass(frozen=True)
class LayerArguments:
    """How a layer uses its table.

    Args:
        max_norm, norm_type, scale_grad_by_freq: as of ``torch.nn.Embedding``.
        step_on: ``"backward"`` or ``"optimizer"``.
        bag: how a `DiskEmbeddingBag` reduces; None for a `DiskEmbedding`.
        include_last_offset: as of ``torch.nn.EmbeddingBag``.

    Raises:
        TypeError, ValueError: one of another kind.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    step_on: str = "backward"
    bag: str | None = None
    include_last_offset: bool = False

    def __post_init__(self) -> None:
        for name in ("max_norm", "norm_type"):
            value = getattr(self, name)
            if name == "max_norm" and value is None:
                continue
            if not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if math.isnan(value):
                raise ValueError(f"{name} must be a number, got {value}")
            object.__setattr__(self, name, float(value))
        for name in ("scale_grad_by_freq", "include_last_offset"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        if self.step_on not in ("backward", "optimizer"):
            raise ValueError(f"step_on must be 'backward' or 'optimizer', got {self.step_on!r}")
        if self.bag is not None and self.bag not in BAG_MODES:
            raise ValueError(f"mode must be one of {', '.join(BAG_MODES)}, got {self.bag!r}")
        if self.bag == "max" and self.scale_grad_by_freq:
            raise ValueError("scale_grad_by_freq is not possible with mode='max'")

    def to_json(self) -> dict[str, Any]:
        # JSON has no infinity, and norm_type may be one.
        return {
            name: str(value) if value in (math.inf, -math.inf) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """What `to_json` wrote; what an older version did not know of has its default.

        Raises:
            TypeError, ValueError: something else.
        """
        infinities: dict[Any, Any] = {"inf": math.inf, "-inf": -math.inf}
        return cls(**{name: infinities.get(each, each) for name, each in value.items()})
