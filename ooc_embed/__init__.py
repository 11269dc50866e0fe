"""Embedding tables larger than memory for PyTorch: a torch.nn.Module over a zarr store on disk."""

from . import plots, poincare
from ._version import __version__
from .archive_embedding import ArchiveEmbedding
from .clipping import clip_grad_norm_
from .description import Description
from .embedding import DiskEmbedding
from .embedding_bag import DiskEmbeddingBag
from .errors import CorruptStoreError, FormatError, LockedError, StoreError
from .exporting import export_table, freeze_table
from .importing import import_table
from .initializers import Normal, Uniform, Zeros
from .lookahead import lookahead
from .plan import Plan, plan
from .reader import TableReader, describe, open_table
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
    "Description",
    "DiskEmbedding",
    "DiskEmbeddingBag",
    "FormatError",
    "LockedError",
    "Normal",
    "Plan",
    "Replacement",
    "RiemannianAdam",
    "RiemannianSGD",
    "RowView",
    "RowwiseAdagrad",
    "SparseAdam",
    "Stats",
    "StoreError",
    "TableReader",
    "Uniform",
    "Zeros",
    "__version__",
    "clip_grad_norm_",
    "describe",
    "export_table",
    "freeze_table",
    "import_table",
    "lookahead",
    "open_table",
    "plan",
    "plots",
    "poincare",
    "replace_embeddings",
    "rollback",
]
