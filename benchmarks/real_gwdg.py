"""Real GPU telemetry with failures: A100 nodes of GWDG. Writes benchmarks/results/gwdg.md.

The data is Zenodo 10.5281/zenodo.19052367 (CC-BY-4.0): telemetry of 24 GPUs on 6 nodes in windows around operator
incidents, and 69 incidents of 26 nodes over 13 months. The page reports what `predrain assess` concludes, how frozen
exporter pages are handled, when tickets follow the XIDs, and what past incidents alone predict.

    python benchmarks/real_gwdg.py --data FOLDER [--work FOLDER] [--quick]

``FOLDER`` holds ``dcgm_wide.parquet`` (a row per GPU and ten minutes), ``incident_events.csv`` and
``telemetry_raw_bz2/nodes_total_gpus_when_good_*.csv.bz2``.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu_cluster_faults import predrain
from evaluation.metrics.metrics import Bools, Floats, interval, ratio, resample
from foundation.files import write_bytes
from telemetry.dataset.store import Dataset

PAGE = ROOT / "benchmarks" / "results" / "gwdg.md"
MAPPING = ROOT / "params" / "gwdg-mapping.yaml"
KEYS: Final = ("t", "node", "uuid", "gpu", "driverVersion")
"""Columns of the wide table that are not DCGM fields."""

EXPECTED: Final = {
    "samples": 66_620,
    "GPUs": 24,
    "incidents": 69,
    "GPUs with XID 79": 44,
    "node failures by XID 79": 14,
}
"""Counts in the data's own description, which the import is checked against."""

FIRST_DECISION: Final = pd.Timestamp("2025-03-01", tz="UTC")
HORIZONS_DAYS: Final = (1, 7, 30)
MEMORY_DAYS: Final = 90
TICKET_LAG: Final = pd.Timedelta(days=7)
PUBLISHED_AUC: Final = 0.64
"""ROC-AUC of the count of the last 90 days for the next seven, computed independently of this code."""


def import_telemetry(data: Path, work: Path) -> tuple[dict[str, Any], Dataset]:
    """Assess the telemetry and the incidents in one command; column names only get DCGM's prefix."""
    table = pq.read_table(data / "dcgm_wide.parquet")
    names = [name if name in KEYS else f"DCGM_FI_DEV_{name}" for name in table.column_names]
    samples, out = work / "dcgm.parquet", work / "assessment"
    pq.write_table(table.rename_columns(names), samples)
    assessed = predrain(
        "assess", "--samples", samples, "--events", data / "incident_events.csv", "--mapping", MAPPING, "--out", out
    )
    return assessed, Dataset.open(out / "dataset")


def xid79_failures(dataset: Dataset) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Find the XID 79 events, and group them into node failures.

    Returns: a row per event, with its ``failure``; and a row per failure, with ``node``, ``start`` and ``gpus``. Events
    on a node within half an hour of each other are one failure.
    """
    events = dataset.events()
    lost = events[(events["type"] == "xid") & (events["code"].astype(str) == "79")].sort_values(["node", "timestamp"])
    same_node = lost["node"].astype(str).eq(lost["node"].astype(str).shift())
    lost = lost.assign(failure=(~same_node | (lost["timestamp"].diff() > pd.Timedelta(minutes=30))).cumsum())
    failures = lost.groupby("failure").agg(node=("node", "first"), start=("timestamp", "min"), gpus=("gpu", "nunique"))
    return lost, failures


def ticket_lags(tickets: pd.DataFrame, failures: pd.DataFrame) -> pd.Series:
    """Return the lag of each ticket, dated at midnight, after the node's latest XID 79; NaT: none within a week."""
    lags = []
    for ticket in tickets.itertuples():
        earlier = failures[(failures["node"] == ticket.node) & (failures["start"] <= ticket.day + pd.Timedelta(days=1))]
        lag = ticket.day - earlier["start"].max() if len(earlier) else pd.NaT
        lags.append(lag if len(earlier) and lag <= TICKET_LAG else pd.NaT)
    return pd.Series(lags, index=tickets.index, dtype="timedelta64[ns]")


