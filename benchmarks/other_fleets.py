"""Learn two fleets that are not GPUs under load: disks with SMART counters, and GPUs with lifetimes only.

Generates each (:mod:`tests.fleets`), imports it, builds its features and replays it with the parameters in
``params/disks.yaml`` and ``params/lifetimes.yaml`` alone, and says what each stage took. The replay's profile is then
compared, walk-forward with the same refits, spans, K and rows, with what one would try first: LightGBM as it comes on
last values, ages and places (fitted on all rows of the span, and on the profile's own draw of negatives), and counts
of past failures (of the device and its node, and of its model as seen so far). Differences come with bootstrap
intervals by device, the same resamples on both sides.

    python benchmarks/other_fleets.py [--quick] [--kinds disks,lifetimes] [--seed 1] [--work FOLDER]

``--quick`` takes a tenth of the devices. Development uses seeds from 100 on; reports seed 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lightgbm import LGBMClassifier

from evaluation.metrics.assessment import Assessment, assess
from evaluation.metrics.bootstrap import resample_units
from evaluation.metrics.scored import Scored, Shared
from features.matrix.matrix import FeatureMatrix
from features.times import instant_ms, milliseconds
from models.rows.ranking import rank_within
from models.rows.training_set import Labels, Rows, choose_rows, known_rows
from models.training.schedule import instant_of
from pipeline.params import Params, load_params

ROOT = Path(__file__).resolve().parents[1]
NAME = "other_fleets"
WORK = ROOT / "benchmarks" / "work" / "other-fleets"
STATISTICS = ("precision_at_k", "average_precision", "capture", "roc_auc")
LIMIT_SECONDS, LIMIT_MB = 900.0, 8000.0
"""What the whole of one fleet may take: 15 minutes, 8 GB."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fleet: how it is made and imported.

    ``devices``, ``quick``: devices at full size and with ``--quick``.
    ``sources``: arguments of ``predrain import``; ``{raw}`` is the generator's folder.
    """

    devices: int
    quick: int
    sources: tuple[str, ...]


KINDS = {
    "disks": Kind(
        87_000,
        8_700,
        (
            *("--samples", "{raw}/samples", "--events", "{raw}/events.parquet"),
            *("--inventory", "{raw}/inventory.parquet", "--mapping", str(ROOT / "params" / "disks-mapping.yaml")),
        ),
    ),
    "lifetimes": Kind(30_000, 3_000, ("--events", "{raw}/events.csv", "--inventory", "{raw}/inventory.csv")),
}


def staged(name: str, command: list[str]) -> dict[str, Any]:
    """Run a command in a process of its own.

    Returns: ``stage``, ``wall_s``, ``cpu_s`` (of all its threads), ``peak_mb``.
    Raises ``SystemExit`` if it fails.
    """
    began = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nended with {child.returncode}")
    return {
        "stage": name,
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss / 1024),
    }


def run_chain(kind: str, *, quick: bool, seed: int, work: Path, params: list[Path]) -> list[dict[str, Any]]:
    """Generate, import, build features, replay, train; what stands in ``work`` is made anew."""
    spec = KINDS[kind]
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    devices = str(spec.quick if quick else spec.devices)
    make = [sys.executable, "-m", f"tests.fleets.{kind}", "--out", str(work / "raw"), "--devices", devices]
    stages = [staged("generate", [*make, "--seed", str(seed)])]
    verb = str(Path(sys.executable).with_name("predrain"))
    given = [each for path in params for each in ("--params", str(path))]
    sources = [each.format(raw=work / "raw") for each in spec.sources]
    dataset, matrix, out = (str(work / each) for each in ("dataset", "matrix", "replay"))
    stages.append(staged("import", [verb, "import", *sources, "--out", dataset, *given]))
    stages.append(staged("features", [verb, "features", "--dataset", dataset, "--out", matrix, *given]))
    stages.append(staged("backtest", [verb, "backtest", "--matrix", matrix, "--out", out, "--no-report", *given]))
    stages.append(staged("train", [verb, "train", "--matrix", matrix, "--out", str(work / "bundle"), *given]))
    return stages


@dataclass(frozen=True, slots=True)
class Tested:
    """The rows that a replay scored: positions in the matrix, and what is known of each.

    ``rows``: ascending in (time, unit).
    ``time``: decision times in ms.
    ``frame``: the profile's predictions in the same order.
    """

    rows: np.ndarray
    time: np.ndarray
    tie: np.ndarray
    frame: pd.DataFrame
    labels: pd.DataFrame


def tested_rows(matrix: FeatureMatrix, rows: Rows, predictions: pd.DataFrame) -> Tested:
    """Find the predictions' rows in the matrix.

    Raises ``SystemExit`` if they are not the same rows.
    """
    unit = predictions["gpu"].astype("str") if matrix.unit == "gpu" else predictions["node"].astype("str")
    frame = predictions.assign(unit=unit, ms=milliseconds(predictions["decision_time"]))
    frame = frame.sort_values(["ms", "unit"], kind="stable", ignore_index=True)
    inside = ~rows.augmented & (rows.time >= frame["ms"].iloc[0]) & (rows.time <= frame["ms"].iloc[-1])
    found = np.flatnonzero(inside)
    units = matrix.rows["unit"].astype("str").to_numpy(dtype=object)[found]
    order = np.lexsort((units, rows.time[found]))
    found, units = found[order], units[order]
    if len(found) != len(frame) or (units != frame["unit"].to_numpy(dtype=object)).any():
        raise SystemExit("the predictions' rows are not the matrix's")
    labels = matrix.labels(None).iloc[found].reset_index(drop=True)
    return Tested(found, rows.time[found], rows.tie[found], frame, labels)


def plain_columns(matrix: FeatureMatrix) -> list[str]:
    """Columns of last values, ages and places: what a first try would take."""
    return [
        column.name
        for column in matrix.columns
        if column.group == "static" or (column.group == "telemetry" and column.statistic == "last")
    ]


def plain_lightgbm(
    matrix: FeatureMatrix, rows: Rows, tested: Tested, params: Params, folds: pd.DataFrame, *, sampled: bool
) -> np.ndarray:
    """Score by LightGBM with the library's own settings, refitted when the profile was, on the same spans.

    ``sampled`` takes the profile's draw of negatives; otherwise every row of the span is learned from.
    """
    values = matrix.values(columns=plain_columns(matrix))
    score = np.empty(len(tested.rows))
    for fold in folds.itertuples():
        refit = instant_ms(fold.refit_at.to_pydatetime())
        labels = Labels.of(matrix.labels(instant_of(refit)))
        start = instant_ms(fold.train_start.to_pydatetime())
        if sampled:
            ratio = params.training.negative_ratio
            drawn = choose_rows(
                rows,
                labels,
                start_ms=start,
                complete_by_ms=refit,
                as_of_ms=refit,
                negative_ratio=ratio,
                seed=params.seed,
            )
            chosen = drawn.rows
        else:
            usable = known_rows(rows, labels, start_ms=start, complete_by_ms=refit, as_of_ms=refit)
            chosen = np.flatnonzero(usable & ~rows.augmented)
        learner = LGBMClassifier(verbose=-1, random_state=0, n_jobs=1)
        learner.fit(values[chosen], labels.label[chosen] == 1)
        mine = np.flatnonzero(tested.frame["fold"].to_numpy() == fold.fold)
        score[mine] = learner.predict_proba(values[tested.rows[mine]])[:, 1]
    return score


def failure_counts(matrix: FeatureMatrix, rows: Rows, tested: Tested) -> dict[str, np.ndarray]:
    """Score by what has failed before: the device and its node, and the model as seen so far.

    Returns: ``count_past_failures``: the device's incidents so far, plus its node's squeezed below 1.
    ``model_rate_so_far``: incidents of the model by then over its rows by then, one incident added to each model at the
    fleet's mean rate; absent where the inventory names no model.
    """
    incidents = matrix.incidents(None)
    known = milliseconds(incidents["known_at"] if "known_at" in incidents else incidents["start"])
    frame = matrix.rows
    scores = {"count_past_failures": np.zeros(len(tested.rows))}
    own = _counts_before(incidents["unit"], known, frame["unit"].iloc[tested.rows], tested.time)
    node = _counts_before(incidents["node"], known, frame["node"].iloc[tested.rows], tested.time)
    scores["count_past_failures"] = own + node / (1.0 + node)
    inventory = matrix.inventory
    if "model" in inventory and inventory["model"].notna().any():
        unit = inventory["gpu" if matrix.unit == "gpu" else "node"].astype("str")
        model_of = dict(zip(unit, inventory["model"].astype("str"), strict=True))
        grid = ~rows.augmented
        every = frame["unit"].astype("str").map(model_of)
        code, names = pd.factorize(every)
        failed = _counts_before(
            incidents["unit"].astype("str").map(model_of), known, pd.Series(names[code])[tested.rows], tested.time
        )
        seen = np.zeros((len(names), 0))
        times = np.unique(rows.time)
        at = np.searchsorted(times, rows.time)
        seen = np.zeros((len(names), len(times)))
        np.add.at(seen, (code[grid], at[grid]), 1.0)
        seen = np.cumsum(seen, axis=1)[code[tested.rows], at[tested.rows]]
        total = np.searchsorted(np.sort(known), tested.time) / np.maximum(np.searchsorted(rows.time, tested.time), 1)
        scores["model_rate_so_far"] = (failed + 1.0) / (seen + 1.0 / np.maximum(total, 1e-9))
    return scores


def _counts_before(owner: pd.Series, known: np.ndarray, asked: pd.Series, time_ms: np.ndarray) -> np.ndarray:
    """Count, for each (asked owner, time), the owner's facts known by then."""
    names = pd.Index(owner.astype("str").unique())
    code = names.get_indexer(owner.astype("str"))
    wanted = names.get_indexer(asked.astype("str"))
    shift = np.int64(1) << 43
    key = np.sort(code.astype(np.int64) * shift + known)
    ask = wanted.astype(np.int64) * shift
    count = np.searchsorted(key, ask + time_ms, side="right") - np.searchsorted(key, ask, side="left")
    return np.where(wanted >= 0, count, 0).astype(np.float64)


