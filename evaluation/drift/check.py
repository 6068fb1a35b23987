"""Drift check: compare recent rows and outcomes with the training data of the current models, and name the causes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from evaluation.drift.movement import (
    MISSING_LIMIT,
    PSI_LIMIT,
    Movement,
    by_group,
    changed_since_first,
    effect_of,
    moved_channels,
    movements,
    vanished_channels,
    worst,
)
from evaluation.drift.outcomes import ALPHA, AlertCounts, RateChange, RiskCounts, precision_fell, rate_changes
from evaluation.drift.verdict import CheckFindings, DriftVerdict
from features.vocabulary import FeatureColumn
from features.wording import channel_words, percent
from foundation.text import quantity
from models.rows.ranking import Ints
from models.rows.row_reader import RowReader
from models.training.reference import (
    SAMPLE,
    LabelledRows,
    Reference,
    dated,
    sample_rows,
    warm_from,
)

MIX_LIMIT = 0.1
"""Minimum total variation distance between category distributions that counts as a change of the fleet."""

NEW_CATEGORY = 0.02
"""Minimum share of rows with a category unseen in the reference that counts as a change of the fleet."""

SIZE_LIMIT = 0.15
"""Minimum relative change of the fleet size, or share of rows from new units, that counts as a change of the fleet."""

WORKLOAD_SHARE = 0.25
"""Minimum share of features in the group ``workload`` that must have drifted."""

GAP_SHARE = 0.34
"""Minimum share of features in the group ``gaps`` that must have drifted."""

RISKS_HOLD = (0.7, 1.4)
"""Ratios of failures to predicted failures accepted as calibrated, even if they differ significantly from 1."""

_SOFTWARE = ("driver", "exporter", "firmware", "vbios", "version", "agent")
_WORKLOAD_ENDINGS = ("_util_pct", "_active_ratio", "_bytes_s", "fb_used_mib")
_COUNTED = ("rise", "rise_delta", "share")
_MAX_TESTED = 3
_LISTED = 4
_PSI_FACTOR = 1.5
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Recent:
    """Sampled rows of the recent window and of the reference window.

    ``values``: features as :func:`models.training.reference.dated` returns them; shape (n_rows, n_features).
    ``time``, ``unit``, ``node``: decision times (ms), and codes of units and nodes from 0; shape (n_rows,).
    ``now``: whether the row is in the recent window; shape (n_rows,).
    ``rows_per_time``: grid rows per decision time in the recent window.
    """

    values: np.ndarray
    time: Ints
    unit: Ints
    node: Ints
    now: np.ndarray
    rows_per_time: float


def is_software(column: FeatureColumn) -> bool:
    """Whether a column holds a software version: driver, exporter, agent or firmware."""
    name = str(column.channel).lower()
    return column.group == "static" and bool(column.categories) and any(word in name for word in _SOFTWARE)


def fleet_verdicts(reference: Reference, recent: Recent) -> list[DriftVerdict]:
    """Detect changes of the fleet's composition: model mix, new units, size.

    A version change is only a note: an upgrade is a reason to refit only if readings drifted with it.
    """
    notes: list[DriftVerdict] = []
    facts: list[str] = []
    for i, (column, distribution) in enumerate(zip(reference.columns, reference.features, strict=True)):
        values = pd.Series(recent.values[recent.now, i].astype(np.float64)).dropna()
        if column.name.startswith("static__age__"):
            new = float((values > reference.end_ms / _DAY_MS).mean()) if len(values) else 0.0
            if new >= SIZE_LIMIT:
                facts.append(f"{percent(new)} of rows belong to units installed since the fit")
        if column.group != "static" or not column.categories:
            continue
        old = pd.Series(distribution.shares(), index=distribution.knots, dtype="float64")
        shares = pd.DataFrame({"before": old, "now": values.value_counts(normalize=True)}).fillna(0.0)
        known = shares["before"] > 0
        if not (shares["now"][~known] >= NEW_CATEGORY).any() and _distance(shares).sum() / 2 < MIX_LIMIT:
            continue
        if is_software(column):
            part = " on part of the fleet" if shares["now"][known].any() else ""
            notes.append(
                DriftVerdict("fleet", False, f"The {column.channel} changed{part}.", _mix_facts(column, shares))
            )
        else:
            facts += _mix_facts(column, shares)
    ratio = recent.rows_per_time / reference.rows_per_time if reference.rows_per_time else 1.0
    if abs(ratio - 1) >= SIZE_LIMIT:
        facts.append(
            f"units per decision time: {reference.rows_per_time:,.0f} before, {recent.rows_per_time:,.0f} now "
            f"({100 * (ratio - 1):+.0f} %)"
        )
    changed = [DriftVerdict("fleet", True, "The composition of the fleet changed.", tuple(facts))]
    return [*(changed if facts else ()), *notes]


def reading_verdicts(reference: Reference, recent: Recent, moves: Sequence[Movement]) -> list[DriftVerdict]:
    """Attribute shifts in readings to telemetry, workload, or an unknown cause."""
    channels, silent = moved_channels(moves), vanished_channels(moves)
    aligned = _aligned(reference, recent, moves)
    out: list[DriftVerdict] = []

    gaps = [move for move in moves if move.column.group == "gaps"]
    gaps_moved = [move for move in gaps if move.moved or move.missing_moved]
    if len(gaps_moved) < GAP_SHARE * len(gaps):
        gaps_moved = []
    facts: list[str] = []
    for channel in sorted(aligned):
        facts += [aligned[channel], *_channel_facts({channel: channels[channel]} if channel in channels else {})]
    facts += [move.missing_summary for _, move in sorted(silent.items())]
    facts += _furthest(gaps_moved)
    lost = {channel for channel, move in silent.items() if move.shift.missing_now > move.shift.missing_before}
    parts = [
        f"{_some_channels(sorted(names))} {happened}"
        for names, happened in (
            (aligned.keys() - silent.keys(), "changed with a driver or exporter update"),
            (lost, "stopped reporting on part of the fleet"),
            (silent.keys() - lost, "started reporting on part of the fleet"),
        )
        if names
    ]
    parts += ["gaps between samples changed"] if gaps_moved else []
    if parts:
        text = "; ".join(parts)
        out.append(DriftVerdict("telemetry", True, f"{text[0].upper()}{text[1:]}.", tuple(facts)))

    workload = [move for move in moves if move.column.group == "workload"]
    work_moved = [move for move in workload if move.moved]
    of_work = {str(move.column.channel) for move in workload}
    unclear = {channel: moved for channel, moved in channels.items() if channel not in aligned}
    busy = {
        channel: moved
        for channel, moved in unclear.items()
        if channel in of_work or channel.endswith(_WORKLOAD_ENDINGS)
    }
    unclear = {channel: moved for channel, moved in unclear.items() if channel not in busy}
    if busy or (workload and len(work_moved) >= WORKLOAD_SHARE * len(workload)):
        counted = {channel for channel, moved in unclear.items() for move in moved if move.column.statistic in _COUNTED}
        gauges = {channel: moved for channel, moved in unclear.items() if channel not in counted}
        facts = [*_furthest(work_moved), *_channel_facts(busy | gauges)]
        out.append(DriftVerdict("workload", True, "The workload changed.", tuple(facts)))
        unclear = {channel: moved for channel, moved in unclear.items() if channel not in gauges}
    # The remaining values of a silent channel come from the units that still report: a change of mix, not of readings.
    unclear = {channel: moved for channel, moved in unclear.items() if channel not in silent}
    if unclear:
        names = _some_channels(list(unclear))
        text = f"{names[0].upper()}{names[1:]} changed; workload, gaps and drivers do not explain it."
        out.append(DriftVerdict("readings", True, text, tuple(_channel_facts(unclear))))
    return out


def failure_verdicts(
    changes: Sequence[RateChange], fell: tuple[float, str] | None, *, anything_moved: bool
) -> list[DriftVerdict]:
    """Detect changes of the failure rate or of the failure class mix, and a decrease of alert precision.

    ``changes``: all classes together first, then each class.
    ``fell``: p-value of the decrease in precision, and the numbers as text.
    ``anything_moved``: whether features drifted; a decrease in precision alone is then no evidence about failures.
    """
    facts: list[str] = []
    text = ""
    if changes and changes[0].p < ALPHA:
        text = f"The failure rate {'increased' if changes[0].ratio > 1 else 'decreased'}."
        facts.append(_rate_fact(changes[0]))
    odd = [change for change in changes[1:] if change.p < ALPHA / len(changes[1:])]
    if odd:
        text = text or "The mix of failure classes changed."
        facts += [_rate_fact(change) for change in odd]
    if fell is not None and fell[0] < ALPHA:
        facts.append(fell[1])
        if not anything_moved:
            text = text or "The precision of alerts decreased without feature drift."
    return [DriftVerdict("failures", True, text, tuple(facts))] if text else []


def risk_verdicts(risks: RiskCounts | None) -> list[DriftVerdict]:
    """Detect miscalibrated risks from the ratio of observed to predicted failures.

    The confidence interval (level ``1 - ALPHA``) must exclude 1, and the ratio must lie outside :data:`RISKS_HOLD`.
    """
    if risks is None or risks.expected <= 0:
        return []
    low, high = risks.interval(1 - ALPHA)
    too_low, too_high = low > 1 and risks.ratio > RISKS_HOLD[1], high < 1 and risks.ratio < RISKS_HOLD[0]
    if not (too_low or too_high):
        return []
    text = f"Risks are too {'low' if too_low else 'high'}: {'more' if too_low else 'fewer'} failures than predicted."
    fact = (
        f"{quantity(risks.positives, 'positive decision row')} ({quantity(risks.incidents, 'incident')}), "
        f"{risks.expected:.1f} predicted: "
        f"ratio {risks.ratio:.2f} [{low:.2f}, {high:.2f}] "
        f"({100 * (1 - ALPHA):g} %, exact for independent incidents)"
    )
    return [DriftVerdict("risks", True, text, (fact,))]


def _aligned(reference: Reference, recent: Recent, moves: Sequence[Movement]) -> dict[str, str]:
    """Find channels whose values shifted with a software change, each with one fact as evidence."""
    candidates: dict[str, list[tuple[int, Movement]]] = {}
    coded = {move.column.channel for move in moves if move.column.statistic == "changes"}
    for index, move in sorted(enumerate(moves), key=lambda pair: (-pair[1].shift.psi, pair[1].column.name)):
        # Loading a driver resets the last value of an enumeration, so a shift is expected.
        if move.column.group not in ("telemetry", "peers") or move.column.channel in coded:
            continue
        usual_psi = move.usual_psi if np.isfinite(move.usual_psi) else 0.0
        if move.shift.psi >= max(PSI_LIMIT / 2, _PSI_FACTOR * usual_psi) or _missing_otherwise(move):
            candidates.setdefault(str(move.column.channel), []).append((index, move))
    out: dict[str, str] = {}
    day = (recent.time - recent.time.min()) // _DAY_MS
    changes = []
    for index, column in enumerate(reference.columns):
        if is_software(column):
            changed = changed_since_first(recent.unit, recent.time, recent.values[:, index].astype(np.float64))
            changes += [(column, changed)] if changed.any() else []
    for channel, ranked in candidates.items():
        facts = []
        for column, changed in changes:
            for index, move in ranked[:_MAX_TESTED]:
                values = recent.values[:, index]
                values = np.isfinite(values).astype(np.float32) if _missing_otherwise(move) else values
                effect = effect_of(changed, values, unit=recent.unit, day=day, node=recent.node)
                if effect is not None and effect.significant:
                    facts.append(
                        f"{move.column.name} moved by {100 * effect.effect:+.0f} of 100 ranks on units whose "
                        f"{column.channel} changed, compared with other units on the same days "
                        f"(t = {effect.t:+.1f}, clustered by node)"
                    )
        # With this many tests, a single feature may be significant by chance.
        if len(facts) >= min(2, len(ranked)):
            out[channel] = facts[0]
    return out


def _missing_otherwise(move: Movement) -> bool:
    return abs(move.shift.missing_now - move.shift.missing_before) > MISSING_LIMIT


def _distance(shares: pd.DataFrame) -> pd.Series:
    return (shares["now"] - shares["before"]).abs()


def _mix_facts(column: FeatureColumn, shares: pd.DataFrame) -> tuple[str, ...]:
    facts = []
    order = np.lexsort((shares.index, -_distance(shares)))[:4]
    for code, old, now in shares.iloc[order].itertuples():
        known = 0 <= int(code) < len(column.categories)
        name = column.categories[int(code)] if known else f"code {int(code)}"
        facts.append(f"{column.channel} {name}: {percent(old)} before, {percent(now)} now")
    return tuple(facts)


def _channel_facts(channels: Mapping[str, list[Movement]]) -> list[str]:
    """Describe the feature that drifted most in each channel, strongest channels first."""
    ranked = sorted(channels.items(), key=lambda item: (-item[1][0].shift.psi, item[0]))
    listed, further = ranked[:_LISTED], [channel_words(channel) for channel, _ in ranked[_LISTED:]]
    facts = [f"{channel_words(channel)}, {len(moved)} features: {moved[0].summary}" for channel, moved in listed]
    return [*facts, f"and {len(further)} more: {', '.join(further)}"] if further else facts


def _furthest(moves: Sequence[Movement]) -> list[str]:
    return [move.summary for move in sorted(moves, key=lambda move: -move.shift.psi)[:3]]


def _some_channels(channels: Sequence[str]) -> str:
    names = ", ".join(channel_words(channel) for channel in channels[:3])
    return f"{names} and {len(channels) - 3} more" if len(channels) > 3 else names


def _rate_fact(change: RateChange) -> str:
    failures = f"class {change.failure_class}" if change.failure_class else "all classes"
    return (
        f"{failures}: {quantity(change.before, 'incident')} before, {change.now} now; rate ratio {change.ratio:.2f} "
        f"[{change.low:.2f}, {change.high:.2f}], p = {change.p:.2g} (exact test)"
    )


RECENT = SAMPLE // 2
"""Maximum number of sampled rows of the recent window."""

MAKE = "static__model__code"
"""Column of a unit's GPU model; models differ in the metrics they export and in their normal readings."""

