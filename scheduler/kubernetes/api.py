"""Requests to an API server: bounded in rate, time and size; tried again where the server says it may pass."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, Protocol, TypeVar

import orjson

from scheduler.kubernetes.rate import TokenBucket
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.errors import SchedulerError
from telemetry.collect.kubernetes.client import NotSent, Object, Reply, Unreachable

AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that may pass."""

JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"

METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""``Accept`` of a reading that needs no content: an object of 500 kB is then answered by 500 bytes."""

_GONE: Final = 410
_NOT_FOUND: Final = 404
_RESTARTS: Final = 3
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_MOST_WORDS: Final = 500

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
T = TypeVar("T")


class Connection(Protocol):
    """What sends one request; :class:`telemetry.collect.kubernetes.client.Cluster` does."""

    name: str

    def send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        connect_s: float = ...,
        read_s: float = ...,
        total_s: float = ...,
        most_bytes: int = ...,
    ) -> Reply:
        """Send it once."""
        ...


class NoAnswerError(Exception):
    """No answer that says whether the request was carried out, within the time that there was."""

    def __init__(self, words: str, sent: bool) -> None:
        super().__init__(words)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Said:
    """What a server said.

    ``content``: its JSON; empty where it sent none.
    """

    status: int
    content: Object
    retry_after: timedelta | None = None

    @property
    def good(self) -> bool:
        """Whether it is a success."""
        return 200 <= self.status < 300

    @property
    def words(self) -> str:
        """Its status and message, for people."""
        return f"HTTP {self.status}: {str(self.content.get('message') or 'no message')[:_MOST_WORDS]}"

    @property
    def causes(self) -> tuple[Object, ...]:
        """The causes in the details of a failure."""
        details = self.content.get("details")
        causes = details.get("causes") if isinstance(details, dict) else None
        return tuple(each for each in causes or () if isinstance(each, dict))


class ApiServer:
    """An API server.

    ``elapsed``: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        connection: Connection,
        settings: KubernetesSettings,
        elapsed: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.name = connection.name
        self.elapsed = elapsed
        self._connection = connection
        self._settings = settings
        self._sleep = sleep
        self._bucket = TokenBucket(settings.requests_per_second, settings.burst, elapsed, sleep)

    def ask(
        self,
        method: Method,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        *,
        kind: str = "application/json",
        accept: str = "application/json",
        final: frozenset[int] = frozenset(),
        within: timedelta | None = None,
    ) -> Said:
        """Send a request until the server says something that waiting does not change.

        ``body``: written as JSON. Whatever is sent may arrive twice: it must be so made that the second time changes
        nothing (a version, a ``test``, a name of its own).
        ``kind``, ``accept``: ``Content-Type`` and ``Accept``.
        ``final``: statuses of :data:`AGAIN` that are answers here.
        ``within``: time for all tries; default: the settings' patience.
        Raises ``NoAnswerError`` if there was none in time.
        """
        patience = self._settings.patience if within is None else min(within, self._settings.patience)
        end = self.elapsed() + patience.total_seconds()
        data = None if body is None else orjson.dumps(body)
        sent, pause = False, _FIRST_PAUSE_S
        while True:
            left = end - self.elapsed()
            if left <= 0:
                raise NoAnswerError(f"{method} {path}: no time is left", sent)
            self._bucket.take()
            wait: float | None = None
            try:
                said = self._once(method, path, params, data, kind, accept, left)
                if said.status not in AGAIN or said.status in final:
                    return said
                sent, words = True, said.words
                wait = None if said.retry_after is None else said.retry_after.total_seconds()
            except Unreachable as error:
                sent, words = sent or not isinstance(error, NotSent), str(error)
            if wait is None:
                wait = pause * random.uniform(0.75, 1.25)  # noqa: S311 - spreads retries, no secret
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            if self.elapsed() + wait >= end:
                raise NoAnswerError(f"{method} {path}: {words}", sent)
            self._sleep(wait)

    def read(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        accept: str = "application/json",
        named: str | None = None,
    ) -> Object | None:
        """Read one object; None: there is none.

        ``named``: its name: whoever answers for the server with something else, and be it an empty object, has told
        nothing.
        Raises ``SchedulerError`` if it cannot be read.
        """
        said = self._read(path, params, accept)
        if said.status == _NOT_FOUND:
            return None
        if not said.good:
            raise SchedulerError(f"{self.name}{path}: {said.words}")
        if named is not None and not is_named(said.content, named):
            raise SchedulerError(f"{self.name}{path}: the answer is not {named}")
        return said.content

    def listing(
        self, path: str, params: Mapping[str, str], page: int, view: Callable[[Object], T | None]
    ) -> tuple[list[T], str]:
        """List objects page by page, and keep of each only what is made of it.

        ``page``: objects a page; 0: all at once.
        ``view``: makes of an object what is kept; None: nothing.
        Returns: of one listing: where the server forgot it between two pages (410), it was begun anew.
        Raises ``SchedulerError`` if it cannot be read wholly.
        """
        for _ in range(_RESTARTS):
            kept: list[T] = []
            asked = {**params, "limit": str(page)} if page else dict(params)
            while True:
                said = self._read(path, asked, "application/json")
                if said.status == _GONE:
                    break
                if not said.good:
                    raise SchedulerError(f"{self.name}{path}: {said.words}")
                items, metadata = said.content.get("items"), said.content.get("metadata")
                # a listing has a version, also where it is empty; what has none is of another hand
                if (
                    not isinstance(metadata, dict)
                    or not metadata.get("resourceVersion")
                    or not (items is None or isinstance(items, list))
                ):
                    raise SchedulerError(f"{self.name}{path}: the answer is no listing")
                kept += [made for item in items or () if (made := view(item)) is not None]
                token = metadata.get("continue")
                if not token:
                    return kept, str(metadata.get("resourceVersion") or "")
                asked = {**params, "limit": str(page), "continue": str(token)}
        raise SchedulerError(f"{self.name}{path}: the listing expired {_RESTARTS} times before its last page")

    def _read(self, path: str, params: Mapping[str, str] | None, accept: str) -> Said:
        try:
            return self.ask("GET", path, params, accept=accept)
        except NoAnswerError as error:
            raise SchedulerError(f"{self.name}: {error}") from error

    def _once(
        self,
        method: Method,
        path: str,
        params: Mapping[str, str] | None,
        data: bytes | None,
        kind: str,
        accept: str,
        left: float,
    ) -> Said:
        headers = {"Accept": accept} if data is None else {"Accept": accept, "Content-Type": kind}
        reply = self._connection.send(
            method,
            path,
            params,
            data,
            headers=headers,
            connect_s=min(self._settings.connect_timeout.total_seconds(), left),
            read_s=min(self._settings.request_timeout.total_seconds(), left),
            total_s=left,
        )
        try:
            content = orjson.loads(reply.data) if reply.data else {}
        except ValueError as error:
            if 200 <= reply.status < 300:
                raise Unreachable(f"{path}: the answer is no JSON") from error
            content = {"message": reply.data[:_MOST_WORDS].decode("utf-8", "replace").strip()}
        if not isinstance(content, dict):
            raise Unreachable(f"{path}: the answer is no object")
        return Said(reply.status, content, _seconds(reply.headers.get("Retry-After")))


def is_named(content: Object, name: str) -> bool:
    """Tell whether an answer is the object of a name."""
    metadata = content.get("metadata")
    return isinstance(metadata, dict) and metadata.get("name") == name


def _seconds(text: str | None) -> timedelta | None:
    text = (text or "").strip()
    return timedelta(seconds=min(int(text), 86_400)) if text.isascii() and text.isdigit() else None
