"""Verdicts of ``dcgmi diag`` on the GPUs of a node, and which GPU an index or a serial number is."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from foundation.errors import InputError
from telemetry.accounting import Accounting
from telemetry.bounds import storable
from telemetry.dataset.event import Event
from telemetry.landing.folder import Landing
from telemetry.landing.tables import rows_table

SOURCE: Final = "dcgmi-diag"
_MAX_BYTES: Final = 64 << 20
_COLUMNS: Final = {"index": "slot", "gpu_index": "slot", "uuid": "gpu", "gpu_uuid": "gpu"}
_DO: Final = (
    "Give --gpus FILE, made on the node with `nvidia-smi --query-gpu=index,uuid,serial,pci.bus_id --format=csv`."
)

GpuNames = Mapping[tuple[str, str], str]
"""UUIDs by ``("serial", NUMBER)`` and ``("slot", INDEX)``, of the GPUs of one node."""


def gpu_names(rows: Iterable[Mapping[Any, Any]]) -> GpuNames:
    """Take GPUs from rows with ``gpu``, ``serial``, ``slot``; later rows go before earlier ones."""
    return {
        (key, row[key]): row["gpu"]
        for row in rows
        for key in ("serial", "slot")
        if isinstance(row.get("gpu"), str) and isinstance(row.get(key), str)
    }


def read_gpu_names(path: Path) -> GpuNames:
    """Read a CSV of a node's GPUs, as ``nvidia-smi`` writes it; raises ``InputError`` if it is none."""
    try:
        table = pd.read_csv(path, dtype=str, skipinitialspace=True, na_values=["[N/A]", "[Not Supported]"])
    except (OSError, ValueError) as error:
        raise InputError(f"the list of GPUs cannot be read: {error}", str(path), _DO) from None
    header = [str(name).strip().lower() for name in table.columns]
    table.columns = pd.Index([_COLUMNS.get(name, name) for name in header])
    if not {"slot", "gpu"} <= set(table.columns):
        raise InputError(f"the list of GPUs has no columns index and uuid, but {header}", str(path), _DO)
    return gpu_names(table.to_dict("records"))


Verdict = Literal["pass", "fail", "inconclusive"]
"""Codes of ``diagnostic`` events."""

_REPORTS: Final = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # DCGM 4 and 3
_STATUSES: Final = {
    **{status: status for status in ("pass", "fail", "skipped", "warning", "not run")},
    **{"passed": "pass", "failed": "fail", "skip": "skipped", "warn": "warning", "notrun": "not run"},
}
_NODE: Final = ""
# Index of a result that names no GPU: it is about the node, as most tests of the software are.

_Results = list[tuple[str, str]]
# Test and status.


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """What a run reports of one GPU.

    ``index``: DCGM's number of the GPU; empty for the node, where the run reports nothing of GPUs.
    ``detail``: the tests that decided; of an inconclusive run without any word for success or failure, which labels
    search for.
    """

    index: str
    serial: str | None
    code: Verdict
    detail: str | None


def read_diagnostics(report: str, *, may_skip: Collection[str] = ()) -> list[GpuVerdict]:
    """Read the JSON of one run, cut short or not; text around it is passed over.

    ``may_skip``: names of tests (without case) that do not count when they were skipped or not run, such as ``eud``,
    which needs a package of its own.
    Returns: by index; a single one with an empty index where nothing is known of any GPU.
    """
    try:
        content, _ = json.JSONDecoder().raw_decode(report, max(0, report.find("{")))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return [GpuVerdict(_NODE, None, "inconclusive", "the report is not whole")]
    serials = _serials(content)
    body: Mapping[str, Any] = next((content[name] for name in _REPORTS if isinstance(content.get(name), Mapping)), {})
    results: dict[str, _Results] = {index: [] for index in serials}
    allowed = {name.lower() for name in may_skip}
    for test, index, status in _results(body):
        of_index = results.setdefault(index, [])
        if not (test.lower() in allowed and status in ("skipped", "not run")):
            of_index.append((test, status))
    of_node = results.pop(_NODE, [])
    is_cut = not body or any(part.get(key) for part in (content, body) for key in ("runtime_error", "error", "errors"))
    if not results:
        detail = "the run was cut short" if is_cut else "no GPU was tested"
        return [GpuVerdict(_NODE, None, "inconclusive", detail)]
    order = sorted(results, key=lambda index: (len(index), index))
    return [GpuVerdict(index, serials.get(index), *_verdict(results[index], of_node, is_cut=is_cut)) for index in order]


