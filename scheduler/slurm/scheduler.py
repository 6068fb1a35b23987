"""Slurm adapter of the controller."""

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

from policy.fleet import JobView
from policy.plan import Action
from scheduler.ports.errors import SchedulerError, described
from scheduler.ports.protocols import Clock, SchedulerExtras
from scheduler.ports.readings import FleetReading, NodeReading, Precondition, Switches, Write, WriteResult, has_marks
from scheduler.slurm.folder import SharedFolder
from scheduler.slurm.job import views_by_node
from scheduler.slurm.marks import (
    SlurmMarks,
    after,
    change_for,
    dated,
    outside,
    slurm_marks_on,
    view_of,
    weight_again,
    writes_of,
)
from scheduler.slurm.node import NodeChange, SlurmNode
from scheduler.slurm.port import SlurmPort
from scheduler.slurm.settings import SlurmSettings

STATE: Final = "state"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")


class SlurmScheduler(SchedulerExtras):
    """A Slurm cluster.

    Slurm has no optimistic locking. Each write is made under the lock of the lease, based on a read milliseconds
    before, sent as one request, and read back. An operator's write between the read and the request is overwritten;
    Slurm offers no way to close this window. A write right after the request is a ``conflict``.
    """

    def __init__(self, port: SlurmPort, folder: SharedFolder, clock: Clock, settings: SlurmSettings) -> None:
        self.port, self.folder = port, folder
        self._clock, self._settings, self.server_time = clock, settings, port.server_time
        self.read_switches, self.set_switches = folder.read_switches, folder.set_switches
        self.hold_lease, self.drop_lease = folder.hold_lease, folder.drop_lease
        self.load_state, self.save_state = partial(folder.load, STATE), partial(folder.save, STATE)
        self._booted: dict[str, datetime] = {}
        self._joined: dict[str, datetime] = {}
        self._late_writes = LateWrites()
        self._read: dict[str, SlurmNode] = {}

    def read_fleet(self) -> FleetReading:
        """List the nodes of the fleet and the switches."""
        read_at = self._clock.now()
        nodes = [node for node in self.port.nodes() if self._in_fleet(node)]
        read_error, jobs, switches = None, None, Switches(kill=True)  # an unreadable switch may be set
        try:
            switches = self.folder.read_switches()
            jobs = views_by_node(self.port.jobs())
        except Exception as error:  # releases do not need them
            read_error = described(error)
        self._note_nodes(nodes, read_at)
        readings = tuple(self._reading(node, None if jobs is None else jobs.get(node.name, ())) for node in nodes)
        return FleetReading(readings, read_at, switches, read_error or self.port.read_only(), partial=jobs is None)

    def _note_nodes(self, nodes: Sequence[SlurmNode], now: datetime) -> None:
        """Note nodes that were added since the last list; a removed node may come back as another machine."""
        added = {node.name for node in nodes if self._read and node.name not in self._read}
        current = {node.name: node for node in nodes}
        self._joined = {name: self._joined.get(name, now) for name in current if name in added or name in self._joined}
        self._booted = {name: booted for name, booted in self._booted.items() if name in current and name not in added}
        self._read = current

    def revalidate(self, node: str) -> NodeReading | None:
        """Re-read one node, with its jobs."""
        current = self.port.node(node)
        if current is None:
            self._read.pop(node, None)
            return None
        self._read[node] = current
        jobs: Sequence[JobView] | None = None
        with contextlib.suppress(Exception):
            jobs = views_by_node(self.port.jobs(node)).get(node, ())
        return self._reading(current, jobs)

    def preview(self, actions: Sequence[Action], reading: NodeReading) -> tuple[tuple[Write, ...], ...]:
        """Return the writes of each action on the node as last read."""
        node, now, writes = self._read.get(reading.view.name), self._clock.now(), []
        if node is None or node.version != reading.version:
            node = self.port.node(reading.view.name)
        if node is None:
            return tuple(() for _ in actions)
        for action in actions:
            change = change_for(action, node, self._settings, now)
            writes.append(writes_of(node, change))
            node = after(node, change)
        return tuple(writes)

    def apply(self, action: Action, precondition: Precondition) -> WriteResult:
        """Carry out an action."""
        if not _NAME.match(action.node):
            return WriteResult("refused", f"{action.node!r} is not the name of a single node")
        return self.folder.guarded(precondition.holder, precondition.until, lambda: self._apply(action, precondition))

    def _apply(self, action: Action, precondition: Precondition) -> WriteResult:
        node = self.port.node(action.node)
        if node is None:
            return WriteResult("gone", f"unknown node {action.node}")
        change = change_for(action, node, self._settings, self._clock.now())
        return self._refusal_of(action, node, precondition) or self._write(action, node, change)

    def upkeep(self, holder: str, until: datetime) -> tuple[Write, ...]:
        """Restore soft markers lost in a reconfigure or restart of Slurm, and reasons overwritten by a late write.

        Failures are retried in the next round.
        """
        now, switches = self._clock.now(), self.folder.read_switches()
        if switches.kill or switches.release_all:
            return ()

        def lost(node: SlurmNode) -> NodeChange:
            return weight_again(node, self._settings, now)

        writes = [self._correct(name, holder, until, self._late_writes.put_back) for name in self._late_writes.nodes]
        unset = [node.name for node in self._read.values() if not lost(node).empty]
        writes += [self._correct(name, holder, until, lost) for name in unset]
        return tuple(itertools.chain.from_iterable(writes))

    def _correct(
        self, name: str, holder: str, until: datetime, change_of: Callable[[SlurmNode], NodeChange]
    ) -> tuple[Write, ...]:
        with self.folder.fenced(holder, until) as barred:
            node = self.port.node(name) if barred is None else None
            change = NodeChange() if node is None else change_of(node)
            answer = WriteResult("already") if change.empty else self.port.update(name, change)
            if node is None or answer.kind != "done":
                return ()
            self._read[name] = after(node, change)
            self._late_writes.answered(name, change, answer)
            return writes_of(node, change)

    def _slurm_marks(self, node: SlurmNode) -> SlurmMarks:
        return slurm_marks_on(node, self._settings, self._clock.now())

    def _in_fleet(self, node: SlurmNode) -> bool:
        if outside(node, self._settings) is None:
            return True
        # never skip a node with predrain's markers, even if it has left the fleet
        marks = self._slurm_marks(node)
        return marks.record is not None or marks.damaged is not None

    def _reading(self, node: SlurmNode, jobs: Sequence[JobView] | None) -> NodeReading:
        self._late_writes.note_read(node, self._slurm_marks(node).foreign is not None)
        return self._as_read(node, jobs)

    def _as_read(self, node: SlurmNode, jobs: Sequence[JobView] | None) -> NodeReading:
        view = view_of(node, jobs or (), self._settings, self._clock.now())
        boot_id = self._boot_id(node)
        # each start of a node in the cloud is another machine
        since = (self._booted if "CLOUD" in node.states else self._joined).get(node.name)
        return NodeReading(replace(view, since=since), node.version, boot_id, jobs_known=jobs is not None)

    def _boot_id(self, node: SlurmNode) -> str | None:
        """Derive a boot id from the first boot time seen; other processes derive nearly the same ids.

        Slurm does not know the boot time for a minute after each UNDRAIN: then the last one counts.
        """
        known = self._booted.get(node.name)
        if node.booted_at is not None and (known is None or abs(node.booted_at - known) > BOOT_TOLERANCE):
            self._booted[node.name] = known = node.booted_at
        # boots that are further apart than this never round to the same number
        return None if known is None else str(round(known.timestamp() / BOOT_TOLERANCE.total_seconds()))

    def _refusal_of(self, action: Action, node: SlurmNode, precondition: Precondition) -> WriteResult | None:
        conflict, foreign = precondition.conflict(self._as_read(node, ())), self._slurm_marks(node).foreign
        if conflict is None and foreign is not None and action.verb != "release":
            return WriteResult("refused", f"not predrain's: {foreign}")
        return conflict

    def _write(self, action: Action, node: SlurmNode, change: NodeChange) -> WriteResult:
        if change.empty:
            return WriteResult("already", "no change", (), node.version)
        # Slurm applies a request partially if it rejects the state: without a record, remaining markers have no owner.
        in_two_steps = (
            action.verb == "release" and change.extra is not None and change != NodeChange(extra=change.extra)
        )
        answer = self.port.update(node.name, replace(change, extra=None) if in_two_steps else change)
        self._late_writes.answered(node.name, change, answer)
        try:
            current = self.port.node(node.name)
            if current is not None and change.state == "UNDRAIN" and "FAIL" in current.out:
                current, answer = self._unfail(current, answer)
            follow_up = NodeChange() if current is None else self._follow_up(action, current)
            if current is not None and not follow_up.empty:
                answer = self.port.update(node.name, follow_up)
                current = self.port.node(node.name)
        except SchedulerError as error:
            return WriteResult("timeout", f"it cannot be read back: {error}")
        if current is None:
            return WriteResult("gone", f"node {node.name} no longer exists")
        return self._read_back(action, node, current, change, answer)

    def _follow_up(self, action: Action, current: SlurmNode) -> NodeChange:
        """Return the change of the record after a read-back: removed markers, or the time of a reason."""
        if action.verb != "release":
            return dated(current, self._settings, self._clock.now())
        remaining = change_for(action, current, self._settings, self._clock.now())
        return remaining if remaining == NodeChange(extra=remaining.extra) else NodeChange()

    def _read_back(
        self, action: Action, previous: SlurmNode, current: SlurmNode, change: NodeChange, answer: WriteResult
    ) -> WriteResult:
        """Derive the result from the re-read node, regardless of Slurm's response."""
        marks = self._slurm_marks(current)
        if change_for(action, current, self._settings, self._clock.now()).empty and has_marks(action, marks.marks):
            return WriteResult("done", answer.message, writes_of(previous, change), current.version)
        self._late_writes.note_read(current, marks.foreign is not None)
        if marks.foreign is not None:
            return WriteResult("conflict", f"concurrent change by an operator or another tool: {marks.foreign}")
        if answer.kind == "done":
            return WriteResult(
                "conflict", "the value read back differs from the written one: another client also writes"
            )
        return WriteResult(answer.kind if answer.kind in ("gone", "timeout") else "refused", answer.message)

    def _unfail(self, current: SlurmNode, answer: WriteResult) -> tuple[SlurmNode | None, WriteResult]:
        """Remove FAIL, which UNDRAIN does not, by DRAIN and then UNDRAIN; the base state is unchanged."""
        if self._slurm_marks(current).foreign is not None or current.reason is None:
            return current, answer
        answer = self.port.update(current.name, NodeChange("DRAIN", current.reason))
        if answer.kind == "done":
            answer = self.port.update(current.name, NodeChange("UNDRAIN"))
        return self.port.node(current.name), answer


