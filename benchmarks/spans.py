"""Training spans against each other, walk-forward: fixed ones, everything since the beginning, and chosen ones.

Every rule replays the same decisions of the same simulated fleets (development seeds, from 100 on) with the same K.
What a refit gives depends on its span alone, so each span is fitted once at each refit, and the rules that choose take
their refits from there; the seconds say what each rule would cost by itself. Differences are paired with ``auto`` as
params.yaml has it, GPUs resampled within their fleets. Beside the rules for spans stands the rule for refits: ``auto``
when a check finds drift instead of every week, with what its checks found. Refits that are finished are kept below
``--work``: a run that was killed does only the others.

    python benchmarks/spans.py [--seeds 101 102] [--scenarios base drift] [--gpus 800] [--days 180] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

from benchmarks.development_fleets import DevelopmentFleets, Kept, only  # noqa: E402
from benchmarks.scoreboard.pooled import Pool  # noqa: E402
from features.matrix.matrix import FeatureMatrix  # noqa: E402
from features.times import duration_ms  # noqa: E402
from models.assessment import Assessment, assess  # noqa: E402
from models.backtest_frames import BacktestResult  # noqa: E402
from models.bootstrap import interval  # noqa: E402
from models.config import JudgeSection, ModelsSection, TrainingSection  # noqa: E402
from models.schedule import format_days, plan_schedule  # noqa: E402
from models.trainer import Trainer  # noqa: E402
from pipeline.params import Params, load_params  # noqa: E402
from pipeline.report.wording import between, number, percent, points, verdict  # noqa: E402

REFERENCE = "auto"
"""The rule that the others are compared with."""

ON_DRIFT = "auto, refits on drift"
"""The rule that refits when drift asks for it; all others follow the calendar."""

STATISTICS = ("precision_at_k", "average_precision", "capture")


@dataclass(frozen=True, slots=True)
class Fleet:
    """What one fleet showed.

    ``seconds``: CPU seconds that each rule's refits, scoring and choosing took.
    ``chosen``: how often each rule took each span, by name.
    ``switched``: how often each rule left the span in use.
    ``checks``: what each check of a rule found, by its fold; :data:`ON_DRIFT` alone.
    """

    k: int
    seconds: dict[str, float]
    chosen: dict[str, dict[str, int]]
    switched: dict[str, int]
    checks: dict[str, list[str]] = field(default_factory=dict)
    refits: dict[str, tuple[int, int]] = field(default_factory=dict)


def rules(members: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give the rules that choose: overrides of ``training`` by name."""
    return {
        REFERENCE: {},
        "auto, 3 tails": {"judge": JudgeSection(tails=3)},
        "auto, members judge": {"judge": JudgeSection(learners=tuple(members))},
        "auto, members judge 3 tails": {"judge": JudgeSection(learners=tuple(members), tails=3)},
        "auto, whole spans only": {"judge": JudgeSection(cut_spans=False)},
        "auto, hysteresis 20 %": {"hysteresis": 0.2},
    }


