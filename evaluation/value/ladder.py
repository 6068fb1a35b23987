"""The ladder of actions in a fleet's past: what each rung would have saved, and which rungs together pay.

Rungs are chosen on some nodes and evaluated on the others (cross-fitting), so that the net that is reported for a
choice comes from failures that the choice did not see. Nodes are parted and not times: a fleet's failures rise and fall
with time, and nodes are what is independent.

Families of rungs are tested in a fixed order, cheapest first, each only if the one before it pays. This sequence needs
no correction for multiple tests. Noise between ladders with expensive rungs cannot hide a cheap one that pays. Rungs
with rare large losses, which few nodes may not show, come last.
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

from evaluation.value.controller_replay import Controlled
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

SHARES: Final = (0.25, 0.5, 1.0)
"""Shares of the failures found, whatever their family, for which probes are shown."""

LIFTS: Final = (1.0, 2.0, 5.0)
"""Least risks of a probed node, as multiples of the fleet's mean, for which probes without a base rate are shown."""

CONFIDENCE: Final = 0.9
"""One-sided confidence of the bound by which rungs are chosen, that of the rollout stages."""

PARTS: Final = 5
"""Parts of the nodes, on each of which the choice of the others is evaluated."""

FAMILIES: Final[tuple[Ladder, ...]] = (RUNGS[:3], RUNGS[:4], RUNGS)
"""Rungs in the order in which they are tested: without effect on running jobs, a request to them, moving them."""

_NEVER: Final = timedelta(days=36_500)

USUAL: Final = 3.0
"""Multiple of the mean risk of a node from which new jobs avoid it, where a drain does not pay earlier."""

_OUT: Final[tuple[Rung, ...]] = ("avoid", "swap", "drain")


def thresholds_of(price: Price, usual: float) -> dict[str, float | None]:
    """Return the thresholds for a rung, from its price and the usual risk of a node, never from outcomes."""
    even = price.break_even
    high = None if even is None else min(max(even, 1e-6), 1.0)
    elevated = min(max(USUAL * usual, 1e-6), high or 1.0)
    return {"watch": elevated / 2, "elevated": elevated, "high": high}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the data do not tell.

    ``gpus_per_job``: jobs are generated with this size; None: the dataset's, or where it has none generated ones as in
    a real trace.
    ``largest_job``: likewise, with sizes as in a real trace up to this one.
    ``checkpoint_on_request``: whether jobs write a checkpoint when they are asked to, before they are moved.
    ``spare_nodes``: maximum number of nodes out of service at the same time, including repairs; None: a tenth.
    """

    costs: CostBenefitConfig = field(default_factory=CostBenefitConfig)
    probes: ProbeConfig = field(default_factory=ProbeConfig)
    gpus_per_job: int | None = None
    checkpoint_on_request: bool = True
    spare_nodes: int | None = None
    largest_job: int | None = None

    @property
    def budget(self) -> BudgetConfig:
        """The controller's, with a limit for the spare nodes."""
        usual = BudgetConfig()
        if self.spare_nodes is None:
            return usual
        spare = DisruptionBudget("fleet", max_unavailable=self.spare_nodes)
        others = tuple(budget for budget in usual.disruption_budgets if budget.scope != "fleet")
        return replace(usual, disruption_budgets=(spare, *others))


