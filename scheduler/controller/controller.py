"""One round of the controller: read, decide, carry out what is still right; a restart may come at any point."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime, timedelta

from policy.config import PolicyConfig
from policy.decide import carried_out, decide
from policy.episodes import Outcome
from policy.fleet import NodeView, Signals, UnitView
from policy.plan import Action, Plan, PolicyState
from policy.tiers import TierThresholds
from scheduler.controller.evidence import Evidence
from scheduler.controller.executor import Executor, Expected, level_after, settled_by_reading
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.engine import Evacuation
from scheduler.ledger.round_log import RoundLog
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import LedgerError, SchedulerError, SourceError
from scheduler.ports.protocols import (
    Announcing,
    Clock,
    FactSource,
    Lease,
    LeaseLostError,
    RiskSource,
    SchedulerAdapter,
    Upkeep,
    signals_of,
)
from scheduler.ports.readings import FleetReading, Switches
from scheduler.ports.records import RoundRecord, is_worth_recording
from scheduler.ports.report import RoundReport, Step
from scheduler.ports.risks import Risks
from scheduler.ports.stored_state import stored_policy_state

_KEEP_AT_LEAST = timedelta(minutes=10)
# The safety state is written again after so long, also where nothing but the time in it changed.


@dataclass
class Controller:
    """Decides about a cluster, and acts.

    ``evacuation``: empties the nodes with a drain mark, after the actions of each round. None: their jobs end by
    themselves.

    A round is: hold the lease; find out what became of calls that a dead process left without an answer; read the
    scheduler, its switches and the safety state that it keeps; read scores and facts; decide; record the decision; keep
    the new safety state in the scheduler, so that what was granted counts against the rates whatever happens next; then
    for each action re-read the node, the switches and its evidence, record the call, call, record what it came to; and
    keep the safety state once more with what was confirmed. It may end anywhere: the next round begins with what stands
    in the scheduler, and an action that stands is not decided again.
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

    def __post_init__(self) -> None:
        self._evidence = Evidence(self.risks, self.facts)
        self._lease = Lease(self.scheduler, self.clock, self.holder, self.settings.lease)
        self._store = stored_policy_state(self.scheduler)

    def round(self) -> RoundReport:
        """Do one round.

        Returns: a scheduler, a source or a ledger that fails is an error in it, and is not raised.
        """
        report = RoundReport(self.clock.now(), active=False)  # until the lease is known to be held
        try:
            report.active = self._lease.take()
            if report.active:
                with gc_paused():
                    self._active(report)
        except SchedulerError as error:
            report.errors.append(f"the scheduler cannot be read: {error}")
        except LeaseLostError as error:
            report.active = False
            report.notes.append(f"stopped: {error}")
        return report

    def rehearse(self, switches: Switches | None = None) -> RoundReport:
        """Decide, and give exactly what would be written; nothing is: no lease, no ledger, no state.

        ``switches``: as if they were set so; None: as they are.
        Returns: its steps came to ``would``.
        """
        report = RoundReport(self.clock.now(), rehearsed=True)
        try:
            ready = self.evacuation is not None and self.evacuation.load(report)
            fleet = self._read(report)
            state = self._store.value
            fleet = fleet if switches is None else replace(fleet, switches=switches)
            plan, views, signals = self._decided(fleet, state, self._in_force(fleet, report), report)
            readings = {reading.view.name: reading for reading in fleet.nodes}
            of_node: dict[str, list[Action]] = {}
            for action in plan.actions:
                of_node.setdefault(action.node, []).append(action)
            writes = {name: iter(self.scheduler.preview(mine, readings[name])) for name, mine in of_node.items()}
            report.steps += [Step(action, "would", "", next(writes[action.node])) for action in plan.actions]
            self._rehearse_announcing(plan, views, report, new=not signals.kill)
            if self.evacuation is not None and ready:
                self.evacuation.rehearse(plan, {view.name: view for view in views}, report)
        except SchedulerError as error:
            report.errors.append(f"the scheduler cannot be read: {error}")
        return report

    def _rehearse_announcing(self, plan: Plan, views: tuple[NodeView, ...], report: RoundReport, *, new: bool) -> None:
        """Add what the scheduler's further ways to say what stands would write, were all actions confirmed."""
        if not isinstance(self.scheduler, Announcing):
            return
        levels = {view.name: view.marks.level for view in views}
        for action in plan.actions:
            levels[action.node] = level_after(action, levels[action.node])
        stands = signals_of(plan, views, levels, self.policy)
        writes = self.scheduler.announcing(stands, new=new)
        report.notes += [f"would be written besides: {write.message}" for write in writes]

    def stop(self) -> None:
        """Give the lease back, so that another replica need not wait for its end."""
        self.scheduler.drop_lease(self.holder)

    def _active(self, report: RoundReport) -> None:
        self._settle_open(report)
        # before anything is decided: what diagnostics came to is among the facts
        ready = self.evacuation is not None and self.evacuation.load(report)
        fleet = self._read(report)
        state = self._store.value
        policy = self._in_force(fleet, report)
        plan, views, signals = self._decided(fleet, state, policy, report)
        record = RoundRecord(
            views, state, signals, policy, plan, self._evidence.risks.model, self._evidence.risks.decided_at,
            self.holder, self.code, tuple(report.notes),
        )  # fmt: skip
        log = RoundLog(self._lease, self.ledger, self.clock, report, forward=self._record(record, report))
        self._lease.hold()
        kept = self._keep(plan.state, report)
        log.forward = log.forward and kept
        boots = {reading.view.name: reading.boot_id for reading in fleet.nodes}
        expected = {view.name: Expected(view, boots[view.name], view.marks.level) for view in views}
        held = self._held(views, signals)
        executor = Executor(self.scheduler, log, self.settings, expected, self._newest, held)
        lost: LeaseLostError | None = None
        try:
            executor.carry_out(plan)
        except LeaseLostError as error:
            lost = error
        if kept:  # also without the lease: a state that another replica replaced since has another version, and stays
            self._keep(carried_out(plan.state, executor.done), report)
        if lost is not None:
            raise lost
        self._keep_up(report)
        if isinstance(self.scheduler, Announcing):
            levels = {name: expected.level for name, expected in executor.expected.items()}
            stands = signals_of(plan, views, levels, policy)
            new = log.forward and not signals.kill
            report.notes += self.scheduler.announce(stands, self.holder, self._lease.hold, new=new)
        if self.evacuation is not None and ready:
            drained = frozenset(action.node for action in executor.done if action.verb == "drain")
            known = {view.name: view for view in views}
            self.evacuation.round(log, plan, known, drained, unheard=held)

    def _keep_up(self, report: RoundReport) -> None:
        if not isinstance(self.scheduler, Upkeep):
            return
        try:
            put_back = self.scheduler.upkeep(self.holder, self._lease.hold())
        except SchedulerError as error:
            report.errors.append(f"what the scheduler may have lost of our marks is not put back: {error}")
            return
        report.notes += [f"put back, for the scheduler had lost it: {write.message}" for write in put_back]

    def _settle_open(self, report: RoundReport) -> None:
        try:
            for number, intent in self.ledger.unsettled():
                reading = self.scheduler.revalidate(intent.node)
                settled = settled_by_reading(intent.action, reading, self.clock.now(), "the call was interrupted")
                self.ledger.settle(number, settled)
                report.notes.append(f"{intent.verb} {intent.node} was interrupted: {settled.words}")
        except LedgerError as error:
            report.errors.append(str(error))

    def _read(self, report: RoundReport) -> FleetReading:
        fleet = self.scheduler.read_fleet()
        trouble = self._store.load()
        if trouble is not None:
            report.errors.append(f"begins with an empty safety state, for {trouble}")
        report.errors += self._evidence.refresh(self.clock.now())
        return fleet

    def _in_force(self, fleet: FleetReading, report: RoundReport) -> PolicyConfig:
        """Return the settings with the thresholds that hold in this round, and report what is odd about them."""
        policy, risks = self.policy, self._evidence.risks
        tiers = risks.tiers if policy.thresholds_from == "scores" else None
        if not fleet.switches.release_all:  # then nothing rests on any threshold
            report.notes += odd_thresholds(policy, risks)
        return policy if tiers is None else policy.by_scores(tiers)

    def _decided(
        self, fleet: FleetReading, state: PolicyState, policy: PolicyConfig, report: RoundReport
    ) -> tuple[Plan, tuple[NodeView, ...], Signals]:
        now = self.clock.now()
        self._evidence.list_nodes(reading.view.name for reading in fleet.nodes)
        views = tuple(self._evidence.placed(reading.view, state) for reading in fleet.nodes)
        risks = self._evidence.risks
        signals = Signals(
            read_at=fleet.read_at,
            scheduler_error=fleet.trouble,
            model_fitted_at=risks.model_fitted_at,
            drift=risks.drift,
            outcomes=self._outcomes(now, report),
            kill=fleet.switches.kill,
            release_all=fleet.switches.release_all,
            reset_breaker_at=fleet.switches.reset_breaker_at,
        )
        plan = decide(views, state, signals, policy, now)
        report.plan = plan
        report.refused_scores = len(risks.refused)
        if not fleet.switches.release_all:
            report.notes += self._evidence.mismatches(views)
        if fleet.switches.kill or fleet.switches.release_all:
            report.notes.append("nothing new is put on any node until `predrain act --resume`")
        return plan, views, signals

    def _outcomes(self, now: datetime, report: RoundReport) -> Sequence[Outcome]:
        since = now - self.policy.stages.window - 2 * self.policy.horizon - timedelta(days=1)
        try:
            return tuple(self._evidence.fact_source.outcomes(self.ledger.alerts(since), now))
        except (LedgerError, SourceError) as error:
            report.errors.append(f"no alert is judged, so no stage moves: {error}")
            return ()

    def _record(self, record: RoundRecord, report: RoundReport) -> bool:
        """Record the decision where it is worth a record; False: nothing new may follow from it."""
        plan = record.plan
        try:
            if is_worth_recording(plan, self.ledger.last_digest()):
                report.number = self.ledger.begin(record)
        except LedgerError as error:
            report.errors.append(f"nothing new is done, and releases only: {error}")
            return False
        return True

    def _keep(self, state: PolicyState, report: RoundReport) -> bool:
        """Keep the safety state in the scheduler; False where that is not sure."""
        if _same(state, self._store.value):
            return True
        why = self._store.save(state)
        if why is not None:
            report.errors.append(f"the safety state is not kept, so nothing new is done: {why}")
        return why is None

    def _held(self, views: tuple[NodeView, ...], signals: Signals) -> frozenset[str]:
        """Return the nodes that are left as they are, for what their GPUs reported could not be read since we began.

        A mark may rest on a fault that is there, and only seems to have gone. It holds until it expires; what a person
        asks for is done at once.
        """
        if self._evidence.facts_known or signals.release_all:
            return frozenset()
        return frozenset(
            view.name
            for view in views
            if view.marks.published is not None
            and view.marks.published.expires_at > self.clock.now()
            and view.opt_out is None
        )

    def _newest(self, view: NodeView) -> tuple[UnitView, ...]:
        return self._evidence.newest(view, self.clock.now())


