"""Several fleets measured as one: alerts and hits add up, GPUs are resampled within each fleet, a model at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from benchmarks.scoreboard.store import Stored
from evaluation.metrics.assessment import Assessment, assess, kind_of, summarise
from evaluation.metrics.bootstrap import Interval, interval, resample_units
from evaluation.metrics.comparison import (
    SLIDING,
    budgets,
    difference_interval,
    most_precise,
    oracle_shares,
    paired_differences,
    share_better,
)
from evaluation.metrics.evaluation import ORACLE_STATISTICS
from evaluation.metrics.metrics import Floats, Ints, ratio
from evaluation.metrics.oracle import ORACLE
from evaluation.metrics.scored import Scored, Shared

APART_MS = 3653 * 86_400_000
"""Shift between the fleets' clocks: pooled fleets share no decision time, because K is a budget of one fleet."""

_INCIDENTS_APART = 1_000_000
_EMPTY = np.empty(0)


class Pool:
    """The rows of several parts side by side; scores are read when a model is asked for.

    ``seed``: seed of the resampling: parts of the same fleets in the same order are resampled alike.
    """

    def __init__(self, parts: Sequence[Stored], replicates: int, seed: int = 1) -> None:
        self.parts = tuple(parts)
        names = [set(part.models) for part in parts]
        self.names = sorted(set.intersection(*names))
        loaded = [part.rows() for part in parts]
        unit_names = [part.units() for part in parts]
        sizes = [len(units) for units in unit_names]
        times = [np.unique(rows["time_ms"]) for rows in loaded]
        before_units = np.cumsum([0, *sizes])
        before_times = np.cumsum([0, *map(len, times)])
        budget = [np.full(len(own), part.facts["k"], np.int64) for own, part in zip(times, parts, strict=True)]
        self.shared = Shared(
            units=np.array(
                [f"{place:03d}-{name}" for place, units in enumerate(unit_names) for name in units], dtype=object
            ),
            times_ms=np.concatenate([own + place * APART_MS for place, own in enumerate(times)]),
            k=max(int(part.facts["k"]) for part in parts),
            budgets=np.concatenate(budget),
        )
        drawn = (resample_units(units, replicates, seed + 7919 * place) for place, units in enumerate(sizes))
        self.weights = np.concatenate([np.zeros((replicates, 0)), *drawn], axis=1)
        self._base = {
            "time": np.concatenate(
                [
                    np.searchsorted(own, rows["time_ms"]) + before
                    for own, rows, before in zip(times, loaded, before_times, strict=False)
                ]
            ).astype(np.int64),
            "unit": np.concatenate(
                [rows["unit"] + before for rows, before in zip(loaded, before_units, strict=False)]
            ).astype(np.int64),
            "known": np.concatenate([rows["label"] >= 0 for rows in loaded]),
            "positive": np.concatenate([rows["label"] == 1 for rows in loaded]),
            "incident": np.concatenate(
                [
                    np.where(rows["incident"] >= 0, rows["incident"].astype(np.int64) + place * _INCIDENTS_APART, -1)
                    for place, rows in enumerate(loaded)
                ]
            ),
            "incident_start_ms": np.concatenate(
                [
                    np.where(rows["incident"] >= 0, rows["start_ms"] + place * APART_MS, 0)
                    for place, rows in enumerate(loaded)
                ]
            ),
            "failure_class": np.concatenate([rows["failure_class"].astype(object) for rows in loaded]),
            "fold": np.concatenate([rows["fold"].astype(np.int64) for rows in loaded]),
            "drain_label": np.concatenate([rows["label"] for rows in loaded]),
        }

    def scored(self, model: str, variant: str) -> Scored:
        """Give the pooled rows of one model and variant."""
        read = [part.scores(model, variant) for part in self.parts]
        return Scored(
            model=model,
            variant=variant,
            shared=self.shared,
            rank=np.concatenate([scores["rank"] for scores in read]).astype(np.int64),
            risk=np.concatenate([scores["risk"] for scores in read]).astype(np.float64),
            alert=np.concatenate([scores["alert"] for scores in read]),
            **self._base,
        )


