"""Separate the causes: from what moved, where and when, to verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.drift.alignment import changed_since_first, effect_of
from evaluation.drift.movement import (
    MISSING_LIMIT,
    PSI_LIMIT,
    Movement,
    channel_facts,
    missing_fact,
    moved_channels,
    vanished_channels,
)
from evaluation.drift.outcomes import ALPHA, RateChange, RiskCounts
from evaluation.drift.verdict import DriftVerdict
from features.vocabulary import FeatureColumn
from features.wording import channel_words, percent
from models.rows.ranking import Ints
from models.training.reference import Reference

MIX_LIMIT = 0.1
"""Share of rows that must have changed category (total variation), or be of a category not seen, to count."""

NEW_CATEGORY = 0.02
"""Share of rows of a category that the reference did not have, from which it counts."""

SIZE_LIMIT = 0.15
"""Share by which the fleet must have grown or shrunk, or units be new, to count."""

WORKLOAD_SHARE = 0.25
"""Share of the workload group's features that must have moved."""

GAP_SHARE = 0.34
"""Share of the gap group's features that must have moved."""

RISKS_HOLD = (0.7, 1.4)
"""Ratio of failures to risks within which risks count as right, however sure the ratio is."""

_SOFTWARE = ("driver", "exporter", "firmware", "vbios", "version", "agent")
_WORKLOAD_ENDINGS = ("_util_pct", "_active_ratio", "_bytes_s", "fb_used_mib")
_TRIED = 3
_BEYOND = 1.5
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Recent:
    """Rows of the recent window, and of the reference with them, with what is known of them.

    ``values``: features as :func:`models.training.reference.dated` gives them; shape (n_rows, n_features).
    ``time``, ``unit``, ``node``: decision times, and numbers of units and nodes from 0; shape (n_rows,).
    ``now``: whether the row is of the recent window; shape (n_rows,).
    ``rows_per_time``: grid rows a decision time in the recent window.
    """

    values: np.ndarray
    time: Ints
    unit: Ints
    node: Ints
    now: np.ndarray
    rows_per_time: float


def is_software(column: FeatureColumn) -> bool:
    """Whether a column tells a version: a driver's, an exporter's, a firmware's."""
    name = str(column.channel).lower()
    return column.group == "static" and bool(column.categories) and any(word in name for word in _SOFTWARE)


def fleet_verdicts(reference: Reference, recent: Recent) -> list[DriftVerdict]:
    """Decide whether other units are there than before: other models, many new ones, many more or fewer.

    A driver's share is reported as a note: an upgrade is reason to refit only if readings moved with it.
    """
    out: list[DriftVerdict] = []
    facts: list[str] = []
    now = recent.values[recent.now]
    for at, (column, before) in enumerate(zip(reference.columns, reference.features, strict=True)):
        if column.group != "static" or not column.categories:
            continue
        shares = _shares(now[:, at])
        old = dict(zip(before.knots.tolist(), before.shares().tolist(), strict=True))
        fresh = {code: share for code, share in shares.items() if code not in old and share >= NEW_CATEGORY}
        moved = sum(abs(shares.get(code, 0.0) - old.get(code, 0.0)) for code in {*shares, *old}) / 2
        mix = _mix_facts(column, old, shares)
        if is_software(column):
            if fresh or moved >= MIX_LIMIT:
                part = "" if not any(shares.get(code, 0.0) for code in old) else " on part of the fleet"
                out.append(DriftVerdict("fleet", False, f"The {column.channel} changed{part}.", mix))
        elif fresh or moved >= MIX_LIMIT:
            facts += mix
    age = next((at for at, column in enumerate(reference.columns) if column.name.startswith("static__age__")), None)
    if age is not None:
        installed = now[:, age]
        new = float(np.mean(installed[np.isfinite(installed)] > reference.end_ms / _DAY_MS)) if len(installed) else 0.0
        if new >= SIZE_LIMIT:
            facts.append(f"{percent(new)} of rows are of units installed since")
    ratio = recent.rows_per_time / reference.rows_per_time if reference.rows_per_time else 1.0
    if abs(ratio - 1) >= SIZE_LIMIT:
        facts.append(
            f"{reference.rows_per_time:,.0f} units a decision time before, {recent.rows_per_time:,.0f} now "
            f"({100 * (ratio - 1):+.0f} %)"
        )
    if facts:
        out.insert(0, DriftVerdict("fleet", True, "The fleet is made up of other units than before.", tuple(facts)))
    return out


