"""PromQL range selectors: a metric, what it must match, how far back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from telemetry.errors import InputError

_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")


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
    parts = [f"__name__={quoted(metric)}", *(each for each in matchers if each)]
    return "{" + ",".join(parts) + "}"


def ranged(chosen: str, length_ms: int) -> str:
    """Return the range selector over ``length_ms`` before the query's time."""
    return f"{chosen}[{length_ms}ms]"


def quoted(text: str) -> str:
    """Return a PromQL string; its escapes are those of JSON for whatever a label may hold."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")


def one_of(label: str, values: Iterable[str], *, negated: bool = False) -> str:
    r"""Return the matcher for a label having one of some values, or none of them; an empty value is an absent label.

    Examples
    --------
    >>> one_of("Hostname", ["n1", "n2.x"])
    'Hostname=~"n1|n2\\\\.x"'
    """
    if not _LABEL.match(label):
        raise ValueError(f"{label!r} cannot be written in a matcher")
    pattern = "|".join(_SPECIAL.sub(r"\\\1", value) for value in values)
    return f"{label}{'!~' if negated else '=~'}{quoted(pattern)}"


def can_match(label: str) -> bool:
    """Whether a label's name can stand in a matcher of every server."""
    return _LABEL.match(label) is not None and label != "__name__"
