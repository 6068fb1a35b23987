"""A scheduler in memory: nodes with labels, annotations and taints, versions, a lease, and failures on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from policy.fleet import NodeView
from policy.plan import Action
from scheduler.ports.errors import SchedulerError
from scheduler.ports.node_object import Keys, NodeObject, after, marks_of, view_of, writes_between
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import Answer, FleetReading, NodeReading, Precondition, StoredState, Switches, Write


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """One node of it."""

    object: NodeObject
    base: NodeView
    boot_id: str | None = None
    version: int = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """Who is the active replica, and until when."""

    holder: str
    until: datetime


def _nothing() -> None:
    return None


class MemoryScheduler:
    """A scheduler whose cluster is a dictionary.

    ``changed``: called after each change, to keep it.
    ``nodes``: may be changed by hand, through :meth:`edit`, as other people and tools do.
    """

    def __init__(
        self,
        nodes: Iterable[MemoryNode],
        clock: Clock,
        keys: Keys = Keys(),  # noqa: B008 - frozen
        changed: Callable[[], None] = _nothing,
    ) -> None:
        self.nodes = {each.object.name: each for each in nodes}
        self.keys = keys
        self.switches = Switches()
        self.faults = Faults()
        self.state: str | None = None
        self.state_version = 0
        self.lease: Lease | None = None
        self._clock = clock
        self._changed = changed

    def edit(self, node: str, change: Callable[[MemoryNode], MemoryNode]) -> None:
        """Change a node by somebody else's hand: it has another version afterwards."""
        old = self.nodes[node]
        self.nodes[node] = replace(change(old), version=old.version + 1)
        self._changed()

    def read_fleet(self) -> FleetReading:
        """List all nodes."""
        self._readable("read_fleet")
        read_at = self._clock.now()
        return FleetReading(tuple(self._reading(each) for each in self.nodes.values()), read_at, self.switches)

    def revalidate(self, node: str) -> NodeReading | None:
        """Read one node anew."""
        self._readable("revalidate")
        found = self.nodes.get(node)
        return None if found is None else self._reading(found)

    def preview(self, actions: Sequence[Action], reading: NodeReading) -> tuple[tuple[Write, ...], ...]:
        """Give what would be written now."""
        found = self.nodes.get(reading.view.name)
        if found is None:
            return tuple(() for _ in actions)
        thing, now, made = found.object, self._clock.now(), []
        for action in actions:
            then = after(action, thing, self.keys, now)
            made.append(writes_between(thing, then))
            thing = then
        return tuple(made)

    def apply(self, action: Action, precondition: Precondition) -> Answer:
        """Carry out an action."""

        def effect() -> Answer:
            found = self.nodes.get(action.node)
            if found is None:
                return Answer("gone", f"there is no node {action.node}")
            now = self._clock.now()
            if str(found.version) != precondition.version or found.boot_id != precondition.boot_id:
                return Answer("conflict", f"version {found.version}, expected {precondition.version}")
            if marks_of(found.object, self.keys, now).level != precondition.marks.level:
                return Answer("conflict", "other marks of ours stand on it than expected")
            if self.lease is None or self.lease.holder != precondition.holder or now >= self.lease.until:
                return Answer("refused", f"{precondition.holder} does not hold the lease")
            then = after(action, found.object, self.keys, now)
            writes = writes_between(found.object, then)
            if not writes:
                return Answer("already", "it stood so", (), str(found.version))
            self.nodes[action.node] = replace(found, object=then, version=found.version + 1)
            self._changed()
            return Answer("done", "", writes, str(found.version + 1))

        return self._written("apply", effect)

    def load_state(self) -> StoredState:
        """Read the safety state."""
        self._readable("load_state")
        return StoredState(self.state, str(self.state_version))

    def save_state(self, text: str, version: str) -> Answer:
        """Replace the safety state."""

        def effect() -> Answer:
            if version != str(self.state_version):
                return Answer("conflict", f"the state has version {self.state_version}, expected {version}")
            if text != self.state:
                self.state, self.state_version = text, self.state_version + 1
                self._changed()
            return Answer("done", "", (), str(self.state_version))

        return self._written("save_state", effect)

    def read_switches(self) -> Switches:
        """Read the switches."""
        self._readable("read_switches")
        return self.switches

    def set_switches(self, switches: Switches) -> Answer:
        """Set the switches."""

        def effect() -> Answer:
            if switches == self.switches:
                return Answer("already")
            self.switches = switches
            self._changed()
            return Answer("done")

        return self._written("set_switches", effect)

    def hold_lease(self, holder: str, lasts: timedelta) -> datetime | None:
        """Take or prolong the lease."""
        self._readable("hold_lease")
        now = self._clock.now()
        if self.lease is not None and self.lease.holder != holder and now < self.lease.until:
            return None
        self.lease = Lease(holder, now + lasts)
        self._changed()
        return self.lease.until

    def drop_lease(self, holder: str) -> None:
        """Give the lease back."""
        if self.lease is not None and self.lease.holder == holder:
            self.lease = None
            self._changed()

    def _reading(self, node: MemoryNode) -> NodeReading:
        view = view_of(node.object, node.base, self.keys, self._clock.now())
        return NodeReading(view, str(node.version), node.boot_id)

    def _readable(self, call: str) -> None:
        fault = self.faults.meet(call)
        if fault in ("crash_before", "crash_after"):
            raise Crash(call)
        if fault is not None:
            raise SchedulerError(f"{call}: {_WORDS[fault]}")

    def _written(self, call: str, effect: Callable[[], Answer]) -> Answer:
        fault = self.faults.meet(call)
        if fault == "crash_before":
            raise Crash(call)
        if fault in ("timeout_before", "unreadable"):
            return Answer("timeout", _WORDS[fault])
        if fault == "conflict":
            return Answer("conflict", _WORDS[fault])
        if fault == "refused":
            return Answer("refused", _WORDS[fault])
        answer = effect()
        if fault == "crash_after":
            raise Crash(call)
        return Answer("timeout", _WORDS[fault]) if fault == "timeout_after" else answer


_WORDS: dict[FaultKind, str] = {
    "conflict": "somebody wrote in between", "refused": "not allowed", "timeout_before": "no answer",
    "timeout_after": "no answer", "unreadable": "unreadable", "crash_before": "", "crash_after": "",
}  # fmt: skip


FaultKind = Literal[
    "conflict", "refused", "timeout_before", "timeout_after", "unreadable", "crash_before", "crash_after"
]  # fmt: skip


class Crash(BaseException):
    """The process dies here. No handler of ordinary errors may catch it."""


@dataclass(slots=True)
class _Planned:
    kind: FaultKind
    call: str | None
    skip: int


class Faults:
    """Failures that are planned for calls to come.

    ``before`` means that the call had no effect, ``after`` that it had all of it and nobody was told.
    """

    def __init__(self) -> None:
        self._planned: list[_Planned] = []
        self.calls: list[str] = []

    def plan(self, kind: FaultKind, call: str | None = None, skip: int = 0) -> None:
        """Let a call fail: the next one, or after ``skip`` others; of one name only, where ``call`` is given."""
        self._planned.append(_Planned(kind, call, skip))

    def clear(self) -> None:
        """Let everything succeed again."""
        self._planned.clear()

    def meet(self, call: str) -> FaultKind | None:
        """Note a call; give how it is to fail."""
        self.calls.append(call)
        for each in self._planned:
            if each.call not in (None, call):
                continue
            if each.skip:
                each.skip -= 1
                continue
            self._planned.remove(each)
            return each.kind
        return None
