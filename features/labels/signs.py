"""Signs: the label-worthy events of a unit, as they came to be known."""

from __future__ import annotations

from dataclasses import dataclass, field

from features.times import NEVER


@dataclass(frozen=True, slots=True, order=True)
class Sign:
    """One label-worthy event of a unit: when it happened, and from when until when it is known to count (ms).

    ``ticket``: code of a ``failure`` event, as it is compared with that of a repair; else empty.
    ``fact``: position of the fact where that may be the ticket of an earlier failure; else -1.
    """

    time: int
    established: int
    class_index: int
    code: str
    node: str
    ticket: str
    fact: int = -1
    until: int = NEVER


@dataclass(slots=True)
class UnitEvidence:
    """The facts of one unit that make and end its incidents, each list in ascending order.

    ``tickets``: what is known to be the ticket of the newest of ``signs`` before it: the unit is down until then at
    least, but nothing begins.
    ``ends``: Repairs, replacements, resets and removals, without repairs of one failure that leave another open: when
    they happened, and from when that is known.
    ``own_ends``: those of ``ends`` that take the unit out of the node or mend it, or mend its node (no resets).
    """

    signs: list[Sign] = field(default_factory=list)
    tickets: list[Sign] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    own_ends: list[tuple[int, int]] = field(default_factory=list)
