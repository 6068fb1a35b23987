"""The small tables of a simulated dataset: inventory, events, jobs."""

from typing import Any

import pandas as pd

from simulator.fleet import NEVER, bus_id, driver_at, gpu_name, serial_number
from simulator.run import Simulation
from simulator.workload import OUTCOMES
from telemetry.dataset.schema import EVENTS, JOB_OPTIONS, JOBS

_BAD_LOT = 0
_SPARE_LOT = 40


def with_instants(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Turn columns of milliseconds (null allowed) into aware UTC instants."""
    for name in names:
        instants = pd.to_datetime(frame[name].astype("Int64"), unit="ms", utc=True)
        frame[name] = instants.astype("datetime64[ms, UTC]")
    return frame


def inventory_frame(simulation: Simulation) -> pd.DataFrame:
    """Return one row for each stay that overlaps the simulated time; ``rack_position`` is the third of the rack."""
    clock = simulation.clock
    rows: list[dict[str, Any]] = []
    for node, life in zip(simulation.nodes, simulation.lives, strict=True):
        model = simulation.parameters.fleet.models[node.model]
        for slot, stay, installed, removed, bad in life.stays.tolist():
            if installed >= clock.end or removed <= clock.start:
                continue
            name = gpu_name(simulation.seed, node.index, slot, stay)
            lot = _BAD_LOT if bad else (node.lot if stay == 0 else _SPARE_LOT)
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
            gpu = None if event.slot < 0 else gpu_name(simulation.seed, node.index, event.slot, event.stay)
            rest = (event.type, event.code, event.detail, event.source, event.known)
            rows.append((event.time, node.name, gpu, *rest))
    return with_instants(pd.DataFrame(rows, columns=EVENTS.names), "timestamp", "known_at")


def jobs_frame(simulation: Simulation) -> pd.DataFrame:
    """Return all jobs, each on one whole node; what is running at the end has no end and no outcome."""
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
