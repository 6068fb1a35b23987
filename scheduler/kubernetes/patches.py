"""From a node to what it shall be, as one JSON patch that the server applies to exactly the node that was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.kubernetes.condition import CONDITION
from scheduler.kubernetes.seen_node import SeenNode
from scheduler.ports.node_object import NodeObject, Taint
from telemetry.collect.kubernetes.api import Object

Operation = Mapping[str, Any]


def patch_of(seen: SeenNode, then: NodeObject) -> list[Operation]:
    """Write a patch.

    ``then``: what it shall be; differs in labels, annotations, taints and cordon only.
    Returns: first the tests: of the resourceVersion, so that nobody wrote in between; of the taints and of each
    annotation and label that is changed, so that a server or a proxy that rewrites versions cannot make us write over
    others. Taints have no merge key: the whole list is replaced, with what is not ours in it as it was, fields that we
    do not know included.
    """
    tests: list[Operation] = [_test("/metadata/resourceVersion", seen.reading.version)]
    changes: list[Operation] = []
    for part, there, old, new in (
        ("labels", seen.has_labels, seen.thing.labels, then.labels),
        ("annotations", seen.has_annotations, seen.thing.annotations, then.annotations),
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
    if then.unschedulable != seen.thing.unschedulable:
        if then.unschedulable:
            changes.append({"op": "add", "path": "/spec/unschedulable", "value": True})
        else:
            tests.append(_test("/spec/unschedulable", value=True))
            changes.append({"op": "remove", "path": "/spec/unschedulable"})
    if then.taints != seen.thing.taints:
        taints = _taints(seen, then.taints)
        if seen.taints:
            tests.append(_test("/spec/taints", list(seen.taints)))
            changes.append(
                {"op": "replace", "path": "/spec/taints", "value": taints}
                if taints
                else {"op": "remove", "path": "/spec/taints"}
            )
        else:
            changes.append({"op": "add", "path": "/spec/taints", "value": taints})
    return [*tests, *changes]


def condition_patch(seen: SeenNode, content: Object) -> list[Operation]:
    """Write the operations that change our condition with the very patch that changes what it tells of.

    ``content``: the status patch as :func:`scheduler.kubernetes.condition.condition_after` gives it.
    Returns: to stand after those of :func:`patch_of`, whose test of the version makes sure of the condition's place.
    """
    (wanted,) = content["status"]["conditions"]
    gone = wanted.get("$patch") == "delete"
    if seen.condition_at is None:
        if gone:
            return []
        path = "/status/conditions/-" if seen.has_conditions else "/status/conditions"
        return [{"op": "add", "path": path, "value": wanted if seen.has_conditions else [wanted]}]
    path = f"/status/conditions/{seen.condition_at}"
    change: Operation = {"op": "remove", "path": path}
    if not gone:
        change = {"op": "replace", "path": path, "value": wanted}
    return [_test(f"{path}/type", CONDITION), change]


def _taints(seen: SeenNode, wanted: tuple[Taint, ...]) -> list[Mapping[str, Any]]:
    standing = dict(zip(seen.thing.taints, seen.taints, strict=True))
    return [standing.get(each) or {"key": each.key, "value": each.value, "effect": each.effect} for each in wanted]


def _test(path: str, value: Any) -> Operation:
    return {"op": "test", "path": path, "value": value}


def _escaped(key: str) -> str:
    """Write a key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
