"""Client of the Prometheus HTTP API, with limits of time and size, and retries of transient errors."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
from pyarrow import csv
from pydantic import TypeAdapter

from foundation.errors import InputError
from foundation.http import (
    BodyTooLarge,
    Connection,
    HttpError,
    NoAnswerInTime,
    async_client,
    check_status,
    exchange,
    retried,
    retry_after_s,
    retry_policy,
)
from foundation.running import Failing

_log = logging.getLogger(__name__)

_Data = TypeVar("_Data")

_ONLY_TEXT: Final = frozenset({str})
_VALUES: Final = re.compile(rb'"values"\s*:\s*\[\s*\[')
_VALUES_END: Final = re.compile(rb"\]\s*\]")
_READ: Final = csv.ReadOptions(column_names=["seconds", "value"], use_threads=False, block_size=1 << 26)
_PARSE: Final = csv.ParseOptions(quote_char=False)
_CONVERT: Final = csv.ConvertOptions(
    column_types={"seconds": pa.float64(), "value": pa.float64()}, null_values=[], strings_can_be_null=False
)
_MAX_MS: Final = 2.0**53

_NAMES: Final = TypeAdapter(list[str])
_SLOW_TRIES: Final = 2
_MAX_SHOWN: Final = 300
_MAX_BODY: Final = 120
_RETRIED: Final = (200, 408, 425, 500, 502, 503)
_FINAL: Final = {
    401: (
        "the server requires a login",
        "Give --bearer-token-file or --basic-auth-file; if one was given, renew it.",
    ),
    403: ("the server denies access", "Ask for permission to query, or use another login."),
    404: (
        "there is no Prometheus API here",
        "Give the address with its path prefix, for instance http://vmselect:8481/select/0/prometheus.",
    ),
}

# Servers ignore parameters they do not know. Thanos: deduplicate replicas, at raw resolution. VictoriaMetrics: bypass
# the response cache.
_PARAMETERS: Final = {"dedup": "true", "max_source_resolution": "0s", "nocache": "1"}

# Prometheus: "query processing would load too many samples into memory", "query timed out".
# VictoriaMetrics: "cannot select more than -search.maxSamplesPerQuery", "the number of matching timeseries exceeds".
# Mimir, Cortex and Thanos: "the query exceeded the maximum number of chunks", "the query time range exceeds the limit",
# "exceeded series limit", "ResourceExhausted".
_TOO_MUCH: Final = re.compile(
    r"too many (?:samples|points|series|chunks|bytes)|exceed|select more than|more than -search|timed out"
    r"|deadline|resource ?exhausted|\blimit\b|too (?:large|long|big)|not enough memory",
    re.IGNORECASE,
)
# An unreachable store is no reason to query less; Thanos reports it with a 422.
_UNREACHABLE: Final = re.compile(
    r"code = Unavailable|connection (?:refused|reset)|no such host|no route to host", re.IGNORECASE
)


class TooMuch(Exception):
    """The query must be split: its response exceeds a limit, named in the message, of the server or this client."""


class Unreadable(HttpError):
    """A response that is not of the Prometheus API."""


class PartialResponse(HttpError):
    """A response without the data of some of the server's stores."""


@dataclass(frozen=True, slots=True)
class RawSamples:
    """Raw samples of several series.

    ``labels`` are those of each series, with ``__name__``; ``index`` (into ``labels``), ``ms`` (Unix) and ``values``
    have shape (n,).
    """

    labels: list[dict[str, str]]
    index: npt.NDArray[np.int32]
    ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def split_samples(body: bytes) -> tuple[bytes, list[bytes]]:
    """Extract the sample arrays of a response; return the JSON, with each array replaced by its number, and the arrays.

    The extracted text is parsed as CSV, 20 times as fast as a JSON parser makes an object of each number. The pattern
    cannot occur inside a JSON string, where quotes are escaped.
    """
    pieces: list[bytes] = []
    arrays: list[bytes] = []
    after = 0
    while match := _VALUES.search(body, after):
        begin = match.end() - 1
        end = body.find(b"]]", begin)
        if end < 0 or body.find(b"{", begin, end) >= 0:  # there is whitespace between the brackets
            spaced = _VALUES_END.search(body, begin)
            end = len(body) if spaced is None else spaced.start()
        pieces += [body[after:begin], b"%d" % len(arrays)]
        arrays.append(body[begin : end + 1])
        after = end + 1
    return b"".join([*pieces, body[after:]]), arrays


