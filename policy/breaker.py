"""The breaker: what freezes new hard actions, for how long, and why. It never holds a release back."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from statistics import median
from typing import Annotated

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime, PositiveTime, Share
from policy.fleet import Fact, NodeView, Signals

RISK = "a high risk"
"""What a node reports whose risk reached ``high``; seen when its episode began."""

TEST = "diagnostic_failed"
"""Diagnostics that run everywhere find many sick nodes together: only neighbours of a node count as a burst."""

_NAMED = 3


@checked(frozen=True, slots=True)
class CommonCauseConfig:
    """When evidence of several nodes is a burst.

    ``min_nodes``: fewer are chance.
    ``anywhere``: from one node of a burst to the next, anywhere in the fleet.
    ``nearby``: likewise, among the nodes of one job, rack or NVLink domain.
    """

    min_nodes: PositiveInt = 3
    anywhere: NonNegativeTime = timedelta(seconds=30)
    nearby: NonNegativeTime = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Burst:
    """Evidence with one cause; ``nodes``: those that have no other evidence, by name."""

    key: str
    message: str
    nodes: tuple[str, ...]


_Seen = tuple[datetime, str, Fact]


def bursts(nodes: Sequence[tuple[NodeView, Sequence[Fact]]], config: CommonCauseConfig) -> tuple[Burst, ...]:
    """Find the bursts among the reports of nodes; a node with a report that is in none of them has its own evidence.

    Risks rise together in a sick model, too, which the breaker sees by itself: they only make a burst where most nodes
    of a place show one.
    """
    if sum(bool(reports) for _, reports in nodes) < config.min_nodes:
        return ()
    reported: defaultdict[tuple[str, str], list[_Seen]] = defaultdict(list)
    onsets = [(node, _onsets(reports, config.nearby)) for node, reports in nodes if reports]
    for node, reports in onsets:
        for scope in node.scopes:
            if scope[0] in _SCOPES:
                reported[scope] += [(report.seen_at, node.name, report) for report in reports]
    places = {scope: seen for scope, seen in reported.items() if len(seen) >= config.min_nodes}
    near = places.keys() - {("fleet", "")}  # only a chain of risks needs the size of its place, and the fleet has none
    sizes = Counter([scope for node, _ in nodes for scope in node.scopes if scope in near] if near else ())
    chains: list[tuple[tuple[str, str], list[_Seen]]] = []
    for scope, seen in places.items():
        anywhere = scope[0] == "fleet"
        for risks in (False, True):
            chosen = [one for one in seen if (one[2].name == RISK) is risks and not (anywhere and one[2].name in _NEAR)]
            least = max(config.min_nodes, sizes[scope] // 2 + 1 if risks else 0)
            gap = config.anywhere if anywhere else config.nearby
            chains += [(scope, chain) for chain in _chains(chosen, gap) if len({name for _, name, _ in chain}) >= least]
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
_NEAR = (RISK, TEST)


def _onsets(reports: Sequence[Fact], gap: timedelta) -> list[Fact]:
    """Leave out what follows a report: a node that continues reporting must not tie others' reports together."""
    reports_left: list[Fact] = []
    last: dict[bool, datetime] = {}
    for report in sorted(reports, key=lambda report: report.seen_at):
        of_risk = report.name == RISK
        if of_risk not in last or report.seen_at - last[of_risk] > gap:
            reports_left.append(report)
        last[of_risk] = report.seen_at
    return reports_left


def _chains(seen: Iterable[_Seen], gap: timedelta) -> Iterator[list[_Seen]]:
    chain: list[_Seen] = []
    for one in sorted(seen, key=lambda one: one[:2]):
        if chain and one[0] - chain[-1][0] > gap:
            yield chain
            chain = []
        chain.append(one)
    if chain:
        yield chain


def _burst(scope: tuple[str, str], chain: Sequence[_Seen], nodes: tuple[str, ...]) -> Burst:
    kinds: Mapping[str, None] = dict.fromkeys(report.name for _, _, report in chain)
    facts = ", ".join(sorted(kinds)[:_NAMED])
    where = "of the fleet" if scope[0] == "fleet" else f"of {scope[0]} {scope[1]}"
    first, count = chain[0][0], len({name for _, name, _ in chain})
    message = (
        f"{count} nodes {where} report {facts} together, from {first:%Y-%m-%d %H:%M} UTC, and none has other evidence: "
        "a common cause"
    )
    return Burst(f"together {scope[0]} {scope[1]} {first:%Y-%m-%dT%H}", message, nodes)


