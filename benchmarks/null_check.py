"""Whether the whole chain finds nothing where nothing is, and something where something is.

    python benchmarks/null_check.py [--quick] [--work FOLDER]

Five runs of features, training, scoring and evaluation on a fleet simulated without failures:

``shuffled``     a fleet with failures whose labels were handed to GPUs drawn at random, each incident on its own and at
                 its own time. Drawn among all GPUs in service, not only those of the same model: else the model's own
                 rate would rightly be learned. Everything after the features runs on labels that nothing explains.
``independent``  incidents at a constant rate at random GPUs and times, written into the events of a fleet that has no
                 failures of its own, and everything rerun from the dataset on: features, labels, models.
``planted``      the same incidents, and before each of them the GPU runs hot for a day: must be found.
``leak``         ``independent``, and a feature that reads the future, with noise: the check must notice.
``leak shuffled``  ``shuffled`` with such a feature.

At chance means: of no model does precision@K, average precision or ROC-AUC lie above what chance gives by more than
sampling explains. The intervals resample GPUs; as three measures of a dozen models are looked at, each is judged at a
twentieth over their number, one-sided. ``--quick`` takes a smaller fleet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from features.labels import label_rows
from features.matrix import FeatureMatrix
from features.vocabulary import FeatureColumn
from models.evaluation import evaluate
from models.sliding import run_backtest
from pipeline.params import Params, load_params
from pipeline.stages import make_matrix
from simulator.simulate import simulate
from telemetry.store import Dataset, DatasetWriter

ROOT = Path(__file__).resolve().parents[1]
MEASURES = ("precision_at_k", "average_precision", "roc_auc")
LEVEL = 0.05
"""Chance that a clean chain is called a leak, over all models and measures of one run."""

HOT_C = 6.0
"""What the planted signal adds to the GPU temperature, for :data:`HOT_BEFORE` before an incident."""

HOT_BEFORE = timedelta(hours=24)
REPAIR = timedelta(hours=12)
TEMPERATURE = "gpu_temp_c"


@dataclass(frozen=True, slots=True)
class Size:
    """How large a check is.

    Attributes
    ----------
    gpus, days : int
        The fleet.
    incidents : int
        Incidents drawn.
    acceleration : float
        Of the fleet whose incidents are shuffled.
    seed : int
        Of the fleets and all draws.
    """

    gpus: int
    days: int
    incidents: int
    acceleration: float
    seed: int = 151


QUICK = Size(gpus=64, days=45, incidents=150, acceleration=60.0)
MODERATE = Size(gpus=512, days=90, incidents=900, acceleration=15.0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One measure of one model.

    Attributes
    ----------
    model, variant, measure : str
        What was measured.
    value, low, high : float
        Estimate and 95 % interval.
    chance : float
        What chance gives.
    z : float
        Standard errors above chance.
    """

    model: str
    variant: str
    measure: str
    value: float
    low: float
    high: float
    chance: float
    z: float

    @property
    def holds_chance(self) -> bool:
        """Whether the 95 % interval holds what chance gives."""
        return self.low <= self.chance <= self.high


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run found.

    Attributes
    ----------
    name : str
        The run.
    findings : tuple of Finding
        Every model, variant and measure; the baseline ``random`` is among them.
    incidents : int
        Incidents in the period tested.
    """

    name: str
    findings: tuple[Finding, ...]
    incidents: int

    @property
    def limit(self) -> float:
        """Standard errors above chance that sampling explains, for as many measures as were looked at."""
        return NormalDist().inv_cdf(1 - LEVEL / max(len(self.findings), 1))

    @property
    def above(self) -> tuple[Finding, ...]:
        """Findings above chance by more than that."""
        return tuple(each for each in self.findings if each.z > self.limit)

    def of(self, model: str, measure: str) -> Finding:
        """Give a measure of a model refitted all along."""
        return next(
            each for each in self.findings if (each.model, each.variant, each.measure) == (model, "sliding", measure)
        )


class Wrapped:
    """A feature matrix with something of it replaced."""

    def __init__(self, matrix: Any, tag: str) -> None:
        self._matrix = matrix
        self._digest = hashlib.sha256(f"{matrix.digest} {tag}".encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matrix, name)

    @property
    def digest(self) -> str:
        """Digest of the matrix and of what replaced a part of it."""
        return self._digest


class ShuffledOwners(Wrapped):
    """A matrix whose incidents belong to GPUs drawn at random, each incident on its own, at its own time."""

    def __init__(self, matrix: FeatureMatrix, seed: int) -> None:
        super().__init__(matrix, f"owners shuffled {seed}")
        self._seed = seed
        stays = matrix.inventory
        column = "gpu" if matrix.unit == "gpu" else "node"
        self._unit = stays[column].to_numpy(dtype=object)
        self._from = stays["installed_at"].to_numpy(dtype="datetime64[ms]")
        removed = stays["removed_at"].fillna(pd.Timestamp("2200-01-01", tz="UTC"))
        self._until = removed.to_numpy(dtype="datetime64[ms]")

    def incidents(self, as_of: datetime | None = None) -> pd.DataFrame:
        """Give the incidents with their new owners; an incident keeps its owner whenever it is asked for."""
        found: pd.DataFrame = self._matrix.incidents(as_of).copy()
        owners = []
        for unit, start in zip(found["unit"], found["start"], strict=True):
            at = np.datetime64(start.tz_convert(None), "ms")
            there = np.flatnonzero((self._from <= at) & (at < self._until))
            name = f"{self._seed} {unit} {start.value}".encode()
            owners.append(self._unit[there[int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) % len(there)]])
        found["unit"] = pd.array(owners, dtype="str")
        # the new owners' incidents may overlap, which those of one GPU never do: the later one is dropped
        found = found.sort_values(["unit", "start"], kind="stable")
        end = found["end"].fillna(pd.Timestamp("2200-01-01", tz="UTC"))
        before = end.groupby(found["unit"]).cummax().groupby(found["unit"]).shift()
        found = found[~(before > found["start"])]
        return found.sort_values(["start", "unit"], kind="stable", ignore_index=True)

    def labels(self, as_of: datetime | None = None, *, horizon: timedelta | None = None) -> pd.DataFrame:
        """Label the rows by the new owners' incidents; our own drains and leavers belong to the old ones."""
        labels = self._matrix.config.labels.model_copy(update={"censor_leavers": False})
        if horizon is not None:
            labels = labels.model_copy(update={"horizon": horizon})
        return label_rows(
            self._matrix.rows,
            self.incidents(as_of),
            self._matrix.inventory,
            labels,
            data_end=self._matrix.span[1],
            as_of=as_of,
        )


