"""Replay of the ladder of actions: what each rung would have saved, and which combination of rungs pays.

Rungs are chosen on some nodes and evaluated on the others (cross-fitting), so that the reported net is out of sample.
The split is by node, not by time, because nodes are independent while failure rates vary over time.

Families of rungs are tested in a fixed order, cheapest first, each only if the previous one pays: a fixed sequence
needs no correction for multiple testing. The noise of expensive rungs cannot mask a cheap one that pays. Rungs with
rare large losses, which a few nodes may not reveal, come last.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from itertools import compress, product
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from evaluation.value.controller_replay import Controlled, ReportCache
from evaluation.value.gpu_hours import Extras, ReplayOutcome, count_outcome, mean_prices, net_interval, net_of, net_row
from evaluation.value.load import Placements, ReplayedFleet
from evaluation.value.marks import NO_ACTION, ReplayMarks
from evaluation.value.probing import (
    NO_CHECKPOINTS,
    NO_PROBES,
    Checkpoints,
    ProbeReplay,
    Probes,
    after_passes,
    findable,
    node_risks,
    replay_checkpoints,
    replay_probes,
)
from evaluation.value.readings import Readings
from policy.budget import BudgetConfig, DisruptionBudget
from policy.config import PolicyConfig
from policy.episodes import Bools, Floats
from policy.fleet import Level
from policy.ladder.cost_benefit import CostBenefitConfig, Price
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import RUNGS, Rung
from policy.tiers import TierThresholds

Ladder = tuple[Rung, ...]

FOUND_SHARES: Final = (0.25, 0.5, 1.0)
"""Shares of failures found, for all families, for which results of probes are reported."""

MIN_LIFTS: Final = (1.0, 2.0, 5.0)
"""Minimum risks of probed nodes, as multiples of the fleet's mean, to report results of probes for."""

CONFIDENCE: Final = 0.9
"""One-sided confidence of the bound used to choose rungs; equal to that of rollout stages."""

FOLDS: Final = 5
"""Number of folds of the cross-fitting over nodes."""

FAMILIES: Final[tuple[Ladder, ...]] = (RUNGS[:3], RUNGS[:4], RUNGS)
"""Families of rungs in test order: no effect on running jobs; checkpoint requests as well; evictions as well."""

_NO_PROBE: Final = timedelta(days=36_500)

AVOID_LIFT: Final = 3.0
"""Multiple of the mean node risk from which new jobs avoid a node, unless a drain pays at a lower risk."""

_EXCLUSIVE: Final[tuple[Rung, ...]] = ("avoid", "swap", "drain")


