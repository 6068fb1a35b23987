"""Where targets come from: addresses, a file that may change, a Kubernetes service."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from telemetry.collect.exporters.targets import PLACE_LABELS, Target, parse_target
from telemetry.errors import InputError
from telemetry.yaml_text import read_yaml

_FILE_SUFFIXES: Final = (".txt", ".list", ".json", ".yaml", ".yml")
_KUBERNETES: Final = "kubernetes:"
_NODE_LABELS: Final = ("node", "nodename", "hostname", "Hostname", "__meta_kubernetes_pod_node_name")

FindService = Callable[[str, str, Any], list[Target]]


class TargetLists:
    """The targets of all ``--targets`` values, each a file, a Kubernetes service, or addresses with commas between.

    Raises ``InputError`` if nothing is given, or a value cannot be understood.
    """

    def __init__(self, values: Sequence[str], *, find_service: FindService | None = None) -> None:
        self._sources: list[Callable[[], list[Target]]] = []
        addresses: list[Target] = []
        for value in values:
            if value.startswith(_KUBERNETES):
                self._sources.append(_service(value, find_service))
            elif Path(value).is_file() or (value.endswith(_FILE_SUFFIXES) and "://" not in value):
                self._sources.append(lambda path=Path(value): _read_file(path))  # type: ignore[misc]
            else:
                addresses += [parse_target(part, "--targets") for part in value.split(",") if part.strip()]
        if addresses:
            self._sources.insert(0, lambda: addresses)
        if not self._sources:
            raise InputError(
                "no target is given", "--targets", "Give a file, kubernetes:NAMESPACE/SERVICE, or host:port."
            )

    def read(self) -> list[Target]:
        """Return the targets of now, each address once; raises ``InputError`` if a value cannot be read."""
        by_url: dict[str, Target] = {}
        for source in self._sources:
            for target in source():
                by_url.setdefault(target.url, target)
        return list(by_url.values())


def _service(value: str, find: FindService | None) -> Callable[[], list[Target]]:
    namespace, slash, rest = value.removeprefix(_KUBERNETES).partition("/")
    service, colon, port = rest.partition(":")
    if not (namespace and slash and service) or (colon and not port):
        raise InputError(f"{value!r} names no service", "--targets", "Write kubernetes:NAMESPACE/SERVICE[:PORT].")
    if find is None:
        from telemetry.collect.kubernetes.discovery import service_targets  # noqa: PLC0415  # an optional dependency

        find = service_targets
    return lambda: find(namespace, service, int(port) if port.isdigit() else port or None)


def _read_file(path: Path) -> list[Target]:
    """Read text (a target a line, then its node if it is known), or Prometheus' file_sd as JSON or YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(
            f"the list of targets cannot be read: {reason}", str(path), "Give a file with targets."
        ) from None
    if path.suffix in (".json", ".yaml", ".yml"):
        return _file_sd(text, path)
    targets = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split("#", 1)[0].split()
        where = f"{path}, line {number}"
        if len(fields) > 2:
            raise InputError(f"{line.strip()!r} is no target", where, "Write a target and its node, or a target.")
        if fields:
            targets.append(parse_target(fields[0], where, node=fields[1] if len(fields) == 2 else None))
    return targets


def _file_sd(text: str, path: Path) -> list[Target]:
    do = "Write a list of groups: [{targets: [host:port], labels: {node: name}}], as Prometheus' file_sd has it."
    try:
        groups = (json.loads(text) if path.suffix == ".json" else read_yaml(text)) or []
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"cannot be parsed: {str(error).splitlines()[0]}", str(path), do) from None
    if not isinstance(groups, list):
        raise InputError("the file holds no list", str(path), do)
    targets = []
    for number, group in enumerate(groups, start=1):
        where = f"{path}, group {number}"
        labels = group.get("labels") or {} if isinstance(group, dict) else None
        if not isinstance(labels, dict) or not isinstance(group.get("targets"), list):
            raise InputError("the group has no list of targets", where, do)
        targets += [_of_group(str(address), labels, where) for address in group["targets"]]
    return targets


def _of_group(text: str, labels: Mapping[str, Any], where: str) -> Target:
    node = next((str(labels[name]) for name in _NODE_LABELS if labels.get(name)), None)
    if "://" not in text:
        path = labels.get("__metrics_path__")
        if path and "/" not in text:
            text = f"{text}/{str(path).lstrip('/')}"
        if labels.get("__scheme__"):
            text = f"{labels['__scheme__']}://{text}"
    place = tuple((name, str(labels[name])) for name in PLACE_LABELS if labels.get(name))
    return parse_target(text, where, node=node, labels=place)
