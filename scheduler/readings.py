"""What was read from a scheduler: nodes with their versions, and the switches that people set."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from policy.fleet import NodeView


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One node, as read just now.

    ``view``: units without scores: those that the scheduler knows to be in the node now; none where it does not know.
    ``version``: changes with every change of the node.
    ``boot_id``: changes with every boot; None: not known.
    """

    view: NodeView
    version: str
    boot_id: str | None = None


@dataclass(frozen=True, slots=True)
class Switches:
    """What a person told the controller, kept in the scheduler so that every replica sees it.

    ``kill``: nothing new anywhere; only what was given back is given back.
    ``release_all``: everything of ours is taken off, and nothing put on.
    ``reset_breaker_at``: when the breaker was last closed by hand; aware.
    """

    kill: bool = False
    release_all: bool = False
    reset_breaker_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class FleetReading:
    """Everything that a decision needs from the scheduler, read at one time.

    ``nodes``: of one listing from the scheduler itself, not from a cache that may lag behind our own writes.
    ``read_at``: when the listing was asked for; aware.
    ``trouble``: what could not be read, in words; the breaker stays open as long as it is so.
    """

    nodes: tuple[NodeReading, ...]
    read_at: datetime
    switches: Switches = Switches()
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class StoredState:
    """The safety state as it is kept in the scheduler.

    ``text``: as :func:`scheduler.stored_state.state_text` writes it; None: there is none yet.
    ``version``: to be given with the next write, which fails if somebody else wrote in between.
    """

    text: str | None
    version: str
