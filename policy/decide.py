"""One decision about the whole fleet: a pure function of what was seen, what is remembered, and the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise

from policy.alert_outcomes import Alert, Outcome
from policy.assess import assess
from policy.breaker import BreakerState, ObservedNode, watch
from policy.budget import Ask, Member, Start, grant
from policy.config import PolicyConfig
from policy.fleet import Level, NodeView, Signals
from policy.hysteresis import Thresholds
from policy.limits import Case, limit, urgency, weigh
from policy.plan import VERBS, Action, NodeDecision, Plan, Verb
from policy.stages import StageState, advance_stage
from policy.state import NodeState, PolicyState
from policy.tiers import TIERS, Tier

_WANTED: Mapping[str, Level] = {
    "clear": Level.NONE, "watch": Level.PUBLISHED, "elevated": Level.SOFT, "high": Level.DRAINED,
}  # fmt: skip


def decide(
    fleet: Sequence[NodeView], state: PolicyState, signals: Signals, config: PolicyConfig, now: datetime
) -> Plan:
    """Decide about a fleet.

    ``fleet``: every node, as read just now, in any order. Nodes without units are passed over.
    ``state``: of the decision before; an empty one to begin with, or when it was lost.
    ``now``: Aware; the only time there is.
    Returns: the same for the same inputs. Given the plan's own state, the same fleet and the same time, it gives the
    same actions and the same state again; once the actions are carried out, none.
    Raises ``ValueError`` if two nodes share a name, or the time has no zone.

    A node's target begins with what its tier asks for and is lowered in turn by: opt-outs and other owners, a person's
    undoing, its group's stage, the hold-out, the kill switch, the breaker, the budget, and what a drain is worth. What
    stands above the target is released, and nothing of the list holds that back: it can only lower a target further.
    A release of everything leaves the breaker as it was.
    Nodes that stand marked already keep their marks through a full budget and an open breaker, for these forbid what is
    new.
    """
    if now.tzinfo is None:
        raise ValueError(f"now is {now}: give a time with a zone")
    nodes = sorted((node for node in fleet if node.units), key=lambda node: node.name)
    if len({node.name for node in nodes}) != len(nodes):
        twice = next(a.name for a, b in pairwise(nodes) if a.name == b.name)
        raise ValueError(f"node {twice} was given twice: give each node once, under its own name")
    cases = [_open(node, state, config, now) for node in nodes]
    # Nothing new follows a release of everything, and whoever asks for it may well do so without scores: to look at the
    # fleet then would open the breaker, and keep it open when they go on.
    breaker, reasons = (state.breaker, ()) if signals.release_all else _breaker(cases, state, signals, config, now)
    stages, moved = _stages(nodes, state, signals.outcomes, config, now)
    reasons = (*_switches(signals), *reasons, *moved)
    for case in cases:
        limit(case, stages, breaker, signals, config, now)
    granted = grant(
        [Member(case.node.name, case.node.scopes, case.node.lost is not None) for case in cases],
        [Ask(case.node.name, urgency(case), _episode(case, now)) for case in cases if case.asks],
        _starts(nodes, state, now),
        config.budget,
        now,
    )
    for case in cases:
        if case.asks and case.node.name in granted.refused:
            case.lower(Level.SOFT, f"over budget, so only softly tainted: {granted.refused[case.node.name]}")
        weigh(case, config, now)
    actions = [(case, action) for case in cases for action in _actions(case, config, now)]
    actions.sort(key=lambda each: (VERBS.index(each[1].verb), -urgency(each[0]), each[1].node))
    remembered, alerts = _remember(cases, state, config, now)
    return Plan(
        now=now,
        actions=tuple(action for _, action in actions),
        nodes={case.node.name: _decision(case) for case in cases if _tells(case)},
        over_budget=dict(sorted(granted.refused.items())),
        uses=granted.uses,
        open_causes=breaker.causes,
        stages=stages,
        alerts=tuple(alerts),
        reasons=reasons,
        state=PolicyState(remembered, granted.starts, stages, breaker),
    )


def carried_out(state: PolicyState, actions: Iterable[Action]) -> PolicyState:
    """Take note of what the scheduler has confirmed.

    ``actions``: those of the plan's that were confirmed, in their order.
    Returns: for the next decision, whose fleet must have been read after the last of these writes. Without this a
    person who takes a mark off before the next decision goes unnoticed here, and only the adapter can tell
    (:attr:`policy.fleet.NodeView.undone`).
    """
    nodes = dict(state.nodes)
    for action in actions:
        known = nodes.get(action.node, NodeState())
        seen = action.to if action.verb == "release" else max(known.seen, action.to)
        nodes[action.node] = replace(known, seen=seen)
    return replace(state, nodes=nodes)


def _open(node: NodeView, state: PolicyState, config: PolicyConfig, now: datetime) -> Case:
    thresholds = Thresholds(config.thresholds_of(node, now), config.hysteresis)
    before = state.nodes.get(node.name)
    assessment = assess(node, before, thresholds, config.node_risk, config.rules, now)
    wanted = _WANTED[assessment.tier]
    return Case(node, assessment, wanted, wanted, list(assessment.reasons))


def _breaker(
    cases: list[Case], state: PolicyState, signals: Signals, config: PolicyConfig, now: datetime
) -> tuple[BreakerState, tuple[str, ...]]:
    settle = config.breaker.settle
    looked = [
        ObservedNode(
            case.node,
            TIERS.index(case.assessment.instant) >= TIERS.index("elevated"),
            len(case.assessment.reading.known),
            case.assessment.changed_within(settle, now),
        )
        for case in cases
    ]
    times = [case.assessment.reading.decided_at for case in cases]
    newest = max((time for time in times if time is not None), default=None)
    return watch(state.breaker, looked, signals, newest, config.breaker, now)


def _stages(
    nodes: list[NodeView], state: PolicyState, outcomes: Sequence[Outcome], config: PolicyConfig, now: datetime
) -> tuple[dict[str, StageState], tuple[str, ...]]:
    of_group: dict[str, list[Outcome]] = {node.group_key: [] for node in nodes}
    for each in outcomes:
        if each.alert.group in of_group:
            of_group[each.alert.group].append(each)
    stages = dict(state.stages)
    reasons: list[str] = []
    for group, listed in sorted(of_group.items()):
        stages[group], why = advance_stage(group, stages.get(group), listed, config.stages, now)
        reasons += why
    return dict(sorted(stages.items())), tuple(reasons)


def _switches(signals: Signals) -> tuple[str, ...]:
    reasons = ("release all: everything of ours is taken off",) if signals.release_all else ()
    return (*reasons, "the kill switch is on: nothing new anywhere") if signals.kill else reasons


def _episode(case: Case, now: datetime) -> datetime:
    return case.assessment.state.episode or now


def _starts(nodes: list[NodeView], state: PolicyState, now: datetime) -> list[Start]:
    # What stands on the nodes speaks where the state was lost.
    known = {start.node for start in state.starts}
    starts = list(state.starts)
    for node in nodes:
        since = node.marks.hard_since
        if since is not None and since <= now and node.name not in known:
            starts.append(Start(node.name, since, since, node.scopes))
    return starts


def _actions(case: Case, config: PolicyConfig, now: datetime) -> list[Action]:
    node, assessment, target = case.node, case.assessment, case.target
    marks, level = node.marks, node.marks.level
    if not node.readable:
        return []
    verbs: list[tuple[Verb, Level]] = []
    if target < level:
        verbs.append(("release", target))
    if target >= Level.PUBLISHED and not case.mute and _republish(case, config, now):
        verbs.append(("publish", Level.PUBLISHED))
    if target is Level.SOFT and not marks.soft and level != Level.SOFT:
        verbs.append(("soft_taint", Level.SOFT))
    if target.hard and not level.hard:
        verbs.append(("taint", Level.TAINTED))
    if target is Level.DRAINED and level is not Level.DRAINED:
        verbs.append(("drain", Level.DRAINED))
    tier: Tier = "unknown" if assessment.tier == "clear" and not assessment.reading.known else assessment.tier
    return [
        Action(
            verb=verb,
            node=node.name,
            tier=tier,
            to=to,
            risk=assessment.risk,
            expires_at=None if verb == "release" else assessment.expires_at,
            reasons=case.ordered_reasons,
            worth=case.worth,
            units=() if verb == "release" else assessment.units,
        )
        for verb, to in verbs
    ]


def _republish(case: Case, config: PolicyConfig, now: datetime) -> bool:
    published, ends = case.node.marks.published, case.assessment.expires_at
    if ends is None:
        return False
    if published is None or published.tier != case.assessment.tier or ends < published.expires_at:
        return True
    near = published.expires_at - now < config.renew
    return ends > published.expires_at and (near or ends - published.expires_at >= config.renew)


def _remember(
    cases: list[Case], state: PolicyState, config: PolicyConfig, now: datetime
) -> tuple[dict[str, NodeState], list[Alert]]:
    remembered: dict[str, NodeState] = {}
    alerts: list[Alert] = []
    for case in cases:
        assessment, level = case.assessment, case.node.marks.level
        kept = replace(assessment.state, seen=level, target=case.target)
        if not case.node.readable:
            kept = assessment.state  # its marks are not known
        if TIERS.index(assessment.tier) > max(TIERS.index(kept.alerted), TIERS.index("watch")):
            kept = replace(kept, alerted=assessment.tier)
            unit, by_rule = assessment.blamed
            alerts.append(
                Alert(
                    unit,
                    case.node.group_key,
                    assessment.tier,
                    assessment.alerted_at(now),
                    config.horizon,
                    by_rule,
                    case.held_out,
                )
            )
        if kept != NodeState():
            remembered[case.node.name] = kept
    here = {case.node.name for case in cases}
    for name, each in state.nodes.items():
        if name in here:
            continue
        since = min(each.absent_since or now, now)
        if now - since < config.forget:
            remembered[name] = replace(each, absent_since=since)
    return dict(sorted(remembered.items())), alerts


def _tells(case: Case) -> bool:
    assessment = case.assessment
    return bool(assessment.tier != "clear" or case.node.marks.level)


def _decision(case: Case) -> NodeDecision:
    assessment = case.assessment
    return NodeDecision(
        node=case.node.name,
        group=case.node.group_key,
        tier=assessment.tier,
        risk=assessment.risk,
        rules=tuple(hit.words for hit in assessment.rules),
        wanted=case.wanted,
        target=case.target,
        reasons=case.ordered_reasons,
        worth=case.worth,
        held_out=case.held_out,
        expires_at=assessment.expires_at,
    )
