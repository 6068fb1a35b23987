"""The scores folder: one folder per decision time, written atomically, a pointer to the newest, and the run status.

::

    SCORES/
      decisions/20260101T060000Z/   risks.parquet, risks.jsonl, summary.json; immutable
      fleet.json                    locations of units, and outcomes of past alerts
      latest.json                   {"format": 2, "decision": "20260101T060000Z"}; replaced last
      status.json                   outcome of the last runs
      predrain_score.prom           the same for node-exporter's textfile collector
"""

import contextlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import FolderSwap, disk_errors, fsync_path, recover_folder, write_bytes
from policy.risk_record import FORMAT, RiskRecord, format_utc
from policy.tiers import TIERS, UNKNOWN
from serving.scores.reading import FACTS, LATEST, STAMP, TEXTFILE, decision_folders, read_json
from telemetry.dataset.schema import INSTANT

DECISIONS = "decisions"
SUMMARY = "summary.json"
PARQUET = "risks.parquet"
JSON_LINES = "risks.jsonl"
STATUS = "status.json"

_HIDDEN = re.compile(r"\.(\d{8}T\d{6}Z)\.(building|lock|previous|removing|reading-.*)")
_RESERVED = frozenset({LATEST, DECISIONS, STATUS, TEXTFILE, FACTS})

_NULLABLE = frozenset({"gpu", "slot", "unknown_reason", "risk", "risks", "score", "rank", "sample_age_seconds"})
_COLUMNS = {
    "format": pa.int32(),
    "unit": pa.string(),
    "gpu": pa.string(),
    "node": pa.string(),
    "slot": pa.string(),
    "status": pa.string(),
    "unknown_reason": pa.string(),
    "risk": pa.float64(),
    "risks": pa.map_(pa.string(), pa.float64()),
    "score": pa.float64(),
    "rank": pa.int64(),
    "alert": pa.bool_(),
    "tier": pa.string(),
    "decision_time": INSTANT,
    "issued_at": INSTANT,
    "expires_at": INSTANT,
    "horizon_seconds": pa.float64(),
    "model": pa.struct([("digest", pa.string()), ("profile", pa.string()), ("version", pa.int64())]),
    "sample_age_seconds": pa.float64(),
    "completeness": pa.float64(),
    "reasons": pa.list_(
        pa.struct([("text", pa.string()), ("group", pa.string()), ("share", pa.float64()), ("channel", pa.string())])
    ),
}
RISKS_SCHEMA = pa.schema([pa.field(name, kind, nullable=name in _NULLABLE) for name, kind in _COLUMNS.items()])
"""risks.parquet: the fields of :class:`policy.risk_record.RiskRecord`."""


