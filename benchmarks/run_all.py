"""Run the benchmarks and write benchmarks/results/speeds.md, which the README quotes: ``make bench``.

    python benchmarks/run_all.py [NAME ...] [--quick]

The machine must be otherwise idle. The page is written after each benchmark; with names, such as ``batch_scoring`` or
``"features_out_of_core --whole"``, only those run, and the other lines are kept. Output is passed through. A benchmark
that misses its aim gets a line, one that fails gets none; both are reported at the end, with a non-zero exit code.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(HERE.parent))

from foundation.files import write_bytes

PAGE = HERE / "results" / "speeds.md"
LARGE = "--whole"
"""Option of runs that ``--quick`` skips, because they take gigabytes of disk, and minutes."""

RUNS = (
    "features_extend_day", "batch_scoring", "backtest_speed", f"backtest_speed {LARGE}", "node_lookups", "decide_fleet",
    "ingest_speed", "prometheus_backfill", "features_file_to_file", "features_out_of_core",
    f"features_out_of_core {LARGE}", "ladder --speed 2000", "actuate_kubernetes",
)  # fmt: skip
"""Benchmarks in the order of the page, each a file of this folder with its options. The last one needs the servers that
``make test-system`` installs."""


def read_page() -> dict[str, str]:
    """Read the lines of the existing table, by the benchmark's name."""
    if not PAGE.exists():
        return {}
    named = (
        (line.split("|")[1].strip(), line) for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line
    )
    return {name: line for name, line in named if name in RUNS}


def write_page(lines: dict[str, str]) -> None:
    """Write the table, in the order of :data:`RUNS`."""
    head = [
        "# Benchmarks",
        "",
        f"Made by `make bench` on {os.cpu_count()} cores ({platform.machine()}). Ratios compare with a peer in the "
        "same run, and are reported only if both results agree. Absolute numbers depend on the machine.",
        "",
        "| name | value | unit | peer | ratio | aim | on |",
        "|---|---|---|---|---|---|---|",
    ]
    write_bytes(PAGE, "\n".join([*head, *(lines[name] for name in RUNS if name in lines), ""]).encode())


def aim_of(report: dict[str, Any]) -> str:
    """Return a benchmark's aim and whether it was met; empty without an aim."""
    return f"{report['aim']}: {'met' if report['met'] else '**missed**'}" if report.get("aim") else ""


def line_of(report: dict[str, Any]) -> str:
    """Format a benchmark's result as a line of the table."""
    ratio = "" if report["ratio"] is None else f"{report['ratio']:g}"
    cells = (
        report["name"],
        f"{report['value']:,}",
        report["unit"],
        report["peer"] or "",
        ratio,
        aim_of(report),
        f"{datetime.now(UTC):%Y-%m-%d}",
    )
    return f"| {' | '.join(cells)} |"


def run(command: list[str]) -> tuple[int, dict[str, Any] | None]:
    """Run a benchmark and pass its output through; return its exit status and its line of JSON, if any."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line if line.strip() else last
    return process.returncode, json.loads(last) if last.startswith("{") else None


def main() -> None:
    """Run the benchmarks, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(RUNS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="small, to see that they run; the page stays as it is")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(RUNS))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(RUNS)}")
    lines, missed, failed = read_page(), [], []
    for name in args.names or RUNS:
        file, *options = name.split()
        if args.quick and LARGE in options:
            continue
        command = [sys.executable, str(HERE / f"{file}.py"), *options, *(["--quick"] if args.quick else [])]
        print(f"--- {name}", flush=True)
        status, report = run(command)
        if status and report and report.get("met") is False:
            missed.append(f"{name} ran and missed its aim ({report['aim']})")
        elif status or report is None:
            failed.append(f"{name} failed to run (exit status {status}; see its output above)")
        if report is not None and not args.quick:
            lines[name] = line_of(report)
            write_page(lines)
    if missed or failed:
        raise SystemExit("\n".join([*missed, *failed]))


if __name__ == "__main__":
    main()
