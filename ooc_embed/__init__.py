"""Embedding tables larger than memory for PyTorch: a torch.nn.Module over a zarr store on disk."""

from ._version import __version__
from .embedding import DiskEmbedding
from .errors import CorruptStoreError, FormatError, LockedError, StoreError
from .initializers import Normal, Uniform, Zeros
from .lookahead import lookahead
from .rules import SparseAdam
from .stats import Stats
from .views import RowView

__all__ = [
    "CorruptStoreError",
    "DiskEmbedding",
    "FormatError",
    "LockedError",
    "Normal",
    "RowView",
    "SparseAdam",
    "Stats",
    "StoreError",
    "Uniform",
    "Zeros",
    "__version__",
    "lookahead",
]
