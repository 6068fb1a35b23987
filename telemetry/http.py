"""The HTTP client of every room: credentials and TLS, timeouts, bounded bodies, one retry policy, clear errors.

Start with :func:`connect_to` (checks what a user gave) and :func:`client` or :func:`async_client`; :func:`fetch` does
one bounded request with retries. Redirects are never followed, so that no credentials leave for another host.
"""

from __future__ import annotations

import base64
import email.utils
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from telemetry.errors import InputError

if TYPE_CHECKING:  # `--help` need not pay for the import
    import httpx

CONNECT_TIMEOUT_S: Final = 10.0
MAX_RETRY_AFTER_S: Final = 300.0
"""A server may ask for a pause up to this long; more is taken as this much."""

RETRIED_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_API: Final = re.compile(r"/api/v1(/.*)?\Z")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_SHOWN: Final = 300
_LONGEST_PAUSE_S: Final = 10.0


class HttpError(Exception):
    """A request without a usable answer that may succeed later: no connection, a timeout, or a status of 400 or more.

    ``status`` is None where no answer arrived; ``retry_after_s`` is what the server asked for.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def may_retry(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status is None or self.status in RETRIED_STATUS


class BodyTooLarge(Exception):
    """A body longer than allowed; the rest was not read."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a server is and how to speak to it; make it with :func:`connect_to`.

    ``url`` is the base address without a trailing slash, user or password. Credential files are read again for each
    request, because tokens are rotated.
    """

    url: str
    bearer_token_file: Path | None = None
    basic_auth_file: Path | None = None
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    insecure_skip_verify: bool = False
    headers: tuple[tuple[str, str], ...] = ()

    def request_headers(self) -> dict[str, str]:
        """Return the headers of one request, credentials included.

        Raises InputError if a credentials file is missing, empty or malformed.
        """
        headers = dict(self.headers)
        if self.bearer_token_file is not None:
            token = _secret(self.bearer_token_file, "--bearer-token-file")
            headers["Authorization"] = f"Bearer {token}"
        elif self.basic_auth_file is not None:
            pair = _secret(self.basic_auth_file, "--basic-auth-file")
            if ":" not in pair:
                raise InputError(
                    "the file does not hold a user and a password",
                    f"--basic-auth-file {self.basic_auth_file}",
                    "Write one line into it: user:password",
                )
            headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode("ascii")
        return headers

    def tls(self) -> ssl.SSLContext:
        """Return the TLS settings; raises InputError if a certificate or key file cannot be used."""
        context = ssl.create_default_context()
        if self.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.ca_file is not None:
            try:
                context.load_verify_locations(cafile=self.ca_file)
            except (OSError, ssl.SSLError) as error:
                raise InputError(
                    f"the certificates cannot be read: {error}", f"--ca-file {self.ca_file}", "Give a PEM file."
                ) from error
        if self.client_cert is not None:
            try:
                # An empty password keeps OpenSSL from asking for one on the terminal.
                context.load_cert_chain(self.client_cert, self.client_key, password="")
            except (OSError, ssl.SSLError) as error:
                raise InputError(
                    f"the client certificate cannot be used: {error}",
                    f"--client-cert {self.client_cert}",
                    "Give the certificate and its unencrypted --client-key as PEM files.",
                ) from error
        return context


def connect_to(
    url: str,
    *,
    bearer_token_file: Path | None = None,
    basic_auth_file: Path | None = None,
    ca_file: Path | None = None,
    client_cert: Path | None = None,
    client_key: Path | None = None,
    insecure_skip_verify: bool = False,
    headers: Sequence[str] = (),
    option: str = "--url",
) -> Connection:
    """Check what the user gave (``headers`` as ``NAME=VALUE``) and make a connection of it; nothing is sent yet.

    ``/api/v1`` and what follows it is cut off the address. Raises InputError if the address is not one or holds a
    password, a file cannot be used, or options contradict each other.
    """
    if bearer_token_file is not None and basic_auth_file is not None:
        raise InputError(
            "two ways to log in", "--bearer-token-file and --basic-auth-file", "Give the one that the server asks for."
        )
    if client_key is not None and client_cert is None:
        raise InputError("a key without its certificate", "--client-key", "Give --client-cert too.")
    pairs = []
    for header in headers:
        name, separator, value = header.partition("=")
        if not separator or not _HEADER_NAME.match(name) or not value.isprintable():
            raise InputError(
                f"{name!r} is not a header", "--header", "Write NAME=VALUE, such as X-Scope-OrgID=research."
            )
        pairs.append((name, value))
    connection = Connection(
        url=_base(url, option),
        bearer_token_file=bearer_token_file,
        basic_auth_file=basic_auth_file,
        ca_file=ca_file,
        client_cert=client_cert,
        client_key=client_key,
        insecure_skip_verify=insecure_skip_verify,
        headers=tuple(pairs),
    )
    connection.request_headers()
    connection.tls()
    return connection


def client(
    connection: Connection, *, timeout_s: float, concurrency: int = 10, use_proxies: bool = True
) -> httpx.Client:
    """Return a client for one server; ``timeout_s`` bounds each wait for bytes (see :func:`bounded_body`).

    ``use_proxies``: whether the environment's proxies are used; never for what carries out a decision.
    """
    import httpx  # noqa: PLC0415

    options = _options(connection.url, connection.tls(), timeout_s, concurrency)
    return httpx.Client(**(options if use_proxies else options | {"trust_env": False}))


def async_client(
    connection: Connection,
    *,
    timeout_s: float,
    concurrency: int = 10,
    use_proxies: bool = True,
    tls: ssl.SSLContext | None = None,
) -> httpx.AsyncClient:
    """Return an asynchronous client; ``concurrency`` bounds its connections, ``tls`` is the connection's, if made."""
    import httpx  # noqa: PLC0415

    options = _options(connection.url, tls or connection.tls(), timeout_s, concurrency)
    return httpx.AsyncClient(**(options if use_proxies else options | {"trust_env": False}))


