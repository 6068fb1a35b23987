"""List and watch of one kind of object, across lost connections, restarts and expired resource versions.

The API server keeps the changes of the last minutes. A watch resumes after the last processed resourceVersion, so that
no change is missed while the connection is down. If that version has expired (410 Gone), the objects are listed again,
and the tracker compares the list with its state.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import Any, Final, Generic, Literal, TypeVar

from foundation.kubernetes.api import GONE, PAGE_SIZE, ApiRefused, Object, Unreachable
from foundation.kubernetes.client import IDLE_S, KubernetesClient
from foundation.running import Wait, backoff_s

log = logging.getLogger(__name__)

ChangeKind = Literal["listed", "changed", "gone"]
"""``listed``: the objects are the complete list."""

_WATCH_TYPES: Final[Mapping[str, ChangeKind]] = {"ADDED": "changed", "MODIFIED": "changed", "DELETED": "gone"}
V = TypeVar("V")
K = TypeVar("K")


class Tracker(ABC, Generic[V, K]):
    """State of the objects of one kind, by key; ``V`` is the view of an object, ``K`` the state kept of it."""

    key: Callable[[V], str] = attrgetter("uid")

    def __init__(self, known: Mapping[str, K]) -> None:
        self.known = dict(known)

    def take(self, kind: ChangeKind, views: Iterable[V], now: datetime) -> list[Any]:
        """Apply a list or a change received at ``now``; return the resulting events."""
        views = list(views)
        events = [event for view in views for event in self.update(view, now)]
        keys = {self.key(view) for view in views}
        if kind == "gone":  # the final state of a deleted object may be new
            events += [event for key in keys for event in self.remove(key, now, watched=True)]
        elif kind == "listed":
            vanished = [key for key in self.known if key not in keys]
            events += [event for key in vanished for event in self.remove(key, now, watched=False)]
        return events

    @abstractmethod
    def update(self, view: V, now: datetime) -> list[Any]:
        """Apply the current state of an object; return the resulting events."""

    def remove(self, key: str, now: datetime, *, watched: bool = True) -> list[Any]:
        """Remove an object, if known; ``watched``: the deletion was observed, not inferred from a list."""
        self.known.pop(key, None)
        return []


@dataclass(slots=True)
class Resource:
    """A watched resource; ``version`` is the last processed resourceVersion (None: a list is due).

    ``read`` converts an object to its view, or None to drop it; only views are kept in memory.
    ``relists``: list again after an interruption, for users that need the state to be current.
    ``unreadable``: objects that could not be parsed, by error.
    ``heard_s``: time of the server's last message (``time.monotonic``); minus infinity while the watch fails.
    """

    name: str
    path: str
    params: Mapping[str, str]
    read: Callable[[Object], Any]
    tracker: Tracker[Any, Any]
    version: str | None = None
    page_size: int = PAGE_SIZE
    relists: bool = False
    heard_s: float = float("-inf")
    unreadable: Counter[str] = field(default_factory=Counter)

    def hear(self) -> None:
        """Record a message from the server."""
        self.heard_s = time.monotonic()

    def view(self, item: Object) -> Any:
        """Return the view of an object; None if it is dropped, or cannot be parsed, which is logged."""
        try:
            return self.read(item)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            metadata = item.get("metadata") if isinstance(item, Mapping) else None
            name = metadata.get("name") if isinstance(metadata, Mapping) else None
            log.warning("%s: skipped unreadable %r: %r", self.name, name, error)
            self.unreadable[f"{type(error).__name__}: {error}"[:200]] += 1
            return None


Take = Callable[[Resource, ChangeKind, list[Any], str], None]
"""Callback for views of a resource, with the resourceVersion up to which they are complete."""


def follow(api: KubernetesClient, resource: Resource, take: Take, wait: Wait) -> None:
    """Watch a resource until stopped; errors are logged and retried."""
    failures, pause_s = 0, 0.0
    while not wait(pause_s):
        pause_s = 0.2  # limits the rate for a server that ends every watch immediately
        try:
            if resource.version is None:
                listed = api.list_all(resource.path, resource.params, resource.view, resource.page_size)
                take(resource, "listed", *listed)
            for event in api.watch(resource.path, resource.params, resource.version or "", resource.hear):
                take(resource, *_change(event, resource))
                resource.hear()
                if failures:
                    log.info("%s: watching %s again", api.name, resource.name)
                failures = 0
            if resource.relists and time.monotonic() - resource.heard_s >= IDLE_S:
                resource.version = None  # the connection was dead
        except Exception as error:  # an unforeseen object must not end a long-running collector
            resource.heard_s = float("-inf")
            answered = isinstance(error, ApiRefused | Unreachable)
            expired = isinstance(error, ApiRefused) and error.status == GONE
            if expired or not answered or resource.relists:
                resource.version = None
            failures += 1
            if failures == 1:
                level = logging.INFO if expired else logging.WARNING
                log.log(
                    level, "%s: %s cannot be followed, retrying: %s", api.name, resource.name, error,
                    exc_info=not answered,
                )  # fmt: skip
            pause_s = getattr(error, "retry_after_s", None) or backoff_s(failures, first_s=0.5)


def _change(event: Object, resource: Resource) -> tuple[ChangeKind, list[Any], str]:
    content = event.get("object") or {}
    if event.get("type") == "ERROR":
        raise ApiRefused(int(content.get("code") or 500), str(content.get("message") or "the watch ended in an error"))
    version = content.get("metadata", {}).get("resourceVersion")
    if not version:
        raise Unreachable(f"a watched object without a version: {str(event)[:200]}")
    kind = _WATCH_TYPES.get(str(event.get("type")))  # None: a bookmark
    view = None if kind is None else resource.view(content)
    return kind or "changed", [] if view is None else [view], str(version)