def _same(state: PolicyState, before: PolicyState) -> bool:
    """Return whether two states differ in nothing but the time of the decision, and in that by little.

    So a round in which nothing happens writes nothing. The time itself only tells when a clock goes back.
    """
    then, now = before.breaker.decided_at, state.breaker.decided_at
    if then is None or now is None or not timedelta(0) <= now - then < _KEEP_AT_LEAST:
        return state == before
    return replace(state, breaker=replace(state.breaker, decided_at=then)) == before


@contextmanager
def gc_paused() -> Iterator[None]:
    """Search for no cyclic garbage within; what has no cycles is freed at once, as ever.

    A round makes and drops some hundred thousand objects of a fleet, none of them in a cycle; the search through all of
    them doubles a round's processor time (0.26 and 0.49 s for 300 nodes).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_HOUR = timedelta(hours=1)


def odd_thresholds(policy: PolicyConfig, risks: Risks) -> tuple[str, ...]:
    """Return what is odd about the thresholds, and about the horizon that they are for; nothing where all is well."""
    notes: list[str] = []
    if risks.horizon is not None and risks.horizon != policy.horizon:
        wrong = "too early" if risks.horizon > policy.horizon else "by more than they said"
        notes.append(
            f"the scores look {risks.horizon / _HOUR:g} h ahead and policy.horizon is {policy.horizon / _HOUR:g} h: "
            f"alerts are judged {wrong}"
        )
    source, given = policy.thresholds_from, policy.thresholds
    if source == "settings" and given == TierThresholds():
        notes.append("the settings give no threshold (policy.thresholds), so no score has a tier: only hard rules act")
    elif source == "costs" and given.elevated is None:
        notes.append(
            "the settings give no threshold of tier elevated (policy.thresholds): no node is softly tainted before "
            "a drain of it is worth its cost"
        )
    elif source == "scores" and risks.tiers is None:
        notes.append("the scores name no thresholds, so none of them has a tier: only hard rules act")
    elif source == "scores" and risks.tiers is not None:
        notes += [
            f"no node is of tier {name} ({risks.tiers.sources.get(name, 'no reason given')})"
            for name, value in risks.tiers.thresholds.items()
            if value is None
        ]
    return tuple(notes)