def read_matrix(data: Any, arrays: Sequence[bytes]) -> RawSamples:
    """Parse the matrix that a range selector returns; the order of series and samples is kept.

    ``data``, ``arrays``: from :func:`split_samples`, ``data`` decoded.
    Raises ``ValueError`` if it is not a matrix or has a malformed number.
    """
    if not isinstance(data, dict) or data.get("resultType") != "matrix" or not isinstance(data.get("result"), list):
        raise ValueError("not a matrix")
    labels: list[dict[str, str]] = []
    places: list[int] = []
    for entry in data["result"]:
        metric = entry.get("metric") if isinstance(entry, dict) else None
        if not isinstance(metric, dict) or not _ONLY_TEXT.issuperset(map(type, metric.values())):
            raise ValueError("a series has no labels, or labels that are not text")
        samples = entry.get("values", [])  # a native histogram has none
        if samples != []:
            if samples != [len(places)]:
                raise ValueError("the samples of a series are not a list of pairs")
            places.append(len(labels))
        labels.append(metric)
    if len(places) != len(arrays):
        raise ValueError("there are samples outside of the series")
    counts = [array.count(b"[") for array in arrays]
    pairs = _read_pairs(arrays, sum(counts))
    index = np.repeat(np.array(places, np.int32), counts)
    ms = np.round(pairs[0] * 1000)
    # Clamped to a value that is exact as an integer and outside any requested span.
    whole_ms = np.where(np.abs(ms) < _MAX_MS, ms, _MAX_MS).astype(np.int64)
    return RawSamples(labels, index, whole_ms, pairs[1])


def _read_vector(data: Any, _: Sequence[bytes]) -> list[tuple[dict[str, str], float]]:
    try:
        return [(dict(series["metric"]), float(series["value"][1])) for series in data["result"]]
    except (LookupError, TypeError) as error:
        raise ValueError("not a vector") from error


