"""Evacuation rounds for drained nodes, and probes and checkpoint requests on others; the state is in the scheduler."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from policy.fleet import Level, NodeView
from policy.plan import Plan, RungRequest
from scheduler.evacuation.case import DrainCase
from scheduler.evacuation.diagnostics import Diagnostics
from scheduler.evacuation.drainer import Drainer, why_there
from scheduler.evacuation.progress import (
    SETTLED,
    Evacuating,
    EvacuationProgress,
    Phase,
    Result,
    bounded_waits,
    stored_progress,
)
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.errors import SchedulerError, described
from scheduler.ports.protocols import Clock, SchedulerAdapter
from scheduler.ports.readings import NodeReading, Switches
from scheduler.ports.records import PendingCall, Settled
from scheduler.ports.report import RoundReport, WorkStep
from scheduler.ports.workloads import Hook, Verification, Workload, Workloads

_ASKING: tuple[Phase, ...] = ("evacuating", "asking")
_MAX_OPEN = 100
# Limit on unsettled calls of dead processes per round.


@dataclass
class Evacuation:
    """Evacuates nodes with a drain marker, and carries out the requested cheaper rungs.

    A round reads the progress, re-reads each node and lists its workloads. For each new workload it decides how to
    request a checkpoint and sets the deadline, and stores both before sending any request. It sends the requests, reads
    the acknowledgements, and evicts workloads that are ready, re-reading node and switches before each call. On empty
    nodes it starts the diagnostic or reads its result. Finally it stores the progress. A round never blocks, and may be
    interrupted anywhere: all calls are repeatable, and the next leader reads the same progress.
    """

    scheduler: SchedulerAdapter
    workloads: Workloads
    clock: Clock
    settings: EvacuationSettings
    hooks: Mapping[str, Hook]
    verification: Verification | None
    prober: Verification | None = None

    def __post_init__(self) -> None:
        self._store = stored_progress(self.workloads)
        self._progress = EvacuationProgress()  # includes changes of this round
        self._unsaved = False  # whether the progress includes changes that could not be stored
        self._unread = frozenset[str]()  # nodes that the last round had no time to read
        self._drainer = Drainer(self.workloads, self.settings, self.hooks, self._stop_reason)
        self._diagnostics = Diagnostics(
            self.workloads, self.verification, self.prober, self.settings.verification, self._stop_reason
        )

    def results(self) -> tuple[Result, ...] | None:
        """Return the results of diagnostics; None if they were not read since the process started."""
        return self._progress.results if self._store.known else None

    def probes(self) -> tuple[str, ...] | None:
        """Return the nodes being probed; None if probes are unavailable."""
        if not self.settings.enabled or self.prober is None or not self._store.known:
            return None
        return tuple(sorted(name for name, entry in self._progress.nodes.items() if entry.rung == "probe"))

    def load(self, report: RoundReport) -> None:
        """Read the progress of all nodes; raises ``SchedulerError`` if it cannot be read."""
        before = self._store.value
        load_error = self._store.load()
        if load_error is not None:
            report.errors.append(f"evacuations are restarted: {load_error}")
        # The stored state is unchanged, so what this process could not save (e.g. the number of evictions) is valid.
        if not self._unsaved or self._store.value != before:
            self._progress = self._store.value
        self._progress = bounded_waits(self._progress, self.settings, self.clock.now())

    def round(
        self, log: RoundLog, plan: Plan, views: Mapping[str, NodeView], drained: frozenset[str], unread: frozenset[str]
    ) -> None:
        """Do the next step for each node; call :meth:`load` first.

        ``views``: the nodes as decided on, with their units.
        ``drained``: nodes that got their drain marker in this round.
        ``unread``: nodes whose events were never read: their workloads are not moved.
        Raises ``LeaseLostError`` if the lease is lost.
        """
        if not self.settings.enabled:
            return
        log.begin(self.settings.max_round_duration)
        self._settle_open(log)
        cases = self._open(log, plan, views, drained)
        for case in cases:
            case.freeze_reason = _freeze_reason(plan, case.reading.view, unread)
        now = self.clock.now()
        evacuating = [case for case in cases if case.entry.phase in _ASKING]
        requests = {uid: leaving for entry in self._evacuating() for uid, leaving in entry.leaving.items()}
        for case in evacuating:
            self._drainer.read_workloads(case, log, now)
            requests |= {
                self._drainer.recipient_of(workload): case.entry.leaving[workload.uid]
                for workload in case.departing or ()
                if workload.uid in case.entry.leaving
            }
        for case in evacuating:
            self._drainer.plan(case, now, requests)
        if not self._keep(cases, (), log):
            log.forward = False
        # nodes that are not empty in this round
        evacuating = [case for case in evacuating if case.departing or case.entry.phase == "asking"]
        results: list[Result] = []
        try:
            self._act(cases, evacuating, results, log)
        except Exception:  # even without the lease: the version check decides whether it is stored
            self._keep(cases, results, log)
            raise
        if not self._keep(cases, results, log):
            log.report.notes.append("the evacuation state is read again in the next round")

    def end_probes(self, log: RoundLog, reason: str) -> None:
        """End running probes, after :meth:`load`: without decisions nothing checks whether a job needs their nodes."""
        nodes = dict(self._progress.nodes)
        for name, entry in self._progress.nodes.items():
            if entry.rung == "probe":
                self._end(name, nodes.pop(name), reason, log)
        self._progress = replace(self._progress, nodes=nodes)
        self._keep((), (), log)

    def rehearse(self, plan: Plan, views: Mapping[str, NodeView], report: RoundReport) -> None:
        """Dry run after :meth:`load`: report what would be done on nodes that are or would be drained."""
        if not self.settings.enabled:
            return
        for request in plan.requests:
            jobs = ", ".join(request.jobs) or None
            report.work.append(WorkStep(request.node, request.rung, "would", jobs, "; ".join(request.reasons)))
        to_drain = {action.node for action in plan.actions if action.verb == "drain"}
        marked = {name for name, view in views.items() if view.marks.drained}
        ends = {action.node for action in plan.actions if action.verb == "release"}
        for name in sorted((to_drain | marked) - ends):
            try:
                listed = self.workloads.on_node(name)
            except Exception as error:
                report.errors.append(f"the workloads on {name} cannot be listed: {described(error)}")
                continue
            for workload in listed:
                if workload.stays is not None:
                    continue
                verb, message = self._drainer.preview(workload)
                writes = self.workloads.preview(workload) if verb == "evict" else ()
                report.work.append(WorkStep(name, verb, "would", workload.name, message, writes))

    def _act(self, cases: list[DrainCase], evacuating: list[DrainCase], results: list[Result], log: RoundLog) -> None:
        self._drainer.ask(evacuating, log)
        drained = [case for case in evacuating if case.entry.request is None]
        self._drainer.evict(drained, log, self._under_way(drained))
        for case in evacuating:
            if case.entry.phase == "asking":
                self._drainer.finish(case, log)
        for case in cases:
            if case.entry.phase == "verifying":
                with log.boundary(f"the diagnostic of {case.node}", blocks=False):  # other nodes continue
                    result = self._diagnostics.advance(case, log)
                    results += [] if result is None else [result]
            if case.entry.request is not None:
                continue
            self._stuck(case, log)
            self._diagnostics.settled(case, log)
            reason = case.stop_reason if case.entry.phase == "evacuating" else case.hold_reason
            if reason is not None and case.entry.phase not in SETTLED:
                log.step(case.node, "hold", "held", None, reason)

    def _evacuating(self) -> list[Evacuating]:
        return [entry for entry in self._progress.nodes.values() if entry.phase in _ASKING]

    def _under_way(self, evacuating: Iterable[DrainCase]) -> set[str]:
        """Return the uids of terminating workloads, without those that are overdue."""
        now = self.clock.now()
        terminating = {
            leaving.uid
            for entry in self._evacuating()
            for leaving in entry.leaving.values()
            if leaving.gone_by is not None and now < leaving.gone_by
        }
        for case in evacuating:
            ending = {workload.uid for workload in case.departing or () if workload.ending}
            if case.reading.view.down:  # its kubelet cannot terminate pods that others deleted
                terminating -= {
                    uid for uid in ending if uid in case.entry.leaving and not case.entry.leaving[uid].accepted
                }
            else:
                terminating |= ending - case.entry.leaving.keys()
        return terminating

    def _open(
        self, log: RoundLog, plan: Plan, views: Mapping[str, NodeView], drained: frozenset[str]
    ) -> list[DrainCase]:
        progress = self._progress
        marked = {name for name, view in views.items() if view.marks.drained}
        nodes = dict(progress.nodes)
        cases: list[DrainCase] = []
        switches = self._switches(log)
        deadline = self.clock.now() + self.settings.max_round_duration / 3
        # nodes that were skipped last time go first, or the same nodes would be skipped every round
        requests = {request.node: request for request in plan.requests}
        known_names = {*nodes, *marked, *drained, *requests}
        by_urgency = sorted(known_names, key=lambda name: (name not in self._unread, *_urgency(plan, name)))
        self._unread = frozenset()
        for place, name in enumerate(by_urgency):
            started = self.clock.now()
            if started >= deadline:  # leave time to evacuate the nodes that were read
                self._unread = frozenset(by_urgency[place:])
                log.error(f"reads are too slow: {len(self._unread)} nodes, such as {name}, are left to the next round")
                break
            try:
                reading = self.scheduler.revalidate(name)
            except Exception as error:  # one faulty node must not block the others
                log.error(f"{name} cannot be read again: {described(error)}")
                continue
            entry = nodes.get(name)
            request = entry.request if entry is not None else requests.get(name) if name not in marked else None
            reason = _why_ended(reading) if request is None else _why_request_ended(reading, plan.stopped.get(name))
            if reading is None or reason is not None:
                self._end(name, nodes.pop(name, None), reason or "", log)
                continue
            if request is not None:
                entry = entry or _requested(request, self.clock.now())
            else:
                since = _mark_since(reading, started)
                known = None if entry is None else entry.mark_since
                # A start that cannot be read does not mean another drain.
                if entry is None or name in drained or (since is not None and known is not None and since != known):
                    self._end(name, entry, "another drain started", log)
                    entry = Evacuating(self.clock.now())
                    log.find(name, "started", "the node has a drain marker")
                entry = replace(entry, mark_since=since or entry.mark_since)
            nodes[name] = entry
            units = tuple(unit.name for unit in views[name].units) if name in views else ()
            case = DrainCase(reading, plan.nodes.get(name), units, entry)
            case.hold_reason = (
                "the switches cannot be read" if switches is None else self._why_held(case, reading, switches)
            )
            cases.append(case)
        self._progress = replace(progress, nodes=nodes)
        return cases

    def _end(self, name: str, entry: Evacuating | None, reason: str, log: RoundLog) -> None:
        if entry is None:
            return
        log.find(name, "ended" if entry.phase in SETTLED else "cancelled", reason, {"phase": entry.phase})
        if entry.phase == "verifying" and entry.started_at is not None:
            with log.boundary(f"the diagnostic of {name}", blocks=False):
                self._diagnostics.drop(name, entry)
        if entry.phase not in SETTLED:
            purpose = "to empty it" if entry.request is None else f"for its {entry.rung}"
            log.step(name, "hold", "held", None, f"paused {purpose}: {reason}")

    def _why_held(self, case: DrainCase, reading: NodeReading, switches: Switches) -> str | None:
        """Return why nothing new may be done on a node now; None if it may."""
        view, now, decision = reading.view, self.clock.now(), case.decision
        published, passed_at = view.marks.published, self._progress.passed_at(reading.view.name)
        if switches.kill:
            return "the kill switch is set"
        if switches.release_all:
            return "release-all is set"
        if view.foreign is not None:
            return view.foreign
        if case.entry.request is not None:
            return _barred(case.entry.request, view, now)
        if not view.marks.drained:
            return "its drain marker is gone"
        if view.marker_removed:
            return "another client removed a predrain marker"
        if published is None or published.expires_at <= now:
            return "the prediction has expired"
        if decision is None or decision.target is not Level.DRAIN:
            return "the current decision does not include the drain"
        if passed_at is not None and now < passed_at + self.settings.verification.valid_for and not decision.rules:
            return f"it passed a diagnostic at {passed_at:%Y-%m-%d %H:%M} UTC: its jobs are not moved again yet"
        return None

    def _stop_reason(self, case: DrainCase) -> str | None:
        """Re-read the node and the switches right before a call; return why it is not allowed, or None."""
        try:
            switches = self.scheduler.read_switches()
            reading = self.scheduler.revalidate(case.node)
        except Exception as error:
            return f"it cannot be read again: {described(error)}"
        if reading is None:
            return "the node was removed"
        if reading.boot_id != case.reading.boot_id:
            return "it booted since it was read"
        return self._why_held(case, reading, switches)

    def _switches(self, log: RoundLog) -> Switches | None:
        try:
            return self.scheduler.read_switches()
        except SchedulerError as error:
            log.error(f"the switches cannot be read: {error}")
            return None

    def _keep(self, cases: Iterable[DrainCase], results: Iterable[Result], log: RoundLog) -> bool:
        progress = self._progress
        nodes = {**progress.nodes, **{case.node: case.entry for case in cases}}
        # A drain is remembered as long as its marker. A finished probe or request is forgotten, or the node could never
        # get another.
        nodes = {name: entry for name, entry in nodes.items() if entry.request is None or entry.phase not in SETTLED}
        oldest = self.clock.now() - self.settings.verification.retention
        updated = EvacuationProgress(dict(sorted(nodes.items())), progress.results).with_results(results, oldest)
        self._progress, self._unsaved = updated, True
        reason = None if updated == self._store.value else self._store.save(updated)
        self._unsaved = reason is not None
        if reason is not None:
            log.error(f"the evacuation state was not saved: {reason}")
        return reason is None

    def _stuck(self, case: DrainCase, log: RoundLog) -> None:
        """Report an overdue evacuation once; the clock is per evacuation, independent of its workloads."""
        entry = case.entry
        since = entry.waiting_since or entry.began_at
        if entry.phase in SETTLED or log.clock.now() < since + self.settings.stuck_after:
            return
        if entry.phase == "verifying":
            if entry.started_at is not None:  # the diagnostic has its own timeout
                return
            remaining: list[str] = []
            message = f"its diagnostic did not start ({case.hold_reason or entry.message or 'not yet possible'})"
        else:
            remaining = [workload.name for workload in case.departing or ()]
            waiting = [case.unlisted or case.stop_reason or ""] + [
                f"{workload.name} ({why_there(workload, entry.leaving.get(workload.uid), log.clock.now())})"
                for workload in (case.departing or ())[:10]
            ]
            message = f"not empty: {'; '.join(filter(None, waiting))}"
        message = f"waiting since {since:%Y-%m-%d %H:%M} UTC, {message}; the taint stays"
        case.notify(log, "stuck", "stuck", message, {"workloads": remaining})

    def _settle_open(self, log: RoundLog) -> None:
        """Settle calls of dead processes."""
        with log.recording():
            listed: dict[str, Mapping[str, Workload]] = {}
            for number, call in log.ledger.open_calls()[:_MAX_OPEN]:
                try:
                    confirmed, message = self._outcome_of(call, listed)
                except Exception as error:  # retried in the next round
                    log.error(f"the outcome of {call.kind} on {call.node} is unknown: {described(error)}")
                    continue
                answer = Settled(self.clock.now(), "found" if confirmed else "not_found", confirmed, message)
                log.ledger.settle(number, answer)
                log.report.notes.append(f"{call.kind} on {call.node} was interrupted: {message}")

    def _outcome_of(self, call: PendingCall, listed: dict[str, Mapping[str, Workload]]) -> tuple[bool, str]:
        runner = self.prober if call.kind == "probe" else self.verification
        if call.kind in ("verify", "probe") and runner is not None:
            started = runner.result(call.node, call.key).kind != "missing"
            return started, "the diagnostic was started" if started else "no diagnostic was started"
        if call.kind != "evict" or call.workload is None:
            return False, "the process ended before a response; if needed, the request is repeated with the same key"
        if call.node not in listed:
            listed[call.node] = {workload.uid: workload for workload in self.workloads.on_node(call.node)}
        survivor = listed[call.node].get(call.workload.uid)
        if survivor is None:
            return True, "it is gone"
        return (True, "it is terminating") if survivor.ending else (False, "it is still there")


def _why_ended(reading: NodeReading | None) -> str | None:
    if reading is None:
        return "the node was removed"
    lost_drain = reading.view.readable and not reading.view.marks.drained
    return "its drain marker is gone" if lost_drain else None


def _why_request_ended(reading: NodeReading | None, stopped: str | None) -> str | None:
    """Return why a probe or checkpoint request ends; None if it continues."""
    if reading is None:
        return "the node was removed"
    return "a drain began" if reading.view.marks.drained else stopped


def _requested(request: RungRequest, now: datetime) -> Evacuating:
    if request.rung == "checkpoint":
        return Evacuating(now, "asking", request=request)
    return Evacuating(now, "verifying", empty_at=now, request=request)


def _barred(request: RungRequest, view: NodeView, now: datetime) -> str | None:
    """Return why a probe or checkpoint request must not start on a node; None if it may."""
    if request.rung == "probe" and (
        view.marks.level.hard or view.why_out_of_service is not None or view.resting is not None
    ):
        return "it is out of service"
    if view.marker_removed or view.uncordoned:
        return "another client removed a predrain marker"
    if view.unwritable is not None:
        return view.unwritable
    return "the prediction has expired" if now >= request.expires_at else None


def _freeze_reason(plan: Plan, view: NodeView, unread: frozenset[str]) -> str | None:
    """Return why no workload of a node may be moved: the breaker blocks evictions like any hard action."""
    if view.name in unread:
        return "the events of its GPUs cannot be read"
    causes = plan.state.breaker.frozen(view.group_key, view.name)
    return f"the breaker is open: {'; '.join(causes)}" if causes else None


def _mark_since(reading: NodeReading, limit: datetime) -> datetime | None:
    """Return the start that the drain marker states, to distinguish drains; None if it is missing or in the future."""
    since = reading.view.marks.hard_since
    return since if since is not None and since < limit else None


def _urgency(plan: Plan, name: str) -> tuple[float, str]:
    decision = plan.nodes.get(name)
    if decision is None:
        return 0.0, name
    # Below every negated risk: existing faults come first.
    return -2.0 if decision.rules else -(decision.risk or 0.0), name
