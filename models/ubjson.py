"""UBJSON read strictly: every length is checked against what is there before anything is taken from it.

XGBoost's own reader trusts the lengths in a file and aborts the process where one is wrong; this one does not. It
reads what XGBoost 3 writes: objects, arrays (typed or not), strings, booleans, null and numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MOST_DEPTH = 32
_NUMBERS: dict[int, str] = {
    ord("i"): ">i1", ord("U"): ">u1", ord("I"): ">i2", ord("l"): ">i4", ord("L"): ">i8", ord("d"): ">f4",
    ord("D"): ">f8",
}  # fmt: skip


def read_ubjson(content: bytes) -> Any:
    """Read one document.

    Raises ``ValueError`` if it is cut off, longer than the document, nested too deeply, or holds what XGBoost does not
    write; with the position.
    """
    reader = _Reader(content)
    found = reader.value(0)
    if reader.at != len(content):
        raise ValueError(f"{len(content) - reader.at} bytes too many at byte {reader.at}")
    return found


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def value(self, depth: int, marker: int | None = None) -> Any:
        if depth > _MOST_DEPTH:
            raise self._wrong("nested too deeply")
        marker = self._byte() if marker is None else marker
        if marker == ord("{"):
            return self._object(depth)
        if marker == ord("["):
            return self._array(depth)
        if marker == ord("S"):
            return self._text()
        if marker in _NUMBERS:
            return self._number(marker)
        constants = {ord("T"): True, ord("F"): False, ord("Z"): None}
        if marker in constants:
            return constants[marker]
        raise self._wrong(f"an unknown marker {marker}")

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._peek() != ord("}"):
            key = self._text()
            if key in found:
                raise self._wrong(f"{key!r} twice")
            found[key] = self.value(depth + 1)
        self.at += 1
        return found

    def _array(self, depth: int) -> Any:
        kind = None
        if self._peek() == ord("$"):
            self.at += 1
            kind = self._byte()
            if kind not in _NUMBERS:
                raise self._wrong(f"an array of unknown type {kind}")
            if self._peek() != ord("#"):
                raise self._wrong("a typed array without a length")
        if self._peek() == ord("#"):
            self.at += 1
            length = self._length()
            if kind is not None:
                size = np.dtype(_NUMBERS[kind]).itemsize
                return np.frombuffer(self._take(length * size), _NUMBERS[kind])
            if length > len(self._content) - self.at:
                raise self._wrong(f"an array of {length} in a file of {len(self._content)} bytes")
            return [self.value(depth + 1) for _ in range(length)]
        found = []
        while self._peek() != ord("]"):
            found.append(self.value(depth + 1))
        self.at += 1
        return found

    def _text(self) -> str:
        return self._take(self._length()).decode("utf-8")

    def _length(self) -> int:
        marker = self._byte()
        if marker not in _NUMBERS or marker in (ord("d"), ord("D")):
            raise self._wrong(f"a length of type {marker}")
        length = int(self._number(marker))
        if length < 0:
            raise self._wrong(f"a length of {length}")
        return length

    def _number(self, marker: int) -> Any:
        kind = np.dtype(_NUMBERS[marker])
        return np.frombuffer(self._take(kind.itemsize), kind)[0].item()

    def _take(self, length: int) -> bytes:
        if length > len(self._content) - self.at:
            raise self._wrong(f"{length} bytes wanted, {len(self._content) - self.at} are there")
        self.at += length
        return self._content[self.at - length : self.at]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _peek(self) -> int:
        if self.at >= len(self._content):
            raise self._wrong("the end comes too early")
        return self._content[self.at]

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{what} at byte {self.at}")
