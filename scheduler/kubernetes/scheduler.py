"""Kubernetes adapter of the controller: reads nodes with their versions, and applies each action as one patch."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from foundation.kubernetes.api import Object, Response, Unreachable, is_named
from foundation.kubernetes.client import STRATEGIC_PATCH, KubernetesClient
from policy.fleet import JobView
from policy.plan import Action
from scheduler.kubernetes.api import ApiServer
from scheduler.kubernetes.condition import condition_after, condition_repaired, condition_write
from scheduler.kubernetes.config_map import ConfigMapText, SwitchAnnotations
from scheduler.kubernetes.device_taints import DeviceTaints
from scheduler.kubernetes.leadership import Leadership
from scheduler.kubernetes.nodes import NodeSnapshot, patch_of, snapshot_of, status_patch
from scheduler.kubernetes.pods import ClaimCounts, PodKeys, PodPart, RunningPods, jobs_of, pod_part
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.errors import described
from scheduler.ports.node_object import (
    WRITER,
    Keys,
    NodeObject,
    after,
    missing_from,
    own_marks,
    refused,
    writes_between,
)
from scheduler.ports.ownership import OtherInstallationError
from scheduler.ports.protocols import Clock, NodeSignal, SchedulerExtras
from scheduler.ports.readings import FleetReading, NodeReading, Precondition, ResultKind, Switches, Write, WriteResult

NODES: Final = "/api/v1/nodes"
FIELD_MANAGER: Final = WRITER

_MAX_REPAIRED: Final = 50
_CONDITIONS_FOR_S: Final = 30.0
_CONDITION_TIMEOUT: Final = timedelta(seconds=2)
_SWITCHES_FOR_S: Final = 0.1
_KNOWN_FOR_S: Final = 10.0
_REFUSALS: Final[Mapping[int, ResultKind]] = {404: "gone", 409: "conflict"}


class KubernetesScheduler(SchedulerExtras):
    """A Kubernetes cluster.

    ``waits``: wait until another process's lease is renewed or expires; for a process that runs a single round.
    ``follows``: watch pods between rounds instead of listing them in each; for a long-running process.
    """

    def __init__(
        self,
        client: KubernetesClient,
        clock: Clock,
        settings: KubernetesSettings = KubernetesSettings(),
        *,
        waits: bool = False,
        follows: bool = False,
        horizon: timedelta | None = None,
        elapsed: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.keys = Keys(
            settings.prefix, avoid=settings.avoid_label, horizon=horizon, foreign=settings.foreign_marks,
            owner=f"{settings.namespace}/{settings.lease}",
        )  # fmt: skip
        self.api = ApiServer(client, elapsed)
        self.leadership = Leadership(self.api, settings.namespace, settings.lease, clock, waits=waits, sleep=sleep)
        self._state = ConfigMapText(self.api, settings.namespace, settings.state)
        self._switches = SwitchAnnotations(self._state, settings.prefix)
        self._read_switches: tuple[Switches, float] | None = None
        self.load_state, self.save_state = self._state.load, self._state.save
        self.rules = settings.rules
        self.pod_keys = PodKeys(settings.prefix, settings.namespace)
        self._recent: dict[str, tuple[NodeSnapshot, float]] = {}
        self._due: dict[str, Object] = {}  # conditions to be written, by node
        drivers = self.rules.claim_drivers
        self._device_taints = DeviceTaints(self.api, settings.prefix, drivers) if settings.device_taints else None
        self._claims = ClaimCounts(self.api, self.rules)
        self._jobs: Mapping[str, JobView] = {}
        self._opted_out: dict[str, list[PodPart]] = {}
        self._cordoner_known = True
        part = partial(pod_part, rules=self.rules, keys=self.pod_keys)
        self._pods = RunningPods(self.api, part, settings.pod_page_size, follows=follows)

    def read_fleet(self) -> FleetReading:
        """Read all GPU nodes and nodes with markers, their jobs, and the switches; correct outdated conditions."""
        read_at, began_s = self.clock.now(), self.api.elapsed()
        self._due.clear()
        nodes = self._nodes()
        self._recent = {node.node_object.name: (node, began_s) for node in nodes}
        self._cordoner_known = not nodes or any(node.node_object.tells_cordoner for node in nodes)
        read_errors, jobs, switches = [], None, Switches(kill=True)  # an unreadable switch may be set
        try:
            switches, unclear = self._switches.read()
            read_errors += [unclear] if unclear else []
            jobs = self._all_jobs()
        except Exception as error:  # releases do not need them
            read_errors.append(described(error))
        if self.leadership.remaining() > timedelta(0):
            with contextlib.suppress(Exception):  # no decision depends on a condition
                self._repair_conditions(nodes)
        readings = tuple(
            node.with_jobs(None if jobs is None else tuple(jobs.get(node.node_object.name, {}).values()))
            for node in nodes
        )
        return FleetReading(readings, read_at, switches, "; ".join(read_errors) or None, partial=jobs is None)

    def revalidate(self, node: str) -> NodeReading | None:
        """Re-read one node, with pods at least as new as those of the fleet reading."""
        snapshot = self._read(node)
        return None if snapshot is None else snapshot.with_jobs(self._jobs_on(node))

    def as_known(self, node: str) -> NodeReading | None:
        """Return a node as read or written within the last 10 s; a patch is rejected if it has changed since."""
        snapshot, known_s = self._recent.get(node, (None, 0.0))
        if snapshot is None or self.api.elapsed() - known_s > _KNOWN_FOR_S:
            return None
        return snapshot.with_jobs(self._jobs_on(node))

    def server_time(self) -> datetime | None:
        """Return the date of the API server's last response."""
        date = self.api.client.response_date
        return None if date is None else parsedate_to_datetime(date).replace(tzinfo=UTC)  # HTTP dates are in GMT

    def preview(self, actions: Sequence[Action], reading: NodeReading) -> tuple[tuple[Write, ...], ...]:
        """Return the writes of each action on the node as read, or re-read if that version is no longer cached."""
        snapshot = self._known(reading.view.name, reading.version) or self._read(reading.view.name)
        if snapshot is None:
            return tuple(() for _ in actions)
        node_object, previewed = snapshot.node_object, []
        for action in actions:
            target = self._after(action, node_object)
            writes = writes_between(node_object, target)
            condition = self._condition(action, snapshot, node_object, target)
            if condition is not None:
                writes += (condition_write(action.node, snapshot.condition, condition),)
            previewed.append(writes)
            node_object = target
        return tuple(previewed)

    def _after(self, action: Action, node_object: NodeObject) -> NodeObject:
        return after(action, node_object, self.keys, self.clock.now(), cordon=self.settings.cordon)

    def _condition(
        self, action: Action, snapshot: NodeSnapshot, current: NodeObject, target: NodeObject
    ) -> Object | None:
        """Return the condition for an action that changes the prediction."""
        key = self.keys.prediction
        if current == target or (action.verb != "release" and current.annotations.get(key) == target.annotations[key]):
            return None
        return condition_after(action, snapshot.condition, self.clock.now()) if self.settings.condition else None

    def apply(self, action: Action, precondition: Precondition) -> WriteResult:
        """Carry out an action as one patch, which the server applies only to the version that was read.

        Its condition is written later by :meth:`announce`, unless it fits into the same patch.
        """
        return self.leadership.fenced(
            precondition.holder, precondition.until, lambda: self._apply(action, precondition)
        )

    def _apply(self, action: Action, precondition: Precondition) -> WriteResult:
        snapshot = self._known(action.node, precondition.version) or self._read(action.node)
        self._recent.pop(action.node, None)
        if snapshot is None:
            return WriteResult("gone", f"unknown node {action.node}")
        conflict = precondition.conflict(snapshot.reading)
        if conflict is not None:
            return conflict
        target = self._after(action, snapshot.node_object)
        writes = writes_between(snapshot.node_object, target)
        first, record = target, snapshot.node_object.annotations.get(self.keys.applied)
        if (
            record is not None
            and self.keys.applied not in target.annotations
            and target.taints != snapshot.node_object.taints
        ):
            # remove the record last: without it, a taint that the server keeps would have no owner
            first = replace(target, annotations={**target.annotations, self.keys.applied: record})
        if not writes:
            return WriteResult("already", "nothing to change", (), snapshot.reading.version)
        # A patch of nodes/status can change metadata, but not taints or cordon: enough for a publisher's RBAC.
        status_only = not any(write.path.startswith("spec.") for write in writes)
        status_only = status_only and action.verb in ("publish", "release")
        path = f"{_path(action.node)}/status" if status_only else _path(action.node)
        note, due = "", self._condition(action, snapshot, snapshot.node_object, target)
        included = due if status_only else None
        response = self._patch(path, patch_of(snapshot, first, included))
        if included is not None and not response.ok and response.status not in _REFUSALS:
            # possibly only the condition was rejected, which is optional
            note, included = f"the condition was not written: {response.problem}", None
            response = self._patch(path, patch_of(snapshot, first))
        written = self._answered(action.node, response, first)
        if isinstance(written, NodeSnapshot) and first is not target:
            target = self._after(action, written.node_object)
            written = self._answered(action.node, self._patch(path, patch_of(written, target)), target)
        if isinstance(written, WriteResult):
            self._recent.pop(action.node, None)  # as after the first of two patches
            return written
        if included is not None:
            self._due.pop(action.node, None)
            writes += (condition_write(action.node, snapshot.condition, included),)
        elif due is not None and not status_only:  # otherwise a pending one stays
            self._due[action.node] = due
        return WriteResult("done", note, writes, written.reading.version)

    def _answered(self, node: str, response: Response, target: NodeObject) -> NodeSnapshot | WriteResult:
        """Return the node from the response, or the result of a failure."""
        if not response.ok:
            return WriteResult(_REFUSALS.get(response.status, "refused"), response.problem)
        written = self._remember(response.content) if is_named(response.content, node) else None
        if written is None:
            return WriteResult("timeout", "the response is not the node")
        missing = missing_from(written.node_object, target, self.keys)
        if not missing:
            return written
        noted = refused(written.node_object, target, self.keys)
        if noted is not None:
            self._patch(_path(node), patch_of(written, noted))
        cause = "an admission webhook or another controller changes predrain's writes"
        return WriteResult("refused", f"the server accepted the patch, but {'; '.join(missing)}: {cause}")

    def announce(
        self, signals: Sequence[NodeSignal], holder: str, hold: Callable[[], datetime], *, new: bool
    ) -> tuple[str, ...]:
        """Write the pending conditions, and the device taints if enabled."""

        def blocked() -> str | None:
            return self.leadership.blocked(holder, hold())

        notes = self._write_due(blocked)
        if self.settings.cordon and not self._cordoner_known:
            notes += ("no node is cordoned, only tainted: the server does not report field managers (managedFields)",)
        if self._device_taints is None:
            return notes
        return notes + self._device_taints.follow(signals, blocked, lambda: new and not self.read_switches().kill)

    def announcing(self, signals: Sequence[NodeSignal], *, new: bool) -> tuple[Write, ...]:
        """Return the device taints that would be set and removed."""
        return () if self._device_taints is None else self._device_taints.preview(signals, new=new)

    def _write_due(self, blocked: Callable[[], str | None]) -> tuple[str, ...]:
        """Write pending conditions; return failures. If the server does not respond, the others are dropped."""
        failed: dict[str, list[str]] = {}
        away: str | None = None
        end_s = self.api.elapsed() + _CONDITIONS_FOR_S
        for node, condition in self._due.items():
            timed_out = "no time left in this round" if self.api.elapsed() >= end_s else None
            problem = away or timed_out or blocked()
            if problem is None:
                try:
                    problem = self._write_condition(node, condition)
                except Unreachable as error:
                    problem = away = str(error)
            if problem is not None:
                failed.setdefault(f"the condition was not written: {problem}", []).append(node)
        self._due.clear()
        return tuple(
            f"{nodes[0]}{f' and {len(nodes) - 1} more' if nodes[1:] else ''}: {problem}"
            for problem, nodes in failed.items()
        )

    def read_switches(self) -> Switches:
        """Read the switches from the state ConfigMap; cached for 100 ms."""
        read, now_s = self._read_switches, self.api.elapsed()
        if read is None or now_s - read[1] >= _SWITCHES_FOR_S:
            self._read_switches = read = self._switches.read()[0], now_s
        return read[0]

    def set_switches(self, switches: Switches) -> WriteResult:
        """Set the switches; independent of the lease."""
        self._read_switches = None
        return self._switches.write(switches)

    def hold_lease(self, holder: str, duration: timedelta) -> datetime | None:
        """Acquire or renew the lease; a standby stops watching pods."""
        until = self.leadership.take(holder, duration)
        if until is None:
            self._pods.stop()
        return until

    def drop_lease(self, holder: str) -> None:
        """Release the lease and stop watching pods."""
        self._pods.stop()
        self.leadership.drop(holder)

    def whole_job(self, part: JobView) -> JobView:
        """Return the whole job of a part, with its GPUs on all nodes as of the last fleet reading."""
        return self._jobs.get(part.name, part)

    def opted_out(self, job: str | None) -> Sequence[PodPart]:
        """Return the pods of a job that are opted out of eviction, on all nodes as of the last fleet reading."""
        return self._opted_out.get(job or "", ())

    def _nodes(self) -> list[NodeSnapshot]:
        if not self.settings.selector:
            return self._listed({})
        # markers on nodes that no longer match the selector must be removed, even if the tier label is gone
        selected = self._listed({"labelSelector": self.settings.selector})
        chosen = {snapshot.node_object.name for snapshot in selected}
        others = [snapshot.outside() for snapshot in self._listed({}, outside=chosen)]
        return [*others, *selected]

    def _listed(self, params: Mapping[str, str], outside: Collection[str] | None = None) -> list[NodeSnapshot]:
        """List GPU nodes and nodes with markers; with ``outside``, only nodes with markers that are not in it."""

        def view(raw: Mapping[str, Any]) -> NodeSnapshot | None:
            snapshot = snapshot_of(raw, self.settings, self.rules, self.keys, self.clock.now())
            if snapshot is None or (outside is not None and snapshot.node_object.name in outside):
                return None
            return snapshot if snapshot.marked or (snapshot.gpus and outside is None) else None

        return self.api.listing(NODES, params, self.settings.node_page_size, view)

    def _all_jobs(self) -> dict[str, dict[str, JobView]]:
        parts = self._pods.everywhere()
        self._claims.refresh(parts)
        jobs = jobs_of(self._claims.counted(parts))
        self._jobs = {name: job for of_node in jobs.values() for name, job in of_node.items()}
        self._opted_out = {}
        for part in parts:
            if part.opt_outs:
                self._opted_out.setdefault(part.job, []).append(part)
        return jobs

    def _jobs_on(self, node: str) -> tuple[JobView, ...] | None:
        try:
            jobs = jobs_of(self._claims.counted(self._pods.on(node))).get(node, {})
            # a job's pods on this node may be only a part of it
            return tuple(self.whole_job(job) for job in jobs.values())
        except Exception:
            return None

    def _read(self, node: str) -> NodeSnapshot | None:
        raw = self.api.read(_path(node), named=node)
        return None if raw is None else self._remember(raw)

    def _remember(self, raw: Mapping[str, Any]) -> NodeSnapshot | None:
        snapshot = snapshot_of(raw, self.settings, self.rules, self.keys, self.clock.now())
        if snapshot is not None:
            self._recent[snapshot.node_object.name] = snapshot, self.api.elapsed()
        return snapshot

    def _known(self, node: str, version: str) -> NodeSnapshot | None:
        """Return the node as last read or written, if that was this version."""
        snapshot, _ = self._recent.get(node, (None, 0.0))
        return snapshot if snapshot is not None and snapshot.reading.version == version else None

    def _patch(self, path: str, patch: Object, timeout: timedelta | None = None) -> Response:
        if timeout is None and self.leadership.held:
            timeout = self.leadership.remaining()
        params = {"fieldManager": FIELD_MANAGER}
        return self.api.request("PATCH", path, params, patch, content_type=STRATEGIC_PATCH, timeout=timeout)

    def _write_condition(self, node: str, condition: Object) -> str | None:
        """Write a condition; return the failure, if any. Raises ``Unreachable``."""
        timeout = min(_CONDITION_TIMEOUT, self.leadership.remaining())
        response = self._patch(f"{_path(node)}/status", status_patch(condition), timeout)
        return None if response.ok else response.problem

    def _repair_conditions(self, nodes: Sequence[NodeSnapshot]) -> None:
        if not self.settings.condition:
            return
        now, repaired = self.clock.now(), 0
        for snapshot in nodes:
            view = snapshot.reading.view
            condition = condition_repaired(snapshot.condition, view.marks.published, now)
            is_foreign = isinstance(own_marks(snapshot.node_object, self.keys).damaged, OtherInstallationError)
            if condition is not None and view.readable and not is_foreign and repaired < _MAX_REPAIRED:
                self._recent.pop(view.name, None)
                with contextlib.suppress(Unreachable):
                    self._write_condition(view.name, condition)
                repaired += 1


def _path(node: str) -> str:
    return f"{NODES}/{quote(node, safe='')}"