@dataclass(frozen=True, slots=True)
class Hits:
    """Right alerts and alerts with a label, on the units as they are and then on each resample.

    ``hits``, ``alerts``: sums over the units; those of different pools add up; shape (1 + replicates,).
    """

    hits: Floats
    alerts: Floats

    @property
    def precision(self) -> Floats:
        """Their ratio; NaN where nothing was alerted."""
        return ratio(self.hits, self.alerts)

    def __add__(self, other: Hits) -> Hits:
        return Hits(self.hits + other.hits, self.alerts + other.alerts)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a pool of fleets showed.

    ``k``: alert budget of each fleet.
    ``fleets``, ``units``, ``times``: Fleets, units, and decision times of all fleets together.
    ``table``: as :attr:`evaluation.metrics.evaluation.Evaluation.table`, with ``lead_time_median_low`` and ``_high``.
    ``budgets``, ``paired``: as the evaluation's frames of these names.
    ``equal``: each sliding ensemble beside each learner at as many alerts: ``model``, ``other_model``, ``alerts``,
    ``precision``, ``other_precision``, ``difference``, ``low``, ``high``, ``share_better``, ``member``, ``best``.
    ``at_profile``: every model at as many alerts, at each decision time, as the profile gives.
    """

    k: tuple[int, ...]
    fleets: int
    units: int
    times: int
    table: pd.DataFrame
    budgets: pd.DataFrame
    paired: pd.DataFrame
    equal: pd.DataFrame
    at_profile: Mapping[tuple[str, str], Hits]
    profile: str

    def row(self, model: str, variant: str) -> pd.Series | None:
        """Find one model's row of the table; None where there is none."""
        rows = self.table[(self.table["model"] == model) & (self.table["variant"] == variant)]
        return None if rows.empty else rows.iloc[0]


def measure(pool: Pool) -> Measured:
    """Measure every model of a pool; only one model's rows are in memory at a time."""
    facts = pool.parts[0].facts
    profile = str(facts["profile"])
    every = np.concatenate([np.ones((1, len(pool.shared.units))), pool.weights])
    asked = _asked(pool, profile)
    slim: list[Assessment] = []
    at_budgets: list[pd.DataFrame] = []
    summaries = []
    given: dict[tuple[str, str], dict[str, Floats]] = {}
    at_profile: dict[tuple[str, str], Hits] = {}
    for name in sorted(pool.names):
        scored = pool.scored(*name)
        assessed = assess(scored, pool.weights)
        lead = lead_bounds(assessed.incidents, pool.shared.units, pool.weights)
        summaries.append({**summarise(assessed), "lead_time_median_low": lead.low, "lead_time_median_high": lead.high})
        at_budgets.append(budgets([assessed], pool.weights))
        for key, budget in asked.items():
            if key[1] == scored.variant and kind_of(scored.model) == "learner":
                given.setdefault(key, {})[scored.model] = _hits(scored, budget, every).precision
        if (profile, SLIDING) in asked:
            mine = scored.alert if scored.name == (profile, SLIDING) else None
            at_profile[scored.name] = _hits(scored, asked[profile, SLIDING], every, mine)
        if scored.name in asked:
            given.setdefault(scored.name, {})[""] = _hits(scored, asked[scored.name], every, scored.alert).precision
        slim.append(dataclasses.replace(assessed, scored=_without_rows(scored)))
    table = pd.DataFrame(summaries)
    oracle = next(assessment for assessment in slim if assessment.scored.model == ORACLE)
    shares = oracle_shares(slim, oracle, ORACLE_STATISTICS)
    table = table.merge(shares, on=["model", "variant"], how="left", validate="one_to_one")
    return Measured(
        k=tuple(int(part.facts["k"]) for part in pool.parts),
        fleets=len(pool.parts),
        units=len(pool.shared.units),
        times=len(pool.shared.times_ms),
        table=table,
        budgets=pd.concat(at_budgets, ignore_index=True),
        paired=paired_differences(slim),
        equal=_equal(given, asked, facts),
        at_profile=at_profile,
        profile=profile,
    )


