"""What the controller needs of the world, as protocols, and the lease under which it writes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from policy.config import PolicyConfig
from policy.episodes import Alert, AlertOutcome
from policy.fleet import Level, NodeView
from policy.node_tier.hard_rules import rule_hits
from policy.plan import Action, Plan
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import FleetReading, NodeReading, Precondition, StoredState, Switches, Write, WriteResult
from scheduler.ports.risks import ReportedFacts, Risks


class Clock(Protocol):
    """The time."""

    def now(self) -> datetime:
        """Return the time, aware."""


class RiskSource(Protocol):
    """Where the scores come from."""

    def read(self) -> Risks:
        """Read the newest scores; raises ``SourceError`` if they cannot be read."""


class FactReader(Protocol):
    """What GPUs reported themselves."""

    @property
    def unreadable_events(self) -> int:
        """Events that the last reading left out."""

    def read(self, now: datetime) -> Mapping[str, ReportedFacts]:
        """Return the facts known at ``now``, by unit; raises ``SourceError`` if they cannot be read."""


class FactSource(FactReader, Protocol):
    """What became of earlier alerts, too."""

    def outcomes(self, alerts: Sequence[Alert], now: datetime) -> Sequence[AlertOutcome]:
        """Evaluate earlier alerts by what is known at ``now``; undecided ones are left out.

        Raises ``SourceError`` if events cannot be read: nothing is evaluated then, for silence would look like health.
        """


class SchedulerExtras(Protocol):
    """What only some schedulers need or can do; by default nothing."""

    def as_known(self, node: str) -> NodeReading | None:
        """Return a node as this round's listing or the answer to the last write showed it, with its jobs as of now.

        It saves reading the node before the write: half the time of a burst of taints. Only of a scheduler that itself
        refuses a write to a node that is not exactly as it was read. None: that was too long ago, or a write was tried
        since. Raises ``SchedulerError`` if its jobs cannot be read.
        """
        return None

    def upkeep(self, holder: str, until: datetime) -> tuple[Write, ...]:
        """Restore, under the lease, what the scheduler lost of current marks; never what a person removed."""
        return ()

    def announcing(self, signals: "Sequence[NodeSignal]", *, new: bool) -> tuple[Write, ...]:
        """Return what :meth:`announce` would write for the signals."""
        return ()

    def announce(
        self, signals: "Sequence[NodeSignal]", holder: str, hold: Callable[[], datetime], *, new: bool
    ) -> tuple[str, ...]:
        """Report this round's marks to other tools, on which no decision rests, and withdraw those of former marks.

        ``hold``: as :meth:`Lease.hold`, before each write.
        ``new``: whether new reports may be written; former ones are withdrawn in any case.
        Returns: messages about what was done, and what could not be.
        """
        return ()


class SchedulerAdapter(SchedulerExtras, Protocol):
    """A scheduler. Every write may be repeated.

    A write never raises for what the scheduler reports; it answers. A read raises ``SchedulerError``.
    """

    def read_fleet(self) -> FleetReading:
        """List all nodes and the switches, from the scheduler itself."""

    def revalidate(self, node: str) -> NodeReading | None:
        """Read one node again, from the scheduler itself; None: there is no such node."""

    def preview(self, actions: Sequence[Action], reading: NodeReading) -> tuple[tuple[Write, ...], ...]:
        """Return what :meth:`apply` would write for each of some actions on one node, one after another."""

    def apply(self, action: Action, precondition: Precondition) -> WriteResult:
        """Carry out an action on a node that is still as the precondition says; else answer ``conflict``."""

    def load_state(self) -> StoredState:
        """Read the safety state that is stored in the scheduler."""

    def save_state(self, text: str, version: str) -> WriteResult:
        """Replace the safety state, if it still has this version; the answer holds the new one."""

    def read_switches(self) -> Switches:
        """Read the operator's switches, which may have been set since the fleet was read."""

    def set_switches(self, switches: Switches) -> WriteResult:
        """Set the operator's switches."""

    def hold_lease(self, holder: str, duration: timedelta) -> datetime | None:
        """Take the lease, or prolong one's own.

        Returns: until when it is held, counted from before the request was sent; None: another one holds it.
        """

    def drop_lease(self, holder: str) -> None:
        """Release the lease, if it is held; a failure is ignored, for it ends by itself."""


class LeaseLostError(Exception):
    """Another replica is active, or it is not known: nothing more may be written."""


@dataclass(slots=True)
class Lease:
    """The right to write, as this process holds it; ``until`` None: not held."""

    scheduler: SchedulerAdapter
    clock: Clock
    holder: str
    duration: timedelta
    until: datetime | None = None

    def take(self) -> bool:
        """Take or prolong it; False: another replica holds it. Raises ``SchedulerError`` if it is not known."""
        self.until = None
        self.until = self.scheduler.hold_lease(self.holder, self.duration)
        return self.until is not None

    def hold(self) -> datetime:
        """Return its end, prolonged where half of it is over; raises ``LeaseLostError`` if it may not be held."""
        try:
            if self.until is None or self.until - self.clock.now() < self.duration / 2:
                self.take()
        except SchedulerError as error:
            raise LeaseLostError(f"the state of the lease is unknown: {error}") from error
        if self.until is None:
            raise LeaseLostError("another replica holds the lease")
        return self.until


@dataclass(frozen=True, slots=True)
class NodeSignal:
    """A node that carries predrain's marks.

    ``level``: as the scheduler has confirmed it.
    ``units``: the GPUs that it is due to, the weightiest first; none: not known any more.
    """

    node: str
    tier: str
    level: Level
    units: tuple[str, ...]
    reasons: tuple[str, ...]


def signals_of(
    plan: Plan, views: Iterable[NodeView], levels: Mapping[str, Level], policy: PolicyConfig
) -> tuple[NodeSignal, ...]:
    """Return a signal for each node that carries predrain's marks, by the current ``levels``."""
    made = []
    for view in views:
        level, decision = levels.get(view.name, Level.NONE), plan.nodes.get(view.name)
        if level is Level.NONE or decision is None or not view.readable:
            continue
        known = plan.state.nodes.get(view.name)
        support = known.tier.support if known is not None else ()
        hits = rule_hits(view, policy.rules, plan.now)
        units = dict.fromkeys(
            [hit.unit for hit in hits if hit.rule.tier == decision.tier]
            + [score.unit for score in sorted(support, key=lambda score: -score.risk)]
        )
        made.append(NodeSignal(view.name, decision.tier, level, tuple(units), decision.reasons))
    return tuple(sorted(made, key=lambda signal: signal.node))
