"""Protocols of the controller's dependencies, and the lease under which it writes."""

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
    """A clock."""

    def now(self) -> datetime:
        """Return the current time, aware."""


class RiskSource(Protocol):
    """Source of scores."""

    def read(self) -> Risks:
        """Read the newest scores; raises ``SourceError`` if they cannot be read."""


class FactReader(Protocol):
    """Source of reported facts."""

    @property
    def unreadable_events(self) -> int:
        """Number of events that the last read ignored."""

    def read(self, now: datetime) -> Mapping[str, ReportedFacts]:
        """Return the facts known at ``now``, by unit; raises ``SourceError`` if they cannot be read."""


class FactSource(FactReader, Protocol):
    """Source of reported facts and of alert outcomes."""

    def outcomes(self, alerts: Sequence[Alert], now: datetime) -> Sequence[AlertOutcome]:
        """Evaluate earlier alerts with the history known at ``now``.

        Raises ``SourceError`` if the history cannot be read, because missing events would look like health.
        """


class SchedulerExtras(Protocol):
    """Optional operations of a scheduler; no-ops by default."""

    def as_known(self, node: str) -> NodeReading | None:
        """Return a node from this round's list or the response to the last write, with its current jobs.

        This saves re-reading the node before a write, half the time of a burst of taints. Only for schedulers with
        optimistic locking. None: too old, or a write was attempted since.
        """
        return None

    def upkeep(self, holder: str, until: datetime) -> tuple[Write, ...]:
        """Restore current markers that the scheduler lost; never markers that an operator removed."""
        return ()

    def announcing(self, signals: "Sequence[NodeSignal]", *, new: bool) -> tuple[Write, ...]:
        """Return the writes of :meth:`announce`."""
        return ()

    def announce(
        self, signals: "Sequence[NodeSignal]", holder: str, hold: Callable[[], datetime], *, new: bool
    ) -> tuple[str, ...]:
        """Publish this round's markers to other tools, and withdraw outdated ones; no decision depends on them.

        ``hold``: :meth:`Lease.hold`, called before each write.
        ``new``: whether new signals may be written; outdated ones are always withdrawn.
        Returns: messages about changes and failures.
        """
        return ()


class SchedulerAdapter(SchedulerExtras, Protocol):
    """A scheduler; writes are idempotent.

    Reads raise ``SchedulerError``. Writes return errors of the scheduler in the result and do not raise.
    """

    def read_fleet(self) -> FleetReading:
        """Read all nodes and the switches, uncached."""

    def server_time(self) -> datetime | None:
        """Return the time of the scheduler's own clock, at most seconds ago; None: unknown."""

    def revalidate(self, node: str) -> NodeReading | None:
        """Re-read one node, uncached; None if it does not exist."""

    def preview(self, actions: Sequence[Action], reading: NodeReading) -> tuple[tuple[Write, ...], ...]:
        """Return what :meth:`apply` would write for each of several consecutive actions on one node."""

    def apply(self, action: Action, precondition: Precondition) -> WriteResult:
        """Carry out an action if the precondition holds; otherwise return ``conflict``."""

    def load_state(self) -> StoredState:
        """Read the safety state stored in the scheduler."""

    def save_state(self, text: str, version: str) -> WriteResult:
        """Replace the safety state if it still has this version; the result has the new version."""

    def read_switches(self) -> Switches:
        """Read the operator's switches, which may have changed since the fleet was read."""

    def set_switches(self, switches: Switches) -> WriteResult:
        """Set the operator's switches."""

    def hold_lease(self, holder: str, duration: timedelta) -> datetime | None:
        """Acquire or renew the lease.

        Returns: its expiry, counted from before the request was sent; None if another process holds it.
        """

    def drop_lease(self, holder: str) -> None:
        """Release the lease if held; failures are ignored, because it expires."""


class LeaseLostError(Exception):
    """Another replica may be active: no further writes are allowed."""


@dataclass(slots=True)
class Lease:
    """This process's lease; ``until`` None: not held."""

    scheduler: SchedulerAdapter
    clock: Clock
    holder: str
    duration: timedelta
    until: datetime | None = None

    def take(self) -> bool:
        """Acquire or renew the lease; False if another replica holds it. Raises ``SchedulerError`` if unknown."""
        self.until = None
        self.until = self.scheduler.hold_lease(self.holder, self.duration)
        return self.until is not None

    def hold(self) -> datetime:
        """Return the expiry, after renewal in the second half; raises ``LeaseLostError`` if it may not be held."""
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
    """A node with predrain's markers.

    ``units``: the GPUs that caused it, most important first; empty if no longer known.
    """

    node: str
    tier: str
    level: Level
    units: tuple[str, ...]
    reasons: tuple[str, ...]


def signals_of(
    plan: Plan, views: Iterable[NodeView], levels: Mapping[str, Level], policy: PolicyConfig
) -> tuple[NodeSignal, ...]:
    """Return a signal for each node with predrain's markers, with the current ``levels``."""
    signals = []
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
        signals.append(NodeSignal(view.name, decision.tier, level, tuple(units), decision.reasons))
    return tuple(sorted(signals, key=lambda signal: signal.node))
