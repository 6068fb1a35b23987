"""What is asked of a Kubernetes API server, and what may come of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Object = Mapping[str, Any]
"""One object of the API, as its JSON says."""


class Refused(Exception):
    """An answer of the server that is no success."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.message}"


class Unreachable(Exception):
    """The server could not be reached, or cut an answer off."""


class NotSent(Unreachable):
    """No connection came about, so that nothing of the request reached the server."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came, success or not.

    ``headers``: asked for without regard to case.
    """

    status: int
    headers: Mapping[str, str]
    data: bytes


class Api(Protocol):
    """What the rest of this package asks of a server; tests have an in-memory one."""

    name: str
    """Host and port of the server."""

    def get(self, path: str, params: Mapping[str, str] | None = None) -> Object:
        """Read one object."""
        ...

    def pages(self, path: str, params: Mapping[str, str] | None = None) -> Iterator[Object]:
        """List page by page."""
        ...

    def watch(self, path: str, params: Mapping[str, str] | None, version: str) -> Iterator[Object]:
        """Give the changes after a version."""
        ...

    def close(self) -> None:
        """End all requests."""
        ...
