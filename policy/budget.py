"""How much of a fleet may be out of service, and how fast: what is worth most first, under budgets and rate limits."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import chain
from typing import Literal

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import PositiveTime, Share
from policy.fleet import NodeView

Scope = Literal["fleet", "cluster", "group", "rack", "domain", "job"]
ScopeName = tuple[str, str]
"""A scope and its name: ``("rack", "east/r17")``."""


def _share_of(share: float, total: int) -> int:
    return max(math.floor(share * total + 1e-9), 1) if share > 0 else 0


@checked(frozen=True, slots=True)
class DisruptionBudget:
    """What of each scope may be out of service at a time, whoever took it out.

    ``max_unavailable``: at most so many nodes.
    ``max_unavailable_share``: at most this share of the nodes. Rounded down, but to one at least, for else a small
    cluster could lose none; and never to all.
    ``min_available``: so many nodes at least stay in service.
    ``min_scope_size``: scopes with fewer nodes are not limited by this budget, such as racks of one node.
    """

    scope: Scope
    max_unavailable: NonNegativeInt | None = None
    max_unavailable_share: Share | None = None
    min_available: NonNegativeInt | None = None
    min_scope_size: NonNegativeInt = 1

    def __post_init__(self) -> None:
        if (self.max_unavailable, self.max_unavailable_share, self.min_available) == (None, None, None):
            raise ValueError(
                f"the disruption budget of scope {self.scope} has no limit: give max_unavailable, "
                "max_unavailable_share or min_available"
            )

    def allowed(self, total: int) -> int:
        """Give how many nodes of a scope of ``total`` may be out of service at a time."""
        if total < self.min_scope_size:
            return total
        most = total if self.max_unavailable is None else min(self.max_unavailable, total)
        if self.max_unavailable_share is not None:
            most = min(most, _share_of(self.max_unavailable_share, total), total - 1)
        if self.min_available is not None:
            most = min(most, total - self.min_available)
        return max(most, 0)


@checked(frozen=True, slots=True)
class RateLimit:
    """How many nodes of each scope may newly be taken out of service within a time.

    ``max_nodes``: at most so many nodes.
    ``max_share``: at most this share of the nodes, rounded down, but to one at least.
    """

    scope: Scope
    max_nodes: NonNegativeInt | None = None
    window: PositiveTime = timedelta(hours=1)
    max_share: Share | None = None

    def __post_init__(self) -> None:
        if self.max_nodes is None and self.max_share is None:
            raise ValueError(f"the rate limit of scope {self.scope} has no limit: give max_nodes or max_share")

    def allowed(self, total: int) -> int:
        """Give how many nodes of a scope of ``total`` may newly be taken out within the window."""
        most = total if self.max_nodes is None else self.max_nodes
        return most if self.max_share is None else min(most, _share_of(self.max_share, total))


FLEET_DISRUPTION_BUDGET = DisruptionBudget("fleet", max_unavailable_share=0.10)
FLEET_RATE_LIMIT = RateLimit("fleet", max_share=0.05)
"""Of the whole fleet, however many clusters it has: the limits of a cluster alone let one node of each small one go."""

DISRUPTION_BUDGETS = (
    FLEET_DISRUPTION_BUDGET,
    DisruptionBudget("cluster", max_unavailable_share=0.10, min_available=1),
    DisruptionBudget("group", max_unavailable_share=0.20),
    DisruptionBudget("rack", max_unavailable_share=0.34, min_scope_size=2),
    DisruptionBudget("domain", max_unavailable_share=0.34, min_scope_size=2),
    DisruptionBudget("job", max_unavailable=1),
)
"""Half of Karpenter's 20 % for a cluster and its 20 % for a group (node pool), against NVSentinel's 50 % in five
minutes; a third of a rack or NVLink domain; and one node at a time of a job that continues without it."""

RATE_LIMITS = (
    FLEET_RATE_LIMIT,
    RateLimit("cluster", 4, timedelta(hours=1)),
    RateLimit("cluster", 24, timedelta(days=1)),
)
"""Somewhat under draino's one drain in ten minutes, for a prediction is less than a fault."""


@checked(frozen=True, slots=True)
class BudgetConfig:
    """All disruption budgets and rate limits; each holds by itself."""

    disruption_budgets: tuple[DisruptionBudget, ...] = DISRUPTION_BUDGETS
    rate_limits: tuple[RateLimit, ...] = RATE_LIMITS

    @property
    def memory(self) -> timedelta:
        """For how long a start must be remembered."""
        return max((rate.window for rate in self.rate_limits), default=timedelta(0))

    def with_fleet_limits(self) -> "BudgetConfig":
        """Add the default limits of the whole fleet where none of scope ``fleet`` is given."""
        budgets, limits = self.disruption_budgets, self.rate_limits
        if not any(budget.scope == "fleet" for budget in budgets):
            budgets = (FLEET_DISRUPTION_BUDGET, *budgets)
        if not any(limit.scope == "fleet" for limit in limits):
            limits = (FLEET_RATE_LIMIT, *limits)
        return BudgetConfig(budgets, limits)


@dataclass(frozen=True, slots=True)
class Ask:
    """A wish to take a node out of service.

    ``worth``: the greatest comes first, among equals the first by name; what was granted before and came to nothing,
    last.
    ``episode``: when the node's alert began: what tells a new wish from a repeated one.
    """

    node: str
    worth: float
    episode: datetime


