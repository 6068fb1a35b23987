"""Following one kind of object: a listing, then every change after it, across cuts, restarts and forgetful servers.

A server keeps the changes of the last minutes. A follower asks for those after the last version it has handed on, so
that nothing is missed while a connection is down; where the server no longer has them (410 Gone) it lists again, and
the receiver compares the listing with what it knew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from telemetry.collect.kubernetes.api import Api, Object, Refused, Unreachable, list_all
from telemetry.collect.running import Wait, backoff_s

log = logging.getLogger(__name__)

_GONE: Final = 410
_ChangeKind = Literal["listed", "changed", "gone", "reached"]
_WATCH_TYPES: Final[Mapping[str, _ChangeKind]] = {"ADDED": "changed", "MODIFIED": "changed", "DELETED": "gone"}


@dataclass(frozen=True, slots=True)
class Resource:
    """What is followed; ``trim`` makes of an object what is worth keeping, or None. Listings are held trimmed only."""

    name: str
    path: str
    trim: Callable[[Object], Any]
    params: Mapping[str, str]

    def read(self, item: Object) -> Any:
        """Return an object trimmed; None also for one that cannot be read, which is logged."""
        try:
            return self.trim(item)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            name = (item.get("metadata") or {}).get("name")
            log.warning("%s: %r cannot be read and is left out: %r", self.name, name, error)
            return None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a resource; ``listed``: these are all that there are, ``reached``: nothing new up to this version."""

    resource: str
    kind: _ChangeKind
    objects: tuple[Any, ...]
    version: str
    at: datetime


def list_resource(api: Api, resource: Resource, clock: Callable[[], datetime]) -> Change:
    """List everything; raises as :func:`telemetry.collect.kubernetes.api.list_all`."""
    at = clock()
    kept, version = list_all(api, resource.path, resource.params, resource.read)
    return Change(resource.name, "listed", tuple(kept), version, at)


def follow(
    api: Api,
    resource: Resource,
    put: Callable[[Change], bool],
    *,
    clock: Callable[[], datetime],
    wait: Wait,
    version: str | None = None,
) -> None:
    """Report the changes of a resource until stopped. Nothing that a server does ends it.

    ``put``: takes a change; may block. False: stop.
    ``version``: go on after this one, without a listing.
    """
    failures = forgotten = 0
    while not wait(0):
        pause_s: float | None = None
        try:
            heard = False
            for change in _changes(api, resource, version, clock):
                if not put(change):
                    return
                version = change.version
                if change.kind != "listed":
                    heard, forgotten = True, 0
            if failures:
                log.info("%s: %s are followed again", api.name, resource.name)
            failures = 0
            if not heard:  # a server that ends watches at once is asked slowly
                pause_s = backoff_s(1, first_s=0.2)
        except Exception as error:  # an object that no rule foresaw must not end a collector of months
            if isinstance(error, Refused) and error.status == _GONE:
                log.info("%s: %s are listed again: %s", api.name, resource.name, error.message)
                forgotten += 1
                version, pause_s = None, backoff_s(forgotten, first_s=0.1)
            else:
                if not isinstance(error, Refused | Unreachable):
                    version = None
                failures += 1
                if failures == 1:
                    log.warning(
                        "%s: %s cannot be followed, retrying: %s", api.name, resource.name, error,
                        exc_info=not isinstance(error, Refused | Unreachable),
                    )  # fmt: skip
                pause_s = getattr(error, "retry_after_s", None) or backoff_s(failures, first_s=0.5)
        if pause_s is not None and wait(pause_s):
            return


def _changes(api: Api, resource: Resource, version: str | None, clock: Callable[[], datetime]) -> Iterator[Change]:
    if not version:
        change = list_resource(api, resource, clock)
        version = change.version
        yield change
    for event in api.watch(resource.path, resource.params, version):
        yield _change(event, resource, clock)


def _change(event: Object, resource: Resource, clock: Callable[[], datetime]) -> Change:
    content = event.get("object") or {}
    if event.get("type") == "ERROR":
        raise Refused(int(content.get("code") or 500), str(content.get("message") or "the watch ended in an error"))
    version = content.get("metadata", {}).get("resourceVersion")
    if not version:
        raise Unreachable(f"a watched object without a version: {str(event)[:200]}")
    kind = _WATCH_TYPES.get(str(event.get("type")), "reached")
    trimmed = None if kind == "reached" else resource.read(content)
    if trimmed is None:
        return Change(resource.name, "reached", (), version, clock())
    return Change(resource.name, kind, (trimmed,), version, clock())