MIN_ROWS_OF_A_MAKE = 200
"""Minimum number of reference rows of a GPU model; models with fewer count as new."""


def examine(
    reference: Reference,
    labelled: LabelledRows,
    read: RowReader,
    nodes: pd.Series,
    *,
    start_ms: int,
    end_ms: int,
    seed: int,
    alerts: tuple[AlertCounts, AlertCounts] | None = None,
    risks: RiskCounts | None = None,
) -> CheckFindings:
    """Check rows since a fit for drift, using only what was known at ``end_ms``.

    ``labelled``: as of ``end_ms``.
    ``start_ms``, ``end_ms``: recent window of decision times; ``end_ms``, the time of the check, is exclusive.
    """
    rows = labelled.rows
    recent = sample_rows(rows, start_ms, end_ms - 1, limit=RECENT, seed=seed)
    if not len(recent) or not any(feature.present + feature.missing for feature in reference.features):
        return CheckFindings(start_ms, end_ms, 0)
    # Include reference rows if the matrix still has them, to compare before and after within units and GPU models.
    earlier = sample_rows(rows, reference.start_ms, min(reference.end_ms, start_ms - 1), limit=RECENT, seed=seed)
    pooled = np.concatenate([earlier, recent])
    begin = warm_from(rows, reference.columns, reference.start_ms, reference.end_ms)
    recent_times = rows.time[(rows.time >= start_ms) & (rows.time < end_ms) & ~rows.augmented]
    pool = Recent(
        values=dated(read(pooled), rows.time[pooled], reference.columns),
        time=rows.time[pooled],
        unit=np.unique(rows.tie[pooled], return_inverse=True)[1].astype(np.int64),
        node=pd.factorize(nodes.iloc[pooled])[0].astype(np.int64),
        now=np.repeat([False, True], [len(earlier), len(recent)]),
        rows_per_time=len(recent_times) / max(len(np.unique(recent_times)), 1),
    )
    same_makes = _same_makes(reference, pool, begin)
    moves = movements(reference.columns, reference.features, pool.values[pool.now], same_makes)
    verdicts = [*fleet_verdicts(reference, pool), *reading_verdicts(reference, pool, moves)]
    now = labelled.outcomes(reference.end_ms + 1, end_ms - 1, known_by_ms=end_ms)
    changes = rate_changes(reference.outcomes, now)
    any_moved = any(verdict.drift for verdict in verdicts)
    verdicts += failure_verdicts(changes, _fell(alerts), anything_moved=any_moved)
    verdicts += risk_verdicts(risks)
    return CheckFindings(
        start_ms=start_ms,
        end_ms=end_ms,
        rows=len(recent),
        verdicts=tuple(verdicts),
        groups=tuple(by_group(moves)),
        features=tuple(worst(moves)),
        outcomes=_outcomes(changes),
    )


