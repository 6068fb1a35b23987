"""What the scheduler says of nodes, joined with what is known of their units: scores, and what they reported."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from policy.fleet import NodeView, UnitView
from policy.plan import PolicyState
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.protocols import FactSource, RiskSource
from scheduler.ports.risks import NO_RISKS, ReportedFacts, Risks
from telemetry.identity.nodes import NodeNames

_NAMED = 3
_NOTHING = ReportedFacts()


def _named(names: Sequence[str], between: str = ", ") -> str:
    few = between.join(names[:_NAMED])
    return few if len(names) <= _NAMED else f"{few} and {len(names) - _NAMED} more"


@dataclass(slots=True)
class Evidence:
    """The newest scores and facts.

    ``facts``: as last read, by unit, and by node where one is known of it.
    ``risks_known``, ``facts_known``: whether they could ever be read in this process.
    """

    risk_source: RiskSource
    fact_source: FactSource
    risks: Risks = NO_RISKS
    facts: Mapping[str, ReportedFacts] = field(default_factory=dict)
    risks_known: bool = False
    facts_known: bool = False
    _scores: Mapping[str, UnitView] = field(default_factory=dict)
    _scored: NodeNames = field(default_factory=lambda: NodeNames(()))
    _reported: NodeNames = field(default_factory=lambda: NodeNames(()))
    _listed: NodeNames = field(default_factory=lambda: NodeNames(()))

    def list_nodes(self, names: Iterable[str]) -> None:
        """Take the names of all nodes as the scheduler spells them; scores and events may spell them otherwise."""
        self._listed = NodeNames(names)

    def refresh(self, now: datetime, log: RoundLog) -> None:
        """Reload scores and facts; a source that fails keeps its previous content until that expires."""
        with log.boundary("the scores"):
            self._read_risks()
        with log.boundary("the events"):
            self._read_facts(now)

    @property
    def known(self) -> bool:
        """Whether scores and facts were both read since the process began."""
        return self.risks_known and self.facts_known

    def newest(self, view: NodeView, now: datetime) -> tuple[UnitView, ...]:
        """Return a node's units with what is known of them now, read again.

        Raises whatever a source raises that cannot be read: then nothing new may be done on the node.
        """
        self._read_risks()
        self._read_facts(now)
        return self.units_of(view)

    def units_of(self, view: NodeView) -> tuple[UnitView, ...]:
        """Return a node's units: those that the scheduler knows to be in it, else those that were scored on it.

        The latter may have been in another machine of that name: what was known before the node came is void.
        """
        if view.units:
            return tuple(self._with_evidence(unit, view.name) for unit in view.units)
        name = self._spelled(view.name, self._scored)
        scored = tuple(self._with_evidence(unit, view.name) for unit in self.risks.nodes.get(name, ()))
        decided, since = self.risks.decided_at, view.since
        if since is None or (decided is not None and decided >= since):
            return scored
        return tuple(replace(unit, valid_from=max(unit.valid_from or since, since)) for unit in scored)

    def mismatches(self, views: Iterable[NodeView]) -> tuple[str, ...]:
        """Say which records of the scores were refused, and which nodes are known to only one side."""
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
        """Return a node with its units, and the maintenance that events tell of.

        A node with our marks always has one: else, where the scores cannot be read, its marks would never be removed
        when they expire. Those are the units that the marks rest on, or one without a name of its own.
        """
        units = self.units_of(view)
        if not units and view.marks.level:
            known = state.nodes.get(view.name)
            names = [score.unit for score in known.tier.support] if known is not None else []
            units = tuple(self._with_evidence(UnitView(name), view.name) for name in names or [view.name])
        return replace(
            view, units=units, planned=self.facts.get(self._spelled(view.name, self._reported), _NOTHING).planned
        )

    def _spelled(self, node: str, names: NodeNames) -> str:
        """Return a node's spelling in another source, or the name itself unless exactly one node there has it."""
        other = names.find(node)
        # One short name must not represent two nodes of the scheduler.
        return node if other is None or set(self._listed.candidates(other)) - {node} else other

    def _with_evidence(self, unit: UnitView, node: str) -> UnitView:
        scored, facts = self._scores.get(unit.name, UnitView(unit.name)), self.facts.get(unit.name)
        repaired = self.facts.get(self._spelled(node, self._reported), _NOTHING).valid_from  # with no word of which GPU
        if facts is None and unit.valid_from is None and repaired is None:
            return scored  # most units by far
        facts = facts or _NOTHING
        since = [when for when in (facts.valid_from, unit.valid_from, repaired) if when is not None]
        return UnitView(unit.name, scored.score, facts.facts, max(since, default=None), facts.probed_at)

    def _read_risks(self) -> None:
        risks = self.risk_source.read()
        if risks is not self.risks:
            names = NodeNames(risks.nodes)
            self._scores = {unit.name: unit for units in risks.nodes.values() for unit in units}
            self.risks, self._scored = risks, names
        self.risks_known = True

    def _read_facts(self, now: datetime) -> None:
        read = self.fact_source.read(now)
        self._reported = NodeNames(name for name, facts in read.items() if facts.planned or facts.valid_from)
        self.facts = read
        self.facts_known = True
