"""What the benchmarks share that walk forward over development fleets with many ways to learn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit

from benchmarks.scoreboard.spread import lead_bounds
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from features.times import duration_ms, instant_ms
from models.assessment import Assessment
from models.bootstrap import Interval, interval
from models.checkpoint import code_digest
from models.metrics import Floats, ratio
from models.ranking import rank_within
from models.schedule import instant_of
from models.trainer import reach_of
from models.training_set import Labels, Rows
from pipeline.params import Params
from simulator.simulate import simulate
from telemetry.store import Dataset

APART = 3653 * 86_400_000
"""Milliseconds between the fleets' clocks, so that pooled fleets share no decision time."""

SHOWN = ("precision_at_k", "average_precision", "recall", "capture")

Refit = tuple[np.ndarray, dict[str, np.ndarray], dict[str, float]]
"""The rows that a refit tested, every variant's score of them, and the seconds that each took to fit."""


class KeptRefits:
    """What refits gave, in files: a run that was killed does only the others."""

    def __init__(self, folder: Path, benchmark: Path, variants: Mapping[str, Any], params: Params) -> None:
        self._folder, self._names = folder, list(variants)
        told = json.dumps([code_digest(), repr(dict(variants)), params.model_dump(mode="json")], sort_keys=True)
        self._key = hashlib.sha256(told.encode() + benchmark.read_bytes())

    def of(self, matrix: FeatureMatrix, refit_ms: int, tested: np.ndarray, make: Callable[[], Refit]) -> Refit:
        """Take what a refit of a matrix gave for the rows it tests from its file, or make it and leave it there."""
        key = self._key.copy()
        key.update(f"{matrix.digest} {refit_ms}".encode() + tested.tobytes())
        file = self._folder / f"{key.hexdigest()}.npz"
        if not file.is_file():
            _, scores, seconds = make()
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".partial.npz")
            took = [seconds[name] for name in self._names]
            np.savez(unfinished, scores=np.stack([scores[name] for name in self._names]), seconds=took)
            unfinished.replace(file)
        found = np.load(file)
        return (
            tested,
            dict(zip(self._names, found["scores"], strict=True)),
            dict(zip(self._names, found["seconds"].tolist(), strict=True)),
        )


