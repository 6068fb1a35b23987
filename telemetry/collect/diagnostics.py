"""Verdicts of ``dcgmi diag`` per GPU, with GPUs resolved from index or serial number."""

import hashlib
import io
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
from foundation.files import read_small, read_text
from foundation.text import storable
from telemetry.accounting import Accounting
from telemetry.dataset.event import Event
from telemetry.staging.folder import StagingFolder, rows_table

SOURCE: Final = "dcgmi-diag"
_COLUMNS: Final = {"index": "slot", "gpu_index": "slot", "uuid": "gpu", "gpu_uuid": "gpu"}
_DO: Final = (
    "Give --gpus FILE, made on the node with `nvidia-smi --query-gpu=index,uuid,serial,pci.bus_id --format=csv`."
)

GpuNames = Mapping[tuple[str, str], str]
"""UUIDs of a node's GPUs by ``("serial", NUMBER)`` and ``("slot", INDEX)``."""


def gpu_names(rows: Iterable[Mapping[Any, Any]]) -> GpuNames:
    """Return the UUIDs in rows with ``gpu``, ``serial`` and ``slot``; later rows override earlier ones."""
    return {
        (key, row[key]): row["gpu"]
        for row in rows
        for key in ("serial", "slot")
        if isinstance(row.get("gpu"), str) and isinstance(row.get(key), str)
    }


def read_gpu_names(path: Path) -> GpuNames:
    """Read ``nvidia-smi``'s CSV of a node's GPUs; raises ``InputError`` if it cannot be parsed."""
    try:
        table = pd.read_csv(
            io.StringIO(read_text(path)), dtype=str, skipinitialspace=True, na_values=["[N/A]", "[Not Supported]"]
        )
    except (OSError, ValueError) as error:
        raise InputError(f"the list of GPUs cannot be read: {error}", str(path), _DO) from None
    header = [str(name).strip().lower() for name in table.columns]
    table.columns = pd.Index([_COLUMNS.get(name, name) for name in header])
    if not {"slot", "gpu"} <= set(table.columns):
        raise InputError(f"the list of GPUs has no columns index and uuid, but {header}", str(path), _DO)
    return gpu_names(table.to_dict("records"))


Verdict = Literal["pass", "fail", "inconclusive"]
_REPORTS: Final = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # DCGM 4 and 3
_STATUSES: Final = {
    **{status: status for status in ("pass", "fail", "skipped", "warning", "not run")},
    **{"passed": "pass", "failed": "fail", "skip": "skipped", "warn": "warning", "notrun": "not run"},
}
_NODE: Final = ""
# Index of a result without a GPU: it concerns the node, like most software tests.

_Results = list[tuple[str, str]]
# Test and status.


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """Verdict of a run on one GPU.

    ``index``: DCGM's GPU index; empty for the node if the run has no result for any GPU.
    ``detail``: the tests that determine the verdict, or why the run is inconclusive.
    """

    index: str
    serial: str | None
    code: Verdict
    detail: str | None


def read_diagnostics(report: str, *, may_skip: Collection[str] = ()) -> list[GpuVerdict]:
    """Parse the JSON output of one run, complete or truncated; surrounding text is ignored.

    ``may_skip``: tests (case-insensitive) that may be skipped or not run, for example ``eud``, a separate package.
    Returns: verdicts sorted by index; a single one with an empty index if no GPU has a result.
    Raises ``InputError`` if the report has several runs.
    """
    try:
        content, end = json.JSONDecoder().raw_decode(report, max(0, report.find("{")))
    except (ValueError, RecursionError):
        return [GpuVerdict(_NODE, None, "inconclusive", "the report is incomplete")]
    runs = 1 + sum(report.count(f'"{name}"', end) for name in _REPORTS)
    if runs > 1:
        raise InputError(f"the report has {runs} runs", "dcgmi diag", "Give a file for each run.")
    if not isinstance(content, dict):
        return [GpuVerdict(_NODE, None, "inconclusive", "the report is incomplete")]
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


def _verdict(results: _Results, of_node: _Results, *, is_cut: bool) -> tuple[Verdict, str | None]:
    failed = [test for test, status in results if status == "fail"]
    if failed:
        return "fail", "failed: " + ", ".join(dict.fromkeys(failed))
    reasons = ["the run was cut short"] if is_cut else []
    # A test that failed on the node (missing library, setting) does not implicate this GPU, nor clear it.
    reasons += [f"{test}: failed on the node" for test, status in of_node if status == "fail"]
    odd = [f"{test}: {status}" for test, status in (*results, *of_node) if status not in ("pass", "fail")]
    reasons += dict.fromkeys(odd)
    if not reasons and not any(status == "pass" for _, status in results):
        reasons = ["no test of this GPU"]
    return ("inconclusive", "; ".join(reasons)) if reasons else ("pass", None)


def _serials(content: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the serial number of each GPU in the report by index."""
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
    """Yield test, GPU index (empty: the node) and status: ``pass``, ``fail`` or an inconclusive one."""
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
    staging: StagingFolder,
    *,
    node: str,
    names: GpuNames,
    delay: timedelta,
    end: datetime | None = None,
    may_skip: Collection[str] = (),
    accounting: Accounting,
) -> dict[str, int] | None:
    """Stage the verdicts of one output of ``dcgmi diag``; idempotent.

    ``delay``: from the run to ``known_at``. ``end``: when the run ended; default: the file's modification time.
    Returns: verdicts by code; None if the report was staged before.
    Raises ``InputError`` if the file cannot be read, or one of its GPUs cannot be identified.
    """
    try:
        content = read_small(path)
        tested_at = end or datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise InputError(f"the report cannot be read: {error.strerror}", str(path), "Check the path.") from None
    report = content.decode("utf-8", errors="replace")
    if report.strip() and re.search(r"\{\s*(?:\"|\Z|$)", report, re.MULTILINE) is None:
        raise InputError("the file has no JSON report", str(path), "Give the output of `dcgmi diag -j`.")
    try:
        verdicts = read_diagnostics(report, may_skip=may_skip)
    except InputError as error:
        raise InputError(error.problem, f"{path}, node {node}, {error.location}", error.advice) from None
    rows = []
    for verdict in verdicts:
        gpu = names.get(("serial", verdict.serial or "")) or names.get(("slot", verdict.index))
        if verdict.index and gpu is None:
            number = f", serial {verdict.serial}" if verdict.serial else ""
            problem = f"unknown GPU: index {verdict.index}{number}"
            raise InputError(problem, f"{path}, node {node}", _DO)
        rows.append(
            Event(tested_at, node, "diagnostic", SOURCE, tested_at + delay, verdict.code, verdict.detail, gpu).row()
        )
    digest = hashlib.sha256(content + f"\0{node}\0{tested_at.isoformat()}".encode()).hexdigest()[:24]
    name = f"diagnostics-{re.sub('[^A-Za-z0-9.-]', '-', node)[:80]}-{digest}"
    is_new = staging.stage("events", rows_table("events", rows), name=name) is not None
    accounting.take("reports", 1, {} if is_new else {"written before": 1}, path)
    if not is_new:
        return None
    accounting.take("events", len(rows), {})
    return dict(Counter(verdict.code for verdict in verdicts))
