"""Following one kind of object: a listing, then every change after it, across cuts, restarts and forgetful servers.

A server keeps the changes of the last minutes. A follower asks for those after the last version it has handed on, so
that nothing is missed while a connection is down; where the server no longer has them (410 Gone) it lists anew, and the
one who is told compares the listing with what it knew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from telemetry.collect.kubernetes.api import Api, Object, Refused, Unreachable, list_all
from telemetry.collect.running import Wait, backoff_s

log = logging.getLogger(__name__)

_GONE: Final = 410
_WATCH_TYPES: Final = {"ADDED": "changed", "MODIFIED": "changed", "DELETED": "gone"}


@dataclass(frozen=True, slots=True)
class Resource:
    """What is followed.

    ``name``: for logs and state: ``nodes``.
    ``trim``: makes of an object what is worth keeping; None: nothing. Listings are held trimmed only.
    """

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
    """A change that a follower reports.

    ``resource``: name of the :class:`Resource`.
    ``kind``: ``listed``: these are all that there are. ``reached``: nothing new up to this version.
    """

    resource: str
    kind: Literal["listed", "changed", "gone", "reached"]
    objects: tuple[Any, ...]
    version: str
    at: datetime


def list_resource(api: Api, resource: Resource, clock: Callable[[], datetime]) -> Change:
    """List everything; raises as :func:`telemetry.collect.kubernetes.api.list_all`."""
    at = clock()
    kept, version = list_all(api, resource.path, resource.params, resource.read)
    return Change(resource.name, "listed", tuple(kept), version, at)


class Follower:
    """Reports the changes of one resource until it is stopped.

    ``put``: takes a change; may block. False: stop.
    ``version``: go on after this one, without a listing.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        put: Callable[[Change], bool],
        *,
        clock: Callable[[], datetime],
        wait: Wait,
        version: str | None = None,
    ) -> None:
        self._api = api
        self._resource = resource
        self._put = put
        self._clock = clock
        self._wait = wait
        self._version = version or None
        self._failures = 0
        self._forgotten = 0
        self.listings = 0
        self.watches = 0

    def run(self) -> None:
        """Follow until stopped. Nothing that a server does ends it."""
        while not self._wait(0):
            pause_s: float | None = None
            try:
                if not self._round():
                    return
            except Refused as refused:
                if refused.status == _GONE:
                    log.info("%s: %s are listed anew: %s", self._api.name, self._resource.name, refused.message)
                    self._version = None
                    self._forgotten += 1
                    if self._wait(backoff_s(self._forgotten, first_s=0.1)):
                        return
                    continue
                pause_s = refused.retry_after_s
                self._failed(refused)
            except Unreachable as error:
                self._failed(error)
            except Exception as error:
                # An object that no rule foresaw must not end a collector of months: list anew, slowly, and say so.
                if not self._failures:
                    log.exception("%s: reading %s failed", self._api.name, self._resource.name)
                self._version = None
                self._failed(error)
            if self._failures and self._wait(
                pause_s if pause_s is not None else backoff_s(self._failures, first_s=0.5)
            ):
                return

    def _round(self) -> bool:
        """List if need be, then watch until the watch ends; False: stop."""
        if self._version is None:
            change = list_resource(self._api, self._resource, self._clock)
            self.listings += 1
            if not self._put(change):
                return False
            self._version = change.version
            self._recovered()
        self.watches += 1
        told = False
        for event in self._api.watch(self._resource.path, self._resource.params, self._version):
            told = True
            if event.get("type") == "ERROR":
                self._refused(event.get("object") or {})
            if not self._take(event):
                return False
            self._forgotten = 0
            self._recovered()
        if not told and self._wait(backoff_s(1, first_s=0.2)):  # a server that ends watches at once is asked slowly
            return False
        self._recovered()
        return True

    def _take(self, event: Object) -> bool:
        content = event.get("object") or {}
        version = content.get("metadata", {}).get("resourceVersion")
        if not version:
            raise Unreachable(f"a watched object without a version: {str(event)[:200]}")
        kind = _WATCH_TYPES.get(str(event.get("type")))
        trimmed = None if kind is None else self._resource.read(content)
        if trimmed is None:
            change = Change(self._resource.name, "reached", (), version, self._clock())
        else:
            told: Literal["changed", "gone"] = "gone" if kind == "gone" else "changed"
            change = Change(self._resource.name, told, (trimmed,), version, self._clock())
        if not self._put(change):
            return False
        self._version = version
        return True

    @staticmethod
    def _refused(status: Object) -> None:
        raise Refused(int(status.get("code") or 500), str(status.get("message") or "the watch ended in an error"))

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("%s: %s cannot be followed, retrying: %s", self._api.name, self._resource.name, error)

    def _recovered(self) -> None:
        if self._failures:
            log.info("%s: %s are followed again", self._api.name, self._resource.name)
        self._failures = 0
