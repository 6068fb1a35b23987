"""An API server as the adapter reads it: what cannot be read is a :class:`SchedulerError`."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from foundation.kubernetes.api import ApiRefused, Object, Unreachable
from foundation.kubernetes.client import KubernetesClient
from scheduler.ports.errors import SchedulerError

_NOT_FOUND = 404
T = TypeVar("T")


class ApiServer:
    """The client, with the errors of the scheduler's port; ``elapsed`` is a clock in seconds that is never set."""

    def __init__(self, client: KubernetesClient, elapsed: Callable[[], float] = time.monotonic) -> None:
        self.name = client.name
        self.elapsed = elapsed
        self.client, self.request = client, client.request

    def read(self, path: str, *, accept: str = "application/json", named: str | None = None) -> Object | None:
        """Read one object, which must have the name ``named``; None: there is none; else ``SchedulerError``."""
        try:
            return self.client.get(path, None, accept=accept, named=named)
        except (ApiRefused, Unreachable) as error:
            if isinstance(error, ApiRefused) and error.status == _NOT_FOUND:
                return None
            raise self._error(path, error) from error

    def listing(
        self, path: str, params: Mapping[str, str], page_size: int, view: Callable[[Object], T | None]
    ) -> list[T]:
        """List objects page by page (0: all in one), as ``view`` gives them (None: left out), or ``SchedulerError``."""
        return self.listing_at(path, params, page_size, view)[0]

    def listing_at(
        self, path: str, params: Mapping[str, str], page_size: int, view: Callable[[Object], T | None]
    ) -> tuple[list[T], str]:
        """List objects as :meth:`listing` does, with the version to watch them from."""
        try:
            return self.client.list_all(path, params, view, page_size)
        except (ApiRefused, Unreachable) as error:
            raise self._error(path, error) from error

    def _error(self, path: str, error: Exception) -> SchedulerError:
        return SchedulerError(f"{self.name}{path if isinstance(error, ApiRefused) else ''}: {error}")
