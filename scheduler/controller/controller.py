"""One round of the controller: read, decide, act. Expired markers are released even if everything else fails."""

from collections import Counter
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta

from foundation.running import Patience, gc_paused
from policy.config import PolicyConfig
from policy.decide import carried_out, decide
from policy.episodes import Alert, AlertOutcome
from policy.fleet import Level, NodeView, Signals, UnitView
from policy.plan import Action, Plan, PolicyState
from policy.tiers import TierThresholds
from scheduler.controller.evidence import Evidence
from scheduler.controller.executor import Executor, expected_of, level_after, settled_by_reading
from scheduler.controller.releases import due_nodes, release_due, release_overdue, release_plan
from scheduler.controller.scores_reader import CLOCK_SKEW
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.engine import Evacuation
from scheduler.ledger.round_log import RoundLog
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import described
from scheduler.ports.protocols import Clock, FactSource, Lease, LeaseLostError, RiskSource, SchedulerAdapter, signals_of
from scheduler.ports.readings import FleetReading, Switches
from scheduler.ports.records import RoundRecord, is_worth_recording
from scheduler.ports.report import RoundReport, Step
from scheduler.ports.risks import Risks
from scheduler.ports.stored_state import stored_policy_state

_MIN_KEPT = timedelta(minutes=10)
# The safety state is rewritten after this time even if only its timestamp changed.


@dataclass(frozen=True, slots=True)
class _Decision:
    plan: Plan
    views: tuple[NodeView, ...]
    state: PolicyState
    signals: Signals
    policy: PolicyConfig


