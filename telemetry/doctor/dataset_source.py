"""Looking at a dataset: which channels its newest days have, for which GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.config import format_duration
from telemetry.dataset.channel import Channel
from telemetry.dataset.dataset import Dataset
from telemetry.dataset.meta import DatasetMeta
from telemetry.dataset.place import Place
from telemetry.doctor.observation import ChannelSeen, Finding, Observation

LOOKED_AT: Final = timedelta(days=7)
"""The newest part of a dataset, which is looked at."""

MOST_BUCKETS: Final = 16
"""Buckets that are read, spread evenly: each is a random share of the nodes."""

_OLD: Final = timedelta(days=1)


@dataclass(slots=True)
class _Tally:
    rows: int = 0
    values: int = 0
    gpus: int = 0
    constant: bool = True
    newest_ms: int = 0


def observe_dataset(
    place: Place,
    *,
    channels: Mapping[str, Channel],
    now: datetime,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Observation:
    """Look at the newest :data:`LOOKED_AT` of a dataset.

    Raises ``InputError`` if there is no dataset, or it is damaged.
    """
    dataset = Dataset.open(place)
    meta = dataset.meta
    buckets = _spread(dataset.buckets())
    columns = [name for name in meta.channels if name in channels]
    tallies = {name: _Tally() for name in columns}
    sending: set[str] = set()
    since = meta.span[1] - LOOKED_AT
    for number, bucket in enumerate(buckets, start=1):
        sending |= _tally_bucket(dataset, bucket, columns, since, tallies)
        progress(number, len(buckets))
    newest_ms = max((each.newest_ms for each in tallies.values()), default=0)
    seen = {
        name: ChannelSeen(
            name,
            each.gpus,
            None,
            1.0 - each.values / each.rows,
            each.constant if each.values else None,
            0,
            (newest_ms - each.newest_ms) / 1000.0 if each.newest_ms else None,
        )
        for name, each in tallies.items()
        if each.rows
    }
    events, inventory = dataset.events(), dataset.inventory()
    in_service = inventory[inventory["removed_at"].isna()]
    looked_at = in_service[in_service["node"].map(dataset.bucket_of).isin(set(buckets))]
    # What a board can report is asked of those that send: a silent GPU is another matter than a missing channel.
    heard = looked_at[looked_at[meta.unit].isin(sending)]
    return Observation(
        kind="dataset",
        where=str(place),
        at=now,
        units=len(sending),
        nodes=int(in_service["node"].nunique()),
        models={str(model): int(count) for model, count in heard["model"].value_counts().sort_index().items()},
        channels=seen,
        xid_events=bool((events["type"] == "xid").any()),
        facts=_facts(dataset, events, buckets),
        findings=(*_silent(looked_at[~looked_at[meta.unit].isin(sending)], meta), *_findings(dataset, events, now)),
    )


def _silent(stays: pd.DataFrame, meta: DatasetMeta) -> list[Finding]:
    """Tell of units that the inventory has in service and that sent nothing."""
    if stays.empty or not meta.channels:
        return []
    first = stays.iloc[0]
    what = "GPU" if meta.unit == "gpu" else "node"
    return [
        Finding(
            f"{len(stays):,} {what}s of the inventory sent nothing in the newest {format_duration(LOOKED_AT)}, such as "
            f"{first[meta.unit]} on {first['node']}",
            "Are they dead, or gone? Tell of those taken out: `removed_at` in an --inventory, or a ticket.",
        )
    ]


def _spread(buckets: list[int]) -> list[int]:
    if len(buckets) <= MOST_BUCKETS:
        return buckets
    return [buckets[at] for at in np.linspace(0, len(buckets) - 1, MOST_BUCKETS).astype(int)]


def _tally_bucket(
    dataset: Dataset, bucket: int, columns: list[str], since: datetime, tallies: dict[str, _Tally]
) -> set[str]:
    """Count one bucket, a channel at a time, and return its units."""
    key = dataset.meta.unit
    keys = dataset.read_bucket(bucket, ["timestamp", key], since=since)
    units = set(pc.unique(keys[key].cast(pa.string())).to_pylist())
    for name in columns:
        values = dataset.read_bucket(bucket, [name], since=since)[name]
        valid = pc.is_valid(values)
        tally = tallies[name]
        tally.rows += len(values)
        count = int(pc.sum(valid).as_py() or 0)
        if not count:
            continue
        instants = keys["timestamp"].cast(pa.int64())
        table = pa.table({"unit": keys[key].cast(pa.string()), "value": values, "ms": instants})
        by_unit = table.filter(valid).group_by("unit").aggregate([("value", "min"), ("value", "max"), ("ms", "max")])
        tally.values += count
        tally.gpus += by_unit.num_rows
        tally.constant = tally.constant and bool(pc.all(pc.equal(by_unit["value_min"], by_unit["value_max"])).as_py())
        tally.newest_ms = max(tally.newest_ms, int(pc.max(by_unit["ms_max"]).as_py()))
    return units


def _facts(dataset: Dataset, events: pd.DataFrame, buckets: list[int]) -> dict[str, str]:
    meta = dataset.meta
    xids = events[events["type"] == "xid"]
    sources = sorted(str(each) for each in xids["source"].dropna().unique())
    looked = f"the newest {format_duration(LOOKED_AT)}"
    if len(buckets) < len(dataset.buckets()):
        looked += f", {len(buckets)} of {len(dataset.buckets())} buckets"
    return {
        "span": " to ".join(instant.isoformat() for instant in meta.span),
        "step": format_duration(meta.step),
        "looked at": looked,
        "XIDs": f"{len(xids):,}" + (f" from {', '.join(sources)}" if sources else ""),
        "quarantined rows": f"{sum(meta.quarantine.values()):,}",
    }


def _findings(dataset: Dataset, events: pd.DataFrame, now: datetime) -> list[Finding]:
    meta = dataset.meta
    found = []
    if not meta.channels:
        found.append(
            Finding(
                "the dataset holds no telemetry, only events and inventory",
                "Collect some: `predrain collect prometheus` for history, `predrain collect exporters` from now on.",
            )
        )
    if not (events["type"] == "xid").any():
        found.append(
            Finding(
                "no XID is among the events",
                "Import the kernel logs (`predrain import --events`), or follow them (`predrain collect kernel-log`).",
            )
        )
    kinds = set(events["type"])
    if not kinds & {"repair", "replacement"}:
        found.append(
            Finding(
                "no repair and no replacement is among the events: incidents end only by time",
                "Bring in the tickets (`predrain collect tickets`), or what the scheduler knows "
                "(`predrain collect slurm`, `predrain collect kubernetes`).",
                problem=False,
            )
        )
    age = now - meta.span[1]
    if age > _OLD:
        found.append(
            Finding(f"the newest row is {age.days:,} days old", "Start a live collector, if it shall score.", False)
        )
    rows = meta.counts.get("samples", 0)
    aside = sum(meta.quarantine.values())
    if rows and aside > rows / 100:
        first = max(meta.quarantine, key=lambda reason: meta.quarantine[reason])
        found.append(
            Finding(
                f"{aside:,} rows or values were set aside, most for: {first}",
                f"Look at {dataset.place}/quarantine and correct the source or the mapping.",
            )
        )
    return found
