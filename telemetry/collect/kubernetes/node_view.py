"""What of a node object matters here, small enough to keep for every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from telemetry.collect.kubernetes.api import Object, timestamp_ms
from telemetry.collect.kubernetes.rules import KubernetesRules

_CORDON: Final = "node.kubernetes.io/unschedulable"
_GPU_LABELS: Final = ("nvidia.com/gpu.present", "nvidia.com/gpu.product", "amd.com/gpu.product-name")
_PLACES: Final = ("cluster", "group", "rack", "nvlink_domain")


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint; ``since_ms`` None: its time is not recorded."""

    key: str
    value: str | None
    effect: str
    since_ms: int | None


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition; ``since_ms`` is its last transition."""

    type: str
    status: str
    reason: str | None
    message: str | None
    since_ms: int | None


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as we know it. Instants are milliseconds since 1970 UTC.

    ``labelled_gpu``: a label says that it has GPUs, also when none works.
    ``cordoned_by``: field manager that set ``spec.unschedulable``.
    ``conditions``: ``Ready`` and those that a rule names.
    ``place``: ``cluster``, ``group``, ``rack``, ``nvlink_domain``, as far as labels tell.
    """

    name: str
    uid: str
    created_ms: int | None = None
    provider_id: str | None = None
    system_uuid: str | None = None
    boot_id: str | None = None
    gpus: int = 0
    labelled_gpu: bool = False
    cordoned: bool = False
    cordoned_ms: int | None = None
    cordoned_by: str | None = None
    taints: tuple[Taint, ...] = ()
    conditions: tuple[Condition, ...] = ()
    place: tuple[tuple[str, str], ...] = ()

    @property
    def has_gpus(self) -> bool:
        """Whether it is a GPU node, by capacity or by label."""
        return self.gpus > 0 or self.labelled_gpu


def own_taint(key: str, rules: KubernetesRules) -> bool:
    """Whether a taint is one that predrain sets."""
    return key.startswith(f"{rules.prefix}/")


def view_of(node: Object, rules: KubernetesRules) -> NodeView:
    """Return what matters of a node object."""
    metadata = node["metadata"]
    spec = node.get("spec") or {}
    status = node.get("status") or {}
    info = status.get("nodeInfo") or {}
    labels = metadata.get("labels") or {}
    all_taints = spec.get("taints") or ()
    cordon = next((each for each in all_taints if each["key"] == _CORDON), None)
    cordoned = bool(spec.get("unschedulable")) or cordon is not None
    by, by_ms = _cordoned_by(metadata.get("managedFields") or ()) if cordoned else (None, None)
    since_ms = timestamp_ms(cordon.get("timeAdded")) if cordon else None
    taints = [
        Taint(each["key"], each.get("value") or None, each.get("effect") or "", timestamp_ms(each.get("timeAdded")))
        for each in all_taints
        if own_taint(each["key"], rules) or rules.for_taint(each["key"]) is not None
    ]
    conditions = [
        Condition(
            each["type"],
            each.get("status") or "Unknown",
            each.get("reason") or None,
            each.get("message") or None,
            timestamp_ms(each.get("lastTransitionTime")),
        )
        for each in status.get("conditions") or ()
        if each["type"] == "Ready" or rules.for_condition(each["type"]) is not None
    ]
    place = [
        (name, value)
        for name in _PLACES
        if (value := next((labels[key] for key in rules.labels.get(name, ()) if labels.get(key)), None))
    ]
    return NodeView(
        name=metadata["name"],
        uid=metadata.get("uid") or "",
        created_ms=timestamp_ms(metadata.get("creationTimestamp")),
        provider_id=spec.get("providerID") or None,
        # Kubelets write upper or lower case, depending on the firmware's age.
        system_uuid=(info.get("systemUUID") or "").lower() or None,
        boot_id=info.get("bootID") or None,
        gpus=_gpus(status.get("capacity") or {}, rules),
        labelled_gpu=any(labels.get(key, "false").lower() != "false" for key in _GPU_LABELS),
        cordoned=cordoned,
        cordoned_ms=since_ms if since_ms is not None else by_ms,
        cordoned_by=by,
        taints=tuple(sorted(taints, key=lambda taint: (taint.key, taint.effect))),
        conditions=tuple(sorted(conditions, key=lambda condition: condition.type)),
        place=tuple(place),
    )


def _gpus(capacity: Mapping[str, Any], rules: KubernetesRules) -> int:
    counted = (text for name, text in capacity.items() if rules.is_gpu(name) or rules.is_slice(name))
    return sum(int(text) for text in counted if str(text).isdigit())


def _cordoned_by(managed: Any) -> tuple[str | None, int | None]:
    for entry in managed:
        fields = entry.get("fieldsV1") or {}
        if "f:unschedulable" in (fields.get("f:spec") or {}):
            return entry.get("manager") or None, timestamp_ms(entry.get("time"))
    return None, None