def reading_verdicts(reference: Reference, recent: Recent, moves: Sequence[Movement]) -> list[DriftVerdict]:
    """Decide whether readings moved because of the telemetry, because of the workload, or for no reason that shows."""
    channels = moved_channels(moves)
    silent = vanished_channels(moves)
    aligned = _aligned(reference, recent, moves)
    out: list[DriftVerdict] = []

    facts: list[str] = []
    for channel in sorted(aligned):
        facts.append(aligned[channel])
        facts += channel_facts({channel: channels[channel]}) if channel in channels else []
    jumped = [channel_words(channel) for channel in sorted(aligned) if channel not in silent]
    facts += [missing_fact(channel, move) for channel, move in sorted(silent.items())]
    gaps = [move for move in moves if move.column.group == "gaps"]
    gaps_moved = [move for move in gaps if move.moved or move.missing_moved]
    holes = bool(gaps) and len(gaps_moved) >= GAP_SHARE * len(gaps)
    if holes:
        facts += [move.summary for move in sorted(gaps_moved, key=lambda move: -move.shift.psi)[:3]]
    if jumped or silent or holes:
        parts = []
        if jumped:
            parts.append(f"{_some(jumped)} read differently since a driver or exporter changed")
        gone = [channel_words(c) for c, m in sorted(silent.items()) if m.shift.missing_now > m.shift.missing_before]
        came = [channel_words(c) for c, m in sorted(silent.items()) if m.shift.missing_now <= m.shift.missing_before]
        parts += [f"{_some(gone)} fell silent on part of the fleet"] if gone else []
        parts += [f"{_some(came)} began to report on part of the fleet"] if came else []
        parts += ["samples come with other gaps than before"] if holes else []
        text = "; ".join(parts)
        out.append(DriftVerdict("telemetry", True, f"{text[0].upper()}{text[1:]}.", tuple(facts)))

    workload = [move for move in moves if move.column.group == "workload"]
    work_moved = [move for move in workload if move.moved]
    of_work = {str(move.column.channel) for move in workload}
    busy = {
        channel: moved
        for channel, moved in channels.items()
        if channel not in aligned and (channel in of_work or channel.endswith(_WORKLOAD_ENDINGS))
    }
    shifted = bool(busy) or (bool(workload) and len(work_moved) >= WORKLOAD_SHARE * len(workload))
    rest = {channel: moved for channel, moved in channels.items() if channel not in aligned and channel not in busy}
    gauges = {channel: moved for channel, moved in rest.items() if _is_gauge(moved)}
    if shifted:
        facts = [move.summary for move in sorted(work_moved, key=lambda move: -move.shift.psi)[:3]]
        facts += channel_facts(busy | gauges)
        out.append(DriftVerdict("workload", True, "The GPUs are used otherwise than before.", tuple(facts)))
        rest = {channel: moved for channel, moved in rest.items() if channel not in gauges}
    # A silent channel's values are those of the units that still report: another mix, not another reading.
    rest = {channel: moved for channel, moved in rest.items() if channel not in silent}
    if rest:
        names = _some([channel_words(channel) for channel in rest])
        text = f"{names[0].upper()}{names[1:]} read differently, and neither workload, gaps nor drivers explain it."
        out.append(DriftVerdict("readings", True, text, tuple(channel_facts(rest))))
    return out


def failure_verdicts(
    changes: Sequence[RateChange], fell: tuple[float, str] | None, *, anything_moved: bool
) -> list[DriftVerdict]:
    """Decide whether failures come at another rate or of other classes, or whether alerts are right less often.

    ``changes``: all classes together first, then each.
    ``fell``: probability of so low a precision by chance, and the numbers as text.
    ``anything_moved``: whether features moved: a fall of precision then says nothing of the failures by itself.
    """
    facts: list[str] = []
    text = ""
    classes = list(changes[1:])
    if changes and changes[0].p < ALPHA:
        text = f"Failures come {'more' if changes[0].ratio > 1 else 'less'} often than before."
        facts.append(_rate_fact(changes[0]))
    odd = [change for change in classes if change.p < ALPHA / len(classes)]
    if odd:
        text = text or "Failures are of other classes than before."
        facts += [_rate_fact(change) for change in odd]
    if fell is not None and fell[0] < ALPHA:
        facts.append(fell[1])
        if not anything_moved:
            text = text or "Alerts are right less often than before, though no feature moved."
    return [DriftVerdict("failures", True, text, tuple(facts))] if text else []


