"""Kubernetes behind the controller's port: nodes read with their versions, each action one patch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from urllib.parse import quote

from policy.fleet import JobView
from policy.plan import Action
from scheduler.kubernetes.api import ApiServer
from scheduler.kubernetes.condition import (
    EVENTS,
    condition_after,
    condition_repaired,
    condition_write,
    event_of,
    event_write,
)
from scheduler.kubernetes.config_map import ConfigMapText, SwitchAnnotations
from scheduler.kubernetes.device_taints import DeviceTaints
from scheduler.kubernetes.leadership import Leadership
from scheduler.kubernetes.nodes import NodeSnapshot, patch_of, snapshot_of, status_patch
from scheduler.kubernetes.pods import LIVING, ClaimCounts, PodKeys, PodPart, jobs_of, pod_part, version_of
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.node_object import WRITER, Keys, NodeObject, after, writes_between
from scheduler.ports.protocols import Clock, NodeSignal
from scheduler.ports.readings import Answer, AnswerKind, FleetReading, NodeReading, Precondition, Switches, Write
from telemetry.collect.kubernetes.api import Object, Response, Unreachable, is_named
from telemetry.collect.kubernetes.client import STRATEGIC_PATCH, KubernetesClient

NODES: Final = "/api/v1/nodes"
PODS: Final = "/api/v1/pods"
FIELD_MANAGER: Final = WRITER

_MAX_REPAIRED: Final = 50
_COMPANION_TIMEOUT: Final = timedelta(seconds=2)
_EXISTS: Final = 409
_REFUSALS: Final[Mapping[int, AnswerKind]] = {404: "gone", 409: "conflict"}


class KubernetesScheduler:
    """A Kubernetes cluster.

    ``waits``: whether a lease of another process is watched until it is renewed or over, rather than asked for again
    later: for a process that does one round and ends.
    ``horizon``: what the risks look ahead.
    """

    def __init__(
        self,
        client: KubernetesClient,
        clock: Clock,
        settings: KubernetesSettings = KubernetesSettings(),  # noqa: B008 - frozen
        *,
        waits: bool = False,
        horizon: timedelta | None = None,
        elapsed: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.keys = Keys(settings.prefix, avoid=settings.avoid_label, horizon=horizon)
        self.api = ApiServer(client, elapsed)
        self.leadership = Leadership(self.api, settings.namespace, settings.lease, clock, waits=waits, sleep=sleep)
        self._state = ConfigMapText(self.api, settings.namespace, settings.state)
        self._switches = SwitchAnnotations(self._state, settings.prefix)
        self.load_state, self.save_state = self._state.load, self._state.save
        self.set_switches = self._switches.write  # the operator may, whoever holds the lease
        self.hold_lease, self.drop_lease = self.leadership.take, self.leadership.drop
        self.rules = settings.rules
        self.pod_keys = PodKeys(settings.prefix, settings.namespace)
        self._newest: NodeSnapshot | None = None
        self._written: dict[str, NodeSnapshot] = {}
        drivers = self.rules.claim_drivers
        self._device_taints = DeviceTaints(self.api, settings.prefix, drivers) if settings.device_taints else None
        self._claims = ClaimCounts(self.api, self.rules)
        self._jobs: Mapping[str, JobView] = {}
        self._cordoner_known = True
        self._pods_version = 0

    def read_fleet(self) -> FleetReading:
        """List all GPU nodes and predrain-managed nodes, their jobs, and the switches; correct outdated conditions."""
        read_at = self.clock.now()
        self._written.clear()
        nodes = self._nodes()
        self._cordoner_known = not nodes or any(node.node_object.tells_cordoner for node in nodes)
        jobs = self._all_jobs()
        switches, unclear = self._switches.read()
        if self.leadership.left() > timedelta(0):
            self._repair_conditions(nodes)
        troubles = [unclear] if unclear else []
        if not self.settings.read_pods:
            troubles.append("jobs are not read (read_pods is false), so that no floor per job would hold")
        readings = tuple(node.with_jobs(tuple(jobs.get(node.node_object.name, {}).values())) for node in nodes)
        return FleetReading(readings, read_at, switches, "; ".join(troubles) or None)

    def revalidate(self, node: str) -> NodeReading | None:
        """Read one node again; its pods are never older than those of the last listing."""
        snapshot = self._read(node)
        return None if snapshot is None else snapshot.with_jobs(self._jobs_on(node))

    def as_we_left(self, node: str) -> NodeReading | None:
        """Return a node as the last write here left it, once per write; a patch is refused where it changed since."""
        snapshot = self._written.pop(node, None)
        if snapshot is None:
            return None
        self._newest = snapshot
        return snapshot.with_jobs(self._jobs_on(node))

    def preview(self, actions: Sequence[Action], reading: NodeReading) -> tuple[tuple[Write, ...], ...]:
        """Return what would be written to the node as it was read, or as it is now where that reading is gone."""
        snapshot = self._known(reading.view.name, reading.version) or self._read(reading.view.name)
        if snapshot is None:
            return tuple(() for _ in actions)
        node_object, now, made = snapshot.node_object, self.clock.now(), []
        for action in actions:
            then = self._after(action, node_object)
            writes = writes_between(node_object, then)
            # condition and event are written with a mark that changes, never alone
            made.append(writes + self._companions(action, snapshot, now)[2] if writes else ())
            node_object = then
        return tuple(made)

    def _after(self, action: Action, node_object: NodeObject) -> NodeObject:
        return after(action, node_object, self.keys, self.clock.now(), cordon=self.settings.cordon)

    def _companions(
        self, action: Action, snapshot: NodeSnapshot, now: datetime
    ) -> tuple[Object | None, Object | None, tuple[Write, ...]]:
        """Return what is written for other tools with an action: the condition, the event, and both as changes."""
        condition = condition_after(action, snapshot.condition, now) if self.settings.condition else None
        event = event_of(action, snapshot.reading.view.marks.published, now) if self.settings.events else None
        writes = () if condition is None else (condition_write(action.node, snapshot.condition, condition),)
        return condition, event, writes if event is None else (*writes, event_write(event))

    def apply(self, action: Action, precondition: Precondition) -> Answer:
        """Carry out an action as one patch that the server applies to exactly the node that was read.

        Where condition or event of ``publish`` and ``release`` fail, the answer is ``done`` with a message.
        """
        return self.leadership.fenced(
            precondition.holder, precondition.until, lambda: self._apply(action, precondition)
        )

    def _apply(self, action: Action, precondition: Precondition) -> Answer:
        snapshot = self._known(action.node, precondition.version) or self._read(action.node)
        if snapshot is None:
            return Answer("gone", f"there is no node {action.node}")
        conflict = precondition.conflict(snapshot.reading)
        if conflict is not None:
            return conflict
        then = self._after(action, snapshot.node_object)
        writes = writes_between(snapshot.node_object, then)
        if not writes:
            return Answer("already", "nothing to change", (), snapshot.reading.version)
        # Of a node's status one may write its metadata, but no taint or cordon: a publisher needs no more right.
        status_only = not any(write.path.startswith("spec.") for write in writes)
        status_only = status_only and action.verb in ("publish", "release")
        path = f"{_path(action.node)}/status" if status_only else _path(action.node)
        condition, event, companion_writes = self._companions(action, snapshot, self.clock.now())
        notes: list[str | None] = []
        response = self._patch(path, patch_of(snapshot, then, condition if status_only else None))
        if condition is not None and status_only and not response.ok and response.status not in _REFUSALS:
            # it may be the condition alone that is not wanted, and nothing rests on it
            notes.append(f"the condition was not written: {response.problem}")
            response = self._patch(path, patch_of(snapshot, then))
        if not response.ok:
            return Answer(_REFUSALS.get(response.status, "refused"), response.problem)
        if not is_named(response.content, action.node):
            return Answer("timeout", "the answer is not the node")
        self._remember(response.content)
        if condition is not None and not status_only:
            notes.append(self._set_condition(action.node, condition))
        if event is not None:
            notes.append(self._companion("the event", "POST", EVENTS, event))
        if not any(notes):
            writes = (*writes, *companion_writes)
        left = self._newest or snapshot
        self._written[action.node] = left
        return Answer("done", "; ".join(filter(None, notes)), writes, left.reading.version)

    def announce(self, signals: Sequence[NodeSignal], holder: str, until: datetime, *, new: bool) -> tuple[str, ...]:
        """Apply the current marks as device taints too, where the settings ask for them."""
        notes: tuple[str, ...] = ()
        if self.settings.cordon and not self._cordoner_known:
            notes = ("no node is cordoned: the server does not tell who cordons (managedFields); the taints stand",)
        if self._device_taints is None:
            return notes
        return notes + self._device_taints.follow(
            signals, lambda: self.leadership.blocked(holder, until), lambda: new and not self.read_switches().kill
        )

    def announcing(self, signals: Sequence[NodeSignal], *, new: bool) -> tuple[Write, ...]:
        """Return the device taints that would be set and removed; reads only."""
        return () if self._device_taints is None else self._device_taints.preview(signals, new=new)

    def read_switches(self) -> Switches:
        """Read the switches, annotations of the ConfigMap of the state."""
        return self._switches.read()[0]

    def whole_job(self, part: JobView) -> JobView:
        """Return the whole job of a part, with its GPUs on all nodes as of the last listing."""
        return self._jobs.get(part.name, part)

    def _nodes(self) -> list[NodeSnapshot]:
        if not self.settings.selector:
            return self._listed({})
        # a node with predrain's marks is never passed over, also where it is selected no more
        marked, selected = (
            self._listed({"labelSelector": label}) for label in (self.keys.tier, self.settings.selector)
        )
        return list({snapshot.node_object.name: snapshot for snapshot in (*marked, *selected)}.values())

    def _listed(self, params: Mapping[str, str]) -> list[NodeSnapshot]:
        def view(raw: Mapping[str, Any]) -> NodeSnapshot | None:
            snapshot = snapshot_of(raw, self.settings, self.rules, self.keys, self.clock.now())
            return snapshot if snapshot is not None and snapshot.concerns_us else None

        return self.api.listing(NODES, params, self.settings.node_page_size, view)

    def _all_jobs(self) -> dict[str, dict[str, JobView]]:
        if not self.settings.read_pods:
            return {}
        newest = 0

        def view(raw: Mapping[str, Any]) -> PodPart | None:
            nonlocal newest
            newest = max(newest, version_of(raw))
            return self._part(raw)

        params = {"fieldSelector": f"{LIVING},spec.nodeName!="}
        parts = self.api.listing(PODS, params, self.settings.pod_page_size, view)
        self._pods_version = newest
        self._claims.refresh(parts)
        jobs = jobs_of(self._claims.counted(parts))
        self._jobs = {name: job for of_node in jobs.values() for name, job in of_node.items()}
        return jobs

    def _jobs_on(self, node: str) -> tuple[JobView, ...]:
        if not self.settings.read_pods:
            return ()
        params = {"fieldSelector": f"{LIVING},spec.nodeName={node}"}
        if self._pods_version:
            # "Not older than": the server may answer from its memory, by its index of nodes, rather than read all pods.
            # The version is that of the newest pod read and not of the listing: before 1.31, a server whose pods
            # have not changed since would wait for a change before it answers.
            params["resourceVersion"] = str(self._pods_version)
        parts = self.api.listing(PODS, params, 0, self._part)
        # of a job that runs elsewhere too, the pods of this node are only a part
        return tuple(self.whole_job(job) for job in jobs_of(self._claims.counted(parts)).get(node, {}).values())

    def _part(self, raw: Mapping[str, Any]) -> PodPart | None:
        return pod_part(raw, self.rules, self.pod_keys)

    def _read(self, node: str) -> NodeSnapshot | None:
        raw = self.api.read(_path(node), named=node)
        return None if raw is None else self._remember(raw)

    def _remember(self, raw: Mapping[str, Any]) -> NodeSnapshot | None:
        snapshot = snapshot_of(raw, self.settings, self.rules, self.keys, self.clock.now())
        self._newest = snapshot or self._newest
        return snapshot

    def _known(self, node: str, version: str) -> NodeSnapshot | None:
        """Return the node that was read or written last, if it is this one in this version."""
        newest = self._newest
        same = newest is not None and (newest.node_object.name, newest.reading.version) == (node, version)
        return newest if same else None

    def _patch(self, path: str, patch: Object) -> Response:
        params, timeout = {"fieldManager": FIELD_MANAGER}, self.leadership.left()
        return self.api.request("PATCH", path, params, patch, content_type=STRATEGIC_PATCH, timeout=timeout)

    def _set_condition(self, node: str, condition: Object) -> str | None:
        return self._companion("the condition", "PATCH", f"{_path(node)}/status", status_patch(condition), node)

    def _companion(
        self, what: str, method: Literal["PATCH", "POST"], path: str, body: Object, node: str | None = None
    ) -> str | None:
        """Write a condition (with its node) or an event, on which nothing rests; return what failed."""
        params, timeout = {"fieldManager": FIELD_MANAGER}, min(_COMPANION_TIMEOUT, self.leadership.left())
        kind = STRATEGIC_PATCH if method == "PATCH" else "application/json"
        try:
            response = self.api.request(method, path, params, body, content_type=kind, timeout=timeout)
        except Unreachable as error:
            return f"{what} was not written: {error}"
        if node is not None and response.ok and is_named(response.content, node):
            self._remember(response.content)
        repeated = method == "POST" and response.status == _EXISTS  # of this very second, by an earlier try
        return None if response.ok or repeated else f"{what} was not written: {response.problem}"

    def _repair_conditions(self, nodes: Sequence[NodeSnapshot]) -> None:
        if not self.settings.condition:
            return
        now, repaired = self.clock.now(), 0
        for snapshot in nodes:
            view = snapshot.reading.view
            condition = condition_repaired(snapshot.condition, view.marks.published, now)
            if condition is not None and view.readable and repaired < _MAX_REPAIRED:
                self._set_condition(view.name, condition)
                repaired += 1


def _path(node: str) -> str:
    return f"{NODES}/{quote(node, safe='')}"
