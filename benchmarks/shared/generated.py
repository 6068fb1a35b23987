"""Generated telemetry for timing: random walks, and unrelated events at realistic rates.

It is written as a dataset, bucket by bucket; 350 million samples take minutes. It has no signal to learn from, unlike
the simulator's fleets.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from telemetry.dataset.channels import CATALOGUE, Channel
from telemetry.dataset.layout import Runs, choose_runs
from telemetry.dataset.schema import EVENTS
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter

START = datetime(2026, 1, 1, tzinfo=UTC)
NODE = 8
MISSING = 0.002  # share of missing samples, and of null values
PART = 16  # GPUs per part

FAILURES = 0.11
"""Failures per GPU-year that would require a drain (Llama-3: 0.111). Each is repaired within days."""

APPLICATION_XIDS = 3.0
"""XIDs of applications per GPU-year, which no label counts; same order of magnitude as in Acme."""


def channels_of(gauges: int, counters: int, flags: int = 0, enums: int = 0) -> dict[str, Channel]:
    """Return the first channels of each kind in the catalogue, without boolean gauges."""
    wanted = {"gauge": gauges, "counter": counters, "flags": flags, "enum": enums}
    chosen: dict[str, Channel] = {}
    for kind, count in wanted.items():
        of_kind = [channel for channel in CATALOGUE.values() if channel.kind == kind and channel.unit != "bool"]
        if len(of_kind) < count:
            raise ValueError(f"the catalogue has {len(of_kind)} channels of kind {kind}, not {count}")
        chosen.update({channel.name: channel for channel in of_kind[:count]})
    return chosen


def generate(
    path: Path,
    *,
    gpus: int,
    days: float,
    channels: dict[str, Channel],
    step: timedelta = timedelta(minutes=10),
    seed: int = 7,
    buckets: int | None = None,
    runs: Runs | None = None,
    failures: float = 0.0,
) -> Dataset:
    """Write a generated dataset.

    ``channels``: from :func:`channels_of`.
    ``buckets``: default: about two million samples each.
    ``runs``: partition of its time; default: as in the simulator.
    ``failures``: failures per GPU-year, such as :data:`FAILURES`; if not 0, there are :data:`APPLICATION_XIDS` too.
    """
    steps = round(timedelta(days=days) / step)
    names = [f"node-{i:05d}" for i in range(-(-gpus // NODE))]
    units = [(names[i // NODE], f"GPU-{i:06d}", i % NODE) for i in range(gpus)]
    count = buckets or max(8, -(-gpus * steps // 2_000_000))
    times = np.datetime64(START.replace(tzinfo=None), "ms") + np.arange(steps) * np.timedelta64(step, "ms")
    runs = choose_runs(gpus * (timedelta(days=1) / step) / count, days) if runs is None else runs
    with DatasetWriter(path, step=step, channels=channels, buckets=count, runs=runs) as writer:
        by_bucket: dict[int, list[tuple[str, str, int]]] = {}
        for unit in units:
            by_bucket.setdefault(writer.bucket_of(unit[0]), []).append(unit)

        def write(bucket: int) -> None:
            rng = np.random.default_rng([seed, bucket])
            own = sorted(by_bucket[bucket], key=lambda unit: unit[1])
            parts = [own[begin : begin + PART] for begin in range(0, len(own), PART)]
            writer.write_samples(bucket, pa.concat_tables(_table(part, times, channels, rng) for part in parts))

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(write, bucket) for bucket in sorted(by_bucket)]:
                done.result()
        inventory = pd.DataFrame(
            {
                "node": [unit[0] for unit in units],
                "gpu": [unit[1] for unit in units],
                "slot": pd.array([unit[2] for unit in units], dtype="Int32"),
                "model": ["H100" if i % 3 else "A100" for i in range(gpus)],
                "driver": "550.54",
                "installed_at": pd.Series([START] * gpus, dtype="datetime64[ms, UTC]"),
                "removed_at": pd.Series([pd.NaT] * gpus, dtype="datetime64[ms, UTC]"),
            }
        )
        span = (START, START + step * (steps - 1))
        events = events_of(units, span, failures, np.random.default_rng([seed, 2**31]))
        return writer.finish(events=events, inventory=inventory, span=span)


def events_of(
    units: list[tuple[str, str, int]], span: tuple[datetime, datetime], failures: float, rng: np.random.Generator
) -> pd.DataFrame:
    """Draw failures, each with a repair, and XIDs of applications: independent of each other and of everything else."""
    if not failures:
        return EVENTS.empty_table().to_pandas()
    years = (span[1] - span[0]) / timedelta(days=365.25)

    def drawn(rate: float) -> tuple[np.ndarray, np.ndarray]:
        count = rng.poisson(rate * years * len(units))
        return rng.integers(0, len(units), count), rng.uniform(0.0, 1.0, count) * years * 365.25

    broken, at = drawn(failures)
    busy, then = drawn(APPLICATION_XIDS)
    repaired = at + rng.exponential(1.0, len(at))
    drawn_events = pd.DataFrame(
        {
            "unit": np.concatenate([broken, broken, busy]),
            "day": np.concatenate([at, repaired, then]),
            "type": ["failure"] * len(broken) + ["repair"] * len(broken) + ["xid"] * len(busy),
            "code": ["gpu_lost"] * len(broken) + [None] * len(broken) + ["31"] * len(busy),
        }
    )
    drawn_events = drawn_events[drawn_events["day"] < years * 365.25]
    time = (pd.Timestamp(span[0]) + pd.to_timedelta(drawn_events["day"], unit="D")).dt.as_unit("ms")
    return pd.DataFrame(
        {
            "timestamp": time,
            "node": [units[unit][0] for unit in drawn_events["unit"]],
            "gpu": [units[unit][1] for unit in drawn_events["unit"]],
            "type": drawn_events["type"].to_numpy(),
            "code": drawn_events["code"].to_numpy(),
            "detail": None,
            "source": "generated",
            "known_at": time + timedelta(minutes=10),
        }
    ).sort_values(["known_at", "timestamp", "node", "gpu", "code"], ignore_index=True)


def _table(
    units: list[tuple[str, str, int]], times: np.ndarray, channels: dict[str, Channel], rng: np.random.Generator
) -> pa.Table:
    n = len(units) * times.size
    present = rng.random(n) >= MISSING
    repeated = np.repeat(np.arange(len(units), dtype=np.int32), times.size)[present]
    columns: dict[str, pa.Array] = {
        "timestamp": pa.array(np.tile(times, len(units))[present]).cast(pa.timestamp("ms", tz="UTC")),
        "node": pa.DictionaryArray.from_arrays(repeated, [unit[0] for unit in units]).cast(pa.string()),
        "gpu": pa.DictionaryArray.from_arrays(repeated, [unit[1] for unit in units]).cast(pa.string()),
    }
    for channel in channels.values():
        unknown = rng.random(n)[present] < MISSING
        columns[channel.name] = _series(channel, len(units), times.size, present, unknown, rng)
    return pa.table(columns)


def _series(
    channel: Channel, units: int, steps: int, kept: np.ndarray, unknown: np.ndarray, rng: np.random.Generator
) -> pa.Array:
    if channel.kind == "gauge":
        level = 50.0 + 10.0 * rng.standard_normal((units, 1))
        walk = level + np.round(5.0 * rng.standard_normal((units, steps)), 1)
        return pa.array(np.clip(walk, 0.0, 100.0).astype(np.float32).ravel()[kept], mask=unknown)
    if channel.kind == "counter":
        rises = (rng.random((units, steps)) < 0.01) * rng.integers(1, 9, (units, steps))
        return pa.array(np.cumsum(rises, axis=1).astype(np.float64).ravel()[kept], mask=unknown)
    bits = rng.choice(np.array([0, 1, 4, 0x20]), units * steps, p=[0.7, 0.2, 0.09, 0.01])[kept]
    if channel.kind == "flags":
        return pa.array(bits.astype(np.uint64), mask=unknown)
    return pa.array((bits % 3).astype(np.int32), mask=unknown)
