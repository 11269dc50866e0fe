"""A disk that loses power: what was not synced is lost, torn or undone. Knows files, no store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import system_calls

SECTOR = 512


class Disk:
    """Follows the calls below a folder, and says what a power cut could leave of it.

    A file's bytes are safe once the file was synced, and a name once its folder was. Until then
    each sector that was written, and each name that came, went or changed, is there or not, for
    itself. That is more than journaling file systems do to anyone.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._safe_bytes: dict[int, bytes] = {}
        self._safe_names: dict[int, dict[str, int]] = {}
        self._gone: dict[int, bytes] = {}
        self._folders: set[int] = set()

    def copied(self, folder: Path) -> Disk:
        """A copy of the files as they are, and of what is safe of it: the process was killed.

        Args:
            folder: where the copy is to be; it is not there.
        """
        # A file with two names stays one: by numbers, not by paths.
        other, places = Disk(folder), dict[int, Path]()
        folder.mkdir(parents=True)
        for old, _, names in os.walk(self.folder):
            new = folder / Path(old).relative_to(self.folder)
            new.mkdir(exist_ok=True)
            other._numbers[new.stat().st_ino] = self._number(Path(old))
            for name in names:
                number = self._number(Path(old, name))
                if number in places:
                    os.link(places[number], new / name)
                else:
                    shutil.copyfile(Path(old, name), new / name)
                    other._numbers[(new / name).stat().st_ino] = number
                    places[number] = new / name
        other._next = self._next
        other._safe_bytes = dict(self._safe_bytes)
        other._safe_names = dict(self._safe_names)
        other._gone = dict(self._gone)
        other._folders = set(self._folders)
        return other

    # The hooks of `system_calls.watched`

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("unlink", "remove"):
            self._dies(Path(arguments[0]))
        elif name == "rmdir" and Path(arguments[0]).is_dir():
            self._number(Path(arguments[0]))
            del self._numbers[Path(arguments[0]).stat().st_ino]
        elif name in ("rename", "replace") and Path(arguments[1]).is_file():
            self._dies(Path(arguments[1]))

    def after(self, name: str, arguments: tuple[Any, ...]) -> None:
        place = system_calls.target(arguments)
        if name not in system_calls.SYNCS or place is None or not place.exists():
            return
        if os.fstat(arguments[0]).st_ino != place.stat().st_ino:
            return  # of a file that is gone: one of its name is another
        number = self._number(place)
        if place.is_dir():
            self._safe_names[number] = self._names(place)
        else:
            self._safe_bytes[number] = place.read_bytes()

    def _dies(self, file: Path) -> None:
        """Its name goes, but a power cut may bring it back; its inode may be another file's."""
        if file.exists() and file.stat().st_nlink == 1:
            self._gone[self._number(file)] = file.read_bytes()
            del self._numbers[file.stat().st_ino]

    def _number(self, place: Path) -> int:
        """A number for a file or folder, that no other one ever has."""
        inode = place.stat().st_ino
        if inode not in self._numbers:
            self._next += 1
            self._numbers[inode] = self._next
        if place.is_dir():
            self._folders.add(self._numbers[inode])
        return self._numbers[inode]

    def _names(self, folder: Path) -> dict[str, int]:
        return {entry.name: self._number(folder / entry.name) for entry in os.scandir(folder)}

    # The cut

    def leave(self, target: Path, rng: np.random.Generator, kept: float) -> None:
        """Make a folder of what a power cut at this moment leaves.

        Args:
            target: a folder that is not there.
            rng: draws what is kept.
            kept: the part of what is not safe that is kept.
        """
        names, places = {}, {self._number(self.folder): self.folder}
        for folder, _, _ in os.walk(self.folder):
            names[self._number(Path(folder))] = found = self._names(Path(folder))
            places.update({number: Path(folder, name) for name, number in found.items()})
        self._leave(self._number(self.folder), target, names, places, rng, kept)

    def _leave(
        self,
        number: int,
        target: Path,
        names: dict[int, dict[str, int]],
        places: dict[int, Path],
        rng: np.random.Generator,
        kept: float,
    ) -> None:
        if number not in self._folders:
            now = places[number].read_bytes() if number in places else self._gone[number]
            target.write_bytes(_torn(self._safe_bytes.get(number, b""), now, rng, kept))
            return
        target.mkdir()
        safe = self._safe_names.get(number, {})
        now_names = names.get(number, {})
        for name in sorted(safe.keys() | now_names.keys()):
            left = now_names if rng.random() < kept else safe
            if name in left:
                self._leave(left[name], target / name, names, places, rng, kept)


def _torn(safe: bytes, now: bytes, rng: np.random.Generator, kept: float) -> bytes:
    """A file's bytes: of each sector that differs, the new ones or the old ones; either length."""
    size = len(now) if rng.random() < kept else len(safe)
    old = np.frombuffer(safe.ljust(size, b"\0")[:size], dtype=np.uint8)
    new = np.frombuffer(now.ljust(size, b"\0")[:size], dtype=np.uint8)
    sectors = rng.random(-(-size // SECTOR)) < kept
    return np.where(np.repeat(sectors, SECTOR)[:size], new, old).tobytes()
