"""Circuit breaker: conditions that freeze new hard actions, for how long, and why. It never blocks a release.

Conditions: too many nodes at risk, down or unreadable; missing scores or channels; software changes; an old model or
reading. Feature drift is not one of them: ``predrain doctor`` reports it (:mod:`pipeline.health`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from statistics import median
from typing import Annotated

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime, PositiveTime, Share
from foundation.text import percent, quantity
from policy.fleet import Fact, NodeView, Signals

RISK = "a high risk"
"""Report of a node whose risk reached ``high``, dated to the start of its episode."""

TEST = "diagnostic_failed"
"""A fleet-wide diagnostic finds many faulty nodes in one pass, so failed tests form bursts only among neighbours."""

_NAMED = 3


@checked(frozen=True, slots=True)
class CommonCauseConfig:
    """Definition of a burst of reports with a common cause.

    ``min_nodes``: minimum number of nodes.
    ``anywhere``: maximum time between consecutive reports, anywhere in the fleet.
    ``nearby``: the same among the nodes of one job, rack or NVLink domain.
    """

    min_nodes: PositiveInt = 3
    anywhere: NonNegativeTime = timedelta(seconds=30)
    nearby: NonNegativeTime = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Burst:
    """Reports with a common cause; ``nodes``: nodes without other evidence, by name."""

    key: str
    message: str
    nodes: tuple[str, ...]


_Report = tuple[datetime, str, Fact]


def bursts(nodes: Sequence[tuple[NodeView, Sequence[Fact]]], config: CommonCauseConfig) -> tuple[Burst, ...]:
    """Find bursts among the reports of nodes; a node that also has a report outside of any burst has its own evidence.

    High risks form a burst only if most nodes of a rack, domain or job have one: many high risks at once may also come
    from a broken model, which ``max_risky`` and ``jump`` detect.
    """
    if sum(bool(reports) for _, reports in nodes) < config.min_nodes:
        return ()
    reported: defaultdict[tuple[str, str], list[_Report]] = defaultdict(list)
    onsets = [(node, _onsets(reports, config.nearby)) for node, reports in nodes if reports]
    for node, reports in onsets:
        for scope in node.scopes:
            if scope[0] in _SCOPES:
                reported[scope] += [(report.seen_at, node.name, report) for report in reports]
    places = {scope: facts for scope, facts in reported.items() if len(facts) >= config.min_nodes}
    scopes = places.keys() - {("fleet", "")}  # sizes matter for chains of risks only, which the fleet scope excludes
    sizes = Counter([scope for node, _ in nodes for scope in node.scopes if scope in scopes] if scopes else ())
    chains: list[tuple[tuple[str, str], list[_Report]]] = []
    for scope, facts in places.items():
        is_fleet = scope[0] == "fleet"
        for risks in (False, True):
            chosen = [
                fact for fact in facts if (fact[2].name == RISK) is risks and not (is_fleet and fact[2].name in _NEARBY)
            ]
            min_nodes = max(config.min_nodes, sizes[scope] // 2 + 1 if risks else 0)
            gap = config.anywhere if is_fleet else config.nearby
            chains += [
                (scope, chain) for chain in _chains(chosen, gap) if len({name for _, name, _ in chain}) >= min_nodes
            ]
    shared = {(name, report) for _, chain in chains for _, name, report in chain}
    single = {node.name for node, reports in onsets if any((node.name, report) not in shared for report in reports)}
    merged: dict[str, Burst] = {}
    for scope, chain in sorted(chains, key=lambda burst: -len(burst[1])):
        covered = {name for burst in merged.values() for name in burst.nodes}
        other_nodes = {name for _, name, _ in chain} - single
        if other_nodes - covered:
            burst = _burst(scope, chain, tuple(sorted(other_nodes)))
            merged.setdefault(burst.key, burst)
    return tuple(merged.values())


_SCOPES = ("fleet", "rack", "domain", "job")
_NEARBY = (RISK, TEST)


def _onsets(reports: Sequence[Fact], gap: timedelta) -> list[Fact]:
    """Drop reports that follow another within ``gap``, so that a node that keeps reporting does not chain others."""
    reports_left: list[Fact] = []
    last: dict[bool, datetime] = {}
    for report in sorted(reports, key=lambda report: report.seen_at):
        of_risk = report.name == RISK
        if of_risk not in last or report.seen_at - last[of_risk] > gap:
            reports_left.append(report)
        last[of_risk] = report.seen_at
    return reports_left


def _chains(reports: Iterable[_Report], gap: timedelta) -> Iterator[list[_Report]]:
    chain: list[_Report] = []
    for report in sorted(reports, key=lambda report: report[:2]):
        if chain and report[0] - chain[-1][0] > gap:
            yield chain
            chain = []
        chain.append(report)
    if chain:
        yield chain


def _burst(scope: tuple[str, str], chain: Sequence[_Report], nodes: tuple[str, ...]) -> Burst:
    kinds: Mapping[str, None] = dict.fromkeys(report.name for _, _, report in chain)
    facts = ", ".join(sorted(kinds)[:_NAMED])
    scope_text = "of the fleet" if scope[0] == "fleet" else f"of {scope[0]} {scope[1]}"
    first, count = chain[0][0], len({name for _, name, _ in chain})
    message = (
        f"{count} nodes {scope_text} report {facts} together, from {first:%Y-%m-%d %H:%M} UTC: a common cause, "
        "unless a node has other evidence"
    )
    return Burst(f"together {scope[0]} {scope[1]} {first:%Y-%m-%dT%H}", message, nodes)


@checked(frozen=True, slots=True)
class BreakerConfig:
    """Limits beyond which the breaker opens.

    ``max_risky``: maximum share of nodes at risk, in the fleet or a group; more suggest a broken model.
    ``jump``: maximum ratio of that share to its usual value (the median of its history).
    ``min_jump``: ``jump`` applies to shares of at least this, since a few nodes in a large fleet may be chance.
    ``min_risky``: minimum number of nodes at risk (or down), so that one bad node of three does not open the breaker.
    ``history``, ``min_history``: maximum and minimum number of decision times behind the usual share.
    ``max_missing``: maximum share of units without a valid score, on nodes that are neither down nor at planned rest.
    ``max_down``: maximum share of nodes that are down; more suggest a failure of the control plane.
    ``max_unreadable``: maximum share of nodes whose state cannot be read.
    ``max_changed``: maximum share of a group's nodes whose driver or exporter changed within ``settle``.
    ``settle``: time after a software change during which predictions on the node are not acted on.
    ``max_shrunk``: maximum share of nodes that may disappear from one listing to the next.
    ``max_model_age``: maximum time since the end of the model's training data.
    ``max_read_age``: maximum time since the scheduler was read.
    ``clock_slack``: maximum backward step of the clock.
    ``quiet``: a cause closes after it was not observed for this long.
    ``common_cause``: nodes whose only evidence is a burst of reports are not taken out of service.
    """

    max_risky: Share = 0.20
    jump: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 4.0
    min_jump: Share = 0.02
    min_risky: PositiveInt = 3
    history: PositiveInt = 28
    min_history: PositiveInt = 4
    max_missing: Share = 0.30
    max_down: Share = 0.30
    max_unreadable: Share = 0.30
    max_changed: Share = 0.10
    settle: NonNegativeTime = timedelta(hours=24)
    max_shrunk: Share = 0.5
    max_model_age: NonNegativeTime = timedelta(days=21)
    max_read_age: NonNegativeTime = timedelta(minutes=5)
    clock_slack: NonNegativeTime = timedelta(minutes=1)
    quiet: PositiveTime = timedelta(hours=1)
    common_cause: CommonCauseConfig = field(default_factory=CommonCauseConfig)

    def __post_init__(self) -> None:
        if self.min_history > self.history:
            raise ValueError(f"min_history is {self.min_history}: give at most history ({self.history})")


@dataclass(frozen=True, slots=True)
class BreakerCause:
    """A reason why the breaker is open.

    ``group``: frozen group; None: the fleet.
    ``nodes``: frozen nodes, if only some are; empty: all.
    """

    group: str | None
    message: str
    last_at: datetime
    nodes: tuple[str, ...] = ()

    def freezes(self, group: str, node: str) -> bool:
        """Whether it freezes a node of a group."""
        return node in self.nodes if self.nodes else self.group in (None, group)


@dataclass(frozen=True, slots=True)
class RiskyShare:
    """Share of nodes at risk at one decision time."""

    decided_at: datetime
    share: float


@dataclass(frozen=True, slots=True)
class BreakerState:
    """State of the breaker between decisions.

    ``causes``: open causes, observed now or within the quiet time.
    ``acknowledged``: causes dismissed by a manual reset, until they are gone.
    ``shares``: history of shares at risk by group; ``""`` is the fleet.
    ``nodes``: number of listed nodes that were not at planned rest.
    ``reset_at``, ``decided_at``: time of the last manual reset that was processed, and of the last decision.
    """

    causes: Mapping[str, BreakerCause] = field(default_factory=dict)
    acknowledged: tuple[str, ...] = ()
    shares: Mapping[str, tuple[RiskyShare, ...]] = field(default_factory=dict)
    nodes: int = 0
    reset_at: datetime | None = None
    decided_at: datetime | None = None

    def frozen(self, group: str, node: str = "") -> tuple[str, ...]:
        """Return the messages of the causes that freeze a group, or a node of it."""
        return tuple(cause.message for _, cause in sorted(self.causes.items()) if cause.freezes(group, node))


@dataclass(slots=True)
class ObservedNode:
    """Observations on one node.

    ``risky``: tier ``elevated`` or above now, by risk or rule, before hysteresis.
    ``by_rule``: ``risky`` by hard rules only.
    ``reports``: evidence for tier ``high``: facts, and :data:`RISK`.
    ``changed``: driver or exporter changed within ``settle``.
    """

    node: NodeView
    risky: bool
    known: int
    changed: bool
    by_rule: bool = False
    reports: tuple[Fact, ...] = ()
    decided_at: datetime | None = None


Causes = dict[str, tuple[str | None, str]]
"""Frozen group (None: the fleet) and message, by key of the cause."""

_MOMENTARY = frozenset({"listing", "clock"})
"""Causes that compare with the previous decision, and so are observed only once."""


def watch(
    state: BreakerState,
    nodes: Sequence[ObservedNode],
    signals: Signals,
    decided_at: datetime | None,
    config: BreakerConfig,
    now: datetime,
) -> tuple[BreakerState, tuple[str, ...]]:
    """Update the breaker from observations on the whole fleet; returns the new state and what opened or closed.

    ``nodes``: nodes with units; others would dilute every share. Nodes at planned rest have no current scores and count
    in no share, but in the listing, so that power saving does not look like a loss of nodes.
    """
    listed, nodes = nodes, [observed for observed in nodes if observed.node.counted]
    common_causes = bursts([(observed.node, observed.reports) for observed in nodes], config.common_cause)
    # nodes in a burst have a cause of their own; they must not raise the usual share either
    counted = {name for burst in common_causes for name in burst.nodes}
    if counted:
        nodes = [
            replace(observed, risky=False) if observed.by_rule and observed.node.name in counted else observed
            for observed in nodes
        ]
    present: Causes = {**_of_signals(state, signals, config, now), **_of_listing(state, listed, nodes, config)}
    groups: dict[str, list[ObservedNode]] = {"": list(nodes)}
    for observed in nodes:
        groups.setdefault(observed.node.group_key, []).append(observed)
    present |= {burst.key: (None, burst.message) for burst in common_causes}
    shares = {name: tuple(share for share in known if share.decided_at <= now) for name, known in state.shares.items()}
    for name, members in groups.items():
        known = shares.get(name, ())
        # Exclude the current decision time, so that evaluating it twice gives the same result.
        earlier = tuple(share for share in known if decided_at is None or share.decided_at < decided_at)[
            -config.history :
        ]
        causes = _of_group(name, members, earlier, config)
        present.update(causes)
        new = decided_at is not None and (not known or decided_at > known[-1].decided_at)
        # Shares that opened the breaker do not enter the usual share.
        if decided_at is not None and new and members and f"risky {name}" not in causes:
            share = RiskyShare(decided_at, sum(observed.risky for observed in members) / len(members))
            shares[name] = (*known, share)[-config.history - 1 :]
    frozen = {burst.key: burst.nodes for burst in common_causes}
    settled, reasons = _settle(state, present, frozen, signals, config, now)
    return replace(settled, shares=shares, nodes=len(nodes), decided_at=now), reasons


def _settle(
    state: BreakerState,
    present: Causes,
    frozen: Mapping[str, tuple[str, ...]],
    signals: Signals,
    config: BreakerConfig,
    now: datetime,
) -> tuple[BreakerState, tuple[str, ...]]:
    reasons: list[str] = []
    causes = dict(state.causes)
    acknowledged = {key for key in state.acknowledged if key in present}
    reset_at = signals.reset_breaker_at
    # the clock of the operator, or of this controller at the last reset, may have been ahead
    last = None if state.reset_at is None or (state.reset_at > now and state.reset_at != reset_at) else state.reset_at
    if reset_at is not None and (last is None or reset_at > last):
        if state.decided_at is None and abs(now - reset_at) > config.quiet:
            # the reset request outlives the state: an old one must not dismiss causes that appeared after it
            when = f"{reset_at:%Y-%m-%d %H:%M} UTC"
            reasons.append(f"manual reset ignored: it was requested at {when}, before the state was lost")
        else:
            reasons += [f"breaker closed by manual reset: {cause.message}" for _, cause in sorted(causes.items())]
            causes, acknowledged = {}, set(present)
        state = replace(state, reset_at=reset_at)
    for key, (group, reason) in present.items():
        if key in acknowledged:
            continue
        if key not in causes:
            reasons.append(f"breaker opened: {reason}")
        causes[key] = BreakerCause(group, reason, now, frozen.get(key, ()))
    for key, cause in sorted(causes.items()):
        if key not in present and now - cause.last_at >= config.quiet:
            del causes[key]
            reasons.append(f"breaker closed, cause gone: {cause.message}")
    causes = dict(sorted(causes.items()))
    return replace(state, causes=causes, acknowledged=tuple(sorted(acknowledged - _MOMENTARY))), tuple(reasons)


def _of_signals(state: BreakerState, signals: Signals, config: BreakerConfig, now: datetime) -> Causes:
    causes: Causes = {}
    if signals.scheduler_error is not None:
        causes["scheduler"] = None, f"cannot read the scheduler: {signals.scheduler_error}"
    elif signals.read_at is None:
        causes["scheduler"] = None, "the scheduler was not read"
    elif now - signals.read_at > config.max_read_age:
        causes["scheduler"] = None, f"the scheduler was last read at {signals.read_at:%Y-%m-%d %H:%M} UTC"
    if signals.model_fitted_at is None:
        causes["model"] = None, "the age of the model is unknown"
    elif now - signals.model_fitted_at > config.max_model_age:
        days = (now - signals.model_fitted_at) / timedelta(days=1)
        max_days = config.max_model_age / timedelta(days=1)
        causes["model"] = (
            None,
            f"the model's data ended {quantity(round(days), 'day')} ago, at most {max_days:.0f} allowed",
        )
    for channel in signals.missing_channels:
        causes[f"channel {channel}"] = None, f"channel {channel} of the model no longer arrives"
    if state.decided_at is not None and state.decided_at - now > config.clock_slack:
        causes["clock"] = None, f"the clock went backwards from {state.decided_at:%Y-%m-%d %H:%M} UTC"
    return causes


def _of_listing(
    state: BreakerState, listed: Sequence[ObservedNode], nodes: Sequence[ObservedNode], config: BreakerConfig
) -> Causes:
    causes: Causes = {}
    if state.nodes - len(listed) > config.max_shrunk * state.nodes and state.nodes - len(listed) > 1:
        causes["listing"] = None, f"the number of listed nodes with known GPUs fell from {state.nodes} to {len(listed)}"
    down = sum(observed.node.down and observed.node.resting is None for observed in nodes)
    if down >= config.min_risky and down > config.max_down * len(nodes):
        causes["down"] = None, f"{down} of {len(nodes)} nodes are down: probably a failure of the control plane"
    blind = sum(not observed.node.readable for observed in nodes)
    if blind > 1 and blind > config.max_unreadable * len(nodes):
        causes["unreadable"] = None, f"the state of {blind} of {len(nodes)} nodes cannot be read"
    return causes


def _of_group(name: str, members: list[ObservedNode], earlier: tuple[RiskyShare, ...], config: BreakerConfig) -> Causes:
    causes: Causes = {}
    group = name or None
    scope_text = f"group {name}" if name else "the fleet"
    total = len(members)
    risky = changed = units = missing = without = 0
    for observed in members:
        risky += observed.risky
        changed += observed.changed
        if not observed.node.down and observed.node.resting is None:
            unit_count = len(observed.node.units)
            units += unit_count
            missing += unit_count - observed.known
            without += observed.known < unit_count
    usual = median(share.share for share in earlier) if len(earlier) >= config.min_history else None
    if risky >= config.min_risky:
        sentence = f"{risky} of {total} nodes of {scope_text} are at risk at the same time"
        if risky > config.max_risky * total:
            causes[f"risky {name}"] = group, f"{sentence}, at most {percent(config.max_risky)} allowed"
        elif usual is not None and risky > max(config.jump * usual, config.min_jump) * total:
            causes[f"risky {name}"] = group, f"{sentence}, usually {percent(usual)}"
    if without > 1 and missing > config.max_missing * units:
        causes[f"missing {name}"] = group, f"{missing} of {units} units of {scope_text} have no valid score"
    if name and changed > 1 and changed > config.max_changed * total:
        hours = config.settle / timedelta(hours=1)
        reason = f"driver or exporter changed on {changed} of {total} nodes of {scope_text} in the last {hours:g} h"
        causes[f"software {name}"] = group, reason
    return causes
