"""How to reach a server: its address, the proof of who asks, and what is trusted."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit, urlunsplit

from telemetry.errors import InputError

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_API = re.compile(r"/api/v1(/.*)?\Z")


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a server is and how to speak to it; make it with :func:`connect_to`.

    ``url``: base address without a trailing slash, user or password; the API's paths are appended.
    ``bearer_token_file``, ``basic_auth_file``: a file with a token, or with ``user:password``; read anew for each
    request, because tokens are rotated.
    ``ca_file``, ``client_cert``, ``client_key``: PEM files: whom to trust besides nobody else, and who we are.
    ``headers``: sent with each request, such as a tenant's id.
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

        Raises ``InputError`` if a credentials file is missing, empty or not of its form.
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

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings, or None for an address without TLS.

        Raises ``InputError`` if a certificate or key file is missing or cannot be read.
        """
        if not self.url.startswith("https://"):
            return None
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
) -> Connection:
    """Check what the user gave and make a connection of it; nothing is sent yet.

    ``url``: address of the server, with the path prefix it may have; ``/api/v1`` and what follows it is cut off.
    ``headers``: ``NAME=VALUE`` each.
    Raises ``InputError`` if the address is not one, holds a password, or options contradict each other.
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
    made = Connection(
        url=_base(url),
        bearer_token_file=bearer_token_file,
        basic_auth_file=basic_auth_file,
        ca_file=ca_file,
        client_cert=client_cert,
        client_key=client_key,
        insecure_skip_verify=insecure_skip_verify,
        headers=tuple(pairs),
    )
    made.request_headers()
    made.tls()
    return made


def _base(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        port_is_one = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_one = SplitResult("", "", "", "", ""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
        raise InputError(
            f"{_without_password(url)!r} is not the address of a server",
            "--url",
            "Write it with http:// or https://, such as http://prometheus.example:9090.",
        )
    if parts.username is not None or parts.password is not None:
        raise InputError(
            "the address holds a user or a password",
            "--url",
            "Put user:password into a file and give --basic-auth-file: addresses end up in logs.",
        )
    path = _API.sub("", parts.path.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc, path.rstrip("/"), "", ""))


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", url)


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
