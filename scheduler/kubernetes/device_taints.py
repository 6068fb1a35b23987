"""Device taints (``DeviceTaintRule``) for hard markers, for GPUs that are allocated by resource claims."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foundation.kubernetes.api import Object, Unreachable
from scheduler.kubernetes.api import ApiServer
from scheduler.ports.codec import json_object
from scheduler.ports.errors import SchedulerError
from scheduler.ports.ownership import digest_of
from scheduler.ports.protocols import NodeSignal
from scheduler.ports.readings import Write

GROUP: Final = "/apis/resource.k8s.io"
RULES: Final = "devicetaintrules"
SLICES: Final = "resourceslices"
NEWEST_FIRST: Final = ("v1", "v1beta2", "v1beta1", "v1alpha3")
"""Supported versions of the API group (Kubernetes 1.33 to 1.37)."""

_NAME: Final = "predrain-"
_PAGE: Final = 250
_MAX_NEW: Final = 50
"""Limit on rules created per round."""

_MAX_TRIES: Final = 2
_NOT_FOUND: Final = 404
_EXISTS: Final = 409
_UUIDS: Final = ("uuid", "parentUUID")
"""Attributes of a device that identify its GPU."""


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """A device of a ResourceSlice; ``uuid``: of the GPU, also for a partition of it."""

    driver: str
    pool: str
    name: str
    uuid: str


class DeviceTaints:
    """The device taints of one cluster.

    Only rules with predrain's name prefix and label that no one edited are changed. While a node has a hard marker,
    each device of the GPUs that caused it has one rule with effect ``NoSchedule``; running pods keep their devices.
    """

    def __init__(self, api: ApiServer, prefix: str, drivers: Sequence[str]) -> None:
        self._api = api
        self._label = f"{prefix}/device-taint"
        self._annotation = f"{prefix}/prediction"
        self._key = f"{prefix}/at-risk"
        self._drivers = frozenset(drivers)
        self._offered: tuple[str, str] | None = None
        self._set: dict[str, int] = {}  # number of times each wanted rule was set

    def follow(
        self, signals: Sequence[NodeSignal], blocked: Callable[[], str | None], may_begin: Callable[[], bool]
    ) -> tuple[str, ...]:
        """Reconcile the rules with the markers; return messages about changes and failures.

        ``blocked``: returns why nothing may be written now, or None.
        ``may_begin``: whether new rules may be created, checked right before.
        """
        try:
            versions = self._versions()
            if versions is None:
                return ("the server offers no device taints (resource.k8s.io, DeviceTaintRule): none is set",)
            notes, obsolete, missing = self._compared(signals, *versions)
            for name, rule in obsolete.items():
                notes.append(self._delete(versions[0], name, rule["metadata"], blocked()))
            if missing and may_begin():
                notes += [self._create(versions[0], rule, blocked()) for rule in missing]
            return tuple(notes)
        except (SchedulerError, Unreachable) as error:
            self._offered = None  # the server may have changed
            return (f"device taints were not updated: {error}",)

    def preview(self, signals: Sequence[NodeSignal], *, new: bool) -> tuple[Write, ...]:
        """Return the rules that :meth:`follow` would delete and create."""
        versions = self._versions()
        if versions is None:
            return ()
        _, obsolete, missing = self._compared(signals, *versions)
        writes = [
            Write(f"devicetaintrule {name}", "spec", self._about_of(rule).get("unit") or "predrain's", None)
            for name, rule in obsolete.items()
        ]
        for rule in missing if new else ():
            text = json.dumps(rule["spec"], ensure_ascii=False, sort_keys=True)
            writes.append(Write(f"devicetaintrule {rule['metadata']['name']}", "spec", None, text))
        return tuple(writes)

    def _compared(
        self, signals: Sequence[NodeSignal], rules: str, slices: str
    ) -> tuple[list[str], dict[str, Object], list[Object]]:
        """Return messages, the rules to delete, and the rules to create, limited per round."""
        existing = self._existing(rules)
        notes: list[str] = []
        target_rules: dict[str, Object] = {}
        unclear: set[str] = set()
        for signal in signals:
            if not signal.level.hard:
                continue
            if not signal.units:  # the safety state was lost, but the marker is set
                unclear.add(signal.node)
                continue
            try:
                devices = self._devices(slices, signal.node)
            except SchedulerError as error:
                notes.append(f"the devices of {signal.node} cannot be read: {error}")
                unclear.add(signal.node)
                continue
            target_rules |= {
                name_of(device): self._rule(rules, device, signal) for device in devices if device.uuid in signal.units
            }
        edited = sorted(name for name, rule in existing.items() if self._about_of(rule).get("seal") != _seal(rule))
        notes += [f"device taint {name} was edited since predrain set it: it is left unchanged" for name in edited]
        self._set = {name: times for name, times in self._set.items() if name in target_rules}
        undone = [
            name for name in sorted(target_rules) if name not in existing and self._set.get(name, 0) >= _MAX_TRIES
        ]
        notes += [f"device taint {name} was removed {_MAX_TRIES} times: it is not re-applied" for name in undone]
        stale = sorted(existing.keys() - target_rules.keys() - set(edited))
        obsolete = {name: existing[name] for name in stale if self._about_of(existing[name]).get("node") not in unclear}
        missing = [target_rules[name] for name in sorted(target_rules) if name not in existing and name not in undone]
        return notes, obsolete, missing[:_MAX_NEW]

    def _about_of(self, rule: Object) -> Mapping[str, Any]:
        return json_object((rule["metadata"].get("annotations") or {}).get(self._annotation))

    def _versions(self) -> tuple[str, str] | None:
        """Return the newest served versions of rules and slices; None if device taints are not supported."""
        if self._offered is None:
            offered: dict[str, str] = {}
            for version in NEWEST_FIRST:
                for kind in (self._api.read(f"{GROUP}/{version}") or {}).get("resources") or ():
                    if isinstance(kind, dict):
                        offered.setdefault(str(kind.get("name")), version)
            if RULES in offered and SLICES in offered:
                self._offered = offered[RULES], offered[SLICES]
        return self._offered

    def _existing(self, version: str) -> dict[str, Object]:
        params = {"labelSelector": f"{self._label}=true"}
        rules = self._api.listing(
            f"{GROUP}/{version}/{RULES}", params, _PAGE,
            lambda raw: {"metadata": raw.get("metadata") or {}, "spec": raw.get("spec") or {}},
        )  # fmt: skip
        named = {str(rule["metadata"].get("name")): rule for rule in rules}
        return {name: rule for name, rule in named.items() if name.startswith(_NAME)}

    def _devices(self, version: str, node: str) -> list[SliceDevice]:
        params = {"fieldSelector": f"spec.nodeName={node}"}
        slices = self._api.listing(f"{GROUP}/{version}/{SLICES}", params, _PAGE, lambda raw: raw.get("spec") or {})
        return devices_of(slices, self._drivers)

    def _rule(self, version: str, device: SliceDevice, signal: NodeSignal) -> Object:
        content = {"node": signal.node, "unit": device.uuid, "tier": signal.tier, "reasons": list(signal.reasons[:3])}
        spec = {
            "deviceSelector": {"driver": device.driver, "pool": device.pool, "device": device.name},
            "taint": {"key": self._key, "value": "high", "effect": "NoSchedule"},
        }
        metadata: dict[str, Any] = {"name": name_of(device), "labels": {self._label: "true"}}
        content["seal"] = _seal({"metadata": metadata, "spec": spec})
        metadata["annotations"] = {self._annotation: json.dumps(content, ensure_ascii=False, sort_keys=True)}
        return {
            "apiVersion": f"resource.k8s.io/{version}", "kind": "DeviceTaintRule", "metadata": metadata, "spec": spec,
        }  # fmt: skip

    def _create(self, version: str, rule: Object, reason: str | None) -> str:
        content = self._about_of(rule)
        subject = f"device taint for {content['unit']} on {content['node']}"
        if reason is None:
            response = self._api.request("POST", f"{GROUP}/{version}/{RULES}", body=rule)
            if response.ok or response.status == _EXISTS:
                name = rule["metadata"]["name"]
                self._set[name] = self._set.get(name, 0) + 1
                return f"set: {subject}"
            reason = response.problem
        return f"no {subject}: {reason}"

    def _delete(self, version: str, name: str, metadata: Object, reason: str | None) -> str:
        if reason is None:
            # delete exactly the rule that was read, not a newer one with the same name
            read = {key: metadata.get(key) for key in ("uid", "resourceVersion")}
            options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": read}
            response = self._api.request("DELETE", f"{GROUP}/{version}/{RULES}/{name}", body=options)
            if response.ok or response.status == _NOT_FOUND:
                return f"removed device taint {name}"
            reason = response.problem
        return f"device taint {name} stays: {reason}"


def _seal(rule: Object) -> str:
    """Return the digest of a rule's name, device and taint, without the time that the server adds."""
    spec = rule["spec"]
    taint = {key: value for key, value in (spec.get("taint") or {}).items() if key != "timeAdded"}
    content = {"name": rule["metadata"].get("name"), "device": spec.get("deviceSelector"), "taint": taint}
    return digest_of(json.dumps(content, sort_keys=True))


