"""Run every benchmark and write benchmarks/results.md, which the README quotes: ``make bench``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS: tuple[tuple[str, ...], ...] = (
    ("simulate",),
    ("parquet_layout",),
    ("parse_exporter_page",),
    ("backfill_prometheus",),
    ("collect_exporters",),
    ("fold_cost",),
    ("features_extend_day",),
    ("score_fleet",),
    ("batch_scoring",),
    ("http_predict",),
    ("online_update",),
    ("decide_fleet",),
    ("jobs_saved",),
    ("features_file_to_file",),
    ("features_out_of_core",),
    ("features_out_of_core", "--whole"),
    ("features_window_length",),
    ("sliding_refit",),
    ("dask_scaling",),
    ("actuate_kubernetes",),
    ("actuate_slurm",),
)
"""Benchmarks in the order of the page, each a file of this folder with its options. The last two need the servers that
``make test-system`` installs."""

LARGE = "--whole"
"""An option that is left out of the quick run: gigabytes of disk, and minutes."""


def main() -> None:
    """Run them one after the other, write the page; one that misses its aim is told at the end and keeps its line."""
    lines = [
        "# Benchmarks",
        "",
        f"Made by `make bench` on {os.cpu_count()} cores ({platform.machine()}). Ratios are beside a peer in one run, "
        "equality checked first; they matter, the numbers are this machine's.",
        "",
        "| name | value | unit | peer | ratio |",
        "|---|---|---|---|---|",
    ]
    missed = []
    for name, *options in RUNS:
        if LARGE in options and "--quick" in sys.argv[1:]:
            continue
        done = subprocess.run(  # noqa: S603 - our own scripts
            [sys.executable, str(HERE / f"{name}.py"), *options, *sys.argv[1:]],
            capture_output=True,
            text=True,
            check=False,
        )
        sys.stdout.write(done.stdout)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode != 0:
            missed.append(f"{name} failed:\n{done.stderr}")
            if not last.startswith("{"):
                continue
        line = json.loads(last)
        peer = line["peer"] or ""
        ratio = "" if line["ratio"] is None else f"{line['ratio']:g}"
        lines.append(f"| {line['name']} | {line['value']:,} | {line['unit']} | {peer} | {ratio} |")
    (HERE / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if missed:
        raise SystemExit("\n".join(missed))


if __name__ == "__main__":
    main()