def thresholds_of(price: Price, mean_risk: float) -> dict[str, float | None]:
    """Return the thresholds for a rung from its price and the mean node risk, never from outcomes."""
    break_even = price.break_even
    high = None if break_even is None else min(max(break_even, 1e-6), 1.0)
    elevated = min(max(AVOID_LIFT * mean_risk, 1e-6), high or 1.0)
    return {"watch": elevated / 2, "elevated": elevated, "high": high}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions about what the data do not contain; by default those of ``predrain assess``.

    ``costs``: with checkpoints every hour, not every two as in the controller's default. Frequent checkpoints make the
    estimate cautious, because a failure then costs little work; OUT/act.yaml passes the interval on to the controller.
    ``gpus_per_job``: generate jobs of this size; None: the dataset's jobs, or if it has none, jobs as in a real trace.
    ``largest_job``: generate jobs as in a real trace, up to this size.
    ``checkpoint_on_request``: whether jobs write a checkpoint on request before they are moved.
    ``spare_nodes``: maximum number of nodes out of service at a time, including repairs; None: a tenth.
    """

    costs: CostBenefitConfig = field(default_factory=lambda: CostBenefitConfig(checkpoint_every=timedelta(hours=1)))
    probes: ProbeConfig = field(default_factory=ProbeConfig)
    gpus_per_job: int | None = None
    checkpoint_on_request: bool = True
    spare_nodes: int | None = None
    largest_job: int | None = None

    @property
    def budget(self) -> BudgetConfig:
        """Default budgets of the controller, limited to the spare nodes."""
        default = BudgetConfig()
        if self.spare_nodes is None:
            return default
        spare = DisruptionBudget("fleet", max_unavailable=self.spare_nodes)
        others = tuple(budget for budget in default.disruption_budgets if budget.scope != "fleet")
        return replace(default, disruption_budgets=(spare, *others))


@dataclass
class LadderReplay:
    """Replays rungs under given loads; arguments as for :class:`Controlled`.

    ``horizon``: prediction horizon of a risk.
    ``risks``: risk of each node at each decision; ``mean_risk``: their mean.
    ``prices``: price of each rung on the average node.
    ``findable``: failures that a diagnostic finds.
    ``no_action``: outcome without any action.
    """

    fleet: ReplayedFleet
    loads: Sequence[Placements]
    scores: Readings
    events: Sequence[Mapping[str, Any]]
    assumed: Assumptions
    horizon: timedelta
    reach: timedelta
    seed: int
    replicates: int
    reports: ReportCache = field(default_factory=dict)

    risks: Floats = field(init=False)
    prices: Mapping[Rung, Price] = field(init=False)
    mean_risk: float = field(init=False)
    findable: Bools = field(init=False)
    no_action: ReplayOutcome = field(init=False)

    def __post_init__(self) -> None:
        self.costs, self.probes = self.assumed.costs, self.assumed.probes
        self._replayed: dict[tuple[Rung | None, bool], tuple[ReplayMarks, list[Probes]]] = {}
        self._unprobed, self._checkpoints = [NO_PROBES] * len(self.loads), dict[int, list[Checkpoints]]()
        self._passed: dict[float, Floats] = {}  # risks of nodes after a passed probe, by its sensitivity
        self.risks = node_risks(self.fleet, self.scores)
        known = self.risks[~np.isnan(self.risks)]
        self.mean_risk = float(known.mean()) if len(known) else 0.0
        self.prices = mean_prices(self.fleet, self.loads, self.reach, self.costs, self.probes)
        self.findable = findable(self.fleet, self.probes.found, self.seed)
        self.no_action = count_outcome(self.fleet, self.loads, NO_ACTION, self.costs, reach=self.reach)

    def thresholds(self, rung: Rung) -> dict[str, float | None]:
        """Return the thresholds for the replay of a rung; with ``avoid``, the ``high`` of ``drain`` has no effect."""
        return thresholds_of(self.prices["drain" if rung == "avoid" else rung], self.mean_risk)

    def marks(self, rung: Rung, probing: ProbeReplay | None) -> ReplayMarks:
        """Replay the controller with ``avoid``, ``swap`` or ``drain`` as the highest rung."""
        rungs: Ladder = RUNGS[: RUNGS.index(rung) + 1]
        settings = PolicyConfig(
            TierThresholds(**self.thresholds(rung)), horizon=self.horizon, cost_benefit=self.costs, rungs=rungs,
            budget=self.assumed.budget, probes=self.probes,
        )  # fmt: skip
        policy = self.fleet.stage(settings, "soft" if rung == "avoid" else "hard")
        min_level = Level.AVOID if rung == "avoid" else Level.SWAP
        return Controlled(
            self.fleet, self.scores, self.events, self.loads[0], policy, self.reach, "stated", min_level, self.findable,
            probing, self.reports,
        ).marks()  # fmt: skip

    def replayed(self, top: Rung | None, *, probed: bool) -> tuple[ReplayMarks, list[Probes]]:
        """Return the marks with ``top`` as the highest rung, and the probes of each load.

        Marks and probes interact: a node out of service is not probed, and a passed probe lowers the risk. They are
        replayed together under the first load, and its marks are used for every load.
        """
        if (top, probed) not in self._replayed:
            replays = (self.probe_replay(jobs, self.probes, self.findable) for jobs in self.loads if probed)
            first_replay = next(replays, None)
            marks = NO_ACTION if top is None else self.marks(top, first_replay)
            if top == "avoid":  # its nodes stay in service, so they are probed as without marks
                probes = self.replayed(None, probed=probed)[1]
            else:
                probes = [replay_probes(replay, marks) for replay in (first_replay, *replays) if replay is not None]
            self._replayed[top, probed] = marks, probes or self._unprobed
        return self._replayed[top, probed]

    def extras(self, ladder: Collection[Rung], probes: list[Probes]) -> list[Extras]:
        """Return probes and checkpoints of each load, as far as they are in ``ladder``."""
        checkpoints = self.checkpoints(probes) if "checkpoint" in ladder else [NO_CHECKPOINTS] * len(probes)
        return [Extras(*cheap, self.probes) for cheap in zip(probes, checkpoints, strict=True)]

    def checkpoints(self, probes: list[Probes]) -> list[Checkpoints]:
        """Return the checkpoints of each load, cached by the identity of ``probes`` from :meth:`replayed`."""
        if id(probes) not in self._checkpoints:
            policy, times, passed = self.settings(self.probes), self.scores.at, self.risks_after(self.probes.mean_found)
            risks_by_load = [after_passes(times, self.risks, passed, probed, self.probes) for probed in probes]
            self._checkpoints[id(probes)] = [
                replay_checkpoints(self.fleet, jobs, times, risks, policy)
                for jobs, risks in zip(self.loads, risks_by_load, strict=True)
            ]
        return self._checkpoints[id(probes)]

    def risks_after(self, sensitivity: float) -> Floats:
        """Return the risks of nodes after a passed diagnostic with sensitivity ``sensitivity``."""
        if sensitivity not in self._passed:
            self._passed[sensitivity] = node_risks(self.fleet, self.scores, sensitivity)
        return self._passed[sensitivity]

    def settings(self, probes: ProbeConfig) -> PolicyConfig:
        """Return the controller's settings for probes and checkpoints."""
        return PolicyConfig(rungs=RUNGS, horizon=self.horizon, cost_benefit=self.costs, probes=probes)

    def probe_replay(self, jobs: Placements, config: ProbeConfig, found: Bools, *, guided: bool = True) -> ProbeReplay:
        """Return the replay of probes under one load; if not ``guided``, all nodes have the same risk."""
        risks = self.risks if guided else np.ones_like(self.risks)
        passed = self.risks_after(config.mean_found) if guided else risks
        policy = self.settings(config)
        return ProbeReplay(self.fleet, jobs, self.scores.at, risks, passed, found, self.reach, policy)

    def outcome(self, ladder: Collection[Rung]) -> ReplayOutcome:
        """Compute the outcome of a combination of rungs."""
        top = next((rung for rung in reversed(_EXCLUSIVE) if rung in ladder), None)
        marks, probes = self.replayed(top, probed="probe" in ladder)
        extras = self.extras(ladder, probes) if {"probe", "checkpoint"} & set(ladder) else None
        soft = top == "avoid"
        return count_outcome(self.fleet, self.loads, marks, self.costs, reach=self.reach, soft=soft, extras=extras)

    def rows(self, allowed: Collection[Rung]) -> dict[str, Any]:
        """Replay each rung, and combinations of the allowed ones.

        Returns: ``ladder``: one row per rung; ``recommended``: the combination that pays, always with ``publish``;
        ``recommended_net``: its out-of-sample net.
        """
        single_outcomes: dict[Rung, ReplayOutcome] = {rung: self.outcome((rung,)) for rung in RUNGS[1:]}
        rows = [self._row("publish", self.no_action, single_outcomes["avoid"])]
        rows += [self._row(rung, outcome, outcome) for rung, outcome in single_outcomes.items()]
        ladders = [*_ladders([rung for rung in allowed if rung in single_outcomes and single_outcomes[rung].drains])]

        @cache
        def net(ladder: Ladder) -> Floats:
            outcome = single_outcomes[ladder[0]] if len(ladder) == 1 else self.outcome(ladder)
            return net_of(self.no_action, outcome)

        chosen, value = choose_ladder(ladders, net, replicates=self.replicates, seed=self.seed)
        return {"ladder": rows, "recommended": ["publish", *chosen], "recommended_net": value}

    def _row(self, rung: Rung, outcome: ReplayOutcome, acted: ReplayOutcome) -> dict[str, Any]:
        """Return the row of a rung; ``acted``: outcome whose actions are reported."""
        net = net_row(self.no_action, outcome, replicates=self.replicates, seed=self.seed)
        spent = float((outcome.spent + outcome.idle).sum(axis=1).mean())
        return {
            "rung": rung, "actions": acted.drains, "known": acted.known, "right": acted.right,
            "precision_low": acted.precision_low if rung in ("publish", *_EXCLUSIVE) else None,
            "break_even": self.prices[rung].break_even, "gpu_hours_saved": net["net"] + spent,
            "gpu_hours_spent": spent, **net,
        }  # fmt: skip

    def probing(self) -> list[dict[str, Any]]:
        """Replay probes alone: guided by risk at several minimum lifts, unguided, and for several sensitivities."""
        variants: list[tuple[bool, float | None, float | None]] = [(True, lift, None) for lift in MIN_LIFTS]
        variants += [
            (False, None, None),
            *((guided, None, share) for guided in (True, False) for share in FOUND_SHARES),
        ]
        return [self._probing_row(*variant) for variant in variants]

    def _probing_row(self, guided: bool, lift: float | None, share: float | None) -> dict[str, Any]:
        shares = self.probes.found if share is None else dict.fromkeys(self.probes.found, share)
        config = replace(self.probes, found=shares)
        if lift is not None:
            config = replace(config, min_lift=lift, base_every=_NO_PROBE)
        found = self.findable if share is None else findable(self.fleet, config.found, self.seed)
        extras = [
            Extras(replay_probes(self.probe_replay(jobs, config, found, guided=guided), NO_ACTION), config=config)
            for jobs in self.loads
        ]
        outcome = count_outcome(self.fleet, self.loads, NO_ACTION, self.costs, reach=self.reach, extras=extras)
        return {
            "guided": guided, "min_lift": lift, "share_found": share, "probes": outcome.drains, "found": outcome.right,
            **net_row(self.no_action, outcome, replicates=self.replicates, seed=self.seed),
        }  # fmt: skip


