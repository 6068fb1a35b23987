"""Small API objects, as servers write them."""

from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import TypeAdapter

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
EARLIER = "2026-03-01T11:00:00Z"


T = TypeVar("T")


def saved_and_read(kind: type[T], value: T) -> T:
    """Write a value as a collector's state does, and read it again."""
    codec = TypeAdapter(kind)
    return codec.validate_json(codec.dump_json(value))


def node(
    name: str = "n1",
    *,
    ready: tuple[str, str] = ("True", "2026-03-01T08:00:00Z"),
    cordoned: bool = False,
    taints: list[dict[str, str]] | None = None,
    conditions: list[dict[str, str]] | None = None,
    boot: str = "b1",
    machine: str = "AB-1",
    gpus: int = 8,
    labels: dict[str, str] | None = None,
    managed: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    kubelet = {"type": "Ready", "status": ready[0], "reason": "Kubelet", "lastTransitionTime": ready[1]}
    return {
        "metadata": {"name": name, "labels": labels or {}, "managedFields": managed or []},
        "spec": {**({"unschedulable": True} if cordoned else {}), "taints": taints},
        "status": {
            "capacity": {"cpu": "8", "nvidia.com/gpu": str(gpus)},
            "conditions": [kubelet, *(conditions or [])],
            "nodeInfo": {"bootID": boot, "systemUUID": machine},
        },
    }


def taint(key: str, effect: str = "NoSchedule", *, value: str = "", added: str | None = None) -> dict[str, str]:
    return {"key": key, "effect": effect, "value": value, **({"timeAdded": added} if added else {})}


def condition(kind: str, status: str, since: str = EARLIER, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "R", "message": message, "lastTransitionTime": since}


def pod(
    name: str = "p1",
    *,
    gpus: int = 1,
    node_name: str | None = "n1",
    phase: str = "Running",
    started: str | None = EARLIER,
    owner: tuple[str, str] | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    status: dict[str, Any] | None = None,
    namespace: str = "train",
) -> dict[str, Any]:
    owners = [{"kind": "Job", "name": owner[0], "uid": owner[1], "controller": True}] if owner else None
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "labels": labels,
        "annotations": annotations,
    }
    return {
        "metadata": {**metadata, "ownerReferences": owners},
        "spec": {"nodeName": node_name, "containers": [{"name": "c", "resources": {"limits": limits}}]},
        "status": {"phase": phase, "startTime": started, **(status or {})},
    }


def ended(finished: str, reason: str = "Completed") -> dict[str, Any]:
    return {"containerStatuses": [{"name": "c", "state": {"terminated": {"finishedAt": finished, "reason": reason}}}]}


def event(
    reason: str,
    message: str = "",
    *,
    uid: str = "e1",
    about: tuple[str, str] = ("Node", "n1"),
    count: int = 1,
    first: str | None = EARLIER,
    last: str | None = EARLIER,
    **more: Any,
) -> dict[str, Any]:
    return {
        "metadata": {"name": uid, "uid": uid, "creationTimestamp": EARLIER},
        "involvedObject": {"kind": about[0], "name": about[1]},
        "reason": reason,
        "message": message,
        "count": count,
        "firstTimestamp": first,
        "lastTimestamp": last,
        "source": {"host": "n9"},
        **more,
    }
