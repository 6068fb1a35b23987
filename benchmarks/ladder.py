"""benchmarks/results/ladder.md: which actions pay on simulated fleets that no setting was chosen on, by job size.

    python benchmarks/ladder.py [--quick] [--fleets announced-311 base-312]
    python benchmarks/ladder.py --speed 2000 [--quick]

Each fleet is simulated and assessed with ``predrain assess``, as an operator would. Assessments are stored under
benchmarks/work/ladder. ``--fleets`` reassesses only some fleets; the page keeps the rows of others that are not
stored, and names them. ``base-77``, which is also assessed un-accelerated, is the fleet of the README: its plot
(docs/images/ladder.svg) and its excerpt are written too. ``--speed`` only times a first assessment.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(ROOT))

from foundation.files import write_bytes
from pipeline.report.plots import as_file, net_by_job_size
from policy.ladder.rungs import RUNGS

PAGE = ROOT / "benchmarks" / "results" / "ladder.md"
PICTURE = ROOT / "docs" / "images" / "ladder.svg"
FRONT = ROOT / "README.md"
WORK = ROOT / "benchmarks" / "work" / "ladder"
README: Final = "base-77"
OUTPUT: Final = "printed.txt"


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings of a simulated fleet; ``options``: further options of ``predrain assess``."""

    gpus: int = 600
    acceleration: int = 5
    days: int = 100
    options: tuple[str, ...] = ()


TRACE: Final = ("--largest-job", "512")
FLEETS: Final = {
    README: FleetSettings(2000, options=TRACE),
    f"{README}-un-accelerated": FleetSettings(2000, 1, options=TRACE),
    **{name: FleetSettings() for name in ("base-312", "announced-311", "noprecursor-313", "drift-314")},
}
SPEED: Final = {
    2_000: (FleetSettings(2_000, days=90, options=TRACE), 180),
    10_000: (FleetSettings(10_000, days=120, options=TRACE), 480),
}
"""Fleets of ``--speed`` by size, each with the maximum seconds of its assessment on two cores."""

QUICK: Final = {"announced-100": FleetSettings(128, days=45)}
SHAPES: Final = {64: "64 GPUs", 256: "256 GPUs", None: "sizes of a trace"}
EXCERPT: Final = (
    "Are failures", "  precision if", "  recall: ", "  rung", *(f"  {rung} " for rung in RUNGS), "Recommended:",
    "  Net",
)  # fmt: skip
"""Prefixes of the output lines that the README shows."""


def folder_of(name: str, settings: FleetSettings) -> Path:
    """Return the folder of a fleet's dataset and assessment."""
    return WORK / f"{name}-{settings.gpus}"


def simulate(name: str, settings: FleetSettings) -> None:
    """Simulate a fleet, unless it exists; ``name``: scenario and seed."""
    scenario, seed, *_ = name.split("-")
    folder = folder_of(name, settings)
    if not (folder / "dataset").is_dir():
        run(
            "simulate", "--gpus", settings.gpus, "--days", settings.days, "--seed", seed, "--scenario", scenario,
            "--acceleration", settings.acceleration, "--out", folder / "dataset",
        )  # fmt: skip


def assess(name: str, settings: FleetSettings) -> None:
    """Assess a simulated fleet."""
    simulate(name, settings)
    folder, params = folder_of(name, settings), ROOT / "params" / "lightgbm.yaml"
    output = run(
        "assess", "--dataset", folder / "dataset", "--out", folder / "assessment", "--params", params,
        *settings.options,
    )  # fmt: skip
    write_bytes(folder / OUTPUT, output.encode())


def time_verdict(gpus: int, settings: FleetSettings, limit: int) -> dict[str, Any]:
    """Assess a fleet for the first time; return the line of JSON."""
    name = f"{README}-speed"
    shutil.rmtree(folder_of(name, settings) / "assessment", ignore_errors=True)
    simulate(name, settings)
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    assess(name, settings)
    seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "name": f"ladder --speed {gpus}", "value": round(seconds),
        "unit": f"s for a verdict on {settings.gpus:,} GPUs over {settings.days} days", "peer": None, "ratio": None,
        "limit_share": None, "checked": True, "aim": f"{limit} s on two cores", "met": seconds <= limit,
        "others": {"CPU s": round(cpu_seconds)},
    }  # fmt: skip


