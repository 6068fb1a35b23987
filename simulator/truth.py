"""The truth folder: what really happened and how likely it was. Only the evaluation reads it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from simulator.fleet import HOUR, NEVER, Clock, Node, gpu_name
from simulator.hazards import PRECURSOR, Cause
from simulator.lives import Laws, Lives
from simulator.parameters import Parameters
from simulator.records import Records
from simulator.risk import hidden_rows, true_risk
from telemetry.dataset.schema import INSTANT, conform

RISK = pa.schema([("timestamp", INSTANT), ("node", pa.string()), ("gpu", pa.string()), ("risk", pa.float64())])
"""risk.parquet: one row for each GPU in service and up, every 6 h from 00:00 UTC."""

FAILURES = pa.schema(
    [
        pa.field("gpu", pa.string(), nullable=False),
        pa.field("node", pa.string(), nullable=False),
        ("slot", pa.string()),
        pa.field("start", INSTANT, nullable=False),
        ("logged", INSTANT),
        ("failure_class", pa.string()),
        ("mechanism", pa.string()),
        ("cause", pa.string()),
        ("precursor", pa.string()),
        ("announced", pa.bool_()),
        ("degraded_at", INSTANT),
        ("lemon", pa.bool_()),
        ("xid", pa.bool_()),
        ("repaired", INSTANT),
        ("replaced", pa.bool_()),
    ]
)
"""failures.parquet: what really happened; :func:`failures_frame` explains the columns."""

_BATCH = 256


@dataclass(frozen=True, slots=True)
class History:
    """A simulated fleet's hidden side: its nodes, and for each its lives and records, in the same order."""

    nodes: list[Node]
    lives: list[Lives]
    records: list[Records]


def failures_frame(history: History, parameters: Parameters, clock: Clock, seed: int) -> pd.DataFrame:
    """List the failures that start within the simulated time.

    Returns: ``gpu``, ``node``, ``slot``, ``start``, ``logged`` (first record's time), ``failure_class``, ``mechanism``,
    ``cause``, ``precursor`` (none, weak, strong, structural), ``announced`` (a degradation or state before it),
    ``degraded_at`` (null: it came from healthy), ``lemon``, ``xid`` (logged with one), ``repaired`` (null: not within
    the time), ``replaced``; sorted by start.
    """
    rows: list[dict[str, Any]] = []
    for node, life, record in zip(history.nodes, history.lives, history.records, strict=True):
        for number, (slot, stay, start, kind, cause, lemon, repaired, replaced, onset) in enumerate(
            life.failures.tolist()
        ):
            if not clock.start <= start < clock.end:
                continue
            mechanism = None if kind < 0 else parameters.hazards.mechanisms[kind]
            rows.append(
                {
                    "gpu": gpu_name(seed, node.index, slot, stay),
                    "node": node.name,
                    "slot": str(slot),
                    "start": start,
                    "logged": record.logged[number],
                    "failure_class": "bus" if mechanism is None else mechanism.failure_class,
                    "mechanism": "undetected_pcie" if mechanism is None else mechanism.name,
                    "cause": Cause(cause).name.lower(),
                    "precursor": PRECURSOR[cause],
                    "announced": cause in (Cause.WEAK, Cause.STRONG, Cause.STRUCTURAL, Cause.HEALTH_CHECK),
                    "degraded_at": onset if onset >= 0 and cause not in (Cause.DIRECT, Cause.RECURRENCE) else None,
                    "lemon": bool(lemon),
                    "xid": record.with_xid[number],
                    "repaired": repaired if repaired < min(NEVER, clock.end) else None,
                    "replaced": bool(replaced),
                }
            )
    frame = pd.DataFrame(rows, columns=FAILURES.names).sort_values(["start", "gpu"], ignore_index=True)
    for name in ("start", "logged", "degraded_at", "repaired"):
        frame[name] = instants(frame[name])
    return frame


def instants(ms: pd.Series) -> pd.Series:
    """Turn milliseconds (null allowed) into aware UTC instants."""
    return pd.to_datetime(ms.astype("Int64"), unit="ms", utc=True).astype("datetime64[ms, UTC]")


def write_truth(
    folder: Path, history: History, failures: pd.DataFrame, about: dict[str, Any], laws: Laws,
    parameters: Parameters, clock: Clock, *, seed: int,
) -> int:  # fmt: skip
    """Write risk.parquet, failures.parquet and truth.json into an existing folder."""
    rows = 0
    with pq.ParquetWriter(folder / "risk.parquet", RISK, compression="zstd", compression_level=3) as writer:
        for first in range(0, len(history.nodes), _BATCH):
            part = risk_table(
                history.nodes[first : first + _BATCH],
                history.lives[first : first + _BATCH],
                laws,
                parameters,
                clock,
                seed,
            )
            rows += part.num_rows
            writer.write_table(part)
    pq.write_table(conform(failures, FAILURES), folder / "failures.parquet", compression="zstd")
    content = {
        **about,
        "risk_rows": rows,
        "failures": len(failures),
        "by_class": counted(failures["failure_class"]),
        "by_precursor": counted(failures["precursor"]),
        "gap_s": parameters.gap_s,
        "horizon_s": parameters.horizon_s,
    }
    (folder / "truth.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return rows


def risk_table(
    nodes: list[Node], lives: list[Lives], laws: Laws, parameters: Parameters, clock: Clock, seed: int
) -> pa.Table:
    """Return the true risks of some nodes' GPUs, in the layout of :data:`RISK`, sorted by (timestamp, node, gpu)."""
    found = hidden_rows(nodes, lives, laws, clock, every=parameters.risk_every_h * HOUR)
    risk = true_risk(found, laws, parameters, clock)
    key = found.node << 32 | found.slot << 24 | found.stay
    devices, code = np.unique(key, return_inverse=True)
    names = [gpu_name(seed, int(each >> 32), int(each >> 24 & 255), int(each & 0xFFFFFF)) for each in devices]
    name_of = {node.index: node.name for node in nodes}
    gpus = np.array(names, dtype=object)
    hosts = np.array([name_of[int(each >> 32)] for each in devices], dtype=object)
    rank = np.argsort(np.argsort(gpus.astype(str))) if len(gpus) else np.empty(0, np.int64)
    order = np.lexsort((rank[code], found.node, found.time))
    return pa.Table.from_arrays(
        [
            pa.array(found.time[order]).cast(INSTANT),
            pa.array(hosts[code[order]], pa.string()),
            pa.array(gpus[code[order]], pa.string()),
            pa.array(risk[order]),
        ],
        schema=RISK,
    )


def counted(values: pd.Series) -> dict[str, int]:
    """Count the values of a column, by name."""
    return dict(sorted((str(name), int(number)) for name, number in Counter(values).items()))