@dataclass
class Controller:
    """The controller of one cluster.

    ``evacuation``: evacuates nodes with a drain marker after the actions of each round. None: their jobs run to
    completion.
    ``unusable``: why this process cannot decide, e.g. invalid settings; each round reports it and only releases expired
    markers. ``releases_all``: as if release-all were set, which may be impossible to store.

    A round takes the lease and reads the nodes. It computes from the markers alone which have expired. All other inputs
    (ledger, scores, events, safety state, evacuation) are read within :meth:`RoundLog.boundary`: a failure there is an
    error of the round and blocks new actions. The round settles calls of dead processes, decides, records the decision,
    and stores the new safety state in the scheduler before acting, so that allowed actions always count against the
    rate limits. Then, for each action, it re-reads the node, the switches and the evidence, records the call, makes it,
    and records the result. Finally it releases expired markers that the decision neither renewed nor released, even
    without a decision. A round may be interrupted anywhere: the next one starts from the state of the scheduler.
    """

    scheduler: SchedulerAdapter
    risks: RiskSource
    facts: FactSource
    ledger: SqliteLedger
    clock: Clock
    policy: PolicyConfig
    settings: ControllerSettings
    _: KW_ONLY
    holder: str
    code: str
    evacuation: Evacuation | None = None
    unusable: str | None = None
    releases_all: bool = False

    def __post_init__(self) -> None:
        patience = Patience(self.settings.max_round_duration.total_seconds())
        self._evidence = Evidence(self.risks, self.facts, patience)
        self._lease = Lease(self.scheduler, self.clock, self.holder, self.settings.lease)
        self._store = stored_policy_state(self.scheduler)

    def round(self) -> RoundReport:
        """Run one round; failures are errors in the report and are not raised."""
        report = RoundReport(self.clock.now(), active=False)  # until the lease is held
        log = RoundLog(self._lease, self.ledger, self.clock, report)
        try:
            try:
                report.active = self._lease.take()
            except Exception as error:
                report.errors.append(f"the lease cannot be read: {described(error)}")
                release_overdue(self._read_fleet(log), self.scheduler, log, self.settings, self.code)
            if report.active:
                with gc_paused():
                    self._active(log)
        except LeaseLostError as error:
            report.active = False
            report.notes.append(f"stopped: {error}")
        except Exception as error:  # other sources fail within `RoundLog.boundary`
            report.errors.append(f"the scheduler cannot be read: {described(error)}")
        return report

    def rehearse(self, switches: Switches | None = None) -> RoundReport:
        """Dry run: decide and report exactly what would be written, without lease, ledger or stored state."""
        report = RoundReport(self.clock.now(), rehearsed=True)
        log = RoundLog(self._lease, self.ledger, self.clock, report)
        try:
            fleet = self._read_fleet(log)
            fleet = fleet if switches is None else replace(fleet, switches=switches)
            evacuation = self._load_evacuation(log)
            decision = self._decide(fleet, log, evacuation)
            if decision is None:
                return report
            plan, views = decision.plan, decision.views
            readings = {reading.view.name: reading for reading in fleet.nodes}
            of_node: dict[str, list[Action]] = {}
            for action in plan.actions:
                of_node.setdefault(action.node, []).append(action)
            writes = {name: iter(self.scheduler.preview(actions, readings[name])) for name, actions in of_node.items()}
            report.steps += [Step(action, "would", "", next(writes[action.node])) for action in plan.actions]
            self._rehearse_announcing(plan, views, report, new=not decision.signals.kill)
            if evacuation is not None:
                with log.boundary("the evacuation"):
                    evacuation.rehearse(plan, {view.name: view for view in views}, report)
        except Exception as error:
            report.errors.append(f"the scheduler cannot be read: {described(error)}")
        return report

    def _rehearse_announcing(self, plan: Plan, views: tuple[NodeView, ...], report: RoundReport, *, new: bool) -> None:
        """Add what the scheduler would announce if all actions were confirmed."""
        levels = {view.name: view.marks.level for view in views}
        for action in plan.actions:
            levels[action.node] = level_after(action, levels[action.node])
        signals = signals_of(plan, views, levels, self.policy)
        writes = self.scheduler.announcing(signals, new=new)
        report.notes += [f"would also be written: {write.message}" for write in writes]

    def stop(self) -> None:
        """Release the lease, so that another replica need not wait for its expiry."""
        self.scheduler.drop_lease(self.holder)

    def _active(self, log: RoundLog) -> None:
        report = log.report
        fleet = self._read_fleet(log)
        due = due_nodes(fleet, self.clock.now(), report)
        evacuation, decision = None, None
        if self.unusable is None:
            with log.boundary("the ledger"):
                self._settle_open(report)
            evacuation = self._load_evacuation(log)  # the facts include results of diagnostics
            decision = self._decide(fleet, log, evacuation)
        else:
            log.error(f"no decision is possible; only expired markers are released: {self.unusable}")
        blocked = frozenset[str]() if decision is None else self._unreadable_nodes(decision)
        views = tuple(reading.view for reading in fleet.nodes) if decision is None else decision.views
        executor = Executor(self.scheduler, log, self.settings, expected_of(fleet, views), self._newest, blocked)
        saved, lost = False, None
        try:
            if decision is not None:
                self._record(decision, log)
                self._lease.hold()
                # A state that could not be read must not be overwritten: it counts the recent drains.
                saved = self._store.known and self._keep(decision.plan.state, log)
                log.forward = log.forward and saved
                with log.boundary("the actions"):
                    executor.carry_out(decision.plan)
            release_due(due, executor, self.code)
        except LeaseLostError as error:
            lost = error
        # An unstored plan allowed no new actions: its releases are added to the state that is stored.
        state = decision.plan.state if decision is not None and saved else self._store.value
        # Even without the lease: if another replica has replaced the state, its version differs and it is kept.
        if saved or (executor.done and self._store.known):
            self._keep(carried_out(state, executor.done), log)
        if lost is not None:
            raise lost
        if decision is not None:
            self._follow_up(decision, executor, log, evacuation)
        elif evacuation is not None:
            with log.boundary("the evacuation"):
                evacuation.end_probes(log, "no decision in this round")

    def _follow_up(self, decision: _Decision, executor: Executor, log: RoundLog, evacuation: Evacuation | None) -> None:
        """Restore lost markers, announce the current ones, and run the evacuation."""
        with log.boundary("the upkeep of markers", blocks=False):
            put_back = self.scheduler.upkeep(self.holder, self._lease.hold())
            log.report.notes += [f"restored after the scheduler lost it: {write.message}" for write in put_back]
        with log.boundary("the announcement of markers", blocks=False):
            levels = {name: expected.level for name, expected in executor.expected.items()}
            signals = signals_of(decision.plan, decision.views, levels, decision.policy)
            new = log.forward and not decision.signals.kill
            log.report.notes += self.scheduler.announce(signals, self.holder, self._lease.hold, new=new)
        if evacuation is not None:
            drained = frozenset(action.node for action in executor.done if action.verb == "drain")
            known = {view.name: view for view in decision.views}
            with log.boundary("the evacuation"):
                evacuation.round(log, decision.plan, known, drained, unread=executor.blocked)

    def _load_evacuation(self, log: RoundLog) -> Evacuation | None:
        """Read the evacuation state; None if evacuation is off or the state cannot be read."""
        with log.boundary("the evacuation state"):
            if self.evacuation is not None:
                self.evacuation.load(log.report)
                return self.evacuation
        return None

    def _settle_open(self, report: RoundReport) -> None:
        for number, action in self.ledger.unsettled():
            # Whether the call of a dead process arrived is only visible on the node.
            reading = self.scheduler.revalidate(action.node)
            settled = settled_by_reading(action, reading, self.clock.now(), "the call was interrupted")
            self.ledger.settle(number, settled)
            report.notes.append(f"{action.verb} {action.node} was interrupted: {settled.message}")

    def _read_fleet(self, log: RoundLog) -> FleetReading:
        """Read the fleet; duplicate nodes (the first entry counts) or an incomplete state block new actions."""
        fleet = self.scheduler.read_fleet()
        if self.releases_all:
            fleet = replace(fleet, switches=replace(fleet.switches, release_all=True))
        by_name = {reading.view.name: reading for reading in reversed(fleet.nodes)}
        if len(by_name) < len(fleet.nodes):
            listed = Counter(reading.view.name for reading in fleet.nodes)
            repeated = ", ".join(name for name, count in listed.items() if count > 1)
            log.forward = False
            log.error(f"the scheduler lists nodes more than once: {repeated}")
            fleet = replace(fleet, nodes=tuple(by_name[name] for name in listed))
        if fleet.partial:
            log.forward = False
            log.error(f"the scheduler state is incomplete: {fleet.error}")
        return fleet

    def _decide(self, fleet: FleetReading, log: RoundLog, evacuation: Evacuation | None) -> _Decision | None:
        """Read the sources and decide; None if that failed, which is an error of the round."""
        decision, report = None, log.report
        # The value of the last round may be outdated: another replica may have stored one since.
        self._store.known = False
        with log.boundary("the safety state"):
            load_error = self._store.load()
            if load_error is not None:
                report.errors.append(f"starting with an empty safety state: {load_error}")
        self._evidence.refresh(self.clock.now(), log)
        with log.boundary("the decision"):
            policy = self._in_force(fleet, report)
            decision = self._decided(fleet, policy, log, evacuation)
        return decision

    def _in_force(self, fleet: FleetReading, report: RoundReport) -> PolicyConfig:
        """Return the policy with the thresholds of this round, and report problems with them."""
        policy, risks = self.policy, self._evidence.risks
        tiers = risks.tiers if policy.thresholds_from == "scores" else None
        if not fleet.switches.release_all:  # release-all needs no threshold
            report.notes += odd_thresholds(policy, risks)
        return policy if tiers is None else policy.by_scores(tiers)

    def _decided(
        self, fleet: FleetReading, policy: PolicyConfig, log: RoundLog, evacuation: Evacuation | None
    ) -> _Decision:
        now, report = self.clock.now(), log.report
        state = self._with_releases(self._store.value, fleet, log)
        self._evidence.list_nodes(reading.view.name for reading in fleet.nodes)
        views = tuple(self._evidence.placed(reading.view, state) for reading in fleet.nodes)
        risks = self._evidence.risks
        fitted_at = risks.model_fitted_at
        # A negative age would pass for a fresh model; an unknown one opens the breaker.
        if fitted_at is not None and fitted_at > now + CLOCK_SKEW:
            report.notes.append(
                f"the model was fitted in the future, at {fitted_at:%Y-%m-%d %H:%M} UTC: its age is unknown"
            )
            fitted_at = None
        signals = Signals(
            read_at=fleet.read_at,
            scheduler_error=None if fleet.partial else fleet.error,  # one failed request must not open the breaker
            model_fitted_at=fitted_at,
            missing_channels=risks.missing_channels,
            outcomes=self._outcomes(now, log),
            kill=fleet.switches.kill,
            release_all=fleet.switches.release_all,
            reset_breaker_at=fleet.switches.reset_breaker_at,
            probes=None if evacuation is None else evacuation.probes(),
            checkpoints=evacuation is not None and evacuation.settings.enabled,
        )
        plan = decide(views, state, signals, policy, now)
        report.plan = plan
        report.refused_scores = len(risks.refused)
        if not fleet.switches.release_all:
            report.notes += self._evidence.mismatches(views)
        if fleet.switches.kill or fleet.switches.release_all:
            report.notes.append("new actions are blocked until `predrain act --resume`")
        return _Decision(plan, views, state, signals, policy)

    def _with_releases(self, state: PolicyState, fleet: FleetReading, log: RoundLog) -> PolicyState:
        """Return the state with the releases since its decision, which no other client made.

        A release without the lease cannot store them.
        """
        since, released = state.breaker.decided_at, set[str]()
        if since is None:
            return state
        bare = [reading.view.name for reading in fleet.nodes if not reading.view.marks.level]
        with log.boundary("the ledger"):
            for name in bare:
                known = state.nodes.get(name)
                if known is not None and known.seen >= Level.AVOID and self.ledger.was_released(name, since):
                    released.add(name)
        return carried_out(state, release_plan(released, self.clock.now()).actions)

    def _outcomes(self, now: datetime, log: RoundLog) -> tuple[AlertOutcome, ...]:
        since = now - self.policy.stages.window - 2 * self.policy.horizon - timedelta(days=1)
        outcomes: tuple[AlertOutcome, ...] = ()
        with log.boundary("alert outcomes"):  # without them no stage advances
            passes = self._passed_probes()
            evidence, alerts = self._evidence, [*self.ledger.alerts(since), *passes]
            evaluated = evidence.patience.call("the history", lambda: evidence.fact_source.outcomes(alerts, now))
            outcomes = tuple(outcome for outcome in evaluated if outcome.alert not in passes)
            log.report.probe_passes = Counter(outcome.verdict for outcome in evaluated if outcome.alert in passes)
        return outcomes

    def _passed_probes(self) -> frozenset[Alert]:
        """Return recently passed probes as alerts, to evaluate whether a failure followed."""
        results = () if self.evacuation is None else self.evacuation.results() or ()
        lasts = self.policy.probes.lowers_for
        return frozenset(
            Alert(result.node, "", "watch", result.at, lasts, result.node)
            for result in results
            if (result.rung, result.kind) == ("probe", "passed")
        )

    def _record(self, decision: _Decision, log: RoundLog) -> None:
        """Record the decision before it is carried out, if it differs from the last one or has actions."""
        risks = self._evidence.risks
        record = RoundRecord(
            decision.views, decision.state, decision.signals, decision.policy, decision.plan, risks.model,
            risks.decided_at, self.holder, self.code, tuple(log.report.notes),
        )  # fmt: skip
        with log.recording():
            if is_worth_recording(decision.plan, self.ledger.last_digest()):
                log.report.number = self.ledger.begin(record)

    def _keep(self, state: PolicyState, log: RoundLog) -> bool:
        """Store the safety state in the scheduler; False if it may not have been stored."""
        if _same(state, self._store.value):
            return True
        stored = False
        with log.boundary("the safety state"):
            reason = self._store.save(state)
            stored = reason is None
            if reason is not None:
                log.error(f"no new actions, because the safety state cannot be stored: {reason}")
        return stored

    def _unreadable_nodes(self, decision: _Decision) -> frozenset[str]:
        """Return the nodes to leave unchanged because their evidence has not been readable since the process started.

        The reason for a marker may still hold although it cannot be seen, so the marker stays until it expires.
        Requests by operators (opt-out, release-all) take effect immediately.
        """
        if (self._evidence.known and self._store.known) or decision.signals.release_all:
            return frozenset()
        return frozenset(
            view.name
            for view in decision.views
            if view.marks.published is not None
            and view.marks.published.expires_at > self.clock.now()
            and view.opt_out is None
        )

    def _newest(self, view: NodeView) -> tuple[UnitView, ...]:
        return self._evidence.newest(view, self.clock.now())


