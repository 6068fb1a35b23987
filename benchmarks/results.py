"""benchmarks/results/fleets.md: claims about the models on simulated fleets, with effect sizes.

Seeds from 1 on are for reporting: no parameter is chosen on them; development uses seeds from 100 on. Finished fleets
are cached under benchmarks/work/results while code and parameters are unchanged, and interrupted ones are resumed. A
partial or modified plan is printed to stdout.

    python benchmarks/results.py [--quick | --first-seed 100 --gpus 200 --days 60] [--scenarios base drift] [--seeds 1]
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.scoreboard.fleets import build_prior, plan, run_fleet
from benchmarks.scoreboard.measure import measure
from benchmarks.scoreboard.page import make_page
from foundation.files import write_bytes
from pipeline.tracking import code_revision

PAGE = ROOT / "benchmarks" / "results" / "fleets.md"
WORK = ROOT / "benchmarks" / "work" / "results"


def main() -> None:
    """Run the plan, measure, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small fleets, which prove nothing")
    parser.add_argument("--first-seed", type=int, help="from 100 on for development, as --quick has it; default 1")
    parser.add_argument("--scenarios", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, help="at most so many seeds of each scenario")
    parser.add_argument("--gpus", type=int, help="another number of GPUs")
    parser.add_argument("--days", type=int, help="another length")
    parser.add_argument("--prior", help="shipped or a folder; default: one is built without fleets like these")
    args = vars(parser.parse_args())
    prior, quick = args.pop("prior"), args["quick"]
    fleets = plan(**args)
    begin = time.monotonic()
    replicates = 100 if quick else 500
    whole = fleets == plan() and prior is None
    prior = prior or build_prior(WORK)
    measured = [measure(fleet, run_fleet(fleet, WORK, prior), replicates) for fleet in fleets]
    command = "make results" if whole else " ".join(["python", "benchmarks/results.py", *sys.argv[1:]])
    page = make_page(measured, command, code_revision(), replicates)
    if whole:
        write_bytes(PAGE, page.encode())
    else:
        sys.stdout.write(page)
    line = {
        "name": "results", "value": round(time.monotonic() - begin), "unit": "s", "peer": None, "ratio": None,
        "limit_share": None, "checked": True,
    }  # fmt: skip
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
