"""Reads a node object into what the policy sees, and writes the JSON patch that the server checks against it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from policy.fleet import JobView, Level, NodeView, UnitView
from scheduler.kubernetes.condition import CONDITION, CurrentCondition
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.node_object import FOREIGN_OWNER_TAINTS, Keys, NodeObject, Taint, view_of
from scheduler.ports.readings import NodeReading
from telemetry.collect.kubernetes.api import Object
from telemetry.collect.kubernetes.nodes import NodeView as Collected
from telemetry.collect.kubernetes.nodes import view_of as collected
from telemetry.collect.kubernetes.rules import KubernetesRules

_UUID: Final = re.compile(r"GPU-[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_DRIVERS: Final = (
    ("nvidia.com/cuda.driver-version.full",),
    ("nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev"),
    ("amd.com/gpu.driver-version",),
)

Operation = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node of one reading.

    ``taints``: with fields that we do not know: what is not ours is sent back as it was.
    ``has_labels``, ``has_annotations``: a patch cannot add to a map that is not there.
    ``condition_at``: its place among the node's conditions.
    """

    reading: NodeReading
    node_object: NodeObject
    taints: tuple[Mapping[str, Any], ...]
    has_labels: bool
    has_annotations: bool
    condition: CurrentCondition | None
    gpus: bool
    condition_at: int | None = None
    has_conditions: bool = False

    @property
    def concerns_us(self) -> bool:
        """Whether it has GPUs, or carries anything managed by predrain."""
        return self.gpus or self.reading.view.marks.level > Level.NONE or self.condition is not None

    def with_jobs(self, jobs: tuple[JobView, ...]) -> NodeReading:
        """Return the reading with the jobs that run there."""
        return replace(self.reading, view=replace(self.reading.view, jobs=jobs))


def snapshot_of(
    raw: Object, settings: KubernetesSettings, rules: KubernetesRules, keys: Keys, now: datetime
) -> NodeSnapshot | None:
    """Read a node object; None: it has no name. One that cannot be parsed is not readable: nothing is done on it."""
    metadata = raw.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        return None
    try:
        return _parsed(raw, settings, rules, keys, now)
    except (KeyError, TypeError, AttributeError, ValueError):
        assert isinstance(metadata, dict)
        view = NodeView(name, settings.cluster, settings.group, readable=False)
        reading = NodeReading(view, str(metadata.get("resourceVersion") or ""))
        return NodeSnapshot(reading, NodeObject(name), (), False, False, None, gpus=True)


def _parsed(
    raw: Object, settings: KubernetesSettings, rules: KubernetesRules, keys: Keys, now: datetime
) -> NodeSnapshot:
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    labels, annotations = dict(metadata.get("labels") or {}), dict(metadata.get("annotations") or {})
    taints = tuple(spec.get("taints") or ())
    found = collected(raw, rules)
    node_object = NodeObject(
        metadata["name"],
        labels,
        annotations,
        tuple(Taint(each["key"], each.get("value") or "", each["effect"]) for each in taints),
        bool(spec.get("unschedulable")),
        found.cordoned_by,
        bool(metadata.get("managedFields")),
    )
    place = dict(found.place)
    base = NodeView(
        node_object.name,
        place.get("cluster", settings.cluster),
        place.get("group", settings.group),
        place.get("rack"),
        place.get("nvlink_domain"),
        tuple(UnitView(unit) for unit in _units(annotations, settings)),
        cordoned_by=_cordoned_by(found, node_object, rules, keys),
        down=bool(metadata.get("deletionTimestamp")) or not found.ready,  # one that never reported is not ready either
        software=_software(labels),
        since=None if found.created_ms is None else datetime.fromtimestamp(found.created_ms / 1000, UTC),
    )
    view = view_of(node_object, base, keys, now)
    conditions = (raw.get("status") or {}).get("conditions") or ()
    at = next((at for at, each in enumerate(conditions) if each.get("type") == CONDITION), None)
    return NodeSnapshot(
        NodeReading(view, metadata["resourceVersion"], found.boot_id),
        node_object,
        taints,
        bool(labels),
        bool(annotations),
        None if at is None else CurrentCondition.of(conditions[at]),
        found.has_gpus,
        at,
        bool(conditions),
    )


