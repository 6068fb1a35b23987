"""Converts node objects to the policy's view, and builds patches with optimistic locking."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from foundation.instants import from_ms
from foundation.kubernetes.api import Object
from policy.fleet import JobView, Level, NodeView, UnitView
from scheduler.kubernetes.condition import CONDITION
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.node_object import WRITER, Keys, NodeObject, Taint, own_marks, view_of
from scheduler.ports.readings import NodeReading
from telemetry.collect.kubernetes.nodes import ObservedKubernetesNode as Collected
from telemetry.collect.kubernetes.nodes import view_of as collected_view
from telemetry.collect.kubernetes.rules import KubernetesRules

_UUID: Final = re.compile(r"GPU-[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_DRIVERS: Final = (
    ("nvidia.com/cuda.driver-version.full",),
    ("nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev"),
    ("amd.com/gpu.driver-version",),
)
_STARTS_FOR: Final = timedelta(minutes=15)  # a new node that is not ready counts as starting


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node as read.

    ``taints``: with all fields, so that foreign taints are written back unchanged.
    ``condition``: predrain's condition, as returned by the server.
    """

    reading: NodeReading
    node_object: NodeObject
    taints: tuple[Mapping[str, Any], ...]
    condition: Object | None
    gpus: bool

    @property
    def marked(self) -> bool:
        """Whether it has anything managed by predrain."""
        view = self.reading.view
        return view.marks.level > Level.NONE or view.notice is not None or self.condition is not None

    def outside(self) -> "NodeSnapshot":
        """Return the snapshot of a node that no longer matches the selector: predrain's markers are removed from it."""
        view = replace(self.reading.view, opt_out=self.reading.view.opt_out or "it is not in kubernetes.selector")
        return replace(self, reading=replace(self.reading, view=view))

    def with_jobs(self, jobs: tuple[JobView, ...] | None) -> NodeReading:
        """Return the reading with the node's jobs; None if they could not be read."""
        if jobs is None:
            return replace(self.reading, jobs_known=False)
        return replace(self.reading, view=replace(self.reading.view, jobs=jobs))


def snapshot_of(
    raw: Object, settings: KubernetesSettings, rules: KubernetesRules, keys: Keys, now: datetime
) -> NodeSnapshot | None:
    """Parse a node object; None if it has no name. An unparsable node is marked unreadable, and never changed."""
    metadata = raw.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        return None
    try:
        return _parsed(raw, settings, rules, keys, now)
    except Exception:  # one malformed node must not block the release of others
        assert isinstance(metadata, dict)
        view = NodeView(name, settings.cluster, settings.group, readable=False)
        reading = NodeReading(view, str(metadata.get("resourceVersion") or ""))
        return NodeSnapshot(reading, NodeObject(name), (), None, gpus=True)


def _parsed(
    raw: Object, settings: KubernetesSettings, rules: KubernetesRules, keys: Keys, now: datetime
) -> NodeSnapshot:
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    labels, annotations = dict(metadata.get("labels") or {}), dict(metadata.get("annotations") or {})
    taints = tuple(spec.get("taints") or ())
    collected = collected_view(raw, rules)
    parsed_taints = tuple(_taint(taint, keys) for taint in taints)
    conditions = (raw.get("status") or {}).get("conditions") or ()
    node_object = NodeObject(
        metadata["name"], labels, annotations, parsed_taints, bool(spec.get("unschedulable")),
        _cordoner(metadata.get("managedFields") or (), collected.cordoned_by), bool(metadata.get("managedFields")),
        {condition["type"]: str(condition.get("status")) for condition in conditions},
    )  # fmt: skip
    place, created = dict(collected.place), None if collected.created_ms is None else from_ms(collected.created_ms)
    starting = not collected.ready and created is not None and now - created < _STARTS_FOR
    base = NodeView(
        node_object.name, place.get("cluster", settings.cluster), place.get("group", settings.group),
        place.get("rack"), place.get("nvlink_domain"), tuple(map(UnitView, _units(annotations, settings))),
        cordoned_by=_cordoned_by(collected, node_object, keys),
        down=not collected.ready,  # includes nodes that never reported
        resting="its removal" if metadata.get("deletionTimestamp") else "its start" if starting else None,
        owner="the client that deletes it" if metadata.get("deletionTimestamp") else None,
        software=_software(labels),
        since=created,
    )  # fmt: skip
    view = view_of(node_object, base, keys, now)
    prediction = next((condition for condition in conditions if condition.get("type") == CONDITION), None)
    if not metadata["resourceVersion"]:
        raise ValueError("a patch without a resourceVersion has no optimistic locking")
    reading = NodeReading(view, metadata["resourceVersion"], collected.boot_id)
    return NodeSnapshot(reading, node_object, taints, prediction, collected.has_gpus)