def _verdict(own: _Results, of_node: _Results, *, is_cut: bool) -> tuple[Verdict, str | None]:
    failed = [test for test, status in own if status == "fail"]
    if failed:
        return "fail", "failed: " + ", ".join(dict.fromkeys(failed))
    reasons = ["the run was cut short"] if is_cut else []
    # A failed test of the node (a library missing, a setting) says nothing of this GPU, but the run cleared nothing.
    reasons += [f"{test}: not met on the node" for test, status in of_node if status == "fail"]
    odd = [f"{test}: {status}" for test, status in (*own, *of_node) if status not in ("pass", "fail")]
    reasons += dict.fromkeys(odd)
    if not reasons and not any(status == "pass" for _, status in own):
        reasons = ["no test of this GPU"]
    return ("inconclusive", "; ".join(reasons)) if reasons else ("pass", None)


def _serials(content: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the serial number by index of each GPU that the report names."""
    serials: dict[str, object] = {}
    ids = content.get("GPU Device IDs")  # DCGM 3: device ids in the order of the GPUs
    if isinstance(ids, list):
        serials |= {str(index): None for index in range(len(ids))}
    by_index = content.get("GPU Device Serials")
    if isinstance(by_index, Mapping):
        serials |= {str(index): serial for index, serial in by_index.items()}
    for group in _list(content.get("entity_groups")):  # DCGM 4
        if str(group.get("entity_group", "")).upper() == "GPU":
            entities = [entity for entity in _list(group.get("entities")) if "entity_id" in entity]
            serials |= {str(entity["entity_id"]): entity.get("serial_num") for entity in entities}
    texts = {index: storable(serial.strip()) if isinstance(serial, str) else "" for index, serial in serials.items()}
    return {storable(index): text if text not in ("", "N/A") else None for index, text in texts.items()}


def _results(body: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield test, GPU index (empty: the node) and status: ``pass``, ``fail``, or one that decides nothing."""
    for category in _list(body.get("test_categories")):
        for test in _list(category.get("tests")):
            for result in _list(test.get("results")):
                status = _STATUSES.get(" ".join(str(result.get("status", "")).lower().split()), "no known result")
                for index in _indices(result):
                    yield storable(str(test.get("name") or "unnamed test")), storable(index), status


def _indices(result: Mapping[str, Any]) -> list[str]:
    if "entity_id" in result or "entity_group" in result:
        is_gpu = str(result.get("entity_group", "GPU")).upper() == "GPU" and "entity_id" in result
        return [str(result["entity_id"])] if is_gpu else [_NODE]
    value = result.get("gpu_id", result.get("gpu_ids", []))
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()] or [_NODE]


def _list(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def collect_diagnostics(
    path: Path,
    landing: Landing,
    *,
    node: str,
    names: GpuNames,
    delay: timedelta,
    at: datetime | None = None,
    may_skip: Collection[str] = (),
    accounting: Accounting,
) -> dict[str, int] | None:
    """Write the verdicts of one output of ``dcgmi diag -j`` to the landing folder, once.

    ``delay``: ``known_at`` is the run's time plus this. ``at``: when the run ended; default: when the file was written.
    Returns: verdicts by code; None where the report was written before.
    Raises ``InputError`` if the file cannot be read, or a GPU of it cannot be named.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError("the report is over 64 MiB", str(path), "Give the output of one `dcgmi diag -j`.")
        content = path.read_bytes()
        when = at or datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise InputError(f"the report cannot be read: {error.strerror}", str(path), "Check the path.") from None
    if content.strip() and b"{" not in content:
        raise InputError("the file holds no JSON", str(path), "Give the output of `dcgmi diag -j`.")
    verdicts = read_diagnostics(content.decode("utf-8", errors="replace"), may_skip=may_skip)
    rows = []
    for verdict in verdicts:
        gpu = names.get(("serial", verdict.serial or "")) or names.get(("slot", verdict.index))
        if verdict.index and gpu is None:
            number = f", serial {verdict.serial}" if verdict.serial else ""
            what = f"it is not known which GPU index {verdict.index}{number} is"
            raise InputError(what, f"{path}, node {node}", _DO)
        rows.append(Event(when, node, "diagnostic", SOURCE, when + delay, verdict.code, verdict.detail, gpu).row())
    digest = hashlib.sha256(content + f"\0{node}\0{when.isoformat()}".encode()).hexdigest()[:24]
    name = f"diagnostics-{re.sub('[^A-Za-z0-9.-]', '-', node)[:80]}-{digest}"
    is_new = landing.stage("events", rows_table("events", rows), name=name) is not None
    accounting.take("reports", 1, {} if is_new else {"written before": 1}, path)
    if not is_new:
        return None
    accounting.take("events", len(rows), {})
    return dict(Counter(verdict.code for verdict in verdicts))
