"""Atomic writes of files and folders, recovery from interrupted ones, and errors for a full disk.

A folder NAME is built in its hidden sibling ``.NAME.building`` (same file system, so that a rename suffices), while the
builder holds ``.NAME.lock``. On commit the old NAME is renamed to ``.NAME.previous``, then the new folder to NAME. A
process that dies leaves one of three states, and :func:`recover_folder` restores one complete folder from each: nothing
renamed (NAME is the old folder), only the first rename done (the old folder is renamed back), both done (NAME is the
new folder).

A reader that needs a stable folder takes a :class:`ReadLease`: the replaced folder is renamed to ``.NAME.reading-…``,
and removed by the first swap after its last reader has closed it.
"""

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from filelock import AcquireReturnProxy, FileLock, Timeout

from foundation.errors import InputError
from foundation.place import refuse_storage

_DISK_PROBLEMS = (
    (
        (errno.ENOSPC, errno.EDQUOT),
        "the disk is full",
        "Free space or write to another file system, then run again; previous output is unchanged.",
    ),
    (
        (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP),
        "the file system does not support file locks",
        "Use another file system, such as a local disk.",
    ),
    (
        (errno.EROFS, errno.EACCES, errno.EPERM),
        "cannot write here: {reason}",
        "Choose a folder that this user may write to.",
    ),
)
_STALE_S = 3600.0
_SWAP_WAIT_S = 2.0
# Two renames take microseconds; a builder that is between them for longer than this has died.


def building_path(target: Path) -> Path:
    """Return the hidden sibling in which ``target`` is built."""
    return target.with_name(f".{target.name}.building")


def previous_path(target: Path) -> Path:
    """Return the hidden sibling that holds the old ``target`` during the swap."""
    return target.with_name(f".{target.name}.previous")


