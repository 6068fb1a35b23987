"""One answer of one target, fetched within bounds of time and memory."""

from contextlib import suppress
from typing import Final, Literal

from foundation.errors import InputError
from foundation.http import BodyTooLarge, Connection, HttpError, HttpResponse, NoAnswerInTime, async_client, exchange

FailureKind = Literal["unreachable", "timeout", "tls", "status", "truncated", "too_large", "protocol", "parse", "empty"]
"""Kinds of failed scrapes.

``unreachable``: no server, no such name, connection lost. ``status``: other than 200, redirects among them.
``truncated``: the page ends early. ``too_large``: over a bound of bytes or rows. ``protocol``: no plain or whole HTTP.
``parse``: not an answer of this source. ``empty``: no series of any device.
"""

PAGE_BYTES: Final = 8 << 20
"""Maximum size of one answer."""

PAGES_BYTES: Final = 256 << 20
"""Maximum size of all answers that are being read: the bound on memory."""

_ACCEPT: Final = (
    "text/plain;version=0.0.4, application/json;q=0.9, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1"
)


class ScrapeError(Exception):
    """A scrape without a usable answer; ``detail`` is one line without secrets and without parts of the answer."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class Scraper:
    """Fetches answers; ``connection`` gives credentials and trust for every target.

    Each scrape has a connection of its own: one pool over a thousand targets is searched as a whole for each request.
    """

    def __init__(self, connection: Connection, *, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._headers = connection.request_headers()
        self._tls = connection.tls()
        self._held_bytes = 0

    async def fetch(self, url: str) -> HttpResponse:
        """Return the answer at ``url``; raises ScrapeError."""
        with suppress(InputError):  # during a rotation the old credentials are used
            self._headers = self._connection.request_headers()
        timeout_s, held_bytes = self._timeout_s, 0

        def hold(size: int) -> None:
            nonlocal held_bytes
            held_bytes, self._held_bytes = held_bytes + size, self._held_bytes + size
            if self._held_bytes > PAGES_BYTES:
                raise ScrapeError("too_large", f"all pages under way have more than {PAGES_BYTES:,} bytes")

        try:
            async with async_client(self._connection, timeout_s=timeout_s, use_proxies=False, tls=self._tls) as client:
                headers = {"Accept": _ACCEPT, **self._headers}
                answer = await exchange(
                    client, "GET", url, timeout_s=timeout_s, max_bytes=PAGE_BYTES, hold=hold, headers=headers
                )
        except NoAnswerInTime:
            raise ScrapeError("timeout", f"no whole page within {timeout_s:g} s") from None
        except BodyTooLarge as error:
            raise ScrapeError("too_large", str(error)) from None
        except InputError as error:
            raise ScrapeError("tls", error.what) from None
        except HttpError as error:
            text = str(error).splitlines()[0][:160]
            is_reached = text.startswith(("RemoteProtocolError", "the answer is compressed"))
            raise ScrapeError("protocol" if is_reached else "unreachable", text) from error
        finally:
            self._held_bytes -= held_bytes
        if answer.status != 200:
            raise ScrapeError("status", f"HTTP status {answer.status}")
        return answer
