"""Following one kind of object: a listing, then every change after it, across cuts, restarts and forgetful servers.

A server keeps the changes of the last minutes. A follower asks for those after the last version that was taken in, so
that nothing is missed while a connection is down; where the server no longer has them (410 Gone) it lists again, and
the tracker compares the listing with what it knew.
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
"""``listed``: the objects are all that there are."""

_WATCH_TYPES: Final[Mapping[str, ChangeKind]] = {"ADDED": "changed", "MODIFIED": "changed", "DELETED": "gone"}
V = TypeVar("V")
K = TypeVar("K")


class Tracker(ABC, Generic[V, K]):
    """What is known of the objects of one kind, by a key; ``V`` is an object as it was read, ``K`` what is kept."""

    key: Callable[[V], str] = attrgetter("uid")

    def __init__(self, known: Mapping[str, K]) -> None:
        self.known = dict(known)

    def take(self, kind: ChangeKind, views: Iterable[V], at: datetime) -> list[Any]:
        """Apply a listing or a change that was heard of at ``at``; return what happened."""
        views = list(views)
        events = [event for view in views for event in self.update(view, at)]
        keys = {self.key(view) for view in views}
        if kind == "gone":  # the last state of a deleted object may be one that no change reported
            events += [event for key in keys for event in self.remove(key, at, watched=True)]
        elif kind == "listed":
            vanished = [key for key in self.known if key not in keys]
            events += [event for key in vanished for event in self.remove(key, at, watched=False)]
        return events

    @abstractmethod
    def update(self, view: V, at: datetime) -> list[Any]:
        """Apply the current state of an object."""

    def remove(self, key: str, at: datetime, *, watched: bool = True) -> list[Any]:
        """Remove an object, if it is known; ``watched``: at the time, not some time before a listing."""
        self.known.pop(key, None)
        return []


@dataclass(slots=True)
class Resource:
    """What is followed, and up to which version it was taken in (None: it has to be listed).

    ``read`` makes of an object what is worth keeping, or None. Listings are held so only.
    ``relists``: whether it is listed again after a cut: what is known counts as current only with its backlog read.
    ``unreadable``: objects that could not be read, by why.
    ``heard_s``: when the server last reported, by ``time.monotonic``; minus infinity while it cannot be followed.
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
        """Note that the server reports now."""
        self.heard_s = time.monotonic()

    def view(self, item: Object) -> Any:
        """Return what is worth keeping of an object; None also for one that cannot be read, which is logged."""
        try:
            return self.read(item)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            metadata = item.get("metadata") if isinstance(item, Mapping) else None
            name = metadata.get("name") if isinstance(metadata, Mapping) else None
            log.warning("%s: skipped unreadable %r: %r", self.name, name, error)
            self.unreadable[f"{type(error).__name__}: {error}"[:200]] += 1
            return None


Take = Callable[[Resource, ChangeKind, list[Any], str], None]
"""Takes views of a resource, and the version up to which they are complete."""


def follow(api: KubernetesClient, resource: Resource, take: Take, wait: Wait) -> None:
    """Report the changes of a resource until stopped. Nothing that a server does ends it."""
    failures, pause_s = 0, 0.0
    while not wait(pause_s):
        pause_s = 0.2  # a server that ends watches immediately is asked slowly
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
                resource.version = None  # the line was dead
        except Exception as error:  # an object that no rule foresaw must not end a collector of months
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
    kind = _WATCH_TYPES.get(str(event.get("type")))  # None: a bookmark, nothing new up to this version
    view = None if kind is None else resource.view(content)
    return kind or "changed", [] if view is None else [view], str(version)