def name_of(device: SliceDevice) -> str:
    """Return the name of a device's rule; it includes the GPU, so that a replacement gets its own rule."""
    text = "|".join((device.driver, device.pool, device.name, device.uuid))
    return f"{_NAME}{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def devices_of(slices: Sequence[Object], drivers: frozenset[str]) -> list[SliceDevice]:
    """Return the devices of a node's ResourceSlices of any version; only the newest generation of a pool counts."""
    newest: dict[tuple[str, str], int] = {}
    pools = []
    for spec in slices:
        driver, pool = spec.get("driver"), spec.get("pool") or {}
        if driver not in drivers or not isinstance(pool.get("name"), str):
            continue
        place, generation = (str(driver), str(pool["name"])), int(pool.get("generation") or 0)
        newest[place] = max(generation, newest.get(place, generation))
        pools.append((place, generation, spec.get("devices") or ()))
    current = [
        (place, device) for place, generation, devices in pools if generation == newest[place] for device in devices
    ]
    uuids = [(place, device.get("name"), _uuid(device)) for place, device in current]
    return [
        SliceDevice(*place, name, uuid) for place, name, uuid in uuids if uuid is not None and isinstance(name, str)
    ]


def _uuid(device: Mapping[str, Any]) -> str | None:
    # v1beta1 nests the attributes under `basic`
    attributes = device.get("attributes") or (device.get("basic") or {}).get("attributes") or {}
    values = {
        str(key).rpartition("/")[2]: value.get("string") for key, value in attributes.items() if isinstance(value, dict)
    }
    uuids = [values[name] for name in _UUIDS if isinstance(values.get(name), str) and values[name]]
    return uuids[-1] if uuids else None
