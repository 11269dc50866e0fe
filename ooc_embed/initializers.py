"""Initial rows as a pure function of (seed, row, column). Knows no store and no cache.

A row's values do not depend on when, with which other rows, or from which chunk it is read, so a
table is born without writing anything. The generator is counter-based: the finalizer of SplitMix64
(Steele, Lea, Flood 2014) over a counter, and Box-Muller for normal values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class Normal:
    """Normal values, as ``torch.nn.init.normal_``; N(0, 1) is nn.Embedding's own start."""

    name: ClassVar[str] = "normal"
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std >= 0):
            raise ValueError(f"Normal needs finite mean and std >= 0, got {self}")

    def rows(self, rows: torch.Tensor, dim: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        half = (dim + 1) // 2
        return _in_blocks(rows, dim, dtype, lambda part: self._block(part, half, seed, dtype))

    def _block(self, rows: torch.Tensor, half: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        first, second = _uniform_pairs(rows, half, seed, dtype)
        radius = first.log_().mul_(-2).sqrt_().mul_(self.std)
        angle = second.mul_(2 * math.pi)
        return torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1).add_(self.mean)


@dataclass(frozen=True)
class Uniform:
    """Values between a and b, as ``torch.nn.init.uniform_``."""

    name: ClassVar[str] = "uniform"
    a: float = 0.0
    b: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.a) and math.isfinite(self.b) and self.a <= self.b):
            raise ValueError(f"Uniform needs finite a <= b, got {self}")

    def rows(self, rows: torch.Tensor, dim: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        half = (dim + 1) // 2
        return _in_blocks(rows, dim, dtype, lambda part: self._block(part, half, seed, dtype))

    def _block(self, rows: torch.Tensor, half: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        pair = torch.cat(_uniform_pairs(rows, half, seed, dtype), dim=1)
        return pair.mul_(self.b - self.a).add_(self.a)


@dataclass(frozen=True)
class Zeros:
    """All zeros."""

    name: ClassVar[str] = "zeros"

    def rows(self, rows: torch.Tensor, dim: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(rows), dim, dtype=dtype, device="cpu")


Initializer = Normal | Uniform | Zeros
_KINDS: dict[str, type[Initializer]] = {kind.name: kind for kind in (Normal, Uniform, Zeros)}


def from_name(init: object) -> Initializer:
    """The initializer that ``init`` (a name or an initializer) means.

    Raises:
        ValueError: an unknown name.
        TypeError: neither a name nor an initializer.
    """
    if isinstance(init, (Normal, Uniform, Zeros)):
        return init
    if isinstance(init, str):
        if init not in _KINDS:
            raise ValueError(f"init={init!r} is unknown; known names: {', '.join(_KINDS)}")
        return _KINDS[init]()
    raise TypeError(
        f"init must be a name ({', '.join(_KINDS)}), an initializer such as Normal(std=0.1), or a "
        f"tensor or array of the table's full shape, got {type(init).__name__}"
    )


def to_json(init: Initializer) -> dict[str, Any]:
    return {"name": init.name, **asdict(init)}


def from_json(value: dict[str, Any]) -> Initializer:
    """The initializer that `to_json` described.

    Raises:
        KeyError, TypeError, ValueError: it describes none.
    """
    arguments = dict(value)
    return _KINDS[arguments.pop("name")](**arguments)


def _in_blocks(
    rows: torch.Tensor, dim: int, dtype: torch.dtype, block: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Fill ``(len(rows), dim)`` by blocks whose temporaries stay in the processor's cache."""
    out = torch.empty(len(rows), dim, dtype=dtype, device="cpu")
    for start in range(0, len(rows), _BLOCK_ROWS):
        part = rows[start : start + _BLOCK_ROWS]
        out[start : start + len(part)] = block(part)[:, :dim]
    return out


def _uniform_pairs(
    rows: torch.Tensor, half: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two ``(n, half)`` tensors of independent uniform values, in (0, 1] and in [0, 1).

    float32 values carry 24 random bits (the first 32, where Box-Muller's tail needs them); float64
    values carry 53, from two counters.
    """
    counter = rows[:, None] * half + torch.arange(half, device="cpu")
    if dtype == torch.float64:
        first, second = _hash(counter * 2, seed), _hash(counter * 2 + 1, seed)
        scale = 2.0**-53
        return (
            _shift(first, 11).to(dtype).add_(1).mul_(scale),
            _shift(second, 11).to(dtype).mul_(scale),
        )
    bits = _hash(counter, seed)
    return (
        _shift(bits, 32).add_(1).to(dtype).mul_(2.0**-32),
        _shift(bits, 8).bitwise_and_(0xFFFFFF).to(dtype).mul_(2.0**-24),
    )


def _hash(counter: torch.Tensor, seed: int) -> torch.Tensor:
    """SplitMix64 of the stream that ``seed`` names, at position ``counter``."""
    start = int(_mix(torch.tensor(seed, dtype=torch.int64, device="cpu") + _GOLDEN))
    return _mix(counter.mul(_GOLDEN).add_(start))


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = bits.bitwise_xor(_shift(bits, 30)).mul_(_MIX_1)
    bits = bits.bitwise_xor_(_shift(bits, 27)).mul_(_MIX_2)
    return bits.bitwise_xor_(_shift(bits, 31))


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A logical right shift: torch's is arithmetic."""
    return bits.bitwise_right_shift(by).bitwise_and_((1 << (64 - by)) - 1)