def _same(state: PolicyState, previous: PolicyState) -> bool:
    """Whether two states differ only in the decision time, and by less than ``_MIN_KEPT``.

    Idle rounds thus write nothing. The decision time only serves to detect a clock that was set back.
    """
    decided_before, now = previous.breaker.decided_at, state.breaker.decided_at
    if decided_before is None or now is None or not timedelta(0) <= now - decided_before < _MIN_KEPT:
        return state == previous
    return replace(state, breaker=replace(state.breaker, decided_at=decided_before)) == previous


_HOUR = timedelta(hours=1)


def odd_thresholds(policy: PolicyConfig, risks: Risks) -> tuple[str, ...]:
    """Return warnings about missing thresholds, and about scores with another horizon than the policy's."""
    notes: list[str] = []
    if risks.horizon is not None and risks.horizon != policy.horizon:
        mismatch = "before their horizon ends" if risks.horizon > policy.horizon else "over a longer horizon"
        notes.append(
            f"the horizon of the scores is {risks.horizon / _HOUR:g} h and policy.horizon is "
            f"{policy.horizon / _HOUR:g} h: alerts are evaluated {mismatch}"
        )
    source, tiers = policy.thresholds_from, policy.thresholds
    if source == "settings" and tiers == TierThresholds():
        notes.append("no thresholds are set (policy.thresholds): only hard rules act")
    elif source == "costs" and tiers.elevated is None:
        notes.append(
            "no threshold of tier elevated is set (policy.thresholds): no node gets a soft taint below the break-even "
            "of a drain"
        )
    elif source == "scores" and risks.tiers is None:
        notes.append("the scores have no thresholds: only hard rules act")
    elif source == "scores" and risks.tiers is not None:
        notes += [
            f"no node is of tier {name} ({risks.tiers.sources.get(name, 'no reason given')})"
            for name, value in risks.tiers.thresholds.items()
            if value is None
        ]
    return tuple(notes)