def replay(matrix: FeatureMatrix, params: Params, models: ModelsSection, work: Path) -> tuple[pd.DataFrame, Fleet]:
    """Replay a fleet with every rule.

    The first test waits until the longest span fits, so that all rules are tested on the same decisions.

    ``params``: ``training`` and ``backtest``; the candidates are ``training.spans``.
    Returns: the profile's predictions, with the rule as ``variant``, and what else was seen.
    """
    spans = tuple(sorted(set(params.training.spans)))
    probe = Trainer(matrix, training=params.training, models=models, k=1, seed=params.seed)
    first = matrix.span[0] + spans[-1] + timedelta(milliseconds=probe.reach_ms)
    origin = first.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    backtest = params.backtest.model_copy(update={"first_test": origin})
    params = params.model_copy(update={"backtest": backtest})
    kept = Kept(work)
    fixed: dict[str, TrainingSection] = {
        format_days(span): params.training.model_copy(update={"span": span}) for span in spans
    }
    fixed["expanding"] = params.training.model_copy(update={"span": "expanding"})
    parts: dict[str, pd.DataFrame] = {}
    seconds: dict[str, float] = {}
    k = 0
    for name, training in fixed.items():
        done, seconds[name] = kept.backtest(name, matrix, training=training, models=models, params=params)
        k = done.k
        parts[name] = _of_profile(done, models.profile, name)
        sys.stderr.write(f"  {name}: {seconds[name]:.0f} s\n")
    schedule = plan_schedule(matrix, probe.rows, training=params.training, backtest=backtest, reach_ms=probe.reach_ms)
    chosen: dict[str, dict[str, int]] = {}
    switched: dict[str, int] = {}
    for name, change in rules(models.parallel.members).items():
        training = params.training.model_copy(update={"span": "auto", **change})
        trainer = Trainer(matrix, training=training, models=models, k=k, seed=params.seed)
        found = kept.value(name, partial(_timed_choices, trainer, schedule.refits_ms))
        choosing, took = found["seconds"], [timedelta(milliseconds=each) for each in found["spans_ms"]]
        folds = [parts[format_days(span)] for span in took]
        parts[name] = pd.concat(
            [part[part["fold"] == fold] for fold, part in enumerate(folds)], ignore_index=True
        ).assign(variant=name)
        share = Counter(format_days(span) for span in took)
        seconds[name] = choosing + sum(seconds[span] * times / len(took) for span, times in share.items())
        chosen[name] = dict(share)
        switched[name] = sum(one != two for one, two in itertools.pairwise(took))
        sys.stderr.write(f"  {name}: {choosing:.0f} s to choose\n")
    asked = params.training.model_copy(update={"span": "auto", "refit_on": "drift"})
    done, seconds[ON_DRIFT] = kept.backtest(ON_DRIFT, matrix, training=asked, models=models, params=params)
    parts[ON_DRIFT] = _of_profile(done, models.profile, ON_DRIFT)
    sliding = done.folds[done.folds["variant"] == "sliding"]
    checks = {ON_DRIFT: ["the first fit" if found is None else found.summary for found in done.drift]}
    refits = {ON_DRIFT: (sliding["refit_fold"].nunique(), len(sliding))}
    sys.stderr.write(f"  {ON_DRIFT}: {seconds[ON_DRIFT]:.0f} s, {refits[ON_DRIFT][0]} of {len(sliding)} refits\n")
    return pd.concat(parts.values(), ignore_index=True), Fleet(k, seconds, chosen, switched, checks, refits)


def _of_profile(done: BacktestResult, profile: str, name: str) -> pd.DataFrame:
    mine = done.predictions
    mine = mine[(mine["model"] == profile) & (mine["variant"] == "sliding")]
    return mine.assign(model=profile, variant=name).reset_index(drop=True)


def _timed_choices(trainer: Trainer, refits_ms: Sequence[int]) -> dict[str, Any]:
    begin = time.process_time()
    spans = [duration_ms(span) for span in choices(trainer, refits_ms)]
    return {"seconds": time.process_time() - begin, "spans_ms": spans}


def choices(trainer: Trainer, refits_ms: Sequence[int]) -> list[timedelta]:
    """Give the span that a rule takes at each refit, the one before in use."""
    out: list[timedelta] = []
    for refit_ms in refits_ms:
        choice = trainer.choose_span(refit_ms, trainer.labels_at(refit_ms), out[-1] if out else None)
        assert choice is not None  # the first test waits for the longest
        out.append(choice.span)
    return out


def compare(pool: Pool, profile: str) -> dict[str, Assessment]:
    """Measure every rule on the pooled fleets."""
    return {
        variant: assess(pool.scored(profile, variant), pool.weights)
        for model, variant in pool.names
        if model == profile
    }


