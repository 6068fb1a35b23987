"""Disruption budgets and rate limits: which nodes may be taken out of service now, highest net benefit first."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """Limit on nodes out of service at a time in each scope, whoever took them out.

    ``max_unavailable``: maximum number of nodes.
    ``max_unavailable_share``: maximum share of the nodes, rounded down; at least one node, so that small clusters are
    not blocked, and never all.
    ``min_available``: minimum number of nodes in service.
    ``min_scope_size``: scopes with fewer nodes are exempt, for example racks of one node.
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
        """Return how many nodes of a scope with ``total`` nodes may be out of service at a time."""
        if total < self.min_scope_size:
            return total
        limit = total if self.max_unavailable is None else min(self.max_unavailable, total)
        if self.max_unavailable_share is not None:
            limit = min(limit, _share_of(self.max_unavailable_share, total), total - 1)
        if self.min_available is not None:
            limit = min(limit, total - self.min_available)
        return max(limit, 0)


@checked(frozen=True, slots=True)
class RateLimit:
    """Limit on nodes newly taken out of service within ``window`` in each scope.

    ``max_nodes``: maximum number of nodes.
    ``max_share``: maximum share of the nodes, rounded down, at least one node.
    """

    scope: Scope
    max_nodes: NonNegativeInt | None = None
    window: PositiveTime = timedelta(hours=1)
    max_share: Share | None = None

    def __post_init__(self) -> None:
        if self.max_nodes is None and self.max_share is None:
            raise ValueError(f"the rate limit of scope {self.scope} has no limit: give max_nodes or max_share")

    def allowed(self, total: int) -> int:
        """Return how many nodes of a scope with ``total`` nodes may newly be taken out within the window."""
        limit = total if self.max_nodes is None else self.max_nodes
        return limit if self.max_share is None else min(limit, _share_of(self.max_share, total))


FLEET_DISRUPTION_BUDGET = DisruptionBudget("fleet", max_unavailable_share=0.10)
FLEET_RATE_LIMIT = RateLimit("fleet", max_share=0.05)
"""Limits of the whole fleet: limits per cluster alone would allow one node of every small cluster."""

DISRUPTION_BUDGETS = (
    FLEET_DISRUPTION_BUDGET,
    DisruptionBudget("cluster", max_unavailable_share=0.10, min_available=1),
    DisruptionBudget("group", max_unavailable_share=0.20),
    DisruptionBudget("rack", max_unavailable_share=0.34, min_scope_size=2),
    DisruptionBudget("domain", max_unavailable_share=0.34, min_scope_size=2),
    DisruptionBudget("job", max_unavailable=1),
)
"""Half of Karpenter's 20 % for a cluster, and its 20 % for a group (node pool); NVSentinel allows 50 % in five
minutes. A third of a rack or NVLink domain, and one node at a time of a job that can shrink."""

RATE_LIMITS = (
    FLEET_RATE_LIMIT,
    RateLimit("cluster", 4, timedelta(hours=1)),
    RateLimit("cluster", 24, timedelta(days=1)),
)
"""Stricter than draino's one drain per ten minutes, because a prediction is weaker evidence than a fault."""


@checked(frozen=True, slots=True)
class BudgetConfig:
    """All disruption budgets and rate limits; each applies independently.

    ``disruption_budgets``: limits on nodes out of service at a time; ``max_unavailable`` and ``min_available`` are
    numbers of nodes, and scopes smaller than ``min_scope_size`` are exempt.
    ``rate_limits``: limits on nodes newly taken out within ``window``, as ``max_nodes`` or ``max_share``.
    """

    disruption_budgets: tuple[DisruptionBudget, ...] = DISRUPTION_BUDGETS
    rate_limits: tuple[RateLimit, ...] = RATE_LIMITS

    @property
    def memory(self) -> timedelta:
        """How long starts must be remembered."""
        return max((rate.window for rate in self.rate_limits), default=timedelta(0))

    def with_fleet_limits(self) -> "BudgetConfig":
        """Add the default fleet limits if none of scope ``fleet`` is given."""
        budgets, limits = self.disruption_budgets, self.rate_limits
        if not any(budget.scope == "fleet" for budget in budgets):
            budgets = (FLEET_DISRUPTION_BUDGET, *budgets)
        if not any(limit.scope == "fleet" for limit in limits):
            limits = (FLEET_RATE_LIMIT, *limits)
        return BudgetConfig(budgets, limits)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to take a node out of service.

    ``priority``: highest first, then by name; requests granted before without effect come last.
    ``episode``: start of the node's episode, which distinguishes new requests from repeated ones.
    """

    node: str
    priority: float
    episode: datetime


@dataclass(frozen=True, slots=True)
class Start:
    """Record of a node newly taken out of service."""

    node: str
    at: datetime
    episode: datetime
    scopes: tuple[ScopeName, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """Usage of a scope's disruption budget.

    ``lost``: nodes out of service, including those granted now; exceeds ``allowed`` if others took nodes out.
    """

    scope: ScopeName
    nodes: int
    lost: int
    allowed: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Allocation of the budgets.

    ``starts``: starts to remember, including new ones.
    ``uses``: usage of every limited scope that has requests or nodes out of service.
    """

    nodes: frozenset[str]
    refused: Mapping[str, str]
    starts: tuple[Start, ...]
    uses: tuple[Use, ...]