def walk(
    held: Held,
    after: int,
    refit_every: timedelta,
    kept: KeptRefits,
    make: Callable[[Rows, int, int, np.ndarray], Refit],
    *,
    span: timedelta = timedelta(0),
) -> Iterator[Refit]:
    """Walk forward, from one part in ``after`` of the fleet's time on, and not before a span with its labels fits.

    ``make`` is given the matrix's rows, the refit, the reach of labels (both in milliseconds) and the rows that are
    decided until the next refit.
    """
    rows = Rows.of(held.matrix.rows)
    reach_ms = reach_of(rows, Labels.of(held.matrix.labels(None)))
    first_ms, end_ms = (instant_ms(each) for each in held.matrix.span)
    refit_ms = max(first_ms + (end_ms - first_ms) // after, first_ms + reach_ms + duration_ms(span))
    while refit_ms < end_ms - reach_ms:
        following = refit_ms + duration_ms(refit_every)
        tested = np.flatnonzero(~rows.augmented & (rows.time >= refit_ms) & (rows.time < following))
        yield kept.of(held.matrix, refit_ms, tested, partial(make, rows, refit_ms, reach_ms, tested))
        refit_ms = following


class Held:
    """A feature matrix with its values in one memory-mapped file below a folder, so that many small reads are cheap."""

    def __init__(self, matrix: FeatureMatrix, folder: Path) -> None:
        self.matrix = matrix
        file = folder / f"values-{matrix.digest[:16]}.npy"
        if not file.is_file():
            unfinished = file.with_suffix(".partial.npy")
            np.save(unfinished, matrix.values())
            unfinished.rename(file)
        self.held = np.load(file, mmap_mode="r")

    def labels(self, refit_ms: int, *, censored: bool) -> Labels:
        """Give labels as of a refit, or those by which units that left have survived."""
        matrix, config = self.matrix, self.matrix.config
        if not censored:
            loose = replace(config, labels=config.labels.model_copy(update={"censor_leavers": False}))
            matrix = FeatureMatrix(matrix.path, replace(matrix.meta, config=loose))
        return Labels.of(matrix.labels(instant_of(refit_ms)))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Give the features of rows."""
        return np.asarray(self.held[rows])


def fleet(seed: int, params: Params, work: Path, gpus: int, days: int) -> Held:
    """Simulate a development fleet and compute its features, or take what an earlier call left."""
    folder = work / f"{params.simulate.scenario}-{gpus}-{days}-{seed}"
    if not (folder / "matrix").is_dir():
        simulate(
            folder / "dataset",
            gpus=gpus,
            days=days,
            seed=seed,
            scenario=params.simulate.scenario,
            acceleration=params.simulate.acceleration,
        )
        build_matrix(
            Dataset.open(folder / "dataset"),
            folder / "matrix",
            decision=params.decision,
            labels=params.labels,
            features=params.features,
            training=params.training,
            seed=params.seed,
        )
    return Held(FeatureMatrix.open(folder / "matrix"), folder)


def predictions(
    held: Held, place: int, tested: np.ndarray, score: np.ndarray, fold: np.ndarray, k: int
) -> pd.DataFrame:
    """Make one fleet's predictions of one variant, on a clock and with unit names of their own."""
    rows = held.matrix.rows.iloc[tested].reset_index(drop=True)
    labels = held.matrix.labels(None).iloc[tested].reset_index(drop=True)
    tie = Rows.of(held.matrix.rows).tie[tested]
    time_ms = rows["decision_time"].to_numpy(dtype="datetime64[ms]").astype(np.int64)
    rank = rank_within(time_ms, score, tie)
    shift = timedelta(milliseconds=place * APART)
    return pd.DataFrame(
        {
            "decision_time": rows["decision_time"] + shift,
            "unit": f"f{place}-" + rows["unit"].astype("str"),
            "model": "variant",
            "variant": "sliding",
            "score": score,
            "risk": expit(score),
            "rank": rank,
            "alert": rank <= k,
            "label": labels["label"],
            "failure_class": labels["failure_class"],
            "incident": labels["incident"] + place * 1_000_000,
            "incident_start": labels["incident_start"] + shift,
            "fold": fold,
        }
    )


def earlier(each: Assessment, peer: Assessment, weights: Floats) -> tuple[float, Interval]:
    """Give the mean of how many hours earlier incidents that both caught were alerted than by the peer.

    Medians of lead time alone are of other incidents for each: one that catches more may catch late ones.
    """
    lead, other = (one.incidents.set_index("incident")["lead_time_hours"] for one in (each, peer))
    hours = (lead - other).reindex(each.incidents["incident"]).to_numpy()
    both = np.isfinite(hours)
    units = each.scored.shared.units.astype(str)
    unit = np.searchsorted(units, each.incidents["unit"].to_numpy(dtype=str)[both])
    total = np.bincount(unit, hours[both], len(units))
    number = np.bincount(unit, minlength=len(units)).astype(np.float64)
    return float(ratio(total.sum(), number.sum())), interval(ratio(weights @ total, weights @ number))


def report(
    assessed: Mapping[str, Assessment],
    seconds: Mapping[str, float],
    k: int,
    weights: Floats,
    *,
    name: str,
    reference: str,
) -> None:
    """Print the table and the line of JSON of a benchmark of that name, differences taken from ``reference``.

    ``weights`` are the resamples of the GPUs by which all were assessed.
    """
    benchmark, peer = name, assessed[reference]
    shared = peer.scored.shared
    known, positive = int(peer.scored.known.sum()), int(peer.scored.positive.sum())
    print(
        f"{len(shared.units):,} GPUs, {len(shared.times_ms)} decision times, {len(peer.incidents)} incidents, K = {k}; "
        f"{positive:,} of {known:,} rows positive ({100 * positive / known:.3f} %); "
        f"differences from {reference} in points, 95 % intervals by GPU; lead: median over the caught incidents; "
        f"earlier: mean over those that {reference} caught too"
    )
    print(
        f"{'variant':<40}{'P@K %':>8}{'difference':>24}{'AP x 100':>10}{'difference':>24}{'recall %':>10}"
        f"{'top 5 %':>9}{'difference':>24}{'lead h':>24}{'earlier h':>24}{'risk ratio':>12}{'fit s':>8}"
    )
    others = {}
    for variant, each in assessed.items():
        told = []
        for statistic in ("precision_at_k", "average_precision", "capture"):
            bounds = interval(100 * (each.replicates[statistic] - peer.replicates[statistic]))
            difference = 100 * (each.point[statistic] - peer.point[statistic])
            told.append("" if variant == reference else f"{difference:+.2f} [{bounds.low:+.2f}, {bounds.high:+.2f}]")
        lead = float(each.incidents["lead_time_hours"].median())
        bounds = lead_bounds(each.incidents, shared.units, weights)
        told.append(f"{lead:.1f} [{bounds.low:.1f}, {bounds.high:.1f}]")
        hours, bounds = earlier(each, peer, weights)
        told.append("" if variant == reference else f"{hours:+.2f} [{bounds.low:+.2f}, {bounds.high:+.2f}]")
        point = {statistic: 100 * each.point[statistic] for statistic in SHOWN}
        print(
            f"{variant:<40}{point['precision_at_k']:>8.2f}{told[0]:>24}{point['average_precision']:>10.2f}{told[1]:>24}"
            f"{point['recall']:>10.1f}{point['capture']:>9.1f}{told[2]:>24}{told[3]:>24}{told[4]:>24}"
            f"{each.calibration.risk_ratio:>12.2f}{seconds[variant]:>8.2f}"
        )
        others[variant] = {key: round(float(value), 3) for key, value in point.items()}
        if np.isfinite(lead):  # JSON knows no NaN: one that caught nothing has no lead time
            others[variant]["lead_hours"] = round(lead, 3)
    best = max((name for name in assessed if name != reference), key=lambda name: others[name]["precision_at_k"])
    line = {
        "name": benchmark,
        "value": others[best]["precision_at_k"],
        "unit": f"precision@K in % of {best}",
        "peer": reference,
        "ratio": round(others[best]["precision_at_k"] / max(others[reference]["precision_at_k"], 1e-9), 3),
        "limit_share": None,
        "checked": True,
        "others": others,
    }
    print(json.dumps(line))
