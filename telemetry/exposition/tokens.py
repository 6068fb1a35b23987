"""The tokens of an exposition line, and the error that says where one is wrong."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Final

from telemetry.errors import InputError

QUOTED = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"')
"""A quoted text, in group 1 without its quotes, still escaped."""

_ESCAPE = re.compile(r'\\([\\"n])')
_ESCAPED = {"\\": "\\", '"': '"', "n": "\n"}
_BLANKS = re.compile(r"[ \t]*")
_TOKEN = re.compile(r"[^ \t]+")
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z|[+-]?inf(?:inity)?\Z|nan\Z", re.IGNORECASE
)
INT64: Final = 2**63
"""The first integer that does not fit 64 bits: time stamps lie below it."""
# A float64 has 17 significant digits; a longer text is still read, but a number of a thousand digits is no number.
_LONGEST_NUMBER: Final = 400


class GrammarError(InputError):
    """A line that is not of the format.

    ``reason``: the same words for every line with this fault: what problems are counted by.
    ``line``, ``column``: place of the fault, both from 1; the column counts characters.
    """

    def __init__(self, reason: str, line: int, column: int, shown: str = "") -> None:
        what = f"{reason}: {shown[:60]!r}" if shown else reason
        super().__init__(what, f"line {line}, column {column}", "Correct the exporter that writes this page.")
        self.reason = reason
        self.line = line
        self.column = column


def read_quoted(line: str, at: int, number: int, reason: str) -> tuple[str, int]:
    """Return a quoted text, unescaped, and where it ends; ``reason`` is the fault if no quote begins here."""
    match = QUOTED.match(line, at)
    if match is None:
        if line.startswith('"', at):
            raise GrammarError("quote that is never closed", number, at + 1, line[at:])
        raise GrammarError(reason, number, at + 1, line[at:])
    text = match.group(1)
    if "\\" in text:
        text = _ESCAPE.sub(lambda found: _ESCAPED[found.group(1)], text)
    return text, match.end()


def separator(line: str, at: int, number: int, *, openmetrics: bool) -> int:
    """Return where the next token begins.

    There must be a blank, in OpenMetrics exactly one; format 0.0.4 needs none after a closing brace.
    """
    after = at + 1 if openmetrics and line.startswith(" ", at) else skip(line, at)
    if after >= len(line):
        raise GrammarError("line ends too early", number, at + 1, line)
    if openmetrics and (line[at] != " " or line[after] in " \t"):
        raise GrammarError("not one blank before the next token", number, at + 1, line[at:])
    if after == at and line[at - 1] != "}":
        raise GrammarError("no blank before the value", number, at + 1, line[at:])
    return after


def read_number(line: str, at: int, number: int, what: str) -> tuple[str, int]:
    """Return the text of a number, which ``float`` can read, and where it ends; ``what`` names it in the error."""
    token = read_token(line, at)
    if len(token) > _LONGEST_NUMBER or not _NUMBER.match(token):
        raise GrammarError(f"{what} is no number", number, at + 1, token)
    return token, at + len(token)


def read_seconds(line: str, at: int, number: int) -> tuple[int, int]:
    """Return a time stamp in seconds since the epoch as whole milliseconds, and where it ends."""
    token, end = read_number(line, at, number, "time stamp")
    try:
        seconds = Decimal(token)
        if not seconds.is_finite() or seconds.adjusted() > 18:
            raise GrammarError("time stamp out of range", number, at + 1, token)
        # Below a picosecond nothing reaches a millisecond; scaling such exponents would be slow.
        ms = int((seconds * 1000).to_integral_value("ROUND_FLOOR")) if seconds.adjusted() > -12 else 0
    except InvalidOperation:
        raise GrammarError("time stamp out of range", number, at + 1, token) from None
    if not -INT64 <= ms < INT64:
        raise GrammarError("time stamp out of range", number, at + 1, token)
    return ms, end


def read_token(line: str, at: int) -> str:
    """Return the text up to the next blank or the end of the line."""
    match = _TOKEN.match(line, at)
    return "" if match is None else match.group()


def skip(line: str, at: int) -> int:
    """Return where the blanks at a place end."""
    match = _BLANKS.match(line, at)
    assert match is not None
    return match.end()
