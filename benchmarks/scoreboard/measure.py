"""Counts of a fleet's alerts, which can be summed over fleets, on its original nodes and on resamples of them."""

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
from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.lead_time import incident_table
from evaluation.metrics.metrics import Floats, Ints, Ranking, ratio, resample
from evaluation.metrics.oracle import ORACLE, oracle_predictions
from evaluation.metrics.scored import Scored

Sums = Mapping[str, Floats]
"""Counts by name: first on the original fleet, then on each resample; shape (1 + replicates,).

``hits``, ``alerts``: positive and labelled rows among the K riskiest of each decision time. ``right``, ``drains``:
episodes opened by the model's alerts, with known outcome. ``risk``, ``positives``, ``known``: sums over labelled GPUs.
``caught:CLASS``, ``incidents:CLASS``: incidents by failure class. ``right@P``, ``drains@P``: episodes above the risk
threshold for which a precision P was promised. ``ap``, ``auc``: average precision and ROC-AUC, which are averaged over
``fleets``.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a fleet.

    ``models``: counts by name: replays, members, baselines, ``oracle``, and ``paper NAME``.
    """

    fleet: Fleet
    k: int
    nodes: int
    units: int
    members: tuple[str, ...]
    models: Mapping[str, Sums]


def measure(fleet: Fleet, folder: Path, replicates: int) -> Measured:
    """Count the alerts of a finished fleet's models, all on the same resamples of nodes."""
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    seed = zlib.crc32(fleet.name.encode())
    truth: pd.DataFrame | None = pd.read_parquet(folder / "truth.parquet")
    models: dict[str, Sums] = {}
    nodes: dict[str, list[str]] = {}
    more = (*((PAPER,) if fleet.paper else ()), *((YOUNG, YOUNG_ALONE) if fleet.young else ()))
    for replay in (PROFILE, ALONE, ONCE, *more):
        rows = pd.read_parquet(folder / f"{replay}.parquet")
        period = YOUNG if replay in (YOUNG, YOUNG_ALONE) else PROFILE
        k = facts["young_k" if period == YOUNG else "k"]
        best = None if truth is None else oracle_predictions(rows, truth, k)
        truth = None  # one oracle will do
        for scored in split_predictions(rows, k, timedelta(seconds=facts["reach_s"]), best):
            if nodes.setdefault(period, list(scored.shared.nodes)) != list(scored.shared.nodes):
                raise ValueError(f"{fleet.name}: {scored.model} ({replay}) was not replayed on the same nodes")
            clusters, units = scored.shared.n_clusters, scored.shared.units
            weights = np.vstack([np.ones(clusters), resample(clusters, replicates, seed)])
            named = {PROFILE: scored.model, PAPER: f"{PAPER} {scored.model}"}.get(replay, replay)
            own = scored.model == facts["profile"] and replay == PROFILE
            promises = facts["promises"] if own else {}
            ranked = own or named in (ALONE, ONCE, YOUNG, YOUNG_ALONE, ORACLE)
            models[PROFILE if own else named] = counts(scored, weights, promises, ranked=ranked)
    return Measured(fleet, facts["k"], len(nodes[PROFILE]), units, tuple(facts["members"]), models)


def counts(scored: Scored, weights: Floats, promises: Mapping[str, Mapping[str, float]], *, ranked: bool) -> Sums:
    """Count the alerts of one model.

    ``weights``: weight of each cluster: 1, then by resample; shape (1 + replicates, clusters).
    ``promises``: risk threshold by precision and fold.
    ``ranked``: whether to compute ``ap`` and ``auc`` too.
    """
    top, known = scored.top(scored.shared.k), scored.known
    incidents = incident_table(scored)
    cluster, clusters = scored.rows.incidents.cluster, scored.shared.n_clusters
    opened, outcome = scored.episodes()
    by_cluster: dict[str, Floats | Ints] = {
        "hits": scored.per_cluster(top & scored.positive),
        "alerts": scored.per_cluster(top & known),
        "right": scored.per_cluster(opened[outcome == 1]),
        "drains": scored.per_cluster(opened[outcome >= 0]),
        "risk": np.nan_to_num(scored.units.risk),
        "positives": scored.units.positive,
        "known": scored.units.known,
    }
    families = incidents["failure_class"].str.split(", ")
    for kind in families.explode().unique():
        mine = np.array([kind in names for names in families], dtype=bool)
        by_cluster[f"incidents:{kind}"] = np.bincount(cluster[mine], minlength=clusters)
        by_cluster[f"caught:{kind}"] = np.bincount(cluster[mine], incidents["caught"][mine], clusters)
    for target, thresholds in promises.items():
        asked = np.full(int(scored.rows.fold.max()) + 1, np.inf)
        asked[[int(fold) for fold in thresholds]] = list(thresholds.values())
        opened, outcome = replace(scored, alert=scored.risk >= asked[scored.rows.fold]).episodes()
        by_cluster[f"right@{target}"] = scored.per_cluster(opened[outcome == 1])
        by_cluster[f"drains@{target}"] = scored.per_cluster(opened[outcome >= 0])
    sums = dict(zip(by_cluster, (weights @ np.column_stack(list(by_cluster.values()))).T, strict=True))
    sums["fleets"] = np.ones(len(weights))
    if ranked:
        ranking = Ranking.build(-scored.rank[known], scored.positive[known], scored.rows.cluster[known], clusters)
        sums["ap"], sums["auc"] = ranking.precision_and_auc(weights)
    return sums


def added(fleets: Sequence[Measured], model: str) -> dict[str, Floats]:
    """Sum a model's counts over fleets."""
    every = [fleet.models[model] for fleet in fleets]
    names = dict.fromkeys(name for sums in every for name in sums)
    nothing = np.zeros_like(every[0]["fleets"])
    return {name: sum((sums.get(name, nothing) for sums in every), nothing) for name in names}


def share(sums: Sums, part: str, whole: str) -> Floats:
    """Divide one count by another; NaN for a zero divisor."""
    return ratio(sums[part], sums[whole])
