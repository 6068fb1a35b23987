"""Replay of the controller on a fleet's history: :func:`policy.decide.decide` on what was known at each time.

Tiers, hysteresis, hard rules, stages, budgets, rate limits, the breaker and the cost-benefit of drains are the
controller's own. The cluster is simulated: taints take effect immediately, evicted jobs write a checkpoint and leave,
and nodes fail as recorded.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from evaluation.value.load import Placements, ReplayedFleet, evicted, job_views
from evaluation.value.marks import ReplayMarks
from evaluation.value.probing import ProbeReplay
from evaluation.value.readings import Readings, ScoredDecision
from foundation.instants import from_ms
from foundation.times import NEVER, duration_ms, instant_ms
from policy.breaker import ObservedNode
from policy.config import PolicyConfig
from policy.decide import carried_out, decide
from policy.episodes import Bools, Ints
from policy.fleet import NO_MARKS, Fact, JobView, Level, NodeView, Signals, UnitView
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.remedies import Remedy, duration_of
from policy.ladder.requests import after_probe
from policy.maintenance import planned
from policy.node_tier.hard_rules import BOOT, DEFAULT_RULES, KINDS, REPAIRS, Reported, reported
from policy.node_tier.hysteresis import changed
from policy.plan import Plan, PolicyState

Diagnostic = Literal["none", "blind", "perfect", "stated"]
"""Diagnostic on a node drained on a prediction. ``blind``: finds nothing, and the node returns to service. ``perfect``:
finds every existing fault and every failure within reach. ``stated``: finds the given subset of these failures."""

_MINUTE_MS: Final = 60_000
_AGAIN_MS: Final = duration_ms(timedelta(hours=12))
_RETRY_MS: Final = duration_ms(timedelta(days=1))
"""Defaults of the controller's diagnostics: after a passed one, jobs are not evicted again for ``_AGAIN_MS`` unless a
rule requires it; a failed one is repeated after ``_RETRY_MS``."""

ReportCache = dict[tuple[int, int], Mapping[str, Reported]]
"""Reports by the time of the oldest event and of the round, in milliseconds."""

_COUNTED: Final = (UnitView(""),)
"""Stands for each unit of a node at rest: only their number matters."""


def rule_events(events: pd.DataFrame, more: Iterable[dict[Any, Any]] = ()) -> list[dict[Any, Any]]:
    """Return the events that hard rules use, maintenance, and ``more``, sorted by ``known_at``."""
    code = events["code"].astype("str").str.strip()
    named = (events["type"] != "xid") | code.isin(DEFAULT_RULES.xids)
    boots = (events["type"] == BOOT[0]) & (code == BOOT[1])
    of_units = named & events["type"].isin(KINDS) & events["gpu"].notna()
    used = of_units | boots | events["type"].isin(("maintenance", *REPAIRS))
    used = events[used.to_numpy()]
    rows = used.astype(object).where(used.notna(), None).to_dict("records")
    return sorted([*rows, *more], key=lambda row: row["known_at"])


def _relieves(event: Mapping[str, Any]) -> bool:
    """Return whether an event can only clear earlier reports."""
    code = str(event["code"] or "").strip().lower()
    return (event["type"], code) == BOOT or event["type"] in REPAIRS or (event["type"], code) == ("diagnostic", "pass")


@dataclass
class Controlled:
    """Replay of a fleet under the controller.

    ``events``: from :func:`rule_events`; ``jobs``: running jobs, for the cost-benefit of drains.
    ``reach``: how far ahead a perfect diagnostic detects a failure.
    ``least``: minimum level that counts as keeping a node from new jobs; ``avoid`` only in stage ``soft``.
    ``findable``: failures that a ``stated`` diagnostic finds; shape (failures,).
    ``probing``: replay of probes on idle nodes; a passed probe lowers the risk.
    ``reports``: cache of the reports at each time, shared by replays of the same events and decision times.
    """

    fleet: ReplayedFleet
    scores: Readings
    events: Sequence[Mapping[str, Any]]
    jobs: Placements
    policy: PolicyConfig
    reach: timedelta
    diagnostic: Diagnostic = "none"
    least: Level = Level.SWAP
    findable: Bools | None = None
    probing: ProbeReplay | None = None
    reports: ReportCache = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shows_jobs = self.least.hard
        if not self.least.hard:  # a soft taint depends neither on jobs nor on tier watch, so fewer nodes need decisions
            thresholds = replace(self.policy.thresholds, watch=self.policy.thresholds.elevated)
            self.policy = replace(self.policy, thresholds=thresholds)
        self._place = {node.name: place for place, node in enumerate(self.fleet.nodes)}
        self._state = PolicyState()
        self._node_marks = [NO_MARKS] * len(self.fleet.nodes)
        self._rows: list[list[int]] = []
        self._open: dict[int, list[int]] = {}  # active rows of marks, by node
        self._high: list[list[int]] = []
        self._open_high: dict[int, list[int]] = {}  # active rows of _high, by node
        self._left = np.full(len(self.jobs.node), NEVER)  # when each job left its node
        self._by_start = np.argsort(self.jobs.start, kind="stable")
        self._job_count = int(self.jobs.job.max(initial=-1)) + 1
        self._starts, self._n_started = self.jobs.start[self._by_start], 0  # number of started jobs
        self._active = self._by_start[:0]
        self._evict_at: dict[int, int] = {}  # when a drained node's jobs are evicted
        self._tests: dict[int, tuple[int, Remedy | None]] = {}  # when remedy and diagnostic end
        self._passed: dict[int, int] = {}
        self._void: dict[str, datetime] = {}
        self._failed: dict[str, Fact] = {}
        self._refused: set[tuple[str, datetime | None]] = set()
        self._known = [instant_ms(event["known_at"]) for event in self.events]
        self._maintenance = [event for event in self.events if event["type"] == "maintenance"]
        self._planned: tuple[int, dict[str, tuple[tuple[datetime, datetime], ...]]] = (0, {})  # number known, periods
        # times when a node improves; they need a round only if it has a decision, or if others wait for budget
        self._improvements: dict[int, list[str]] = defaultdict(list)
        for node, until in zip(self.fleet.failed.tolist(), self.fleet.until.tolist(), strict=True):
            self._improvements[until].append(self.fleet.nodes[node].name)
        round_times = set(self.scores.at)
        for event, known in zip(self.events, self._known, strict=True):
            if _relieves(event):
                self._improvements[known].append(event["node"])
            else:
                round_times.add(known)
        rows = [(place, *unit) for place, units in enumerate(self.fleet.installations) for unit in units]
        code = self.scores.units.get_indexer([name for _, name, _, _ in rows])
        codes = iter(code.tolist())
        self._codes: list[list[int]] = [[next(codes) for _ in units] for units in self.fleet.installations]
        self._moves = sorted(time for _, _, *times in rows for time in times)  # when a unit is installed or removed
        self._member = np.column_stack([[place for place, *_ in rows], code, [row[2:] for row in rows]])
        self._homes = {name: {place} for name, place in self._place.items()}  # a GPU may move to another node
        for place, name, *_ in rows:
            self._homes.setdefault(name, set()).add(place)
        # caches of the last round: node views, units (with the inputs they depend on) by node, and jobs by entry
        self._views = [*self.fleet.nodes]
        self._observed: dict[int, ObservedNode] = {}  # nodes at rest
        self._rest_inputs = np.full((len(self.fleet.nodes), 4), -1)
        self._unit_views: dict[int, tuple[object, tuple[UnitView, ...]]] = {}
        self._job_views: dict[int, tuple[int, JobView]] = {}
        self._round_times = round_times
        self._todo = sorted(round_times | self._improvements.keys())
        self._now = self.fleet.begin
        self._plan: Plan | None = None

    def marks(self) -> ReplayMarks:
        """Run the replay; return the times in which nodes were kept from new jobs."""
        heapq.heappush(self._todo, NEVER)
        while self._todo:
            while self.probing is not None and self.probing.next_round < self._todo[0]:
                # a passed probe changes no tier before the next decision, and other probes may start until then
                for _, ends in self.probing.go_round():
                    heapq.heappush(self._todo, ends)
            due_ms = heapq.heappop(self._todo)
            if self._now < due_ms < self.fleet.end and (due_ms in self._round_times or self._awaited(due_ms)):
                self._round(due_ms)
        for row in (*self._rows, *self._high):
            row[2] = min(row[2], self.fleet.end)
        return ReplayMarks.of(self._rows, len(self._refused), self._high)

    def _mask_of(self, places: Iterable[int]) -> Bools:
        mask = np.zeros(len(self.fleet.nodes), dtype=np.bool_)
        mask[list(places)] = True
        return mask

    def _awaited(self, time_ms: int) -> bool:
        """Return whether an improvement of nodes at this time may change the plan."""
        plan = self._plan
        if plan is None or plan.over_budget or plan.open_causes:
            return True
        names = [name for name in self._improvements[time_ms] if name in plan.nodes]
        if self.least.hard:
            return bool(names)
        # no round follows a release, so the plan still lists the released node
        return any(plan.nodes[name].tier != "clear" or self._node_marks[self._place[name]].level for name in names)

    def _wake(self, time_ms: int) -> None:
        self._round_times.add(time_ms)
        heapq.heappush(self._todo, time_ms)

    def _round(self, now_ms: int) -> None:
        started = self._started(now_ms)
        is_open = self._mask_of(self._open)
        started = started[(self.jobs.start[started] > self._now) & is_open[self.jobs.node[started]]]
        self._left[started] = self.jobs.start[started]  # it runs elsewhere
        self._now, now = now_ms, from_ms(now_ms)
        for node in [node for node, (ends, _) in self._tests.items() if ends < now_ms]:
            self._tested(node)
        newest = self.scores.newest(now_ms)
        signals = Signals(read_at=now, model_fitted_at=newest.fitted_at)
        fleet, others = self._fleet_at(now, newest)
        plan = self._plan = decide(fleet, self._state, signals, self.policy, now, others)
        self._refused |= {(name, plan.state.nodes[name].episode) for name in plan.over_budget}
        self._state = carried_out(plan.state, plan.actions)
        for action in plan.actions:
            place = self._place[action.node]
            self._node_marks[place] = action.after(self._node_marks[place], now)
        for place in sorted({self._place[action.node] for action in plan.actions} | self._open.keys()):
            self._follow(place, plan)
        if self.probing is not None:
            self.probing.set_closed([place for place, marks in enumerate(self._node_marks) if marks.level.hard], now_ms)

    def _started(self, now_ms: int) -> Ints:
        """Return the entries that started since the last round, and update the active ones."""
        started = self._by_start[self._n_started : (count := int(np.searchsorted(self._starts, now_ms, side="right")))]
        self._n_started, active = count, np.concatenate([self._active, started])
        self._active = active[self.jobs.end[active] >= now_ms]
        return started

    def _running(self) -> Ints:
        """Return the entries that run now on their recorded node."""
        return np.sort(self._active[self._left[self._active] > self._now])

    def _follow(self, place: int, plan: Plan) -> None:
        """Update the marks, evictions and diagnostics of a node after a plan."""
        level, decision = self._node_marks[place].level, plan.nodes.get(self.fleet.nodes[place].name)
        self._note_high(place, high=level >= self.least and decision is not None and decision.tier == "high")
        if level is not Level.DRAIN:
            self._evict_at.pop(place, None)
            self._tests.pop(place, None)
        if level < self.least:
            if place in self._open:
                self._open.pop(place)[2] = self._now
                self._left[slice(*np.searchsorted(self.jobs.node, (place, place + 1)))] = NEVER  # jobs are back
                if self.least.hard:  # a soft taint uses no budget
                    self._wake(self._now + _MINUTE_MS)  # there is room for another now
            return
        if place not in self._open:
            self._open[place] = [place, self._now, NEVER, NEVER, NEVER]
            self._rows.append(self._open[place])
        if decision is None:  # all its GPUs are removed, and nodes without units get no decision
            return
        if level is Level.DRAIN and self._open[place][3] == NEVER and decision.target is Level.DRAIN:
            waits = 0 if decision.rules else self._passed.get(place, -_AGAIN_MS) + _AGAIN_MS
            self._evict_at.setdefault(place, max(self._now, waits))
            self._wake(self._evict_at[place])
        if self._evict_at.get(place, NEVER) <= self._now:
            self._empty(place, decision.remedy)
        elif self._open[place][3] < NEVER and decision.remedy is not None and place not in self._tests:
            self._test(place, self._now, decision.remedy)  # a fault reported on a node that was already drained
        if level is Level.SWAP:
            runs = self._running()
            runs = runs[self.jobs.node[runs] == place]
            if decision.worth is not None and decision.worth.choice == "wait":
                self._wake(int(self.jobs.turns(runs, self._now).min()) + _MINUTE_MS)
            elif len(runs) and "drain" not in self.policy.rungs:
                self._wake(int(self.jobs.end[runs].max()) + _MINUTE_MS)

    def _note_high(self, place: int, *, high: bool) -> None:
        if not high and place in self._open_high:
            self._open_high.pop(place)[2] = self._now
        elif high and place not in self._open_high:
            self._open_high[place] = [place, self._now, NEVER]
            self._high.append(self._open_high[place])

    def _empty(self, place: int, remedy: Remedy | None) -> None:
        evicted_at = self._evict_at.pop(place)
        costs, self._open[place][3] = self.policy.cost_benefit, evicted_at
        departed_at, moved_jobs = evicted(self.fleet, self.jobs, place, evicted_at, self._left, costs.checkpoint)
        self._left[moved_jobs] = departed_at
        self._test(place, int(departed_at.max(initial=evicted_at)), remedy)

    def _test(self, place: int, begins: int, remedy: Remedy | None) -> None:
        takes = procedure(remedy, self.diagnostic, self.policy.cost_benefit)
        if takes is not None:
            self._tests[place] = begins + duration_ms(takes), remedy
            self._wake(begins + duration_ms(takes) + _MINUTE_MS)

    def _tested(self, place: int) -> None:
        fleet, (ends, remedy), row = self.fleet, self._tests.pop(place), self._open[place]
        units = [unit for unit, since, until in fleet.installations[place] if since <= ends < until]
        is_ahead = (fleet.failed == place) & (fleet.at <= ends + duration_ms(self.reach)) & (ends < fleet.until)
        if self.diagnostic == "stated" and remedy is None and self.findable is not None:
            is_ahead &= self.findable
        if not (finds(remedy, self.diagnostic) and is_ahead.any()):
            self._passed[place] = ends
            self._void |= dict.fromkeys(units, from_ms(ends))
            return
        if (fleet.at[is_ahead] > row[1]).any():
            row[4] = min(row[4], row[3] if remedy == "replace" else ends)
        named = {fleet.unit[failure] for failure in np.flatnonzero(is_ahead)}
        self._failed |= dict.fromkeys(units if "" in named else named, Fact("diagnostic_failed", from_ms(ends)))
        self._test(place, ends + _RETRY_MS, "diagnose")

    def _fleet_at(self, now: datetime, newest: ScoredDecision) -> tuple[list[NodeView], list[ObservedNode]]:
        """Return the nodes to decide about, and those at rest, which are only counted."""
        # Older reports are neither valid nor void anything.
        oldest = min(now - DEFAULT_RULES.max_hold, newest.decided_at)
        reports, down = self._reports(oldest, now), self.fleet.down(self._now)
        reported_units = {unit for unit, time in self._void.items() if time > oldest}
        reported_units |= {unit for unit, fact in self._failed.items() if fact.seen_at > oldest}
        known, unknown, low_risk = self._low_risk_nodes(newest, reports.keys() | reported_units)
        reported_places = self._homes_of({*reports, *self._void, *self._failed})
        states = {name: state for name, state in self._state.nodes.items() if not low_risk[self._place[name]]}
        self._state = replace(self._state, nodes=states)  # those of the others are at rest
        running: defaultdict[int, list[JobView]] = defaultdict(list)
        entries = self._running() if self._shows_jobs else self._by_start[:0]
        # jobs that run only on nodes of low risk affect no decision
        is_shown = np.zeros(self._job_count, dtype=np.bool_)
        is_shown[self.jobs.job[entries[~low_risk[self.jobs.node[entries]]]]] = True
        entries = entries[is_shown[self.jobs.job[entries]]]
        shown_jobs = job_views(self.jobs, entries, self._now, self._job_views)
        for place, job in zip(self.jobs.node[entries].tolist(), shown_jobs, strict=True):
            if place not in down:
                running[place].append(job)
        passed = {} if self.probing is None else self.probing.passes(self._now)
        planned_at, fleet = self._planned_at(now), list[NodeView]()
        stale = self._update_rest(np.column_stack([known, unknown, self._mask_of(down)]), low_risk, newest.at, running)
        for place in np.flatnonzero(~low_risk | stale).tolist():
            node, marks, is_low = self._views[place], self._node_marks[place], bool(low_risk[place])
            jobs_here, planned_here = tuple(running.get(place, ())), () if is_low else planned_at.get(node.name, ())
            units_here = int(known[place] + unknown[place])
            units = (
                _COUNTED * units_here
                if is_low
                else self._units(place, newest, reports if place in reported_places else None, passed.get(place))
            )
            inputs = (units, jobs_here, marks, place in down, planned_here)
            if inputs != (node.units, node.jobs, node.marks, node.down, node.planned):
                node = self._views[place] = NodeView(
                    node.name, node.cluster, node.group, node.rack, node.domain, units, jobs_here, marks,
                    down=place in down, planned=planned_here,
                )  # fmt: skip
            if is_low:
                self._observed[place] = ObservedNode(
                    node, False, int(known[place]), False, decided_at=newest.decided_at
                )
            else:
                fleet.append(node)
        return fleet, [self._observed[place] for place in np.flatnonzero(low_risk).tolist()]

    def _update_rest(self, inputs: Ints, low_risk: Bools, scored_at: int, running: Mapping[int, object]) -> Bools:
        """Return the nodes whose observation at rest has changed since the last round.

        ``inputs``: what the observation of a node without jobs depends on; ``scored_at``: time of the scores.
        """
        inputs = np.column_stack([inputs, np.full(len(inputs), scored_at)])
        stale = (inputs != self._rest_inputs).any(axis=1)
        stale[list(running)] = True
        inputs[~low_risk] = -1
        inputs[list(running)] = -1
        self._rest_inputs = inputs
        return stale

    def _reports(self, oldest: datetime, now: datetime) -> Mapping[str, Reported]:
        key = instant_ms(oldest), self._now
        if key not in self.reports:
            known = slice(bisect_right(self._known, key[0]), bisect_right(self._known, self._now))
            self.reports[key] = reported(self.events[known], now)
        return self.reports[key]

    def _planned_at(self, now: datetime) -> dict[str, tuple[tuple[datetime, datetime], ...]]:
        known = bisect_right(self._maintenance, now, key=lambda event: event["known_at"])
        if known != self._planned[0]:
            self._planned = known, planned(self._maintenance[:known], now)
        return self._planned[1]

    def _low_risk_nodes(self, newest: ScoredDecision, exempt: Iterable[str]) -> tuple[Ints, Ints, Bools]:
        """Return each node's number of units with and without a risk, and whether it only has low risks."""
        lowest = self.policy.thresholds.watch or 0.0
        place, code, since, until = self._member.T
        installed = (since <= self._now) & (self._now < until)
        place, code = place[installed], code[installed]
        risk = np.where(code < 0, np.nan, newest.risk[code])
        valid = ~np.isnan(risk)
        nodes = len(self.fleet.nodes)
        known, total = np.bincount(place[valid], minlength=nodes), np.bincount(place, minlength=nodes)
        low_risk = (known > 0) & (np.bincount(place[valid], risk[valid], nodes) < lowest)
        low_risk &= newest.decided_at <= from_ms(self._now) < newest.expires_at
        low_risk[[self._place[name] for name, state in self._state.nodes.items() if not state.at_rest]] = False
        low_risk[[*self._homes_of(exempt)]] = False
        return known, total - known, low_risk

    def _homes_of(self, names: Iterable[str]) -> set[int]:
        return {place for name in names for place in self._homes.get(name, ())}

    def _units(
        self, place: int, newest: ScoredDecision, reports: Mapping[str, Reported] | None, passed: int | None
    ) -> tuple[UnitView, ...]:
        """Return the unit views of a node, cached while their inputs are unchanged.

        ``reports``: None: nothing was ever reported about the node; ``passed``: probe that lowers its risk.
        """
        facts: list[_Facts] | None = None
        node, installed = self.fleet.nodes[place].name, self.fleet.installations[place]
        if reports is not None:
            facts = [
                (reports.get(name) or reports.get(node), self._void.get(name), self._failed.get(name))
                for name, *_ in installed
            ]
        inputs = newest.at, passed, bisect_right(self._moves, self._now), facts
        known, units = self._unit_views.get(place, (None, ()))
        if known != inputs:
            rows = zip(installed, self._codes[place], facts or [(None, None, None)] * len(installed), strict=True)
            units = tuple(
                _unit(newest.view(name, code), *reported)
                for (name, since, until), code, reported in rows
                if since <= self._now < until
            )
            if passed is not None:  # as the decision would do in each round
                probed = (changed(unit, probed_at=from_ms(passed)) for unit in units)
                lowered = (after_probe(unit, self.policy.probes, from_ms(self._now)) for unit in probed)
                units = tuple(changed(unit, probed_at=None) for unit in lowered)
            self._unit_views[place] = inputs, units
        return units


_Facts = tuple[Reported | None, datetime | None, Fact | None]
"""Reports of a unit, the time of its last passed diagnostic after a drain, and its last failed diagnostic."""


def _unit(scored: UnitView, report: Reported | None, void: datetime | None, sick: Fact | None) -> UnitView:
    if not (report or void or sick):
        return scored
    facts, repaired = report or ((), None)
    since = max((time for time in (void, repaired) if time is not None), default=None)
    return UnitView(scored.name, scored.score, (*facts, *(() if sick is None else (sick,))), since)


def procedure(remedy: Remedy | None, diagnostic: Diagnostic, costs: CostBenefitConfig) -> timedelta | None:
    """Return how long remedy and diagnostic take on a drained node; None if neither is run."""
    if remedy is None:
        return None if diagnostic == "none" else costs.verify
    tested = diagnostic != "none" and remedy in ("reset", "reboot")
    return duration_of(remedy, costs) + (costs.verify if tested else timedelta())


def finds(remedy: Remedy | None, diagnostic: Diagnostic) -> bool:
    """Return whether remedy and diagnostic find an existing fault or a failure within reach."""
    return remedy in ("diagnose", "replace") or diagnostic in ("perfect", "stated")
