"""Joins the scheduler's nodes with the scores and reported facts of their GPUs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from foundation.running import Patience
from policy.fleet import NodeView, UnitView
from policy.plan import PolicyState
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.protocols import FactSource, RiskSource
from scheduler.ports.risks import NO_RISKS, ReportedFacts, Risks
from telemetry.identity.nodes import NodeNames

_NAMED = 3
_NO_FACTS = ReportedFacts()


def _named(names: Sequence[str], separator: str = ", ") -> str:
    listed = separator.join(names[:_NAMED])
    return listed if len(names) <= _NAMED else f"{listed} and {len(names) - _NAMED} more"


@dataclass(slots=True)
class Evidence:
    """The newest scores and facts.

    ``patience``: bounds each read.
    ``facts``: as last read, by unit, and by node for facts about a node.
    ``risks_known``, ``facts_known``: whether they were ever read in this process.
    """

    risk_source: RiskSource
    fact_source: FactSource
    patience: Patience
    risks: Risks = NO_RISKS
    facts: Mapping[str, ReportedFacts] = field(default_factory=dict)
    risks_known: bool = False
    facts_known: bool = False
    _scores: Mapping[str, UnitView] = field(default_factory=dict)
    _scored: NodeNames = field(default_factory=lambda: NodeNames(()))
    _reported: NodeNames = field(default_factory=lambda: NodeNames(()))
    _listed: NodeNames = field(default_factory=lambda: NodeNames(()))

    def list_nodes(self, names: Iterable[str]) -> None:
        """Set the node names of the scheduler; scores and events may spell them differently."""
        self._listed = NodeNames(names)

    def refresh(self, now: datetime, log: RoundLog) -> None:
        """Reload scores and facts; if a source fails, its previous content is used until it expires."""
        with log.boundary("the scores"):
            self._read_risks()
        with log.boundary("the events"):
            self._read_facts(now)

    @property
    def known(self) -> bool:
        """Whether scores and facts were both read since the process started."""
        return self.risks_known and self.facts_known

    def newest(self, view: NodeView, now: datetime) -> tuple[UnitView, ...]:
        """Re-read the sources and return a node's units with their evidence.

        Raises the error of a source that cannot be read: no new action on the node is allowed then.
        """
        self._read_risks()
        self._read_facts(now)
        return self.units_of(view)

    def units_of(self, view: NodeView) -> tuple[UnitView, ...]:
        """Return a node's units: those that the scheduler reports, else those that the scores list for it.

        The latter may belong to an earlier machine of that name: evidence from before the node joined is void.
        """
        repaired = self._of_node(view.name).valid_from  # events that name no GPU
        if view.units:
            return tuple(self._with_evidence(unit, repaired) for unit in view.units)
        name = self._spelled(view.name, self._scored)
        scored = tuple(self._with_evidence(unit, repaired) for unit in self.risks.nodes.get(name, ()))
        decided, since = self.risks.decided_at, view.since
        # Decided after the node joined: these are the GPUs of the present machine.
        if since is None or (decided is not None and decided >= since):
            return scored
        return tuple(replace(unit, valid_from=max(unit.valid_from or since, since)) for unit in scored)

    def mismatches(self, views: Iterable[NodeView]) -> tuple[str, ...]:
        """Report rejected scores, ignored events, and nodes known only to the scheduler or only to the scores."""
        refused = self.risks.refused
        notes = [f"{len(refused)} scores are rejected: {_named(refused, '; ')}"] if refused else []
        if self.fact_source.unreadable_events:
            notes.append(f"{self.fact_source.unreadable_events} events are ignored: invalid timestamps")
        if not self.risks.nodes:
            return tuple(notes)
        listed = {view.name: bool(view.units) for view in views}
        strangers = sorted(self.risks.nodes.keys() - {self._spelled(name, self._scored) for name in listed})
        bare = sorted(name for name, has in listed.items() if not has)
        if strangers:
            notes.append(f"scores of {_named(strangers)} match no node: the name is unknown or ambiguous")
        if bare:
            notes.append(f"no scores for {_named(bare)}: not counted, no actions")
        return tuple(notes)

    def placed(self, view: NodeView, state: PolicyState) -> NodeView:
        """Return a node with its units and the planned maintenance from events.

        A node with predrain markers always has a unit, or its markers would not be removed on expiry while the scores
        cannot be read: the units that the markers are based on, or one named after the node.
        """
        units, facts = self.units_of(view), self._of_node(view.name)
        if not units and view.marks.level:
            known = state.nodes.get(view.name)
            names = [score.unit for score in known.tier.support] if known is not None else []
            units = tuple(self._with_evidence(UnitView(name), facts.valid_from) for name in names or [view.name])
        return replace(view, units=units, planned=facts.planned)

    def _of_node(self, name: str) -> ReportedFacts:
        return self.facts.get(self._spelled(name, self._reported), _NO_FACTS)

    def _spelled(self, node: str, names: NodeNames) -> str:
        """Return a node's name in another source, or ``node`` itself if the match is missing or ambiguous."""
        other = names.find(node)
        # A short name must not match two nodes of the scheduler.
        return node if other is None or set(self._listed.candidates(other)) - {node} else other

    def _with_evidence(self, unit: UnitView, repaired: datetime | None) -> UnitView:
        scored, facts = self._scores.get(unit.name, UnitView(unit.name)), self.facts.get(unit.name)
        if facts is None and unit.valid_from is None and repaired is None:
            return scored  # fast path for most units
        facts = facts or _NO_FACTS
        since = [instant for instant in (facts.valid_from, unit.valid_from, repaired) if instant is not None]
        return UnitView(unit.name, scored.score, facts.facts, max(since, default=None), facts.probed_at)

    def _read_risks(self) -> None:
        risks = self.patience.call("the scores", self.risk_source.read)
        if risks is not self.risks:
            names = NodeNames(risks.nodes)
            self._scores = {unit.name: unit for units in risks.nodes.values() for unit in units}
            self.risks, self._scored = risks, names
        self.risks_known = True

    def _read_facts(self, now: datetime) -> None:
        read = self.patience.call("the events", lambda: self.fact_source.read(now))
        self._reported = NodeNames(name for name, facts in read.items() if facts.planned or facts.valid_from)
        self.facts = read
        self.facts_known = True
