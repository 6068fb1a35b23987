"""The collector: follows nodes, events and pods of a cluster, and lands what they mean."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import TypeAdapter

from telemetry.collect.event import Event
from telemetry.collect.kubernetes.api import Api, Refused, Unreachable
from telemetry.collect.kubernetes.client import not_allowed, unreachable
from telemetry.collect.kubernetes.events import Notice, NoticeTracker, notice_of
from telemetry.collect.kubernetes.jobs import ClaimLookup, JobTracker, PodRun, pod_run
from telemetry.collect.kubernetes.node_tracker import NodeTracker
from telemetry.collect.kubernetes.node_view import NodeView, view_of
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.collect.kubernetes.watching import Change, Resource, follow, list_resource
from telemetry.collect.outbox import Outbox
from telemetry.collect.running import backoff_s
from telemetry.errors import InputError
from telemetry.landing.folder import Landing

log = logging.getLogger(__name__)

WRITER: Final = "kubernetes"
_RUNS: Final = TypeAdapter(list[PodRun])
_EVENTS_OF: Final = "events of "
_QUEUE: Final = 2000
_TICK_S: Final = 0.25
_FIRST_COMMIT_S: Final = 2.0
_LEAVE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a cluster is collected.

    ``cluster``: its name in the inventory and in that of the collector's state (default there: the server's address).
    ``node_selector``: with one, nodes without GPUs are taken too.
    ``namespace_selector``: of the namespaces whose pods are jobs.
    """

    cluster: str | None = None
    node_selector: str | None = None
    namespace_selector: str | None = None
    jobs: bool = True


def _utc_now() -> datetime:
    return datetime.now(UTC)


def state_name(api: Api, scope: Scope) -> str:
    """Return the name of the collector's state: one a cluster."""
    return f"{WRITER}-{re.sub(r'[^A-Za-z0-9.-]+', '-', scope.cluster or api.name).strip('-.')[:80]}"


