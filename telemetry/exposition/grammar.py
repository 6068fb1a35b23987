r"""The text formats of Prometheus (0.0.4) and OpenMetrics (1.0), read strictly and one token at a time.

Sources: Prometheus' "Exposition formats" (text-based format, and the quoted UTF-8 names of Prometheus 3) and the ABNF
of the OpenMetrics 1.0 specification. What a line means is checked here, not what a family of lines means: that a
counter's samples end in ``_total``, that families do not interleave, or that an exemplar stands on a bucket is nothing
that reading numbers depends on.

Where the two documents leave room:

- a line may end in CRLF, and the last line of a 0.0.4 page may lack its line end;
- a backslash before any other character than ``\\``, ``"`` and ``n`` stands for itself, as OpenMetrics says;
- ``{__name__="up"} 1`` names its metric by a label, as other writers of series do;
- OpenMetrics time stamps finer than a millisecond are cut towards the past.

This is the reference that :mod:`telemetry.exposition.scanner` is tested against, and its way for lines that are odd.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from telemetry.exposition.labels import METRIC, read_labels, read_series
from telemetry.exposition.tokens import (
    INT64,
    QUOTED,
    GrammarError,
    read_number,
    read_seconds,
    read_token,
    separator,
    skip,
)

_MILLISECONDS = re.compile(r"[+-]?[0-9]{1,19}\Z")
_TYPES_PLAIN = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})
_TYPES_OPENMETRICS = frozenset(
    {"counter", "gauge", "histogram", "gaugehistogram", "stateset", "info", "summary", "unknown"}
)
END_OF_PAGE: Final = "# EOF"
"""The line that ends an OpenMetrics page."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a page.

    ``value``: the number; NaN and infinities are allowed.
    ``timestamp_ms``: milliseconds since 1970-01-01 UTC; None where the line has no time stamp.
    """

    name: str
    labels: dict[str, str]
    value: float
    timestamp_ms: int | None


def is_openmetrics(text: str | bytes) -> bool:
    """Tell whether a page of unknown type is OpenMetrics: whether it has a line ``# EOF``."""
    if isinstance(text, bytes):
        at = text.find(b"# EOF")
        while at >= 0:
            if (at == 0 or text[at - 1] == 10) and text[at + 5 : at + 6] in (b"", b"\n", b"\r"):
                return True
            at = text.find(b"# EOF", at + 1)
        return False
    return is_openmetrics(text.encode("utf-8", "surrogatepass"))


def parse_page(text: str, *, openmetrics: bool | None = None) -> list[Sample]:
    """Read a whole page, refusing it at its first fault.

    ``openmetrics``: which format it is, as the Content-Type says. Default: OpenMetrics if it has a line ``# EOF``.
    Returns: in the order of the lines.
    Raises ``GrammarError`` with line and column: a line is not of the format; an OpenMetrics page does not end in ``#
    EOF``, has text after it, or has a blank line.
    """
    if openmetrics is None:
        openmetrics = is_openmetrics(text)
    samples: list[Sample] = []
    ended = False
    lines = text.split("\n")
    for number, raw in enumerate(lines, start=1):
        line = raw.removesuffix("\r") if number < len(lines) else raw
        last = number == len(lines) and not line
        if last:
            break
        if ended:
            raise GrammarError("text after # EOF", number, 1, line)
        if openmetrics and line == END_OF_PAGE:
            ended = True
            continue
        sample = parse_line(line, number, openmetrics=openmetrics)
        if sample is not None:
            samples.append(sample)
    if openmetrics and not ended:
        raise GrammarError("the page does not end in # EOF", len(lines), len(lines[-1]) + 1)
    return samples


