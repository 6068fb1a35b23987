"""What a server's refusal means: ask for less, ask again later, or tell the user."""

from __future__ import annotations

import email.utils
import json
import re
from datetime import datetime
from typing import Final, Literal

from telemetry.errors import InputError
from telemetry.prometheus.answer import shown

Meaning = Literal["too much", "later", "wrong"]
"""``too much``: less at a time may be given; ``later``: the same may be given then; ``wrong``: never."""

MAX_RETRY_AFTER_S: Final = 300.0
"""A server may ask for patience up to this long; more is taken as this much."""

# Prometheus: "query processing would load too many samples into memory", "query timed out".
# VictoriaMetrics: "cannot select more than -search.maxSamplesPerQuery", "the number of matching timeseries exceeds".
# Mimir, Cortex and Thanos: "the query exceeded the maximum number of chunks", "the query time range exceeds the limit",
# "exceeded series limit", "ResourceExhausted".
_TOO_MUCH = re.compile(
    r"too many (?:samples|points|series|chunks|bytes)|exceed|select more than|more than -search|timed out"
    r"|deadline|resource ?exhausted|\blimit\b|too (?:large|long|big)|not enough memory",
    re.IGNORECASE,
)
# A part of the server that cannot be reached is not asked for less: Thanos names it in a 422.
_UNREACHABLE = re.compile(
    r"code = Unavailable|connection (?:refused|reset)|no such host|no route to host", re.IGNORECASE
)
_SHOWN: Final = 300
_LESS = (413, 504)
_RETRIED = (200, 408, 425, 429, 500, 502, 503)


class TooMuch(Exception):
    """The server gives this answer only in smaller pieces; the text is its own."""


class Later(Exception):
    """The server cannot answer now."""

    def __init__(self, text: str, after_s: float | None = None) -> None:
        super().__init__(text)
        self.after_s = after_s


def meaning_of(status: int, text: str) -> Meaning:
    """Say what an error means.

    ``status``: HTTP status; 200 for an answer whose own status is an error.
    """
    if status in _LESS:
        return "too much"
    if status == 429:
        # Also "too many outstanding requests": less at a time does not help, waiting does.
        return "later"
    if _UNREACHABLE.search(text):
        return "later"
    if status not in (401, 403, 404) and _TOO_MUCH.search(text):
        return "too much"
    return "later" if status in _RETRIED or status > 504 else "wrong"


def refuse(status: int, body: bytes, *, url: str, retry_after: str | None, now: datetime) -> None:
    """Raise what an answer other than a good one means."""
    whole = said(body)
    # VictoriaMetrics names the query before the reason, which the meaning hangs on: shortened only where it is shown.
    text = whole if len(whole) <= _SHOWN else f"{whole[: _SHOWN // 3]} … {whole[-2 * _SHOWN // 3 :]}"
    if status == 401:
        raise InputError(
            f"the server asks who we are (HTTP 401: {text})",
            url,
            "Give --bearer-token-file or --basic-auth-file; if one was given, renew what it holds.",
        )
    if status == 403:
        raise InputError(
            f"the server does not let us read (HTTP 403: {text})",
            url,
            "Ask for the right to query, or use another login.",
        )
    if status == 404:
        raise InputError(
            f"there is no Prometheus API here (HTTP 404: {text})",
            url,
            "Give the address with its path prefix, for instance http://vmselect:8481/select/0/prometheus.",
        )
    meaning = meaning_of(status, whole)
    if meaning == "too much":
        raise TooMuch(text)
    if meaning == "later":
        raise Later(f"HTTP {status}: {text}", waiting_time(retry_after, now))
    raise InputError(
        f"the server refuses the query (HTTP {status}: {text})", url, "Check --match, --start and --end against it."
    )


def said(body: bytes) -> str:
    """Return the error text of an answer: its own if it is one of the API, else its beginning."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if isinstance(document, dict) and document.get("error"):
        return str(document["error"])
    return shown(body) if body.strip() else "nothing said"


def waiting_time(header: str | None, now: datetime) -> float | None:
    """Return the seconds that a Retry-After header asks for: a number or a date, at most :data:`MAX_RETRY_AFTER_S`."""
    if header is None:
        return None
    text = header.strip()
    if text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        return None
    return min(max(0.0, (when - now).total_seconds()), MAX_RETRY_AFTER_S)
