"""The pods that run on the nodes: followed by a watch from round to round, or listed in each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Final

from foundation.kubernetes.api import Object
from foundation.kubernetes.client import IDLE_S
from foundation.kubernetes.watching import ChangeKind, Resource, Tracker, follow
from scheduler.kubernetes.api import ApiServer
from scheduler.kubernetes.pods import LIVING, PODS, PodPart, version_of

_BOUND: Final = {"fieldSelector": f"{LIVING},spec.nodeName!="}

Seen = tuple[str, PodPart | None]
"""A pod by namespace and name, and its part of a job, if it has one."""


class _Parts(Tracker[Seen, PodPart]):
    """The parts of jobs by pod, and by node."""

    key = itemgetter(0)

    def __init__(self) -> None:
        super().__init__({})
        self.of_node: dict[str, dict[str, PodPart]] = {}

    def update(self, view: Seen, at: datetime) -> list[Any]:
        name, part = view
        self.remove(name, at)
        if part is not None:
            self.known[name] = part
            self.of_node.setdefault(part.node, {})[name] = part
        return []

    def remove(self, key: str, at: datetime, *, watched: bool = True) -> list[Any]:  # noqa: ARG002
        part = self.known.pop(key, None)
        if part is not None:
            of_node = self.of_node[part.node]
            del of_node[key]
            if not of_node:
                del self.of_node[part.node]
        return []


class RunningPods:
    """The parts of jobs on all nodes.

    ``read``: gives a pod's part; it raises nothing.
    ``follows``: the first :meth:`everywhere` begins a watch, for a process that asks again and again. It counts while
    the server was heard of within ``IDLE_S``: a change, a bookmark, or a watch that it began; else pods are listed.
    """

    def __init__(
        self, api: ApiServer, read: Callable[[Object], PodPart | None], page_size: int, *, follows: bool
    ) -> None:
        self._api, self._read, self._page_size, self._follows = api, read, page_size, follows
        self._newest = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._resource: Resource | None = None
        self._parts = _Parts()
        self._by_watch = False

    def everywhere(self) -> list[PodPart]:
        """Return the parts on all nodes; raises ``SchedulerError`` if they have to be listed and cannot be."""
        self._by_watch = self.watched
        if self._by_watch:
            with self._lock:
                return list(self._parts.known.values())
        self._newest = 0
        pods, version = self._api.listing_at(PODS, _BOUND, self._page_size, self._seen)
        if self._follows and (self._thread is None or not self._thread.is_alive()):
            self._begin(pods, version)
            self._by_watch = True
        return [part for _, part in pods if part is not None]

    def on(self, node: str) -> list[PodPart]:
        """Return the parts on one node, never older than what :meth:`everywhere` gave last; raises the same."""
        if self._by_watch and self.watched:  # one that was cut may have come back older than what was listed meanwhile
            with self._lock:
                return list(self._parts.of_node.get(node, {}).values())
        params = {"fieldSelector": f"{LIVING},spec.nodeName={node}"}
        if self._newest:
            # "Not older than": the server may answer from its memory, by its index of nodes, rather than read all pods.
            # The version is that of the newest pod read and not of the listing: before 1.31, a server whose pods
            # have not changed since would wait for a change before it answers.
            params["resourceVersion"] = str(self._newest)
        return self._api.listing(PODS, params, 0, self._read)

    @property
    def watched(self) -> bool:
        """Whether the watch runs, and what it reported is current."""
        resource, thread = self._resource, self._thread
        if resource is None or resource.version is None or thread is None or not thread.is_alive():
            return False
        return time.monotonic() - resource.heard_s < IDLE_S

    def stop(self) -> None:
        """End the watch, at the latest when the server does; the next :meth:`everywhere` begins another."""
        self._stop.set()
        self._resource = self._thread = None

    def _begin(self, pods: list[Seen], version: str) -> None:
        self._stop, self._parts = threading.Event(), _Parts()
        resource = Resource("pods", PODS, _BOUND, self._seen, self._parts, version, self._page_size, relists=True)
        self._take(resource, "listed", pods, version)
        resource.hear()
        given = (self._api.client, resource, self._take, self._stop.wait)
        self._thread = threading.Thread(target=follow, args=given, name="follow pods", daemon=True)
        self._thread.start()
        self._resource = resource

    def _take(self, resource: Resource, kind: ChangeKind, pods: list[Any], version: str) -> None:
        with self._lock:
            resource.tracker.take(kind, pods, datetime.now(UTC))
            resource.version = version

    def _seen(self, raw: Object) -> Seen:
        metadata = raw.get("metadata") or {}
        self._newest = max(self._newest, version_of(raw))
        return f"{metadata.get('namespace')}/{metadata.get('name')}", self._read(raw)
