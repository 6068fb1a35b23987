"""What names the bundle to serve: its folder, or a folder that is kept up to date with a registry's champion.

The champion's folder is written by one process and read by another that never imports MLflow::

    COPY/
      bundle/        the champion's bundle, and `version`, its number in the registry; replaced as a whole
      status.json    {"checked_at": …, "error": null}: how the last look at the registry went
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
from typing import Final

from filelock import FileLock, Timeout

from features.errors import InputError
from serving.scores.reading import stamp_of
from telemetry.atomic import FolderSwap, disk_errors, fsync_path, recover_folder, write_bytes

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


class FolderBundle:
    """Names the bundle to serve: the one in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self) -> None:
        """Begin to look after it: nothing to do, a folder is there by itself."""

    def stop(self) -> None:
        """End what :meth:`start` has begun."""

    def stamp(self) -> object:
        """Give what changes when another bundle is named; cheap, for it is asked each second."""
        return stamp_of(self.path / MANIFEST)

    def named(self) -> NamedBundle:
        """Name the bundle.

        Raises ``NotNamedYet`` if that is still being found out for the first time.
        Raises ``InputError`` if there is none.
        """
        return NamedBundle(self.path)


def manifest_digest(bundle: Path) -> str:
    """Give the digest of a bundle in a folder; empty where it cannot be read: loading it says why."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


class ChampionCopy(FolderBundle):
    """Names the bundle in a champion's folder; for both processes."""

    @property
    def bundle(self) -> Path:
        """The folder of the bundle, whether it is there or not."""
        return self.path / "bundle"

    def stamp(self) -> object:
        """Give what changes when another version is champion, or the registry can no longer be asked."""
        return stamp_of(self.bundle / MANIFEST), self.version(), self.error()

    def named(self) -> NamedBundle:
        """Name the champion's bundle; see :meth:`FolderBundle.named`."""
        version, error = self.version(), self.error()
        if version is None:
            raise (NotNamedYet if error is None else InputError)(
                error or "the champion has not been fetched yet",
                "the registry",
                "Check --registry and --name, and that there is a champion (`predrain promote`).",
            )
        note = None if error is None else f"the registry's champion cannot be known: {error}"
        return NamedBundle(self.bundle, version, note)

    def version(self) -> int | None:
        """Read the version that is there; None where there is none."""
        try:
            return int((self.bundle / "version").read_text())
        except (OSError, ValueError):
            return None

    def holds(self, version: int, digest: str) -> bool:
        """Tell whether a version of the registry is the one that is there."""
        return self.version() == version and manifest_digest(self.bundle) == digest

    def take(self, bundle: Path, version: int, digest: str) -> None:
        """Copy a bundle in the place of the one that is there.

        Raises ``InputError`` if its manifest is not that of the digest, or the disk is full; the one of before stays.
        """
        actual = manifest_digest(bundle)
        if actual != digest:
            raise InputError(
                f"its bundle's digest is {actual[:12]}, registered was {digest[:12] or 'none'}",
                f"version {version}",
                "Do not use this version; train and register a bundle again.",
            )
        with FolderSwap(self.bundle) as swap, disk_errors(self.path):
            shutil.copytree(bundle, swap.path, dirs_exist_ok=True)
            (swap.path / "version").write_text(str(version))
            for path in swap.path.rglob("*"):
                fsync_path(path)
            swap.commit()

    def note(self, error: str | None) -> None:
        """Write how a look at the registry went."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_bytes(self.path / "status.json", json.dumps({"checked_at": now, "error": error}).encode())

    def error(self) -> str | None:
        """Read why the registry could not be looked at, or its champion not be taken; None: it was."""
        try:
            error = json.loads((self.path / "status.json").read_bytes())["error"]
        except (OSError, ValueError, TypeError, LookupError):
            return None
        return str(error) if error else None


def temporary_folder() -> Path:
    """Make a folder for a copy that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="predrain-champion-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def held_folder(state: Path) -> Path:
    """Give the folder of the champion that stays over restarts, and hold the right to it as long as the process lives.

    Raises ``InputError`` if another process has it, or it may not be written to.
    """
    with disk_errors(state):
        if state.exists() and not state.is_dir():
            raise InputError("there is a file here", str(state), "Choose another folder.")
        state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state / "lock", timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            "another predrain serve keeps its state here", str(state), "End it, or give each its own --state."
        ) from None
    atexit.register(lock.release)  # which also keeps the lock from being collected
    folder = state / "champion"
    recover_folder(ChampionCopy(folder).bundle)  # of a process that was killed while it replaced the bundle
    return folder