def assessed(
    name: str, score: np.ndarray, tested: Tested, k: int, weights: np.ndarray, units: tuple[np.ndarray, np.ndarray]
) -> Assessment:
    """Measure one score on the tested rows; ``units`` are each row's code and the sorted names."""
    times, at = np.unique(tested.time, return_inverse=True)
    labels = tested.labels
    label = labels["label"].to_numpy(dtype=np.float64, na_value=np.nan)
    positive = label == 1
    incident = np.where(positive, labels["incident"].fillna(-1).to_numpy(dtype=np.int64), -1)
    rank = rank_within(tested.time, score, tested.tie)
    scored = Scored(
        model=name,
        variant="sliding",
        shared=Shared(units=units[1], times_ms=times, k=k),
        time=at,
        unit=units[0],
        rank=rank,
        risk=np.full(len(score), np.nan),
        alert=rank <= k,
        known=~np.isnan(label),
        positive=positive,
        incident=incident,
        incident_start_ms=np.where(positive, milliseconds(labels["incident_start"]), 0),
        failure_class=np.where(positive, "other", "").astype(object),
        fold=tested.frame["fold"].to_numpy(dtype=np.int64),
    )
    return assess(scored, weights)


def compare(work: Path, params: list[Path], replicates: int, seed: int) -> dict[str, Any]:
    """Measure the profile and its peers on the same rows, and their differences by device."""
    matrix, settings = FeatureMatrix.open(work / "matrix"), load_params(params)
    rows = Rows.of(matrix.rows)
    tested = tested_rows(matrix, rows, pd.read_parquet(work / "replay" / "predictions.parquet"))
    folds = pd.read_parquet(work / "replay" / "evaluation" / "context_folds.parquet")
    folds = folds[folds["variant"] == "sliding"]
    k = int(json.loads((work / "replay" / "metrics.json").read_text())["k"])
    profile = -tested.frame["rank"].to_numpy(dtype=np.float64)
    scores = {settings.models.profile: profile}
    scores["plain_lightgbm"] = plain_lightgbm(matrix, rows, tested, settings, folds, sampled=False)
    scores["plain_lightgbm_sampled"] = plain_lightgbm(matrix, rows, tested, settings, folds, sampled=True)
    scores |= failure_counts(matrix, rows, tested)
    names, code = np.unique(tested.frame["unit"].to_numpy(dtype=str), return_inverse=True)
    units = code.astype(np.int64), names.astype(object)
    weights = resample_units(len(names), replicates, seed)
    found = {name: assessed(name, score, tested, k, weights, units) for name, score in scores.items()}
    mine = found[settings.models.profile]
    result: dict[str, Any] = {
        "k": k,
        "rows": len(tested.rows),
        "decision_times": len(np.unique(tested.time)),
        "devices": len(names),
        "incidents": len(mine.incidents),
        "base_rate": float(np.nanmean(tested.labels["label"].to_numpy(dtype=np.float64, na_value=np.nan))),
        "models": {},
    }
    for name, each in found.items():
        entry: dict[str, Any] = {}
        for statistic in STATISTICS:
            bounds = each.bounds(statistic)
            entry[statistic] = [each.point[statistic], bounds.low, bounds.high]
            if each is not mine:
                difference = mine.replicates[statistic] - each.replicates[statistic]
                low, high = np.nanquantile(difference, [0.025, 0.975]) if replicates else (np.nan, np.nan)
                gain = mine.point[statistic] - each.point[statistic]
                entry[f"{statistic}_gain"] = [gain, float(low), float(high)]
        result["models"][name] = entry
    return result