class ReadsTheFuture(Wrapped):
    """A matrix with one more feature: whether an incident follows, hidden in noise as large as the signal."""

    def __init__(self, matrix: Any, seed: int, *, strength: float = 2.0) -> None:
        super().__init__(matrix, f"reads the future {seed} {strength}")
        label = matrix.labels(None)["label"].fillna(0).to_numpy(dtype=np.float32)
        noise = np.random.default_rng(seed).normal(size=len(label))
        self._leak = (strength * label + noise).astype(np.float32)
        leaking = FeatureColumn.of("telemetry", "from_the_future", "mean", window=timedelta(hours=6))
        self._columns = [*matrix.columns, leaking]

    @property
    def columns(self) -> list[FeatureColumn]:
        """The columns and the one that leaks."""
        return self._columns

    def values(self, row_indices: Any = None) -> np.ndarray:
        """Features of rows, the one that leaks last."""
        leak = self._leak if row_indices is None else self._leak[np.asarray(row_indices)]
        return np.column_stack([self._matrix.values(row_indices), leak])


def draw_incidents(dataset: Dataset, count: int, seed: int) -> pd.DataFrame:
    """Draw failures, and a repair after each, at a constant rate: any GPU and any time of the dataset alike.

    Returns
    -------
    DataFrame
        Events of the dataset's own shape.
    """
    rng = np.random.default_rng(seed)
    stays = dataset.inventory()
    first, last = (pd.Timestamp(each) for each in dataset.meta.span)
    chosen = stays.iloc[rng.integers(0, len(stays), count)]
    minutes = rng.integers(0, int((last - first).total_seconds() // 60), count)
    failed = pd.Series(first + pd.to_timedelta(np.sort(minutes), unit="min"))
    parts = [
        pd.DataFrame(
            {
                "timestamp": failed + shift,
                "node": chosen["node"].to_numpy(),
                "gpu": chosen["gpu"].to_numpy(),
                "type": kind,
                "code": code,
                "detail": "",
                "source": "drawn",
                "known_at": failed + shift + timedelta(minutes=10),
            }
        )
        for kind, code, shift in (("failure", "gpu_lost", timedelta(0)), ("repair", "reset", REPAIR))
    ]
    events = pd.concat(parts, ignore_index=True)
    return events[events["timestamp"] < last].sort_values(["timestamp", "type"], kind="stable", ignore_index=True)


def with_incidents(source: Path, out: Path, *, count: int, seed: int, planted: bool) -> Path:
    """Copy a dataset with drawn incidents as its only failures; ``planted``: the GPU runs hot before each."""
    original = Dataset.open(source)
    drawn = draw_incidents(original, count, seed)
    own = original.events()
    kept = own[own["type"] == "driver"]
    drawn = drawn[kept.columns]
    for column in ("timestamp", "known_at"):
        drawn[column] = drawn[column].astype(kept[column].dtype)
    events = pd.concat([kept, drawn], ignore_index=True).sort_values("timestamp", kind="stable", ignore_index=True)
    failures = drawn[drawn["type"] == "failure"]
    starts = {gpu: each.to_numpy(dtype="datetime64[ms]") for gpu, each in failures.groupby("gpu")["timestamp"]}
    with DatasetWriter(
        out,
        step=original.meta.step,
        channels=original.meta.channels,
        unit=original.meta.unit,
        buckets=original.meta.buckets,
        sample_count=original.meta.sample_count,
    ) as writer:
        for bucket in original.buckets():
            table = original.read_bucket(bucket)
            writer.write_samples(bucket, heated(table, starts) if planted else table)
        writer.finish(
            events=events, inventory=original.inventory(), span=original.meta.span, sources=original.meta.sources
        )
    return out


def heated(table: pa.Table, starts: dict[str, np.ndarray]) -> pa.Table:
    """Add :data:`HOT_C` to the temperature of GPUs in the day before their incidents."""
    gpu = table["gpu"].cast(pa.string()).to_numpy(zero_copy_only=False)
    at = table["timestamp"].to_numpy().astype("datetime64[ms]")
    hot = np.zeros(len(at), dtype=bool)
    for name in np.unique(gpu):
        mine = np.flatnonzero(gpu == name)
        for start in starts.get(name, ()):
            before = start - at[mine]
            hot[mine[(before > np.timedelta64(0, "ms")) & (before <= np.timedelta64(HOT_BEFORE, "ms"))]] = True
    place = table.schema.get_field_index(TEMPERATURE)
    field = table.schema.field(place)
    warmer = pc.add(table[TEMPERATURE], pa.scalar(HOT_C, field.type))
    return table.set_column(place, field, pc.if_else(pa.array(hot), warmer, table[TEMPERATURE]))


def measure(name: str, matrix: Any, params: Params) -> Outcome:
    """Run the backtest on a matrix and set every measure beside what chance gives."""
    result = run_backtest(
        matrix, training=params.training, models=params.models, backtest=params.backtest, seed=params.seed
    )
    found = evaluate(result.predictions, k=result.k, bootstrap=params.backtest.bootstrap, seed=params.seed)
    findings = []
    for _, row in found.table.iterrows():
        for each in MEASURES:
            chance = 0.5 if each == "roc_auc" else float(row["base_rate"])
            value, low, high = (float(row[key]) for key in (each, f"{each}_low", f"{each}_high"))
            error = (high - low) / (2 * NormalDist().inv_cdf(0.975))
            z = (value - chance) / error if error > 0 else 0.0
            findings.append(Finding(str(row["model"]), str(row["variant"]), each, value, low, high, chance, z))
    return Outcome(name, tuple(findings), int(found.table["incidents"].max()))


def small_params() -> Params:
    """Parameters of the quick check: few trees, few windows, every kind of learner and ensemble."""
    base = load_params([ROOT / "params.yaml"])
    training = base.training.model_copy(
        update={
            "span": timedelta(days=21),
            "spans": (timedelta(days=21),),
            "refit_every": timedelta(days=14),
            "augmentation": 2,
        }
    )
    features = base.features.model_copy(
        update={"windows": (timedelta(hours=6),), "history_windows": (timedelta(days=7), timedelta(days=30))}
    )
    learners = ("lightgbm", "xgboost", "logistic")
    models = base.models.model_copy(
        update={
            "learners": learners,
            "parallel": base.models.parallel.model_copy(update={"members": learners}),
            "cascade": base.models.cascade.model_copy(update={"stages": ("lightgbm", "logistic")}),
            "settings": {"lightgbm": {"n_estimators": 60}, "xgboost": {"n_estimators": 60}},
        }
    )
    backtest = base.backtest.model_copy(update={"k": 4, "bootstrap": 100})
    return base.model_copy(update={"training": training, "features": features, "models": models, "backtest": backtest})


def moderate_params() -> Params:
    """Take the parameters of params.yaml on one span."""
    base = load_params([ROOT / "params.yaml"])
    training = base.training.model_copy(update={"span": timedelta(days=28), "refit_every": timedelta(days=14)})
    return base.model_copy(update={"training": training})


def run_checks(
    work: Path, size: Size, params: Params, names: Sequence[str] = ("shuffled", "independent", "planted", "leak")
) -> dict[str, Outcome]:
    """Run the checks asked for and give their outcomes by name."""
    out: dict[str, Outcome] = {}
    if {"shuffled", "leak shuffled"} & set(names):
        fleet = work / "failing"
        simulate(fleet, gpus=size.gpus, days=size.days, seed=size.seed, scenario="base", acceleration=size.acceleration)
        shuffled = ShuffledOwners(make_matrix(fleet, params, work / "failing-matrix"), size.seed)
        if "shuffled" in names:
            out["shuffled"] = measure("shuffled", shuffled, params)
        if "leak shuffled" in names:
            out["leak shuffled"] = measure("leak shuffled", ReadsTheFuture(shuffled, size.seed), params)
    if {"independent", "planted", "leak"} & set(names):
        quiet = work / "quiet"
        simulate(quiet, gpus=size.gpus, days=size.days, seed=size.seed + 1, scenario="noprecursor", acceleration=1e-6)
        drawn: dict[str, Any] = {"count": size.incidents, "seed": size.seed + 2}
        if {"independent", "leak"} & set(names):
            flat = with_incidents(quiet, work / "independent", planted=False, **drawn)
            matrix = make_matrix(flat, params, work / "independent-matrix")
            if "independent" in names:
                out["independent"] = measure("independent", matrix, params)
            if "leak" in names:
                out["leak"] = measure("leak", ReadsTheFuture(matrix, size.seed), params)
        if "planted" in names:
            hot = with_incidents(quiet, work / "planted", planted=True, **drawn)
            out["planted"] = measure("planted", make_matrix(hot, params, work / "planted-matrix"), params)
    return out


def passed(outcomes: dict[str, Outcome]) -> dict[str, bool]:
    """Tell of each run whether it came out as it must: at chance, or found."""
    return {name: (not each.above) == (name in ("shuffled", "independent")) for name, each in outcomes.items()}


def show(outcomes: dict[str, Outcome], profile: str) -> str:
    """Give the table: the profile's measures, and the largest of any model."""
    lines = [
        f"{'run':<15}{'measure':<20}{'profile':>9}{'95 % interval':>20}{'chance':>9}{'largest z':>11}{'limit':>7}  of"
    ]
    for name, outcome in outcomes.items():
        for each in MEASURES:
            own = outcome.of(profile, each)
            most = max((one for one in outcome.findings if one.measure == each), key=lambda one: one.z)
            interval = f"[{own.low:.4f}, {own.high:.4f}]"
            lines.append(
                f"{name:<15}{each:<20}{own.value:>9.4f}{interval:>20}{own.chance:>9.4f}{most.z:>11.2f}"
                f"{outcome.limit:>7.2f}  {most.model}, {most.variant}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run all checks, print the table and the line of JSON; leave with 1 if one came out otherwise than it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller fleet and fewer trees")
    parser.add_argument("--work", type=Path, help="keep the fleets and matrices here")
    args = parser.parse_args()
    size, params = (QUICK, small_params()) if args.quick else (MODERATE, moderate_params())
    names = ("shuffled", "leak shuffled", "independent", "leak", "planted")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_checks(args.work or Path(folder), size, params, names)
    verdicts = passed(outcomes)
    print(f"{size.gpus} GPUs, {size.days} days, {time.perf_counter() - began:.0f} s")
    print(show(outcomes, params.models.profile))
    for name, outcome in outcomes.items():
        found = f"{len(outcome.above)} of {len(outcome.findings)} measures above chance"
        print(f"{name}: {outcome.incidents} incidents tested, {found}: {'as it must' if verdicts[name] else 'WRONG'}")
    null = {name: max(each.z for each in outcomes[name].findings) for name in ("shuffled", "independent")}
    limit = max(outcomes[name].limit for name in null)
    print(
        json.dumps(
            {
                "name": "null_check",
                "value": round(max(null.values()), 3),
                "unit": "standard errors above chance, the largest of all models and measures",
                "peer": "what sampling explains",
                "ratio": round(max(null.values()) / limit, 3),
                "limit_share": round(max(null.values()) / limit, 3),
                "checked": all(verdicts.values()),
                "runs": verdicts,
            }
        )
    )
    if not all(verdicts.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
