"""The ways in which a scrape fails."""

from __future__ import annotations

from typing import Final, Literal, get_args

FailureKind = Literal[
    "refused",
    "unreachable",
    "timeout",
    "tls",
    "status",
    "redirect",
    "truncated",
    "too_large",
    "protocol",
    "parse",
    "empty",
]
"""Kinds of failed scrapes.

``refused``: nobody listens. ``unreachable``: no route, no such name, connection lost. ``timeout``: no whole answer in
time. ``tls``: no trusted connection. ``status``: an HTTP status other than 200. ``redirect``: sent to another host.
``truncated``: the body ended early. ``too_large``: over the bound of bytes or lines. ``protocol``: no HTTP.
``parse``: no page of an exporter. ``empty``: a page without a series of any device.
"""

FAILURE_KINDS: Final[tuple[FailureKind, ...]] = get_args(FailureKind)


class ScrapeError(Exception):
    """A scrape that gave no usable page.

    ``detail``: one line for people; holds no secret and no part of the page.
    ``retry_after_s``: seconds that the server asked to be left alone (429 and 503 with ``Retry-After``).
    """

    def __init__(self, kind: FailureKind, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s
