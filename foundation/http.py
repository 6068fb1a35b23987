"""HTTP client for all rooms: credentials, TLS, timeouts, bounded bodies, one retry policy, clear errors.

Start with :func:`connect_to`. :func:`ask` makes one bounded request; :func:`exchange` is for callers with their own
event loop and client; :func:`retry_policy` retries either. Redirects are never followed, so that credentials are not
sent to another host.
"""

import asyncio
import base64
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

from foundation.errors import InputError
from foundation.files import read_text

if TYPE_CHECKING:  # slow to import: keeps `--help` fast
    import httpx

CONNECT_TIMEOUT_S: Final = 10.0
MAX_RETRY_AFTER_S: Final = 300.0
RETRIED_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_API: Final = re.compile(r"/api/v1(/.*)?\Z")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_MAX_SHOWN: Final = 300


class HttpError(Exception):
    """No connection or a timeout (``status`` None), or a status of 400 or above."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class NoAnswerInTime(HttpError):
    """The response was not complete before the request timed out."""


class ProtocolError(HttpError):
    """The response is truncated, compressed or not HTTP."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Address of a server with TLS and authentication settings; create it with :func:`connect_to`.

    ``url`` has no trailing slash, user or password. Credential files are read for each request, as tokens are rotated.
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
        """Return the headers of one request; raises ``InputError`` if a credentials file is invalid."""
        headers = dict(self.headers)
        if self.bearer_token_file is not None:
            headers["Authorization"] = f"Bearer {_secret(self.bearer_token_file, '--bearer-token-file')}"
        elif self.basic_auth_file is not None:
            pair = _secret(self.basic_auth_file, "--basic-auth-file")
            if ":" not in pair:
                raise InputError(
                    "the file does not contain user:password",
                    f"--basic-auth-file {self.basic_auth_file}",
                    "Write one line into it: user:password",
                )
            headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode("ascii")
        return headers

    def tls(self) -> ssl.SSLContext:
        """Return the TLS context; raises ``InputError`` if a certificate or key file is invalid."""
        context = ssl.create_default_context()
        if self.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        problem, location, advice = "the certificates cannot be read", f"--ca-file {self.ca_file}", "Give a PEM file."
        try:
            if self.ca_file is not None:
                context.load_verify_locations(cafile=self.ca_file)
            if self.client_cert is not None:
                problem, location = "the client certificate cannot be used", f"--client-cert {self.client_cert}"
                advice = "Give the certificate and its unencrypted --client-key as PEM files."
                # An empty password keeps OpenSSL from prompting for one.
                context.load_cert_chain(self.client_cert, self.client_key, password="")
        except OSError as error:
            raise InputError(f"{problem}: {error}", location, advice) from error
        return context


def connect_to(
    url: str,
    *,
    headers: Sequence[str] = (),
    insecure_skip_verify: bool = False,
    option: str = "--url",
    **files: Path | None,
) -> Connection:
    """Validate connection options; no request is sent.

    ``headers``: as ``NAME=VALUE``; ``files``: the file fields of :class:`Connection`. ``/api/v1`` and everything after
    it is cut from the URL. Raises ``InputError`` if an option is invalid or options contradict each other.
    """
    if files.get("bearer_token_file") is not None and files.get("basic_auth_file") is not None:
        raise InputError(
            "two authentication methods",
            "--bearer-token-file and --basic-auth-file",
            "Give only the method that the server requires.",
        )
    if files.get("client_key") is not None and files.get("client_cert") is None:
        raise InputError("a client key without a certificate", "--client-key", "Give --client-cert too.")
    pairs = []
    for header in headers:
        name, separator, value = header.partition("=")
        if not separator or not _HEADER_NAME.match(name) or not value.isprintable():
            raise InputError(
                f"{name!r} is not a header", "--header", "Write NAME=VALUE, such as X-Scope-OrgID=research."
            )
        pairs.append((name, value))
    connection = Connection(
        url=_base(url, option), insecure_skip_verify=insecure_skip_verify, headers=tuple(pairs), **files
    )
    connection.request_headers()
    connection.tls()
    return connection


