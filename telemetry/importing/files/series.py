"""Converts time-series exports of Prometheus, VictoriaMetrics, Grafana and OpenTelemetry to exposition lines.

They identify GPUs and nodes by labels, which only the OpenMetrics reader resolves.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from foundation.errors import InputError
from telemetry.importing.files.json_documents import json_values
from telemetry.importing.files.otlp import BAD_EXPORT, otlp_lines
from telemetry.packing import lines_of, open_packed
from telemetry.values.dates import read_dates

_BEGINNING: Final = 1 << 14
_MAX_LINE: Final = 1 << 24  # one name per series, with all its labels
_JSON: Final = re.compile(
    r'\s*(?:\[\s*)?\{\s*"(?:status"\s*:\s*"success|resultType"|metric"\s*:\s*\{|resourceMetrics"\s*:)'
)
_CSV: Final = re.compile(
    r'(?:sep=.\r?\n)?"?time"?[,;\t](?:[^\n]*\{[^\n]*=|"?metric"?[,;\t]"?value"?\s*\n)', re.IGNORECASE
)
_LABEL: Final = re.compile(r"[A-Za-z_]\w*")
_MIN_MS_DIGITS: Final = 12


def is_series_export(path: Path) -> bool:
    """Whether a file is a time-series export, based on its first bytes."""
    return _export_kind(path) is not None


def dump_lines(path: Path) -> Iterator[str] | None:
    """Return the samples of an export as exposition lines with timestamps in ms; None if it is not an export.

    The iterator raises ``InputError`` if times have no time zone.
    """
    kind = _export_kind(path)
    return None if kind is None else _of_json(path) if kind == "json" else _of_csv(path)


def _export_kind(path: Path) -> str | None:
    with open_packed(path) as (_, stream):
        beginning = stream.read(_BEGINNING).decode("utf-8-sig", errors="replace")
    return "json" if _JSON.match(beginning) else "csv" if _CSV.match(beginning) else None


def _of_json(path: Path) -> Iterator[str]:
    totals: dict[str, tuple[float, int]] = {}
    for _, value in json_values(path):
        if isinstance(value, Mapping) and "resourceMetrics" in value:
            try:
                yield from otlp_lines(value, totals)
            except BAD_EXPORT as error:
                yield f"no metrics of OpenTelemetry ({error!r}): {str(value)[:60]}"
            continue
        try:
            yield from _of_series(value)
        except BAD_EXPORT:
            yield f"no series: {str(value)[:60]}"


def _of_series(series: Mapping[str, Any]) -> list[str]:
    labels = dict(series["metric"])
    name = labels.pop("__name__", "")
    pairs = (
        f"{label if _LABEL.fullmatch(label) else json.dumps(label)}={json.dumps(str(labels[label]))}"
        for label in labels
    )
    head = f"{name}{{{','.join(pairs)}}}"
    times, values = series.get("timestamps"), series.get("values")
    if times is not None:  # VictoriaMetrics, in milliseconds
        return [f"{head} {value} {int(ms)}" for ms, value in zip(times, values or (), strict=True) if value is not None]
    points = [series["value"]] if values is None else values
    return [f"{head} {value} {round(float(seconds) * 1000)}" for seconds, value in points]


def _of_csv(path: Path) -> Iterator[str]:
    with open_packed(path) as (_, stream), io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        lines = lines_of(text, path, _MAX_LINE)
        first = next(lines)
        first = next(lines, "") if first.startswith("sep=") else first
        separator = max(",;\t", key=first.count)
        names = next(csv.reader([first], delimiter=separator))
        for row in csv.reader(lines, delimiter=separator):
            if not row or not row[0].strip():
                continue
            ms = _milliseconds(row[0].strip(), path)
            series = [(row[1], row[2])] if "{" not in first else zip(names[1:], row[1:], strict=False)
            yield from (f"{name} {value.strip()} {ms}" for name, value in series if value.strip())


def _milliseconds(text: str, path: Path) -> int:
    if text.isdigit() and len(text) >= _MIN_MS_DIGITS:
        return int(text)
    dates = read_dates([text])
    if not dates.is_aware[0]:
        raise InputError(
            f"the time {text!r} has no time zone",
            str(path),
            "Export it from Grafana with the option *Formatted data* switched off.",
        )
    return int(dates.ms[0])
