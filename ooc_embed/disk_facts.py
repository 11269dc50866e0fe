"""What kind of file system a folder is on, and how full it is. Changes nothing."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from .warning import warn

# As Linux names them; a virtual machine's host is one, too. Files change there behind a map, and a
# lock may not reach other machines.
_NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
        "virtiofs",
    ]
)


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write on the disk of ``path`` (or of its parent)."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def file_system(path: Path) -> str:
    """The kind of file system that an existing ``path`` is on, as Linux names it; "" if unknown."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number:
                return source.split()[0]
    return ""


def warn_of_network(path: Path) -> None:
    """Warn where a folder, or the parent that it is to be made in, is on a network's disk."""
    kind = file_system(_existing(path))
    if kind in _NETWORK_FILE_SYSTEMS:
        warn(
            f"{path} is on {kind}, a network file system: its lock may not keep writers on other "
            f"machines out, and mapped files may be stale there. Keep tables on a local disk"
        )
