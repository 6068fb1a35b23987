"""Detection of time-series exports of Prometheus, VictoriaMetrics, Grafana and OpenTelemetry, which are not read."""

import re
from pathlib import Path
from typing import Final

from foundation.errors import InputError
from telemetry.packing import open_packed

_BEGINNING: Final = 1 << 14
_JSON: Final = re.compile(
    r'\s*(?:\[\s*)?\{\s*"(?:status"\s*:\s*"success|resultType"|metric"\s*:\s*\{|resourceMetrics"\s*:)'
)
_CSV: Final = re.compile(
    r'(?:sep=.\r?\n)?"?time"?[,;\t](?:[^\n]*\{[^\n]*=|"?metric"?[,;\t]"?value"?\s*\n)', re.IGNORECASE
)


def refuse_series(path: Path) -> None:
    """Raise ``InputError`` if a file is a time-series export, based on its first bytes."""
    with open_packed(path) as (_, stream):
        beginning = stream.read(_BEGINNING).decode("utf-8-sig", errors="replace")
    if _JSON.match(beginning) or _CSV.match(beginning):
        raise InputError(
            "this is an export of time series, whose labels name GPUs and nodes",
            str(path),
            "Read the server with `predrain collect prometheus`, or import `promtool tsdb dump-openmetrics` with "
            "`predrain collect openmetrics`. OpenTelemetry's collector can send to `predrain collect receive`.",
        )
