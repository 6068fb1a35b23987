"""Counts of a fleet's alerts that add up over fleets, on its GPUs as they are and on resamples of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.scoreboard.fleets import ALONE, FACTS, ONCE, PAPER, PROFILE, YOUNG, YOUNG_ALONE, Fleet
from evaluation.metrics.bootstrap import resample_units
from evaluation.metrics.lead_time import incident_table
from evaluation.metrics.metrics import Floats, Ranking, ratio
from evaluation.metrics.oracle import ORACLE, oracle_predictions
from evaluation.metrics.scored import Scored, split_predictions

Sums = Mapping[str, Floats]
"""Counts by name, each on the units as they are and then on each resample; shape (1 + replicates,).

``hits``, ``alerts``: positive and labelled rows among the K riskiest of each decision time. ``right``, ``drains``:
episodes that the model's alerts open, of known outcome. ``risk``, ``positives``, ``known``: sums over labelled rows.
``caught:CLASS``, ``incidents:CLASS``: incidents, by failure class. ``right@P``, ``drains@P``: episodes from the risks
on for which a precision P was promised. ``ap``, ``auc``: average precision and area under the ROC curve, which do not
add up but are averaged over ``fleets``.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one fleet showed.

    ``models``: counts by model: the names of replays, of members and baselines, ``oracle``, and
    ``paper NAME``.
    """

    fleet: Fleet
    k: int
    units: int
    members: tuple[str, ...]
    models: Mapping[str, Sums]


def measure(fleet: Fleet, folder: Path, replicates: int) -> Measured:
    """Count what a finished fleet's models did; GPUs are resampled alike for all of them."""
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    seed = zlib.crc32(fleet.name.encode())
    truth: pd.DataFrame | None = pd.read_parquet(folder / "truth.parquet")
    models: dict[str, Sums] = {}
    units: dict[str, list[str]] = {}
    more = (*((PAPER,) if fleet.paper else ()), *((YOUNG, YOUNG_ALONE) if fleet.young else ()))
    for replay in (PROFILE, ALONE, ONCE, *more):
        rows = pd.read_parquet(folder / f"{replay}.parquet")
        period = YOUNG if replay in (YOUNG, YOUNG_ALONE) else PROFILE
        k = facts["young_k" if period == YOUNG else "k"]
        best = None if truth is None else oracle_predictions(rows, truth, k)
        truth = None  # one oracle will do
        for scored in split_predictions(rows, k, timedelta(seconds=facts["reach_s"]), best):
            if units.setdefault(period, list(scored.shared.units)) != list(scored.shared.units):
                raise ValueError(f"{fleet.name}: {scored.model} ({replay}) was not replayed on the same units")
            weights = np.vstack([np.ones(scored.n_units), resample_units(scored.n_units, replicates, seed)])
            named = {PROFILE: scored.model, PAPER: f"{PAPER} {scored.model}"}.get(replay, replay)
            own = scored.model == facts["profile"] and replay == PROFILE
            promises = facts["promises"] if own else {}
            ranked = own or named in (ALONE, ONCE, YOUNG, YOUNG_ALONE, ORACLE)
            models[PROFILE if own else named] = counts(scored, weights, promises, ranked=ranked)
    return Measured(fleet, facts["k"], len(units[PROFILE]), tuple(facts["members"]), models)


def counts(scored: Scored, weights: Floats, promises: Mapping[str, Mapping[str, float]], *, ranked: bool) -> Sums:
    """Count what one model did.

    ``weights``: how often each unit counts: once, and as resampled; shape (1 + replicates, units).
    ``promises``: threshold of risk by precision and fold.
    ``ranked``: whether to take the area under its curves too.
    """
    top, known = scored.top(scored.shared.budget), scored.known
    incidents = incident_table(scored)
    unit = pd.Index(scored.shared.units.astype(str)).get_indexer(incidents["unit"])
    opened, outcome = scored.episodes()
    by_unit = {
        "hits": scored.per_unit(top & scored.positive),
        "alerts": scored.per_unit(top & known),
        "right": scored.per_unit(opened[outcome == 1]),
        "drains": scored.per_unit(opened[outcome >= 0]),
        "risk": np.bincount(scored.unit[known], np.nan_to_num(scored.risk[known]), scored.n_units),
        "positives": scored.per_unit(scored.positive),
        "known": scored.per_unit(known),
    }
    for kind in incidents["failure_class"].unique():
        mine = (incidents["failure_class"] == kind).to_numpy()
        by_unit[f"incidents:{kind}"] = np.bincount(unit[mine], minlength=scored.n_units)
        by_unit[f"caught:{kind}"] = np.bincount(unit[mine], incidents["caught"][mine], scored.n_units)
    for target, thresholds in promises.items():
        asked = np.full(int(scored.fold.max()) + 1, np.inf)
        asked[[int(fold) for fold in thresholds]] = list(thresholds.values())
        opened, outcome = replace(scored, alert=scored.risk >= asked[scored.fold]).episodes()
        by_unit[f"right@{target}"] = scored.per_unit(opened[outcome == 1])
        by_unit[f"drains@{target}"] = scored.per_unit(opened[outcome >= 0])
    sums = dict(zip(by_unit, (weights @ np.column_stack(list(by_unit.values()))).T, strict=True))
    sums["fleets"] = np.ones(len(weights))
    if ranked:
        ranking = Ranking.build(-scored.rank[known], scored.positive[known], scored.unit[known], scored.n_units)
        sums["ap"], sums["auc"] = ranking.both(weights)
    return sums


def added(fleets: Sequence[Measured], model: str) -> dict[str, Floats]:
    """Add up a model's counts over fleets."""
    every = [fleet.models[model] for fleet in fleets]
    names = dict.fromkeys(name for sums in every for name in sums)
    nothing = np.zeros_like(every[0]["fleets"])
    return {name: sum((sums.get(name, nothing) for sums in every), nothing) for name in names}


def share(sums: Sums, part: str, whole: str) -> Floats:
    """Divide one count by another; NaN where there is nothing to divide by."""
    return ratio(sums[part], sums[whole])
