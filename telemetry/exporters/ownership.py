"""Which process scrapes a target: the one that has locked the target's byte in the landing folder's lock file.

The system gives a lock back when its process ends, however it ends, so another collector that asks for the byte at its
next turn takes the target over. Locks of this kind belong to a process: they are lost when the process closes *any*
descriptor of the file, so there is one :class:`Ownership` for a lock file in a process, and nobody else opens it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Final

from telemetry.atomic import disk_errors
from telemetry.exporters.targets import target_hash

POSITIONS: Final = 1 << 62
"""Bytes that targets are spread over. Locks lie beyond the end of the (empty) file. Of 100,000 targets, two share a
byte with a probability of one in a billion; in one process they then share the lock, and in two they go together."""

_HELD = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_log = logging.getLogger(__name__)


class Ownership:
    """The targets that this process may scrape.

    ``path``: the lock file, shared by all collectors of one dataset; made if it does not exist.
    ``positions``: how many bytes there are.
    """

    def __init__(self, path: Path, *, positions: int = POSITIONS) -> None:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._path = path
        self._positions = positions
        self._holders: dict[int, set[str]] = {}
        self._supported = True

    def acquire(self, url: str) -> bool:
        """Take a target; return whether this process has it now. Never waits."""
        offset = target_hash(url) % self._positions
        holders = self._holders.get(offset)
        if holders is not None:
            holders.add(url)
            return True
        if self._supported:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset, os.SEEK_SET)
            except OSError as error:
                if error.errno in _HELD:
                    return False
                if error.errno not in _UNSUPPORTED:
                    raise
                self._supported = False
                _log.warning(
                    "%s lies on a file system without locks: run only one collector of exporters on this dataset",
                    self._path,
                )
        self._holders[offset] = {url}
        return True

    def release(self, url: str) -> None:
        """Give a target back; does nothing if this process does not have it."""
        offset = target_hash(url) % self._positions
        holders = self._holders.get(offset)
        if holders is None or url not in holders:
            return
        holders.discard(url)
        if not holders:
            del self._holders[offset]
            if self._supported:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, offset, os.SEEK_SET)

    def owns(self, url: str) -> bool:
        """Whether this process has the target."""
        return url in self._holders.get(target_hash(url) % self._positions, ())

    def close(self) -> None:
        """Give everything back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._holders.clear()

    def __enter__(self) -> Ownership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