def _read_pairs(arrays: Sequence[bytes], count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the times (Unix seconds) and values of arrays like ``[1767225600,"45"],[1767225630,"46"]``."""
    if not arrays:
        return np.empty(0), np.empty(0)
    lines = b",".join(arrays).translate(None, b' \t\r\n"+').replace(b"],[", b"\n")
    table = csv.read_csv(pa.py_buffer(lines[1:-1]), read_options=_READ, convert_options=_CONVERT, parse_options=_PARSE)
    seconds, values = (column.to_numpy() for column in table.columns)
    if len(seconds) != count:
        raise ValueError(f"{count} samples have {len(seconds)} times")
    return seconds, values


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one request.

    ``request_s``: timeout of one attempt (Prometheus times out after 120 s by default). ``body_bytes``: maximum size
    of a response. ``retry_for_s``: total time of retries; ``first_retry_for_s`` applies until the first response, so
    that a wrong address is reported early.
    """

    request_s: float = 150.0
    body_bytes: int = 32 << 20
    retry_for_s: float = 300.0
    first_retry_for_s: float = 10.0


class PrometheusClient:
    """Client of one server that retries transient errors; an asynchronous context manager.

    ``allow_partial`` accepts responses with warnings (from Thanos: a store did not answer). Every method raises TooMuch
    if a limit of the server or of the response is exceeded, so that the caller can split the query, and InputError if
    an error is permanent or retries are exhausted.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        bounds: Bounds,
        concurrency: int,
        allow_partial: bool,
    ) -> None:
        self._connection = connection
        self._bounds = bounds
        self._places = asyncio.Semaphore(concurrency)
        self._reading = asyncio.Lock()  # parsing takes six times the bytes of a response
        self._concurrency = concurrency
        self._allow_partial = allow_partial
        self._has_answered = False
        self._failing = Failing(_log)
        self.retries = 0

    async def __aenter__(self) -> "PrometheusClient":
        self._session = async_client(self._connection, timeout_s=self._bounds.request_s, concurrency=self._concurrency)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.aclose()

    async def samples(self, query: str, at_ms: int) -> RawSamples:
        """Return the raw samples of a range selector evaluated at ``at_ms`` (Unix)."""
        return await self._ask("/api/v1/query", {"query": query, "time": _seconds(at_ms)}, read_matrix)

    async def vector(self, query: str, at_ms: int) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each series of an instant query at ``at_ms`` (Unix)."""
        return await self._ask("/api/v1/query", {"query": query, "time": _seconds(at_ms)}, _read_vector)

    async def metric_names(self, match: str | None, start_ms: int, end_ms: int) -> list[str]:
        """Return the names of metrics with matching series in the period (Unix ms)."""
        parameters = {"start": _seconds(start_ms), "end": _seconds(end_ms)} | ({"match[]": match} if match else {})
        return await self._ask(
            "/api/v1/label/__name__/values", parameters, lambda data, _: _NAMES.validate_python(data)
        )

    async def _ask(
        self, path: str, parameters: Mapping[str, str], read: Callable[[Any, Sequence[bytes]], _Data]
    ) -> _Data:
        began_s = time.monotonic()
        first, url = not self._has_answered, self._connection.url
        retry_for_s = self._bounds.first_retry_for_s if first else self._bounds.retry_for_s
        slow = 0

        def should_retry(error: Exception) -> bool | float:
            nonlocal slow
            pause = retried(error)
            if isinstance(error, NoAnswerInTime) and not first:
                slow += 1
                # A second timeout means a query that is too heavy: it is split, instead of being retried until the
                # deadline.
                pause = slow < _SLOW_TRIES
            if pause is not False:
                self.retries += 1
                self._failing.failed(url, error)
            return pause

        try:
            async for attempt in retry_policy(attempts=None, timeout_s=retry_for_s, on=should_retry):
                with attempt:
                    async with self._places:
                        body = await self._request(path, parameters)
                        async with self._reading:
                            data = await asyncio.to_thread(self._read, body, read)
        except HttpError as error:
            if slow >= _SLOW_TRIES:
                raise TooMuch(f"no complete response within {self._bounds.request_s:g} s") from error
            raise self._given_up(error, time.monotonic() - began_s, first=first) from error
        self._has_answered = True
        self._failing.recovered(url)
        return data

    def _read(self, body: bytes, read: Callable[[Any, Sequence[bytes]], _Data]) -> _Data:
        try:
            envelope, arrays = split_samples(body)
            document = orjson.loads(envelope)
            status = document["status"]
        except (ValueError, TypeError, LookupError) as error:
            raise Unreadable(f"the response is not from a Prometheus API: {shown(body)}") from error
        if status == "error":
            refuse(200, body, url=self._connection.url, retry_after=None)
        # Thanos and Prometheus set warnings, VictoriaMetrics isPartial, and proxies a list of errors.
        missing = document.get("warnings") or document.get("errors")
        missing = missing or ["some storage nodes did not answer"] * bool(document.get("isPartial"))
        if missing and not self._allow_partial:
            listed = missing if isinstance(missing, list) else [missing]
            raise PartialResponse(f"the response is incomplete: {'; '.join(map(str, listed))[:_MAX_SHOWN]}")
        try:
            return read(document.get("data"), arrays)
        except ValueError as error:  # from pydantic or Arrow
            raise Unreadable(f"the response does not match the request: {shown(body)}") from error

    def _given_up(self, error: Exception, waited_s: float, *, first: bool) -> InputError:
        if isinstance(error, Unreadable):
            advice = (
                "Give the address of a Prometheus API; a proxy in between may have cut or replaced its answers. If it "
                "asks for a login, give one that it takes (--bearer-token-file, --basic-auth-file, --header)."
            )
        elif first:
            advice = "Check the address, and that the server runs."
        else:
            advice = "Staged data is safe: start the same command again to resume."
            if isinstance(error, PartialResponse):
                advice += " --allow-partial accepts incomplete responses."
        return InputError(f"no usable response for {waited_s:.0f} s: {error}", self._connection.url, advice)

    async def _request(self, path: str, parameters: Mapping[str, str]) -> bytes:
        url = self._connection.url
        partial = {"partial_response": "true" if self._allow_partial else "false"}
        try:
            answer = await exchange(
                self._session,
                "GET",
                url + path,
                timeout_s=self._bounds.request_s,
                max_bytes=self._bounds.body_bytes,
                params={**parameters, **_PARAMETERS, **partial},
                headers=self._connection.request_headers(),
            )
        except BodyTooLarge as error:
            raise TooMuch(f"a response of more than {self._bounds.body_bytes >> 20} MiB") from error
        if answer.status < 400:
            check_status(answer, url)
        if answer.status != 200:
            refuse(answer.status, answer.body, url=url, retry_after=answer.headers.get("retry-after"))
        return answer.body


def refuse(status: int, body: bytes, *, url: str, retry_after: str | None) -> None:
    """Raise TooMuch, HttpError (transient) or InputError (permanent) for an error response.

    ``status`` is 200 for a response with the JSON status ``error``.
    """
    message = error_text(body)
    # VictoriaMetrics puts the query before the reason, so match the full text and shorten only the message.
    text = (
        message if len(message) <= _MAX_SHOWN else f"{message[: _MAX_SHOWN // 3]} … {message[-2 * _MAX_SHOWN // 3 :]}"
    )
    if status in _FINAL:
        problem, advice = _FINAL[status]
        raise InputError(f"{problem} (HTTP {status}: {text})", url, advice)
    # 429 can mean "too many outstanding requests": a smaller query does not help, waiting does.
    may_pass = status == 429 or _UNREACHABLE.search(message)
    if status in (413, 504) or (not may_pass and _TOO_MUCH.search(message)):
        raise TooMuch(text)
    if may_pass or status in _RETRIED or status > 504:
        raise HttpError(f"HTTP {status}: {text}", retry_after_s=retry_after_s(retry_after))
    raise InputError(f"the server refuses the query (HTTP {status}: {text})", url, "Check --match and the period.")


def error_text(body: bytes) -> str:
    """Return the API's error message of a response, else the beginning of its body."""
    try:
        return str(orjson.loads(body)["error"]) or shown(body)
    except (ValueError, TypeError, LookupError):
        return shown(body) if body.strip() else "no details"


def shown(body: bytes) -> str:
    """Return the beginning of a body for an error message."""
    text = " ".join(body[: 4 * _MAX_BODY].decode("utf-8", "replace").split())
    return repr(text[:_MAX_BODY] + "…" if len(text) > _MAX_BODY else text)


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.3f}"


def check_match(match: str | None) -> str:
    """Return the matchers of ``--match`` without braces; empty if there are none.

    Raises ``InputError`` if the text is not in braces, as with a metric name before them.
    """
    if match is None or not match.strip():
        return ""
    text = match.strip()
    if not (text.startswith("{") and text.endswith("}")):
        raise InputError(
            f"{text!r} is not a list of matchers", "--match", 'Give it in braces, such as {job="dcgm-exporter"}.'
        )
    return text[1:-1].strip().rstrip(",").strip()


def selector(metric: str, matchers: Iterable[str] = ()) -> str:
    """Return an instant selector for a metric with any name, including dots and colons.

    >>> selector("up", ['job="dcgm"'])
    '{__name__="up",job="dcgm"}'
    """
    parts = [f"__name__={quoted(metric)}", *filter(None, matchers)]
    return "{" + ",".join(parts) + "}"


def quoted(text: str) -> str:
    """Return a PromQL string literal; JSON escapes are valid in PromQL for all label values."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
