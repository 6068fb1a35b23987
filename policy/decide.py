"""One decision about the whole fleet: a pure function of observations, remembered state and time."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from operator import attrgetter

from policy.breaker import RISK, BreakerState, ObservedNode, watch
from policy.budget import Ask, grant, known_starts
from policy.config import PolicyConfig
from policy.episodes import Alert, AlertOutcome
from policy.fleet import Fact, Level, NodeView, Signals, notices_of
from policy.ladder.cost_benefit import hours_of
from policy.ladder.requests import FleetRisk, after_probes, candidates_of, requests_of
from policy.ladder.rungs import mean_prices
from policy.limits import Case, cap, limit, limit_by_cost_benefit
from policy.maintenance import maintained, observed
from policy.node_tier.hard_rules import hits_of
from policy.node_tier.hysteresis import Thresholds, changed, read_node
from policy.node_tier.node_assessment import assess, removals_of
from policy.plan import (
    VERBS,
    Action,
    LastRequest,
    NodeDecision,
    NodeState,
    Plan,
    PolicyState,
    RungRequest,
    Verb,
    not_after,
)
from policy.stages import FIXED, Stage, StageState, advance_stage
from policy.tiers import TIERS, Tier

_NEW_NODE = NodeState()
_TICK = timedelta(milliseconds=1)
# An instant equal to now was recorded by this very decision.

_COMPARED_ELSEWHERE = frozenset({"tier", "shares", "released_at", "reset_at", "maintenance", "seen_until"})
# Fields that are compared for equality, dropped when they are in the future, or lie ahead.
_LEVEL_OF_TIER: Mapping[str, Level] = {
    "clear": Level.NONE, "watch": Level.PUBLISH, "elevated": Level.AVOID, "high": Level.DRAIN,
}  # fmt: skip


def decide(
    fleet: Sequence[NodeView],
    state: PolicyState,
    signals: Signals,
    config: PolicyConfig,
    now: datetime,
    others: Sequence[ObservedNode] = (),
) -> Plan:
    """Plan actions for a fleet.

    ``fleet``: every node, as read just now, in any order. Nodes without units are ignored.
    ``state``: state of the previous plan; empty at first, or if it was lost.
    ``now``: aware; no other clock is read.
    ``others``: further nodes, which only budgets and breaker count: unmarked, below ``watch``, in groups with pinned
    stages. No state is kept for them.
    Raises ``ValueError`` if two nodes share a name, or ``now`` has no zone.

    Deterministic and idempotent: with the plan's own state, the same fleet and the same time, it returns the same
    actions and state; after the actions are carried out, it returns none.

    A node's target starts at the level of its tier. Opt-outs, other owners, an operator's removal of our taints, the
    group's stage, the hold-out, the kill switch, the breaker, the budget and the cost-benefit of a drain may lower it.
    Taints above the target are released; no limit postpones a release. An open breaker and an exhausted budget block
    only new actions, so tainted nodes keep their taints. Release-all leaves the breaker unchanged.
    """
    if now.tzinfo is None:
        raise ValueError(f"now is {now}: give a time with a zone")
    state = _past(state, now)
    nodes = sorted((_assessed(node, state, config, now) for node in fleet if node.units), key=attrgetter("name"))
    if len({node.name for node in nodes}) != len(nodes):
        repeated = next(a.name for a, b in pairwise(nodes) if a.name == b.name)
        raise ValueError(f"node {repeated} was given twice: give each node once, under one name")
    cases = [_open(node, state, config, now, releases_all=signals.release_all) for node in nodes]
    # Release-all permits no new action and may be set while scores are missing. Evaluating the breaker then would open
    # it, and it would still be open when operation resumes. After a lost state, this is not yet the first decision:
    # otherwise the next one would process an old manual reset.
    breaker, openings = replace(state.breaker, decided_at=state.breaker.decided_at and now), tuple[str, ...]()
    if not signals.release_all:
        breaker, openings = _breaker(cases, others, state, signals, config, now)
    stages, moves = _stages(cases, state, signals.outcomes, config, now)
    reasons = ["release-all is set: all predrain markers are removed"] if signals.release_all else []
    reasons += ["the kill switch is set: no new actions"] if signals.kill else []
    reasons += notices_of(fleet)
    removals = removals_of([(case.node, case.assessment) for case in cases if case.assessment.marker_removed])
    for case in cases:
        if case.wanted or case.level:  # otherwise there is nothing to limit
            limit(case, stages, breaker, signals, config, now, removals.get(case.node.name, ""))
            limit_by_cost_benefit(case, config, now)
    granted = grant(
        [*nodes, *(other.node for other in others)],
        [Ask(case.node.name, case.precedence, case.assessment.state.episode or now) for case in cases if case.asks],
        known_starts(nodes, state.starts, now),
        config.budget,
        now,
        {name for name, known in state.nodes.items() if known.released_at == now},
    )
    for case in cases:
        if case.asks and case.node.name in granted.refused:
            case.lower(Level.AVOID, f"over budget, soft taint only: {granted.refused[case.node.name]}")
        if case.target:
            cap(case, config)  # breaker, budget and cost-benefit fall back to a soft taint, which rungs may not allow
    actions = [(case, action) for case in cases if case.target or case.level for action in _actions(case, config, now)]
    actions.sort(key=lambda planned: (VERBS.index(planned[1].verb), -planned[0].urgency, planned[1].node))
    candidates = candidates_of(cases, stages, breaker, signals, state, config, now)
    requests, stopped, checkpoints = requests_of(
        candidates, FleetRisk.of(candidates), signals, state.checkpoints, config, now
    )
    requested = {request.node: request for request in requests}
    remembered, alerts = _remember(cases, state, config, now, requested)
    return Plan(
        now=now,
        actions=tuple(action for _, action in actions),
        nodes={
            case.node.name: _decision(case, requested.get(case.node.name))
            for case in cases
            if case.assessment.tier != "clear" or case.level or case.node.name in requested
        },
        over_budget=dict(sorted(granted.refused.items())),
        uses=granted.uses,
        open_causes=breaker.causes,
        stages=stages,
        alerts=tuple(alerts),
        reasons=(*reasons, *openings, *moves),
        state=PolicyState(remembered, granted.starts, stages, breaker, checkpoints),
        requests=tuple(requests),
        stopped=stopped,
    )


def carried_out(state: PolicyState, actions: Iterable[Action]) -> PolicyState:
    """Record the actions that the scheduler has confirmed.

    Without this, only the adapter can detect a taint that an operator removes before the next decision
    (:attr:`policy.fleet.NodeView.marker_removed`).

    ``actions``: the confirmed actions of the plan, in order.
    Returns: state for the next decision, whose fleet must be read after the last of these writes.
    """
    nodes = dict(state.nodes)
    for action in actions:
        known = nodes.get(action.node, _NEW_NODE)
        highest = action.to if action.verb == "release" else max(known.seen, action.to)
        nodes[action.node] = changed(known, seen=highest, seen_until=action.expires_at or known.seen_until)
    return replace(state, nodes=nodes)


def _past(state: PolicyState, now: datetime) -> PolicyState:
    """Return the state without instants in the future, which a clock that was ahead recorded."""
    decided_at = state.breaker.decided_at
    if decided_at is not None and decided_at <= now:
        return state
    earlier: PolicyState = not_after(state, now if decided_at is None else now - _TICK, _COMPARED_ELSEWHERE)
    return replace(earlier, breaker=replace(earlier.breaker, decided_at=decided_at))  # the breaker reports the clock


def _assessed(node: NodeView, state: PolicyState, config: PolicyConfig, now: datetime) -> NodeView:
    known = state.nodes.get(node.name)
    node = after_probes(node, config.probes, now)
    return maintained(node, config.maintenance, None if known is None else known.maintenance, now)


def _open(node: NodeView, state: PolicyState, config: PolicyConfig, now: datetime, *, releases_all: bool) -> Case:
    thresholds = Thresholds(config.thresholds_of(node, now), config.hysteresis)
    previous, reading = state.nodes.get(node.name), read_node(node, config.node_risk, now)
    assessment = assess(
        node, reading, previous, thresholds, config.node_risk, config.rules, now, releases_all=releases_all
    )
    level = _LEVEL_OF_TIER[assessment.tier]
    return Case(node, assessment, level, level, list(assessment.reasons))


def _breaker(
    cases: list[Case],
    others: Sequence[ObservedNode],
    state: PolicyState,
    signals: Signals,
    config: PolicyConfig,
    now: datetime,
) -> tuple[BreakerState, tuple[str, ...]]:
    settle = config.breaker.settle
    observed = [
        ObservedNode(
            case.node,
            case.assessment.instant in ("elevated", "high"),
            len(case.assessment.reading.known),
            case.assessment.changed_within(settle, now),
            case.assessment.by_risk not in ("elevated", "high"),
            tuple(_reports(case, config, now)) if case.assessment.instant == "high" else (),
            case.assessment.reading.decided_at,
        )
        for case in cases
    ]
    observed += others
    newest = max((node.decided_at for node in observed if node.decided_at is not None), default=None)
    return watch(state.breaker, observed, signals, newest, config.breaker, now)


def _reports(case: Case, config: PolicyConfig, now: datetime) -> Iterator[Fact]:
    """Return the evidence for ``high`` on a node: every fact, because an older one may be outside of a burst."""
    for hit in hits_of(case.node, config.rules, now) if case.assessment.rules else ():
        if hit.rule.tier == "high":
            yield Fact(hit.rule.fact, hit.seen_at)
    if case.assessment.by_risk == "high":
        yield Fact(RISK, case.assessment.state.episode or now)


def _stages(
    cases: list[Case], state: PolicyState, outcomes: Sequence[AlertOutcome], config: PolicyConfig, now: datetime
) -> tuple[dict[str, StageState], tuple[str, ...]]:
    members: dict[str, list[Case]] = {}
    for case in cases:
        members.setdefault(case.node.group_key, []).append(case)
    of_group: dict[str, list[AlertOutcome]] = {group: [] for group in members}
    for outcome in outcomes:
        if outcome.alert.group in of_group:
            of_group[outcome.alert.group].append(outcome)
    stages = dict(state.stages)
    reasons: list[str] = []
    for group, listed in sorted(of_group.items()):
        needed = FIXED if group in config.stages.pinned else _needed(members[group], config, now)
        stages[group], moved = advance_stage(group, stages.get(group), listed, config.stages, now, needed)
        reasons += moved
    return dict(sorted(stages.items())), tuple(reasons)


def _needed(cases: list[Case], config: PolicyConfig, now: datetime) -> Mapping[Stage, float]:
    """Return the precision that each stage requires in a group; fixed values if risks or jobs are unknown."""
    risks = [case.assessment.risk for case in cases if case.assessment.risk is not None]
    soft = max(FIXED["soft"] if not risks else math.fsum(risks) / len(risks), 1e-6)
    if not any(case.node.jobs for case in cases):
        return {"soft": soft, "hard": FIXED["hard"]}
    costs = config.cost_benefit
    nodes = [(case.node, len(case.node.units)) for case in cases]
    priced = ((gpus, hours_of(gpus, node.jobs, config.horizon, costs, now)) for node, gpus in nodes)
    break_even = mean_prices(priced, costs, config.probes)[config.hard_rung].break_even
    return {"soft": soft, "hard": 1.0 if break_even is None else break_even}


def _actions(case: Case, config: PolicyConfig, now: datetime) -> list[Action]:
    node, assessment, target = case.node, case.assessment, case.target
    marks, level = node.marks, node.marks.level
    if not node.readable or node.unwritable is not None:
        return []
    verbs: list[tuple[Verb, Level]] = []
    if target < level:
        bare = target is Level.AVOID and not marks.soft  # no soft taint exists below the hard one
        published_level = Level.PUBLISH if marks.published else Level.NONE
        verbs.append(("release", published_level if bare else target))
    if target >= Level.PUBLISH and not case.mute and _republish(case, config, now):
        verbs.append(("publish", Level.PUBLISH))
    if target is Level.AVOID and not marks.soft and level != Level.AVOID:
        verbs.append(("avoid", Level.AVOID))
    if target.hard and not level.hard:
        verbs.append(("swap", Level.SWAP))
    if target is Level.DRAIN and level is not Level.DRAIN:
        verbs.append(("drain", Level.DRAIN))
    tier: Tier = "unknown" if assessment.tier == "clear" and not assessment.reading.known else assessment.tier
    return [
        Action(
            verb, node.name, tier, to, assessment.risk, None if verb == "release" else assessment.expires_at,
            case.ordered_reasons,
        )
        for verb, to in verbs
    ]  # fmt: skip


def _republish(case: Case, config: PolicyConfig, now: datetime) -> bool:
    published, ends = case.node.marks.published, case.assessment.expires_at
    if ends is None:
        return False
    if published is None or published.tier != case.assessment.tier or ends < published.expires_at:
        return True
    is_near = published.expires_at - now < config.renew
    return ends > published.expires_at and (is_near or ends - published.expires_at >= config.renew)


def _remember(
    cases: list[Case], state: PolicyState, config: PolicyConfig, now: datetime, requested: Mapping[str, RungRequest]
) -> tuple[dict[str, NodeState], list[Alert]]:
    remembered: dict[str, NodeState] = {}
    alerts: list[Alert] = []
    for case in cases:
        assessment = case.assessment
        node_state, maintenance = assessment.state, observed(case.node, assessment.state.maintenance, now)
        if case.node.readable:
            level = case.level
            given_back = level.hard and not case.target.hard
            instant = now if given_back or node_state.released_at == now else None
            published = case.node.marks.published
            node_state = changed(
                node_state, maintenance=maintenance, seen=level, target=case.target, released_at=instant,
                seen_until=None if published is None else published.expires_at,
            )  # fmt: skip
        else:  # its taints are unknown
            node_state = changed(node_state, maintenance=maintenance)
        request, decided_at = requested.get(case.node.name), assessment.reading.decided_at
        if request is not None and request.rung == "probe" and decided_at is not None:
            node_state = changed(node_state, probed=LastRequest(now, request.risk, decided_at))
        elif node_state.probed is not None and now - node_state.probed.at >= config.probes.base_every:
            node_state = changed(node_state, probed=None)  # due again regardless
        if TIERS.index(assessment.tier) > max(TIERS.index(node_state.alerted), TIERS.index("watch")):
            node_state = replace(node_state, alerted=assessment.tier)
            unit, by_rule = assessment.blamed
            instant = now if by_rule else node_state.tier.counted or now
            group, node = case.node.group_key, case.node.name
            alerts.append(Alert(unit, group, assessment.tier, instant, config.horizon, node, by_rule, case.held_out))
        if node_state != _NEW_NODE:
            remembered[case.node.name] = node_state
    current_nodes = {case.node.name for case in cases}
    for name in state.nodes.keys() - current_nodes:
        since = state.nodes[name].absent_since or now
        if now - since < config.forget:
            remembered[name] = replace(state.nodes[name], absent_since=since)
    return dict(sorted(remembered.items())), alerts


def _decision(case: Case, request: RungRequest | None) -> NodeDecision:
    assessment = case.assessment
    return NodeDecision(
        node=case.node.name, group=case.node.group_key, tier=assessment.tier, risk=assessment.risk,
        rules=tuple(hit.reason for hit in assessment.rules), wanted=case.wanted, target=case.target,
        reasons=case.ordered_reasons, worth=case.cost_benefit, held_out=case.held_out, expires_at=assessment.expires_at,
        remedy=assessment.remedy, request=request,
    )  # fmt: skip
