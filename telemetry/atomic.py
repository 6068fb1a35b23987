"""Writes that happen wholly or not at all, and what to say when the disk is full.

A folder NAME is built in its hidden sibling ``.NAME.building`` (same file system, so that a rename suffices), which the
builder keeps locked. On completion the old NAME is renamed to ``.NAME.previous``, the new one takes its name, and the
old one is removed. A process that dies leaves one of three states, and :func:`recover_folder` brings each back to one
whole folder: nothing renamed (NAME is the old one), only the first rename done (the old one gets its name back), both
done (NAME is the new one). Names are fixed rather than random, so nothing piles up.

A reader that must not be disturbed takes a :class:`ReadLease`: an old folder that is being read is put aside as
``.NAME.reading-…`` instead of removed, and goes with the first swap after its last reader.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from telemetry.dataset.place import refuse_storage
from telemetry.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP)
# Some network file systems cannot lock a folder: there, two writers at once are the user's to avoid.
_SWAP_WAIT_S = 5.0
# Two renames take microseconds; a builder seen between them for longer than this has stopped.


def building_path(target: Path) -> Path:
    """Return the hidden sibling in which ``target`` is built."""
    return target.with_name(f".{target.name}.building")


def previous_path(target: Path) -> Path:
    """Return the hidden sibling that holds the old ``target`` during the swap."""
    return target.with_name(f".{target.name}.previous")


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn "no space left", "read-only" and "not permitted" into an InputError that names ``target``.

    Raises ``InputError`` on ENOSPC, EDQUOT, EROFS, EACCES and EPERM; any other OSError passes through.
    """
    try:
        yield
    except OSError as error:
        # Arrow raises OSError without an errno in places, but keeps the number in its text.
        text = str(error)
        if error.errno in _FULL or any(f"errno {code}" in text or f"Errno {code}" in text for code in _FULL):
            raise InputError(
                "the disk is full",
                f"while writing {target}",
                "Free space or write to another file system, then run again; what was there before is unchanged.",
            ) from error
        if error.errno == errno.ENOSYS:
            raise InputError(
                "this file system cannot lock files",
                str(target),
                "Use one that can, such as a local disk.",
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise InputError(
                f"cannot write here: {os.strerror(error.errno)}",
                str(target),
                "Choose a folder that this user may write to.",
            ) from error
        raise


def fsync_path(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file atomically: to a hidden sibling, forced to the disk, then renamed.

    Raises ``InputError`` if the disk is full or the folder may not be written to; the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with disk_errors(path):
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class FolderSwap:
    """A folder being built that replaces ``target`` in one step.

    Raises ``InputError`` if another process is building the same target, or the place is no folder or may not be
    written to.
    """

    def __init__(self, target: Path) -> None:
        refuse_storage(target)
        self.target = Path(os.path.realpath(target))
        self.path = building_path(self.target)
        self._lock: int | None = None
        with disk_errors(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
            _settle(self.target)
            for entry in self.path.iterdir():  # left behind by a process that died
                _remove(entry)

    def commit(self) -> None:
        """Give the built folder its name; the old folder of that name disappears."""
        previous = previous_path(self.target)
        with disk_errors(self.target):
            fsync_path(self.path)
            if self.target.exists():
                self.target.rename(previous)
            self.path.rename(self.target)
            fsync_path(self.target.parent)
            _retire(previous)
        self._release()

    def discard(self) -> None:
        """Remove what was built; ``target`` stays as it was. Harmless after :meth:`commit`."""
        if self._lock is None:
            return
        _remove(self.path)
        self._release()

    def __enter__(self) -> FolderSwap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _acquire(self) -> int:
        while True:
            self.path.mkdir(exist_ok=True)
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another process just finished and renamed it
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise InputError(
                    "another run is writing this folder",
                    str(self.target),
                    "Wait until it has ended, or write to another folder.",
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if _is_same(descriptor, self.path):
                return descriptor
            os.close(descriptor)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def recover_folder(target: Path) -> None:
    """Undo a swap that a dying process left half done; does nothing in any other state.

    A process that lives and is between its two renames is waited for, up to 5 s.
    """
    target = Path(os.path.realpath(target))
    deadline = time.monotonic() + _SWAP_WAIT_S
    while not target.exists() and previous_path(target).exists():
        if not _is_locked(building_path(target)) or time.monotonic() > deadline:
            _settle(target)
            return
        time.sleep(0.01)


class ReadLease:
    """Keeps a folder's files in place for one reader while other runs swap new folders in.

    ``path``: a path that goes on naming this very folder whatever takes its name; ``folder`` itself where the system
    has no such path (anything but Linux) or no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            # No locks here, or the folder's own builder has not let go of it yet: read it by its name.
            os.close(descriptor)
            return
        weakref.finalize(self, os.close, descriptor)
        pinned = Path(f"/proc/self/fd/{descriptor}")
        if pinned.is_dir():
            self.path = pinned


def _retire(previous: Path) -> None:
    """Remove a folder that was replaced, or put it aside while it is read."""
    if not previous.exists():
        return
    name = previous.name.removesuffix(".previous")
    if _is_locked(previous, fcntl.LOCK_EX):
        previous.rename(previous.with_name(f"{name}.reading-{secrets.token_hex(4)}"))
    else:
        _remove(previous)
    for aside in previous.parent.glob(f"{glob.escape(name)}.reading-*"):
        if not _is_locked(aside, fcntl.LOCK_EX):
            _remove(aside)


def _settle(target: Path) -> None:
    """Finish or undo a swap whose process is gone."""
    previous = previous_path(target)
    if not previous.exists():
        return
    if target.exists():
        _retire(previous)
    else:
        with contextlib.suppress(FileNotFoundError):  # another reader was faster
            previous.rename(target)


def _is_locked(folder: Path, kind: int = fcntl.LOCK_SH) -> bool:
    """Whether a lock of this kind cannot be had: shared while a folder is built, exclusive while it is read."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        os.close(descriptor)
    return False


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
