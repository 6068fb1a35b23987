"""The results page in Markdown; every number and every verdict is computed from the counts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.scoreboard.fleets import ALONE, DEVELOPMENT, LEFT_OUT, ONCE, PAPER, PROFILE, YOUNG, YOUNG_ALONE
from benchmarks.scoreboard.measure import Measured, added, share
from evaluation.metrics.comparison import difference_interval, most_precise
from evaluation.metrics.metrics import Floats, Interval, interval, share_interval
from evaluation.metrics.oracle import ORACLE
from pipeline.report.wording import NONE, count, interval_text, number, percent, points, signed

HALF = 0.5
"""Share of the oracle's metrics that the profile is claimed to reach."""

CALIBRATED = (0.7, 1.4)
"""Range of mean risk over base rate that counts as calibrated."""

CHANCE = (0.45, 0.55)
"""Range of the ROC-AUC that counts as chance."""

NO_SIGN, BY_CLASS = "`noprecursor`", ("`base`", "`announced`")
"""Fleets without precursors, and those whose failure classes are reported separately."""

READ = (
    "A row is a node at a decision time, with the risk of its riskiest GPU. *Precision* is that of the K riskiest "
    "nodes at each decision, so all models have the same number of alerts. *Average precision* is that of the ranking "
    "at each decision, averaged over fleets. *Incidents* are node incidents: failures of several GPUs of a node within "
    "half an hour count once, as do failures with a common cause. A *drain* is an episode: the first alert of a node "
    "and later ones within the drain horizon. It is right if an incident follows in that time. The best member is "
    "chosen on these results, which favors it. The paper's ensembles are compared by their complete ranking."
)
PROMISED = "Drains reach the promised precision"
REAL = (
    "Real fleets, by lifetimes and past faults alone: [GPUs of Titan](titan.md), [a cluster's faults]"
    "(cluster-faults.md). The null check, on labels without signal: "
    "[explanations](../../docs/explanations.md#checks-on-data-without-signal)."
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of the table.

    ``own``, ``other``: value of the profile, and the value that it is compared with.
    ``figure``: difference or ratio with its interval, ``bounds``.
    ``least``, ``most``: range of the figure that is claimed.
    """

    what: str
    on: str
    own: str
    other: str
    figure: str
    bounds: Interval
    least: float = 0.0
    most: float = math.inf

    @property
    def verdict(self) -> str:
        """``significant`` if the whole interval lies within the claim, ``refuted`` if all of it lies outside."""
        low, high = self.bounds.low, self.bounds.high
        if self.least < low and high < self.most:
            return "significant"
        return "refuted" if high < self.least or low > self.most else "not significant"  # NaN is neither

    @property
    def row(self) -> str:
        """The row in Markdown."""
        cells = (self.what, self.on, self.own, self.other, self.figure, self.verdict)
        return f"| {' | '.join(cells)} |"


def more_precise(what: str, on: str, mine: Floats, theirs: Floats) -> Claim:
    """Claim that one precision is above another, both on the same resamples."""
    bounds = difference_interval(mine, theirs)
    figure = f"{points(mine[0] - theirs[0])} points {interval_text(points(bounds.low), points(bounds.high))}".strip()
    return Claim(what, on, percent(mine[0]), percent(theirs[0]), figure, bounds)


def better_ranked(what: str, on: str, mine: Floats, theirs: Floats) -> Claim:
    """Claim that one average precision is above another."""
    bounds = difference_interval(mine, theirs)
    figure = f"{signed(mine[0] - theirs[0], 4)} {interval_text(signed(bounds.low, 4), signed(bounds.high, 4))}".strip()
    return Claim(what, on, number(mine[0], 4), number(theirs[0], 4), figure, bounds)


def half_of(what: str, on: str, own: str, other: str, mine: Floats, best: Floats) -> Claim:
    """Claim that a figure is at least half of the oracle's."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = mine / best
    bounds = interval(shares[1:]) if mine[0] > 0 else Interval(math.nan, math.nan)  # no hit: nothing was resampled
    return Claim(what, on, own, other, _share(shares[0], bounds), bounds, least=HALF)


def _twice(on: str, mine: Floats, theirs: Floats) -> Claim:
    """Claim that a young fleet is twice as precise with the prior."""
    with np.errstate(divide="ignore", invalid="ignore"):
        times = mine / theirs
    bounds = interval(times[1:])
    what = "In weeks 3 to 6 twice as precise with the prior as by own data alone"
    return Claim(
        what, on, percent(mine[0]), percent(theirs[0]), f"{number(times[0])} {_numbers(bounds)}", bounds, least=2
    )


def claims_of(fleets: Sequence[Measured], on: str) -> list[Claim]:
    """Return the claims about a group of fleets, in the order of the page."""
    sums = {model: added(fleets, model) for model in fleets[0].models if all(model in one.models for one in fleets)}
    precision = {model: share(own, "hits", "alerts") for model, own in sums.items()}
    own, risks = sums[PROFILE], share(sums[PROFILE], "risk", "positives")
    calibration = Claim(
        "Risks of GPUs are right out of time: their mean is 0.7 to 1.4 times the base rate", on,
        percent(share(own, "risk", "known")[0]), percent(share(own, "positives", "known")[0]),
        f"{number(risks[0])} {_numbers(interval(risks[1:]))}", interval(risks[1:]), *CALIBRATED,
    )  # fmt: skip
    if on.startswith(NO_SIGN):
        area = share(own, "auc", "fleets")
        return [
            calibration,
            Claim(
                "No skill on data without signal: the area under the ROC curve is 0.45 to 0.55", on,
                number(area[0], 3), "0.5 of chance", f"{number(area[0], 3)} {_numbers(interval(area[1:]), 3)}",
                interval(area[1:]), *CHANCE,
            ),
        ]  # fmt: skip
    mine, best = precision[PROFILE], precision[ORACLE]
    ranked = {model: share(sums[model], "ap", "fleets") for model in (PROFILE, ALONE, ONCE, ORACLE)}
    member = most_precise({name: float(precision[name][0]) for name in fleets[0].members})
    episodes = share(own, "right", "drains")
    return [
        half_of("At least half of the oracle's precision", on, percent(mine[0]), percent(best[0]), mine, best),
        half_of(
            "At least half of the oracle's average precision", on,
            number(ranked[PROFILE][0], 4), number(ranked[ORACLE][0], 4), ranked[PROFILE], ranked[ORACLE],
        ),
        more_precise("More precise than counting past failures", on, mine, precision["history_count"]),
        more_precise("More precise than the vendor's thresholds", on, mine, precision["vendor_rules"]),
        more_precise("More precise than its best member", f"{on}: {member}", mine, precision[str(member)]),
        more_precise("More precise with the prior than by own data alone", on, mine, precision[ALONE]),
        better_ranked("Higher average precision with the prior", on, ranked[PROFILE], ranked[ALONE]),
        *([_twice(on, precision[YOUNG], precision[YOUNG_ALONE])] if YOUNG in sums else []),
        more_precise("More precise by sliding training than trained once", on, mine, precision[ONCE]),
        better_ranked("Higher average precision by sliding training", on, ranked[PROFILE], ranked[ONCE]),
        more_precise("Precision by drain episodes is above that by rows", on, episodes, mine),
        calibration,
    ]  # fmt: skip


def against_paper(fleets: Sequence[Measured], on: str) -> list[Claim]:
    """Compare the profile with the paper's ensembles on the fleets that both were replayed on."""
    mine = share(added(fleets, PROFILE), "hits", "alerts")
    theirs = {name: share(added(fleets, name), "hits", "alerts") for name in fleets[0].models if name.startswith(PAPER)}
    return [
        more_precise(f"More precise than the paper's {name.removeprefix(PAPER).strip()}", on, mine, precision)
        for name, precision in theirs.items()
    ]


def promises_of(fleets: Sequence[Measured]) -> list[Claim]:
    """Claim for each promised precision that its drains reached it, over all fleets."""
    names = {name for one in fleets for name in one.models[PROFILE] if name.startswith("drains@")}
    claims = []
    for name in sorted(names):
        target = float(name.partition("@")[2])
        made = [one for one in fleets if one.models[PROFILE].get(name, np.zeros(1))[0]]
        if not made:
            continue
        sums = [added([one], PROFILE) for one in made]
        promises_met = sum(share(own, f"right@{target:g}", name)[0] >= target for own in sums)
        together = added(made, PROFILE)
        right, drains = share(together, f"right@{target:g}", name), int(together[name][0])
        bounds = share_interval(right[1:], point=float(right[0]), counts=np.ones(drains))
        own = f"{percent(right[0])} of {count(drains)} drains, kept on {promises_met} of {len(made)} fleets"
        figure = _share(right[0], bounds)
        claims.append(Claim(PROMISED, _fleets(made), own, f"{percent(target)} promised", figure, bounds, least=target))
    return claims or [Claim(PROMISED, "all", "no promise brought a drain", NONE, NONE, Interval(math.nan, math.nan))]


def make_page(fleets: Sequence[Measured], command: str, revision: str, replicates: int) -> str:
    """Write the page of measured fleets."""
    groups: dict[str, list[Measured]] = {}
    for one in fleets:
        groups.setdefault(one.fleet.group, []).append(one)
    alike: dict[str, list[Claim]] = {}
    for of in groups.values():
        for claim in claims_of(of, _fleets(of)):
            alike.setdefault(claim.what, []).append(claim)
    claims = [claim for same in alike.values() for claim in same]
    with_paper = [one for one in fleets if one.fleet.paper]
    if with_paper:
        claims += against_paper(with_paper, _fleets(with_paper))
    claims += promises_of(fleets)
    lines = [*_opening(fleets, command, revision, replicates), *_facts(groups), "", "## Claims", ""]
    lines += ["| claim | on | profile | compared with | figure | verdict |", "|---|---|---|---|---|---|"]
    lines += [claim.row for claim in claims]
    return "\n".join([*lines, "", *_classes(groups), REAL, ""])


def _opening(fleets: Sequence[Measured], command: str, revision: str, replicates: int) -> list[str]:
    fleet = fleets[0].fleet
    seeds = (
        f"Seeds are those of development (from {DEVELOPMENT} on): do not quote these figures."
        if fleet.seed >= DEVELOPMENT
        else "No parameter was chosen on these seeds."
    )
    return [
        "# Results",
        "",
        f"**Every fleet here is simulated**, over {fleet.days} days, with failure rates multiplied by "
        f"{fleet.acceleration:g} for enough incidents, except *un-accelerated* fleets. The precision on a real fleet "
        f"would be lower. {seeds} Made by `{command}` at revision {revision[:12]}; all figures are generated.",
        "",
        "The profile pools its models with a prior ([0029](../../docs/decisions/0029-priors.md)): a model of simulated "
        f"fleets with random parameters, without fleets in which {percent(LEFT_OUT[0])} to {percent(LEFT_OUT[1])} of "
        "failures have no precursor, as in `base` and `drift`. The simulator is the same, which favors the profile.",
        "",
        READ,
        f"Brackets are 95 % bootstrap intervals from {replicates} samples of the nodes of each fleet. A claim is "
        "*significant* if the whole interval supports it, *refuted* if the whole interval contradicts it.",
        "",
    ]


def _facts(groups: Mapping[str, Sequence[Measured]]) -> list[str]:
    lines = ["| fleets | seeds | nodes | GPUs | incidents | base rate of a GPU | K |", "|---|---|---|---|---|---|---|"]
    for name, fleets in groups.items():
        sums = added(fleets, PROFILE)
        incidents = sum(int(values[0]) for key, values in sums.items() if key.startswith("incidents:"))
        seeds = sorted(one.fleet.seed for one in fleets)
        budgets = sorted({one.k for one in fleets})
        lines.append(
            f"| {name} | {_span(seeds)} | {count(sum(one.nodes for one in fleets))} | "
            f"{count(sum(one.units for one in fleets))} | {count(incidents)} | "
            f"{percent(share(sums, 'positives', 'known')[0])} | {_span(budgets)} |"
        )
    return lines


def _classes(groups: Mapping[str, Sequence[Measured]]) -> list[str]:
    """Recall of each failure class, of the profile and of the oracle at the same number of alerts."""
    names = [name for name in BY_CLASS if name in groups]
    sums = {name: {model: added(groups[name], model) for model in (PROFILE, ORACLE)} for name in names}
    found = (key for of in sums.values() for key in of[PROFILE])
    kinds = sorted({key.partition(":")[2] for key in found if key.startswith("incidents:")})
    if not kinds:
        return []
    head = [f"{name}: {what}" for name in names for what in ("incidents", "profile", "oracle")]
    lines = [
        "## Incidents caught, by failure class",
        "",
        f"| class | {' | '.join(head)} |",
        "|---" * (1 + len(head)) + "|",
    ]
    for kind in kinds:
        cells = [kind]
        for name in names:
            total = int(sums[name][PROFILE].get(f"incidents:{kind}", np.zeros(1))[0])
            cells.append(count(total))
            for model in (PROFILE, ORACLE):
                if not total:
                    cells.append(NONE)
                    continue
                recall = share(sums[name][model], f"caught:{kind}", f"incidents:{kind}")
                bounds = share_interval(recall[1:], point=float(recall[0]), counts=np.ones(total))
                cells.append(_share(recall[0], bounds))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _fleets(fleets: Sequence[Measured]) -> str:
    names = [one.fleet.group for one in fleets]
    return ", ".join(f"{name} ({names.count(name)})" for name in dict.fromkeys(names))


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _share(value: float, bounds: Interval) -> str:
    return f"{percent(value)} {interval_text(percent(bounds.low), percent(bounds.high))}".strip()


def _numbers(bounds: Interval, digits: int = 2) -> str:
    return interval_text(number(bounds.low, digits), number(bounds.high, digits))