@dataclass
class LadderReplay:
    """Replays rungs under given jobs; arguments as those of :class:`Controlled`.

    ``horizon``: what a risk looks ahead.
    ``risks``: of each node at each decision; ``usual``: their mean.
    ``prices``: of each rung, on the mean node.
    ``findable``: which failures a diagnostic finds.
    ``no_action``: the outcome without any action.
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

    risks: Floats = field(init=False)
    prices: Mapping[Rung, Price] = field(init=False)
    usual: float = field(init=False)
    findable: Bools = field(init=False)
    no_action: ReplayOutcome = field(init=False)

    def __post_init__(self) -> None:
        self.costs, self.probes = self.assumed.costs, self.assumed.probes
        self._replayed: dict[tuple[Rung | None, bool], tuple[ReplayMarks, list[Probes]]] = {}
        self._unprobed, self._asked = [NO_PROBES] * len(self.loads), dict[int, list[Checkpoints]]()
        self._passed: dict[float, Floats] = {}  # risks of nodes that have passed a probe, by the share that it finds
        self.risks = node_risks(self.fleet, self.scores)
        known = self.risks[~np.isnan(self.risks)]
        self.usual = float(known.mean()) if len(known) else 0.0
        self.prices = mean_prices(self.fleet, self.loads, self.costs, self.probes)
        self.findable = findable(self.fleet, self.probes.found, self.seed)
        self.no_action = count_outcome(self.fleet, self.loads, NO_ACTION, self.costs, reach=self.reach)

    def thresholds(self, rung: Rung) -> dict[str, float | None]:
        """Return the thresholds that a rung is replayed at; of ``avoid``, the drain's ``high`` plays no part."""
        return thresholds_of(self.prices["drain" if rung == "avoid" else rung], self.usual)

    def marks(self, rung: Rung, probing: ProbeReplay | None) -> ReplayMarks:
        """Return when nodes are kept from new jobs with ``avoid``, ``swap`` or ``drain`` as the highest rung."""
        rungs: Ladder = RUNGS[: RUNGS.index(rung) + 1]
        settings = PolicyConfig(
            TierThresholds(**self.thresholds(rung)), horizon=self.horizon, cost_benefit=self.costs, rungs=rungs,
            budget=self.assumed.budget, probes=self.probes,
        )  # fmt: skip
        policy = self.fleet.stage(settings, "soft" if rung == "avoid" else "hard")
        least = Level.AVOID if rung == "avoid" else Level.SWAP
        return Controlled(
            self.fleet, self.scores, self.events, self.loads[0], policy, self.reach, "stated", least, self.findable,
            probing,
        ).marks()  # fmt: skip

    def replayed(self, top: Rung | None, *, probed: bool) -> tuple[ReplayMarks, list[Probes]]:
        """Return the marks with ``top`` as the highest rung of these, and the probes of each load.

        Probes and marks depend on each other: a node out of service is not probed, and one that passed has a lower
        risk. Under the first load they are replayed together; the marks are those of every load.
        """
        if (top, probed) not in self._replayed:
            replays = [self.probe_replay(jobs, self.probes, self.findable) for jobs in self.loads] if probed else []
            marks = NO_ACTION if top is None else self.marks(top, replays[0] if replays else None)
            closed = NO_ACTION if top == "avoid" else marks
            probes = [replay_probes(replay, closed) for replay in replays] if probed else self._unprobed
            self._replayed[top, probed] = marks, probes
        return self._replayed[top, probed]

    def extras(self, ladder: Collection[Rung], probes: list[Probes]) -> list[Extras]:
        """Return probes and checkpoints of each load, where they are among the rungs."""
        asked = self.checkpoints(probes) if "checkpoint" in ladder else [NO_CHECKPOINTS] * len(probes)
        return [Extras(*cheap, self.probes) for cheap in zip(probes, asked, strict=True)]

    def checkpoints(self, probes: list[Probes]) -> list[Checkpoints]:
        """Return the checkpoints of each load; ``probes``: the list of :meth:`replayed`, on which alone they depend."""
        if id(probes) not in self._asked:
            policy, at, passed = self.settings(self.probes), self.scores.at, self.risks_after(self.probes.mean_found)
            lowered = [after_passes(at, self.risks, passed, probed, self.probes) for probed in probes]
            self._asked[id(probes)] = [
                replay_checkpoints(self.fleet, jobs, at, risks, policy)
                for jobs, risks in zip(self.loads, lowered, strict=True)
            ]
        return self._asked[id(probes)]

    def risks_after(self, found: float) -> Floats:
        """Return the risks of nodes that have passed a diagnostic that finds a share."""
        if found not in self._passed:
            self._passed[found] = node_risks(self.fleet, self.scores, found)
        return self._passed[found]

    def settings(self, probes: ProbeConfig) -> PolicyConfig:
        """Return the settings of the controller for the cheap rungs."""
        return PolicyConfig(rungs=RUNGS, horizon=self.horizon, cost_benefit=self.costs, probes=probes)

    def probe_replay(self, jobs: Placements, config: ProbeConfig, found: Bools, *, guided: bool = True) -> ProbeReplay:
        """Return the replay of probes under one load; without guidance all nodes are at the same risk."""
        risks = self.risks if guided else np.ones_like(self.risks)
        passed = self.risks_after(config.mean_found) if guided else risks
        policy = self.settings(config)
        return ProbeReplay(self.fleet, jobs, self.scores.at, risks, passed, found, self.reach, policy)

    def outcome(self, ladder: Collection[Rung]) -> ReplayOutcome:
        """Count what comes of some rungs together."""
        top = next((rung for rung in reversed(_OUT) if rung in ladder), None)
        marks, probes = self.replayed(top, probed="probe" in ladder)
        extras = self.extras(ladder, probes) if {"probe", "checkpoint"} & set(ladder) else None
        soft = top == "avoid"
        return count_outcome(self.fleet, self.loads, marks, self.costs, reach=self.reach, soft=soft, extras=extras)

    def rows(self, allowed: Collection[Rung]) -> dict[str, Any]:
        """Replay each rung, and combinations of those that are allowed.

        Returns: ``ladder``, a row a rung; ``recommended``, the rungs that pay together, none but ``publish`` where none
        does; ``recommended_net``, evaluated where it was not chosen.
        """
        singles: dict[Rung, ReplayOutcome] = {rung: self.outcome((rung,)) for rung in RUNGS[1:]}
        rows = [self._row("publish", self.no_action, singles["avoid"])]
        rows += [self._row(rung, outcome, outcome) for rung, outcome in singles.items()]
        ladders = [*_ladders([rung for rung in allowed if rung in singles and singles[rung].drains])]

        @cache
        def net(ladder: Ladder) -> Floats:
            outcome = singles[ladder[0]] if len(ladder) == 1 else self.outcome(ladder)
            return net_of(self.no_action, outcome)

        chosen, value = choose_ladder(ladders, net, replicates=self.replicates, seed=self.seed)
        return {"ladder": rows, "recommended": ["publish", *chosen], "recommended_net": value}

    def _row(self, rung: Rung, outcome: ReplayOutcome, acted: ReplayOutcome) -> dict[str, Any]:
        """Return the row of a rung; ``acted``: whose actions are counted."""
        net = net_row(self.no_action, outcome, replicates=self.replicates, seed=self.seed)
        spent = float((outcome.spent + outcome.idle).sum(axis=1).mean())
        return {
            "rung": rung, "actions": acted.drains, "known": acted.known, "right": acted.right,
            "precision_low": acted.precision_low if rung in ("publish", *_OUT) else None,
            "break_even": self.prices[rung].break_even, "gpu_hours_saved": net["net"] + spent,
            "gpu_hours_spent": spent, **net,
        }  # fmt: skip

    def probing(self) -> list[dict[str, Any]]:
        """Replay probes alone: guided by risk from several lifts on, unguided, and for several shares found."""
        ways: list[tuple[bool, float | None, float | None]] = [(True, lift, None) for lift in LIFTS]
        ways += [(False, None, None), *((guided, None, share) for guided in (True, False) for share in SHARES)]
        return [self._probing_row(*way) for way in ways]

    def _probing_row(self, guided: bool, lift: float | None, share: float | None) -> dict[str, Any]:
        shares = self.probes.found if share is None else dict.fromkeys(self.probes.found, share)
        config = replace(self.probes, found=shares)
        if lift is not None:
            config = replace(config, min_lift=lift, base_every=_NEVER)
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
    """Choose the rungs that pay together; none where that is not sure.

    :data:`FAMILIES` are tested until one is not sure to pay; those without a rung that acted are skipped. The ladder of
    the family with the highest lower bound is recommended.

    ``net``: gives the net GPU-hours of a ladder by node, shape (loads, nodes); asked only where a family is tested.
    Returns: the ladder, and its net as :func:`_choose_among` returns it.
    """
    best: tuple[Ladder, dict[str, float]] = (), dict.fromkeys(("value", "low", "high"), 0.0)
    families = ({ladder: net(ladder) for ladder in ladders if {*ladder} <= {*family}} for family in FAMILIES)
    for among in filter(None, families):
        tested = _choose_among(among, replicates, seed)
        if not tested[0]:
            break
        best = max(best, tested, key=lambda choice: choice[1]["low"])
    return best


