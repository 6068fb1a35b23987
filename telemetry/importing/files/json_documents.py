"""Streaming reader of JSON text: lists, documents one after the other, JSON Lines, API responses, in any mixture."""

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from foundation.errors import InputError
from telemetry.importing.columns import COLUMN_NAMES, words_of
from telemetry.importing.files.csv_tables import NULL_TEXTS
from telemetry.packing import open_packed

TOO_DEEP: Final = "nested too deeply"
SECOND_LIST: Final = "a second list of one document"

_MAX_VALUE: Final = 1 << 24
_MAX_PARTS: Final = 1 << 20  # keys, objects and lists of one value: a byte of text may take 60 of memory
_CHUNK: Final = 1 << 20
_MAX_LITERAL: Final = 16
_MAX_NUMBER: Final = 64
_MAX_OUTER_OBJECTS: Final = 4
_SPACE: Final = re.compile(r"\s*")
_BETWEEN: Final = re.compile(r"[\s,\x1e]*")
_CLOSED: Final = re.compile(r"[\s,}]*")
_KEY: Final = re.compile(r'[\s,}]*"(?P<name>[^"\\]*)"\s*:\s*')
_LIST_OF_OBJECTS: Final = re.compile(r"\[(?=\s*\{)")
_STREAMED: Final = object()
_LISTS: Final = frozenset(COLUMN_NAMES["lists"])
_FACTS: Final = ("timestamp", "known_at", "node", "gpu", "job", "started_at", "installed_at")
_FACT_NAMES: Final = frozenset(
    name for table in COLUMN_NAMES["keys"].values() for fact in _FACTS for name in table.get(fact, ())
)


class Malformed(Exception):
    """Raised for text that is not JSON."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(problem)
        self.text, self.problem = text[:1000], problem


def repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; a second value of a key is stored under the key plus a space, as a repeated column."""
    content = dict(pairs)
    if len(content) == len(pairs):
        return content
    content = dict.fromkeys(content)
    for key, value in pairs:
        if value is not None and value not in NULL_TEXTS:
            content[key if content[key] in (None, value) else f"{key} "] = value
    return content


_DECODER: Final = json.JSONDecoder(object_pairs_hook=repeated_keys)


