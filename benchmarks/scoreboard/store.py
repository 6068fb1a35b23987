"""What one replayed fleet leaves, small enough to keep: rows once, and each model's ranks, risks and alerts.

::

    PART/rows.parquet            decision time, unit, label, incident of each row, by decision time and unit
    PART/scores/MODEL.VARIANT.parquet   rank (int32), risk (float32), alert, in the order of the rows
    PART/units.json              names of the units, sorted
    PART/labels/                 rows and events without features, see benchmarks/scoreboard/promised.py
    PART/facts.json              budget, counts, seconds, memory; written last: without it the part is not finished
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from evaluation.metrics.oracle import ORACLE, oracle_predictions
from evaluation.metrics.scored import milliseconds

FACTS = "facts.json"
_SCORES = "scores"
_INCIDENT = ("incident", "start_ms", "failure_class")


@dataclass(frozen=True, slots=True)
class Stored:
    """A finished part.

    ``facts``: ``key``, ``k``, ``incidents``, ``oracle_coverage``, ``profile``, ``members`` and more.
    """

    path: Path
    facts: Mapping[str, Any]

    @property
    def models(self) -> list[tuple[str, str]]:
        """Models and variants that it holds, sorted."""
        names = sorted(path.stem for path in (self.path / _SCORES).glob("*.parquet"))
        return [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in names]

    def units(self) -> list[str]:
        """Names of the units."""
        return list(json.loads((self.path / "units.json").read_text(encoding="utf-8")))

    def rows(self) -> dict[str, np.ndarray]:
        """``time_ms``, ``unit``, ``label`` (-1: none), ``fold``, ``incident`` (-1: none), ``start_ms``, class."""
        table = pq.read_table(self.path / "rows.parquet")
        return {name: table[name].to_numpy() for name in table.column_names}

    def scores(self, model: str, variant: str) -> dict[str, np.ndarray]:
        """``rank``, ``risk`` and ``alert`` of a model, in the order of the rows."""
        table = pq.read_table(self.path / _SCORES / f"{model}.{variant}.parquet")
        return {name: table[name].to_numpy() for name in table.column_names}


def load(path: Path, key: str | None = None) -> Stored | None:
    """Give a finished part, or None where it is not finished or was made from something else.

    ``key``: what it must have been made from.
    """
    try:
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return Stored(path, facts) if key is None or facts["key"] == key else None


def keep(path: Path, predictions: pd.DataFrame, truth: pd.DataFrame, facts: Mapping[str, Any]) -> Stored:
    """Condense a backtest's predictions and its oracle into a part.

    ``path``: folder to write to; exists and holds no part.
    ``predictions``: as ``run_backtest`` returns it: the same decisions of the same units for each
    model.
    ``facts``: facts to keep; ``k`` and ``key`` among them.
    Raises ``ValueError`` if the models were not scored on the same rows, or a variant's name holds a dot.
    """
    (path / _SCORES).mkdir(parents=True, exist_ok=True)
    blocks = predictions.groupby(["model", "variant"], observed=True, sort=False).indices
    positions = np.asarray(next(iter(blocks.values())))
    first = predictions.iloc[positions]
    units = sorted(first["unit"].astype("str").unique())
    place = {unit: code for code, unit in enumerate(units)}
    code = _codes(first["unit"], place)
    time = milliseconds(first["decision_time"])
    order = np.lexsort((code, time))
    label = first["label"].to_numpy(dtype=np.float64, na_value=np.nan)
    positive = label == 1
    incident = np.where(positive, first["incident"].to_numpy(dtype=np.float64, na_value=-1.0), -1.0)
    kind = first["failure_class"].astype("object").where(positive, "")
    rows = {
        "time_ms": time,
        "unit": code,
        "label": np.nan_to_num(label, nan=-1.0).astype(np.int8),
        "fold": first["fold"].to_numpy(dtype=np.int16),
        "incident": incident.astype(np.int32),
        "start_ms": np.where(positive, milliseconds(first["incident_start"]), 0),
        "failure_class": kind.to_numpy(dtype=object),
    }
    _write({name: values[order] for name, values in rows.items()}, path / "rows.parquet")
    for (model, variant), mine in blocks.items():
        if "." in str(variant):  # the files' names end in it
            raise ValueError(f"a variant's name must hold no dot: {variant}")
        block = predictions.iloc[np.asarray(mine)]
        own_time, own_code = milliseconds(block["decision_time"]), _codes(block["unit"], place)
        own = np.lexsort((own_code, own_time))
        same = np.array_equal(own_time[own], time[order]) and np.array_equal(own_code[own], code[order])
        if not same:
            raise ValueError(f"{model} ({variant}) was scored on other rows than the first model")
        _write_scores(block, path, f"{model}.{variant}", own)
    best = oracle_predictions(first, truth, int(facts["k"]))
    best_order = np.lexsort((_codes(best["unit"], place), milliseconds(best["decision_time"])))
    _write_scores(best, path, f"{ORACLE}.{ORACLE}", best_order)
    coverage = float(np.isfinite(best["risk"].to_numpy(dtype=np.float64)).mean())
    (path / "units.json").write_text(json.dumps(units), encoding="utf-8")
    facts_and_coverage = {**facts, "oracle_coverage": coverage}
    (path / f".{FACTS}").write_text(json.dumps(facts_and_coverage, indent=1, sort_keys=True), encoding="utf-8")
    (path / f".{FACTS}").replace(path / FACTS)
    return Stored(path, facts_and_coverage)


def _codes(units: pd.Series, place: Mapping[str, int]) -> np.ndarray:
    if isinstance(units.dtype, pd.CategoricalDtype):
        known = np.array([place.get(str(name), -1) for name in units.cat.categories], dtype=np.int32)
        return known[units.cat.codes.to_numpy()]
    return units.astype("str").map(place).to_numpy(dtype=np.int32)


def _write_scores(block: pd.DataFrame, path: Path, name: str, order: np.ndarray) -> None:
    columns = {
        "rank": block["rank"].to_numpy(dtype=np.int32),
        "risk": block["risk"].to_numpy(dtype=np.float32, na_value=np.nan),
        "alert": block["alert"].to_numpy(dtype=np.bool_),
    }
    _write({key: values[order] for key, values in columns.items()}, path / _SCORES / f"{name}.parquet")


def _write(columns: Mapping[str, np.ndarray], path: Path) -> None:
    arrays = {
        name: pa.array(values).dictionary_encode() if values.dtype == object else pa.array(values)
        for name, values in columns.items()
    }
    pq.write_table(pa.table(arrays), path, compression="zstd")
