"""Embedding tables larger than memory for PyTorch: a torch.nn.Module over a zarr store on disk."""

from . import poincare
from ._version import __version__
from .archive_embedding import ArchiveEmbedding
from .clipping import clip_grad_norm_
from .embedding import DiskEmbedding
from .embedding_bag import DiskEmbeddingBag
from .errors import CorruptStoreError, FormatError, LockedError, StoreError
from .exporting import export_table, freeze_table
from .importing import import_table
from .initializers import Normal, Uniform, Zeros
from .lookahead import lookahead
from .replacement import Replacement, replace_embeddings
from .restoring import rollback
from .riemannian import RiemannianAdam, RiemannianSGD
from .rules import SGD, Adagrad, RowwiseAdagrad, SparseAdam
from .stats import Stats
from .views import RowView

__all__ = [
    "SGD",
    "Adagrad",
    "ArchiveEmbedding",
    "CorruptStoreError",
    "DiskEmbedding",
    "DiskEmbeddingBag",
    "FormatError",
    "LockedError",
    "Normal",
    "Replacement",
    "RiemannianAdam",
    "RiemannianSGD",
    "RowView",
    "RowwiseAdagrad",
    "SparseAdam",
    "Stats",
    "StoreError",
    "Uniform",
    "Zeros",
    "__version__",
    "clip_grad_norm_",
    "export_table",
    "freeze_table",
    "import_table",
    "lookahead",
    "poincare",
    "replace_embeddings",
    "rollback",
]
