"""The small tables of a simulated dataset: inventory, events, jobs."""

from __future__ import annotations

from typing import Any

import pandas as pd

from simulator.fleet import NEVER, Clock, bus_id, driver_at, gpu_name, serial_number
from simulator.parameters import Parameters
from simulator.records import event_rows
from simulator.truth import History, instants
from simulator.workload import OUTCOMES, Jobs

_BAD_LOT = 0
_SPARE_LOT = 40


def inventory_frame(history: History, parameters: Parameters, clock: Clock, seed: int) -> pd.DataFrame:
    """Return one row for each stay that overlaps the simulated time; ``rack_position`` is the third of the rack."""
    fleet = parameters.fleet
    rows: list[dict[str, Any]] = []
    for node, life in zip(history.nodes, history.lives, strict=True):
        model = fleet.models[node.model]
        for slot, stay, installed, removed, bad in life.stays.tolist():
            if installed >= clock.end or removed <= clock.start:
                continue
            name = gpu_name(seed, node.index, slot, stay)
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
    frame = pd.DataFrame(rows)
    for name in ("installed_at", "removed_at"):
        frame[name] = instants(frame[name])
    return frame


def events_frame(history: History, seed: int) -> pd.DataFrame:
    """Return all events."""
    rows = [
        row
        for node, records in zip(history.nodes, history.records, strict=True)
        for row in event_rows(node, records, seed)
    ]
    names = ["timestamp", "node", "gpu", "type", "code", "detail", "source", "known_at"]
    frame = pd.DataFrame(rows, columns=names)
    for name in ("timestamp", "known_at"):
        frame[name] = instants(frame[name])
    return frame


def jobs_frame(history: History, jobs: list[Jobs], parameters: Parameters) -> pd.DataFrame:
    """Return all jobs, each on one whole node; what is running at the end has no end and no outcome."""
    rows: list[dict[str, Any]] = []
    running = OUTCOMES.index("running")
    for node, run in zip(history.nodes, jobs, strict=True):
        for number in range(len(run.begin)):
            over = run.outcome[number] != running
            rows.append(
                {
                    "job": f"{'train' if run.kind[number] == 1 else 'serve'}-{node.index:05d}-{number:05d}",
                    "node": node.name,
                    "gpu": None,
                    "started_at": int(run.begin[number]),
                    "ended_at": int(run.end[number]) if over else None,
                    "gpus": min(node.slots, parameters.fleet.gpus_per_node),
                    "checkpointed_at": int(run.checkpoint[number]) or None,
                    "outcome": OUTCOMES[int(run.outcome[number])] if over else None,
                }
            )
    names = ["job", "node", "gpu", "started_at", "ended_at", "gpus", "checkpointed_at", "outcome"]
    frame = pd.DataFrame(rows, columns=names)
    for name in ("started_at", "ended_at", "checkpointed_at"):
        frame[name] = instants(frame[name])
    return frame