def refuse_other_content(folder: Path, marker: str, kind: str) -> None:
    """Raise ``InputError`` if a path to be replaced has content but no file ``marker``."""
    if folder.exists() and not (folder / marker).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        advice = "Choose another folder, or remove this one."
        raise InputError(f"the path exists and is not {kind}", str(folder), advice)


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn an OSError for which the user can do something into an ``InputError`` that names ``target``."""
    try:
        yield
    except OSError as error:
        # Some of Arrow's OSErrors have no errno attribute, only the number in the message.
        in_text = re.search(r"[Ee]rrno (\d+)", str(error))
        code = error.errno or (int(in_text[1]) if in_text else 0)
        for codes, problem, advice in _DISK_PROBLEMS:
            if code in codes:
                raise InputError(problem.format(reason=os.strerror(code)), f"while writing {target}", advice) from error
        raise


def check_regular(path: Path) -> None:
    """Raise ``InputError`` for pipes, devices and sockets, which may block forever; folders and missing files pass."""
    if not path.exists() or path.is_dir():
        return
    system = path.resolve().parts[:2] in (("/", "proc"), ("/", "sys"))
    if system or not path.is_file():
        raise InputError("not a regular file", str(path), "Save its output to a file, and give the file.")


def read_text(path: Path, max_bytes: int = 1 << 24) -> str:
    """Return the text of a small file; see :func:`read_small`; raises ``UnicodeDecodeError`` as well."""
    return read_small(path, max_bytes).decode("utf-8")


def read_small(path: Path, max_bytes: int = 1 << 24) -> bytes:
    """Read a whole file that a user names.

    Raises ``InputError`` if it is no regular file or longer than ``max_bytes``, ``OSError`` if it cannot be read.
    """
    check_regular(path)
    with path.open("rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InputError(f"the file is larger than {max_bytes >> 20} MiB", str(path), "Check that it is this file.")
    return content


def refuse_other_writers(folder: Path, files: Iterable[Path] = ()) -> None:
    """Raise ``InputError`` if other users can write a folder or paths in it: drains depend on scores and bundles.

    Groups of this process may have write permission. Raises ``OSError`` if a path is missing.

    The folder's owner and its parent folders are trusted: container volumes are often world-writable. A signature
    would need a key that the same users can read.
    """
    folder = folder.resolve()
    owner = folder.stat().st_uid
    for path in (folder, *files):
        status = path.stat()
        groups = {os.getegid(), *os.getgroups()}
        others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid not in groups)
        if others or status.st_uid not in (os.geteuid(), owner, 0):
            raise InputError(
                "other users can write to this path, and drains depend on its content", str(path),
                "Remove the permission (chmod -R go-w). The owner must be the user of predrain or of the folder.",
            )  # fmt: skip


def fsync_path(path: Path) -> None:
    """Call fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link a file; copy it if the file systems differ or have no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden sibling to write to, and rename it to ``path`` when the block ends without an error.

    Each concurrent writer has its own sibling; the last one wins. Siblings of killed writers are removed after an hour.
    """
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - stale.stat().st_mtime > _STALE_S:
                stale.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file atomically: to a hidden sibling, with fsync, then renamed.

    Raises ``InputError`` if the disk is full or the folder is not writable; the old file is unchanged.
    """
    with disk_errors(path), replacing(path) as temporary, temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return a stamp that changes when a file is replaced, written, removed or given other permissions."""
    try:
        status = path.stat()
    except OSError as error:
        return (error.errno or 0,)
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size)


def take_lock(path: Path, problem: str, location: str, advice: str, *, mode: int = -1) -> AcquireReturnProxy[FileLock]:
    """Acquire a file lock without waiting; it is held until the context ends or its ``lock`` is released.

    Raises ``InputError(problem, location, advice)`` if another process holds it.
    """
    try:
        with disk_errors(path):
            return FileLock(path, mode=mode, blocking=False, thread_local=False, fallback_to_soft=False).acquire()
    except Timeout:
        raise InputError(problem, location, advice) from None


class FolderSwap:
    """A folder under construction that replaces ``target`` on :meth:`commit`.

    Raises ``InputError`` if another process is building the same target, ``target`` is on S3-compatible storage, or its
    parent is not writable.
    """

    def __init__(self, target: Path) -> None:
        refuse_storage(target)
        self.target = Path(os.path.realpath(target))
        self.path = building_path(self.target)
        advice = "Wait until it has ended, or write to another folder."
        with disk_errors(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            lock = self.target.with_name(f".{self.target.name}.lock")
            self._lock = take_lock(lock, "another run is writing this folder", str(self.target), advice).lock
            _settle(self.target)
            shutil.rmtree(self.path, ignore_errors=True)  # left behind by a process that died
            self.path.mkdir()

    def commit(self) -> None:
        """Replace ``target`` by the built folder."""
        with disk_errors(self.target):
            fsync_path(self.path)
            if self.target.exists():
                self.target.rename(previous_path(self.target))
            self.path.rename(self.target)
            fsync_path(self.target.parent)
            _settle(self.target)
        self.discard()

    def discard(self) -> None:
        """Remove the built folder and leave ``target`` unchanged; no effect after :meth:`commit`."""
        if self._lock.is_locked:
            shutil.rmtree(self.path, ignore_errors=True)
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.discard()


def recover_folder(target: Path) -> None:
    """Undo a swap that a process left half done when it died; no effect in any other state.

    Waits up to 2 s for a live process between its two renames.
    """
    target = Path(os.path.realpath(target))
    deadline = time.monotonic() + _SWAP_WAIT_S
    while not target.exists() and previous_path(target).exists():
        if time.monotonic() > deadline:
            _settle(target)
            return
        time.sleep(0.01)


class ReadLease:
    """Keeps a folder's files for one reader while other runs swap in new folders.

    ``path``: a path that still refers to this folder after a swap; ``folder`` itself on systems other than Linux and on
    file systems that cannot lock folders (some network file systems).
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return
        weakref.finalize(self, os.close, descriptor)
        pinned = Path(f"/proc/self/fd/{descriptor}")
        if pinned.is_dir():
            self.path = pinned


def _settle(target: Path) -> None:
    """Finish or undo a swap, and remove replaced folders without readers."""
    previous = previous_path(target)
    with contextlib.suppress(FileNotFoundError):  # no previous folder, or another reader was faster
        aside = target.with_name(f".{target.name}.reading-{secrets.token_hex(4)}")
        previous.rename(aside if target.exists() else target)
    for folder in target.parent.glob(f".{glob.escape(target.name)}.reading-*"):
        if not _is_read(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_read(folder: Path) -> bool:
    """Whether a :class:`ReadLease` holds a folder."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # this file system cannot lock folders, so nothing holds one
            return False
        finally:
            os.close(descriptor)
    return False
