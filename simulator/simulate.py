"""Writing a simulated fleet as a dataset, and its truth next to it."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import FolderSwap, disk_errors
from foundation.running import Progress
from foundation.text import nearest_hint
from simulator.devices import signatures
from simulator.fleet import SimulatedTime
from simulator.run import Simulation, node_devices, run_fleet
from simulator.samples import channels, sample_table
from simulator.scenarios.catalogue import SCENARIOS, Scenario
from simulator.tables import counted, events_frame, failures_frame, inventory_frame, jobs_frame, write_truth
from telemetry.dataset.runs import choose_runs
from telemetry.dataset.writer import DatasetWriter

MAX_GPUS = 200_000
"""More than any fleet of today; a typing error is likelier."""

_ROWS_PER_BUCKET = 8_000_000
_LEAST_BUCKETS = 16


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
    """Simulate a fleet and write it as a dataset; the same arguments give the same bytes, with any number of threads.

    ``scenario``: one of :data:`simulator.scenarios.catalogue.SCENARIOS`, or a custom one.
    ``truth``: default a sibling ``OUT-truth``; never inside ``out``.
    ``acceleration``: factor on every rate of failing, degrading and recoverable hardware errors.
    ``step``: divides a day. ``start``: 00:00 UTC of a day.
    Returns: what was written, as plain JSON types; ``incidents`` are the failures within the simulated time.
    Raises ``InputError`` if an argument or place is impossible, or the disk is full.
    """
    chosen, clock = _checked(gpus, days, seed, scenario, acceleration, step, start)
    truth = out.with_name(out.name + "-truth") if truth is None else truth
    _check_places(out, truth)
    simulation = run_fleet(chosen, clock, gpus=gpus, seed=seed, acceleration=acceleration)
    failures = failures_frame(simulation)
    about = {
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
    # The truth is swapped in after the dataset: a run killed between the two leaves a truth that its seed and scenario
    # (truth.json) distinguish from the new dataset's.
    with FolderSwap(truth) as swap:
        with disk_errors(truth):
            write_truth(swap.path, simulation, failures, about)
        buckets = max(_LEAST_BUCKETS, -(-gpus * clock.steps // _ROWS_PER_BUCKET))  # so that each fits in memory
        runs = choose_runs(gpus * (timedelta(days=1) / step) / buckets, days)
        with DatasetWriter(out, step=step, channels=channels(), buckets=buckets, runs=runs) as writer:
            _write_samples(writer, simulation, threads or os.cpu_count() or 1, progress)
            dataset = writer.finish(
                events=events_frame(simulation),
                inventory=inventory_frame(simulation),
                jobs=jobs_frame(simulation),
                span=(start.astimezone(UTC), start.astimezone(UTC) + timedelta(days=days) - step),
                sources=[about],
            )
        swap.commit()
    return {
        "dataset": str(out),
        "truth": str(truth),
        **{name: about[name] for name in ("scenario", "seed", "acceleration", "gpus", "days")},
        "nodes": len(simulation.nodes),
        "samples": int(dataset.meta.counts["samples"]),
        "events": int(dataset.meta.counts["events"]),
        "incidents": len(failures),
        "by_class": counted(failures["failure_class"]),
        "by_precursor": counted(failures["precursor"]),
    }


def _write_samples(writer: DatasetWriter, simulation: Simulation, threads: int, progress: Progress | None) -> None:
    """Make and write all samples, one bucket a task."""
    clock = simulation.clock
    signs = signatures(simulation.parameters, simulation.chain)
    by_bucket: dict[int, list[int]] = {}
    for number, node in enumerate(simulation.nodes):
        by_bucket.setdefault(writer.bucket_of(node.name), []).append(number)
    total = sum(node.slots for node in simulation.nodes) * clock.steps
    done = 0
    guard = threading.Lock()

    def write(bucket: int) -> None:
        nonlocal done
        devices = [device for number in by_bucket[bucket] for device in node_devices(simulation, number)]
        devices.sort(key=lambda device: device.name)
        table = sample_table(devices, signs, seed=simulation.seed, start=clock.start, step=clock.step)
        writer.write_samples(bucket, table)
        with guard:
            done = min(total, done + sum(device.last - device.first for device in devices))
            if progress is not None:
                progress(done, total)

    # The largest first, so that no thread is left alone with it at the end.
    order = sorted(by_bucket, key=lambda bucket: (-len(by_bucket[bucket]), bucket))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(write, order):  # an error ends it: tasks that have not started are cancelled
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
    whole = ms > 0 and not timedelta(days=1) % step and step <= timedelta(hours=6)
    begin = int(start.timestamp() * 1000)
    for sound, what, where, do in (
        (1 <= gpus <= MAX_GPUS, f"a fleet of {gpus} GPUs", "gpus", f"Give a number from 1 to {MAX_GPUS}."),
        (1 <= days <= 3660, f"a simulation of {days} days", "days", "Give a number from 1 to 3660."),
        (0 <= seed < 2**63, f"seed {seed}", "seed", "Give an integer from 0 to 2**63 - 1."),
        (
            0.0 < acceleration <= 100.0,
            f"an acceleration of {acceleration}",
            "acceleration",
            "Give a number above 0, at most 100.",
        ),
        (whole, f"a step of {step}", "step", "Give a duration that divides a day, at most 6 h."),
        (start.tzinfo, f"start {start.isoformat()} has no time zone", "start", "Give an aware time in UTC."),
        (
            not begin % 86_400_000,
            f"start {start.isoformat()} is not a midnight in UTC",
            "start",
            "Give 00:00 UTC of a day.",
        ),
    ):
        if not sound:
            raise InputError(what, where, do)
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
    if hidden.exists() and (not hidden.is_dir() or (any(hidden.iterdir()) and not (hidden / "truth.json").is_file())):
        raise InputError(
            f"{truth} exists and is not the truth of a simulation",
            "truth",
            "Choose another folder, or remove this one.",
        )
