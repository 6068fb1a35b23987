"""The champion of a registry as a folder: copied there by one process, read by another that never imports MLflow.

::

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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from features.errors import InputError
from models.bundle.files import read_files
from serving.champion.sources import MANIFEST, NamedBundle, NotNamedYet
from telemetry.atomic import disk_errors, fsync_path, write_bytes

CURRENT: Final = "current.json"
STATUS: Final = "status.json"
VERSIONS: Final = "versions"
_FORMAT: Final = 1
_KEPT: Final = 2


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
        if folder != folder_name(version, digest):  # it becomes part of a path
            return None
        return content

    def bundle_of(self, current: dict[str, Any]) -> Path:
        """Give the bundle's folder."""
        return self.path / VERSIONS / str(current["folder"])

    def is_whole(self, current: dict[str, Any]) -> bool:
        """Tell whether the bundle's files are still those that were copied: each is read, and compared by its hash."""
        folder = self.bundle_of(current)
        try:
            raw = (folder / MANIFEST).read_bytes()
            if hashlib.sha256(raw).hexdigest() != current["digest"]:
                return False
            read_files(folder, folder / MANIFEST, json.loads(raw)["files"])
        except (OSError, InputError, ValueError, KeyError, TypeError):
            return False
        return True

    def take(self, bundle: Path, version: int, digest: str) -> Path:
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
        name = folder_name(version, digest)
        target = self.path / VERSIONS / name
        with disk_errors(self.path):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not self.is_whole({"folder": name, "digest": digest}):
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
        self._prune({name, *([] if before is None else [str(before["folder"])])})
        return target

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

    def _prune(self, kept: set[str]) -> None:
        for folder in (self.path / VERSIONS).iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def temporary_folder() -> Path:
    """Make a folder for a copy that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="predrain-champion-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def folder_name(version: int, digest: str) -> str:
    """Name a version's folder."""
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
    return NamedBundle(copy.bundle_of(current), int(current["version"]), note)


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
