"""benchmarks/results/ladder.md: which actions pay on simulated fleets that nothing was chosen on, by shape of jobs.

    python benchmarks/ladder.py [--quick] [--fleets announced-311 base-312]

Each fleet is simulated and assessed as an operator would, by ``predrain assess``. Finished ones are kept under
benchmarks/work/ladder as long as code and parameters stay the same. Without ``--fleets``, all of :data:`FLEETS`; of
those, ``base-77`` is the fleet of the README, whose picture (docs/images/ladder.svg) is drawn too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

from foundation.files import write_bytes
from pipeline.report.plots import as_file, net_by_job_size

PAGE = ROOT / "benchmarks" / "results" / "ladder.md"
PICTURE = ROOT / "docs" / "images" / "ladder.svg"
WORK = ROOT / "benchmarks" / "work" / "ladder"
README: Final = "base-77"
FLEETS: Final = {
    README: 1000, "base-312": 600, "announced-311": 600, "noprecursor-313": 600, "drift-314": 600,
}  # fmt: skip
"""GPUs of each fleet, by scenario and seed; 100 days at five times the usual failure rates."""

QUICK: Final = {"announced-100": 128}
SHAPES: Final = {64: "64 GPUs", 256: "256 GPUs", None: "sizes of a trace"}


def assessed(fleet: str, gpus: int, days: int) -> dict[str, Any]:
    """Simulate a fleet, unless it is there, and assess it."""
    (scenario, seed), place = fleet.split("-"), WORK / f"{fleet}-{gpus}"
    if not (place / "dataset").is_dir():
        run(
            "simulate", "--gpus", gpus, "--days", days, "--seed", seed, "--scenario", scenario, "--acceleration", 5,
            "--out", place / "dataset",
        )  # fmt: skip
    params = ROOT / "params" / "lightgbm.yaml"
    run("assess", "--dataset", place / "dataset", "--out", place / "assessment", "--params", params)
    content: dict[str, Any] = json.loads((place / "assessment" / "assessment.json").read_text(encoding="utf-8"))
    return content


def run(*words: object) -> None:
    """Run predrain; what it prints goes to stderr."""
    code = "from predrain.command import main; main()"
    command = [sys.executable, "-c", code, *map(str, words)]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)


def page(fleets: dict[str, dict[str, Any]], command: str) -> str:
    """Write the page; ``fleets``: assessments by name."""
    lines = [
        "# Which actions pay on simulated fleets",
        "",
        f"Made by `{command}`: {', '.join(fleets)} (scenario and seed; 100 days at five times the usual failure rates, "
        "600 GPUs, base-77 1,000). Each is assessed as by `predrain assess --params params/lightgbm.yaml`. No setting "
        "was chosen on these seeds, but for base-77, the example of the README. Net GPU-hours against nobody acting, "
        "with 95 % intervals by node.",
        "",
        "## The recommended ladder",
        "",
        "| fleet | jobs | recommended | net | best single action |",
        "|---|---|---|---|---|",
    ]
    short = []
    for name, content in fleets.items():
        shapes = {size["gpus_per_job"]: size for size in content.get("by_job_size") or ()}
        replays = {"dataset": content} | {SHAPES[size]: shapes[size] for size in SHAPES if size in shapes}
        for shape, replayed in replays.items():
            net, rows = replayed["recommended_net"], replayed["ladder"][1:]
            best = max(rows, key=lambda row: row["net"], default=None)
            alone = "" if best is None else f"{best['rung']} {interval(best)}"
            chosen = ", ".join(replayed["recommended"])
            value = {"net": net["value"], "net_low": net["low"], "net_high": net["high"]}
            lines.append(f"| {name} | {shape} | {chosen} | {interval(value)} | {alone} |")
            if best is not None and best["net"] > net["value"]:
                less = f"{best['net'] - net['value']:,.0f} GPU-hours less than {best['rung']} alone"
                unsure = ", whose interval contains 0" if best["net_low"] <= 0 else ""
                short.append(f"- {name}, jobs of {shape}: {less}{unsure}.")
    lines += [
        "",
        "Where a single action nets more than the recommendation, which is chosen on other nodes than it is",
        "evaluated on:",
        "",
    ]
    lines += [*(short or ["- nowhere."]), "", "## Each action alone, with the jobs of the dataset", ""]
    lines += [
        "| fleet | predictable | failures | "
        + " | ".join(("avoid", "probe", "checkpoint", "swap", "drain", "hard rules alone"))
        + " |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for name, content in fleets.items():
        rows = {row["rung"]: interval(row) for row in content["ladder"]}
        rules = next((row for row in content.get("policies") or () if row["policy"] == "hard rules alone"), None)
        cells = [rows.get(rung, "") for rung in ("avoid", "probe", "checkpoint", "swap", "drain")]
        judged = content["predictable"]
        lines.append(
            f"| {name} | {judged['answer']} | {judged['failures']} | {' | '.join([*cells, interval(rules)])} |"
        )
    return "\n".join([*lines, ""])


def interval(row: dict[str, Any] | None) -> str:
    """Lay out a net with its interval."""
    return "" if row is None else f"{row['net']:,.0f} [{row['net_low']:,.0f}, {row['net_high']:,.0f}]"


def main() -> None:
    """Assess the fleets and write the page; a part of the plan says so in its head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small fleet, which proves nothing; to stdout")
    parser.add_argument("--fleets", nargs="+", choices=list(FLEETS), help="only these")
    args = parser.parse_args()
    begin = time.monotonic()
    fleets = QUICK if args.quick else {name: FLEETS[name] for name in args.fleets or FLEETS}
    contents = {name: assessed(name, gpus, 45 if args.quick else 100) for name, gpus in fleets.items()}
    text = page(contents, " ".join(["python benchmarks/ladder.py", *sys.argv[1:]]))
    if args.quick:
        sys.stdout.write(text)
    else:
        write_bytes(PAGE, text.encode())
    if README in contents:
        write_bytes(PICTURE, as_file(net_by_job_size(contents[README])).encode())
    lost = [name for name, content in contents.items() if content["recommended_net"]["low"] < 0]
    line = {
        "name": "ladder", "value": round(time.monotonic() - begin), "unit": "s", "peer": None, "ratio": None,
        "limit_share": None, "checked": not lost,
    }  # fmt: skip
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