def table(found: Mapping[str, Assessment], fleets: Sequence[Fleet]) -> list[str]:
    """Write the comparison in Markdown."""
    lines = [
        "| rule | precision@K | against auto, points | verdict | average precision | against auto | verdict "
        "| top 5 % capture | CPU s | chosen | switches |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = found[REFERENCE]
    for name, each in found.items():
        cells = [name]
        for statistic, write in (("precision_at_k", percent), ("average_precision", lambda value: number(value, 4))):
            one, two = each.point[statistic], base.point[statistic]
            bounds = interval(each.replicates[statistic] - base.replicates[statistic])
            told = points if statistic == "precision_at_k" else (lambda value: f"{value:+.4f}")
            cells += [
                write(one),
                "" if name == REFERENCE else f"{told(one - two)} {between(told(bounds.low), told(bounds.high))}",
                "" if name == REFERENCE else verdict(bounds.low, bounds.high),
            ]
        chosen = sum((Counter(fleet.chosen.get(name, {})) for fleet in fleets), Counter[str]())
        cells += [
            percent(each.point["capture"]),
            f"{sum(fleet.seconds[name] for fleet in fleets):.0f}",
            ", ".join(f"{span} x {count}" for span, count in sorted(chosen.items(), key=lambda item: -item[1])),
            _switches(name, fleets),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _switches(name: str, fleets: Sequence[Fleet]) -> str:
    if all(name in fleet.refits for fleet in fleets):
        done, of = (sum(fleet.refits[name][i] for fleet in fleets) for i in (0, 1))
        return f"{done} of {of} refits"
    return str(sum(fleet.switched[name] for fleet in fleets)) if all(name in fleet.switched for fleet in fleets) else ""


def main() -> None:
    """Replay the fleets, pool them, print the table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102])
    parser.add_argument("--scenarios", nargs="+", default=["base", "drift"])
    parser.add_argument("--gpus", type=int, default=800)
    parser.add_argument("--days", type=int, default=180)
    parser.add_argument("--acceleration", type=float, default=5.0)
    parser.add_argument("--spans", nargs="+", help="candidates; default training.spans")
    parser.add_argument("--members", nargs="+", help="default models.parallel.members")
    parser.add_argument("--params", type=Path, nargs="+", default=[ROOT / "params.yaml"])
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work" / "spans")
    parser.add_argument("--quick", action="store_true", help="one small fleet of drift")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.scenarios, args.gpus, args.days = args.seeds[:1], ["drift"], 128, 120
        args.acceleration = 15.0
    params = load_params(args.params)
    if args.spans:
        training = TrainingSection.model_validate({**params.training.model_dump(mode="json"), "spans": args.spans})
        params = params.model_copy(update={"training": training})
    args.members = args.members or list(params.models.parallel.members)
    models = only(args.members, params)
    held = DevelopmentFleets(args.work, args.gpus, args.days, args.acceleration, params, models, Path(__file__))

    def seen(matrix: FeatureMatrix, work: Path) -> tuple[pd.DataFrame, int, dict[str, Any]]:
        predictions, fleet = replay(matrix, params, models, work)
        return predictions, fleet.k, asdict(fleet)

    for scenario in args.scenarios:
        parts = [held.of(scenario, seed, seen) for seed in args.seeds]
        fleets = [Fleet(**part.facts["fleet"]) for part in parts]
        found = compare(Pool(parts, 300), models.profile)
        sys.stdout.write(
            f"\n{scenario}, seeds {', '.join(map(str, args.seeds))}, {args.gpus} GPUs, {args.days} days, "
            f"acceleration {args.acceleration:g}, {models.profile} of {', '.join(args.members)}, "
            f"{int(found[REFERENCE].scored.known.sum())} labelled rows, "
            f"{len(found[REFERENCE].incidents)} incidents\n\n"
        )
        sys.stdout.write("\n".join(table(found, fleets)) + "\n")
        for seed, fleet in zip(args.seeds, fleets, strict=True):
            counted = Counter(fleet.checks[ON_DRIFT]).most_common()
            sys.stdout.write(f"\nchecks of seed {seed}: " + "; ".join(f"{count} x {what}" for what, count in counted))
        sys.stdout.write("\n\n")
        auto = found[REFERENCE].point["average_precision"]
        fixed = {
            name: found[name].point["average_precision"] for name in found if not name.startswith(("auto", "expanding"))
        }
        best = max(fixed, key=lambda name: fixed[name])
        told = {
            "name": f"spans_{scenario}", "value": round(auto, 5), "unit": "average precision", "peer": best,
            "ratio": round(auto / fixed[best], 3) if fixed[best] else None, "limit_share": None, "checked": True,
        }  # fmt: skip
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
