"""One request, and what it is answered with: ASGI without a framework, because a look-up takes less than routing."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl

from serving.http.settings import ServiceSettings
from serving.http.strict_json import shown, write_json
from telemetry.receiving.problems import Refused

AsgiScope = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON: Final = "application/json"
_CHUNK: Final = 2**20
_GZIP: Final = 16 + zlib.MAX_WBITS
_MOST_MEMBERS: Final = 64


class Disconnected(Exception):
    """The client went away before its body was whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back."""

    body: bytes
    status: int = 200
    media: str = JSON
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Answer:
        """Return a value as JSON."""
        return cls(write_json(value), status)

    @classmethod
    def problem(cls, refused: Refused) -> Answer:
        """Return a refusal as a problem body (RFC 9457)."""
        headers = refused.headers()
        return cls(refused.body(), refused.status, headers.pop("Content-Type"), headers)


class Held:
    """Bytes of bodies in memory, shared by all requests of a process."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Request:
    """A request's head, and its body when it is asked for.

    ``headers``: names in lower case; of a repeated one the last.
    ``parameter``: what stands in the path for the route's parameter.
    ``body_read``: whether the body was read to its end.
    """

    def __init__(self, scope: AsgiScope, receive: AsgiReceive, settings: ServiceSettings, held: Held) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.parameter = ""
        self.bytes_in = 0
        self._raw_path: bytes = scope.get("raw_path", b"")
        self.client: tuple[str, int] | None = scope.get("client")
        self._scheme = scope.get("scheme")
        self._query: bytes = scope.get("query_string", b"")
        self._receive = receive
        self._settings = settings
        self._held = held
        self._holding = 0
        # Of a request with neither header there is no body (RFC 9112, 6.3).
        self.body_read = self.headers.get("content-length", "0") == "0" and "transfer-encoding" not in self.headers

    def query(self, allowed: tuple[str, ...]) -> list[tuple[str, str]]:
        """Return the query's parameters in order.

        Raises ``Refused``: 400, if there is one that is not ``allowed``, or too many.
        """
        try:
            pairs = parse_qsl(self._query.decode("ascii"), keep_blank_values=True, max_num_fields=50)
        except ValueError:
            raise Refused(400, "the query cannot be read", "invalid") from None
        for name, _ in pairs:
            if name not in allowed:
                raise Refused(400, unknown_name(name, allowed, "query parameter"), "invalid")
        return pairs

    @property
    def address(self) -> str:
        """Path and query as they were sent."""
        path = self._raw_path.decode("latin-1") if self._raw_path else self.path
        return f"{path}?{self._query.decode('latin-1')}" if self._query else path

    @property
    def secure(self) -> bool:
        """Whether the client's connection is encrypted, by what a proxy on this machine says where there is one."""
        return bool(self._scheme == "https")

    def media(self) -> str:
        """Return the body's content type without its parameters, in lower case."""
        media: str = self.headers.get("content-type", "").partition(";")[0]
        return media.strip().lower()

    async def body(self, most: int | None = None) -> bytes:
        """Read the body as it was sent.

        ``most``: most bytes; default: the service's limit.
        Raises ``Refused``: 413 if it is too large, 408 if it comes too slowly, 503 if too many bodies are in memory.
        Raises ``Disconnected`` if the client goes away.
        """
        limit = self._settings.body_bytes if most is None else most
        length = self.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while not self.body_read or not chunks:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    chunk: bytes = message.get("body", b"")
                    chunks.append(chunk)
                    self.bytes_in += len(chunk)
                    self.body_read = not message.get("more_body", False)
                    if self.bytes_in > limit:
                        raise _too_large(limit)
                    self.hold(len(chunk))
        except TimeoutError:
            detail = f"the body did not arrive within {self._settings.body_timeout_s:g} s"
            raise Refused(408, detail, "slow") from None
        return b"".join(chunks)

    def plain(self, body: bytes) -> bytes:
        """Return the body without its content encoding; may be called in a thread.

        Raises ``Refused``: 415 for another encoding than gzip, 413 for too much, 400 for a damaged one.
        """
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", ""):
            return body
        if encoding not in ("gzip", "x-gzip"):
            raise Refused(415, f"content encoding {shown(encoding)}: send the body plain or with gzip", "encoding")
        return gunzip(body, self._settings.decoded_bytes)

    def hold(self, size: int) -> None:
        """Count bytes as held until :meth:`release`.

        Raises ``Refused``: 503, if all requests together hold too many.
        """
        self._holding += size
        self._held.bytes += size
        if self._held.bytes > self._settings.held_bytes and self._held.bytes > self._holding:
            raise Refused(503, "too many bodies are in memory", "memory", retry_after_s=self._settings.retry_after_s)

    def release(self) -> None:
        """Let go of what was held."""
        self._held.bytes -= self._holding
        self._holding = 0


def gunzip(body: bytes, limit: int) -> bytes:
    """Decompress gzip, of one member or several (RFC 1952), never making more than ``limit`` bytes.

    Raises ``Refused``: 413 for more than ``limit``, 400 if it is damaged or cut short.
    """
    chunks: list[bytes] = []
    size = 0
    rest = body
    members = 0
    while rest:
        members += 1
        if members > _MOST_MEMBERS:  # each member copies what follows it: many small ones would take for ever
            raise Refused(413, f"the body is gzip of more than {_MOST_MEMBERS} members", "too_large")
        member = zlib.decompressobj(_GZIP)
        while not member.eof:
            try:
                chunk = member.decompress(rest, _CHUNK)
            except zlib.error:
                raise Refused(400, "the body is no gzip", "garbage") from None
            rest = member.unconsumed_tail
            size += len(chunk)
            if size > limit:
                raise Refused(413, f"the body unpacks to more than {limit} bytes: send smaller ones", "too_large")
            chunks.append(chunk)
            if not chunk and not rest and not member.eof:
                raise Refused(400, "the body is gzip that was cut short", "garbage")
        rest = member.unused_data
    return b"".join(chunks)


def unknown_name(name: str, known: tuple[str, ...] | list[str], what: str) -> str:
    """Return the detail of a refusal of a name, with the nearest valid one."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake needs it

    near = get_close_matches(name[:200], known, n=1, cutoff=0.5)
    if near:
        return f"{what} {shown(name)} is not known: did you mean {near[0]!r}?"
    hint = f"choose of {', '.join(known)}" if len(known) < 20 else "manifest.json of the bundle lists what is"
    return f"{what} {shown(name)} is not known: {hint}"


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than {limit} bytes: send smaller ones", "too_large")
