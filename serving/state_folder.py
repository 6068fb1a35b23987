"""The folder that a service keeps between its lives: one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from features.errors import InputError
from telemetry.atomic import disk_errors


class StateFolder:
    """Holds the right to a folder as long as the process lives.

    ``path``: made with its parents where it does not exist.
    ``online``: where the online state is kept.
    ``champion``: where the registry's champion is kept.
    Raises ``InputError`` if another process has it, or it may not be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.online = path / "online"
        self.champion = path / "champion"
        with disk_errors(path):
            if path.exists() and not path.is_dir():
                raise InputError("there is a file here", str(path), "Choose another folder.")
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InputError(
                "another predrain serve keeps its state here", str(path), "End it, or give each its own --state."
            ) from None

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)
