"""Write a simulated fleet as a dataset, and its ground truth next to it.

The truth holds the actual failures and the true risks. Only the evaluation reads it.
"""

import json
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import FolderSwap, disk_errors, refuse_other_content
from foundation.running import Progress
from foundation.text import nearest_hint
from simulator.fleet import HOUR, NEVER, SimulatedTime, bus_id, driver_at, gpu_name, serial_number
from simulator.hazards import PRECURSOR, FailureCause
from simulator.risk import hidden_rows, true_risk
from simulator.run import Simulation, node_devices, run_fleet
from simulator.samples import channels, sample_table, signatures
from simulator.scenarios import SCENARIOS, Scenario
from simulator.workload import OUTCOMES
from telemetry.dataset.layout import choose_runs
from telemetry.dataset.schema import EVENTS, INSTANT, JOB_OPTIONS, JOBS, conform
from telemetry.dataset.writer import DatasetWriter

_BAD_LOT = 0
_SPARE_LOT = 40


def with_instants(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Convert columns of milliseconds (nullable) to aware UTC instants."""
    for name in names:
        instants = pd.to_datetime(frame[name].astype("Int64"), unit="ms", utc=True)
        frame[name] = instants.astype("datetime64[ms, UTC]")
    return frame


def inventory_frame(simulation: Simulation) -> pd.DataFrame:
    """Return one row per installation within the simulated time; ``rack_position`` is bottom, middle or top."""
    clock = simulation.clock
    rows: list[dict[str, Any]] = []
    for node, life in zip(simulation.nodes, simulation.lives, strict=True):
        model = simulation.parameters.fleet.models[node.model]
        for slot, installation, installed, removed, bad in life.installations.tolist():
            if installed >= clock.end or removed <= clock.start:
                continue
            name = gpu_name(simulation.seed, node.index, slot, installation)
            lot = _BAD_LOT if bad else (node.lot if installation == 0 else _SPARE_LOT)
            rows.append(
                {
                    "gpu": name,
                    "node": node.name,
                    "slot": str(slot),
                    "pci_bus_id": bus_id(slot),
                    "serial": serial_number(name, lot),
                    "model": model.name,
                    "driver": driver_at(sum(time <= installed for time in node.upgrades)),
                    "cluster": "cluster-1",
                    "group": model.group,
                    "rack": node.rack,
                    "nvlink_domain": f"{node.name}/nvlink" if model.has_nvlink else None,
                    "installed_at": installed,
                    "removed_at": removed if removed < min(NEVER, clock.end) else None,
                    "rack_position": ("bottom", "middle", "top")[node.height],
                }
            )
    return with_instants(pd.DataFrame(rows), "installed_at", "removed_at")


def events_frame(simulation: Simulation) -> pd.DataFrame:
    """Return all events."""
    rows = []
    for node, records in zip(simulation.nodes, simulation.records, strict=True):
        for event in records.events:
            gpu = None if event.slot < 0 else gpu_name(simulation.seed, node.index, event.slot, event.installation)
            fields = (event.type, event.code, event.detail, event.source, event.known)
            rows.append((event.time, node.name, gpu, *fields))
    return with_instants(pd.DataFrame(rows, columns=EVENTS.names), "timestamp", "known_at")


def jobs_frame(simulation: Simulation) -> pd.DataFrame:
    """Return all jobs, each on one whole node; jobs that are running at the end have no end and no outcome."""
    rows = []
    for node, run in zip(simulation.nodes, simulation.jobs, strict=True):
        gpus = min(node.slots, simulation.parameters.fleet.gpus_per_node)
        columns = (run.kind, run.begin, run.end, run.checkpoint, run.outcome, run.every // 1000)
        for number, job in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            kind, begin, end, checkpoint, outcome, every = job
            name = f"{'train' if kind == 1 else 'serve'}-{node.index:05d}-{number:05d}"
            end_and_outcome = (None, None) if OUTCOMES[outcome] == "running" else (end, OUTCOMES[outcome])
            rows.append(
                (name, node.name, None, begin, end_and_outcome[0], gpus, checkpoint or None, end_and_outcome[1], every)
            )
    names = [*JOBS.names, JOB_OPTIONS[0]]
    return with_instants(pd.DataFrame(rows, columns=names), "started_at", "ended_at", "checkpointed_at")


RISK = pa.schema([("timestamp", INSTANT), ("node", pa.string()), ("gpu", pa.string()), ("risk", pa.float64())])
"""risk.parquet: one row per GPU that is up, every 6 h from 00:00 UTC."""

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
"""failures.parquet: the actual failures; columns as in :func:`failures_frame`."""

_BATCH = 256


def failures_frame(simulation: Simulation) -> pd.DataFrame:
    """List the failures that start within the simulated time.

    Returns: ``gpu``, ``node``, ``slot``, ``start``, ``logged`` (first record's time), ``failure_class``, ``mechanism``,
    ``cause``, ``precursor`` (none, weak, strong, structural), ``announced`` (preceded by a degradation),
    ``degraded_at`` (null: failed from healthy), ``lemon``, ``xid`` (an XID was logged), ``repaired`` (null: not within
    the simulated time), ``replaced``; sorted by start.
    """
    clock, mechanisms = simulation.clock, simulation.parameters.hazards.mechanisms
    rows: list[tuple[Any, ...]] = []
    for node, life, record in zip(simulation.nodes, simulation.lives, simulation.records, strict=True):
        for number, failure in enumerate(life.failures.tolist()):
            slot, installation, start, kind, cause, lemon, repaired, replaced, onset = failure
            if not clock.start <= start < clock.end:
                continue
            failure_class, mechanism = "bus", "undetected_pcie"
            if kind >= 0:
                failure_class, mechanism = mechanisms[kind].failure_class, mechanisms[kind].name
            announced = cause not in (FailureCause.DIRECT, FailureCause.RECURRENCE)
            gpu = gpu_name(simulation.seed, node.index, slot, installation)
            returned = repaired if repaired < min(NEVER, clock.end) else None
            rows.append(
                (
                    gpu, node.name, str(slot), start, record.logged[number], failure_class, mechanism,
                    FailureCause(cause).name.lower(), PRECURSOR[cause], announced,
                    onset if onset >= 0 and announced else None, bool(lemon), record.with_xid[number], returned,
                    bool(replaced),
                )
            )  # fmt: skip
    frame = pd.DataFrame(rows, columns=FAILURES.names).sort_values(["start", "gpu"], ignore_index=True)
    return with_instants(frame, "start", "logged", "degraded_at", "repaired")


def write_truth(folder: Path, simulation: Simulation, failures: pd.DataFrame, metadata: dict[str, Any]) -> None:
    """Write risk.parquet, failures.parquet and truth.json into an existing folder."""
    rows = 0
    with pq.ParquetWriter(folder / "risk.parquet", RISK, compression="zstd", compression_level=3) as writer:
        for first in range(0, len(simulation.nodes), _BATCH):
            part = risk_table(simulation, slice(first, first + _BATCH))
            rows += part.num_rows
            writer.write_table(part)
    pq.write_table(conform(failures, FAILURES), folder / "failures.parquet", compression="zstd")
    content = {
        **metadata,
        "risk_rows": rows,
        "failures": len(failures),
        "by_class": counted(failures["failure_class"]),
        "by_precursor": counted(failures["precursor"]),
        "gap_s": simulation.parameters.gap_s,
        "horizon_s": simulation.parameters.horizon_s,
    }
    (folder / "truth.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def risk_table(simulation: Simulation, some: slice) -> pa.Table:
    """Return the true risks of a slice of the nodes, with schema :data:`RISK`, sorted by (timestamp, node, gpu)."""
    parameters, laws, clock = simulation.parameters, simulation.laws, simulation.clock
    nodes, lives = simulation.nodes[some], simulation.lives[some]
    rows = hidden_rows(nodes, lives, laws, clock, interval=parameters.risk_every_h * HOUR)
    risk = true_risk(rows, laws, parameters, clock)
    devices, code = np.unique(rows.node << 32 | rows.slot << 24 | rows.installation, return_inverse=True)
    names = [gpu_name(simulation.seed, key >> 32, key >> 24 & 255, key & 0xFFFFFF) for key in devices.tolist()]
    name_of = {node.index: node.name for node in nodes}
    gpus = np.array(names, dtype=object)
    hosts = np.array([name_of[key >> 32] for key in devices.tolist()], dtype=object)
    rank = np.argsort(np.argsort(gpus.astype(str))) if len(gpus) else np.empty(0, np.int64)
    order = np.lexsort((rank[code], rows.node, rows.time))
    columns = [
        pa.array(rows.time[order]).cast(INSTANT),
        pa.array(hosts[code[order]], pa.string()),
        pa.array(gpus[code[order]], pa.string()),
        pa.array(risk[order]),
    ]
    return pa.Table.from_arrays(columns, schema=RISK)


def counted(values: pd.Series) -> dict[str, int]:
    """Count the values of a column, sorted by name."""
    return dict(sorted((str(name), int(number)) for name, number in Counter(values).items()))


MAX_GPUS = 200_000
"""Sanity limit: larger than any current fleet."""

_ROWS_PER_BUCKET = 8_000_000
_MIN_BUCKETS = 16


def simulate(
    out: Path,
    *,
    gpus: int,
    days: int,
    seed: int,
    scenario: str | Scenario,
    truth: Path | None = None,
    acceleration: float = 1.0,
    step: timedelta = timedelta(minutes=10),
    start: datetime = datetime(2026, 1, 1, tzinfo=UTC),
    progress: Progress | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Simulate a fleet and write it as a dataset; byte-for-byte reproducible with any number of threads.

    ``scenario``: one of :data:`simulator.scenarios.SCENARIOS`, or a custom one.
    ``truth``: folder of the truth, outside of ``out``; default: ``OUT-truth`` next to it.
    ``acceleration``: factor on the rates of failures, degradations and recoverable hardware errors.
    ``step``: sample interval, divides a day. ``start``: 00:00 UTC of a day.
    Returns: summary of JSON types; ``incidents`` counts the failures within the simulated time.
    Raises ``InputError`` if an argument or a folder is invalid, or the disk is full.
    """
    chosen, clock = _checked(gpus, days, seed, scenario, acceleration, step, start)
    truth = out.with_name(out.name + "-truth") if truth is None else truth
    _check_places(out, truth)
    simulation = run_fleet(chosen, clock, gpus=gpus, seed=seed, acceleration=acceleration)
    failures = failures_frame(simulation)
    metadata = {
        "kind": "simulated",
        "scenario": scenario if isinstance(scenario, str) else "own",
        "seed": seed,
        "gpus": gpus,
        "days": days,
        "acceleration": acceleration,
        "step_s": step.total_seconds(),
        "start": start.astimezone(UTC).isoformat(),
        "drifts": sorted(chosen.drifts),
    }
    # The truth replaces the old one after the dataset: a run killed in between leaves an old truth, which its seed and
    # scenario (truth.json) distinguish from the new dataset's.
    with FolderSwap(truth) as swap:
        with disk_errors(truth):
            write_truth(swap.path, simulation, failures, metadata)
        buckets = max(_MIN_BUCKETS, -(-gpus * clock.steps // _ROWS_PER_BUCKET))  # each must fit in memory
        runs = choose_runs(gpus * (timedelta(days=1) / step) / buckets, days)
        with DatasetWriter(out, step=step, channels=channels(), buckets=buckets, runs=runs) as writer:
            _write_samples(writer, simulation, threads or os.cpu_count() or 1, progress)
            dataset = writer.finish(
                events=events_frame(simulation),
                inventory=inventory_frame(simulation),
                jobs=jobs_frame(simulation),
                span=(start.astimezone(UTC), start.astimezone(UTC) + timedelta(days=days) - step),
                sources=[metadata],
            )
        swap.commit()
    return {
        "dataset": str(out),
        "truth": str(truth),
        **{name: metadata[name] for name in ("scenario", "seed", "acceleration", "gpus", "days")},
        "nodes": len(simulation.nodes),
        "samples": int(dataset.meta.counts["samples"]),
        "events": int(dataset.meta.counts["events"]),
        "incidents": len(failures),
        "by_class": counted(failures["failure_class"]),
        "by_precursor": counted(failures["precursor"]),
    }


def _write_samples(writer: DatasetWriter, simulation: Simulation, threads: int, progress: Progress | None) -> None:
    """Generate and write all samples, one task per bucket."""
    clock = simulation.clock
    signs = signatures(simulation.parameters, simulation.chain)
    by_bucket: dict[int, list[int]] = {}
    for number, node in enumerate(simulation.nodes):
        by_bucket.setdefault(writer.bucket_of(node.name), []).append(number)
    total = sum(node.slots for node in simulation.nodes) * clock.steps
    n_done = 0
    guard = threading.Lock()

    def write(bucket: int) -> None:
        nonlocal n_done
        devices = [device for number in by_bucket[bucket] for device in node_devices(simulation, number)]
        devices.sort(key=lambda device: device.name)
        table = sample_table(devices, signs, seed=simulation.seed, start=clock.start, step=clock.step)
        writer.write_samples(bucket, table)
        with guard:
            n_done = min(total, n_done + sum(device.last - device.first for device in devices))
            if progress is not None:
                progress(n_done, total)

    # Largest bucket first, so that it does not run alone at the end.
    order = sorted(by_bucket, key=lambda bucket: (-len(by_bucket[bucket]), bucket))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(write, order):  # an error cancels the tasks that have not started
            pass
    if progress is not None:
        progress(total, total)


def _checked(
    gpus: int,
    days: int,
    seed: int,
    scenario: str | Scenario,
    acceleration: float,
    step: timedelta,
    start: datetime,
) -> tuple[Scenario, SimulatedTime]:
    if isinstance(scenario, str) and scenario not in SCENARIOS:
        hint = f"{nearest_hint(scenario, SCENARIOS)} Choose one of {', '.join(SCENARIOS)}.".strip()
        raise InputError(f"unknown scenario {scenario!r}", "scenario", hint)
    ms = step // timedelta(milliseconds=1)
    is_whole = ms > 0 and not timedelta(days=1) % step and step <= timedelta(hours=6)
    begin = int(start.timestamp() * 1000)
    for sound, problem, location, advice in (
        (1 <= gpus <= MAX_GPUS, f"a fleet of {gpus} GPUs", "gpus", f"Give a number from 1 to {MAX_GPUS}."),
        (1 <= days <= 3660, f"a simulation of {days} days", "days", "Give a number from 1 to 3660."),
        (0 <= seed < 2**63, f"seed {seed}", "seed", "Give an integer from 0 to 2**63 - 1."),
        (
            0.0 < acceleration <= 100.0,
            f"an acceleration of {acceleration}",
            "acceleration",
            "Give a number above 0, at most 100.",
        ),
        (is_whole, f"a step of {step}", "step", "Give a duration that divides a day, at most 6 h."),
        (start.tzinfo, f"start {start.isoformat()} has no time zone", "start", "Give an aware time in UTC."),
        (
            not begin % 86_400_000,
            f"start {start.isoformat()} is not a midnight in UTC",
            "start",
            "Give 00:00 UTC of a day.",
        ),
    ):
        if not sound:
            raise InputError(problem, location, advice)
    chosen = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    return chosen, SimulatedTime(begin, days, ms, chosen.parameters.warm_up_days)


def _check_places(out: Path, truth: Path) -> None:
    dataset, hidden = out.resolve(), truth.resolve()
    if hidden == dataset or dataset in hidden.parents:
        raise InputError(
            f"the truth folder {truth} lies inside the dataset {out}",
            "truth",
            "Choose a folder outside of the dataset.",
        )
    if hidden in dataset.parents:
        raise InputError(f"the dataset {out} lies inside the truth folder {truth}", "truth", "Choose separate folders.")
    refuse_other_content(truth, "truth.json", "the truth of a simulation")
