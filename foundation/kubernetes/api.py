"""Responses and errors of the Kubernetes API server, limits on requests, and parsers for fields of its objects."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from foundation.instants import to_ms

Object = Mapping[str, Any]
PAGE_SIZE: Final = 500
"""Objects per page of a list request; kubectl's default."""

CLAIM_VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""Versions of ``resource.k8s.io`` that have resource claims, newest first."""

GONE: Final = 410
"""Status for a resourceVersion or continue token that has expired."""

_MAX_MESSAGE: Final = 500


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of a client; ``retry_timeout_s`` and ``attempts`` (None: unlimited) apply to each request."""

    requests_per_second: float = 200.0
    burst: int = 200
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    retry_timeout_s: float = 60.0
    attempts: int | None = 5


DEFAULT_LIMITS: Final = ClientLimits()


class ApiRefused(Exception):
    """The API server rejected the request; retries do not help."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.message}"


class Unreachable(Exception):
    """No usable response, so the outcome is unknown; ``sent`` False: the request did not reach the server."""

    def __init__(self, message: str, *, sent: bool = True, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.sent = sent
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Response:
    """A response, successful or not; ``content`` of an error that is not JSON has its text as ``message``."""

    status: int
    content: Object
    retry_after_s: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        """The message of the server's ``Status`` object."""
        text = str(self.content.get("message") or "no message")[:_MAX_MESSAGE]
        return f"{text} (an unknown or expired token or client certificate)" if self.status == 401 else text

    @property
    def problem(self) -> str:
        """Status and message, for logs and errors."""
        return f"HTTP {self.status}: {self.message}"

    @property
    def causes(self) -> tuple[Object, ...]:
        """``details.causes`` of a failure."""
        details = self.content.get("details")
        causes = details.get("causes") if isinstance(details, dict) else None
        return tuple(cause for cause in causes or () if isinstance(cause, dict))


def is_named(content: Object, name: str) -> bool:
    """Whether a response is the object of this name; a proxy may return something else."""
    metadata = content.get("metadata")
    return isinstance(metadata, dict) and metadata.get("name") == name


def text_of(value: Any) -> str | None:
    """Return a string, or None if it is empty or None; raises ``TypeError`` for other types."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r} where a string is expected")
    return value or None


def required(value: Any) -> str:
    """Return a non-empty string; raises ``TypeError`` otherwise."""
    text = text_of(value)
    if text is None:
        raise TypeError("a name or uid is missing")
    return text


def timestamp_ms(text: Any) -> int | None:
    """Parse an RFC 3339 timestamp to milliseconds since 1970 UTC; None for Go's zero time and invalid values."""
    if not isinstance(text, str) or not text:
        return None
    try:
        instant = datetime.fromisoformat(text)
        instant = instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    ms = to_ms(instant)
    return ms if ms > 0 else None


_QUANTITY: Final = re.compile(r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE]([+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)")
_POWERS_OF_TEN: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FACTORS: Final = {
    "": Decimal(1),
    **{suffix: Decimal(10) ** power for suffix, power in _POWERS_OF_TEN.items()},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}


def parse_quantity(value: object) -> Decimal | None:
    """Parse a quantity in base units (cores, bytes, devices); None if it is invalid or negative."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        return None
    return Decimal(match[1]) * Decimal(10) ** int(match[2] or 0) * _FACTORS[match[3] or ""]