@checked(frozen=True, slots=True)
class BreakerConfig:
    """When it opens.

    ``max_risky``: a larger share of nodes at risk, in the fleet or in a group, is more likely a broken model.
    ``jump``: so many times the usual share (the median of what was seen), likewise, and
    ``min_jump``: a share of at least this: a handful in a large fleet is chance.
    ``min_risky``: fewer nodes never open it, so that one bad node of three does not.
    ``history``, ``min_history``: decision times the usual share is taken from, and how many it takes.
    ``max_missing``: largest share of units without a valid score, of nodes that are neither down nor at rest.
    ``max_down``: largest share of nodes that are down: beyond, the control plane is sick and not the nodes.
    ``max_unreadable``: largest share of nodes whose state could not be read.
    ``max_changed``: largest share of a group's nodes whose driver or exporter changed within ``settle``.
    ``settle``: how long a prediction on a node with new software is not acted on.
    ``max_shrunk``: largest share of the nodes that may be gone from one listing to the next.
    ``max_model_age``: since the end of the model's training data.
    ``max_read_age``: since the scheduler was read.
    ``clock_slack``: how far the clock may go back.
    ``quiet``: a cause ends when it was not seen for so long.
    ``common_cause``: when evidence of several nodes is one piece of evidence, on which none of them is taken out.
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
    """Why the breaker is open.

    ``group``: the group that is frozen; None: the fleet.
    ``nodes``: the nodes that are frozen, where it is not all of them.
    """

    group: str | None
    message: str
    first_at: datetime
    last_at: datetime
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RiskyShare:
    """The share of nodes at risk at one decision time."""

    decided_at: datetime
    share: float


@dataclass(frozen=True, slots=True)
class BreakerState:
    """What the breaker remembers.

    ``causes``: those that hold, seen now or less than the quiet time ago.
    ``acknowledged``: those that a person let pass, until they have been gone.
    ``shares``: by group, ``""`` for the fleet.
    ``nodes``: how many nodes were listed that were not at rest.
    ``reset_at``, ``decided_at``: the last reset by hand that was followed; when the last decision was made.
    """

    causes: Mapping[str, BreakerCause] = field(default_factory=dict)
    acknowledged: tuple[str, ...] = ()
    shares: Mapping[str, tuple[RiskyShare, ...]] = field(default_factory=dict)
    nodes: int = 0
    reset_at: datetime | None = None
    decided_at: datetime | None = None

    def frozen(self, group: str, node: str = "") -> tuple[str, ...]:
        """Give what freezes a group, or a node of it, in words; nothing if nothing does."""
        return tuple(
            cause.message
            for _, cause in sorted(self.causes.items())
            if (node in cause.nodes if cause.nodes else cause.group in (None, group))
        )


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """What was found on one node of the fleet.

    ``risky``: tier ``elevated`` or above now, by risk or rule, before any hysteresis.
    ``by_rule``: that only by rules.
    ``reports``: what asks for ``high``: facts, and :data:`RISK`.
    ``known``: units with a valid score.
    ``changed``: driver or exporter changed within ``settle``.
    """

    node: NodeView
    risky: bool
    known: int
    changed: bool
    by_rule: bool = False
    reports: tuple[Fact, ...] = ()


Causes = dict[str, tuple[str | None, str]]
"""The frozen group (None: the fleet) and the reason, by the key of the cause."""

_MOMENTARY = frozenset({"listing", "clock"})
"""Causes that compare with the decision before, so that they are seen once."""


def watch(
    state: BreakerState,
    nodes: Sequence[ObservedNode],
    signals: Signals,
    decided_at: datetime | None,
    config: BreakerConfig,
    now: datetime,
) -> tuple[BreakerState, tuple[str, ...]]:
    """Look at the fleet as a whole.

    ``nodes``: with units only: nodes without GPUs would water every share down. Those at rest have no current scores,
    and are in no share; but they are listed, so that a fleet that falls asleep does not look like one that lost nodes.
    """
    listed, nodes = nodes, [observed for observed in nodes if observed.node.counted]
    together = bursts([(observed.node, observed.reports) for observed in nodes], config.common_cause)
    # of a burst that is reported as such; its nodes must not become what is usual either
    counted = {name for burst in together for name in burst.nodes}
    if counted:
        nodes = [
            replace(observed, risky=False) if observed.by_rule and observed.node.name in counted else observed
            for observed in nodes
        ]
    present: Causes = {**_of_signals(state, signals, config, now), **_of_listing(state, listed, nodes, config)}
    groups: dict[str, list[ObservedNode]] = {"": list(nodes)}
    for observed in nodes:
        groups.setdefault(observed.node.group_key, []).append(observed)
    present |= {burst.key: (None, burst.message) for burst in together}
    shares = {name: tuple(share for share in seen if share.decided_at <= now) for name, seen in state.shares.items()}
    for name, members in groups.items():
        seen = shares.get(name, ())
        # Without the decision time at hand, so that looking at it twice gives the same.
        past = tuple(share for share in seen if decided_at is None or share.decided_at < decided_at)[-config.history :]
        causes = _of_group(name, members, past, config)
        present.update(causes)
        new = decided_at is not None and (not seen or decided_at > seen[-1].decided_at)
        # What opened the breaker does not become what is usual.
        if decided_at is not None and new and members and f"risky {name}" not in causes:
            share = RiskyShare(decided_at, sum(observed.risky for observed in members) / len(members))
            shares[name] = (*seen, share)[-config.history - 1 :]
    frozen = {burst.key: burst.nodes for burst in together}
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
    asked = signals.reset_breaker_at
    if asked is not None and asked <= now and (state.reset_at is None or asked > state.reset_at):
        if state.decided_at is None and now - asked > config.quiet:
            # the switch outlives the state: what was asked of an earlier one closes nothing that was not seen then
            when = f"{asked:%Y-%m-%d %H:%M} UTC"
            reasons.append(f"manual reset ignored: it was requested at {when}, before the state was lost")
        else:
            reasons += [f"breaker closed by manual reset: {cause.message}" for _, cause in sorted(causes.items())]
            causes, acknowledged = {}, set(present)
        state = replace(state, reset_at=asked)
    for key, (group, reason) in present.items():
        if key in acknowledged:
            continue
        old = causes.get(key)
        if old is None:
            reasons.append(f"breaker opened: {reason}")
        causes[key] = BreakerCause(group, reason, min(old.first_at, now) if old else now, now, frozen.get(key, ()))
    for key, cause in sorted(causes.items()):
        if cause.last_at > now:  # a clock went back
            causes[key] = replace(cause, last_at=now)
        elif key not in present and now - cause.last_at >= config.quiet:
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
        most = config.max_model_age / timedelta(days=1)
        causes["model"] = None, f"the model's data ended {days:.0f} days ago, at most {most:.0f} allowed"
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


def _of_group(name: str, members: list[ObservedNode], past: tuple[RiskyShare, ...], config: BreakerConfig) -> Causes:
    causes: Causes = {}
    group = name or None
    where = f"group {name}" if name else "the fleet"
    total = len(members)
    risky = changed = units = missing = without = 0
    for observed in members:
        risky += observed.risky
        changed += observed.changed
        if not observed.node.down and observed.node.resting is None:
            here = len(observed.node.units)
            units += here
            missing += here - observed.known
            without += observed.known < here
    usual = median(share.share for share in past) if len(past) >= config.min_history else None
    if risky >= config.min_risky:
        sentence = f"{risky} of {total} nodes of {where} are at risk at the same time"
        if risky > config.max_risky * total:
            causes[f"risky {name}"] = group, f"{sentence}, at most {config.max_risky:.0%} allowed"
        elif usual is not None and risky > max(config.jump * usual, config.min_jump) * total:
            causes[f"risky {name}"] = group, f"{sentence}, usually {usual:.1%}"
    if without > 1 and missing > config.max_missing * units:
        causes[f"missing {name}"] = group, f"{missing} of {units} units of {where} have no valid score"
    if name and changed > 1 and changed > config.max_changed * total:
        hours = config.settle / timedelta(hours=1)
        reason = f"driver or exporter changed on {changed} of {total} nodes of {where} in the last {hours:g} h"
        causes[f"software {name}"] = group, reason
    return causes