def _options(url: str, tls: ssl.SSLContext, timeout_s: float, concurrency: int) -> dict[str, Any]:
    import httpx  # noqa: PLC0415

    logging.getLogger("httpx").setLevel(logging.WARNING)  # not a line for each request
    return {
        "verify": tls,
        "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
        "limits": httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        "follow_redirects": False,
        # This machine itself is never asked through a proxy.
        "trust_env": urlsplit(url).hostname not in _LOOPBACK,
        # Compressing costs a server more than sending, and a body that is not compressed is no bomb.
        "headers": {"User-Agent": "predrain", "Accept-Encoding": "identity"},
    }


def bounded_body(response: httpx.Response, max_bytes: int, *, deadline_s: float | None = None) -> bytes:
    """Read a streamed body, at most ``max_bytes`` of it and until ``deadline_s`` (``time.monotonic``).

    Raises BodyTooLarge, or HttpError where the body drips on past the deadline.
    """
    if _announced(response) > max_bytes:
        raise BodyTooLarge(f"the answer has more than {max_bytes:,} bytes")
    held = bytearray()
    for piece in response.iter_bytes():
        held += piece
        if len(held) > max_bytes:
            raise BodyTooLarge(f"the answer has more than {max_bytes:,} bytes")
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise HttpError("the answer did not end in time")
    return bytes(held)


@contextmanager
def deadline_extensions(deadline_s: float) -> Iterator[dict[str, Any]]:
    """Yield the ``extensions`` of one request on a new connection, which is shut at ``deadline_s``.

    A timeout bounds each wait for bytes only, so headers that drip would hold the caller for as long as they like.
    """
    sockets: list[socket.socket] = []

    def shut() -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.connect_unix_socket.complete"):
            sockets.append(info["return_value"].get_extra_info("socket").dup())  # TLS takes the socket itself over
            if time.monotonic() >= deadline_s:
                shut()

    timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), shut)
    timer.daemon = True
    timer.start()
    try:
        yield {"trace": trace}
    finally:
        timer.cancel()
        timer.join()
        for each in sockets:
            each.close()


async def bounded_body_async(response: httpx.Response, max_bytes: int) -> bytes:
    """Read a streamed body, at most ``max_bytes`` of it; raises BodyTooLarge."""
    if _announced(response) > max_bytes:
        raise BodyTooLarge(f"the answer has more than {max_bytes:,} bytes")
    held = bytearray()
    async for piece in response.aiter_bytes():
        held += piece
        if len(held) > max_bytes:
            raise BodyTooLarge(f"the answer has more than {max_bytes:,} bytes")
    return bytes(held)


def _announced(response: httpx.Response) -> int:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else 0


@contextmanager
def http_errors(url: str) -> Iterator[None]:
    """Turn the client library's errors into HttpError, and those that no retry mends into InputError."""
    import httpx  # noqa: PLC0415

    try:
        yield
    except httpx.HTTPError as error:
        raise explained(error, url) from error
    except httpx.InvalidURL as error:
        raise InputError("the address cannot be used", shown_url(url), "Correct the address.") from error


def explained(error: httpx.HTTPError, url: str) -> Exception:
    """Return what an error of the client library means: an untrusted certificate is final, the rest may pass."""
    import httpx  # noqa: PLC0415

    if isinstance(error, httpx.TimeoutException):
        connecting = isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout)
        return HttpError("no connection in time" if connecting else "no whole answer in time")
    tls = _tls_cause(error)
    if tls is not None:
        return InputError(
            f"the secure connection failed: {str(tls)[:_SHOWN]}",
            shown_url(url),
            "Give the authority's certificate as --ca-file (and --client-cert where the server asks for one).",
        )
    return HttpError(f"{type(error).__name__}: {str(error)[:_SHOWN]}")


