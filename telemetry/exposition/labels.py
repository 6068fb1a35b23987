"""What stands before a line's value: the metric's name and its labels."""

from __future__ import annotations

import re
from typing import NoReturn

from telemetry.exposition.tokens import GrammarError, read_quoted, skip

METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
"""A metric name that needs no quotes."""
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def read_series(line: str, number: int = 1, *, openmetrics: bool = False) -> tuple[str, dict[str, str], int]:
    """Read what stands before a line's value: the metric name and the labels.

    Raises ``GrammarError`` if there is no such text.
    """
    at = 0 if openmetrics else skip(line, 0)
    match = METRIC.match(line, at)
    name = ""
    end = at
    if match is not None:
        name, end = match.group(), match.end()
    brace = end if openmetrics else skip(line, end)
    if not line.startswith("{", brace):
        if not name:
            raise GrammarError("no metric name", number, at + 1, line[at:])
        return name, {}, end
    quoted, labels, end = read_labels(line, brace, number, openmetrics=openmetrics, named=bool(name))
    return name or quoted, labels, end


def read_labels(
    line: str, brace: int, number: int, *, openmetrics: bool, named: bool
) -> tuple[str, dict[str, str], int]:
    """Read ``{…}``.

    ``openmetrics``: whether blanks between tokens and a comma after the last label are refused.
    ``named``: whether the metric has its name already, or needs none; if not, it must stand in the braces: in quotes as
    the first term, or as the label ``__name__``.
    Returns ``name``: the metric name in the braces, or an empty text.
    Raises ``GrammarError`` if there is no such text.
    """
    labels: dict[str, str] = {}
    name = ""
    at = brace + 1
    while True:
        at = at if openmetrics else skip(line, at)
        is_first = not labels and not name
        if line.startswith("}", at) and (is_first or not openmetrics):
            break
        label, value, start, at = _read_term(line, at, number, openmetrics=openmetrics)
        if value is None:
            if named or not is_first:
                raise GrammarError("metric named twice", number, start + 1, label)
            name = label
        elif label in labels:
            raise GrammarError("label given twice", number, start + 1, label)
        else:
            labels[label] = value
        if line.startswith("}", at):
            break
        if not line.startswith(",", at):
            _unclosed(line, at, number)
        at += 1
    if "__name__" in labels:
        if named or name or not labels["__name__"]:
            raise GrammarError("metric named twice", number, brace + 1, labels["__name__"])
        name = labels.pop("__name__")
    if not named and not name:
        raise GrammarError("no metric name", number, brace + 1, line)
    return name, labels, at + 1


def _read_term(line: str, at: int, number: int, *, openmetrics: bool) -> tuple[str, str | None, int, int]:
    """Read ``name="value"`` or a quoted metric name (then the value is None), and the blanks after it."""
    start = at
    label, is_quoted, at = _label_name(line, at, number)
    if not label:
        raise GrammarError("no label name", number, start + 1, line[start:])
    at = at if openmetrics else skip(line, at)
    if not line.startswith("=", at):
        if is_quoted:
            return label, None, start, at
        raise GrammarError("label without '='", number, at + 1, line[at:])
    at = at + 1 if openmetrics else skip(line, at + 1)
    value, at = read_quoted(line, at, number, "label value without an opening quote")
    return label, value, start, at if openmetrics else skip(line, at)


def _label_name(line: str, at: int, number: int) -> tuple[str, bool, int]:
    if line.startswith('"', at):
        text, end = read_quoted(line, at, number, "")
        return text, True, end
    match = _LABEL.match(line, at)
    if match is None:
        if at >= len(line):
            _unclosed(line, at, number)
        raise GrammarError("no label name", number, at + 1, line[at:])
    return match.group(), False, match.end()


def _unclosed(line: str, at: int, number: int) -> NoReturn:
    if at >= len(line):
        raise GrammarError("labels that are never closed", number, at + 1)
    raise GrammarError("neither ',' nor '}' after a label", number, at + 1, line[at:])
