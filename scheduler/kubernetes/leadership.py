"""Which replica may write: a Lease of the API server, taken so that no clock of another machine is trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from scheduler.kubernetes.api import ApiServer
from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock
from telemetry.collect.kubernetes.api import Object, Unreachable

_API: Final = "/apis/coordination.k8s.io/v1/namespaces"
_LOOK_EVERY_S: Final = 1.0
_LONGEST_FOREIGN_S: Final = 3600.0  # a lease that claims to last longer is waited for no longer than this


@dataclass(frozen=True, slots=True)
class Held:
    """Our right to write; ``ends_s`` by the clock that is never set: a clock that is set back prolongs nothing."""

    holder: str
    until: datetime
    ends_s: float


class Leadership:
    """A Lease.

    Another holder's lease is over when it was seen unchanged for as long as it claims to last, by our own clock that
    is never set: ``renewTime`` is a time of the other's clock and only compared with itself. Our own ends ``lasts``
    after the moment before the request was sent.

    ``waits``: another holder's lease is watched until it is renewed or over: for a process that does one round and
    ends, which would never see a lease twice.
    """

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        name: str,
        clock: Clock,
        *,
        waits: bool = False,
        sleep: Callable[[float], object],
    ) -> None:
        self._api = api
        self._folder = f"{_API}/{namespace}/leases"
        self._path = f"{self._folder}/{name}"
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self._waits = waits
        self._sleep = sleep
        self._seen: tuple[tuple[str, ...], float] | None = None
        self.held: Held | None = None

    def may_write(self, holder: str) -> str | None:
        """Return why a process may not write now; None: it may."""
        if self.held is None or self.held.holder != holder:
            return f"{holder} does not hold the lease"
        return f"the lease of {holder} has ended" if self.left() <= timedelta(0) else None

    def blocked(self, holder: str, until: datetime) -> str | None:
        """Return why a process may not write now, or not any more; None: it may."""
        late = "the lease ended before it was sent" if self._clock.now() >= until else None
        return self.may_write(holder) or late

    def left(self) -> timedelta:
        """Return how long the lease is still held."""
        if self.held is None:
            return timedelta(0)
        return min(self.held.until - self._clock.now(), timedelta(seconds=self.held.ends_s - self._api.elapsed()))

    def take(self, holder: str, lasts: timedelta) -> datetime | None:
        """Take or prolong it; None: another one holds it; raise ``SchedulerError`` if that is not known."""
        self.held = None
        while True:
            asked, asked_s = self._clock.now(), self._api.elapsed()
            found = self._api.read(self._path, named=self._name)
            wait = self._foreign_for(found, holder)
            if wait is None:
                self._waits = False
                return self._written(found, holder, lasts, asked, asked_s)
            if not self._waits or wait <= 0:
                return None
            self._sleep(min(wait, _LOOK_EVERY_S))

    def drop(self, holder: str) -> None:
        """Release the lease if it is held here; a failure is ignored."""
        self.held = None
        try:
            found = self._api.read(self._path, named=self._name)
            if found is None or _spec(found).get("holderIdentity") != holder:
                return
            # An empty holder is how Kubernetes' own components give a lease back.
            spec = {**_spec(found), "holderIdentity": "", "leaseDurationSeconds": 1}
            self._api.request("PUT", self._path, body={**found, "spec": spec}, timeout=timedelta(seconds=3))
        except (SchedulerError, Unreachable):
            return

    def _foreign_for(self, found: Object | None, holder: str) -> float | None:
        """Return the seconds left of another holder's lease; 0: it was renewed meanwhile; None: it is free."""
        if found is None:
            return None
        spec = _spec(found)
        other = spec.get("holderIdentity")
        if not other or other == holder:
            self._seen = None
            return None
        now, given = self._api.elapsed(), spec.get("leaseDurationSeconds")
        lasts_s = min(float(given), _LONGEST_FOREIGN_S) if isinstance(given, int) and given > 0 else _LONGEST_FOREIGN_S
        mark = tuple(str(spec.get(key)) for key in ("holderIdentity", "renewTime", "leaseTransitions", "acquireTime"))
        before, self._seen = self._seen, (mark, now)
        if before is None:
            return lasts_s
        if before[0] != mark:
            return 0.0
        self._seen = before
        left = before[1] + lasts_s - now
        return left if left > 0 else None

    def _written(
        self, found: Object | None, holder: str, lasts: timedelta, asked: datetime, asked_s: float
    ) -> datetime | None:
        stamp = asked.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = {} if found is None else _spec(found)
        mine = old.get("holderIdentity") == holder
        transitions = old.get("leaseTransitions")
        spec: dict[str, Any] = {
            **old,
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, math.ceil(lasts.total_seconds())),
            "acquireTime": old.get("acquireTime") or stamp if mine else stamp,
            "renewTime": stamp,
            "leaseTransitions": (transitions if isinstance(transitions, int) else 0) + (not mine and found is not None),
        }
        try:
            if found is None:
                metadata = {"name": self._name, "namespace": self._namespace}
                lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
                response = self._api.request("POST", self._folder, body=lease, timeout=lasts / 2)
            else:
                response = self._api.request("PUT", self._path, body={**found, "spec": spec}, timeout=lasts / 2)
        except Unreachable as error:
            raise SchedulerError(f"{self._api.name}: {error}") from error
        if response.status == 409 and not self._is(holder, stamp):
            return None
        if not response.ok and response.status != 409:
            raise SchedulerError(f"{self._api.name}{self._path}: {response.problem}")
        if response.ok and _spec(response.content).get("holderIdentity") != holder:
            raise SchedulerError(f"{self._api.name}{self._path}: the answer is not our lease")
        self._seen = None
        until = asked + lasts
        self.held = Held(holder, until, asked_s + lasts.total_seconds())
        return until

    def _is(self, holder: str, stamp: str) -> bool:
        """Whether the stored lease is from an earlier attempt here that got no answer."""
        found = self._api.read(self._path, named=self._name)
        spec = {} if found is None else _spec(found)
        return spec.get("holderIdentity") == holder and spec.get("renewTime") == stamp


def _spec(found: Object) -> dict[str, Any]:
    spec = found.get("spec")
    return dict(spec) if isinstance(spec, dict) else {}
