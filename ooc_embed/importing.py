"""Makes tables of archives and of other files. Knows what is needed to resume; knows no format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import claim, creation, initializers, rules, sources
from .archive import Archive, ArchiveDescription
from .embedding import DiskEmbedding
from .embedding_bag import DiskEmbeddingBag
from .warning import warn

# What a table that is gone on with may have otherwise.
_OWN_OPTIONS = ("cache_bytes", "chunk_rows", "keep_commits", "overwrite")


def import_table(
    source: str | Path,
    path: str | Path,
    *,
    key: str | None = None,
    resume: bool | None = None,
    **options: Any,
) -> DiskEmbedding | DiskEmbeddingBag:
    """Make a store of what `export_table` wrote, or of a file of weights, and open it to train.

    An archive, a zarr group or a ``.safetensors`` file, with all of a table's fields resumes: rows,
    moments, versions, step, hyper-parameters and the layer's arguments are those of the table, and
    training goes on as it would there. It is a new table all the same: checkpoints of the other do
    not load. Of other sources weights alone are taken, each row with version 1, and the optimizer
    begins anew; the padding row and ``max_norm`` are those of an archive, where it says so.

    Args:
        source: an archive; or a ``.npy`` or ``.safetensors`` file, or a zarr folder, of weights.
        path: the folder of the new store.
        key: the name of the weights, where the source has several arrays and is no archive.
        resume: False takes the weights alone, True refuses a source without the other fields; None
            resumes where it can.
        options: the constructor's other arguments, by name; of a table that resumes only
            ``cache_bytes``, ``chunk_rows``, ``keep_commits`` and ``overwrite``.

    Returns:
        The layer that the table was exported from, else a `DiskEmbedding`.

    Raises:
        ValueError, TypeError: the source or an option is wrong; nothing is written.
        FormatError, CorruptStoreError: an archive is unfinished, or damaged; nothing is left at
            ``path``.
        FileExistsError: something is at ``path``.
        OSError: the disk is full, or failed; nothing is left at ``path``.
    """
    source, path = Path(source), Path(path).absolute()
    if resume and key is not None:
        raise ValueError("key chooses one array, and resume takes all of them: leave one out")
    sources.check_apart(source, path)
    archive = sources.open_if_archive(source)
    if archive is None or key is not None:
        if resume:
            raise ValueError(f"{source} is no archive with all fields of a table: leave resume out")
        if claim.is_store(source):
            raise ValueError(
                f"{source} is a store already: emb.snapshot(path) copies it, and "
                f"DiskEmbedding.from_pretrained(ooc_embed.open_table(store).weight, path=...) "
                f"begins anew with its weights"
            )
        return DiskEmbedding.from_pretrained(source, False, path=path, key=key, **options)
    refusal = _why_not(archive.description)
    if resume and refusal:
        raise ValueError(f"{source} cannot be gone on with: {refusal}. resume=False takes weights")
    module = archive.description.manifest.module
    layer = DiskEmbedding if module.bag is None else DiskEmbeddingBag
    if refusal or resume is False:
        if "weight" not in archive.arrays:
            raise ValueError(f"{source} has no weights, only {', '.join(archive.arrays)}")
        given = {**_arguments(archive.description), **options}
        return layer.from_pretrained(archive.arrays["weight"], False, path=path, **given)
    _resume(archive, path, options)
    return layer.open(path, cache_bytes=options.get("cache_bytes", "auto"))


def _why_not(description: ArchiveDescription) -> str:
    """Why a table cannot be gone on with, or nothing."""
    if not rules.from_json(description.manifest.rule).trains:
        return "it is of a frozen store, which has no optimizer"
    if description.missing:
        return f"it has no {', '.join(description.missing)}"
    if description.dtype == "float16" and len(description.fields) > 2:
        return "in float16 small second moments are 0, and a step divides by them"
    return ""


def _arguments(description: ArchiveDescription) -> dict[str, Any]:
    """What the layer of the exported table had, of the constructor's arguments."""
    manifest = description.manifest
    module = manifest.module
    names = ["max_norm", "norm_type", "scale_grad_by_freq", "step_on"]
    given = {name: getattr(module, name) for name in names}
    if module.bag is not None:
        given |= {"mode": module.bag, "include_last_offset": module.include_last_offset}
    return {**given, "padding_idx": manifest.padding_idx}


def _resume(archive: Archive, path: Path, options: dict[str, Any]) -> None:
    """Create a store that is where the exported table was."""
    if unknown := set(options) - set(_OWN_OPTIONS):
        raise ValueError(
            f"{', '.join(sorted(unknown))} cannot be chosen: {archive.path} resumes with the "
            f"table's own. resume=False takes its weights alone"
        )
    description, manifest = archive.description, archive.description.manifest
    if not description.exact:
        warn(
            f"{archive.path} holds {description.dtype} with bitround {description.bitround}, the "
            f"table had {manifest.dtype}: training goes on from rounded weights and moments"
        )
    given: dict[str, Any] = {"cache_bytes": "auto", "chunk_rows": None, "overwrite": False}
    creation.create_table(
        path,
        (manifest.num_embeddings, manifest.embedding_dim),
        manifest.module,
        padding_idx=manifest.padding_idx,
        rule=rules.from_json(manifest.rule),
        group_options=manifest.commit.param_groups[0],
        init=initializers.from_json(manifest.init),
        seed=manifest.seed,
        dtype=getattr(torch, manifest.dtype),
        state=archive.arrays,
        step=manifest.commit.step,
        **{**given, **options},
    ).close()