def choose_ladder(
    ladders: Collection[Ladder], net: Callable[[Ladder], Floats], *, replicates: int, seed: int
) -> tuple[Ladder, dict[str, float]]:
    """Choose the combination of rungs with a significantly positive net; empty if there is none.

    :data:`FAMILIES` are tested in order until the net of one is not significant; families without actions are skipped.
    Of the tested families, the choice with the highest lower bound is recommended.

    ``net``: returns the net GPU-hours of a ladder, shape (loads, nodes); called only for families that are tested.
    Returns: the ladder, and its net as :func:`_choose_among` returns it.
    """
    best: tuple[Ladder, dict[str, float]] = (), dict.fromkeys(("value", "low", "high"), 0.0)
    families = ({ladder: net(ladder) for ladder in ladders if {*ladder} <= {*family}} for family in FAMILIES)
    for family in filter(None, families):
        tested = _choose_among(family, replicates, seed)
        if not tested[0]:
            break
        best = max(best, tested, key=lambda choice: choice[1]["low"])
    return best


def _choose_among(nets: Mapping[Ladder, Floats], replicates: int, seed: int) -> tuple[Ladder, dict[str, float]]:
    """Choose the ladder with the highest lower bound of the net, which penalizes rungs that only add variance.

    Returns: the best ladder among those whose interval lies above 0, empty unless the cross-fitted net is significantly
    positive; and the cross-fitted net: the ladder chosen on the other folds, evaluated on each of :data:`FOLDS` folds.
    """

    def lower_bound(net: Floats) -> float:  # normal approximation of the sum over nodes
        by_node = net.mean(axis=0)
        error = by_node.std(ddof=min(1, len(by_node) - 1)) * math.sqrt(len(by_node))
        return float(by_node.sum() - NormalDist().inv_cdf(CONFIDENCE) * error)

    def best_ladder(ladders: Iterable[Ladder], nodes: Bools) -> Ladder:
        lower = {ladder: lower_bound(nets[ladder][:, nodes]) for ladder in ladders}
        return max((ladder for ladder in lower if lower[ladder] > 0), key=lambda ladder: lower[ladder], default=())

    bounds_of = partial(net_interval, replicates=replicates, seed=seed)
    cross_fitted = np.zeros_like(next(iter(nets.values())))
    fold_of_node = np.random.default_rng(seed).permutation(cross_fitted.shape[1]) % FOLDS
    best = best_ladder([ladder for ladder, net in nets.items() if bounds_of(net)[1].low > 0], fold_of_node >= 0)
    for fold in range(FOLDS):
        if chosen := best_ladder(nets, fold_of_node != fold):
            cross_fitted[:, fold_of_node == fold] = nets[chosen][:, fold_of_node == fold]
    value, bounds = bounds_of(cross_fitted)
    return best if bounds.low > 0 else (), {"value": value, "low": bounds.low, "high": bounds.high}


def _ladders(rungs: Collection[Rung]) -> Iterator[Ladder]:
    """Yield the combinations of rungs with at most one of ``avoid``, ``swap`` and ``drain``."""
    tops: list[Ladder] = [(), *((rung,) for rung in _EXCLUSIVE if rung in rungs)]
    cheap: list[Rung] = [rung for rung in rungs if rung not in _EXCLUSIVE]
    for top, chosen in product(tops, product([False, True], repeat=len(cheap))):
        ladder = {*top, *compress(cheap, chosen)}
        if ladder:
            yield tuple(rung for rung in RUNGS if rung in ladder)
