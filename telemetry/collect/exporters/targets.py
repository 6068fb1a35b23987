"""What is scraped: one exporter page a target."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from telemetry.errors import InputError

DEFAULT_PORT = 9400
"""Port of dcgm-exporter's page (its ``--address`` defaults to ``:9400``)."""

DEFAULT_PATH = "/metrics"
"""Path of an exporter's page where a target names none."""

_HOST_PORT = re.compile(r"^(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[^\s/:\[\]]+)(?::(?P<port>\d+))?(?P<path>/\S*)?$")


@dataclass(frozen=True, slots=True)
class Target:
    """One page that is scraped.

    ``url``: where the page is: ``http`` or ``https``, with host, port and path.
    ``node``: the node that the page speaks of, where the one who named the target knows it; None: the page's own labels
    tell, and where they do not, the host of the URL.
    ``labels``: what is known of the node besides: ``cluster``, ``group``, ``rack``, ``nvlink_domain`` and the value.
    """

    url: str
    node: str | None = None
    labels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.username or parts.password:
            raise InputError(
                f"the address of {parts.hostname} holds a password",
                "targets",
                "Give it with --basic-auth-file.",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                f"{self.url!r} is no address of a page", "targets", "Write host, host:port or http(s)://host:port/path."
            )

    @property
    def host(self) -> str:
        """Host of the URL, without port and brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def address(self) -> str:
        """Host and port, and the path if it is not ``/metrics``: what logs show, and what names the target in states.

        The query, which may hold a secret, shows as a short hash.
        """
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        port = parts.port or (443 if parts.scheme == "https" else 80)
        query = f"?{target_hash(parts.query) & 0xFFFFFF:06x}" if parts.query else ""
        return f"{host}:{port}{'' if parts.path == DEFAULT_PATH else parts.path}{query}"

    @property
    def fallback_node(self) -> str:
        """Node of rows whose labels name none."""
        return self.node or self.host


def target_hash(url: str) -> int:
    """Return 63 bits that spread targets evenly and are the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(url.encode(), digest_size=8).digest(), "big") >> 1


def parse_target(text: str, where: str, *, node: str | None = None) -> Target:
    """Read a target as a user writes it.

    ``text``: ``host``, ``host:port``, ``host:port/path`` or a URL. Without a port 9400, without a path ``/metrics``.
    Raises ``InputError`` if it is no address.

    Examples
    --------
    >>> parse_target("node07", "targets.txt, line 1").url
    'http://node07:9400/metrics'
    """
    text = text.strip()
    do = "Write host, host:port or http(s)://host:port/path."
    try:
        if "://" in text:
            parts = urlsplit(text)
            if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in text):
                raise ValueError("no page")
            _ = parts.port  # raises on a port that is none
            path = parts.path if parts.path not in ("", "/") else DEFAULT_PATH
            return Target(urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")), node)
        if text.count(":") > 1 and not text.startswith("["):
            text = f"[{ipaddress.IPv6Address(text)}]"
        match = _HOST_PORT.match(text)
        if match is None or not 0 < int(match["port"] or DEFAULT_PORT) < 65536:
            raise ValueError("no address")
        path = match["path"] if match["path"] not in (None, "/") else DEFAULT_PATH
        return Target(f"http://{match['host']}:{match['port'] or DEFAULT_PORT}{path}", node)
    except ValueError:
        raise InputError(f"{text!r} is no address of a page", where, do) from None
