"""Verdicts of ``dcgmi diag`` on the GPUs of a node, and which GPU an index or a serial number is."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from telemetry.collect.event import Event
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from telemetry.landing.tables import rows_table

_NAMES: Final = {
    "index": ("index", "slot", "gpu_index"),
    "gpu": ("gpu", "uuid", "gpu_uuid"),
    "serial": ("serial",),
}
_DO: Final = (
    "Give --gpus FILE, made on the node with `nvidia-smi --query-gpu=index,uuid,serial,pci.bus_id --format=csv`."
)


@dataclass(slots=True)
class GpuNames:
    """GPUs of one node."""

    by_serial: dict[str, str] = field(default_factory=dict)
    by_index: dict[str, str] = field(default_factory=dict)

    def find(self, index: str, serial: str | None) -> str | None:
        """Return the UUID; the serial number goes before the index, which changes when a GPU is lost."""
        if serial and serial in self.by_serial:
            return self.by_serial[serial]
        return self.by_index.get(index)

    @classmethod
    def of_inventory(cls, rows: Iterable[Mapping[str, Any]]) -> GpuNames:
        """Take GPUs from rows with ``gpu``, ``serial``, ``slot``; later rows go before earlier ones."""
        made = cls()
        for row in rows:
            gpu = row.get("gpu")
            if not isinstance(gpu, str):
                continue
            if isinstance(row.get("serial"), str):
                made.by_serial[row["serial"]] = gpu
            if isinstance(row.get("slot"), str):
                made.by_index[row["slot"]] = gpu
        return made


def read_gpu_names(path: Path) -> GpuNames:
    """Read a CSV of a node's GPUs, as ``nvidia-smi --query-gpu=index,uuid,serial,pci.bus_id --format=csv`` writes it.

    Raises ``InputError`` if the file cannot be read or has no columns ``index`` and ``uuid``.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.reader(stream, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"the list of GPUs cannot be read: {error}", str(path), _DO) from None
    header = [name.strip().lower() for name in rows[0]] if rows else []
    place = {own: next((header.index(name) for name in names if name in header), None) for own, names in _NAMES.items()}
    if place["index"] is None or place["gpu"] is None:
        raise InputError(f"the list of GPUs has no columns index and uuid, but {header}", str(path), _DO)
    made = GpuNames()
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise InputError(f"row {number} has {len(row)} fields, the header {len(header)}", str(path), _DO)
        gpu = row[place["gpu"]].strip()
        made.by_index[row[place["index"]].strip()] = gpu
        if place["serial"] is not None and row[place["serial"]].strip() not in ("", "[N/A]", "[Not Supported]"):
            made.by_serial[row[place["serial"]].strip()] = gpu
    return made


Verdict = Literal["pass", "fail", "inconclusive"]
"""Codes of ``diagnostic`` events."""

_REPORTS: Final = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # DCGM 4 and 3
_PASS: Final = frozenset({"pass", "passed"})
_FAIL: Final = frozenset({"fail", "failed"})
_WHOLE: Final = ""
# Index of a result that names no GPU: it is about the node, as most tests of the software are.


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """What a run reports of one GPU.

    ``index``: DCGM's number of the GPU; empty for the node, where the run reports nothing of GPUs.
    ``detail``: the tests that decided. Of an inconclusive run it has no word for a success or a failure, so that a
    search for one is not misled.
    """

    index: str
    serial: str | None
    code: Verdict
    detail: str | None


@dataclass(slots=True)
class _Tests:
    failed: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    passed: int = 0


def read_diagnostics(report: str, *, may_skip: Collection[str] = ()) -> list[GpuVerdict]:
    """Read the JSON of one run, cut short or not; what is around it is left out.

    ``may_skip``: names of tests (without case) that do not count when they were skipped or not run, such as ``eud``,
    which needs a package of its own.
    Returns: by index; a single one with an empty index where nothing is known of any GPU.
    """
    content = _object(report)
    if content is None:
        return [GpuVerdict(_WHOLE, None, "inconclusive", "the report is not whole")]
    gpus = _gpus(content)
    body = next((content[name] for name in _REPORTS if isinstance(content.get(name), Mapping)), None)
    tests: dict[str, _Tests] = {index: _Tests() for index in gpus}
    everywhere = _Tests()
    allowed = {name.lower() for name in may_skip}
    for name, index, status in _results({} if body is None else body):
        each = everywhere if index == _WHOLE else tests.setdefault(index, _Tests())
        if status in _PASS:
            each.passed += 1
        elif status in _FAIL:
            each.failed.append(name)
        elif not (name.lower() in allowed and status in ("skip", "skipped", "not run", "notrun")):
            each.odd.append(f"{name}: {_neutral(status)}")
    cut = body is None or _aborted(content) or _aborted(body)
    if not tests:
        return [GpuVerdict(_WHOLE, None, "inconclusive", "the run was cut short" if cut else "no GPU was tested")]
    order = sorted(tests, key=lambda index: (len(index), index))
    return [GpuVerdict(index, gpus.get(index), *_verdict(tests[index], everywhere, cut=cut)) for index in order]


