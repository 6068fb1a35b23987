"""Writing PromQL: selectors of metrics, and the matchers that a user gives for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable

from telemetry.errors import InputError


def check_match(match: str | None) -> str:
    """Return the matchers of ``--match`` without their braces; an empty text where there are none.

    Raises ``InputError`` if the text is not in braces, or holds a metric's name before them.
    """
    if match is None or not match.strip():
        return ""
    text = match.strip()
    if not (text.startswith("{") and text.endswith("}")):
        raise InputError(
            f"{text!r} is not a list of matchers", "--match", 'Write it in braces, such as {job="dcgm-exporter"}.'
        )
    return text[1:-1].strip().rstrip(",").strip()


def selector(metric: str, matchers: Iterable[str] = ()) -> str:
    """Return an instant selector of a metric; any name will do, dots and colons included.

    Examples
    --------
    >>> selector("up", ['job="dcgm"'])
    '{__name__="up",job="dcgm"}'
    """
    parts = [f"__name__={quoted(metric)}", *filter(None, matchers)]
    return "{" + ",".join(parts) + "}"


def quoted(text: str) -> str:
    """Return a PromQL string; its escapes are those of JSON for whatever a label may hold."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