class ScoresFolder:
    """The folder that scores are written to.

    ``path``: created with its parents if it does not exist.
    Raises ``InputError`` if the path has other content or is not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path):
            if path.exists() and not path.is_dir():
                raise InputError("the path is a file", str(path), "Choose another folder.")
            path.mkdir(parents=True, exist_ok=True)
            existing = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
            if existing and not _RESERVED & set(existing):
                raise InputError(
                    f"the path exists and is not a folder of scores ({sorted(existing)[0]})",
                    str(path),
                    "Choose another folder.",
                )
            (path / DECISIONS).mkdir(exist_ok=True)

    def folder_of(self, t: datetime) -> Path:
        """Return the folder of a decision time, which may not exist."""
        return self.path / DECISIONS / stamp(t)

    def summary_of(self, t: datetime) -> dict[str, Any] | None:
        """Read the summary of a decision time; None if it was not scored, or its folder is damaged."""
        folder = self.folder_of(t)
        recover_folder(folder)
        return _summary(folder)

    def newest(self) -> tuple[str, dict[str, Any] | None]:
        """Read name and summary of the newest decision, skipping damaged ones; ``("", None)`` if there is none."""
        for _, folder in reversed(decision_folders(self.path)):
            summary = _summary(folder)
            if summary is not None:
                return folder.name, summary
        return "", None

    def point_to_newest(self) -> None:
        """Point ``latest.json`` to the newest decision time, unless it already does."""
        name, _ = self.newest()
        if not name:
            return
        pointer = {"format": FORMAT, "decision": name}
        if read_json(self.path / LATEST) != pointer:
            write_json(self.path / LATEST, pointer)
            with disk_errors(self.path):
                fsync_path(self.path)

    def prune(self, retention: timedelta) -> int:
        """Remove decisions that are ``retention`` older than the newest one, and leftovers of killed runs.

        Returns: number of decisions removed. The one in ``latest.json`` is kept.
        """
        decisions = decision_folders(self.path)
        if not decisions:
            return 0
        root = self.path / DECISIONS
        oldest = decisions[-1][0] - retention
        pointed = (read_json(self.path / LATEST) or {}).get("decision")
        expired = [folder for time, folder in decisions[:-1] if time < oldest and folder.name != pointed]
        for folder in expired:
            shutil.rmtree(folder, ignore_errors=True)  # readers skip incomplete decisions
        for folder in root.iterdir():
            match = _HIDDEN.fullmatch(folder.name)
            if match is not None and match[1] < stamp(oldest):
                with contextlib.suppress(InputError):  # it is being written, so it is no leftover
                    FolderSwap(root / match[1]).discard()
        return len(expired)


def write_decision(folder: Path, records: Sequence[RiskRecord], summary: Mapping[str, Any]) -> None:
    """Write the files of one decision time to its staging folder.

    Raises ``InputError`` if the disk is full.
    """
    plain = [record.to_json() for record in records]
    with disk_errors(folder):
        with (folder / JSON_LINES).open("wb") as stream:
            for record_json in plain:
                line = json.dumps(record_json, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
                stream.write(line.encode() + b"\n")
        pq.write_table(_table(plain, records), folder / PARQUET, compression="zstd")
        (folder / SUMMARY).write_bytes(_encoded(summary))
        for name in (JSON_LINES, PARQUET, SUMMARY):
            fsync_path(folder / name)


def stamp(t: datetime) -> str:
    """Return the folder name of a decision time.

    >>> stamp(datetime(2026, 1, 1, 6, tzinfo=UTC))
    '20260101T060000Z'
    """
    return t.astimezone(UTC).strftime(STAMP)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON object atomically."""
    write_bytes(path, _encoded(content))


def _table(plain: Sequence[dict[str, Any]], records: Sequence[RiskRecord]) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [record[name] for record in plain] for name in RISKS_SCHEMA.names}
    columns["risks"] = [list(risks.items()) for risks in columns["risks"]]
    for name in ("decision_time", "issued_at", "expires_at"):
        columns[name] = [getattr(record, name) for record in records]
    return pa.table(columns, schema=RISKS_SCHEMA)


