"""Rejected requests as problem details (RFC 9457)."""

import json
from http import HTTPStatus
from typing import Self

_RETRY_AFTER_S = 5


class RequestRefused(Exception):
    """A rejected request; senders retry after 429 and 503, never after other 4xx."""

    def __init__(self, status: int, detail: str, reason: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.reason = reason
        self.retry_after_s = retry_after_s

    @classmethod
    def unreadable(cls, detail: str) -> Self:
        """Return the rejection of a body that is corrupt or in another format."""
        return cls(400, detail[:500], "garbage")

    @classmethod
    def too_large(cls, detail: str) -> Self:
        """Return the rejection of a body over the size limit."""
        return cls(413, detail, "too_large")

    @classmethod
    def busy(cls, detail: str, reason: str) -> Self:
        """Return the rejection of a request that should be retried."""
        return cls(503, detail, reason, retry_after_s=_RETRY_AFTER_S)

    def body(self) -> bytes:
        """Return the problem body (``application/problem+json``)."""
        title = HTTPStatus(self.status).phrase
        return json.dumps(
            {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail}
        ).encode()

    def headers(self) -> dict[str, str]:
        """Return the headers that go with the status."""
        headers = {"Content-Type": "application/problem+json"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = 'Bearer realm="predrain"'
        return headers
