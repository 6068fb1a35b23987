"""The folder in which a service keeps the champion's bundle between restarts: one process at a time."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from features.errors import InputError
from telemetry.atomic import disk_errors


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
        self._lock = FileLock(path / "lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise InputError(
                "another predrain serve keeps its state here", str(path), "End it, or give each its own --state."
            ) from None

    def close(self) -> None:
        """Let another process have it."""
        self._lock.release()