def json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of a file, numbered from 1: elements of lists and API responses, and other documents.

    Text that is not JSON is yielded as :class:`Malformed`. Raises ``InputError`` if a value exceeds 16 MiB.
    """
    with open_packed(path) as (_, content), io.TextIOWrapper(content, encoding="utf-8-sig") as stream:
        yield from enumerate(_Documents(stream, path).values(), 1)


class _Documents:
    """The documents of a stream, whose text is read as needed and unread from ``_place`` on."""

    def __init__(self, stream: io.TextIOBase, path: Path) -> None:
        self._stream, self._path = stream, path
        self._text, self._place = "", 0

    def values(self) -> Iterator[Any]:
        """Yield the rows of all documents; see :func:`json_values`."""
        is_first = True
        while character := self._skip(_BETWEEN):
            if character == "[":
                self._place += 1
                for element in self._elements():
                    yield from _rows(element, is_alone=False)
            elif character == "{":
                value = self._value(may_stream=True)
                if value is _STREAMED:
                    yield from self._elements()
                    yield from self._rest_of_response()
                else:
                    yield from _rows(value, is_alone=is_first and not self._skip(_BETWEEN))
            else:
                yield self._malformed("not a JSON object")
            is_first = False

    def _elements(self) -> Iterator[Any]:
        """Yield the elements of a list from its first one on; after a malformed one, its rest is read as documents."""
        while (character := self._skip(_BETWEEN)) not in ("]", ""):
            value = self._value()
            yield value
            if isinstance(value, Malformed):
                return
            character = self._skip(_SPACE)
            if character not in (",", "]"):
                break
        if character != "]":
            yield Malformed(self._text[self._place :], "a list without an end")
        else:
            self._place += 1

    def _rest_of_response(self) -> Iterator[Malformed]:
        """Read the keys behind the list of a response; yield what is left out of them."""
        while self._skip(_CLOSED) == '"':
            key = self._value()
            if self._skip(_SPACE) != ":":
                return
            self._place += 1
            self._skip(_SPACE)
            value = self._value()
            if isinstance(value, Malformed):
                yield value
            elif isinstance(key, str):
                yield from (Malformed(json.dumps(rows), SECOND_LIST) for rows in _lists({key: value}) if rows)

    def _value(self, *, may_stream: bool = False) -> Any:
        """Return the value that begins here; :class:`Malformed` if it is not JSON.

        ``may_stream``: if a long object is a response, go to the first element of its list and return ``_STREAMED``.
        """
        if len(self._text) - self._place < _MAX_NUMBER:
            self._read_on()
        while True:
            try:
                value, self._place = _DECODER.raw_decode(self._text, self._place)
                return value
            except RecursionError:
                return self._malformed(TOO_DEEP)
            except json.JSONDecodeError as error:
                is_at_end = len(self._text) - error.pos < _MAX_LITERAL
                is_cut = is_at_end or error.msg.startswith("Unterminated")
            except ValueError:  # a number of thousands of digits
                is_cut = False
            if is_cut and may_stream and len(self._text) - self._place >= _CHUNK:
                place = _list_in(self._text, self._place + 1)
                if place is not None:
                    self._place = place
                    return _STREAMED
            # Each attempt starts from the beginning, so wait for twice the text.
            if not is_cut or not self._read_on(len(self._text) - self._place):
                return self._malformed("not JSON")
            if sum(self._text.count(part) for part in ("{", "[", '":')) > _MAX_PARTS:
                problem = f"one value has more than {_MAX_PARTS:,} keys, objects and lists"
                raise InputError(problem, str(self._path), "Write one JSON object per line.")

    def _malformed(self, problem: str) -> Malformed:
        """Skip a line, and those that continue its object."""
        line = self._line()
        while self._skip(_SPACE) in ('"', "}", "]", ","):
            self._line()
        return Malformed(line, problem)

    def _line(self) -> str:
        while (end := self._text.find("\n", self._place)) < 0:
            if not self._read_on():
                end = len(self._text)
                break
        line, self._place = self._text[self._place : end], end
        return line

    def _skip(self, gap: re.Pattern[str]) -> str:
        """Skip a gap; return the character behind it, or an empty string at the end of the file."""
        while True:
            match = gap.match(self._text, self._place)
            self._place = self._place if match is None else match.end()
            if self._place < len(self._text) or not self._read_on():
                return self._text[self._place : self._place + 1]

    def _read_on(self, size: int = _CHUNK) -> bool:
        """Read at least a chunk; return False at the end of the file."""
        self._text, self._place = self._text[self._place :], 0
        if len(self._text) > _MAX_VALUE:
            raise InputError("one value is larger than 16 MiB", str(self._path), "Write one JSON object per line.")
        chunk = self._stream.read(max(size, _CHUNK))
        self._text += chunk
        return bool(chunk)


def _rows(value: Any, *, is_alone: bool) -> Iterator[Any]:
    """Yield the elements of a response's list, or any other value itself.

    Among several documents, an object with a time, node, GPU or job of its own is a row, whatever it lists.
    """
    lists = sorted(_lists(value), key=bool, reverse=True) if isinstance(value, Mapping) else []
    if not lists or (not is_alone and _has_facts(value)):
        yield value
        return
    yield from lists[0]
    yield from (Malformed(json.dumps(rows), SECOND_LIST) for rows in lists[1:] if rows)


def _has_facts(value: Mapping[str, Any]) -> bool:
    return any(words_of(key) & _FACT_NAMES for key, part in value.items() if not isinstance(part, Mapping | list))


def _lists(value: Mapping[str, Any], depth: int = 0) -> Iterator[list[Any]]:
    """Yield the lists of objects in a response, found by name."""
    for name, part in value.items():
        if name.lower() not in _LISTS:
            continue
        if isinstance(part, Mapping) and depth < _MAX_OUTER_OBJECTS:
            yield from _lists(part, depth + 1)
        elif isinstance(part, list) and (not part or isinstance(part[0], Mapping)):
            yield part


def _list_in(text: str, place: int) -> int | None:
    """Return the offset of the first row in the beginning of a response (``{"meta": {…}, "jobs": [{…``)."""
    while (key := _KEY.match(text, place)) is not None:
        place = key.end()
        is_list = key["name"].lower() in _LISTS
        if is_list and _LIST_OF_OBJECTS.match(text, place):
            return place + 1
        if is_list and text.startswith("{", place):
            place += 1
            continue
        try:
            _, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
    return None