def _same_makes(reference: Reference, pool: Recent, begin_ms: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return reference rows resampled to the recent mix of GPU models, and the recent rows; new models are excluded.

    None if the model is unknown, the matrix no longer has reference rows, or the mix changed too little to move a
    share by ``MISSING_LIMIT``. The fleet is then compared as a whole.
    """
    make = next((i for i, column in enumerate(reference.columns) if column.name == MAKE), None)
    if make is None:
        return None
    codes = pool.values[:, make]
    earlier = np.flatnonzero(~pool.now & (pool.time >= begin_ms) & np.isfinite(codes))
    recent = np.flatnonzero(pool.now & np.isfinite(codes))
    if not (len(earlier) and len(recent)):
        return None
    makes = np.unique(codes[recent])
    shares = [(codes[rows][:, None] == makes).mean(axis=0) for rows in (earlier, recent)]
    if np.abs(shares[1] - shares[0]).sum() < MISSING_LIMIT:
        return None
    old, now = [], []
    for code in makes:
        had_model, has_model = (rows[codes[rows] == code] for rows in (earlier, recent))
        if len(had_model) >= MIN_ROWS_OF_A_MAKE:
            old.append(had_model[np.linspace(0, len(had_model) - 1, len(has_model)).round().astype(np.int64)])
            now.append(has_model)
    if not now:
        return None
    return pool.values[np.concatenate(old)], pool.values[np.concatenate(now)]


def _fell(alerts: tuple[AlertCounts, AlertCounts] | None) -> tuple[float, str] | None:
    if alerts is None:
        return None
    old, now = alerts
    counts = (
        f"{now.right} of {now.right + now.wrong} alerted nodes failed, {percent(now.precision)}; before "
        f"{old.right} of {old.right + old.wrong}, {percent(old.precision)}"
    )
    return precision_fell(old, now), counts


def _outcomes(changes: Sequence[RateChange]) -> dict[str, float | int | None]:
    if not changes:
        return {}
    total = changes[0]
    rates = {"ratio": total.ratio, "ratio_low": total.low, "ratio_high": total.high, "p": total.p}
    known = {name: round(value, 6) if np.isfinite(value) else None for name, value in rates.items()}
    return {"incidents_before": total.before, "incidents_now": total.now, **known}
