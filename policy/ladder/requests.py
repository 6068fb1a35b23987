"""Requests for probes and checkpoints, on nodes that stay in service, by their expected saving and cost.

The controller (:func:`policy.decide.decide`) and the replay (:mod:`evaluation.value.probing`) share this code.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import is_
from typing import TypeVar

from foundation.text import percent
from policy.breaker import BreakerState
from policy.config import PolicyConfig
from policy.episodes import NEW_EVIDENCE, Floats
from policy.fleet import JobView, Level, NodeView, Signals, UnitView
from policy.ladder.cost_benefit import CostBenefitConfig, JobHours, Price, share_until_checkpoint
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import prices
from policy.limits import Case, is_blind
from policy.node_tier.hysteresis import changed
from policy.plan import LastRequest, PolicyState, RungRequest
from policy.stages import StageState

_HOUR = timedelta(hours=1)
_Risk = TypeVar("_Risk", float, Floats)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that a probe or checkpoint may be requested for.

    ``risk``: node risk from the currently valid scores; ``decided_at``, ``expires_at``: times of these scores.
    ``barred``: for each rung, why it may not be requested; None: it may. ``idle``: in service without a job.
    ``probed``: the last request for a probe.
    """

    node: NodeView
    risk: float
    decided_at: datetime
    expires_at: datetime
    barred: Mapping[str, str | None]
    idle: bool
    probed: LastRequest | None = None


@dataclass(frozen=True, slots=True)
class FleetRisk:
    """Mean risk of the fleet's nodes, and how many of them are ``idle``, including those being probed."""

    mean: float
    idle: int

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> "FleetRisk":
        """Count over all nodes with a known risk."""
        total = math.fsum(candidate.risk for candidate in candidates)
        return cls(total / len(candidates) if candidates else 0.0, sum(candidate.idle for candidate in candidates))


def requests_of(
    candidates: Sequence[Candidate],
    fleet: FleetRisk,
    signals: Signals,
    last_requests: Mapping[str, LastRequest],
    config: PolicyConfig,
    now: datetime,
) -> tuple[list[RungRequest], dict[str, str], Mapping[str, LastRequest]]:
    """Return the requests for nodes that stay in service, the probes to stop, and the checkpoint requests to remember.

    ``candidates``: may lack nodes for which no probe is due.
    ``last_requests``: last checkpoint requests, by ``cluster/job``.
    """
    requests: list[RungRequest] = []
    stopped: dict[str, str] = {}
    if signals.probes is not None:
        requests, stopped = probes_of(candidates, fleet, signals.probes, config.probes, config.cost_benefit, now)
    if signals.checkpoints:
        checkpoints, last_requests = checkpoints_of(candidates, last_requests, config.horizon, config.cost_benefit, now)
        requests += checkpoints
    return requests, stopped, last_requests


def candidates_of(
    cases: list[Case],
    stages: Mapping[str, StageState],
    breaker: BreakerState,
    signals: Signals,
    state: PolicyState,
    config: PolicyConfig,
    now: datetime,
) -> list[Candidate]:
    """Return the nodes with a known risk; empty if neither probes nor checkpoints can be requested."""
    if signals.probes is None and not signals.checkpoints:
        return []
    candidates = []
    for case in cases:
        risk, decided_at, node = case.assessment.reading.risk, case.assessment.reading.decided_at, case.node
        if risk is None or decided_at is None:
            continue
        bars: dict[str, str | None] = dict.fromkeys(
            ("probe", "checkpoint"), _bar(case, stages, breaker, signals, config, now)
        )
        for rung, bar in bars.items():
            if bar is None and rung not in config.rungs:
                bars[rung] = f"{rung} is not in policy.rungs"
        if max(case.level, case.target) is Level.DRAIN:
            bars["checkpoint"] = bars["checkpoint"] or "the drain requests the checkpoint"
        if case.level.hard or case.target.hard or case.held_out:
            bars["probe"] = bars["probe"] or "it is taken out of service or in the hold-out"
        idle = not node.jobs and node.why_out_of_service is None and node.resting is None
        ends = min(prediction.expires_at for prediction in case.assessment.reading.known.values())
        known = state.nodes.get(node.name)
        candidates.append(Candidate(node, risk, decided_at, ends, bars, idle, known.probed if known else None))
    return candidates