def stored_assessments(fleets: Mapping[str, FleetSettings]) -> dict[str, dict[str, Any]]:
    """Read the stored assessments, by name."""
    paths = {name: folder_of(name, settings) / "assessment" / "assessment.json" for name, settings in fleets.items()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def excerpt(readme: str, output: str) -> str:
    """Return the README with its assessment block replaced by the lines of :data:`EXCERPT`."""
    lines = [line for line in output.splitlines() if line.startswith(EXCERPT)]
    table = next(i for i, line in enumerate(lines) if line.startswith("  rung"))
    once = {line.split()[0]: line.removesuffix(" *") for line in lines[table + 1 :] if line.split()[0] in RUNGS}
    ends = [line.split(" (publish", 1)[0] for line in lines if line.startswith(EXCERPT[-2:])]
    chosen = [*lines[: table + 1], *once.values(), *ends]
    begin = readme.index("```text\nAre failures") + len("```text\n")
    return readme[:begin] + "\n".join(chosen) + readme[readme.index("\n```", begin) :]


def run(*arguments: object) -> str:
    """Run predrain; return its output."""
    code = "from predrain.command import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, text=True).stdout
    sys.stderr.write(output)
    return output


def earlier_rows(previous: str, fleet: str, columns: int) -> list[str]:
    """Return the rows of a fleet in the table with ``columns`` columns of an earlier page; 1: its list items."""
    rows = [row for row in previous.splitlines() if row.startswith((f"| {fleet} |", f"- {fleet}, "))]
    return [row for row in rows if row.count(" | ") == columns - 1]


def page(assessments: dict[str, dict[str, Any]], command: str, previous: str = "") -> str:
    """Write the page; ``assessments``: by name; ``previous``: page with the rows of fleets without any."""
    names = [name for name in FLEETS if earlier_rows(previous, name, 5) or name in assessments] or [*assessments]
    older = ", ".join(name for name in names if name not in assessments)
    lines = [
        "# Which actions pay on simulated fleets",
        "",
        f"Made by `{command}`: {', '.join(names)} (scenario and seed; 100 days at five times the usual failure rates "
        "if not un-accelerated; 600 GPUs, base-77 2,000 with `--largest-job 512`). Each is assessed as by `predrain "
        "assess --params params/lightgbm.yaml`. No setting was chosen on these seeds, except base-77, the example "
        "in the README. Net GPU-hours compared with no action, with 95 % intervals by node."
        + (f" **Rows of an earlier version:** {older}." if older else ""),
        "",
        "## The recommended ladder",
        "",
        "| fleet | jobs | recommended | net | best single action |",
        "|---|---|---|---|---|",
    ]
    short = []
    for name in names:
        if name not in assessments:
            lines += earlier_rows(previous, name, 5)
            short += earlier_rows(previous, name, 1)
            continue
        content = assessments[name]
        shapes = {size["gpus_per_job"]: size for size in content.get("by_job_size") or ()}
        replays = {"its own": content} | {SHAPES[size]: shapes[size] for size in SHAPES if size in shapes}
        for shape, replayed in replays.items():
            net, rows = replayed["recommended_net"], replayed["ladder"][1:]
            best = max(rows, key=lambda row: row["net"], default=None)
            alone = "" if best is None else f"{best['rung']} {interval(best)}"
            chosen = ", ".join(replayed["recommended"])
            value = {"net": net["value"], "net_low": net["low"], "net_high": net["high"]}
            lines.append(f"| {name} | {shape} | {chosen} | {interval(value)} | {alone} |")
            if best is not None and best["net"] > net["value"]:
                more = f"{best['rung']} alone nets {best['net'] - net['value']:,.0f} GPU-hours more"
                unsure = " (its interval contains 0)" if best["net_low"] <= 0 else ""
                short.append(f"- {name}, jobs: {shape}: {more}{unsure}.")
    lines += [
        "",
        "The recommendation is chosen and evaluated on different nodes. Single actions that net more:",
        "",
    ]
    lines += [*(short or ["- nowhere."]), "", "## Single actions, with the jobs of the fleet", ""]
    lines += [
        "| fleet | predictable | failures | "
        + " | ".join(("avoid", "probe", "checkpoint", "swap", "drain", "hard rules alone"))
        + " |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for name in names:
        if name not in assessments:
            lines += earlier_rows(previous, name, 9)
            continue
        content = assessments[name]
        rows = {row["rung"]: interval(row) for row in content["ladder"]}
        rules = next((row for row in content.get("policies") or () if row["policy"] == "hard rules alone"), None)
        cells = [rows.get(rung, "") for rung in ("avoid", "probe", "checkpoint", "swap", "drain")]
        evaluated = content["predictable"]
        lines.append(
            f"| {name} | {evaluated['answer']} | {evaluated['failures']} | {' | '.join([*cells, interval(rules)])} |"
        )
    return "\n".join([*lines, ""])


def interval(row: dict[str, Any] | None) -> str:
    """Format a net value with its interval."""
    return "" if row is None else f"{round(row['net']):,} [{round(row['net_low']):,}, {round(row['net_high']):,}]"


def main() -> None:
    """Assess the fleets and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small fleet, which proves nothing; to stdout")
    parser.add_argument("--fleets", nargs="+", choices=list(FLEETS), help="assess these alone")
    parser.add_argument("--speed", type=int, choices=list(SPEED), help="only time a verdict on so many GPUs")
    args = parser.parse_args()
    if args.speed:
        settings, limit = SPEED[args.speed]
        settings = next(iter(QUICK.values())) if args.quick else settings
        sys.stdout.write(json.dumps(time_verdict(args.speed, settings, limit)) + "\n")
        return
    begin = time.monotonic()
    fleets = QUICK if args.quick else FLEETS
    for name in args.fleets or fleets:
        assess(name, fleets[name])
    assessments = stored_assessments(fleets)
    text = page(assessments, "python benchmarks/ladder.py", "" if args.quick else PAGE.read_text(encoding="utf-8"))
    if args.quick:
        sys.stdout.write(text)
    else:
        write_bytes(PAGE, text.encode())
    if README in (args.fleets or fleets):
        write_bytes(PICTURE, as_file(net_by_job_size(assessments[README])).encode())
        output = (folder_of(README, FLEETS[README]) / OUTPUT).read_text(encoding="utf-8")
        write_bytes(FRONT, excerpt(FRONT.read_text(encoding="utf-8"), output).encode())
    replays = [replay for content in assessments.values() for replay in (content, *(content.get("by_job_size") or ()))]
    lost = any(replay["recommended_net"]["low"] < 0 for replay in replays)
    line = {
        "name": "ladder", "value": round(time.monotonic() - begin), "unit": "s", "peer": None, "ratio": None,
        "limit_share": None, "checked": not lost,
    }  # fmt: skip
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
