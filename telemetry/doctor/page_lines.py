"""What the lines of one exporter page say, line by line: slow and complete, because the doctor reads few pages."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from telemetry.channels import is_sentinel
from telemetry.collect.series.exposition import is_openmetrics, parse_line
from telemetry.collect.series.identity import XID_COUNT_METRIC, Series, SeriesCatalogue, XidCount
from telemetry.collect.series.unused import unused_reason

XID_METRICS = (XID_COUNT_METRIC,)
"""Metrics of the exporter that tell single XIDs and that predrain reads."""

MAX_LINES = 200_000
"""Lines of a page that are looked at: 3,000 GPUs' worth."""


@dataclass(slots=True)
class PageLines:
    """What a page holds.

    ``values``: value by (channel, gpu, MIG instance, part).
    ``names``: metric name by channel, the first seen.
    ``sentinels``: values that mean "not supported", by channel.
    ``stamps_ms``: time stamps on lines of devices.
    ``mig``: whether a series is of a MIG instance.
    ``nameless``: lines of a channel whose labels name no GPU or no node.
    ``faults``: lines that are not of the format, the first few.
    ``unknown``: metric names that are neither a channel nor known to be of no use.
    ``xid_metric``: whether single XIDs are told.
    ``amd``: whether the names are those of AMD's exporter.
    ``whole``: whether the page ends as a page does.
    """

    values: dict[tuple[str, str, str | None, str | None], float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    sentinels: Counter[str] = field(default_factory=Counter)
    stamps_ms: list[int] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)
    models: dict[str, str] = field(default_factory=dict)
    drivers: set[str] = field(default_factory=set)
    mig: bool = False
    nameless: int = 0
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    xid_metric: bool = False
    amd: bool = False
    whole: bool = True

    @property
    def gpus(self) -> set[str]:
        """GPUs that have a value of any channel."""
        return {gpu for _, gpu, _, _ in self.values}


def read_lines(body: bytes, catalogue: SeriesCatalogue) -> PageLines:
    """Read a page.

    Returns: lines that are not of the format are counted and do not hide the others.
    """
    text = body.decode("utf-8", "replace")
    openmetrics = is_openmetrics(text)
    found = PageLines(whole=openmetrics or not text or text.endswith("\n"))
    metrics = catalogue.metric_names()
    lines = text.split("\n")
    for number, raw in enumerate(lines[:MAX_LINES], start=1):
        line = raw.removesuffix("\r")
        if line.startswith("#"):
            found.xid_metric = found.xid_metric or any(name in line for name in XID_METRICS)
            continue
        try:
            sample = parse_line(line, openmetrics=openmetrics)
        except ValueError as error:
            found.fault_count += 1
            if len(found.faults) < 3:
                found.faults.append(f"line {number}: {error}")
            continue
        if sample is not None:
            _take(found, catalogue, metrics, sample.name, sample.labels, sample.value, sample.timestamp_ms)
    if len(lines) > MAX_LINES:
        found.fault_count += len(lines) - MAX_LINES
        found.faults.append(f"only the first {MAX_LINES:,} lines were looked at")
    return found


def _take(
    found: PageLines,
    catalogue: SeriesCatalogue,
    metrics: dict[str, str],
    name: str,
    labels: dict[str, str],
    value: float,
    timestamp_ms: int | None,
) -> None:
    if name in XID_METRICS:
        found.xid_metric = True
        return
    series = catalogue.identify(name, labels)
    if isinstance(series, XidCount):
        return
    if series is None:
        if name in metrics:
            found.nameless += 1
        elif unused_reason(name) is None:
            found.unknown[name] += 1
        return
    _remember(found, series, name)
    if timestamp_ms is not None:
        found.stamps_ms.append(timestamp_ms)
    if bool(is_sentinel([value])[0]):
        found.sentinels[series.channel] += 1
    elif not math.isnan(value):
        found.values[series.channel, series.gpu, series.mig_instance, series.part] = value * series.scale


def _remember(found: PageLines, series: Series, name: str) -> None:
    found.names.setdefault(series.channel, name)
    found.nodes.add(series.node)
    found.mig = found.mig or series.mig_instance is not None
    found.amd = found.amd or name.lower().startswith(("gpu_", "amd_"))
    for what, told in series.inventory:
        if what == "model":
            found.models[series.gpu] = told
        elif what == "driver":
            found.drivers.add(told)
