"""Leader election by a Lease, without trusting the clock of another machine."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from foundation.kubernetes.api import Object, Unreachable
from scheduler.kubernetes.api import ApiServer
from scheduler.ports.errors import SchedulerError
from scheduler.ports.lease import ObservedLease
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import WriteResult

_API: Final = "/apis/coordination.k8s.io/v1/namespaces"
_POLL_S: Final = 1.0


class Leadership:
    """A Lease.

    Another holder's lease has expired once it was observed unchanged for its duration by the local monotonic clock;
    ``renewTime`` comes from the holder's clock and is only compared for equality. Our own lease expires ``duration``
    after the time before the request was sent, by the wall or the monotonic clock, whichever comes first.

    ``waits``: wait until another holder's lease is renewed or has expired; for a process that runs a single round, and
    would otherwise never observe a lease twice.
    """

    def __init__(
        self, api: ApiServer, namespace: str, name: str, clock: Clock, *, waits: bool, sleep: Callable[[float], object]
    ) -> None:
        self._api = api
        self._folder = f"{_API}/{namespace}/leases"
        self._path = f"{self._folder}/{name}"
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self._waits = waits
        self._sleep = sleep
        self._observed = ObservedLease()
        self._lease: tuple[str, datetime, float] | None = None  # holder, end, and the end by the monotonic clock

    def blocked(self, holder: str, until: datetime) -> str | None:
        """Return why a process may not write now, including after ``until``; None if it may."""
        if self._lease is None or self._lease[0] != holder:
            return f"{holder} does not hold the lease"
        if self.remaining() <= timedelta(0):
            return f"the lease of {holder} has expired"
        return "the lease expired before it was sent" if self._clock.now() >= until else None

    def fenced(self, holder: str, until: datetime | None, call: Callable[[], WriteResult]) -> WriteResult:
        """Make a write if the lease is held, and return its result; ``timeout`` if the server did not respond.

        ``until``: None makes it without the lease.
        """
        reason = None if until is None else self.blocked(holder, until)
        if reason is not None:
            return WriteResult("refused", reason)
        try:
            return call()
        except SchedulerError as error:
            return WriteResult("refused", f"nothing was sent: {error}")
        except Unreachable as error:
            return WriteResult("timeout" if error.sent else "refused", str(error))

    @property
    def held(self) -> bool:
        """Whether this process has acquired the lease; it may have expired."""
        return self._lease is not None

    def remaining(self) -> timedelta:
        """Return the remaining time of the lease."""
        if self._lease is None:
            return timedelta(0)
        _, until, ends_s = self._lease
        return min(until - self._clock.now(), timedelta(seconds=ends_s - self._api.elapsed()))

    def take(self, holder: str, duration: timedelta) -> datetime | None:
        """Acquire or renew the lease; None if another process holds it. Raises ``SchedulerError`` if unknown."""
        self._lease = None
        while True:
            requested_at, requested_s = self._clock.now(), self._api.elapsed()
            current = self._api.read(self._path, named=self._name)
            wait = self._foreign_for(current, holder)
            if wait is None:
                self._waits = False
                return self._written(current, holder, duration, requested_at, requested_s)
            if not self._waits or wait <= 0:
                return None
            self._sleep(min(wait, _POLL_S))

    def drop(self, holder: str) -> None:
        """Release the lease if this process holds it; failures are ignored."""
        self._lease = None
        try:
            current = self._api.read(self._path, named=self._name)
            if current is None or _spec(current).get("holderIdentity") != holder:
                return
            # Kubernetes' own components release a lease with an empty holder.
            spec = {**_spec(current), "holderIdentity": "", "leaseDurationSeconds": 1}
            self._api.request("PUT", self._path, body={**current, "spec": spec}, timeout=timedelta(seconds=3))
        except (SchedulerError, Unreachable):
            return

    def _foreign_for(self, current: Object | None, holder: str) -> float | None:
        """Return the seconds until another holder's lease expires; 0 if it was just renewed, None if it is free."""
        spec = _spec(current)
        other = spec.get("holderIdentity")
        if not other or other == holder:
            self._observed.forget()
            return None
        duration = spec.get("leaseDurationSeconds")
        beat = tuple(str(spec.get(key)) for key in ("holderIdentity", "renewTime", "leaseTransitions", "acquireTime"))
        remaining_s = self._observed.left_s(beat, duration if isinstance(duration, int) else None, self._api.elapsed())
        if self._observed.renewed:
            return 0.0
        return remaining_s if remaining_s > 0 else None

    def _written(
        self, current: Object | None, holder: str, duration: timedelta, requested_at: datetime, requested_s: float
    ) -> datetime | None:
        stamp = requested_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = _spec(current)
        is_renewed = old.get("holderIdentity") == holder
        transitions = old.get("leaseTransitions")
        spec: dict[str, Any] = {
            **old,
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, math.ceil(duration.total_seconds())),
            "acquireTime": old.get("acquireTime") or stamp if is_renewed else stamp,
            "renewTime": stamp,
            "leaseTransitions": (transitions if isinstance(transitions, int) else 0)
            + (not is_renewed and current is not None),
        }
        try:
            if current is None:
                metadata = {"name": self._name, "namespace": self._namespace}
                lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
                response = self._api.request("POST", self._folder, body=lease, timeout=duration / 2)
            else:
                response = self._api.request("PUT", self._path, body={**current, "spec": spec}, timeout=duration / 2)
        except Unreachable as error:
            raise SchedulerError(f"{self._api.name}: {error}") from error
        if response.status == 409 and not self._is(holder, stamp):
            return None
        if not response.ok and response.status != 409:
            raise SchedulerError(f"{self._api.name}{self._path}: {response.problem}")
        if response.ok and _spec(response.content).get("holderIdentity") != holder:
            raise SchedulerError(f"{self._api.name}{self._path}: the response is not this Lease")
        self._observed.forget()
        until = requested_at + duration
        self._lease = holder, until, requested_s + duration.total_seconds()
        return until

    def _is(self, holder: str, stamp: str) -> bool:
        """Whether the stored lease was written by an earlier attempt whose response was lost."""
        spec = _spec(self._api.read(self._path, named=self._name))
        return spec.get("holderIdentity") == holder and spec.get("renewTime") == stamp


def _spec(current: Object | None) -> dict[str, Any]:
    spec = (current or {}).get("spec")
    return dict(spec) if isinstance(spec, dict) else {}
