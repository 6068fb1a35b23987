"""Converts OTLP metrics in JSON, as written by the OpenTelemetry Collector's file exporter, to exposition lines.

Resource and data point attributes become labels, with ``_`` for other characters. Metric names of the Prometheus
receiver are kept; ``otlp.csv`` maps OpenTelemetry names to channels, and values are converted by the metric's unit.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from telemetry.dataset.channels import CATALOGUE
from telemetry.values.numbers import conversion
from telemetry.values.tables import read_table

_RENAMED: Final = {
    "hw_serial_number": "serial_number",
    "hw_model": "model_name",
    "gpu_model": "model_name",
    "gpu_pci_address": "pci_bus_id",
    "gpu_index": "gpu",
    "gpu_number": "gpu",
    "gpu_memory_state": "memory_state",
    "gpu_error_type": "error_type",
    "gpu_error_xid": "xid",
    "gpu_clock_violation": "violation",
    "gpu_pipe": "pipe",
}
_UUID: Final = re.compile(r"(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_IDENTITIES: Final = frozenset({"UUID", "uuid", "gpu_uuid"})
_NAMES: Final = [
    (row["name"], [condition.partition("=")[::2] for condition in row["where"].split()], row["channel"])
    for row in read_table("otlp.csv", __file__)
]
BAD_EXPORT: Final = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
_DELTA: Final = (1, "AGGREGATION_TEMPORALITY_DELTA")
_NO_VALUE: Final = 1


def otlp_lines(request: Mapping[str, Any], totals: dict[str, tuple[float, int]]) -> Iterator[str]:
    """Yield the data points of an export request.

    ``totals``: running total and last time (ms) of each delta series, starting at 0; updated in place.
    """
    for resource in request["resourceMetrics"]:
        of_resource = _labels(resource.get("resource", {}).get("attributes", ()))
        for scope in resource["scopeMetrics"]:
            for metric in scope["metrics"]:
                try:
                    (content,) = (kind for kind in metric.values() if isinstance(kind, dict) and "dataPoints" in kind)
                    points = [(metric, content, point) for point in content["dataPoints"]]
                except BAD_EXPORT:
                    points = [(metric, {}, None)]
                for point in points:
                    try:
                        yield from _lines(of_resource, *point, totals)
                    except BAD_EXPORT as error:
                        yield f"no data point ({error!r}): {str(point)[:60]}"


def _lines(
    labels: dict[str, str],
    metric: Mapping[str, Any],
    content: Mapping[str, Any],
    point: Mapping[str, Any],
    totals: dict[str, tuple[float, int]],
) -> list[str]:
    if int(point.get("flags", 0)) & _NO_VALUE:
        return []
    series, value = _series(metric, labels | _labels(point.get("attributes", ())), point)
    ms = int(point["timeUnixNano"]) // 1_000_000
    if content.get("aggregationTemporality") not in _DELTA:
        return [f"{series} {value!r} {ms}"]
    start = int(point.get("startTimeUnixNano", 0)) // 1_000_000 or ms - 1
    first = [] if series in totals else [f"{series} 0.0 {start}"]
    total, last = totals.get(series, (0.0, start))
    if ms <= last:
        raise ValueError("a delta that is not after the last one of its series")
    totals[series] = total + value, ms
    return [*first, f"{series} {total + value!r} {ms}"]


def _labels(attributes: list[Mapping[str, Any]]) -> dict[str, str]:
    return {
        re.sub(r"\W", "_", attribute["key"]): str(next(iter(attribute["value"].values()), ""))
        for attribute in attributes
    }


def _series(metric: Mapping[str, Any], labels: dict[str, str], point: Mapping[str, Any]) -> tuple[str, float]:
    name, unit = metric["name"], metric.get("unit", "")
    labels = {_RENAMED.get(label, label): text for label, text in labels.items()}
    value = float(point.get("asDouble", point.get("asInt", "nan")))
    for known, conditions, channel in _NAMES:
        if known == name and all(labels.get(label, "") in texts.split("|") for label, texts in conditions):
            target = CATALOGUE[channel].unit if channel in CATALOGUE else "errors"
            is_count = target == "errors" and (unit == "1" or unit.startswith("{"))
            scale = conversion(target if is_count else "ratio" if unit == "1" else unit, target)
            if scale is None:
                raise ValueError(f"the unit {unit!r} of {name} is none of {channel}")
            name, value = channel, value * scale.scale + scale.offset
            break
    if not labels.keys() & _IDENTITIES:
        # A device without a UUID is identified by its slot in the node.
        component = labels.get("hw_id", "")
        labels["UUID"], slot = (component, "") if _UUID.fullmatch(component) else ("", component)
        labels.setdefault("gpu", slot)
    pairs = ",".join(f"{label}={json.dumps(text)}" for label, text in labels.items() if label)
    return f"{re.sub(r'[^A-Za-z0-9_:]', '_', name)}{{{pairs}}}", value
