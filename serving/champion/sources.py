"""What names the bundle to serve: its folder, or a folder that is kept up to date with a registry's champion."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from features.errors import InputError

MANIFEST: Final = "manifest.json"


class NotNamedYet(InputError):
    """The source has begun to look, and does not know yet which bundle it is: nothing is wrong."""


@dataclass(frozen=True, slots=True)
class NamedBundle:
    """The bundle that a source names.

    ``version``: its version in the registry; None for one that comes from a folder.
    ``note``: why it may not be the newest; None: as far as is known it is.
    """

    path: Path
    version: int | None = None
    note: str | None = None


class BundleSource(Protocol):
    """Names the bundle to serve."""

    def start(self) -> None:
        """Begin to look after it."""

    def stop(self) -> None:
        """End what :meth:`start` has begun."""

    def stamp(self) -> object:
        """Give what changes when another bundle is named; cheap, for it is asked each second."""

    def named(self) -> NamedBundle:
        """Name the bundle.

        Raises ``NotNamedYet`` if that is still being found out for the first time.
        Raises ``InputError`` if there is none.
        """


class FolderBundle:
    """The bundle in one folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        """Do nothing: a folder is there by itself."""

    def stop(self) -> None:
        """Do nothing."""

    def stamp(self) -> object:
        """Give what changes when the folder is replaced or its manifest is."""
        return stamp_of(self._path / MANIFEST)

    def named(self) -> NamedBundle:
        """Name the folder."""
        return NamedBundle(self._path)


def stamp_of(path: Path) -> tuple[int, ...]:
    """Give what changes when a file is replaced, written or removed."""
    try:
        stat = path.stat()
    except OSError as error:
        return (error.errno or 0,)
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size)


def manifest_digest(bundle: Path) -> str:
    """Give the digest of a bundle in a folder; empty where it cannot be read: loading it says why."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""