def known_starts(nodes: Iterable[NodeView], starts: Sequence[Start], now: datetime) -> list[Start]:
    """Return recorded starts, plus those reconstructed from the taints on nodes, in case the state was lost.

    A taint dated in the future, by a clock that was ahead, counts from now.
    """
    known = {start.node for start in starts}
    tainted = [(node, min(node.marks.hard_since, now)) for node in nodes if node.marks.hard_since is not None]
    lost = [Start(node.name, since, since, node.scopes) for node, since in tainted if node.name not in known]
    return [*starts, *lost]


def grant(
    nodes: Collection[NodeView],
    asks: Sequence[Ask],
    starts: Sequence[Start],
    config: BudgetConfig,
    now: datetime,
    released: Collection[str] = (),
) -> Grant:
    """Decide which nodes may be taken out of service now.

    Idempotent: called again with the returned starts, it returns the same, since a node's own start does not count
    against it within the rate window. An older start had no effect or was reverted, so the node counts again. Such
    nodes come last, so that nodes that cannot be tainted do not starve the others.

    ``nodes``: the fleet, each node once. Nodes at planned rest count neither as out of service nor in scope sizes.
    ``asks``: in any order, each node once.
    ``released``: nodes released at this time, which free their budget from the next decision on.
    """
    since = now - config.memory
    recent = [start for start in starts if start.at > since]
    own_starts: dict[tuple[str, datetime], datetime] = {}
    for start in recent:
        key = (start.node, start.episode)
        own_starts[key] = max(own_starts.get(key, start.at), start.at)
    scopes = {node.name: node.scopes for node in nodes}
    resting = {node.name for node in nodes if not node.counted and node.name not in released}
    total: Counter[ScopeName] = Counter(chain.from_iterable([scopes[name] for name in scopes if name not in resting]))
    unavailable: Counter[ScopeName] = Counter(
        chain.from_iterable([scopes[node.name] for node in nodes if node.why_out_of_service or node.name in released])
    )
    # A job that cannot shrink stops with the first node it loses. Draining its other nodes later would stop it again
    # each time, so they may leave together with the first.
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
    affected: set[ScopeName] = set(unavailable)

    def counts(ask: Ask) -> list[bool]:
        """Return for each rate limit whether the node counts as a new start."""
        started = own_starts.get((ask.node, ask.episode))
        return [started is None or started <= now - rate.window for rate in config.rate_limits]

    def refusal(node: str, counted: list[bool]) -> str | None:
        """Return the limit that refuses a node; None if there is none."""
        for scope in scopes[node]:
            size = total[scope] + (node in resting)  # a resting node counts once it is taken out
            for budget in () if scope in stops_once else limited.get(scope[0], ()):
                allowed = budget.allowed(size)
                if unavailable[scope] + 1 > allowed:
                    used = f"{unavailable[scope]} of {size} nodes are out of service"
                    return f"{_name(scope)}: {used}, at most {allowed} allowed"
        for counter, rate, counts_in in zip(counters, config.rate_limits, counted, strict=True):
            for scope in scopes[node] if counts_in else ():
                if scope[0] == rate.scope and counter[scope] >= (allowed := rate.allowed(total[scope])):
                    hours = rate.window / timedelta(hours=1)
                    return f"{_name(scope)}: {counter[scope]} nodes taken out in {hours:g} h, at most {allowed} allowed"
        return None

    def order(ask: Ask) -> tuple[bool, float, str]:
        return (ask.node, ask.episode) in own_starts and any(counts(ask)), -ask.priority, ask.node

    for ask in sorted(asks, key=order):
        node_scopes, counted = scopes[ask.node], counts(ask)
        why = refusal(ask.node, counted)
        affected.update(node_scopes)
        if why is not None:
            refused[ask.node] = why
            continue
        granted.add(ask.node)
        unavailable.update(node_scopes)
        total.update(node_scopes if ask.node in resting else ())
        if any(counted) or (ask.node, ask.episode) not in own_starts:
            recent = [start for start in recent if (start.node, start.episode) != (ask.node, ask.episode)]
            recent.append(Start(ask.node, now, ask.episode, node_scopes))
            for counter, counts_in in zip(counters, counted, strict=True):
                counter.update(node_scopes if counts_in else ())
    uses = tuple(
        Use(scope, total[scope], unavailable[scope], min(limit.allowed(total[scope]) for limit in limited[scope[0]]))
        for scope in sorted(affected)
        if scope[0] in limited and scope not in stops_once
    )
    recent.sort(key=lambda start: (start.at, start.node))
    return Grant(frozenset(granted), refused, tuple(recent), uses)


def _name(scope: ScopeName) -> str:
    return " ".join(part for part in scope if part)