def _tls_cause(error: BaseException) -> BaseException | None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def check_status(response: httpx.Response, body: bytes, url: str) -> None:
    """Raise HttpError for a status of 400 or more and InputError for a redirect."""
    if response.is_redirect or 300 <= response.status_code < 400:
        target = shown_url(response.headers.get("Location", "nowhere"))
        raise InputError(
            f"the server redirects (HTTP {response.status_code} to {target})",
            shown_url(url),
            "Give that address if it is the same server; a login page means that credentials are missing. Redirects "
            "are not followed, so that no credentials go astray.",
        )
    if response.status_code >= 400:
        reason = " ".join(body[:_SHOWN].decode("utf-8", "replace").split())
        raise HttpError(
            f"HTTP status {response.status_code}{f': {reason}' if reason else ''}",
            status=response.status_code,
            retry_after_s=retry_after_s(response.headers.get("Retry-After")),
        )


def retry_after_s(
    header: str | None, now: datetime | None = None, *, longest_s: float = MAX_RETRY_AFTER_S
) -> float | None:
    """Return the seconds that a Retry-After header asks for: a number or a date, at most ``longest_s``."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), longest_s)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return min(max(0.0, (when - (now or datetime.now(UTC))).total_seconds()), longest_s)


def retry_policy(
    *,
    attempts: int | None = 3,
    timeout_s: float | None = None,
    wait_max_s: float = 30.0,
    on: Callable[[Exception], bool | float] | None = None,
) -> Any:
    """Return stamina's retry context of every HTTP request: growing pauses with jitter, Retry-After respected.

    Use it as ``for attempt in retry_policy(): with attempt: ...`` or with ``async for``. ``on`` decides what is retried
    (a float is the pause in seconds); by default an HttpError that may pass.
    """
    import stamina  # noqa: PLC0415

    # Its own hook logs each retry as a bare line on stderr; callers say once that a server is in trouble.
    stamina.instrumentation.set_on_retry_hooks([])
    return stamina.retry_context(
        on=on or retried,
        attempts=attempts,
        timeout=timeout_s,
        wait_initial=0.5,
        wait_jitter=0.5,
        wait_max=wait_max_s,
    )


def retried(error: Exception) -> bool | float:
    """Whether a request is repeated after an error, or after how many seconds."""
    if not isinstance(error, HttpError) or not error.may_retry:
        return False
    return True if error.retry_after_s is None else error.retry_after_s


def _retried_soon(error: Exception) -> bool | float:
    """As :func:`retried`, but a person waits for the answer: a server that wants a long pause gets a short one."""
    wait = retried(error)
    return wait if isinstance(wait, bool) else min(wait, _LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; header names are in lower case, ``duration_s`` is from the request to the last byte."""

    body: bytes
    headers: Mapping[str, str]
    duration_s: float


def fetch(
    connection: Connection,
    path: str = "",
    *,
    form: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    max_bytes: int = 8 << 20,
    attempts: int = 3,
) -> Answer:
    """Get a page (or POST a form), and again where that may help.

    Raises HttpError for a status of 400 or more, and InputError if the server cannot be reached, gives no whole answer
    in time or a larger one than allowed, or redirects.
    """
    where = shown_url(connection.url)
    try:
        for attempt in retry_policy(attempts=attempts, on=_retried_soon):
            with attempt, http_errors(connection.url):
                return _fetch_once(connection, path, form, timeout_s, max_bytes)
    except BodyTooLarge as error:
        raise InputError(str(error), where, "Check that it is the right page.") from error
    except HttpError as error:
        if error.status is not None:
            raise
        raise InputError(
            f"no answer: {error}", where, "Check the address, that the server runs, and that this host may reach it."
        ) from error
    raise AssertionError("unreachable")


def _fetch_once(
    connection: Connection, path: str, form: Mapping[str, str] | None, timeout_s: float, max_bytes: int
) -> Answer:
    began_s = time.monotonic()
    with (
        client(connection, timeout_s=timeout_s) as session,
        deadline_extensions(began_s + timeout_s) as extensions,
        session.stream(
            "GET" if form is None else "POST",
            connection.url + path,
            data=form,
            headers=connection.request_headers(),
            extensions=extensions,
        ) as response,
    ):
        body = bounded_body(response, max_bytes, deadline_s=began_s + timeout_s)
        check_status(response, body, connection.url)
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(body, headers, time.monotonic() - began_s)


def shown_url(url: str) -> str:
    """Return an address without user, password and query, as it may be logged."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}" if host else parts.path


def _base(url: str, option: str) -> str:
    try:
        parts = urlsplit(url.strip())
        has_good_port = parts.port is None or parts.port > 0
    except ValueError:
        parts, has_good_port = SplitResult("", "", "", "", ""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_good_port:
        raise InputError(
            f"{re.sub(r'//[^/@]*@', '//…@', url)!r} is not the address of a server",
            option,
            "Write it with http:// or https://, such as http://prometheus.example:9090.",
        )
    if parts.username is not None or parts.password is not None:
        raise InputError(
            "the address holds a user or a password",
            option,
            "Put user:password into a file and give --basic-auth-file: addresses end up in logs.",
        )
    path = _API.sub("", parts.path.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc, path.rstrip("/"), "", ""))


def _secret(path: Path, option: str) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the file cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}",
            f"{option} {path}",
            "Give a file that this user may read.",
        ) from error
    if not text or "\n" in text or not text.isprintable():
        raise InputError("the file does not hold one line of text", f"{option} {path}", "Write the secret into it.")
    return text
