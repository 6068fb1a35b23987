"""Null check of the whole pipeline: no skill on data without signal, detection of a known signal.

    python benchmarks/null_check.py [--quick] [--runs RUN ...] [--work FOLDER]

Five runs of features, training, scoring and evaluation on simulated fleets:

``shuffled``     the incidents of a fleet are reassigned to random GPUs, independently and at unchanged times. They are
                 drawn from all GPUs in service, not only those of the same product, whose failure rate would rightly be
                 learned. Everything after the features runs on labels that nothing explains.
``independent``  incidents at a constant rate on random GPUs, written into the events of a fleet without failures, with
                 everything rerun from the dataset: features, labels, models.
``planted``      the same incidents, but the GPU runs hot for a day before each: must be found.
``leak``         ``independent`` with a noisy feature that reads the future: must be found.
``leak shuffled``  ``shuffled`` with such a feature.

At chance: no model's precision@K, average precision or ROC-AUC exceeds chance by more than the sampling error.
With three metrics of a dozen models, each is tested one-sided at 5 % divided by their number (Bonferroni). ``--quick``
uses a smaller fleet and fewer trees.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # not on sys.path when run as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.null.finding import Outcome, show
from benchmarks.null.runs import (
    AT_CHANCE,
    MODERATE,
    NAMES,
    QUICK,
    line,
    moderate_params,
    passed,
    run_checks,
    small_params,
)


def report(outcome: Outcome) -> None:
    """Report the findings of a finished run on stderr, because all runs can take an hour."""
    most = max(outcome.findings, key=lambda finding: finding.z)
    largest = f"largest z {most.z:.2f} of {outcome.limit:.2f} ({most.model}, {most.variant}, {most.measure})"
    good = passed({outcome.name: outcome})[outcome.name]
    print(f"{line(outcome.name, outcome, good)}; {largest}", file=sys.stderr, flush=True)


def main() -> None:
    """Run all checks, print the table and the line of JSON; exit with 1 if a result is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller fleet and fewer trees")
    parser.add_argument("--runs", nargs="*", choices=NAMES, default=NAMES, help="of the simulated fleets; default: all")
    parser.add_argument("--work", type=Path, help="keep the fleets and matrices here")
    args = parser.parse_args()
    size = QUICK if args.quick else MODERATE
    params = small_params() if args.quick else moderate_params()
    began, computed = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        outcomes = run_checks(work, size, params, args.runs, done=report)
    verdicts = passed(outcomes)
    took = f"{time.perf_counter() - began:.0f} s, {time.process_time() - computed:.0f} s of computing"
    print(f"{size.gpus} GPUs, {size.days} days, {took}")
    print(show(outcomes, params.models.profile))
    for name, outcome in outcomes.items():
        print(line(name, outcome, verdicts[name]))
    null = [outcomes[name] for name in AT_CHANCE if name in outcomes]
    most = max((finding.z for outcome in null for finding in outcome.findings), default=None)
    share = None if most is None else round(most / max(outcome.limit for outcome in null), 3)
    print(
        json.dumps(
            {
                "name": "null_check",
                "value": None if most is None else round(most, 3),
                "unit": "standard errors above chance, the largest of all models and measures",
                "peer": "what sampling explains",
                "ratio": share,
                "limit_share": share,
                "checked": all(verdicts.values()),
                "runs": verdicts,
            }
        )
    )
    if not all(verdicts.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
