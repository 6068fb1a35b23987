"""What is scraped: one exporter page a target."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from telemetry.errors import InputError

DEFAULT_PORT: Final = 9400
"""Port of dcgm-exporter's page (its ``--address`` defaults to ``:9400``)."""

DEFAULT_PATH: Final = "/metrics"
PLACE_LABELS: Final = ("cluster", "group", "rack", "nvlink_domain")
"""What a list of targets may tell of a node besides its name."""


@dataclass(frozen=True, slots=True)
class Target:
    """One page that is scraped.

    ``node``: of the page, where the one who named the target knows it; None: the page's own labels tell, and where they
    do not, the host of the URL. ``labels``: of :data:`PLACE_LABELS`, with their values.
    """

    url: str
    node: str | None = None
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def host(self) -> str:
        """Host of the URL, without port and brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def address(self) -> str:
        """What logs show: host, port, and the path if it is not ``/metrics``; never the query, which may be secret."""
        parts = urlsplit(self.url)
        return parts.netloc + ("" if parts.path == DEFAULT_PATH else parts.path)


def parse_target(text: str, where: str, *, node: str | None = None, labels: tuple[tuple[str, str], ...] = ()) -> Target:
    """Read a target as a user writes it: ``host``, ``host:port``, ``host:port/path`` or a URL.

    Without a scheme the port is 9400 where none is given. Raises ``InputError`` if it is no address, or holds a
    password.

    Examples
    --------
    >>> parse_target("node07", "targets.txt, line 1").url
    'http://node07:9400/metrics'
    """
    written = text = text.strip()
    try:
        if "://" not in text:
            if text.count(":") > 1 and not text.startswith("["):
                text = f"[{ipaddress.IPv6Address(text)}]"
            netloc, slash, path = text.partition("/")
            text = f"http://{netloc if ':' in netloc.rpartition(']')[2] else f'{netloc}:{DEFAULT_PORT}'}{slash}{path}"
        parts = urlsplit(text)
        if parts.username or parts.password:
            raise InputError(
                f"the address of {parts.hostname} holds a password", "targets", "Give it with --basic-auth-file."
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or len(text.split()) != 1:
            raise ValueError("no page")
    except ValueError:
        raise InputError(
            f"{written!r} is no address of a page", where, "Write host, host:port or http(s)://host:port/path."
        ) from None
    path = parts.path if parts.path not in ("", "/") else DEFAULT_PATH
    return Target(urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")), node, labels)