def open_slurm(settings: SlurmSettings, clock: Clock) -> SlurmScheduler:
    """Open a Slurm cluster; raises ``InputError`` if slurmrestd's token cannot be read."""
    from scheduler.slurm.commands import SlurmCommands
    from scheduler.slurm.rest import SlurmRest

    port: SlurmPort = SlurmCommands(settings) if settings.rest_url is None else SlurmRest(settings)
    return SlurmScheduler(port, SharedFolder(Path(settings.folder), clock), clock, settings)


BOOT_TOLERANCE: Final = timedelta(seconds=120)
"""Tolerance for boot times: slurmd derives them from the uptime at each registration, so they vary by seconds."""


class LateWrites:
    """Drains without a response, and what operators wrote to their nodes in the meantime; in memory only."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, SlurmNode | None]] = {}  # reason sent, node as the operator left it

    def answered(self, node: str, change: NodeChange, answer: WriteResult) -> None:
        """Record the result of a write."""
        if answer.kind != "timeout":
            self._open.pop(node, None)
        elif change.reason is not None:
            self._open[node] = (change.reason, self._open.get(node, ("", None))[1])

    def note_read(self, node: SlurmNode, foreign: bool) -> None:
        """Record a read of a node; ``foreign``: it has the reason of an operator or another tool."""
        sent, foreign_node = self._open.get(node.name, (None, None))
        if sent is not None:
            resumed = node.reason != sent
            self._open[node.name] = (sent, node if foreign else None if resumed else foreign_node)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that had a foreign reason while a write was open."""
        return tuple(name for name, (_, foreign_node) in self._open.items() if foreign_node is not None)

    def put_back(self, node: SlurmNode) -> NodeChange:
        """Return the change that restores a foreign reason overwritten by a late write; empty if there was none."""
        sent, foreign_node = self._open.get(node.name, (None, None))
        if foreign_node is None or not foreign_node.out or node.reason != sent:
            return NodeChange()
        return NodeChange("FAIL" if foreign_node.out == {"FAIL"} else "DRAIN", foreign_node.reason, foreign_node.extra)
