"""What the scheduler says of nodes, joined with what is known of their units: scores, and what they reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from policy.fleet import NodeView, UnitView
from policy.state import PolicyState
from scheduler.failures import SourceError
from scheduler.ports import FactSource, RiskSource
from scheduler.risks import NO_RISKS, Facts, Risks


@dataclass(slots=True)
class Evidence:
    """The newest scores and facts.

    Attributes
    ----------
    risk_source : RiskSource
    fact_source : FactSource
    risks : Risks
        As last read.
    facts : mapping of str to Facts
        As last read, by unit.
    facts_known : bool
        Whether facts could ever be read in this process.
    """

    risk_source: RiskSource
    fact_source: FactSource
    risks: Risks = NO_RISKS
    facts: Mapping[str, Facts] = field(default_factory=dict)
    facts_known: bool = False
    _scores: Mapping[str, UnitView] = field(default_factory=dict)

    def refresh(self, now: datetime) -> tuple[str, ...]:
        """Read both anew; what cannot be read stays as it was, until it expires by itself.

        Returns
        -------
        tuple of str
            What could not be read, in words.
        """
        troubles: list[str] = []
        try:
            self._take_risks()
        except SourceError as error:
            troubles.append(f"{error}; what was read before holds until it expires")
        try:
            self._take_facts(now)
        except SourceError as error:
            troubles.append(f"what GPUs reported cannot be read: {error}")
        return tuple(troubles)

    def newest(self, view: NodeView, now: datetime) -> tuple[UnitView, ...]:
        """Give a node's units with what is known of them now, read anew.

        Raises
        ------
        SourceError
            If it cannot be read: then nothing new may be done on the node.
        """
        self._take_risks()
        self._take_facts(now)
        return self.units_of(view)

    def units_of(self, view: NodeView) -> tuple[UnitView, ...]:
        """Give a node's units: those that the scheduler knows to be in it, else those that were scored on it."""
        listed = view.units or self.risks.nodes.get(view.name, ())
        return tuple(self._with_evidence(unit) for unit in listed)

    def placed(self, view: NodeView, state: PolicyState) -> NodeView:
        """Give a node with its units.

        A node with marks of ours always has one: else, where the scores cannot be read, nobody would take its marks off
        when they expire. Those are the units that the marks rest on, or one without a name of its own.
        """
        units = self.units_of(view)
        if not units and view.marks.level:
            known = state.nodes.get(view.name)
            names = [each.unit for each in known.tier.support] if known is not None else []
            units = tuple(self._with_evidence(UnitView(name)) for name in names or [view.name])
        return replace(view, units=units)

    def _with_evidence(self, unit: UnitView) -> UnitView:
        scored, facts = self._scores.get(unit.name), self.facts.get(unit.name)
        if facts is None and scored is not None and not scored.facts and scored.valid_from == unit.valid_from:
            return scored  # what is put together below, and most units by far
        return UnitView(
            unit.name,
            scored.score if scored is not None else None,
            facts.facts if facts is not None else (),
            facts.valid_from if facts is not None else unit.valid_from,
        )

    def _take_risks(self) -> None:
        risks = self.risk_source.read()
        if risks is not self.risks:
            self.risks = risks
            self._scores = {unit.name: unit for units in risks.nodes.values() for unit in units}

    def _take_facts(self, now: datetime) -> None:
        self.facts = self.fact_source.read(now)
        self.facts_known = True
