"""Reads from the API server: a failure is a :class:`SchedulerError`, or leaves the decision about a pod open."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

from foundation.kubernetes.api import ApiRefused, Object, Unreachable
from foundation.kubernetes.client import KubernetesClient
from scheduler.ports.errors import SchedulerError

_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_CACHE_S: Final = 30.0
T = TypeVar("T")


class ApiServer:
    """The client with the errors of the scheduler port; ``elapsed`` is a monotonic clock in seconds."""

    def __init__(self, client: KubernetesClient, elapsed: Callable[[], float] = time.monotonic) -> None:
        self.name = client.name
        self.elapsed = elapsed
        self.client, self.request = client, client.request

    def read(self, path: str, *, accept: str = "application/json", named: str | None = None) -> Object | None:
        """Read one object with the name ``named``; None if it does not exist. Raises ``SchedulerError``."""
        try:
            return self.client.get(path, None, accept=accept, named=named)
        except (ApiRefused, Unreachable) as error:
            if isinstance(error, ApiRefused) and error.status == _NOT_FOUND:
                return None
            raise self._error(path, error) from error

    def listing(
        self, path: str, params: Mapping[str, str], page_size: int, view: Callable[[Object], T | None]
    ) -> list[T]:
        """List objects, converted by ``view`` (None drops one); raises ``SchedulerError``. Page size 0: one page."""
        return self.listing_at(path, params, page_size, view)[0]

    def listing_at(
        self, path: str, params: Mapping[str, str], page_size: int, view: Callable[[Object], T | None]
    ) -> tuple[list[T], str]:
        """List objects like :meth:`listing`, and return the resourceVersion to start a watch from."""
        try:
            return self.client.list_all(path, params, view, page_size)
        except (ApiRefused, Unreachable) as error:
            raise self._error(path, error) from error

    def _error(self, path: str, error: Exception) -> SchedulerError:
        return SchedulerError(f"{self.name}{path if isinstance(error, ApiRefused) else ''}: {error}")


class UndecidedError(Exception):
    """A decision about a pod is impossible, e.g. after a failed read; the message states the cause."""


class CachedReads:
    """Reads for decisions about pods, cached for 30 s."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self._results: dict[str, tuple[Any, float]] = {}  # result and time of the read, by key

    def object(self, path: str, resource: str) -> Object:
        """Read one object; raises :class:`UndecidedError`."""
        return self.cached(path, f"get {resource}", lambda: self.api.client.get(path, None))

    def cached(self, key: str, right: str, read: Callable[[], T]) -> T:
        """Return a result that is at most ``_CACHE_S`` old, or read it."""
        now_s = self.api.elapsed()
        self._results = {key: result for key, result in self._results.items() if now_s - result[1] < _CACHE_S}
        if key not in self._results:
            self._results[key] = self.uncached(right, read), now_s
        return cast(T, self._results[key][0])

    @staticmethod
    def uncached(right: str, read: Callable[[], T]) -> T:
        """Read; raises :class:`UndecidedError`, which names the missing RBAC permission on a 403."""
        try:
            return read()
        except ApiRefused as error:
            if error.status == _FORBIDDEN:
                raise UndecidedError(
                    f"the controller lacks the right to {right} (deploy/kubernetes/actuator-rbac.yaml)"
                ) from None
            raise UndecidedError(str(error)) from None
        except Unreachable as error:
            raise UndecidedError(str(error)) from None