def risk_verdicts(risks: RiskCounts | None) -> list[DriftVerdict]:
    """Decide whether units failed so much more or less often than their risks that chance does not explain it.

    The interval, at one less ``ALPHA``, must leave 1 out, and the ratio itself lie
    outside :data:`RISKS_HOLD`.
    """
    if risks is None or risks.expected <= 0:
        return []
    low, high = risks.interval(1 - ALPHA)
    too_low, too_high = low > 1 and risks.ratio > RISKS_HOLD[1], high < 1 and risks.ratio < RISKS_HOLD[0]
    if not (too_low or too_high):
        return []
    text = (
        f"Risks are too {'low' if too_low else 'high'}: units fail {'more' if too_low else 'less'} often than they say."
    )
    fact = (
        f"{risks.positives} decision rows of {risks.incidents} incidents failed where the risks add up to "
        f"{risks.expected:.1f}: {risks.ratio:.2f} times as many [{low:.2f}, {high:.2f}] "
        f"({100 * (1 - ALPHA):g} %, exact for independent incidents)"
    )
    return [DriftVerdict("risks", True, text, (fact,))]


def _aligned(reference: Reference, recent: Recent, moves: Sequence[Movement]) -> dict[str, str]:
    """Find the channels that jumped with a software change, and say how."""
    ranked = sorted(enumerate(moves), key=lambda pair: (-pair[1].shift.psi, pair[1].column.name))
    candidates: list[tuple[int, Movement]] = []
    counts: dict[str, int] = {}
    coded = {move.column.channel for move in moves if move.column.statistic == "changes"}
    for at, move in ranked:
        channel = str(move.column.channel)
        # The last value of an enumeration is lost when a driver is loaded: no reading, and no surprise.
        if move.column.group not in ("telemetry", "peers") or channel in coded or counts.get(channel, 0) == _TRIED:
            continue
        usual = move.usual_psi if np.isfinite(move.usual_psi) else 0.0
        if move.shift.psi >= max(PSI_LIMIT / 2, _BEYOND * usual) or _gone(move):
            candidates.append((at, move))
            counts[channel] = counts.get(channel, 0) + 1
    facts_by_channel: dict[str, list[str]] = {}
    for at, column in enumerate(reference.columns):
        if not is_software(column):
            continue
        changed = changed_since_first(recent.unit, recent.time, recent.values[:, at].astype(np.float64))
        if not changed.any():
            continue
        day = (recent.time - recent.time.min()) // _DAY_MS
        for position, move in candidates:
            values = recent.values[:, position]
            if _gone(move):
                values = np.isfinite(values).astype(np.float32)
            effect = effect_of(changed, values, unit=recent.unit, day=day, node=recent.node)
            if effect is not None and effect.found:
                fact = (
                    f"{move.column.name} moved by {100 * effect.effect:+.0f} of 100 ranks on units whose "
                    f"{column.channel} changed, against units that had not changed on the same days "
                    f"(t = {effect.t:+.1f}, clustered by node)"
                )
                facts_by_channel.setdefault(str(move.column.channel), []).append(fact)
    # One feature alone may be chance where so many are tried.
    return {channel: facts[0] for channel, facts in facts_by_channel.items() if len(facts) >= min(2, counts[channel])}


def _gone(move: Movement) -> bool:
    return abs(move.shift.missing_now - move.shift.missing_before) > MISSING_LIMIT


def _shares(codes: np.ndarray) -> dict[float, float]:
    known = codes[np.isfinite(codes)]
    values, counts = np.unique(known, return_counts=True)
    return {float(value): float(count) / max(len(known), 1) for value, count in zip(values, counts, strict=True)}


def _mix_facts(column: FeatureColumn, old: dict[float, float], now: dict[float, float]) -> tuple[str, ...]:
    codes = sorted({*old, *now}, key=lambda code: (-abs(now.get(code, 0.0) - old.get(code, 0.0)), code))[:4]
    parts = []
    for code in codes:
        known = 0 <= int(code) < len(column.categories)
        name = column.categories[int(code)] if known else f"code {int(code)}"
        parts.append(
            f"{column.channel} {name}: {percent(old.get(code, 0.0))} before, {percent(now.get(code, 0.0))} now"
        )
    return tuple(parts)


def _is_gauge(moved: Sequence[Movement]) -> bool:
    return not any(move.column.statistic in ("rise", "rise_delta", "share") for move in moved)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _rate_fact(change: RateChange) -> str:
    what = f"class {change.failure_class}" if change.failure_class else "all classes"
    return (
        f"{what}: {change.before} incidents before, {change.now} now; rate {change.ratio:.2f} times as high "
        f"[{change.low:.2f}, {change.high:.2f}], p = {change.p:.2g} if nothing changed (exact)"
    )
