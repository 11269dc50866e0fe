"""The exceptions of a store. Knows no files and no torch."""

from __future__ import annotations


class StoreError(Exception):
    """Something is wrong with a store, or with how it is used.

    ::

        StoreError                  the writer is closed, forked, read-only or has failed for good
        ├── FormatError             this is no ooc_embed store, or one of another format
        ├── CorruptStoreError       a file is missing, has another size, or fails its checksum
        └── LockedError             another writer has the store open

    Disk errors (a full disk among them) stay ``OSError``; a bad row is an ``IndexError``.
    """


class FormatError(StoreError):
    """The directory is not an ooc_embed store, or its metadata contradict each other."""


class CorruptStoreError(StoreError):
    """A file of the store is missing, has the wrong size, or fails its checksum."""


class LockedError(StoreError):
    """Another writer has the store open."""