def parse_line(line: str, number: int = 1, *, openmetrics: bool = False) -> Sample | None:
    """Read one line without its line end.

    Returns: none for a comment, and in format 0.0.4 for a blank line.
    Raises ``GrammarError`` if the line is not of the format.
    """
    start = 0 if openmetrics else skip(line, 0)
    if start == len(line) or (openmetrics and not line.strip()):
        if openmetrics:
            raise GrammarError("blank line", number, 1)
        return None
    if line[start] == "#":
        check_comment(line, number, openmetrics=openmetrics)
        return None
    name, labels, end = read_series(line, number, openmetrics=openmetrics)
    number_text, timestamp_ms = read_value(line, end, number, openmetrics=openmetrics)
    return Sample(name, labels, float(number_text), timestamp_ms)


def check_comment(line: str, number: int = 1, *, openmetrics: bool = False) -> None:
    """Check a line that begins with ``#``.

    Raises ``GrammarError`` if a TYPE, HELP or UNIT line lacks its metric name, or a type is unknown. Format 0.0.4
    allows any other comment, OpenMetrics none.
    """
    words = line.split(" ", 3) if openmetrics else line.split(None, 3)
    keyword = words[1] if len(words) > 1 else ""
    known = {"HELP", "TYPE", "UNIT"} if openmetrics else {"HELP", "TYPE"}
    if words[0] != "#" or keyword not in known:
        if openmetrics:
            raise GrammarError("comment that OpenMetrics does not know", number, 1, line)
        return
    start = line.find(keyword) + len(keyword)
    at = start + 1 if openmetrics else skip(line, start)
    match = METRIC.match(line, at) or QUOTED.match(line, at)
    if match is None or not (match.end() == len(line) or line[match.end()] in " \t"):
        raise GrammarError(f"{keyword} without a metric name", number, min(at, len(line)) + 1, line)
    if keyword == "TYPE":
        kind = line[match.end() :].strip()
        if kind not in (_TYPES_OPENMETRICS if openmetrics else _TYPES_PLAIN):
            raise GrammarError("unknown metric type", number, match.end() + 2, kind or line)


def read_value(line: str, end: int, number: int = 1, *, openmetrics: bool = False) -> tuple[str, int | None]:
    """Read what stands after the series: the value, a time stamp, an exemplar.

    Returns ``text``: the value as it is written; ``float(text)`` is the number.
    Raises ``GrammarError`` if the value or the time stamp is no number, or if more follows.
    """
    at = separator(line, end, number, openmetrics=openmetrics)
    text, at = read_number(line, at, number, "value")
    if openmetrics:
        if at == len(line):
            return text, None
        timestamp_ms = None
        at = separator(line, at, number, openmetrics=True)
        if not line.startswith("#", at):
            timestamp_ms, at = read_seconds(line, at, number)
            if at == len(line):
                return text, timestamp_ms
            at = separator(line, at, number, openmetrics=True)
        _check_exemplar(line, at, number)
        return text, timestamp_ms
    at = skip(line, at)
    if at == len(line):
        return text, None
    token = read_token(line, at)
    if not _MILLISECONDS.match(token) or not -INT64 <= int(token) < INT64:
        raise GrammarError("time stamp is not whole milliseconds", number, at + 1, token)
    rest = skip(line, at + len(token))
    if rest != len(line):
        raise GrammarError("text after the time stamp", number, rest + 1, line[rest:])
    return text, int(token)


def _check_exemplar(line: str, at: int, number: int) -> None:
    if not line.startswith("# {", at):
        raise GrammarError("text after the time stamp", number, at + 1, line[at:])
    if line.startswith("}", at + 3):
        end = at + 4
    else:
        _, _, end = read_labels(line, at + 2, number, openmetrics=True, named=True)
    at = separator(line, end, number, openmetrics=True)
    _, at = read_number(line, at, number, "exemplar's value")
    if at < len(line):
        at = separator(line, at, number, openmetrics=True)
        _, at = read_seconds(line, at, number)
    if at < len(line):
        raise GrammarError("text after the exemplar", number, at + 1, line[at:])