def _choose_among(nets: Mapping[Ladder, Floats], replicates: int, seed: int) -> tuple[Ladder, dict[str, float]]:
    """Choose the best of some ladders by the lower bound of the net, so that a rung which adds chance is left out.

    Returns: the best ladder among those whose interval lies above 0, none if the choice is not sure to pay; and the net
    on each of :data:`PARTS` parts of the nodes of the ladder that is best on the other parts.
    """

    def lower_bound(net: Floats) -> float:  # of the sum over nodes, normal
        by_node = net.mean(axis=0)
        error = by_node.std(ddof=min(1, len(by_node) - 1)) * math.sqrt(len(by_node))
        return float(by_node.sum() - NormalDist().inv_cdf(CONFIDENCE) * error)

    def surest(ladders: Iterable[Ladder], nodes: Bools) -> Ladder:
        lower = {ladder: lower_bound(nets[ladder][:, nodes]) for ladder in ladders}
        return max((ladder for ladder in lower if lower[ladder] > 0), key=lambda ladder: lower[ladder], default=())

    bounds_of = partial(net_interval, replicates=replicates, seed=seed)
    crossed = np.zeros_like(next(iter(nets.values())))
    part = np.random.default_rng(seed).permutation(crossed.shape[1]) % PARTS
    whole = surest([ladder for ladder, net in nets.items() if bounds_of(net)[1].low > 0], part >= 0)
    for number in range(PARTS):
        if chosen := surest(nets, part != number):
            crossed[:, part == number] = nets[chosen][:, part == number]
    value, bounds = bounds_of(crossed)
    return whole if bounds.low > 0 else (), {"value": value, "low": bounds.low, "high": bounds.high}


def _ladders(rungs: Collection[Rung]) -> Iterator[Ladder]:
    """Give the combinations of rungs with at most one way to keep jobs off a node."""
    out: list[Ladder] = [(), *((rung,) for rung in _OUT if rung in rungs)]
    cheap: list[Rung] = [rung for rung in rungs if rung not in _OUT]
    for top, chosen in product(out, product([False, True], repeat=len(cheap))):
        ladder = {*top, *compress(cheap, chosen)}
        if ladder:
            yield tuple(rung for rung in RUNGS if rung in ladder)
