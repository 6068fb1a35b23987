"""Run every benchmark and write benchmarks/results.md, which the README quotes: ``make bench``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = (
    "simulate",
    "parquet_layout",
    "parse_exporter_page",
    "backfill_prometheus",
    "collect_exporters",
    "score_fleet",
    "http_predict",
    "online_update",
    "decide_fleet",
)
"""Benchmarks in the order of the page; each is a file of this folder."""


def main() -> None:
    """Run them one after the other, stop at the first that fails, write the page."""
    lines = [
        "# Benchmarks",
        "",
        f"Made by `make bench` on {os.cpu_count()} cores ({platform.machine()}). Ratios are beside a peer in one run, "
        "equality checked first; they matter, the numbers are this machine's.",
        "",
        "| name | value | unit | peer | ratio |",
        "|---|---|---|---|---|",
    ]
    for name in NAMES:
        done = subprocess.run(  # noqa: S603 - our own scripts
            [sys.executable, str(HERE / f"{name}.py"), *sys.argv[1:]], capture_output=True, text=True, check=False
        )
        sys.stdout.write(done.stdout)
        if done.returncode != 0:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        line = json.loads(done.stdout.strip().splitlines()[-1])
        peer = line["peer"] or ""
        ratio = "" if line["ratio"] is None else f"{line['ratio']:g}"
        lines.append(f"| {line['name']} | {line['value']:,} | {line['unit']} | {peer} | {ratio} |")
    (HERE / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