def lead_bounds(incidents: pd.DataFrame, units: np.ndarray, weights: Floats) -> Interval:
    """Give the interval of the median lead time of the incidents that were caught.

    ``incidents``: from :func:`evaluation.metrics.lead_time.incident_table`.
    ``units``: in the order of the weights; shape (units,).
    ``weights``: shape (replicates, units).
    Returns: in hours; NaN bounds where too few resamples hold a caught incident.
    """
    caught = incidents.dropna(subset=["lead_time_hours"]).sort_values("lead_time_hours", kind="stable")
    if caught.empty:
        return Interval(np.nan, np.nan)
    code = pd.Index(units.astype(object)).get_indexer(pd.Index(caught["unit"].to_numpy(dtype=object)))
    counted = np.cumsum(weights[:, code], axis=1)
    lead = caught["lead_time_hours"].to_numpy(dtype=np.float64)
    # the median lies between the incidents that hold the two middle places; where their number is odd, they are one
    lower = np.argmax(2 * counted >= counted[:, -1:], axis=1)
    upper = np.argmax(2 * counted > counted[:, -1:], axis=1)
    return interval(np.where(counted[:, -1] > 0, (lead[lower] + lead[upper]) / 2, np.nan))


def _asked(pool: Pool, profile: str) -> dict[tuple[str, str], Ints]:
    """Alerts a decision time of each sliding ensemble, and of the profile whatever it is."""
    wanted = [
        name for name in pool.names if name[1] == SLIDING and (kind_of(name[0]) == "ensemble" or name[0] == profile)
    ]
    out = {}
    for name in wanted:
        scored = pool.scored(*name)
        out[name] = scored.per_time(scored.alert)
    return out


def _hits(scored: Scored, budget: Ints, every: Floats, alert: np.ndarray | None = None) -> Hits:
    chosen = scored.top(budget) if alert is None else alert
    return Hits(every @ scored.per_unit(chosen & scored.positive), every @ scored.per_unit(chosen & scored.known))


def _equal(
    given: Mapping[tuple[str, str], Mapping[str, Floats]],
    asked: Mapping[tuple[str, str], Ints],
    facts: Mapping[str, object],
) -> pd.DataFrame:
    rows = []
    for (model, variant), budget in asked.items():
        if kind_of(model) != "ensemble":
            continue
        of = [str(member) for member in facts["stages" if model == "cascade" else "members"]]  # type: ignore[attr-defined]
        mine = given[model, variant][""]
        others = {name: theirs for name, theirs in given[model, variant].items() if name}
        best = most_precise({name: float(theirs[0]) for name, theirs in others.items() if name in of})
        for name, theirs in others.items():
            difference = mine - theirs
            bounds = difference_interval(mine, theirs)
            rows.append(
                {
                    "model": model, "other_model": name, "alerts": int(budget.sum()), "precision": mine[0],
                    "other_precision": theirs[0], "difference": difference[0], "low": bounds.low, "high": bounds.high,
                    "share_better": share_better(difference[1:]), "member": name in of, "best": name == best,
                }
            )  # fmt: skip
    columns = (
        "model", "other_model", "alerts", "precision", "other_precision", "difference", "low", "high", "share_better",
        "member", "best",
    )  # fmt: skip
    return pd.DataFrame(rows, columns=list(columns))


def _without_rows(scored: Scored) -> Scored:
    """Give the same model without its rows, which would not all fit into memory."""
    fields = {
        field.name: _EMPTY for field in dataclasses.fields(Scored) if field.name not in ("model", "variant", "shared")
    }
    return dataclasses.replace(scored, **fields)  # type: ignore[arg-type]


def at_alerts_of(ours: Pool, theirs: Pool, model: str, *, sparing: bool) -> tuple[Hits, Hits, Hits]:
    """Compare two profiles of the same fleets at equal numbers of alerts.

    ``ours``, ``theirs``: the same fleets in the same order, resampled alike, replayed with two profiles.
    ``model``: model of ``theirs``.
    ``sparing``: at the number of alerts that ``theirs`` gives at each decision time; otherwise at the budget K.
    Raises ``ValueError`` if the pools do not hold the same units and decision times.
    """
    same = np.array_equal(ours.shared.times_ms, theirs.shared.times_ms)
    if not same or not np.array_equal(ours.shared.units.astype(str), theirs.shared.units.astype(str)):
        raise ValueError("the two profiles were not replayed on the same units and decision times")
    every = np.concatenate([np.ones((1, len(ours.shared.units))), ours.weights])
    mine = ours.scored(str(ours.parts[0].facts["profile"]), SLIDING)
    other = theirs.scored(model, SLIDING)
    best = ours.scored(ORACLE, ORACLE)
    if not sparing:
        budget = ours.shared.budget
        return _hits(mine, budget, every), _hits(other, budget, every), _hits(best, budget, every)
    budget = other.per_time(other.alert)
    return _hits(mine, budget, every), _hits(other, budget, every, other.alert), _hits(best, budget, every)