def _taint(raw: Object, keys: Keys) -> Taint:
    """Parse a taint; a time under predrain's key becomes part of the value, because predrain never writes one."""
    value, added = str(raw.get("value") or ""), raw.get("timeAdded")
    return Taint(raw["key"], f"{value} since {added}" if added and raw["key"] == keys.taint else value, raw["effect"])


def _cordoner(managed: Sequence[Object], first: str | None) -> str | None:
    """Return who cordoned a node; if several clients own the field, one other than predrain: the cordon is shared."""
    writers = [
        str(entry.get("manager"))
        for entry in managed
        if "f:unschedulable" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    return next((writer for writer in writers if writer != WRITER), first)


def _cordoned_by(collected: Collected, node_object: NodeObject, keys: Keys) -> str | None:
    if not collected.cordoned or own_marks(node_object, keys).cordon:
        return None
    return f"{node_object.cordoner or 'an operator or another tool'} (it is unschedulable)"


def _software(labels: Mapping[str, str]) -> str | None:
    for keys in _DRIVERS:
        parts = [labels[key] for key in keys if labels.get(key)]
        if parts:
            return "driver " + ".".join(parts)
    return None


def _units(annotations: Mapping[str, str], settings: KubernetesSettings) -> tuple[str, ...]:
    gpus = annotations.get(f"{settings.prefix}/gpus")
    if gpus is not None:
        return tuple(dict.fromkeys(_NAME.findall(gpus)))
    named = (uuid for key in settings.gpu_annotations for uuid in _UUID.findall(annotations.get(key, "")))
    return tuple(dict.fromkeys(named))


def patch_of(snapshot: NodeSnapshot, target: NodeObject, condition: Object | None = None) -> dict[str, Any]:
    """Return the strategic merge patch from a node as read to ``target``, with an optional new condition.

    The server rejects it (409) if the ``resourceVersion`` differs. Taints have no merge key, so the whole list is
    replaced, with foreign taints unchanged.
    """
    current = snapshot.node_object
    metadata: dict[str, Any] = {"resourceVersion": snapshot.reading.version}
    for part in ("labels", "annotations"):
        old, new = getattr(current, part), getattr(target, part)
        changed = {key: new.get(key) for key in {**old, **new} if old.get(key) != new.get(key)}
        if changed:
            metadata[part] = changed
    spec: dict[str, Any] = {}
    if target.unschedulable != current.unschedulable:
        spec["unschedulable"] = target.unschedulable or None
    if target.taints != current.taints:
        unchanged = dict(zip(current.taints, snapshot.taints, strict=True))
        spec["taints"] = [unchanged.get(taint) or asdict(taint) for taint in target.taints] or None
    patch = {"metadata": metadata, **({"spec": spec} if spec else {})}
    return patch if condition is None else patch | status_patch(condition)


def status_patch(condition: Object) -> dict[str, Any]:
    """Return the patch that merges a condition by type into a node's status."""
    return {"status": {"conditions": [condition]}}
