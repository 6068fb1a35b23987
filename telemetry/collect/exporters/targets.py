"""What is scraped: one exporter page a target, by one process."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from telemetry.atomic import disk_errors
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
        """Host and port, and the path if it is not ``/metrics``: what logs show, and what names the target in states.

        The query, which may hold a secret, shows as a short hash.
        """
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        port = parts.port or (443 if parts.scheme == "https" else 80)
        query = f"?{target_hash(parts.query) & 0xFFFFFF:06x}" if parts.query else ""
        return f"{host}:{port}{'' if parts.path == DEFAULT_PATH else parts.path}{query}"


def target_hash(url: str) -> int:
    """Return 62 bits that spread targets evenly and are the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(url.encode(), digest_size=8).digest(), "big") >> 2


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
            has_port = netloc.rpartition(":")[2].isdigit() and not netloc.endswith("]")
            text = f"http://{netloc if has_port or ':' in netloc.rpartition(']')[2] else f'{netloc}:{DEFAULT_PORT}'}"
            text += slash + path
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


class TargetLocks:
    """Which targets this process scrapes: a byte of one file is locked for each, and goes free when the process ends.

    Collectors of one dataset whose lists overlap, however they are written, so never scrape one target twice.
    """

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            self._file = path.open("a+b")

    def acquire(self, target: Target) -> bool:
        """Whether the target is ours; False while another process has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, target_hash(target.url))
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise InputError(
                f"the file system has no locks: {error.strerror}", self._file.name, "Keep the dataset on one that has."
            ) from error
        return True

    def release(self, target: Target) -> None:
        """Let another process have the target."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, target_hash(target.url))
