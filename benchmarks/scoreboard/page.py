"""The page of results in Markdown; every number and every word of judgement comes from the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.scoreboard.claims import (
    Gain,
    bracket,
    calibration_rows,
    profile_gains,
    relative,
)
from benchmarks.scoreboard.plan import PAPER_TITLE, PROMISED, Plan
from benchmarks.scoreboard.pooled import Measured
from benchmarks.scoreboard.promised import promise_lines
from evaluation.metrics.comparison import SLIDING, TRAIN_ONCE
from models.config import PrecisionTargetsSection
from pipeline.report.wording import NONE, between, count, hours, join, number, percent, points, verdict

DEVELOPMENT = 100
"""Seeds from here on are for development; parameters may have been chosen on them."""

GAINED = ("base", "drift")
"""Scenarios on which gains are asked for."""

NULL_CHECKS = (
    "These fleets hold signs of failures by construction. Whether predrain finds something where there is nothing "
    "(labels shuffled among GPUs, failures independent of everything observed) is checked apart, by "
    "`python benchmarks/null_check.py`: [what it said](explanations.md#does-the-chain-find-what-is-not-there). "
    "[A real cluster's faults](real-cluster.md) are predicted above chance, weakly.",
)
"""Where it says what the models do with labels that mean nothing."""

NOTHING_TO_GO_BY = (
    "`history_count` and `vendor_rules` have nothing to go by here: the paper's features hold neither past faults nor "
    "error counters, so these rows are of units in the order of ties."
)

_KINDS = {"ensemble": 0, "learner": 1, "baseline": 2, "oracle": 3}
_VARIANTS = {SLIDING: "sliding", TRAIN_ONCE: "trained once"}


def opening(plan: Plan, command: str, parts: int, fresh: int, revision: str) -> list[str]:
    """Say first what the fleets are and whether all are there, then how the page was made."""
    size = plan.usual
    others: dict[int, dict[str, None]] = {}
    for part in plan.parts:
        if part.size.gpus != size.gpus:
            others.setdefault(part.size.gpus, {})[f"`{part.scenario}`"] = None
    other_sizes = "; ".join(f"{count(gpus)} on {join(list(names))}" for gpus, names in others.items())
    alone = [part.scenario for part in plan.parts if part.profile == PROMISED]
    promised = "".join(
        f" {count(alone.count(name))} of the fleets of `{name}` were replayed with the profile alone, for its promises."
        for name in dict.fromkeys(alone)
    )
    warning = (
        ["> **The quick table.** Small fleets and few seeds: it shows that the machinery works and proves nothing.", ""]
        if plan.quick
        else []
    )
    if parts < len(plan.parts):
        warning += [
            f"> **Not all of it yet**: {parts} of {len(plan.parts)} parts, a part being one fleet replayed with one "
            "profile. The others are named at the end; running the command again adds them.",
            "",
        ]
    extent = f"{count(size.gpus)} GPUs{f' ({other_sizes})' if others else ''} over {size.days} days"
    fleets = (
        f"**Every fleet here is simulated, and its failures are accelerated**: {extent} with all failure rates "
        f"multiplied by {size.acceleration:g}, so that there is something to count. Real fleets fail more rarely, and "
        "every precision on accelerated ones would be lower there."
        if size.acceleration != 1
        else f"**Every fleet here is simulated**: {extent} at failure rates as calibrated, which leave few to count."
    )
    development = min(part.seed for part in plan.parts) >= DEVELOPMENT
    seeds = (
        f"The seeds are those of development (from {DEVELOPMENT} on): nothing here may be quoted."
        if development
        else "No parameter was chosen on these seeds."
    )
    return [
        "# Results" if size.acceleration != 1 else "# Results at the fleets' own failure rates",
        "",
        *warning,
        f"{fleets} {seeds}{promised}",
        "",
        f"Made by `{command}` at revision {revision[:12]}; nothing is typed by hand. The last call ran "
        f"{fresh} of {parts} parts and took the others from earlier ones with the same code and parameters.",
        "",
        f"Brackets are 95 % intervals from {plan.replicates} resamples of GPUs within their fleets. Where a model had "
        "no hit at all, resampling cannot vary it; the bound is then Clopper and Pearson's with each GPU counted once "
        "(its effective number where GPUs differ in alerts). The best single model is always chosen after the fact, "
        "on the decisions that it is compared on, which favours it. Each statement is worded by its interval: "
        "*shown* or *better* only where the interval of the difference leaves out zero.",
        "",
        "`intersection` and cascades may alert fewer than K. What stands under *precision@K*, average "
        "precision and capture is of their whole order: the rows with most votes first, then by mean rank "
        "(survivors of a cascade first); "
        "*of its own alerts* is the precision of that, and incidents caught are those that it covers.",
        "",
    ]


def gained(by_scenario: Mapping[str, Measured]) -> dict[str, Measured]:
    """Give the pools that gains are asked for on."""
    return {name: by_scenario[name] for name in GAINED if name in by_scenario}


def claims(
    by_scenario: Mapping[str, Measured],
    against_paper: Sequence[Gain],
    promises: pd.DataFrame,
    section: PrecisionTargetsSection,
) -> list[str]:
    """Give the claims: gains, calibration, promises."""
    asked = gained(by_scenario)
    gains = profile_gains(asked) + list(against_paper)
    lines = ["## What may be claimed", "", "### The recommended profile at equal numbers of alerts", ""]
    if gains:
        lines += [
            "| on | against | alerts | its precision | theirs | the oracle's | gain | asked | verdict |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for claim in gains:
            cells = [
                claim.where, claim.other, count(claim.alerts), percent(claim.mine), percent(claim.theirs),
                percent(claim.oracle), f"{relative(claim.gain)} {bracket(claim.low, claim.high)}",
                "" if claim.needed is None else relative(claim.needed), claim.verdict,
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", *[f"- {claim.sentence}" for claim in gains], ""]
    if not against_paper:
        lines += ["The paper's profile was not run, so nothing is said of it.", ""]
    lines += ["### Are the risks right out of time", ""]
    lines += [
        "| scenario | mean risk over base rate | Brier skill | calibration error | holds |",
        "|---|---|---|---|---|",
    ]
    for row in calibration_rows(by_scenario).itertuples():
        lines.append(
            f"| `{row.scenario}` | {number(row.risk_ratio)} | {number(row.brier_skill, 4)} | "
            f"{percent(row.calibration_error)} | {'yes' if row.holds else 'no'} |"
        )
    lines += ["", "Asked: a ratio from 0.7 to 1.4 and a Brier skill above zero, but on `noprecursor`.", ""]
    lines += ["### Promises", "", *promise_lines(promises, section), ""]
    lines += ["### Where there is nothing to find", "", *NULL_CHECKS, ""]
    return lines


def scenario(name: str, measured: Measured, incidents: int) -> list[str]:
    """Write one scenario: the table of models, training, ensembles."""
    base = measured.table.iloc[0]
    budgets = join([str(budget) for budget in dict.fromkeys(measured.k)])
    return [
        f"## `{name}`",
        "",
        f"{measured.fleets} fleet{'s' if measured.fleets > 1 else ''}, {count(measured.units)} GPUs, "
        f"{count(measured.times)} decision times, {count(incidents)} incidents that an alert could have caught, base "
        f"rate {percent(base['base_rate'])}, K = {budgets} alerts a decision time.",
        "",
        *([NOTHING_TO_GO_BY, ""] if name.endswith(PAPER_TITLE) else []),
        *model_table(measured),
        "",
        "### Sliding against trained once",
        "",
        *paired_table(measured, "sliding"),
        "",
        "### Sliding ensembles beside their best member, at as many alerts",
        "",
        *equal_table(measured),
        "",
    ]


def model_table(measured: Measured) -> list[str]:
    """Every model, sliding and trained once, ensembles first, with intervals and the oracle's share."""
    lines = [
        "| model | training | precision@K | of its own alerts | incidents caught | average precision | top 5 % capture "
        "| median lead time (quartiles) | share of the oracle's precision@K | of its average precision | of its "
        "capture | mean risk over base rate | Brier skill |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for _, row in _ordered(measured.table).iterrows():
        lead = hours(row["lead_time_median_hours"])
        if lead != NONE:
            low, high = (number(row[f"lead_time_median_{side}"], 1) for side in ("low", "high"))
            lead += f" {between(low, high)}"
            lead += f" ({number(row['lead_time_q25_hours'], 1)} to {number(row['lead_time_q75_hours'], 1)})"
        cells = [
            f"**{row['model']}**" if (row["model"], row["variant"]) == (measured.profile, SLIDING) else row["model"],
            _VARIANTS.get(row["variant"], ""),
            _share(row, "precision_at_k"),
            "the same" if row["precision"] == row["precision_at_k"] else _share(row, "precision"),
            _share(row, "recall"),
            f"{number(row['average_precision'], 4)} "
            f"{between(number(row['average_precision_low'], 4), number(row['average_precision_high'], 4))}",
            _share(row, "capture"),
            lead,
            _share(row, "oracle_share_precision_at_k"),
            _share(row, "oracle_share_average_precision"),
            _share(row, "oracle_share_capture"),
            number(row["risk_ratio"]),
            number(row["brier_skill"], 4),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def paired_table(measured: Measured, comparison: str) -> list[str]:
    """Differences in precision at K and average precision on the same resamples."""
    frame = measured.paired[measured.paired["comparison"] == comparison]
    lines = ["| model | precision@K, points | verdict | average precision | verdict |", "|---|---|---|---|---|"]
    for model, mine in frame.groupby("model", sort=False):
        one = mine[mine["statistic"] == "precision_at_k"].iloc[0]
        two = mine[mine["statistic"] == "average_precision"].iloc[0]
        lines.append(
            f"| {model} | {points(one['difference'])} {between(points(one['low']), points(one['high']))} | "
            f"{verdict(one['low'], one['high'])} | {two['difference']:+.4f} "
            f"{between(number(two['low'], 4), number(two['high'], 4))} | {verdict(two['low'], two['high'])} |"
        )
    return lines


def equal_table(measured: Measured) -> list[str]:
    """Each ensemble beside its members and the other learners, at as many alerts."""
    lines = [
        "| ensemble | alerts | its precision | against | member | at as many alerts | difference, points | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in measured.equal.itertuples():
        membership = "best member" if row.best else "yes" if row.member else "no"
        lines.append(
            f"| {row.model} | {count(row.alerts)} | {percent(row.precision)} | {row.other_model} | {membership} | "
            f"{percent(row.other_precision)} | {points(row.difference)} {between(points(row.low), points(row.high))} | "
            f"{verdict(row.low, row.high)} |"
        )
    return lines


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    key = table.assign(kind=table["kind"].map(_KINDS), once=table["variant"] == TRAIN_ONCE)
    return table.loc[key.sort_values(["kind", "model", "once"], kind="stable").index]


def _share(row: pd.Series, name: str) -> str:
    return f"{percent(row[name])} {_bounds(row[f'{name}_low'], row[f'{name}_high'])}".strip()


def _bounds(low: float, high: float) -> str:
    return between(percent(low), percent(high))
