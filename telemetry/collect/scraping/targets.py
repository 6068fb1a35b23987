"""Scrape targets from addresses, target files (reloaded) and Kubernetes services."""

import ipaddress
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import yaml
from pydantic import BaseModel, TypeAdapter

from foundation.errors import InputError
from foundation.files import read_text
from foundation.yaml import read_yaml


class Page(NamedTuple):
    """Defaults for the parts of a URL that an address leaves out."""

    scheme: str
    port: int
    path: str


EXPORTER: Final = Page("http", 9400, "/metrics")
"""dcgm-exporter's page (its ``--address`` defaults to ``:9400``)."""

PLACE_LABELS: Final = ("cluster", "group", "rack", "nvlink_domain")
_KUBERNETES: Final = "kubernetes:"
_YAML_SUFFIXES: Final = (".json", ".yaml", ".yml")
_NODE_LABELS: Final = ("node", "nodename", "hostname", "Hostname", "__meta_kubernetes_pod_node_name")


@dataclass(frozen=True, slots=True)
class Target:
    """A page to scrape.

    ``node``: node named by the target list or by Kubernetes; None: named by the page's labels, else the URL's host.
    ``labels``: pairs of :data:`PLACE_LABELS` and values.
    """

    url: str
    node: str | None = None
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def host(self) -> str:
        """Host of the URL, without port or brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def address(self) -> str:
        """Host, port, and path unless ``/metrics``, for logs; the query may be secret and is omitted."""
        parts = urlsplit(self.url)
        return parts.netloc + ("" if parts.path == EXPORTER.path else parts.path)


class _Group(BaseModel):
    targets: list[str]
    labels: dict[str, Any] | None = None


_GROUPS: Final = TypeAdapter(list[_Group])


def read_targets(values: Sequence[str], page: Page = EXPORTER) -> list[Target]:
    """Resolve ``--targets`` values to targets with distinct URLs; ``page`` has the default scheme, port and path.

    A value is a file, a Kubernetes service, or a comma-separated list of addresses. Raises ``InputError`` if there is
    no value, or one cannot be read.
    """
    if not any(value.strip(", ") for value in values):
        raise InputError("no target is given", "--targets", "Give a file, kubernetes:NAMESPACE/SERVICE, or host:port.")
    by_url: dict[str, Target] = {}
    for value in values:
        for target in _targets_of(value, page):
            by_url.setdefault(target.url, target)
    return list(by_url.values())


def _targets_of(value: str, page: Page) -> Iterator[Target]:
    path = Path(value)
    if value.startswith(_KUBERNETES):
        yield from _of_service(value, page)
    elif path.exists() or (path.suffix in (".txt", ".list", *_YAML_SUFFIXES) and "://" not in value):
        yield from _of_file(path, page)
    else:
        for part in filter(str.strip, value.split(",")):
            yield parse_target(part, "--targets", page=page)


def _of_service(value: str, page: Page) -> list[Target]:
    namespace, slash, service_port = value.removeprefix(_KUBERNETES).partition("/")
    service, colon, port = service_port.partition(":")
    if not (namespace and slash and service) or (colon and not port):
        raise InputError(f"{value!r} is not a service", "--targets", "Write kubernetes:NAMESPACE/SERVICE[:PORT].")
    from telemetry.collect.kubernetes import discovery  # an optional dependency

    exporters = discovery.service_exporters(namespace, service, int(port) if port.isdigit() else port or None)
    return [parse_target(exporter.url, value, node=exporter.node, page=page) for exporter in exporters]


def _of_file(path: Path, page: Page) -> Iterator[Target]:
    """Read a text file (per line a target and optionally its node) or Prometheus' file_sd in JSON or YAML."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(
            f"the list of targets cannot be read: {reason}", str(path), "Give a file with targets."
        ) from None
    if path.suffix in _YAML_SUFFIXES:
        yield from _of_file_sd(text, path, page)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split("#", 1)[0].split()
        location = f"{path}, line {number}"
        if len(fields) > 2:
            raise InputError(f"{line.strip()!r} is not a target", location, "Give a target, or a target and its node.")
        if fields:
            yield parse_target(fields[0], location, node=fields[1] if len(fields) == 2 else None, page=page)


def _of_file_sd(text: str, path: Path, page: Page) -> Iterator[Target]:
    try:
        groups = _GROUPS.validate_python((json.loads(text) if path.suffix == ".json" else read_yaml(text)) or [])
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(
            f"cannot be parsed: {str(error).splitlines()[0]}",
            str(path),
            "Give a list of groups: [{targets: [host:port], labels: {node: name}}], the format of Prometheus' file_sd.",
        ) from None
    for number, group in enumerate(groups, start=1):
        for address in group.targets:
            yield _of_group(address, group.labels or {}, f"{path}, group {number}", page)


def _of_group(text: str, labels: Mapping[str, Any], location: str, page: Page) -> Target:
    node = next((str(labels[name]) for name in _NODE_LABELS if labels.get(name)), None)
    if "://" not in text:
        path = labels.get("__metrics_path__")
        if path and "/" not in text:
            text = f"{text}/{str(path).lstrip('/')}"
        if labels.get("__scheme__"):
            text = f"{labels['__scheme__']}://{text}"
    place = tuple((name, str(labels[name])) for name in PLACE_LABELS if labels.get(name))
    return parse_target(text, location, node=node, labels=place, page=page)


def parse_target(
    text: str,
    location: str,
    *,
    node: str | None = None,
    labels: tuple[tuple[str, str], ...] = (),
    page: Page = EXPORTER,
) -> Target:
    """Parse a target in the form ``host``, ``host:port``, ``host:port/path`` or a URL.

    Without a scheme, scheme and port default to those of ``page``. Raises ``InputError`` if it is malformed or holds a
    password.

    >>> parse_target("node07", "targets.txt, line 1").url
    'http://node07:9400/metrics'
    """
    written = text = text.strip()
    try:
        if "://" not in text:
            if text.count(":") > 1 and not text.startswith("["):
                text = f"[{ipaddress.IPv6Address(text)}]"
            netloc, slash, path = text.partition("/")
            port = "" if ":" in netloc.rpartition("]")[2] else f":{page.port}"
            text = f"{page.scheme}://{netloc}{port}{slash}{path}"
        parts = urlsplit(text)
        if parts.username or parts.password:
            raise InputError(
                f"the address of {parts.hostname} contains a password", "targets", "Give it in --basic-auth-file."
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or len(text.split()) != 1:
            raise ValueError("no page")
    except ValueError:
        raise InputError(
            f"{written!r} is not the URL of a page", location, "Give host, host:port or http(s)://host:port/path."
        ) from None
    path = parts.path if parts.path not in ("", "/") else page.path
    return Target(urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")), node, labels)
