"""The series of one target, by the text that stands for each of them on its pages."""

from __future__ import annotations

import re
from typing import Final

from telemetry.exposition.labels import read_series
from telemetry.exposition.scanned import Limits

_PAIR: Final = rb'[a-zA-Z_][a-zA-Z0-9_]*="[^"\\]*"'
PLAIN_HEAD: Final = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{(?:" + _PAIR + rb"(?:," + _PAIR + rb")*)?\})? ")
"""A series as exporters write it, and one blank: of both formats, without escapes, blanks or quoted names."""

_LABEL_OF: Final = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\]*)"')
_FORGET_EVERY: Final = 20


class FullError(Exception):
    """There is no room for another series, but some of those kept are of earlier pages: forget them and read again."""


class SeriesTexts:
    """Keys for series' texts, as many as the limits allow.

    ``limits``: how many series, and how many bytes of text.
    ``base``: the lowest key that is not forgotten.

    When there is no more room, everything is forgotten, so that series which are long gone make room for those of the
    page being read. That happens at most every 20 pages: an exporter with ever new label values loses the new ones,
    and not the old.
    """

    def __init__(self, limits: Limits) -> None:
        self.keys: dict[bytes, int] = {}
        self._limits = limits
        self._texts: list[bytes] = []
        self.base = 0
        self._bytes = 0
        self._at_page_start = 0
        self._pages = _FORGET_EVERY

    def begin_page(self) -> None:
        """Tell that another page begins."""
        self._pages += 1
        self._at_page_start = len(self._texts)

    def add(self, text: bytes) -> int | None:
        """Give a series a key.

        Returns: none if there is no room.
        Raises ``FullError`` if :meth:`forget` would make room.
        """
        if len(self._texts) >= self._limits.series or self._bytes + len(text) > self._limits.series_bytes:
            if self._at_page_start and self._pages >= _FORGET_EVERY:
                raise FullError
            return None
        key = self.base + len(self._texts)
        self.keys[text] = key
        self._texts.append(text)
        self._bytes += len(text)
        return key

    def forget(self) -> None:
        """Drop all series; their keys are never given again."""
        self.base += len(self._texts)
        self.keys.clear()
        self._texts = []
        self._bytes = self._at_page_start = self._pages = 0

    def text(self, key: int) -> bytes:
        """Return the text of a series; a KeyError if it was dropped."""
        place = key - self.base
        if not 0 <= place < len(self._texts):
            raise KeyError(key)
        return self._texts[place]

    def labels(self, key: int) -> tuple[str, dict[str, str]]:
        """Return the metric name and the labels of a series; a KeyError if it was dropped."""
        text = self.text(key)
        if PLAIN_HEAD.fullmatch(text):
            name = text[: text.find(b"{")] if text.endswith(b"} ") else text[:-1]
            return name.decode(), {label.decode(): value.decode() for label, value in _LABEL_OF.findall(text)}
        written_name, labels, _ = read_series(text.decode())
        return written_name, labels


def has_plain_labels(head: bytes) -> bool:
    """Tell whether no label of a :data:`PLAIN_HEAD` is given twice, and none is the metric's name."""
    names = [label for label, _ in _LABEL_OF.findall(head)]
    return len(set(names)) == len(names) and b"__name__" not in names
