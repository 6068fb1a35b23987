"""A page's body as it arrives: unpacked piece by piece, and refused as soon as it is over its bounds."""

from __future__ import annotations

import zlib

from telemetry.exporters.failures import ScrapeError

_GZIP = 16 + zlib.MAX_WBITS
_AUTO = 32 + zlib.MAX_WBITS
_PIECE = 1 << 18
_SMALL = 1 << 20


class MemoryBudget:
    """Bytes of all pages that are under way in one process.

    ``limit``: past it, pages of more than 1 MiB are refused.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class BodyReader:
    """Collects one body.

    ``encoding``: ``Content-Encoding`` of the answer; gzip, deflate or none.
    ``max_bytes``, ``max_lines``: bounds of the unpacked body. They are checked before more is unpacked, so a bomb costs
    no memory.
    Raises ``ScrapeError`` if the encoding is unknown.
    """

    def __init__(self, encoding: str, *, max_bytes: int, max_lines: int, budget: MemoryBudget) -> None:
        encoding = encoding.strip().lower()
        self._inflate = None
        if encoding in ("gzip", "x-gzip"):
            self._inflate = zlib.decompressobj(_GZIP)
        elif encoding == "deflate":
            self._inflate = zlib.decompressobj(_AUTO)
        elif encoding not in ("", "identity"):
            raise ScrapeError("protocol", f"the page is encoded as {encoding[:40]!r}, which was not asked for")
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._budget = budget
        self._pieces: list[bytes] = []
        self._size = 0
        self._lines = 0

    def feed(self, data: bytes) -> None:
        """Take what arrived.

        Raises ``ScrapeError`` if the page is over a bound, or packed wrongly.
        """
        if self._inflate is None:
            self._keep(data)
            return
        try:
            while data:
                if self._inflate.eof:  # a further member follows, as the format allows
                    self._inflate = zlib.decompressobj(_GZIP)
                self._keep(self._inflate.decompress(data, _PIECE))
                data = self._inflate.unconsumed_tail or self._inflate.unused_data
        except zlib.error as error:
            raise ScrapeError("protocol", f"the page cannot be unpacked: {error}") from None

    def finish(self) -> bytes:
        """Return the whole body.

        Raises ``ScrapeError`` if a packed body ended early.
        """
        if self._inflate is not None and not self._inflate.eof:
            raise ScrapeError("truncated", f"the packed page ends early, after {self._size} bytes unpacked")
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def close(self) -> None:
        """Give the bytes back to the budget."""
        self._budget.used -= self._size
        self._size = 0
        self._pieces = []

    def _keep(self, piece: bytes) -> None:
        if not piece:
            return
        self._size += len(piece)
        self._budget.used += len(piece)
        if self._size > self._max_bytes:
            raise ScrapeError("too_large", f"the page has more than {self._max_bytes} bytes")
        self._lines += piece.count(b"\n")
        if self._lines > self._max_lines:
            raise ScrapeError("too_large", f"the page has more than {self._max_lines} lines")
        if self._size > _SMALL and self._budget.used > self._budget.limit:
            raise ScrapeError("too_large", f"all pages under way have more than {self._budget.limit} bytes together")
        self._pieces.append(piece)
