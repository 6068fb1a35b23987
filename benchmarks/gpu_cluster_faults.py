"""Import and replay the fault history of a real GPU cluster: the numbers in benchmarks/results/cluster-faults.md.

The history is StepFun's InfiniteHBD-Trace (SIGCOMM'25): every fault of 400 servers over 349 days, with start and end.
It has no telemetry, so it tests the history features, the base rate, and leakage: a ROC-AUC above 0.70 is considered a
leak until proven otherwise.

    python benchmarks/gpu_cluster_faults.py --trace FOLDER [--work FOLDER]
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from telemetry.dataset.store import Dataset

ROOT = Path(__file__).resolve().parents[1]
NAME = "gpu-cluster-faults"
LEAK = 0.70
"""A ROC-AUC above this on a fault history alone is a leak until proven otherwise."""

HONEST_CAPTURE = 0.23
"""Share of the next day's faults in the top 5 % when nodes are ranked by their faults of the last 30 days: the limit of
history alone, measured walk-forward and independently of this code."""

EPOCH = "2024-03-30T00:00:00Z"
"""Day zero of the trace, from its README, which states no time zone; UTC is assumed."""

NODES = 400
"""Servers in the trace, from its README; those without a fault carry no id and are added as event-free nodes."""

EXPECTED = {"faults": 584, "nodes": 400, "nodes with a fault": 231, "GPU faults": 158, "double-bit ECC": 60}
"""Counts in the trace's README and statistics file, which the import is checked against."""


def write_inventory(trace: Path, work: Path) -> Path:
    """Write the 400 nodes as an inventory: those in the trace, and the event-free rest with made-up names."""
    records: list[dict[str, Any]] = json.loads((trace / "fault_trace.json").read_text(encoding="utf-8"))
    named = sorted({record["node_id"] for record in records})
    nodes = [*named, *(f"without-fault-{i:03d}" for i in range(NODES - len(named)))]
    work.mkdir(parents=True, exist_ok=True)
    inventory = work / "inventory.csv"
    with inventory.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["node", "installed_at"])
        writer.writerows([node, EPOCH] for node in nodes)
    return inventory


def counted(dataset: Dataset) -> dict[str, int]:
    """Return the counts of the trace's README for the imported dataset."""
    events = dataset.events()
    faults = events[events["type"] == "failure"]
    return {
        "faults": len(faults),
        "nodes": int(dataset.meta.counts["nodes"]),
        "nodes with a fault": int(faults["node"].nunique()),
        "GPU faults": int((faults["detail"] == "GPU").sum()),
        "double-bit ECC": int((faults["code"] == "GPU DBE(Double Bit ECC) > Threshold").sum()),
    }


def predrain(*args: str | Path) -> dict[str, Any]:
    """Run a verb of the installed command with ``--json`` and return its output."""
    command = [str(Path(sys.executable).with_name("predrain")), *map(str, args), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    """Import, check the counts, replay, print each model and the line of JSON; fail if there may be a leak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="folder that holds fault_trace.json")
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work" / "gpu-cluster-faults")
    args = parser.parse_args()
    params: list[str | Path] = ["--params", ROOT / "params.yaml", "--params", ROOT / "params" / f"{NAME}.yaml"]
    dataset, replay = args.work / "dataset", args.work / "replay"
    inventory = write_inventory(args.trace, args.work)
    mapping = ROOT / "params" / f"{NAME}-mapping.yaml"
    events = args.trace / "fault_trace.json"
    predrain("import", "--events", events, "--inventory", inventory, "--mapping", mapping, "--out", dataset, *params)
    counts = counted(Dataset.open(dataset))
    if counts != EXPECTED:
        raise SystemExit(f"the imported counts are {counts}, expected {EXPECTED}: is this the published file?")
    predrain("backtest", "--dataset", dataset, "--out", replay, "--full", *params)
    print(json.dumps(evaluated(json.loads((replay / "metrics.json").read_text(encoding="utf-8")))))


def evaluated(metrics: dict[str, Any]) -> dict[str, Any]:
    """Print the metrics of each model, and return the line of JSON.

    Raises ``SystemExit`` if a model is better than a fault history allows: a leak until proven otherwise.
    """
    rows = {
        f"{model}, {variant}": row
        for model, by_variant in metrics["models"].items()
        for variant, row in by_variant.items()
    }
    print(
        f"{metrics['first_time'][:10]} to {metrics['last_time'][:10]}, K = {metrics['k']} nodes, 95 % intervals by node"
    )
    for name, row in rows.items():
        cells = [
            f"{key} "
            + " ".join(
                "undefined" if row.get(measure) is None else f"{row[measure]:.3f}"
                for measure in (key, f"{key}_low", f"{key}_high")
            )
            for key in ("precision_at_k", "recall", "capture", "average_precision", "roc_auc")
        ]
        print(f"{name}: {', '.join(cells)}")
    best = max(row["roc_auc"] or 0.0 for row in rows.values())
    beyond = [
        name for name, row in rows.items() if row["capture_low"] > HONEST_CAPTURE or (row["roc_auc"] or 0.0) > LEAK
    ]
    if beyond:
        raise SystemExit(
            f"{', '.join(beyond)}: more than a fault history can tell; look for a leak before believing it"
        )
    own, counting = (metrics["models"][model]["sliding"]["roc_auc"] for model in (metrics["profile"], "history_count"))
    return {
        "name": "gpu_cluster_faults", "value": round(own, 3), "unit": "ROC-AUC of the profile",
        "peer": "counting past faults", "ratio": round(own / counting, 2), "limit_share": round(best / LEAK, 2),
        "checked": True,
    }  # fmt: skip


if __name__ == "__main__":
    main()
