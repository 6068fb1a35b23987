"""A report of Slurm in JSON, read row by row as it comes: of a large cluster's jobs only what is kept is held."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from telemetry.collect.slurm.slurm_json import SlurmFormatError

Row = TypeVar("Row")

OLDEST: Final = 38
NEWEST: Final = 45
"""Versions of Slurm's data parser (``v0.0.38``: Slurm 22.05) whose reports we know well enough to write after."""

_LONGEST_VALUE: Final = 32 * 2**20
_VERSION = re.compile(r"v0\.0\.(\d{1,4})\Z")
_BLANK: Final = " \t\r\n"
_AFTER_NUMBER: Final = frozenset(_BLANK + ",]}")


@dataclass(frozen=True, slots=True)
class Report(Generic[Row]):
    """What a report says.

    ``rows``: what was kept of each row.
    ``version``: of the data parser that wrote it; None: not told.
    """

    rows: tuple[Row, ...]
    version: int | None


def parser_version(meta: object) -> int | None:
    """Give the data parser's number from a report's ``meta``; None where it does not tell.

    22.05 and 23.02 tell it as ``plugin.type`` (``openapi/v0.0.38``), later ones as ``plugin.data_parser``
    (``data_parser/v0.0.42``).
    """
    plugin = meta.get("plugin") if isinstance(meta, Mapping) else None
    if not isinstance(plugin, Mapping):
        return None
    for key in ("data_parser", "type"):
        found = _VERSION.search(str(plugin.get(key) or ""))
        if found:
            return int(found[1])
    return None


class ReportReader(Generic[Row]):
    """Reads one report.

    ``key``: of the list of rows: ``nodes`` or ``jobs``.
    ``keep``: gets each row; gives what to hold of it, or None for nothing. A ValueError from it ends the reading: a
    list with a row that cannot be read is not the whole list.
    """

    def __init__(self, key: str, keep: Callable[[Mapping[str, Any]], Row | None]) -> None:
        self._key, self._keep = key, keep
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._json = json.JSONDecoder()
        self._text, self._at = "", 0
        self._step = self._begin
        self._name = ""
        self._rows: list[Row] = []
        self._seen = self._done = False
        self._rest: dict[str, Any] = {}

    def feed(self, piece: bytes) -> None:
        """Take the next piece.

        Raises ``SlurmFormatError`` if it is no such report.
        """
        self._text = self._text[self._at :] + self._decode(piece)
        self._at = 0
        while self._step():
            pass
        if len(self._text) - self._at > _LONGEST_VALUE:
            raise SlurmFormatError(f"a single value of over {_LONGEST_VALUE:,} characters")

    def finish(self) -> Report[Row]:
        """Give the report, when its last piece was fed.

        Raises ``SlurmFormatError`` if it is cut off, is no JSON, has no such list, or tells errors.
        """
        errors = self._rest.get("errors")
        if errors:
            raise SlurmFormatError(f"Slurm reports {str(errors)[:300]}")
        if not self._done:
            raise SlurmFormatError(f"the report is cut off or no JSON, after {len(self._rows)} {self._key}")
        if not self._seen:
            raise SlurmFormatError(f"no {self._key} in it, but {', '.join(sorted(self._rest))[:200] or 'nothing'}")
        return Report(tuple(self._rows), parser_version(self._rest.get("meta")))

    # Each step reads one thing and tells whether it could; False asks for more.

    def _begin(self) -> bool:
        found = self._text.find("{")  # plugins' debug lines may come before it
        if found < 0:
            self._at = len(self._text)
            return False
        self._at = found + 1
        self._step = self._member
        return True

    def _member(self) -> bool:
        letter = self._next()
        if letter == "}":
            self._done, self._step = True, self._nothing
            return False
        if letter == ",":
            self._at += 1
            return True
        found = self._value() if letter else None
        if found is None:
            return False
        self._name = str(found[0])
        self._step = self._colon
        return True

    def _colon(self) -> bool:
        letter = self._next()
        if letter == ":":
            self._at += 1
            self._step = self._content
            return True
        if letter:
            raise SlurmFormatError(f"no JSON: {letter!r} after {self._name[:40]!r}")
        return False

    def _content(self) -> bool:
        letter = self._next()
        if self._name == self._key and letter == "[":
            self._at += 1
            self._seen, self._step = True, self._row
            return True
        found = self._value() if letter else None
        if found is None:
            return False
        self._rest[self._name] = found[0]
        self._step = self._member
        return True

    def _row(self) -> bool:
        letter = self._next()
        if letter in ("]", ","):
            self._at += 1
            if letter == "]":
                self._step = self._member
            return True
        found = self._value() if letter else None
        if found is None:
            return False
        if not isinstance(found[0], dict):
            raise SlurmFormatError(f"a row of {self._key} is {str(found[0])[:40]!r}")
        try:
            row = self._keep(found[0])
        except (ValueError, TypeError, OverflowError) as error:
            raise SlurmFormatError(f"a row of {self._key} cannot be read: {error}") from None
        if row is not None:
            self._rows.append(row)
        return True

    def _nothing(self) -> bool:
        self._at = len(self._text)
        return False

    def _next(self) -> str:
        while self._at < len(self._text) and self._text[self._at] in _BLANK:
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _value(self) -> tuple[Any] | None:
        """Read a value at the place; None where it is not there wholly yet."""
        try:
            value, end = self._json.raw_decode(self._text, self._at)
        except RecursionError:
            raise SlurmFormatError("no JSON that Slurm writes: nested too deeply") from None
        except ValueError:
            return None
        if not isinstance(value, dict | list | str) and self._text[end : end + 1] not in _AFTER_NUMBER:
            return None  # it may go on: ``1`` of ``1.5``
        self._at = end
        return (value,)
