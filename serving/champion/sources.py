"""What names the bundle to serve: its folder, or a folder that is kept up to date with a registry's champion.

The champion's folder is written by one process and read by another that never imports MLflow::

    COPY/
      versions/3-1f9a…/   the bundle of version 3; never changed once it is there
      current.json        {"format": 1, "version": 3, "folder": "3-1f9a…", "digest": …}; replaced last
      status.json         {"checked_at": …, "error": null}: how the last look at the registry went
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from filelock import FileLock, Timeout

from features.errors import InputError
from serving.scores.reading import stamp_of
from telemetry.atomic import disk_errors, fsync_path, write_bytes

MANIFEST: Final = "manifest.json"
CURRENT: Final = "current.json"
STATUS: Final = "status.json"
VERSIONS: Final = "versions"
_FORMAT: Final = 1


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


def manifest_digest(bundle: Path) -> str:
    """Give the digest of a bundle in a folder; empty where it cannot be read: loading it says why."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


class ChampionCopy:
    """The folder, for both processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def current(self) -> dict[str, Any] | None:
        """Read which version is there; None where there is none, or what says so is damaged."""
        content = _read(self.path / CURRENT)
        if content is None or content.get("format") != _FORMAT:
            return None
        version, folder, digest = content.get("version"), content.get("folder"), content.get("digest")
        if not (isinstance(version, int) and isinstance(folder, str) and isinstance(digest, str)):
            return None
        if folder != _folder_name(version, digest):  # it becomes part of a path
            return None
        return content

    def take(self, bundle: Path, version: int, digest: str) -> None:
        """Copy a bundle and name it as the current one; what was there before stays until the next but one.

        Raises ``InputError`` if its manifest is not that of the digest, or the disk is full; the one of before stays
        current.
        """
        actual = hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
        if actual != digest:
            raise InputError(
                f"its bundle's digest is {actual[:12]}, registered was {digest[:12] or 'none'}",
                f"version {version}",
                "Do not use this version; train and register a bundle again.",
            )
        name = _folder_name(version, digest)
        target = self.path / VERSIONS / name
        with disk_errors(self.path):
            target.parent.mkdir(parents=True, exist_ok=True)
            building = target.with_name(f".{name}.building")
            shutil.rmtree(building, ignore_errors=True)
            shutil.copytree(bundle, building)
            for path in sorted(building.rglob("*")):
                fsync_path(path)
            shutil.rmtree(target, ignore_errors=True)
            building.rename(target)
            fsync_path(target.parent)
        content = {"format": _FORMAT, "version": version, "folder": name, "digest": digest}
        before = self.current()
        write_bytes(self.path / CURRENT, json.dumps(content).encode())
        kept = {name, *([] if before is None else [str(before["folder"])])}
        for folder in target.parent.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def note(self, error: str | None) -> None:
        """Write how a look at the registry went."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_bytes(self.path / STATUS, json.dumps({"checked_at": now, "error": error}).encode())

    def error(self) -> str | None:
        """Read why the registry could not be looked at, or its champion not be taken; None: it was."""
        status = _read(self.path / STATUS)
        error = None if status is None else status.get("error")
        return error if isinstance(error, str) and error else None


def temporary_folder() -> Path:
    """Make a folder for a copy that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="predrain-champion-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _folder_name(version: int, digest: str) -> str:
    return f"{version}-{''.join(char for char in digest[:16] if char.isalnum())}"


def named_bundle(copy: ChampionCopy) -> NamedBundle:
    """Name the bundle that a copy holds.

    Raises ``NotNamedYet`` if the registry has not answered yet.
    Raises ``InputError`` if it holds none, because the registry cannot be asked or has no champion.
    """
    current, error = copy.current(), copy.error()
    if current is None:
        raise (NotNamedYet if error is None else InputError)(
            error or "the champion has not been fetched yet",
            "the registry",
            "Check --registry and --name, and that there is a champion (`predrain promote`).",
        )
    note = None if error is None else f"the registry's champion cannot be known: {error}"
    return NamedBundle(copy.path / VERSIONS / str(current["folder"]), int(current["version"]), note)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class StateFolder:
    """Holds the right to a folder as long as the process lives.

    ``champion``: where the registry's champion is kept.
    Raises ``InputError`` if another process has it, or it may not be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.champion = path / "champion"
        with disk_errors(path):
            if path.exists() and not path.is_dir():
                raise InputError("there is a file here", str(path), "Choose another folder.")
            path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path / "lock", timeout=0, fallback_to_soft=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise InputError(
                "another predrain serve keeps its state here", str(path), "End it, or give each its own --state."
            ) from None

    def close(self) -> None:
        """Let another process have it."""
        self._lock.release()