def taken(stages: list[dict[str, Any]]) -> tuple[float, float, int]:
    """Sum wall and processor seconds from import to the bundle, and give the highest peak in MB; 0 of no stages."""
    ours = stages[1:]
    peak = max((each["peak_mb"] for each in ours), default=0)
    return sum(each["wall_s"] for each in ours), sum(each["cpu_s"] for each in ours), peak


def show(kind: str, stages: list[dict[str, Any]], compared: dict[str, Any]) -> None:
    """Print what was measured as Markdown."""
    counts = {key: value for key, value in compared.items() if key != "models"}
    print(f"\n## {kind}: " + ", ".join(f"{key} {value:,.6g}" for key, value in counts.items()))
    print("\n| stage | wall s | CPU s | peak MB |\n|---|---|---|---|")
    for each in stages:
        print(f"| {each['stage']} | {each['wall_s']} | {each['cpu_s']} | {each['peak_mb']} |")
    if stages:
        wall, cpu, peak = taken(stages)
        print(f"| import to bundle | {wall:.1f} | {cpu:.1f} | {peak} |")
    print("\n| model | " + " | ".join(f"{each} | profile's gain" for each in STATISTICS) + " |")
    print("|---|" + "---|" * 2 * len(STATISTICS))
    for name, entry in compared["models"].items():
        cells = []
        for statistic in STATISTICS:
            cells.append("{:.4f} [{:.4f}, {:.4f}]".format(*entry[statistic]))
            gain = entry.get(f"{statistic}_gain")
            cells.append("" if gain is None else "{:+.4f} [{:+.4f}, {:+.4f}]".format(*gain))
        print(f"| {name} | " + " | ".join(cells) + " |")