def fleet_of_nodes(data: Path) -> list[str]:
    """List the 29 nodes in the published files, most of which are known because they failed."""
    nodes = set(pd.read_csv(data / "incident_events.csv")["node"])
    for path in sorted((data / "telemetry_raw_bz2").glob("nodes_total_gpus_when_good_*.csv.bz2")):
        nodes |= set(pd.read_csv(path, usecols=["node"])["node"])
    return sorted(nodes)


def _day_number(days: pd.DatetimeIndex) -> NDArray[np.int64]:
    return np.asarray((days - pd.Timestamp(0, tz="UTC")) // pd.Timedelta(days=1), np.int64)


class Daily:
    """Daily decisions about every node, and whether an incident follows within a horizon.

    ``positive``, ``recent``, ``all_so_far``: shape (days, nodes).
    """

    def __init__(self, tickets: pd.DataFrame, nodes: Sequence[str], horizon_days: int) -> None:
        self.days = pd.date_range(FIRST_DECISION, tickets["day"].max() - pd.Timedelta(days=horizon_days), freq="D")
        self.nodes = list(nodes)
        now = _day_number(self.days)[:, None]
        days_of = {node: _day_number(pd.DatetimeIndex(part)) for node, part in tickets.groupby("node")["day"]}
        ages = [now - days_of.get(node, np.zeros(0, np.int64)) for node in nodes]  # negative: still to come
        self.positive: Bools = np.column_stack([((age < 0) & (age >= -horizon_days)).any(axis=1) for age in ages])
        self.recent: Floats = np.column_stack([((age >= 0) & (age < MEMORY_DAYS)).sum(axis=1) for age in ages]) * 1.0
        self.all_so_far: Floats = np.column_stack([(age >= 0).sum(axis=1) for age in ages]) * 1.0

    def auc(self, score: Floats, weights: Floats) -> Floats:
        """ROC-AUC among the nodes of a day, pooled over days, for each resample of nodes."""
        concordant = np.zeros((len(self.nodes), len(self.nodes)))
        pairs = np.zeros_like(concordant)
        for row, failed in zip(score, self.positive, strict=True):
            asked = failed[:, None] & ~failed[None, :]
            concordant += asked * (np.sign(row[:, None] - row[None, :]) + 1) / 2
            pairs += asked
        return ratio(*((np.einsum("ri,ij,rj->r", weights, table, weights)) for table in (concordant, pairs)))

    def precision_of_one(self, score: Floats, weights: Floats) -> Floats:
        """Precision of one alert per day on the riskiest node (ties share it), for each resample of nodes."""
        hits, alerts = np.zeros(len(weights)), 0
        for row, failed in zip(score, self.positive, strict=True):
            masked = np.where(weights > 0, row, -np.inf)
            top = (masked == masked.max(axis=1, keepdims=True)) * weights
            hits += (top * failed).sum(axis=1) / top.sum(axis=1)
            alerts += 1
        return hits / alerts


def of_predictions(path: Path, daily: Daily) -> Floats:
    """Read a profile's risks for the same decisions, shape (days, nodes); NaN: none."""
    rows = pd.read_parquet(path, columns=["decision_time", "node", "risk"])
    table = rows.pivot_table(index="decision_time", columns="node", values="risk", observed=True)
    return table.reindex(index=daily.days, columns=daily.nodes).to_numpy(np.float64)


def replayed(data: Path, nodes: list[str], work: Path, horizon_days: int) -> Path:
    """Replay the incidents alone, with a decision per day; return the file of predictions."""
    inventory = work / "nodes.csv"
    write_bytes(
        inventory, ("node,installed_at\n" + "".join(f"{node},2025-01-01T00:00:00Z\n" for node in nodes)).encode()
    )
    events = pd.read_csv(data / "incident_events.csv", usecols=["node", "incidentDate", "category"])
    events.to_csv(work / "incidents.csv", index=False)
    mapping, asked = work / "incidents-mapping.yaml", work / f"horizon-{horizon_days}.yaml"
    write_bytes(
        mapping,
        b"timezone: UTC\nevents:\n  columns: {incidentDate: timestamp, category: code}\n  constants: {type: failure}\n",
    )
    write_bytes(
        asked,
        f"""decision: {{every: 24h}}
labels: {{gap: 10m, horizon: {horizon_days}d, cooldown: 1h, merge_window: 1h}}
features: {{groups: [history, static], history_windows: [7d, 30d, 90d, 365d], history_scopes: [node], static: auto}}
training: {{prior: null, window: expanding, refit_every: 14d, augmentation: 0}}
models: {{learners: [lightgbm, xgboost, random_forest, logistic], cascade: {{stages: [lightgbm, logistic]}}}}
backtest: {{k: 1, first_test: "{FIRST_DECISION.isoformat()}"}}
""".encode(),
    )
    dataset, out = work / "incidents", work / f"replay-{horizon_days}"
    params: list[str | Path] = ["--params", ROOT / "params.yaml", "--params", asked]
    predrain(
        "import", "--events", work / "incidents.csv", "--inventory", inventory, "--mapping", mapping, "--out", dataset,
        *params,
    )  # fmt: skip
    predrain("backtest", "--dataset", dataset, "--out", out, *params)
    return out / "predictions.parquet"


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Results of the import and the assessment of the telemetry."""

    assessed: dict[str, Any]
    lost: pd.DataFrame
    failures: pd.DataFrame

    def check(self, tickets: pd.DataFrame) -> None:
        """Raise ``SystemExit`` if a count differs from the published one."""
        counts = {
            "samples": self.assessed["accounting"]["samples"]["read"],
            "GPUs": self.assessed["data"]["units"],
            "incidents": len(tickets),
            "GPUs with XID 79": len(self.lost),
            "node failures by XID 79": len(self.failures),
        }
        if counts != EXPECTED:
            raise SystemExit(f"the data holds {counts}, expected {EXPECTED}: are these the published files?")

    def left_out(self, table: str, reason: str) -> int:
        """Count rows of a table that were left out for a reason."""
        return sum(row["count"] for row in self.assessed["accounting"][table]["left_out"] if row["reason"] == reason)

    def lines(self, tickets: pd.DataFrame) -> list[str]:
        """Return the page's section on the telemetry."""
        sizes = self.failures["gpus"].value_counts()
        lags = ticket_lags(tickets, self.failures).dropna()
        late = lags[lags > pd.Timedelta(0)] / pd.Timedelta(hours=1)
        whole, one = int(sizes.get(4, 0)), int(sizes.get(1, 0))
        placed = self.assessed["accounting"]["events"]["used"]
        predictable = self.assessed["predictable"]
        units, nodes = self.assessed["data"]["units"], self.assessed["data"]["nodes"]
        frozen = self.left_out("samples", "frozen instrument")
        bullets = (
            f"**{EXPECTED['samples']:,} samples** of {units} GPUs on {nodes} nodes, in ten-day windows around "
            f"incidents. {placed} of {len(tickets)} tickets name a node with telemetry; the others are counted as left "
            "out.",
            f"**XID 79 takes whole nodes.** {len(self.lost)} GPUs fell off the bus in {len(self.failures)} node "
            f"failures: {whole} of all four GPUs at the same time, {one} of one GPU.",
            "**Frozen pages.** After an XID 79 the exporter repeats temperature, power and utilization for days. "
            f"{frozen:,} samples are left out for it: these GPUs are unknown, not healthy.",
            f"**Tickets lag.** {len(late)} of {len(lags)} tickets that are dated within a week of the node's XID 79 "
            f"come {late.min():.0f} to {late.max():.0f} h after it (median {late.median():.0f} h). A ticket that "
            "follows a failure belongs to it.",
            f"**Verdict of `predrain assess`: {predictable['answer']}**{_why(predictable)}.",
        )
        return ["## Telemetry", "", *(_wrapped(f"- {bullet}") for bullet in bullets), ""]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, width=120, subsequent_indent="  " if text.startswith("- ") else "")


