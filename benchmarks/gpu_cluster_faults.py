"""Import and replay the fault history of a real GPU cluster; write docs/real-cluster.md.

The history is StepFun's InfiniteHBD-Trace (SIGCOMM'25): every fault of 400 servers over 349 days, with start and end.
It has no telemetry, so this is a test of the history features, of honesty about the base rate, and of leaks: a ROC-AUC
above 0.70 would be one until proven otherwise.

    python benchmarks/gpu_cluster_faults.py --trace FOLDER [--work FOLDER] [--out docs/real-cluster.md]
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EPOCH = datetime(2024, 3, 30, tzinfo=UTC)
"""Day zero of the trace, from its README; the zone is not stated there, UTC is assumed."""

NODES = 400
"""Servers in the trace, from its README; those without a fault carry no id and are added as event-free nodes."""

EXPECTED = {"faults": 584, "nodes with a fault": 231, "GPU faults": 158, "double-bit ECC": 60}
"""Counts that the trace's README and statistics file give; the import is checked against them."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The trace in the shape that ``predrain import`` takes."""

    events: Path
    inventory: Path
    counts: dict[str, int]


def convert(trace: Path, work: Path) -> Converted:
    """Write the trace as two CSV files: a ``failure`` at each fault start, a ``repair`` at each fault end.

    Parameters
    ----------
    trace : Path
        Folder that holds ``fault_trace.json``: records of ``node_id``, ``event_time`` (days since 2024-03-30),
        ``event_type`` (``fault_start``, ``fault_end``) and ``fault_type`` (``Level``, ``Class``, ``Desc``).
    work : Path
        Folder for the CSV files.

    Returns
    -------
    Converted
        The files, and counts to hold against the trace's own README.
    """
    records: list[dict[str, Any]] = json.loads((trace / "fault_trace.json").read_text(encoding="utf-8"))
    work.mkdir(parents=True, exist_ok=True)
    named = sorted({record["node_id"] for record in records})
    nodes = [*named, *(f"no-fault-{i:03d}" for i in range(NODES - len(named)))]
    events, inventory = work / "events.csv", work / "inventory.csv"
    with events.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["timestamp", "node", "type", "code", "detail", "source"])
        for record in records:
            kind = record["fault_type"]
            when = EPOCH + timedelta(days=record["event_time"])
            writer.writerow(
                [
                    when.isoformat(timespec="milliseconds"),
                    record["node_id"],
                    "failure" if record["event_type"] == "fault_start" else "repair",
                    kind["Desc"],
                    f"{kind['Level']} / {kind['Class']}",
                    "trace",
                ]
            )
    with inventory.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["node", "installed_at"])
        writer.writerows([node, EPOCH.isoformat()] for node in nodes)
    starts = [record["fault_type"] for record in records if record["event_type"] == "fault_start"]
    classes = Counter(kind["Class"] for kind in starts)
    described = Counter(kind["Desc"] for kind in starts)
    counts = {
        "faults": len(starts),
        "nodes with a fault": len(named),
        "GPU faults": classes["GPU"],
        "double-bit ECC": described["GPU DBE(Double Bit ECC) > Threshold"],
    }
    return Converted(events, inventory, counts)


def predrain(*args: str | Path) -> dict[str, Any]:
    """Run a verb of the installed command with ``--json`` and return what it says."""
    command = [str(Path(sys.executable).with_name("predrain")), *map(str, args), "--json"]
    done = subprocess.run(  # noqa: S603 - our own command
        command, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    """Convert, check the counts, import, replay, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="folder that holds fault_trace.json")
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work" / "gpu-cluster-faults")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "real-cluster.md")
    args = parser.parse_args()
    converted = convert(args.trace, args.work)
    if converted.counts != EXPECTED:
        raise SystemExit(f"the trace's counts are {converted.counts}, expected {EXPECTED}: is this the published file?")
    params: list[str | Path] = [
        "--params",
        ROOT / "params.yaml",
        "--params",
        ROOT / "params" / "gpu-cluster-faults.yaml",
    ]
    dataset, replay = args.work / "dataset", args.work / "replay"
    imported = predrain(
        "import", "--events", converted.events, "--inventory", converted.inventory, "--out", dataset, *params
    )
    predrain("backtest", "--dataset", dataset, "--out", replay, *params)
    metrics = json.loads((replay / "metrics.json").read_text(encoding="utf-8"))
    page = render(converted.counts, imported, metrics)
    args.out.write_text(page, encoding="utf-8")
    sys.stdout.write(page)


def render(counts: dict[str, int], imported: dict[str, Any], metrics: dict[str, Any]) -> str:
    """Return the page in Markdown, every figure from this run."""
    raise NotImplementedError


if __name__ == "__main__":
    main()
