"""What several nodes report together has one cause: a burst is one piece of evidence, and not one for each node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime
from policy.fleet import NodeView

RISK = "a high risk"
"""What a node reports whose risk reached ``high``; seen when its episode began."""

TEST = "diagnostic_failed"
"""Diagnostics that run everywhere at once find sick nodes at once: only a node's neighbours make a burst of them."""

_NAMED = 3


@checked(frozen=True, slots=True)
class CommonCauseConfig:
    """When evidence of several nodes is a burst.

    ``min_nodes``: fewer are chance.
    ``anywhere``: from one node of a burst to the next, anywhere in the fleet.
    ``nearby``: likewise, among the nodes of one job, rack or NVLink domain.
    """

    min_nodes: PositiveInt = 3
    anywhere: NonNegativeTime = timedelta(seconds=30)
    nearby: NonNegativeTime = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Report:
    """What a node shows that asks for ``high``: the name of a fact, or :data:`RISK`, and since when."""

    fact: str
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Burst:
    """Evidence with one cause; ``nodes``: those that have no other evidence, by name."""

    key: str
    message: str
    nodes: tuple[str, ...]


_Seen = tuple[datetime, str, Report]


def bursts(nodes: Sequence[tuple[NodeView, Sequence[Report]]], config: CommonCauseConfig) -> tuple[Burst, ...]:
    """Find the bursts among the reports of nodes; a node with a report that is in none of them has its own evidence.

    Risks rise together in a sick model, too, which the breaker sees by itself: they only make a burst where most nodes
    of a place show one.
    """
    if sum(bool(reports) for _, reports in nodes) < config.min_nodes:
        return ()
    reported: defaultdict[tuple[str, str], list[_Seen]] = defaultdict(list)
    onsets = [(node, _onsets(reports, config.nearby)) for node, reports in nodes if reports]
    for node, reports in onsets:
        for scope in node.scopes:
            if scope[0] in _SCOPES:
                reported[scope] += [(report.seen_at, node.name, report) for report in reports]
    places = {scope: seen for scope, seen in reported.items() if len(seen) >= config.min_nodes}
    near = places.keys() - {("fleet", "")}  # only a chain of risks needs the size of its place, and the fleet has none
    sizes = Counter([scope for node, _ in nodes for scope in node.scopes if scope in near] if near else ())
    found: list[tuple[tuple[str, str], list[_Seen]]] = []
    for scope, seen in places.items():
        anywhere = scope[0] == "fleet"
        for risks in (False, True):
            mine = [one for one in seen if (one[2].fact == RISK) is risks and not (anywhere and one[2].fact in _NEAR)]
            least = max(config.min_nodes, sizes[scope] // 2 + 1 if risks else 0)
            gap = config.anywhere if anywhere else config.nearby
            found += [(scope, chain) for chain in _chains(mine, gap) if len({name for _, name, _ in chain}) >= least]
    shared = {(name, report) for _, chain in found for _, name, report in chain}
    own = {node.name for node, reports in onsets if any((node.name, report) not in shared for report in reports)}
    merged: dict[str, Burst] = {}
    for scope, chain in sorted(found, key=lambda burst: -len(burst[1])):
        told = {name for burst in merged.values() for name in burst.nodes}
        held = {name for _, name, _ in chain} - own
        if held - told:
            burst = _burst(scope, chain, tuple(sorted(held)))
            merged.setdefault(burst.key, burst)
    return tuple(merged.values())


_SCOPES = ("fleet", "rack", "domain", "job")
_NEAR = (RISK, TEST)


def _onsets(reports: Sequence[Report], gap: timedelta) -> list[Report]:
    """Leave out what follows a report: a node that goes on reporting must not tie others' reports together."""
    kept: list[Report] = []
    last: dict[bool, datetime] = {}
    for report in sorted(reports, key=lambda report: report.seen_at):
        of_risk = report.fact == RISK
        if of_risk not in last or report.seen_at - last[of_risk] > gap:
            kept.append(report)
        last[of_risk] = report.seen_at
    return kept


def _chains(seen: Iterable[_Seen], gap: timedelta) -> Iterator[list[_Seen]]:
    chain: list[_Seen] = []
    for one in sorted(seen, key=lambda one: one[:2]):
        if chain and one[0] - chain[-1][0] > gap:
            yield chain
            chain = []
        chain.append(one)
    if chain:
        yield chain


def _burst(scope: tuple[str, str], chain: Sequence[_Seen], held: tuple[str, ...]) -> Burst:
    kinds: Mapping[str, None] = dict.fromkeys(report.fact for _, _, report in chain)
    facts = ", ".join(sorted(kinds)[:_NAMED])
    where = "of the fleet" if scope[0] == "fleet" else f"of {scope[0]} {scope[1]}"
    first, count = chain[0][0], len({name for _, name, _ in chain})
    message = (
        f"{count} nodes {where} report {facts} together, from {first:%Y-%m-%d %H:%M} UTC: one cause, and no evidence "
        "against each of them"
    )
    return Burst(f"together {scope[0]} {scope[1]} {first:%Y-%m-%dT%H}", message, held)