def _why(predictable: dict[str, Any]) -> str:
    """Return the reason of the verdict, or the number of failures behind it."""
    return f" ({predictable.get('reason') or str(predictable['failures']) + ' node failures were replayed'})"


def of_incidents(data: Path, work: Path, tickets: pd.DataFrame, replicates: int) -> tuple[list[str], float]:
    """Evaluate past incidents alone; return the lines of the page, and the AUC of the profile at seven days."""
    nodes = fleet_of_nodes(data)
    weights = np.vstack([np.ones(len(nodes)), resample(len(nodes), replicates, seed=0)])
    lines = [
        "## Incidents alone",
        "",
        _wrapped(
            f"{len(tickets)} incidents of {len(nodes)} nodes, one decision a day from {FIRST_DECISION:%Y-%m-%d}: does "
            "an incident follow within the horizon? Precision is that of alerting one node a day; the area under the "
            "ROC curve compares nodes of one day. Intervals of 95 % resample nodes. Most of these nodes are known "
            "because they failed: the base rates are not those of the whole cluster."
        ),
        "",
        "| horizon | score | ROC-AUC at a time | precision of one alert a day | base rate |",
        "|---|---|---|---|---|",
    ]
    reached = np.nan
    for horizon_days in HORIZONS_DAYS:
        daily = Daily(tickets, nodes, horizon_days)
        risks = of_predictions(replayed(data, nodes, work, horizon_days), daily)
        if np.isnan(risks).any():
            raise SystemExit(f"{int(np.isnan(risks).sum())} decisions without a risk: the replay asked other questions")
        scores = {"count of 90 days": daily.recent, "count of all so far": daily.all_so_far, "profile": risks}
        for name, score in scores.items():
            auc, precision = daily.auc(score, weights), daily.precision_of_one(score, weights)
            cells = [_cell(auc, "{:.2f}"), _cell(precision, "{:.1%}"), f"{daily.positive.mean():.1%}"]
            lines.append(f"| {horizon_days} d | {name} | " + " | ".join(cells) + " |")
            reached = float(auc[0]) if (name, horizon_days) == ("profile", 7) else reached
    return lines, reached