def _encoded(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _summary(folder: Path) -> dict[str, Any] | None:
    """Read the summary of a decision; None if the decision is incomplete."""
    if not all((folder / name).is_file() for name in (JSON_LINES, PARQUET)):
        return None
    summary = read_json(folder / SUMMARY)
    return summary if summary is not None and summary.get("format") == FORMAT else None


def record_attempt(
    scores: ScoresFolder, started_at: datetime, result: "ScoringResult | None", error: str | None = None
) -> dict[str, Any]:
    """Write status.json and the textfile after a run.

    ``result``: None: the run failed with ``error``.
    Returns: the content of status.json: ``last_attempt``, ``last_success`` (null: never), ``error`` (null: the last
    attempt succeeded), ``consecutive_failures``, ``decision`` (newest scored), ``lag_seconds`` (of that decision at the
    last success) and its ``notes``. A run whose decision was scored before counts as a success.
    Raises ``InputError`` if the disk is full.
    """
    previous = read_json(scores.path / STATUS) or {}
    _, newest = scores.newest()
    failures = previous.get("consecutive_failures")
    status = {
        "format": FORMAT,
        "last_attempt": format_utc(started_at),
        "last_success": previous.get("last_success") if result is None else format_utc(started_at),
        "error": error,
        "consecutive_failures": 0 if result is not None else (failures if isinstance(failures, int) else 0) + 1,
        "decision": None if newest is None else newest.get("decision_time"),
        "lag_seconds": previous.get("lag_seconds") if result is None else _behind_s(result, newest),
        "notes": previous.get("notes", []) if result is None else list(result.notes),
    }
    write_json(scores.path / STATUS, status)
    try:
        page = _page(status, newest)
    except (KeyError, TypeError, ValueError, AttributeError):  # the summary was edited by hand
        page = _page(status, None)
    write_bytes(scores.path / TEXTFILE, page.encode())
    return status


def _behind_s(result: "ScoringResult", newest: Mapping[str, Any] | None) -> float:
    """Return the lag of the newest decision in seconds; a run may have scored an older one."""
    try:
        t = datetime.fromisoformat((newest or {})["decision_time"]).astimezone(UTC)
    except (KeyError, TypeError, ValueError):  # none, or it was edited by hand
        return result.lag_seconds
    return max(result.lag_seconds - max((t - result.decision_time).total_seconds(), 0.0), 0.0)


def _page(status: Mapping[str, Any], newest: Mapping[str, Any] | None) -> str:
    """Format the metrics in Prometheus' text format 0.0.4; unknown values are omitted."""
    gauges: list[tuple[str, str, float | None]] = [
        ("last_attempt_timestamp_seconds", "Start time of the last run.", _seconds(status["last_attempt"])),
        ("last_success_timestamp_seconds", "Start time of the last successful run.", _seconds(status["last_success"])),
        ("success", "1 if the last run succeeded, else 0.", float(status["error"] is None)),
        ("consecutive_failures", "Failed runs since the last success.", status["consecutive_failures"]),
        ("lag_seconds", "Lag of the newest decision behind the one that was due.", status["lag_seconds"]),
    ]
    if newest is not None:
        sampled, fitted = _seconds(newest["newest_sample"]), _seconds(newest["model"]["fitted_at"])
        age = newest["newest_sample_age_seconds"]
        gauges += [
            ("decision_timestamp_seconds", "Newest scored decision time.", _seconds(newest["decision_time"])),
            ("expires_timestamp_seconds", "Expiry of the newest scores.", _seconds(newest["expires_at"])),
            ("duration_seconds", "Duration of scoring the newest decision.", newest["duration_seconds"]),
            ("alerts", "Units that the model alerts on.", newest["alerts"]),
            ("newest_sample_timestamp_seconds", "Newest sample used by the newest decision.", sampled),
            ("newest_sample_age_seconds", "Age of this sample at the newest decision time.", age),
            ("model_fitted_timestamp_seconds", "Fit time of the model of the newest decision.", fitted),
        ]
    lines = []
    for name, text, value in gauges:
        if value is not None:
            lines += [f"# HELP predrain_score_{name} {text}", f"# TYPE predrain_score_{name} gauge"]
            lines.append(f"predrain_score_{name} {value:.10g}")
    if newest is not None:
        lines += ["# HELP predrain_score_units Units by tier at the newest decision time."]
        lines += ["# TYPE predrain_score_units gauge"]
        counts = newest["tiers"]
        lines += [f'predrain_score_units{{tier="{tier}"}} {counts.get(tier, 0)}' for tier in (*TIERS, UNKNOWN)]
    return "\n".join(lines) + "\n"


def _seconds(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).astimezone(UTC).timestamp()


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """Result of a scoring run.

    ``written``: False: the decision had been scored before, and nothing was changed.
    ``lag_seconds``: lag behind the decision due by the clock, because the data ends earlier or an older decision was
    requested.
    """

    decision_time: datetime
    written: bool
    folder: Path
    summary: dict[str, Any]
    lag_seconds: float = 0.0
    notes: tuple[str, ...] = ()


def nothing_due(scores: ScoresFolder, now: datetime) -> ScoringResult | None:
    """Return the newest decision if no later one is due, so that a scheduled run need not load model and data.

    Returns None if a decision may be due, or the newest one is damaged.
    """
    try:
        summary = scores.newest()[1] or {}
        t = datetime.fromisoformat(summary["decision_time"]).astimezone(UTC)
        due = t + timedelta(seconds=summary["interval_seconds"] + summary["delay_seconds"])
    except (KeyError, TypeError, ValueError):
        return None
    if not t <= now < due:
        return None
    scores.point_to_newest()
    return ScoringResult(t, False, scores.folder_of(t), summary)