@dataclass(frozen=True, slots=True)
class Start:
    """A node that was newly taken out of service.

    ``scopes``: those that it counted in then.
    """

    node: str
    at: datetime
    episode: datetime
    scopes: tuple[ScopeName, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """How much of a scope is out of service.

    ``nodes``, ``lost``, ``allowed``: ``lost`` with what was granted now; it may exceed ``allowed`` where others
    took nodes out.
    """

    scope: ScopeName
    nodes: int
    lost: int
    allowed: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What a budget gives.

    ``refused``: why not, by node, in words.
    ``starts``: those still to be remembered, the new ones among them.
    ``uses``: of every scope that a disruption budget limits and that has lost nodes or refused some.
    """

    nodes: frozenset[str]
    refused: Mapping[str, str]
    starts: tuple[Start, ...]
    uses: tuple[Use, ...]


def known_starts(nodes: Iterable[NodeView], starts: Sequence[Start], now: datetime) -> list[Start]:
    """Return the starts on record, and those that only the taints on the nodes show, because the state was lost."""
    known = {start.node for start in starts}
    return [
        *starts,
        *(
            Start(node.name, since, since, node.scopes)
            for node in nodes
            if (since := node.marks.hard_since) is not None and since <= now and node.name not in known
        ),
    ]


def grant(
    nodes: Collection[NodeView],
    asks: Sequence[Ask],
    starts: Sequence[Start],
    config: BudgetConfig,
    now: datetime,
    released: Collection[str] = (),
) -> Grant:
    """Decide which nodes may be taken out of service now.

    ``nodes``: the fleet, each node once. Those at rest count neither as out of service nor in the size of a scope.
    ``asks``: in any order, each node once.
    ``released``: nodes that are given back at this very time, and make room from the next decision on.
    ``starts``: as remembered. One that seems to lie in the future, because a clock went back, counts as of now.
    Returns: the same again when asked again with the starts that it gave: within a rate's window a node's own start
    does not count against it. A start older than that came to nothing, or was taken back, and counts again; such nodes
    come after all others, so that those that cannot be marked keep none from it.
    """
    since = now - config.memory
    recent = [start if start.at <= now else replace(start, at=now) for start in starts if start.at > since]
    own: dict[tuple[str, datetime], datetime] = {}
    for start in recent:
        key = (start.node, start.episode)
        own[key] = max(own.get(key, start.at), start.at)
    scopes = {node.name: node.scopes for node in nodes}
    resting = {node.name for node in nodes if not node.counted and node.name not in released}
    total: Counter[ScopeName] = Counter(chain.from_iterable([scopes[name] for name in scopes if name not in resting]))
    lost: Counter[ScopeName] = Counter(
        chain.from_iterable([scopes[node.name] for node in nodes if node.lost or node.name in released])
    )
    # A job that does not continue without a node stops with the first that it loses. One node after another would stop
    # it each time: its further nodes may leave with the first.
    stops_once = {("job", f"{node.cluster}/{job.name}") for node in nodes for job in node.jobs if not job.can_shrink}
    limited: dict[str, list[DisruptionBudget]] = {}
    for budget in config.disruption_budgets:
        limited.setdefault(budget.scope, []).append(budget)
    counters = [
        Counter(chain.from_iterable([start.scopes for start in recent if start.at > now - rate.window]))
        for rate in config.rate_limits
    ]
    granted: set[str] = set()
    refused: dict[str, str] = {}
    touched: set[ScopeName] = set(lost)

    def counts(ask: Ask) -> list[bool]:
        """Tell of each rate whether the node counts in it again."""
        began = own.get((ask.node, ask.episode))
        return [began is None or began <= now - rate.window for rate in config.rate_limits]

    def refusal(node: str, counted: list[bool]) -> str | None:
        """Say which limit keeps a node in service; None: none does."""
        for scope in scopes[node]:
            of = total[scope] + (node in resting)  # a node that is taken out at rest is counted from then on
            for budget in () if scope in stops_once else limited.get(scope[0], ()):
                allowed = budget.allowed(of)
                if lost[scope] + 1 > allowed:
                    return f"{_name(scope)}: {lost[scope]} of {of} nodes are out of service, at most {allowed} allowed"
        for counter, rate, counts_in in zip(counters, config.rate_limits, counted, strict=True):
            for scope in scopes[node] if counts_in else ():
                if scope[0] == rate.scope and counter[scope] >= (allowed := rate.allowed(total[scope])):
                    hours = rate.window / timedelta(hours=1)
                    return f"{_name(scope)}: {counter[scope]} nodes taken out in {hours:g} h, at most {allowed}"
        return None

    def order(ask: Ask) -> tuple[bool, float, str]:
        return (ask.node, ask.episode) in own and any(counts(ask)), -ask.worth, ask.node

    for ask in sorted(asks, key=order):
        node_scopes, counted = scopes[ask.node], counts(ask)
        why = refusal(ask.node, counted)
        touched.update(node_scopes)
        if why is not None:
            refused[ask.node] = why
            continue
        granted.add(ask.node)
        lost.update(node_scopes)
        total.update(node_scopes if ask.node in resting else ())
        if any(counted) or (ask.node, ask.episode) not in own:
            recent = [start for start in recent if (start.node, start.episode) != (ask.node, ask.episode)]
            recent.append(Start(ask.node, now, ask.episode, node_scopes))
            for counter, counts_in in zip(counters, counted, strict=True):
                counter.update(node_scopes if counts_in else ())
    uses = tuple(
        Use(scope, total[scope], lost[scope], min(budget.allowed(total[scope]) for budget in limited[scope[0]]))
        for scope in sorted(touched)
        if scope[0] in limited and scope not in stops_once
    )
    recent.sort(key=lambda start: (start.at, start.node))
    return Grant(frozenset(granted), refused, tuple(recent), uses)


def _name(scope: ScopeName) -> str:
    return " ".join(part for part in scope if part)
