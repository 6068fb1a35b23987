"""Outcomes of past alerts, evaluated against the dataset's events whenever a decision is written."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from features.config import LabelSection
from features.labels.facts import EventArrays
from features.labels.incidents import counted, find_incidents
from foundation.instants import from_ms
from foundation.times import BoolArray, instant_ms, milliseconds
from policy.episodes import Alert, OutcomeEvent, OutcomeEventKind, caught_causes, evaluate_alert, openings
from policy.tiers import TIERS, Tier
from serving.scores.reading import FACTS, UnitPlace, decision_folders
from serving.scores.writing import PARQUET, SUMMARY, ScoresFolder, write_json
from telemetry.dataset.channels import resolve_channels
from telemetry.dataset.installations import Installations, units_of
from telemetry.dataset.store import Dataset

WINDOW: Final = timedelta(days=30)
"""Period before the end of the data whose alerts are reported."""

ALERTED: Final = ("elevated", "high")
"""Tiers on which a controller may act, and which therefore count as alerts."""

COURSE: Final = timedelta(days=7)
"""Period before the end of the data for which the telemetry behind reasons is shown."""

_MAX_COURSES: Final = 100
_MAX_LISTED: Final = 2_000
_COLUMNS: Final = ["unit", "node", "status", "risk", "tier", "alert", "horizon_seconds"]


def write_facts(scores: ScoresFolder, dataset: Dataset) -> None:
    """Write ``fleet.json`` for the pages: locations of units, outcomes of past alerts, telemetry behind reasons.

    Raises ``InputError`` if the dataset cannot be read, or the disk is full.
    """
    inventory, end = dataset.inventory(), dataset.meta.span[1]
    labels, horizon = label_settings_of(scores.path)
    outcomes = outcomes_of(scores.path, dataset.events(), inventory, data_end=end, labels=labels, drain_horizon=horizon)
    courses = _courses(scores.path, dataset)
    content = {"places": _places(inventory), "outcomes": outcomes, "data_end": end.isoformat(), "courses": courses}
    write_json(scores.path / FACTS, content)


def _courses(scores: Path, dataset: Dataset) -> dict[str, dict[str, list[float | None]]]:
    """Read the telemetry behind the reasons of the riskiest units: hourly means, or hourly increases of counters."""
    _, newest = decision_folders(scores)[-1]
    records = pq.read_table(newest / PARQUET, columns=["unit", "node", "risk", "reasons"]).to_pylist()
    channels_of: dict[str, list[str]] = {}
    of_bucket: defaultdict[int, list[str]] = defaultdict(list)
    for record in sorted(records, key=lambda record: -(record["risk"] or 0.0)):
        named = dict.fromkeys(reason.get("channel") for reason in record["reasons"])
        channels = [name for name in named if name in dataset.schema.names]
        if channels and len(channels_of) < _MAX_COURSES:
            channels_of[record["unit"]] = channels
            of_bucket[dataset.bucket_of(record["node"])].append(record["unit"])
    key, end, catalogue = dataset.meta.unit, dataset.meta.span[1], resolve_channels({})
    courses: dict[str, dict[str, list[float | None]]] = {}
    for bucket, units in of_bucket.items():
        names = sorted({name for unit in units for name in channels_of[unit]})
        samples = dataset.read_bucket(bucket, [key, "timestamp", *names], since=end - COURSE, until=end).to_pandas()
        hour = (samples["timestamp"] - pd.Timestamp(end - COURSE)) // pd.Timedelta(hours=1)
        for unit in units:
            rows = samples[key] == unit
            course: dict[str, list[float | None]] = {}
            for name in channels_of[unit]:
                values = samples.loc[rows, name].astype("float64")
                rises = name in catalogue and catalogue[name].kind == "counter"
                by_hour = (values.diff().clip(lower=0) if rises else values).groupby(hour[rows])
                hourly = by_hour.sum(min_count=1) if rises else by_hour.mean()
                filled = hourly.reindex(range(COURSE // timedelta(hours=1)))
                course[name] = [None if pd.isna(value) else float(f"{value:.6g}") for value in filled]
            courses[unit] = course
    return courses


def _places(inventory: pd.DataFrame) -> dict[str, list[str]]:
    latest = inventory.assign(unit=units_of(inventory)).sort_values("installed_at", kind="stable")
    columns = [
        latest[field.name].astype(object).where(latest[field.name].notna(), "")
        if field.name in latest
        else [""] * len(latest)
        for field in fields(UnitPlace)
    ]
    return {str(unit): list(map(str, place)) for unit, *place in zip(latest["unit"], *columns, strict=True)}


def outcomes_of(
    scores: Path,
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    *,
    data_end: datetime,
    labels: LabelSection,
    drain_horizon: timedelta = timedelta(0),
) -> dict[str, Any]:
    """Evaluate the alerts of the last 30 days by node, the unit of draining, or by unit (``labels.acts_on``).

    A node alerts at each decision at which one of its units has tier elevated or high, or is selected by the model.
    Alerts are listed and counted as episodes (:mod:`policy.episodes`), each with the riskiest unit.

    ``data_end``: later events are not known yet.
    ``drain_horizon``: time after the gap within which an incident makes an episode right; at least the decision's
    horizon.
    Returns: ``since``, ``until``, ``decisions``; ``verdicts`` (counts) and ``precision`` (right / (right + wrong), null
    if there are none), also by UTC week of the alert, with the cumulative precision, under ``weeks``; ``incidents`` of
    nodes in the period covered by decisions and ``caught`` (preceded by an alert within the horizon), counting a common
    cause on several nodes once, also under ``by_class`` with the median lead time but no precision, because alerts have
    no failure class; ``lead_hours`` (median, least and greatest time from alert to incident, null if there is none);
    ``alerts``, newest first, at most 2,000.
    """
    decisions = _decisions(scores, data_end - WINDOW, data_end)
    installations = Installations.of(inventory)
    incidents = find_incidents(events, inventory, labels, data_end=data_end)
    certain = counted(incidents)
    placed = _at_nodes(outcome_events(events, installations, incidents), installations)
    if labels.acts_on == "unit":
        decisions = [(time, horizon, alerted.assign(node=alerted["unit"])) for time, horizon, alerted in decisions]
        certain = certain.assign(node=certain["unit"])
        placed = ((unit, event) for _, unit, event in outcome_events(events, installations, incidents))
    onsets: dict[str, list[tuple[datetime, str]]] = {}
    for node, start, kind in zip(certain["node"], certain["start"], certain["failure_class"], strict=True):
        onsets.setdefault(str(node), []).append((start.to_pydatetime(), str(kind)))
    events_of: dict[str, list[OutcomeEvent]] = {}
    for node, event in placed:
        events_of.setdefault(node, []).append(event)
    alerts: list[dict[str, Any]] = []
    for alert, tier, risk in _alerts(decisions, labels.gap, drain_horizon):
        outcome = evaluate_alert(alert, events_of.get(alert.node, ()), data_end)
        first = next(
            (onset for onset in onsets.get(alert.node, ()) if alert.at < onset[0] <= alert.at + alert.horizon), None
        )
        alerts.append(
            {
                "unit": alert.unit,
                "node": alert.node,
                "tier": tier,
                "at": alert.at.isoformat(),
                "risk": risk,
                "verdict": outcome.verdict,
                "why": outcome.why,
                "incident": None if first is None else first[1],
                "lead_hours": None if first is None else round((first[0] - alert.at).total_seconds() / 3600, 2),
            }
        )
    leads = sorted(alert["lead_hours"] for alert in alerts if alert["lead_hours"] is not None)
    listed = sorted(alerts, key=lambda alert: (alert["at"], alert["unit"]), reverse=True)[:_MAX_LISTED]
    return {
        "since": None if not decisions else decisions[0][0].isoformat(),
        "until": data_end.isoformat(),
        "decisions": len(decisions),
        "horizon_hours": None if not decisions else max(decisions[-1][1], drain_horizon.total_seconds()) / 3600,
        **_counted(alerts),
        "weeks": _by_week(alerts),
        **_recall(decisions, certain[certain["start"] <= data_end], labels.gap, drain_horizon),
        "lead_hours": None if not leads else {"median": median(leads), "least": leads[0], "greatest": leads[-1]},
        "alerts": listed,
        "not_listed": len(alerts) - len(listed),
    }


def _at_nodes(
    placed: Iterable[tuple[datetime, str, OutcomeEvent]], installations: Installations
) -> Iterator[tuple[str, OutcomeEvent]]:
    """Yield events with the node that each unit was in at the time."""
    listed = [(unit, event) for _, unit, event in placed]
    units = installations.codes([unit for unit, _ in listed])
    times = np.array([instant_ms(event.at) for _, event in listed], dtype=np.int64)
    for installation, (unit, event) in zip(installations.timeline().last(units, times), listed, strict=True):
        yield str(installations.node[installation]) if installation >= 0 else unit, event


def label_settings_of(scores: Path) -> tuple[LabelSection, timedelta]:
    """Read the labels and the drain horizon to evaluate alerts with, from the newest decision.

    Returns: default labels and a drain horizon of 0 if no decision contains them.
    """
    for _, folder in reversed(decision_folders(scores)):
        try:
            summary = json.loads((folder / SUMMARY).read_bytes())
            horizon = timedelta(seconds=float(summary["drain_horizon_seconds"]))
            return LabelSection.model_validate(summary["labels"]), horizon
        except (OSError, ValueError, KeyError, TypeError):  # pruned in the meantime, or damaged
            continue
    return LabelSection(), timedelta(0)


def _counted(alerts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    verdicts = Counter(alert["verdict"] for alert in alerts)
    evaluated = verdicts["right"] + verdicts["wrong"]
    return {
        "verdicts": {name: verdicts[name] for name in ("right", "wrong", "inconclusive", "open")},
        "precision": verdicts["right"] / evaluated if evaluated else None,
    }


def _by_week(alerts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    weeks: dict[str, list[Mapping[str, Any]]] = {}
    for alert in alerts:
        time = datetime.fromisoformat(alert["at"])
        weeks.setdefault(f"{time - timedelta(days=time.weekday()):%Y-%m-%d}", []).append(alert)
    ordered = sorted(weeks)
    so_far = [[alert for week in ordered[: number + 1] for alert in weeks[week]] for number in range(len(ordered))]
    return [
        {"week": week, **_counted(weeks[week]), "precision": _counted(known)["precision"]}
        for week, known in zip(ordered, so_far, strict=True)
    ]


def _recall(
    decisions: Sequence[tuple[datetime, float, pd.DataFrame]],
    certain: pd.DataFrame,
    gap: timedelta,
    drain_horizon: timedelta,
) -> dict[str, Any]:
    """Count the incidents within the horizon of a decision, and those preceded by an alert."""
    if not decisions:
        return {"incidents": 0, "caught": 0, "by_class": {}}
    first = np.array([time.timestamp() for time, _, _ in decisions]) + gap.total_seconds()
    horizons = np.array([horizon for _, horizon, _ in decisions])
    last, reached = first + horizons, first + np.maximum(horizons, drain_horizon.total_seconds())
    alerted_nodes = [set(frame["node"]) for _, _, frame in decisions]
    outcomes = []
    for _, incident in certain.groupby("node_incident", sort=True):
        node, start = str(incident["node"].iloc[0]), incident["start"].min().timestamp()
        is_earlier = first < start
        if (is_earlier & (start <= last)).any():
            alerted = is_earlier & (start <= reached) & np.array([node in nodes for nodes in alerted_nodes])
            lead_s = start - first[alerted].min() + gap.total_seconds() if alerted.any() else math.nan
            classes = set(map(str, incident["failure_class"]))
            outcomes.append((int(incident["common_cause"].iloc[0]), bool(alerted.any()), lead_s / 3600, classes))
    by_class = {}
    for name in sorted(set[str]().union(*(classes for *_, classes in outcomes))):
        rows = [row for row in outcomes if name in row[3]]
        leads = [row[2] for row in rows if row[1]]
        by_class[name] = _of_causes(rows) | {"lead_hours": round(median(leads), 2) if leads else None}
    return _of_causes(outcomes) | {"by_class": by_class}


def _of_causes(outcomes: Sequence[tuple[int, bool, float, set[str]]]) -> dict[str, Any]:
    cause = np.array([row[0] for row in outcomes], dtype=np.int64)
    _, hits = caught_causes(cause, np.array([row[1] for row in outcomes], dtype=np.bool_))
    return {"incidents": len(hits), "caught": int(hits.sum())}


def _decisions(scores: Path, since: datetime, until: datetime) -> list[tuple[datetime, float, pd.DataFrame]]:
    """Read the decisions of a period, oldest first: decision time, horizon in seconds, and the alerting records."""
    decisions = []
    for time, folder in decision_folders(scores):
        if not since <= time <= until:
            continue
        try:
            frame = pq.read_table(folder / PARQUET, columns=_COLUMNS).to_pandas()
        except (FileNotFoundError, pa.ArrowInvalid):  # being replaced or pruned, or of an older format
            continue
        is_alert = frame["tier"].isin(ALERTED) | frame["alert"]
        horizon = float(frame["horizon_seconds"].iloc[0]) if len(frame) else 0.0
        if horizon > 0:
            decisions.append((time, horizon, frame[is_alert]))
    return decisions


def _alerts(
    decisions: Sequence[tuple[datetime, float, pd.DataFrame]], gap: timedelta, drain_horizon: timedelta
) -> Iterator[tuple[Alert, str, float | None]]:
    """Yield the alerts that open an episode, each with its tier and risk at the time."""
    frames = [
        alerted.assign(at=time, reach=max(timedelta(seconds=horizon), drain_horizon) + gap)
        for time, horizon, alerted in decisions
    ]
    if not frames:
        return
    alerted = pd.concat(frames, ignore_index=True)
    alerted["place"] = alerted["tier"].map({tier: place for place, tier in enumerate(TIERS)}).fillna(-1)
    alerted = alerted.sort_values(["at", "place", "risk", "unit"], ascending=[True, False, False, True], kind="stable")
    alerted = alerted.drop_duplicates(["at", "node"], ignore_index=True)  # the worst unit represents its node
    reach_ms = (alerted["reach"] / timedelta(milliseconds=1)).to_numpy(dtype=np.int64)
    starts = openings(pd.factorize(alerted["node"])[0], milliseconds(alerted["at"], "decision_time"), reach_ms)
    for row in alerted[starts].itertuples():
        # A unit that only the model selects may have any tier; the evaluation ignores the alert's tier.
        alert_tier: Tier = "high" if row.tier == "high" else "elevated"
        known = None if pd.isna(row.risk) else float(row.risk)
        alert = Alert(str(row.unit), "", alert_tier, row.at.to_pydatetime(), row.reach.to_pytimedelta(), str(row.node))
        yield alert, str(row.tier), known


def outcome_events(
    events: pd.DataFrame, installations: Installations, incidents: pd.DataFrame
) -> Iterator[tuple[datetime, str, OutcomeEvent]]:
    """Yield what happened to units: the time from which it is known, the unit, and the event.

    A repair alone is no evidence of a fault, because the alert itself may have caused it: the unit counts as returned.
    Nor is an incident that began during planned maintenance: the unit counts as drained.
    """
    for row in incidents.itertuples():
        known, start, unit = row.known_at.to_pydatetime(), row.start.to_pydatetime(), str(row.unit)
        yield known, unit, OutcomeEvent("drained" if row.in_maintenance else "incident", start)
        if row.in_maintenance and not pd.isna(row.end):
            end = row.end.to_pydatetime()
            yield max(known, end), unit, OutcomeEvent("returned", end)
    facts = EventArrays.of(events, installations)
    kinds: dict[OutcomeEventKind, BoolArray] = {
        "drained": facts.drains(),
        "returned": facts.releases() | facts.ends(),
        "diagnostic_passed": facts.diagnostics(passed=True),
        "diagnostic_failed": facts.diagnostics(passed=False),
    }
    for kind, chosen in kinds.items():
        for position, code in zip(*facts.at_units(chosen, installations), strict=True):
            known, happened_at = from_ms(int(facts.known[position])), from_ms(int(facts.time[position]))
            yield known, str(installations.units[code]), OutcomeEvent(kind, happened_at)
    for code, time in zip(*installations.leaves(), strict=True):
        left_at = from_ms(int(time))
        yield left_at, str(installations.units[code]), OutcomeEvent("left", left_at)
