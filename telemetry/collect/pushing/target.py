"""Where landed files are sent: a port, and what it can answer but "taken"."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from telemetry.landing.tables import Kind


class Later(Exception):
    """The other side cannot take anything now; the file stays in the spool.

    ``why``: for the log; never a secret.
    ``after_s``: when the other side wants to be asked again, if it said so.
    ``poison``: whether the file may be the reason: the other side is there, and stumbled over it.
    """

    def __init__(self, why: str, after_s: float | None = None, *, poison: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.after_s = after_s
        self.poison = poison


class Refused(Exception):
    """The other side will never take this file."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Target(Protocol):
    """Takes landed files, each of them once however often it is sent under its name."""

    def send(self, kind: Kind, path: Path, name: str) -> None:
        """Return once the file is safe on the other side.

        Raises ``FileNotFoundError`` if the file is gone from the spool.
        """
