"""Where targets come from: a list, a file that is read again when it changes, a Kubernetes service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from telemetry.collect.exporters.targets import Target, parse_target
from telemetry.errors import InputError
from telemetry.yaml_text import read_yaml

_log = logging.getLogger(__name__)
_FILE_SUFFIXES: Final = (".txt", ".list", ".json", ".yaml", ".yml")
_KUBERNETES: Final = "kubernetes:"
_NODE_LABELS: Final = ("node", "nodename", "hostname", "Hostname", "__meta_kubernetes_pod_node_name")
_STATIC_LABELS: Final = ("cluster", "group", "rack", "nvlink_domain")
MAX_TARGETS: Final = 100_000
"""Targets of one collector: more is a mistake."""


class TargetList(Protocol):
    """A place that names targets."""

    def read(self) -> list[Target] | None:
        """Return the targets, or None if they are those of the last call; may wait for a server or a disk.

        Raises ``InputError`` if they cannot be told now.
        """
        ...


class FixedTargets:
    """Targets given one by one."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets: list[Target] | None = list(targets)

    def read(self) -> list[Target] | None:
        """Return the targets the first time, None later."""
        targets, self._targets = self._targets, None
        return targets


class TargetFile:
    """Targets of a file: text (a target a line, then its node if it is known), or Prometheus' file_sd, JSON or YAML."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None

    def read(self) -> list[Target] | None:
        """Return the file's targets, or None if it has not changed."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == self._stamp:
                return None
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"the list of targets cannot be read: {error.strerror}", str(self._path), "Give a file with targets."
            ) from None
        except UnicodeDecodeError:
            raise InputError("the list of targets is no text", str(self._path), "Give a file with targets.") from None
        targets = self._structured(text) if self._path.suffix in (".json", ".yaml", ".yml") else self._plain(text)
        self._stamp = stamp
        return targets

    def _plain(self, text: str) -> list[Target]:
        targets = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split("#", 1)[0].split()
            where = f"{self._path}, line {number}"
            if len(words) > 2:
                raise InputError(f"{line.strip()!r} is no target", where, "Write a target and its node, or a target.")
            if words:
                targets.append(parse_target(words[0], where, node=words[1] if len(words) == 2 else None))
        return targets

    def _structured(self, text: str) -> list[Target]:
        import json  # noqa: PLC0415  # both parsers are needed for one kind of source only

        import yaml  # noqa: PLC0415  # as above

        do = "Write a list of groups: [{targets: [host:port], labels: {node: name}}], as Prometheus' file_sd has it."
        try:
            content = json.loads(text) if self._path.suffix == ".json" else read_yaml(text)
        except (ValueError, yaml.YAMLError) as error:
            raise InputError(f"cannot be parsed: {str(error).splitlines()[0]}", str(self._path), do) from None
        groups = [] if content is None else content
        if not isinstance(groups, list):
            raise InputError("the file holds no list", str(self._path), do)
        targets = []
        for number, group in enumerate(groups, start=1):
            where = f"{self._path}, group {number}"
            labels = group.get("labels") or {} if isinstance(group, dict) else None
            if not isinstance(labels, dict) or not isinstance(group.get("targets"), list):
                raise InputError("the group has no list of targets", where, do)
            targets += [_of_group(str(each), labels, where) for each in group["targets"]]
        return targets


def _of_group(text: str, labels: Mapping[str, Any], where: str) -> Target:
    node = next((str(labels[name]) for name in _NODE_LABELS if labels.get(name)), None)
    if "://" not in text:
        path = labels.get("__metrics_path__")
        if path and "/" not in text:
            text = f"{text}/{str(path).lstrip('/')}"
        if labels.get("__scheme__"):
            text = f"{labels['__scheme__']}://{text}"
    plain = parse_target(text, where, node=node)
    return Target(plain.url, node, tuple((name, str(labels[name])) for name in _STATIC_LABELS if labels.get(name)))


class KubernetesTargets:
    """The endpoints of a Kubernetes service, asked again at each read.

    ``port``: name or number of the port; None is the service's only one.
    """

    def __init__(
        self, namespace: str, service: str, port: str | None, find: Callable[[str, str, Any], list[Target]]
    ) -> None:
        self._namespace = namespace
        self._service = service
        self._port = int(port) if port is not None and port.isdigit() else port
        self._find = find
        self._last: list[Target] | None = None

    def read(self) -> list[Target] | None:
        """Return the endpoints, or None if they are the same as before."""
        found = self._find(self._namespace, self._service, self._port)
        if found == self._last:
            return None
        self._last = found
        return found


class AllTargets:
    """The targets of several lists as one; a list that cannot be read keeps the targets that it had."""

    def __init__(self, lists: Sequence[TargetList]) -> None:
        self._lists = list(lists)
        self._held: list[list[Target] | None] = [None] * len(self._lists)
        self._failing: set[int] = set()

    def read(self) -> list[Target] | None:
        """Return all targets, each address once, or None if nothing changed.

        Raises ``InputError`` if a list cannot be read and never could.
        """
        changed = False
        for number, each in enumerate(self._lists):
            try:
                targets = each.read()
            except InputError as error:
                if self._held[number] is None:
                    raise
                if number not in self._failing:
                    _log.error("targets stay as they were: %s", error)
                self._failing.add(number)
                continue
            if number in self._failing:
                _log.warning("targets can be read again")
                self._failing.discard(number)
            if targets is not None:
                self._held[number] = targets
                changed = True
        if not changed:
            return None
        by_url = {target.url: target for held in reversed(self._held) for target in held or ()}
        if len(by_url) > MAX_TARGETS:
            raise InputError(f"{len(by_url)} targets are named", "targets", f"Name at most {MAX_TARGETS}.")
        return list(by_url.values())


def read_target_options(
    values: Sequence[str], *, find_service: Callable[[str, str, Any], list[Target]] | None = None
) -> AllTargets:
    """Read what ``--targets`` was given.

    ``values``: each a file, ``kubernetes:NAMESPACE/SERVICE[:PORT]``, or addresses with commas between them.
    ``find_service``: finds the endpoints of a Kubernetes service. Default:
    :mod:`telemetry.collect.kubernetes.discovery`.
    Raises ``InputError`` if nothing is given, or a value cannot be understood.
    """
    lists: list[TargetList] = []
    addresses: list[Target] = []
    for value in values:
        if value.startswith(_KUBERNETES):
            lists.append(_service(value, find_service))
        elif Path(value).is_file() or (value.endswith(_FILE_SUFFIXES) and "://" not in value):
            lists.append(TargetFile(Path(value)))
        else:
            addresses += [parse_target(each, "--targets") for each in value.split(",") if each.strip()]
    if addresses:
        lists.insert(0, FixedTargets(addresses))
    if not lists:
        raise InputError("no target is given", "--targets", "Give a file, kubernetes:NAMESPACE/SERVICE, or host:port.")
    return AllTargets(lists)


def _service(value: str, find: Callable[[str, str, Any], list[Target]] | None) -> KubernetesTargets:
    namespace, slash, rest = value.removeprefix(_KUBERNETES).partition("/")
    service, colon, port = rest.partition(":")
    if not (namespace and slash and service) or (colon and not port):
        raise InputError(f"{value!r} names no service", "--targets", "Write kubernetes:NAMESPACE/SERVICE[:PORT].")
    if find is None:
        from telemetry.collect.kubernetes.discovery import service_targets  # noqa: PLC0415  # an optional dependency

        find = service_targets
    return KubernetesTargets(namespace, service, port or None, find)
