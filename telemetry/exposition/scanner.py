"""Exporter pages at the pace of a fleet: what was read on the last page is not read again.

A page hardly changes between two scrapes but for its numbers. The scanner keeps the text before each line's number (its
*head*: name, labels and one blank). If every line of the next page begins with the head of the same line before, only
the numbers are left to read, and that is a handful of calls into C for the whole page. Otherwise each line's head is
looked up on its own; a head never seen before, and a line whose rest is not simply a number, go through
:mod:`telemetry.exposition.grammar`, which decides what they are.

That is exact: the grammar is read from left to right, so that a line beginning with a whole series and a blank is of
that series whatever follows, and what follows is only read here if ``float`` and the grammar agree on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np

from telemetry.exposition.grammar import is_openmetrics
from telemetry.exposition.lines import DIGITS, LONGEST_NUMBER, LineReader, Lines
from telemetry.exposition.scanned import CUT, NO_END, NO_TIMESTAMP, TOO_MANY_LINES, Limits, Scanned
from telemetry.exposition.series_texts import SeriesTexts

__all__ = ["NO_TIMESTAMP", "Limits", "Scanned", "Scanner"]

_PLAIN: Final = DIGITS + b"\n"
_NOT_FINITE: Final = b"NaInf"
_SIGNED_NAN: Final = re.compile(rb"[+-][nN]")
# An exporter that walks over a hash table of groups of metrics gives the groups in one of a few orders.
_LAYOUTS_KEPT: Final = 4
# Comments of a page that are kept with its layout; the stock exporter's are 5 kB.
_COMMENT_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Layout:
    """A page without its numbers: of each line the head, and the slice of what follows it.

    A line that could not be read is all head, so that the same line again is the same problem again.
    """

    heads: list[bytes]
    tails: list[slice]
    values_of: Callable[[list[bytes]], tuple[bytes, ...]]
    keys: list[int]
    is_openmetrics: bool
    problems: dict[str, int]


class Scanner:
    """Reads the pages of one target.

    ``limits``: what a page may cost.

    Not for use by several threads at once. A scanner holds at most ``limits.series_bytes`` of series, and 1 MB of
    comments.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self._series = SeriesTexts(self.limits)
        self._reader = LineReader(self._series, self.limits)
        self._layouts: list[_Layout] = []
        self._last_keys: list[int] = []

    def scan(self, page: bytes, *, openmetrics: bool | None = None, whole: bool = True) -> Scanned:
        """Read a page.

        ``openmetrics``: which format it is, as the Content-Type says. Default: OpenMetrics if it has a line ``# EOF``.
        ``whole``: whether the transport delivered the body to its end. If not, a last line without line end is not
        trusted.
        """
        lines = page.split(b"\n", self.limits.lines)
        for layout in self._layouts:
            if len(lines) == len(layout.heads) and openmetrics in (None, layout.is_openmetrics):
                known = _scan_known(lines, layout, whole)
                if known is not None:
                    return known
        if openmetrics is None:
            openmetrics = is_openmetrics(page)
        if b"\r" in page:
            page = page.replace(b"\r\n", b"\n")
            lines = page.split(b"\n", self.limits.lines)
        rest = lines.pop()
        last, over = (rest, 0) if len(lines) < self.limits.lines else (b"", rest.count(b"\n"))
        if not last and rest and not rest.endswith(b"\n"):
            over += 1
        kept_since = self._series.base
        found = self._reader.read(lines, openmetrics=openmetrics)
        if self._series.base != kept_since:
            self._layouts = []
        if last:
            self._reader.read_open(last, found, whole=whole)
        if over:
            found.problems[TOO_MANY_LINES] += over
            found.ended = found.ended or page.rstrip(b"\n").endswith(b"\n# EOF")
        if openmetrics and not found.ended:
            found.problems[NO_END] += 1
        complete = whole and (found.ended or not openmetrics) and CUT not in found.problems
        if last or over:
            found.is_regular = False
        return self._finish(found, openmetrics, complete)

    def labels(self, key: int) -> tuple[str, dict[str, str]]:
        """Return the metric name and the labels of a series.

        ``key``: of :attr:`Scanned.keys` of the last page. Keys are never given again to another series.
        Raises ``KeyError`` if the series was dropped since, to make room for others.
        """
        return self._series.labels(key)

    def _finish(self, found: Lines, openmetrics: bool, complete: bool) -> Scanned:
        if found.keys != self._last_keys:
            self._last_keys = found.keys
        keys = self._last_keys
        if found.is_regular and complete and len(keys) > 1:
            layout = _layout(found, keys, self._series, openmetrics)
            if layout is not None:
                self._layouts = [layout, *self._layouts[: _LAYOUTS_KEPT - 1]]
        timestamps_ms = None
        if found.stamps:
            timestamps_ms = np.full(len(keys), NO_TIMESTAMP, np.int64)
            timestamps_ms[list(found.stamps)] = list(found.stamps.values())
        values = np.array(found.values, np.float64)
        return Scanned(keys, values, timestamps_ms, found.texts, openmetrics, complete, dict(found.problems))


def _scan_known(lines: list[bytes], layout: _Layout, whole: bool) -> Scanned | None:
    """Read a page of a known layout, or return None if it is not of this one, or if a number is not plain."""
    if not all(map(bytes.startswith, lines, layout.heads)):
        return None
    tails = [line[tail] for line, tail in zip(lines, layout.tails, strict=True)]
    texts = layout.values_of(tails)
    joined = b"\n".join(texts)
    letters = joined.translate(None, _PLAIN)
    if (
        len(tails) - tails.count(b"") != len(texts)  # a comment became longer, or a number is missing
        or (letters and (letters.translate(None, _NOT_FINITE) or _SIGNED_NAN.search(joined)))
        or max(map(len, texts)) > LONGEST_NUMBER
    ):
        return None
    try:
        values = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:  # also where a number is missing and a comment longer
        return None
    return Scanned(layout.keys, values, None, texts, layout.is_openmetrics, whole, dict(layout.problems))


def _layout(found: Lines, keys: list[int], series: SeriesTexts, openmetrics: bool) -> _Layout | None:
    heads = [*found.heads, b""]  # what stands after the last line end
    for place in found.places:
        heads[place] = b""
    if sum(map(len, heads)) > _COMMENT_BYTES:
        return None
    for place, key in zip(found.places, keys, strict=True):
        heads[place] = series.text(key)  # the same text, kept once
    slices: dict[int, slice] = {}
    tails = [slices.setdefault(len(head), slice(len(head), None)) for head in heads]
    return _Layout(heads, tails, itemgetter(*found.places), keys, openmetrics, dict(found.problems))