def _cell(values: Floats, form: str) -> str:
    bounds = interval(values[1:])
    return f"{form.format(values[0])} [{form.format(bounds.low)}, {form.format(bounds.high)}]"


def main() -> None:
    """Assess, replay, write the page, print the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the published files")
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work" / "gwdg")
    parser.add_argument("--quick", action="store_true", help="40 resamples; the page is printed, not written")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tickets = pd.read_csv(args.data / "incident_events.csv")
    tickets["day"] = pd.to_datetime(tickets["incidentDate"], format="%d %b %Y", utc=True)
    assessed, dataset = import_telemetry(args.data, args.work)
    telemetry = Telemetry(assessed, *xid79_failures(dataset))
    telemetry.check(tickets)
    incidents, reached = of_incidents(args.data, args.work, tickets, 40 if args.quick else 500)
    head = [
        "# Results on real GPU telemetry: GWDG",
        "",
        _wrapped(
            "Generated by `python benchmarks/real_gwdg.py --data FOLDER`; do not edit. A100 nodes of GWDG's cluster: "
            "telemetry in windows around failures, and the operators' incidents (Zenodo 10.5281/zenodo.19052367, "
            "CC-BY-4.0). Nothing was tuned on it."
        ),
        "",
    ]
    page = "\n".join([*head, *telemetry.lines(tickets), *incidents, ""])
    if args.quick:
        print(page)
    else:
        write_bytes(PAGE, page.encode())
    line = {
        "name": "real_gwdg", "value": round(reached, 3), "unit": "ROC-AUC of the profile, incidents alone, 7 days",
        "peer": "published count of 90 days", "ratio": round(reached / PUBLISHED_AUC, 2), "limit_share": None,
        "checked": True,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