def _cordoned_by(found: Collected, node_object: NodeObject, rules: KubernetesRules, keys: Keys) -> str | None:
    if found.cordoned and not keys.cordoned(node_object):
        return f"{found.cordoned_by or 'somebody'} (it is unschedulable)"
    for taint in node_object.taints:
        if keys.owns(taint) or taint.effect == "PreferNoSchedule" or taint.key in FOREIGN_OWNER_TAINTS:
            continue
        rule = rules.for_taint(taint.key)
        if rule is not None and rule.type == "drain":
            return f"the taint {taint.key}:{taint.effect}"
    return None


def _software(labels: Mapping[str, str]) -> str | None:
    for keys in _DRIVERS:
        parts = [labels[key] for key in keys if labels.get(key)]
        if parts:
            return "driver " + ".".join(parts)
    return None


def _units(annotations: Mapping[str, str], settings: KubernetesSettings) -> tuple[str, ...]:
    own = annotations.get(f"{settings.prefix}/gpus")
    if own is not None:
        return tuple(dict.fromkeys(_NAME.findall(own)))
    named = (uuid for key in settings.gpu_annotations for uuid in _UUID.findall(annotations.get(key, "")))
    return tuple(dict.fromkeys(named))


def patch_of(snapshot: NodeSnapshot, then: NodeObject) -> list[Operation]:
    """Write the patch to ``then``, which differs in labels, annotations, taints and cordon only.

    First the tests: of the resourceVersion, and of the taints and each annotation and label that is changed, so that a
    server or a proxy that rewrites versions cannot make us write over others. Taints have no merge key: the whole list
    is replaced, with what is not ours in it as it was.
    """
    tests: list[Operation] = [_test("/metadata/resourceVersion", snapshot.reading.version)]
    changes: list[Operation] = []
    for part, there, old, new in (
        ("labels", snapshot.has_labels, snapshot.node_object.labels, then.labels),
        ("annotations", snapshot.has_annotations, snapshot.node_object.annotations, then.annotations),
    ):
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        if changed and not there:
            changes.append({"op": "add", "path": f"/metadata/{part}", "value": {}})
        for key in changed:
            path = f"/metadata/{part}/{_escaped(key)}"
            if key in old:
                tests.append(_test(path, old[key]))
            if key in new:
                changes.append({"op": "replace" if key in old else "add", "path": path, "value": new[key]})
            else:
                changes.append({"op": "remove", "path": path})
    if then.unschedulable != snapshot.node_object.unschedulable:
        if then.unschedulable:
            changes.append({"op": "add", "path": "/spec/unschedulable", "value": True})
        else:
            tests.append(_test("/spec/unschedulable", value=True))
            changes.append({"op": "remove", "path": "/spec/unschedulable"})
    if then.taints != snapshot.node_object.taints:
        standing = dict(zip(snapshot.node_object.taints, snapshot.taints, strict=True))
        taints = [standing.get(taint) or asdict(taint) for taint in then.taints]
        change: Operation = {"op": "add", "path": "/spec/taints", "value": taints}
        if snapshot.taints:
            tests.append(_test("/spec/taints", list(snapshot.taints)))
            change = {**change, "op": "replace"} if taints else {"op": "remove", "path": "/spec/taints"}
        changes.append(change)
    return [*tests, *changes]


def condition_patch(snapshot: NodeSnapshot, content: Object) -> list[Operation]:
    """Return the operations that change the predrain condition in the same patch as the marks.

    They follow those of :func:`patch_of`, whose test of the version makes sure of the condition's place.
    """
    (wanted,) = content["status"]["conditions"]
    gone = wanted.get("$patch") == "delete"
    if snapshot.condition_at is None:
        if gone:
            return []
        path = "/status/conditions/-" if snapshot.has_conditions else "/status/conditions"
        return [{"op": "add", "path": path, "value": wanted if snapshot.has_conditions else [wanted]}]
    path = f"/status/conditions/{snapshot.condition_at}"
    change: Operation = {"op": "remove", "path": path}
    if not gone:
        change = {"op": "replace", "path": path, "value": wanted}
    return [_test(f"{path}/type", CONDITION), change]


def _test(path: str, value: Any) -> Operation:
    return {"op": "test", "path": path, "value": value}


def _escaped(key: str) -> str:
    """Write a key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
