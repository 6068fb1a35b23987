"""Workload of a node: consecutive whole-node jobs, ended early by failures, drains and application errors."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from simulator.fleet import DAY, HOUR, SimulatedNode, SimulatedTime
from simulator.parameters import Parameters
from simulator.randomness import NORMAL_TABLE, Int64Array, Purpose, bits, generator, stream

TRAINING, SERVING = 1, 2
OUTCOMES = ("completed", "node_fail", "drained", "app_error", "running")
"""Outcomes of a job; ``running``: not ended within the simulated time."""


class Jobs(NamedTuple):
    """A node's jobs in order of time; arrays of shape (n_jobs,).

    ``begin``, ``end``, ``checkpoint`` (the last one, 0: none) and ``every`` (checkpoint interval, 0: no work is lost)
    are in ms; ``kind`` is training (1) or serving (2), ``level`` the mean utilisation, ``memory`` the share of device
    memory, ``outcome`` an index into :data:`OUTCOMES`.
    """

    begin: Int64Array
    end: Int64Array
    kind: Int64Array
    level: NDArray[np.float64]
    memory: NDArray[np.float64]
    every: Int64Array
    checkpoint: Int64Array
    outcome: Int64Array


def training_share(parameters: Parameters, clock: SimulatedTime, model: int, time: int, *, shifts: bool) -> float:
    """Return the share of training among the jobs that start at a time on nodes of a GPU model."""
    initial = parameters.fleet.models[model].training_share
    if not shifts:
        return initial
    drift = parameters.drift
    mean = sum(model.share * model.training_share for model in parameters.fleet.models)
    after = initial * drift.workload_training_share / mean
    begins = clock.at_share(drift.workload_begins)
    progress = min(max((time - begins) / (drift.workload_days * DAY), 0.0), 1.0)
    return initial + (after - initial) * progress


def schedule(
    node: SimulatedNode,
    parameters: Parameters,
    clock: SimulatedTime,
    seed: int,
    *,
    outages: Int64Array,
    errors: Int64Array,
    shifts: bool,
) -> Jobs:
    """Schedule a node's jobs.

    ``outages``: start and end of each outage, and the outcome (index into :data:`OUTCOMES`) of a job that it ends;
    shape (n, 3).
    ``errors``: times of application errors on the whole node, ascending; shape (n,).
    """
    rows: list[tuple[int, int, int, float, float, int, int, int]] = []
    if not node.spare:
        work = parameters.workload
        rng = generator(seed, node.index, Purpose.JOBS)
        outages = outages[np.argsort(outages[:, 0], kind="stable")]
        time = max(clock.start, node.installed) + int(rng.exponential(0.15 * work.idle_hours) * HOUR)
        while time < clock.end:
            resumes = _after_outages(outages, time)
            if resumes != time:
                time = resumes + int(rng.uniform(0.05, 0.5) * HOUR)
                continue
            training = rng.random() < training_share(parameters, clock, node.model, time, shifts=shifts)
            median, sigma = (work.training_hours, 1.0) if training else (work.serving_hours, 0.8)
            length = min(median * float(np.exp(sigma * rng.standard_normal())), 30 * 24.0)
            level = float(rng.uniform(*(work.training_level if training else work.serving_level)))
            memory = float(rng.uniform(0.6, 0.97) if training else rng.uniform(0.4, 0.9))
            interval = int(rng.uniform(*work.checkpoint_hours) * HOUR)
            pause = int(rng.exponential(work.idle_hours) * HOUR)
            end, outcome = time + int(length * HOUR) + 60_000, 0
            following = outages[outages[:, 0] > time]
            if len(following) and following[0, 0] < end:
                end, outcome = int(following[0, 0]), int(following[0, 2])
            error = int(np.searchsorted(errors, time, side="right"))
            if error < len(errors) and errors[error] < end:
                end, outcome = int(errors[error]), OUTCOMES.index("app_error")
            if end >= clock.end:
                end, outcome = clock.end, OUTCOMES.index("running")
            saved = time + (end - time) // interval * interval if training and end - time >= interval else 0
            kind = TRAINING if training else SERVING
            rows.append((time, end, kind, level, memory, interval if training else 0, saved, outcome))
            time = end + pause
    columns = list(zip(*rows, strict=True)) if rows else [()] * 8
    kinds: tuple[Any, ...] = (np.int64, np.int64, np.int64, np.float64, np.float64, np.int64, np.int64, np.int64)
    return Jobs(*(np.asarray(column, kind) for column, kind in zip(columns, kinds, strict=True)))


def _after_outages(outages: Int64Array, time: int) -> int:
    while True:
        in_outage = (outages[:, 0] <= time) & (time < outages[:, 1])
        if not in_outage.any():
            return time
        time = int(outages[in_outage, 1].max())


class NodeSeries(NamedTuple):
    """Time series shared by all GPUs of a node; arrays of shape (n_steps,).

    ``kind`` (0 idle, 1 training, 2 serving), ``level`` (utilisation 0 to 1), ``memory`` (share in use), ``inlet`` (C),
    ``gap`` (1: the node's exporter does not report).
    """

    kind: NDArray[np.uint8]
    level: NDArray[np.float32]
    memory: NDArray[np.float32]
    inlet: NDArray[np.float32]
    gap: NDArray[np.uint8]


def node_series(node: SimulatedNode, parameters: Parameters, clock: SimulatedTime, seed: int, jobs: Jobs) -> NodeSeries:
    """Compute a node's shared series from its jobs, the inlet air temperature, and gaps of its exporter."""
    work, noise = parameters.workload, parameters.noise
    rng = generator(seed, node.index, Purpose.AMBIENT)
    place = float(rng.normal(0.0, 1.0))
    if node.stressed:
        place += work.top_slot_c * node.height / 2.0
    series = NodeSeries(
        np.zeros(clock.steps, np.uint8),
        np.zeros(clock.steps, np.float32),
        np.zeros(clock.steps, np.float32),
        np.empty(clock.steps, np.float32),
        np.zeros(clock.steps, np.uint8),
    )
    inlet_c = work.inlet_c + place
    _fill_node(
        seed, node.index, clock.start, clock.step, jobs, work.diurnal, inlet_c, work.inlet_daily_c, NORMAL_TABLE, series
    )
    for _ in range(int(rng.poisson(noise.node_gap_rate_per_month * clock.days / 30.4))):
        begin = int(rng.integers(0, clock.steps))
        minutes = noise.node_gap_median_min * float(np.exp(rng.standard_normal()))
        series.gap[begin : begin + max(1, round(minutes * 60_000 / clock.step))] = 1
    return series


@numba.njit(cache=True, nogil=True)
def _fill_node(
    seed: int,
    node: int,
    start: int,
    step: int,
    jobs: Jobs,
    diurnal: float,
    inlet_mean: float,
    inlet_daily: float,
    table: NDArray[np.float32],
    series: NodeSeries,
) -> None:
    rng = stream(seed, node, 0, Purpose.AMBIENT)
    low = np.uint64(0xFFFF)
    job, weather, wander = 0, 0.0, 0.0
    for index in range(len(series.kind)):
        time = start + index * step
        while job < len(jobs.begin) and jobs.end[job] <= time:
            job += 1
        draw = bits(rng)
        day = 2.0 * np.pi * (time % 86_400_000) / 86_400_000.0
        weather = 0.998 * weather + 0.05 * table[draw & low]
        series.inlet[index] = inlet_mean + inlet_daily * np.sin(day - 2.4) + weather
        if job < len(jobs.begin) and jobs.begin[job] <= time:
            series.kind[index] = jobs.kind[job]
            series.memory[index] = jobs.memory[job]
            if jobs.kind[job] == 1:
                # Training steps are steady, with occasional pauses for evaluation, loading or checkpoints.
                pause = 0.5 if (draw >> np.uint64(16)) & low < np.uint64(4000) else 1.0
                series.level[index] = min(
                    1.0, max(0.02, jobs.level[job] * pause * (1.0 + 0.03 * table[(draw >> np.uint64(32)) & low]))
                )
            else:
                wander = 0.95 * wander + 0.08 * table[(draw >> np.uint64(32)) & low]
                tide = 1.0 + diurnal * np.sin(day - 1.8) + wander
                series.level[index] = min(1.0, max(0.02, jobs.level[job] * tide))
