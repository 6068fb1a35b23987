"""How a Kubernetes API server may answer, and the bounds of what collectors and the scheduler ask of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from foundation.instants import to_ms

Object = Mapping[str, Any]
"""One object of the API, as its JSON says."""

PAGE_SIZE: Final = 500
"""Objects a page of a listing, as kubectl asks for."""

CLAIM_VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""Versions of ``resource.k8s.io`` with resource claims, newest first."""

GONE: Final = 410
"""Status of a version, or of the rest of a listing, that the server no longer has."""

_MAX_MESSAGE: Final = 500


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds of a client's requests; ``retry_timeout_s`` and ``attempts`` (None: any number) are for one request."""

    requests_per_second: float = 200.0
    burst: int = 200
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    retry_timeout_s: float = 60.0
    attempts: int | None = 5


DEFAULT_LIMITS: Final = ClientLimits()


class ApiRefused(Exception):
    """An answer of the server that is no success, and that waiting does not change."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.message}"


class Unreachable(Exception):
    """No answer that says whether the request was carried out; ``sent`` False: nothing of it reached the server."""

    def __init__(self, message: str, *, sent: bool = True, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.sent = sent
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Response:
    """An answer of the server, success or not; ``content`` is empty where it sent no JSON object."""

    status: int
    content: Object
    retry_after_s: float | None = None

    @property
    def ok(self) -> bool:
        """Whether it is a success."""
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        """What the server says about it."""
        return str(self.content.get("message") or "no message")[:_MAX_MESSAGE]

    @property
    def problem(self) -> str:
        """Status and message, for people."""
        return f"HTTP {self.status}: {self.message}"

    @property
    def causes(self) -> tuple[Object, ...]:
        """The causes in the details of a failure."""
        details = self.content.get("details")
        causes = details.get("causes") if isinstance(details, dict) else None
        return tuple(cause for cause in causes or () if isinstance(cause, dict))


def is_named(content: Object, name: str) -> bool:
    """Whether an answer is the object of this name; a proxy may answer with something else."""
    metadata = content.get("metadata")
    return isinstance(metadata, dict) and metadata.get("name") == name


def text_of(value: Any) -> str | None:
    """Return a text; None for an empty one. Raises ``TypeError`` for anything else."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r} where a string is expected")
    return value or None


def required(value: Any) -> str:
    """Return a text that must be there; raises ``TypeError`` otherwise."""
    text = text_of(value)
    if text is None:
        raise TypeError("a name or uid is missing")
    return text


def timestamp_ms(text: Any) -> int | None:
    """Return an RFC 3339 instant as milliseconds since 1970 UTC; None for Go's zero instant and what is no instant."""
    if not isinstance(text, str) or not text:
        return None
    try:
        when = datetime.fromisoformat(text)
        when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    ms = to_ms(when)
    return ms if ms > 0 else None


_QUANTITY: Final = re.compile(r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE]([+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)")
_POWERS_OF_TEN: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FACTORS: Final = {
    "": Decimal(1),
    **{suffix: Decimal(10) ** power for suffix, power in _POWERS_OF_TEN.items()},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}


def parse_quantity(value: object) -> Decimal | None:
    """Return the amount in base units (cores, bytes, devices); None if the value is no quantity, or is negative."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        return None
    return Decimal(match[1]) * Decimal(10) ** int(match[2] or 0) * _FACTORS[match[3] or ""]