def async_client(
    connection: Connection,
    *,
    timeout_s: float,
    concurrency: int = 10,
    use_proxies: bool = True,
    tls: ssl.SSLContext | None = None,
    unix_socket: str | None = None,
) -> "httpx.AsyncClient":
    """Return a client for one server with at most ``concurrency`` connections.

    ``tls``: the connection's TLS context, if it exists already. ``use_proxies``: use the proxies of the environment;
    never for requests that carry out a decision. ``unix_socket``: path of the server's socket, used instead of TCP.
    """
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request at INFO
    return httpx.AsyncClient(
        verify=tls or connection.tls(),
        transport=None if unix_socket is None else httpx.AsyncHTTPTransport(uds=unix_socket),
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        follow_redirects=False,
        # Requests to loopback addresses never use a proxy.
        trust_env=use_proxies and urlsplit(connection.url).hostname not in _LOOPBACK,
        # Compression costs the server more than the transfer, and an uncompressed body is no decompression bomb.
        headers={"User-Agent": "predrain", "Accept-Encoding": "identity"},
    )


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete response of any status; header names in lower case, ``duration_s`` up to the last byte."""

    body: bytes
    headers: Mapping[str, str]
    duration_s: float
    status: int = 200


class BodyTooLarge(Exception):
    """The body exceeds the size limit; ``answer`` has the status and headers, without a body."""

    def __init__(self, message: str, answer: HttpResponse) -> None:
        super().__init__(message)
        self.answer = answer


async def exchange(
    session: "httpx.AsyncClient",
    method: str,
    url: str,
    *,
    timeout_s: float,
    max_bytes: int,
    hold: Callable[[int], object] = lambda _size: None,
    **request: Any,
) -> HttpResponse:
    """Make one request; ``timeout_s`` covers the whole response, ``hold`` receives the size of each chunk of the body.

    Raises ``HttpError`` if the response is incomplete, or compressed (not requested, and may unpack to terabytes);
    ``BodyTooLarge``; ``InputError`` if the server's certificate is not trusted or the URL is invalid.
    """
    began_s, size = time.monotonic(), 0
    pieces: list[bytes] = []
    with _http_errors(url):
        async with asyncio.timeout(timeout_s), session.stream(method, url, **request) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise ProtocolError("the response is compressed, which was not requested")
            async for piece in response.aiter_raw():
                size += len(piece)
                hold(len(piece))
                if size > max_bytes:
                    empty = HttpResponse(b"", headers, time.monotonic() - began_s, response.status_code)
                    raise BodyTooLarge(f"the answer has more than {max_bytes:,} bytes", empty)
                pieces.append(piece)
    return HttpResponse(b"".join(pieces), headers, time.monotonic() - began_s, response.status_code)


def ask(
    connection: Connection,
    method: str = "GET",
    path: str = "",
    *,
    timeout_s: float = 10.0,
    max_bytes: int = 8 << 20,
    use_proxies: bool = True,
    unix_socket: str | None = None,
    headers: Mapping[str, str] | None = None,
    **request: Any,
) -> HttpResponse:
    """Make one request on a new connection, outside any event loop; raises the errors of :func:`exchange`."""

    async def run() -> HttpResponse:
        sent = connection.request_headers() | dict(headers or {})
        async with async_client(
            connection, timeout_s=timeout_s, use_proxies=use_proxies, unix_socket=unix_socket
        ) as session:
            url = connection.url + path
            return await exchange(
                session, method, url, timeout_s=timeout_s, max_bytes=max_bytes, headers=sent, **request
            )

    return asyncio.run(run())


@contextmanager
def _http_errors(url: str) -> Iterator[None]:
    """Turn errors of httpx into HttpError, or into InputError where retries cannot help."""
    import httpx

    try:
        yield
    except (httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise HttpError("connection timed out") from error
    except (TimeoutError, httpx.TimeoutException) as error:
        raise NoAnswerInTime("response timed out") from error
    except httpx.HTTPError as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        for cause in causes:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise InputError(
                    f"the secure connection failed: {str(cause)[:_MAX_SHOWN]}",
                    shown_url(url),
                    "Give the authority's certificate as --ca-file (and --client-cert where the server asks for one).",
                ) from error
        # httpx reports a refused connection as "All connection attempts failed".
        is_refused = any(isinstance(cause, ConnectionRefusedError) for cause in causes)
        text = "connection refused" if is_refused else str(error)[:_MAX_SHOWN] or "connection lost"
        kind = ProtocolError if isinstance(error, httpx.RemoteProtocolError) else HttpError
        raise kind(f"{type(error).__name__}: {text}") from error
    except httpx.InvalidURL as error:
        raise InputError("the URL is invalid", shown_url(url), "Correct the address.") from error


def check_status(answer: HttpResponse, url: str) -> None:
    """Raise ``HttpError`` for a status of 400 or above and ``InputError`` for a redirect."""
    if 300 <= answer.status < 400:
        target = shown_url(answer.headers.get("location", "nowhere"))
        raise InputError(
            f"the server redirects (HTTP {answer.status} to {target})",
            shown_url(url),
            "Give that address if it is the same server; a login page means that credentials are missing. Redirects "
            "are not followed, to protect credentials.",
        )
    if answer.status >= 400:
        reason = " ".join(answer.body[:_MAX_SHOWN].decode("utf-8", "replace").split())
        raise HttpError(
            f"HTTP status {answer.status}{f': {reason}' if reason else ''}",
            status=answer.status,
            retry_after_s=retry_after_s(answer.headers.get("retry-after")),
        )


def retry_after_s(header: str | None, *, longest_s: float = MAX_RETRY_AFTER_S) -> float | None:
    """Parse a Retry-After header in seconds, at most ``longest_s``; None for a date, which is rare."""
    text = (header or "").strip()
    return min(float(text), longest_s) if text.isascii() and text.isdigit() else None


def retry_policy(
    *,
    attempts: int | None = 3,
    timeout_s: float | None = None,
    wait_max_s: float = 30.0,
    on: Callable[[Exception], bool | float] | None = None,
) -> Any:
    """Return stamina's retry context for ``for attempt in …: with attempt: …``.

    ``on``: whether to retry an error, or the pause in seconds; default :func:`retried`.
    """
    import stamina

    # stamina's default hook logs every retry; callers log once that a server is failing.
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
    """Whether to retry a request after an error, or the pause in seconds that the server requested."""
    if not isinstance(error, HttpError) or not (error.status is None or error.status in RETRIED_STATUS):
        return False
    return True if error.retry_after_s is None else error.retry_after_s


def shown_url(url: str) -> str:
    """Return a URL without user, password and query, safe to log."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}" if host else parts.path


