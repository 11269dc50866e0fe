"""The commands ``export`` and ``import``: their options. Does none of the work."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .archive import CODECS
from .errors import StoreError
from .exporting import SINGLE_SUFFIXES, export_table, freeze_table
from .importing import import_table


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder of the store, which is only read")
    parser.add_argument(
        "out",
        type=Path,
        help="OUT.npy, OUT.safetensors, or with any other name the folder of a zarr group",
    )
    parser.add_argument(
        "--fields",
        default="weight",
        metavar="NAME,...",
        help="some of the store's, or all, which an import needs to resume; default: weight",
    )
    parser.add_argument(
        "--codec", choices=CODECS, default="zstd", help="of a zarr group, default: zstd"
    )
    parser.add_argument("--bitround", type=int, metavar="N", help="bits of the mantissa to keep")
    parser.add_argument("--dtype", choices=("float16", "float32", "float64"), help="of the floats")
    parser.add_argument("--chunk-rows", type=int, metavar="N", help="that are compressed together")
    parser.add_argument("--commit", type=int, metavar="N", help="an earlier one that is kept")
    parser.add_argument(
        "--frozen", action="store_true", help="make a store of the weights alone, to be served"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what an export made")
    parser.set_defaults(run=export, refuse=parser.error)


def export(args: argparse.Namespace) -> int:
    """Runs ``export``; its exit status."""
    made = "a file" if args.out.suffix in SINGLE_SUFFIXES else "a zarr group"
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    common = {"dtype": dtype, "commit": args.commit, "overwrite": args.overwrite}
    try:
        if args.frozen:
            if args.fields != "weight" or args.codec != "zstd" or args.bitround is not None:
                args.refuse("argument --frozen: not allowed with --fields, --codec, --bitround")
            made = "a frozen store"
            freeze_table(args.store, args.out, chunk_rows=args.chunk_rows, **common)
        else:
            export_table(
                args.store,
                args.out,
                fields="all" if args.fields == "all" else args.fields.split(","),
                codec=args.codec,
                bitround=args.bitround,
                chunk_rows=args.chunk_rows,
                **common,
            )
    except (ValueError, OverflowError) as error:
        raise StoreError(str(error)) from error
    print(f"{args.store} is exported to {args.out}, {made}")
    return 0


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        help="an archive, or a .npy or .safetensors file or zarr folder of weights",
    )
    parser.add_argument("store", type=Path, help="folder of the new store")
    parser.add_argument("--key", metavar="NAME", help="of the weights among several arrays")
    parser.add_argument(
        "--weights-only", action="store_true", help="begin anew with the weights of an archive"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a store that is there")
    parser.set_defaults(run=import_)


def import_(args: argparse.Namespace) -> int:
    """Runs ``import``; its exit status."""
    resume = False if args.weights_only else None
    try:
        layer = import_table(
            args.source, args.store, key=args.key, resume=resume, overwrite=args.overwrite
        )
    except (ValueError, TypeError, ImportError) as error:
        raise StoreError(str(error)) from error
    with layer:
        print(f"{layer}\nat step {layer.step:,}")
    return 0