def _params_of(kind: str) -> Path:
    return ROOT / "params" / f"{kind}.yaml"


def main() -> None:
    """Run both kinds, print the tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the devices")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bootstrap", type=int, default=200)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument(
        "--params", type=Path, action="append", default=[], help="more parameters, laid over the kind's"
    )
    parser.add_argument("--compare-only", action="store_true", help="take what an earlier run left in --work")
    args = parser.parse_args()
    kinds = {
        kind: (args.work / f"{kind}-{args.seed}{'-quick' if args.quick else ''}", [_params_of(kind), *args.params])
        for kind in args.kinds.split(",")
    }
    stages: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    if not args.compare_only:  # before anything is compared: what a process starts is charged with its own memory
        for kind, (work, params) in kinds.items():
            stages[kind] = run_chain(kind, quick=args.quick, seed=args.seed, work=work, params=params)
    report: dict[str, Any] = {}
    for kind, (work, params) in kinds.items():
        compared = compare(work, params, args.bootstrap, args.seed)
        show(kind, stages[kind], compared)
        report[kind] = {"stages": stages[kind], **compared}
    peers = ("plain_lightgbm", "plain_lightgbm_sampled", "count_past_failures", "model_rate_so_far")
    ratios = {}
    for kind, each in report.items():
        models = each["models"]
        mine = next(iter(models.values()))["average_precision"][0]
        best = max(models[peer]["average_precision"][0] for peer in peers if peer in models)
        ratios[kind] = mine / best
    took = {kind: taken(each["stages"]) for kind, each in report.items()}
    seconds, peak = max(wall for wall, _, _ in took.values()), max(most for _, _, most in took.values())
    line = {
        "name": NAME,
        "value": seconds,
        "unit": "s, the slower fleet from import to bundle",
        "peer": "best of plain LightGBM and failure counts",
        "ratio": min(ratios.values()),
        "limit_share": max(seconds / LIMIT_SECONDS, peak / LIMIT_MB),
        "cpu_s": max(cpu for _, cpu, _ in took.values()),
        "checked": True,
        "fleets": report,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