def parse_listen(text: str, option: str = "--listen") -> tuple[str, int]:
    """Parse ``HOST:PORT`` (``[HOST]:PORT`` for IPv6); raises ``InputError`` if it is invalid."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InputError(f"{text!r} is not a listen address", option, "Write HOST:PORT, such as 127.0.0.1:9201.")
    return host, int(port)


def _base(url: str, option: str) -> str:
    try:
        parts = urlsplit(url.strip())
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("no server")
    except ValueError:
        raise InputError(
            f"{re.sub(r'//[^/@]*@', '//…@', url)!r} is not the address of a server",
            option,
            "Write it with http:// or https://, such as http://prometheus.example:9090.",
        ) from None
    if parts.username is not None or parts.password is not None:
        raise InputError(
            "the URL contains a user or password",
            option,
            "Use --basic-auth-file: URLs appear in logs.",
        )
    path = _API.sub("", parts.path.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc, path.rstrip("/"), "", ""))


def _secret(path: Path, option: str) -> str:
    try:
        text = read_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the file cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}",
            f"{option} {path}",
            "Give a file that this user may read.",
        ) from error
    if not text or "\n" in text or not text.isprintable():
        raise InputError("the file must contain exactly one line of text", f"{option} {path}", "Write the secret.")
    return text