class KubernetesCollector:
    """Collects one cluster into one landing folder.

    Raises ``InputError`` if another process collects the same cluster into this folder, or its state is damaged.
    """

    def __init__(
        self,
        api: Api,
        landing: Landing,
        rules: KubernetesRules,
        scope: Scope,
        *,
        clock: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._api = api
        self._rules = rules
        self._scope = scope
        self._clock = clock
        self.outbox = Outbox(landing, state_name(api, scope))
        content = self.outbox.position
        claims = ClaimLookup(api, rules)
        self.nodes = NodeTracker(
            rules,
            cluster=scope.cluster,
            all_nodes=scope.node_selector is not None,
            content=content.get("nodes"),
        )
        self._notices = NoticeTracker(content.get("notices"))
        self._jobs = JobTracker(_RUNS.validate_python(content.get("pods", ())), gpus_of_claim=claims.gpus)
        self._versions: dict[str, str] = dict(content.get("versions", {}))
        self._namespaces: frozenset[str] | None = None
        self._events: list[Event] = []
        self._job_rows: list[dict[str, Any]] = []
        self._places: list[dict[str, Any]] = []
        self._changed = False

    def resources(self) -> list[Resource]:
        """Return what is followed; nodes first, for events are of known nodes."""
        rules, scope = self._rules, self._scope
        selector = {"labelSelector": scope.node_selector} if scope.node_selector else {}
        found = [Resource("nodes", "/api/v1/nodes", lambda node: view_of(node, rules), selector)]
        for kind in rules.event_kinds():
            about = {"fieldSelector": f"involvedObject.kind={kind}"}
            found.append(
                Resource(f"{_EVENTS_OF}{kind}", "/api/v1/events", lambda event: notice_of(event, rules), about)
            )
        if scope.jobs:
            bound = {"fieldSelector": "spec.nodeName!="}
            found.append(Resource("pods", "/api/v1/pods", lambda pod: pod_run(pod, rules), bound))
        return found

    def once(self) -> None:
        """List everything, compare it with what was known, write the difference.

        Raises ``InputError`` if the server refuses or does not answer, or the disk is full.
        """
        path = ""
        try:
            for resource in self.resources():
                path = resource.path
                self.take(list_resource(self._api, resource, self._clock))
            path = "/api/v1/namespaces"
            self._read_namespaces()
        except Refused as refused:
            raise not_allowed(refused, path, self._api) from refused
        except Unreachable as error:
            raise unreachable(error, self._api) from error
        self.commit()
        self.outbox.flush()

    def run(self, stop: threading.Event, *, interval_s: float = 60.0) -> None:
        """Follow the cluster until ``stop`` is set; write every ``interval_s``, and at the end what is held.

        Raises ``InputError`` if the first listing fails, or at the end the disk is still full.
        """
        if not self._versions:
            self.once()
        resources = self.resources()
        changes: queue.Queue[Change] = queue.Queue(_QUEUE)

        def put(change: Change) -> bool:
            while not stop.is_set():
                try:
                    changes.put(change, timeout=_TICK_S)
                except queue.Full:  # what is known cannot be landed: the server will keep the changes, or be listed
                    continue
                return True
            return False

        threads = [
            threading.Thread(
                target=follow,
                args=(self._api, resource, put),
                kwargs={"clock": self._clock, "wait": stop.wait, "version": self._versions.get(resource.name)},
                name=f"follow {resource.name}",
                daemon=True,
            )
            for resource in resources
        ]
        log.info("%s: following %s", self._api.name, ", ".join(each.name for each in resources))
        for thread in threads:
            thread.start()
        try:
            self._work(stop, changes, interval_s)
        finally:
            stop.set()
            self._api.close()
            deadline = time.monotonic() + _LEAVE_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        while not changes.empty():
            self.take(changes.get_nowait())
        self.commit()
        self.outbox.flush()
        log.info("%s: left, with everything landed", self._api.name)

    def take(self, change: Change) -> None:
        """Take in a change."""
        self._changed = True
        if change.resource == "nodes":
            self._take_nodes(change)
        elif change.resource == "pods":
            self._take_pods(change)
        else:
            self._take_notices(change)
        if change.version:
            self._versions[change.resource] = change.version

    def commit(self) -> None:
        """Write what is new, if anything is, and remember how far we are.

        Raises ``InputError`` if the disk is full; what is held stays held.
        """
        self._job_rows += self._jobs.changed_rows(self._wanted)
        self._places += self.nodes.observations(self._clock())
        if not (self._changed or self._events or self._job_rows or self._places):
            return
        content = {
            "nodes": self.nodes.content(),
            "notices": self._notices.reported,
            "pods": _RUNS.dump_python(self._jobs.runs(), mode="json"),
            "versions": self._versions,
        }
        self.outbox.commit(content, events=self._events, jobs=self._job_rows, inventory=self._places)
        self._events, self._job_rows, self._places = [], [], []
        self._changed = False

    def close(self) -> None:
        """Let another process collect."""
        self.outbox.close()

    def _work(self, stop: threading.Event, changes: queue.Queue[Change], interval_s: float) -> None:
        due_s = time.monotonic() + min(_FIRST_COMMIT_S, interval_s)
        failures = 0
        while not stop.is_set():
            # While nothing can be landed, nothing more is taken in: what is held stays bounded.
            if failures:
                stop.wait(max(0.0, due_s - time.monotonic()))
            else:
                with contextlib.suppress(queue.Empty):
                    self.take(changes.get(timeout=_TICK_S))
            if time.monotonic() < due_s:
                continue
            try:
                self._refresh_namespaces()
                self.commit()
                self.outbox.flush()
            except InputError as error:
                failures += 1
                if failures == 1:
                    log.error("nothing can be landed, retrying: %s", error)
                due_s = time.monotonic() + backoff_s(failures)
                continue
            if failures:
                log.info("landing works again")
            failures = 0
            due_s = time.monotonic() + interval_s

    def _take_nodes(self, change: Change) -> None:
        views: tuple[NodeView, ...] = change.objects
        if change.kind == "gone":
            for view in views:
                # Its last state may be one that no watch reported.
                if view.name in self.nodes:
                    self._events += self.nodes.update(view, change.at)
                self._events += self.nodes.remove(view.name, change.at)
            return
        for view in views:
            self._events += self.nodes.update(view, change.at)
        if change.kind == "listed":
            self._events += self.nodes.keep_only((view.name for view in views), change.at)

    def _take_notices(self, change: Change) -> None:
        notices: tuple[Notice, ...] = change.objects
        for notice in notices:
            if change.kind == "gone":
                self._notices.forget(notice)
            elif notice.node in self.nodes:
                self._events += self._notices.update(notice, change.at)
        if change.kind == "listed":
            kind = change.resource.removeprefix(_EVENTS_OF)
            self._notices.keep_only(kind, (notice.uid for notice in notices))

    def _take_pods(self, change: Change) -> None:
        runs: tuple[PodRun, ...] = change.objects
        for run in runs:
            self._jobs.update(run)
            if change.kind == "gone":
                self._jobs.remove(run.uid, change.at)
        if change.kind == "listed":
            self._jobs.keep_only((run.uid for run in runs), change.at)

    def _wanted(self, namespace: str) -> bool:
        if self._scope.namespace_selector is None:
            return True
        return self._namespaces is not None and namespace in self._namespaces

    def _refresh_namespaces(self) -> None:
        try:
            self._read_namespaces()
        except (Refused, Unreachable) as error:
            log.debug("namespaces stay as they were: %s", error)

    def _read_namespaces(self) -> None:
        if self._scope.namespace_selector is None:
            return
        selector = {"labelSelector": self._scope.namespace_selector}
        pages = self._api.pages("/api/v1/namespaces", selector)
        self._namespaces = frozenset(each["metadata"]["name"] for page in pages for each in page.get("items") or ())