def _verdict(own: _Tests, everywhere: _Tests, *, cut: bool) -> tuple[Verdict, str | None]:
    if own.failed:
        return "fail", "failed: " + ", ".join(dict.fromkeys(own.failed))
    why: list[str] = ["the run was cut short"] if cut else []
    # A failed test of the node (a library missing, a setting) says nothing of this GPU, but the run cleared nothing.
    why += [f"{name}: not met on the node" for name in everywhere.failed]
    why += dict.fromkeys([*own.odd, *everywhere.odd])
    if not own.passed and not why:
        why = ["no test of this GPU"]
    return ("inconclusive", "; ".join(why)) if why else ("pass", None)


def _object(report: str) -> dict[str, Any] | None:
    start = report.find("{")
    if start < 0:
        return None
    try:
        content, _ = json.JSONDecoder().raw_decode(report, start)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _gpus(content: Mapping[str, Any]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    ids = content.get("GPU Device IDs")  # DCGM 3: device ids in the order of the GPUs
    if isinstance(ids, list):
        found |= {str(index): None for index in range(len(ids))}
    serials = content.get("GPU Device Serials")
    if isinstance(serials, Mapping):
        found |= {str(index): _serial(serial) for index, serial in serials.items()}
    for group in _list(content.get("entity_groups")):  # DCGM 4
        if str(group.get("entity_group", "")).upper() == "GPU":
            for entity in _list(group.get("entities")):
                if "entity_id" in entity:
                    found[str(entity["entity_id"])] = _serial(entity.get("serial_num"))
    return found


def _serial(value: object) -> str | None:
    return value.strip() if isinstance(value, str) and value.strip() not in ("", "N/A") else None


def _results(body: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield test, GPU index (empty: the node) and status in lower case."""
    for category in _list(body.get("test_categories")):
        for test in _list(category.get("tests")):
            name = str(test.get("name") or "unnamed test")
            for result in _list(test.get("results")):
                status = " ".join(str(result.get("status", "")).lower().split())
                for index in _indices(result):
                    yield name, index, status


def _indices(result: Mapping[str, Any]) -> list[str]:
    if "entity_id" in result or "entity_group" in result:
        group = str(result.get("entity_group", "GPU")).upper()
        return [str(result["entity_id"])] if group == "GPU" and "entity_id" in result else [_WHOLE]
    for key in ("gpu_id", "gpu_ids"):
        if key in result:
            value = result[key]
            parts = value if isinstance(value, list) else str(value).split(",")
            found = [str(part).strip() for part in parts if str(part).strip()]
            return found or [_WHOLE]
    return [_WHOLE]


def _aborted(content: Mapping[str, Any]) -> bool:
    return any(content.get(key) for key in ("runtime_error", "error", "errors"))


def _neutral(status: str) -> str:
    if status.startswith("warn"):
        return "warning"
    if status in ("skip", "skipped"):
        return "skipped"
    return "not run" if status in ("not run", "notrun", "") else "no known result"


def _list(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


SOURCE: Final = "dcgmi-diag"
_MOST_BYTES: Final = 64 << 20


def collect_diagnostics(
    path: Path,
    landing: Landing,
    *,
    node: str,
    names: GpuNames,
    delay: timedelta,
    at: datetime | None = None,
    may_skip: Collection[str] = (),
) -> dict[str, int] | None:
    """Write the verdicts of one output of ``dcgmi diag -j`` to the landing folder, once.

    ``delay``: ``known_at`` is the run's time plus this.
    ``at``: when the run ended. Default: when the file was last written.
    Returns: verdicts by code; None where the report was written before.
    Raises ``InputError`` if the file cannot be read, or a GPU of it cannot be named.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError("the report is over 64 MiB", str(path), "Give the output of one `dcgmi diag -j`.")
        content = path.read_bytes()
        when = at or datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise InputError(f"the report cannot be read: {error.strerror}", str(path), "Check the path.") from None
    if content.strip() and b"{" not in content:
        raise InputError("the file holds no JSON", str(path), "Give the output of `dcgmi diag -j`.")
    counts: Counter[str] = Counter()
    events = []
    for verdict in read_diagnostics(content.decode("utf-8", errors="replace"), may_skip=may_skip):
        gpu = names.find(verdict.index, verdict.serial) if verdict.index else None
        if verdict.index and gpu is None:
            number = f", serial {verdict.serial}" if verdict.serial else ""
            what = f"it is not known which GPU index {verdict.index}{number} is"
            raise InputError(what, f"{path}, node {node}", _DO)
        counts[verdict.code] += 1
        events.append(
            Event(when, node, "diagnostic", SOURCE, when + delay, verdict.code, verdict.detail, gpu),
        )
    digest = hashlib.sha256(content + f"\0{node}\0{when.isoformat()}".encode()).hexdigest()[:24]
    name = f"diagnostics-{re.sub('[^A-Za-z0-9.-]', '-', node)[:80]}-{digest}"
    return (
        None
        if landing.stage("events", rows_table("events", [event.row() for event in events]), name=name) is None
        else dict(counts)
    )