def _bar(
    case: Case,
    stages: Mapping[str, StageState],
    breaker: BreakerState,
    signals: Signals,
    config: PolicyConfig,
    now: datetime,
) -> str | None:
    """Return why nothing may be requested for a node; None if something may."""
    node, assessment = case.node, case.assessment
    stage, frozen = stages[node.group_key].stage, breaker.frozen(node.group_key, node.name)
    bars = {
        "release-all is set": signals.release_all,
        "the kill switch is set": signals.kill,
        "the state of the scheduler is stale": is_blind(signals, config, now),
        f"group {node.group_key} is in stage {stage}": stage == "shadow",
        f"{node.foreign}": node.foreign is not None,
        f"{node.unwritable}": node.unwritable is not None,
        "another client removed a predrain marker": assessment.marker_removed or node.uncordoned,
        f"the breaker is open: {'; '.join(frozen)}": bool(frozen),
        "its driver or exporter changed after the model was fitted": assessment.changed_within(
            config.breaker.settle, now
        ),
    }
    return next((why for why, holds in bars.items() if holds), None)


def probes_of(
    candidates: Sequence[Candidate],
    fleet: FleetRisk,
    running: Iterable[str],
    config: ProbeConfig,
    costs: CostBenefitConfig,
    now: datetime,
) -> tuple[list[RungRequest], dict[str, str]]:
    """Return the probes to start, riskiest first, and the ``running`` probes to stop with the reason.

    A node is probed if its risk reaches the break-even, and probed again after the configured interval, or earlier if
    its risk has doubled. At equal risks, the node whose last probe is longest ago goes first.
    """
    running = set(running)
    probed: dict[str, Candidate | None] = dict.fromkeys(sorted(running))
    probed |= {candidate.node.name: candidate for candidate in candidates if candidate.node.name in running}
    stopped = {name: why for name, candidate in probed.items() if (why := _why_stopped(candidate)) is not None}
    due: list[tuple[Candidate, timedelta | None]] = []
    price_of: dict[int, Price] = {}
    for candidate in candidates:
        risk, last = candidate.risk, candidate.probed
        rested = None if last is None or last.at == now else now - last.at
        if rested is not None and last is not None and not config.is_due(risk, rested, fleet.mean):
            if not config.is_new(risk, last.risk, fleet.mean):
                continue
            rested = None
        units = len(candidate.node.units)
        if candidate.barred["probe"] is not None or not candidate.idle or candidate.node.name in running:
            continue
        if units not in price_of:
            price_of[units] = prices(units, JobHours(), costs, config)["probe"]
        break_even = price_of[units].break_even
        if break_even is not None and risk >= break_even:
            due.append((candidate, rested))
    due.sort(key=lambda node: (-node[0].risk, node[1] is not None, -(node[1] or timedelta()), node[0].node.name))
    room = config.room(len(running), fleet.idle)
    requests = []
    for candidate, _ in due[:room]:
        name, risk, price = candidate.node.name, candidate.risk, price_of[len(candidate.node.units)]
        why = (
            f"idle at a risk of {percent(risk)}, {risk / fleet.mean:.1f} times the fleet's mean"
            if fleet.mean
            else "idle"
        )
        saves = price.expected(risk)
        requests.append(RungRequest("probe", name, risk, candidate.expires_at, saves, price.unneeded, (why,)))
    return requests, stopped


def _why_stopped(candidate: Candidate | None) -> str | None:
    if candidate is None:
        return "its risk is no longer known"
    if candidate.barred["probe"] is not None:
        return candidate.barred["probe"]
    return None if candidate.idle else "a job runs on it"


