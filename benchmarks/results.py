"""The one table of results: what the models are worth on simulated fleets, and what may be claimed.

Five seeds each of ``base`` and ``drift``, two of the other scenarios, three more of ``announced`` for what is promised
there, and the paper's profile on one seed of ``base`` and ``drift``, failure rates multiplied; seeds from 1 on, on
which no parameter was chosen (development uses seeds from 100 on). Writes docs/results.md. With ``--own-rates`` instead
five seeds each of ``base`` and ``drift`` at the failure rates as calibrated, to docs/results-own-rates.md. A finished
part is kept under benchmarks/work/results and taken from there as long as the code and the parameters that it was made
from stay the same, so a killed run goes on where it stopped.

    python benchmarks/results.py [--quick | --own-rates] [--finished] [--scenarios base drift] [--seeds 2]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

from benchmarks.scoreboard import page  # noqa: E402
from benchmarks.scoreboard.claims import Gain, gain  # noqa: E402
from benchmarks.scoreboard.fleets import Ran, run_plan  # noqa: E402
from benchmarks.scoreboard.plan import PAPER, PAPER_TITLE, RECOMMENDED, Part, Plan, make_plan  # noqa: E402
from benchmarks.scoreboard.pooled import Measured, Pool, at_alerts_of, measure  # noqa: E402
from benchmarks.scoreboard.promised import promise_table  # noqa: E402
from benchmarks.scoreboard.store import Stored  # noqa: E402
from evaluation.metrics.comparison import SLIDING  # noqa: E402
from models.config import CASCADE, PrecisionTargetsSection  # noqa: E402
from pipeline.params import load_params  # noqa: E402
from pipeline.provenance import code_revision  # noqa: E402
from telemetry.atomic import write_bytes  # noqa: E402


def against_paper(plan: Plan, ran: Ran) -> list[Gain]:
    """Compare the recommended profile with the paper's on the fleets that both were replayed on.

    For each scenario and for all together: both at the full budget K and at the number of alerts that the paper's
    PARALLEL gives, and at K beside the paper's CASCADE.
    """
    pairs: dict[str, list[tuple[Stored, Stored]]] = {}
    for scenario in plan.scenarios:
        parts = [part for part in plan.of(scenario, PAPER) if part in ran.parts]
        twins = [next(twin for twin in plan.of(scenario, RECOMMENDED) if twin.seed == part.seed) for part in parts]
        if parts and all(twin in ran.parts for twin in twins):
            pairs[f"`{scenario}`"] = [
                (ran.parts[twin], ran.parts[part]) for twin, part in zip(twins, parts, strict=True)
            ]
    if len(pairs) > 1:
        pairs[f"{' and '.join(pairs)} together"] = [pair for of_scenario in pairs.values() for pair in of_scenario]
    out = []
    for fleets, together in pairs.items():
        ours = Pool([one for one, _ in together], plan.replicates)
        theirs = Pool([other for _, other in together], plan.replicates)
        where = f"{fleets} ({len(together)} fleet{'s' if len(together) > 1 else ''})"
        profile = str(theirs.parts[0].facts["profile"])
        for model, sparing in ((profile, False), (profile, True), (CASCADE, False)):
            if all((model, SLIDING) in part.models for part in theirs.parts):
                mine, other, best = at_alerts_of(ours, theirs, model, sparing=sparing)
                name = f"{PAPER_TITLE} ({model}) at {'its own alerts' if sparing else 'K'}"
                out.append(gain(where, name, mine, other, best, None))
    return out


def measure_all(asked: Mapping[str, Sequence[Stored]], replicates: int, jobs: int) -> dict[str, Measured]:
    """Measure pools of fleets, several at a time, each in a process of its own; a single job stays in this one."""
    if jobs == 1:
        return {name: _measure(parts, replicates) for name, parts in asked.items()}
    with ProcessPoolExecutor(max_workers=jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(_measure, tuple(parts), replicates) for name, parts in asked.items()}
        return {name: future.result() for name, future in running.items()}


def _measure(parts: Sequence[Stored], replicates: int) -> Measured:
    return measure(Pool(list(parts), replicates))


def make_page(plan: Plan, ran: Ran, command: str, section: PrecisionTargetsSection, jobs: int = 1) -> str:
    """Measure every scenario and write it all down."""
    stored, promising = _there(plan.pools(), ran), _there(plan.promising(), ran)
    asked = dict(stored)
    asked |= {f"{part.scenario}, {PAPER_TITLE}": [kept] for part, kept in ran.parts.items() if part.profile == PAPER}
    by_pool = measure_all(asked, plan.replicates, jobs)
    usual = {name: by_pool[name] for name in stored}
    paper = against_paper(plan, ran)
    promises = promise_table(promising, section, jobs)
    lines = page.opening(plan, command, len(ran.parts), ran.fresh, code_revision())
    lines += page.claims(usual, paper, promises, section)
    for name, measured in by_pool.items():
        lines += page.scenario(name, measured, int(measured.table["incidents"].max()))
    if ran.left_out:
        lines += ["## Left out", "", *[f"- {why}" for why in ran.left_out], ""]
    return "\n".join(lines)


def _there(pools: Mapping[str, Sequence[Part]], ran: Ran) -> dict[str, list[Stored]]:
    """Give what was run of each pool, without pools of which nothing was."""
    there = {name: [ran.parts[part] for part in parts if part in ran.parts] for name, parts in pools.items()}
    return {name: parts for name, parts in there.items() if parts}


def main() -> None:
    """Run the plan, measure, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="small fleets and few seeds, to stdout only")
    which.add_argument("--own-rates", action="store_true", help="fleets whose failures are not accelerated")
    parser.add_argument("--scenarios", nargs="+", help="only these scenarios")
    parser.add_argument("--seeds", type=int, help="at most so many seeds of each scenario")
    parser.add_argument("--first-seed", type=int, default=1, help="from 100 on for development")
    parser.add_argument("--gpus", type=int, help="another number of GPUs")
    parser.add_argument("--days", type=int, help="another length")
    parser.add_argument("--jobs", type=int, default=2, help="fleets at a time, 6 GB each, or 12; default 2")
    parser.add_argument("--finished", action="store_true", help="run nothing: the table of what is finished so far")
    parser.add_argument("--no-paper", action="store_true", help="leave the paper's profile out")
    parser.add_argument("--params", type=Path, nargs="+", default=[ROOT / "params.yaml"])
    parser.add_argument("--work", type=Path, help="folder of what is kept; default benchmarks/work/results")
    parser.add_argument("--out", type=Path, help="the page; default as above, with --quick none")
    args = parser.parse_args()
    plan = make_plan(
        quick=args.quick,
        first_seed=args.first_seed,
        scenarios=args.scenarios,
        seeds=args.seeds,
        gpus=args.gpus,
        days=args.days,
        with_paper=not args.no_paper,
        own_rates=args.own_rates,
    )
    work = args.work or ROOT / "benchmarks" / "work" / "results"
    begin = time.monotonic()
    ran = run_plan(plan, args.params, work, jobs=args.jobs, finished=args.finished)
    if not ran.parts:
        raise SystemExit("nothing could be run:\n" + "\n".join(ran.left_out))
    name = "results-own-rates" if args.own_rates else "results"
    command = "python benchmarks/results.py --quick" if args.quick else f"make {name}"
    section = load_params(args.params).models.precision_targets
    text = make_page(plan, ran, command, section, args.jobs)
    out = args.out or (None if args.quick else ROOT / "docs" / f"{name}.md")
    if out is not None:
        write_bytes(out, (text.rstrip("\n") + "\n").encode())
    else:
        sys.stdout.write(text)
    report = {
        "name": name,
        "value": round(time.monotonic() - begin),
        "unit": "s",
        "peer": None,
        "ratio": None,
        "limit_share": None,
        "checked": True,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
