"""The lines of a page, read one by one: those of known series quickly, all others by the grammar."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from telemetry.exposition.grammar import END_OF_PAGE, parse_line, read_value
from telemetry.exposition.labels import read_series
from telemetry.exposition.scanned import AFTER_END, CUT, NOT_UTF8, TOO_LONG, TOO_MANY_SERIES, Limits
from telemetry.exposition.series_texts import PLAIN_HEAD, FullError, SeriesTexts, has_plain_labels
from telemetry.exposition.tokens import GrammarError

DIGITS: Final = b"0123456789.+-eE"
"""What a plain number is written with; of these letters ``float`` takes exactly what the grammar takes."""

LONGEST_NUMBER: Final = 40
"""A plain number is no longer than this."""

_STAMPED: Final = re.compile(rb"([0-9.+\-eE]{1,40}) ([0-9]{1,15})(?:\.([0-9]{1,3}))?")
_PLAIN_COMMENT: Final = re.compile(
    rb"# (?:HELP [a-zA-Z_:][a-zA-Z0-9_:]*(?: .*)?|TYPE [a-zA-Z_:][a-zA-Z0-9_:]* (?:gauge|counter|histogram|summary))"
)
_END: Final = END_OF_PAGE.encode()


@dataclass(slots=True)
class Lines:
    """What is gathered of a page.

    ``keys``, ``texts``, ``values``: of each sample the series, the number as written, and the number.
    ``heads``: of each line what stands before its number; a comment, and a line that cannot be read, is all head.
    ``is_regular``: whether each line is its head and then its number, and no more.
    ``ended``: whether there was a line ``# EOF``.
    ``problems``: lines that could not be read, by reason.
    """

    keys: list[int] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    stamps: dict[int, int] = field(default_factory=dict)
    heads: list[bytes] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    is_regular: bool = True
    ended: bool = False
    problems: Counter[str] = field(default_factory=Counter)

    def add(self, key: int, head: bytes, text: bytes, value: float) -> None:
        """Take a sample."""
        self.keys.append(key)
        self.places.append(len(self.heads))
        self.heads.append(head)
        self.texts.append(text)
        self.values.append(value)


class LineReader:
    """Reads the lines of one target's pages.

    ``limits``: how long a line may be.
    """

    def __init__(self, series: SeriesTexts, limits: Limits) -> None:
        self._series = series
        self._limits = limits
        self._openmetrics = False

    def read(self, lines: list[bytes], *, openmetrics: bool) -> Lines:
        """Read lines that are whole, without their line ends."""
        if openmetrics != self._openmetrics:
            # A series that one format allows may be wrong in the other.
            self._series.forget()
            self._openmetrics = openmetrics
        self._series.begin_page()
        try:
            return self._read(lines)
        except FullError:
            self._series.forget()
            return self._read(lines)

    def read_open(self, line: bytes, found: Lines, *, whole: bool) -> None:
        """Read a page's last line, which lacks its line end.

        ``line``: the line; it is not empty.
        """
        if found.ended:
            found.problems[AFTER_END] += 1
        elif self._openmetrics and line == _END:
            found.ended = True
        elif self._openmetrics or not whole:
            found.problems[CUT] += 1
        else:
            try:
                self._read_odd(line, found)
            except GrammarError:
                found.problems[CUT] += 1
            except FullError:
                found.problems[TOO_MANY_SERIES] += 1

    def _read(self, lines: list[bytes]) -> Lines:
        found = Lines()
        key_of = self._series.keys.get
        # One call a line would take longer than all that the line needs.
        add_key, add_place, add_head = found.keys.append, found.places.append, found.heads.append
        add_text, add_value, heads = found.texts.append, found.values.append, found.heads
        for line in lines:
            cut = line.rfind(b"} ") + 2
            if cut == 1:
                cut = line.find(b" ") + 1
            head = line[:cut]
            key = key_of(head)
            if key is not None and not found.ended:
                text = line[cut:]
                try:
                    if len(text) <= LONGEST_NUMBER and not text.translate(None, DIGITS):
                        add_value(float(text))
                        add_key(key)
                        add_place(len(heads))
                        add_head(head)
                        add_text(text)
                        continue
                    if self._read_stamped(key, head, text, found):
                        continue
                except ValueError:
                    pass  # the grammar says what is wrong with it
            self._read_other(line, found)
        return found

    def _read_stamped(self, key: int, head: bytes, text: bytes, found: Lines) -> bool:
        """Read a number and a time stamp in the plainest form, as dumps of whole databases have them."""
        match = _STAMPED.fullmatch(text)
        if match is None:
            return False
        value, whole, fraction = match.groups()
        if self._openmetrics:
            ms = int(whole) * 1000 + (int(fraction.ljust(3, b"0")) if fraction else 0)
        elif fraction is None:
            ms = int(whole)
        else:
            return False
        number = float(value)
        found.stamps[len(found.keys)] = ms
        found.is_regular = False
        found.add(key, head, value, number)
        return True

    def _read_other(self, line: bytes, found: Lines) -> None:
        """Read a line that is no plain number of a known series: a comment, something new or something wrong."""
        if found.ended:
            found.problems[AFTER_END] += 1
            found.is_regular = False
        elif self._openmetrics and line == _END:
            found.ended = True
            found.heads.append(line)
        elif _PLAIN_COMMENT.fullmatch(line) and line.isascii():
            found.heads.append(line)
        elif len(line) > self._limits.line_bytes:
            found.problems[TOO_LONG] += 1
            found.is_regular = False
        else:
            try:
                self._read_odd(line, found)
            except GrammarError as error:
                found.problems[error.reason] += 1
                found.heads.append(line)

    def _read_odd(self, line: bytes, found: Lines) -> None:
        if self._read_new(line, found):
            return
        try:
            decoded = line.decode()
        except UnicodeDecodeError:
            raise GrammarError(NOT_UTF8, 1, 1) from None
        if decoded.lstrip(" \t")[:1] in ("", "#"):
            parse_line(decoded, openmetrics=self._openmetrics)
            found.heads.append(line)
            return
        _, _, end = read_series(decoded, openmetrics=self._openmetrics)
        text, timestamp_ms = read_value(decoded, end, openmetrics=self._openmetrics)
        head = decoded[:end].encode() + b" "
        if head + text.encode() != line:
            found.is_regular = False
        self._take(head, text.encode(), float(text), timestamp_ms, found)

    def _read_new(self, line: bytes, found: Lines) -> bool:
        """Read the plainest form of a series that is new, which is how all series of an exporter begin."""
        match = PLAIN_HEAD.match(line)
        if match is None or not line.isascii():
            return False
        head, text = match.group(), line[match.end() :]
        if len(text) > LONGEST_NUMBER or text.translate(None, DIGITS) or not has_plain_labels(head):
            return False
        try:
            value = float(text)
        except ValueError:
            return False
        self._take(head, text, value, None, found)
        return True

    def _take(self, head: bytes, text: bytes, value: float, timestamp_ms: int | None, found: Lines) -> None:
        key = self._series.keys.get(head)
        if key is None:
            key = self._series.add(head)
        if key is None:
            found.problems[TOO_MANY_SERIES] += 1
            found.is_regular = False
            return
        if timestamp_ms is not None:
            found.stamps[len(found.keys)] = timestamp_ms
        found.add(key, head, text, value)