def checkpoints_of(
    candidates: Sequence[Candidate],
    last_requests: Mapping[str, LastRequest],
    horizon: timedelta,
    costs: CostBenefitConfig,
    now: datetime,
) -> tuple[list[RungRequest], dict[str, LastRequest]]:
    """Return the checkpoints to request, riskiest node first, and the requests to remember.

    A checkpoint is requested if the job's unsaved work, times the risk that one of its nodes fails before its next
    regular checkpoint, exceeds the cost of a checkpoint. It is requested again only on a newer decision, and only if
    the risk has doubled or the horizon has passed since the last request.

    ``last_requests``: last requests, by ``cluster/job``.
    """
    parts: defaultdict[str, list[tuple[Candidate, JobView]]] = defaultdict(list)
    for candidate in candidates:
        for job in candidate.node.jobs:
            if job.can_checkpoint:
                parts[f"{candidate.node.cluster}/{job.name}"].append((candidate, job))
    by_node: defaultdict[str, list[tuple[JobView, float]]] = defaultdict(list)
    remembered = {key: last for key, last in last_requests.items() if now < last.at + 2 * horizon}
    riskiest: dict[str, Candidate] = {}
    for key, members in sorted(parts.items()):
        candidate, job = max(members, key=lambda member: (member[0].risk, member[0].node.name))
        unsaved = _unsaved(job, costs, now)
        if unsaved is None or any(member.barred["checkpoint"] is not None for member, _ in members):
            continue
        share_ahead = share_until_checkpoint(unsaved, horizon, costs)
        risks = [member.risk for member, _ in members]
        spared = -math.expm1(share_ahead * math.fsum(math.log1p(-min(risk, 1 - 1e-12)) for risk in risks))
        gain = unsaved * spared - costs.checkpoint
        last = remembered.get(key)
        if gain <= timedelta(0) or not _is_new(last, candidate, horizon, now):
            continue
        remembered[key] = LastRequest(now, candidate.risk, candidate.decided_at)
        riskiest[candidate.node.name] = candidate
        by_node[candidate.node.name].append((job, gain / _HOUR))
    requests = [
        RungRequest(
            "checkpoint", name, candidate.risk, candidate.expires_at,
            math.fsum(job.gpus * gain for job, gain in by_node[name]),
            math.fsum(job.gpus for job, _ in by_node[name]) * (costs.checkpoint / _HOUR),
            (f"unsaved work times the risk ({percent(candidate.risk)}) exceeds the cost of a checkpoint",),
            tuple(job.name for job, _ in by_node[name]),
        )
        for name, candidate in sorted(riskiest.items(), key=lambda item: (-item[1].risk, item[0]))
    ]  # fmt: skip
    return requests, remembered


def _unsaved(job: JobView, costs: CostBenefitConfig, now: datetime) -> timedelta | None:
    """Return the work that a failure now would lose; at most half an interval without a reported checkpoint."""
    if job.checkpointed_at is not None:
        return max(now - job.checkpointed_at, timedelta(0))
    if job.started_at is None:
        return None
    return min(max(now - job.started_at, timedelta(0)), costs.checkpoint_every / 2)


def _is_new(last: LastRequest | None, candidate: Candidate, horizon: timedelta, now: datetime) -> bool:
    if last is None or last.at == now:
        return True
    if candidate.decided_at <= last.decided_at:
        return False
    return candidate.risk >= NEW_EVIDENCE * last.risk or now >= last.at + horizon


def risk_after_pass(risk: _Risk, sensitivity: float) -> _Risk:
    """Return the posterior risk of a unit that passed a diagnostic with sensitivity ``sensitivity``."""
    return risk * (1 - sensitivity) / (1 - risk * sensitivity)


def after_probes(node: NodeView, config: ProbeConfig, now: datetime) -> NodeView:
    """Lower the risks of units that recently passed a probe (:func:`risk_after_pass`)."""
    if all(unit.probed_at is None for unit in node.units):
        return node
    lowered = [after_probe(unit, config, now) for unit in node.units]
    return node if all(map(is_, lowered, node.units)) else changed(node, units=tuple(lowered))


def after_probe(unit: UnitView, config: ProbeConfig, now: datetime) -> UnitView:
    """Lower the risk of a unit that recently passed a probe."""
    score, passed_at = unit.score, unit.probed_at
    if passed_at is None or score is None or score.risk is None or not passed_at <= now < passed_at + config.lowers_for:
        return unit
    risk = risk_after_pass(score.risk, config.mean_found)
    why = f"it passed a probe at {passed_at:%Y-%m-%d %H:%M} UTC, which lowered its risk from {percent(score.risk)}"
    return changed(unit, score=changed(score, risk=risk, reasons=(*score.reasons, why)))
