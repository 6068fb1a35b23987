"""Choice of the label that has the node's name in a source's series, based on evidence.

Exporters and scrape configurations differ: the exporter's ``Hostname`` is the node with host networking and the pod
otherwise, ``instance`` is an address, and ``node`` exists only if relabeling adds it. A label is rejected if its values
are pods, containers, services or localhost, if several GPUs at the same PCI address share a value, or if its values
change while the GPUs stay. The first remaining label in order of preference is used, addresses last.

A choice holds until evidence rejects the label, so that a restart or a rollout does not rename nodes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Final, Literal

from telemetry.identity.nodes import are_one_node, is_address

_OF_NODES: Final = (
    *("node", "kubernetes_node", "k8s_node", "k8s_node_name", "kube_node", "kubernetes_node_name", "node_name"),
    *("kubernetes_io_hostname", "label_kubernetes_io_hostname"),
    *("nodename", "nodeName", "NodeName"),
)
"""Labels with the scheduler's node name, which drains need."""

NODE_LABELS: Final = (
    *_OF_NODES,
    *("hostname", "Hostname", "HostName", "host_name", "agent_hostname", "fqdn", "vm_name", "host", "machine"),
    *("server", "server_name", "instance_name", "oci_name", "instance"),
)
"""Labels that may have the node's name, in order of preference."""

ValueKind = Literal["name", "pod", "like a pod", "container", "service", "address"]

_REASONS: Final[Mapping[ValueKind, str]] = {
    "pod": "values are pods",
    "container": "values are container ids",
    "service": "values are services or the local host",
}
_NO_VALUE: Final = frozenset(
    {"", "-", "0x", "n/a", "[n/a]", "na", "none", "null", "unknown", "<unknown>", "not supported"}
)

_POD_LABELS: Final = ("pod", "pod_name", "kubernetes_pod_name", "k8s_pod_name", "exported_pod", "exporter_pod")
_SERVICE_LABELS: Final = ("service", "container", "endpoint", "namespace", "kubernetes_namespace", "app")
_EXPORTER: Final = re.compile(
    r"exporter|dcgm|device-plugin|gpu-operator|daemonset|otel-col|opentelemetry|grafana-agent|alloy|telegraf"
)
_POD: Final = re.compile(r".+-(?:[a-z0-9]{5}|\d{1,4})")
_RANDOM_SUFFIX: Final = re.compile(r".+-(?=[^-]*[a-z])(?=[^-]*[0-9])[bcdfghjklmnpqrstvwxz2456789]{5}")
# Kubernetes generates pod name suffixes from these characters; so do Cluster API and OpenShift for machines.
_CONTAINER: Final = re.compile(r"(?=.*[a-f])(?=.*[0-9])(?:[0-9a-f]{12}|[0-9a-f]{64})")
_LOCAL: Final = re.compile(r"localhost.*|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0|::|host\.docker\.internal|.*\.svc(?:\..*)?")
_PORT: Final = re.compile(
    r"(?:https?://)?(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:/]+)):(?:\d{1,5}|[a-z][a-z0-9-]{0,14})(?:/.*)?"
)
"""An address, and its port by number or, as in Google Managed Prometheus, by name."""
_MAX_DEVICES: Final = 200_000
_COVERAGE, _COLLIDING = 0.9, 0.25
_CROWD: Final = 4  # more GPUs at one address than replacements explain
_EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class NodeLabelChoice:
    """The label with the node's name, and why it was chosen.

    ``label``: None if no label is usable. ``values``: number of its distinct values. ``rejected``: reason by label.
    ``doubt``: why the choice is uncertain, or empty.
    """

    label: str | None
    values: int
    examples: tuple[str, ...]
    rejected: Mapping[str, str]
    doubt: str = ""

    def __str__(self) -> str:
        chosen = "no label"
        if self.label is not None:
            chosen = f"label `{self.label}` ({self.values:,} value{'s' * (self.values != 1)}"
            chosen += f", such as {self.examples[0]})" if self.examples else ")"
        reasons = [f"not `{label}`: {reason}" for label, reason in self.rejected.items()]
        return "; ".join([chosen, *([self.doubt] if self.doubt else []), *reasons])


@dataclass(slots=True)
class _Evidence:
    """Evidence about one label.

    ``collisions``: GPUs at an address where another GPU has the same value. ``crowd``: highest number of GPUs at one
    address. ``changes``: values of a GPU after its first.
    """

    kinds: dict[str, ValueKind] = field(default_factory=dict)
    of_device: dict[str, set[str]] = field(default_factory=dict)
    at_place: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    counts: Counter[ValueKind] = field(default_factory=Counter)
    collisions: int = 0
    changes: int = 0
    crowd: int = 0

    def is_open(self, value: str) -> bool:
        """Whether another series may still determine the kind of a value."""
        return self.kinds.get(value) in (None, "like a pod")

    def settle(self, value: str, kind: ValueKind) -> None:
        known = self.kinds.get(value)
        if known is not None:
            self.counts[known] -= 1
        self.kinds[value] = kind
        self.counts[kind] += 1

    def add(self, value: str, device: str | None, place: str | None) -> None:
        if device is None or len(self.of_device) >= _MAX_DEVICES:
            return
        values = self.of_device.setdefault(device, set())
        self.changes += bool(values) and value not in values
        values.add(value)
        if place is not None:
            devices = self.at_place[value, place]
            self.collisions += bool(devices) and device not in devices
            devices.add(device)
            self.crowd = max(self.crowd, len(devices))

    def share(self, *kinds: ValueKind) -> float:
        return sum(self.counts[kind] for kind in kinds) / max(len(self.kinds), 1)


class NodeLabels:
    """Chooses the label with the node's name; call :meth:`observe` for a batch of series, then :meth:`node_of`.

    ``given``: label names from the operator, used in this order without evidence.
    ``trusted``, ``fallback``: label names tried before and after the others.
    ``default``: node of series without a node label.
    """

    def __init__(
        self,
        given: Sequence[str] | None = None,
        *,
        trusted: Sequence[str] = (),
        fallback: Sequence[str] = (),
        default: str | None = None,
    ) -> None:
        names = NODE_LABELS if given is None else given
        self.names = tuple(label for name in names for label in (f"exported_{name}", name))
        self.is_given = given is not None
        self._trusted, self._fallback, self._default = tuple(trusted), tuple(fallback), default
        self._preferred: str | None = None
        self._evidence: dict[str, _Evidence] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._order: tuple[str, ...] = ()
        self._is_decided = False
        self._rejected: dict[str, str] = {}
        self._revision = 0

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all labels that are read."""
        return (*self._trusted, *self.names, *self._fallback, *_POD_LABELS, *_SERVICE_LABELS)

    @property
    def has_other(self) -> bool:
        """Whether the node may be known without the candidate labels."""
        return bool(self._trusted or self._fallback or self._default)

    @property
    def revision(self) -> int:
        """Incremented when the choice changes: nodes returned earlier may be outdated."""
        self._decide()
        return self._revision

    def prefer(self, label: str) -> None:
        """Prefer the label of an earlier choice, unless evidence rejects it."""
        self._preferred, self._is_decided = label, False

    def observe(self, labels: Mapping[str, str], device: str | None, place: str | None = None) -> None:
        """Add the labels of a series; ``device`` and ``place`` (PCI address or slot) identify its GPU, if known."""
        present = (name for name in self.names if name in labels)
        values = {name: value for name in present if (value := label_value(labels, name)) is not None}
        key = (device, place, *values.items())
        if key in self._seen:
            return
        if len(self._seen) < 4 * _MAX_DEVICES:
            self._seen.add(key)
        for name, value in values.items():
            evidence = self._evidence[name] = self._evidence.get(name) or _Evidence()
            if evidence.is_open(value):
                evidence.settle(value, _kind_of(name, value, values, labels))
            evidence.add(value, device, place)
        self._is_decided = False

    def node_of(self, labels: Mapping[str, str], device: str | None = None) -> str | None:
        """Return the node of a series; None if no usable label has one."""
        order = self._decide()
        for name in (*self._trusted, *order[:1]):
            if (node := self._usable(labels, name)) is not None:
                return node
        # A series of the same GPU from another exporter or scrape may have the missing label.
        if device is not None and not self.is_given and order:
            chosen = self._evidence[order[0]]
            values = [value for value in chosen.of_device.get(device, ()) if chosen.kinds[value] not in _REASONS]
            if len(values) == 1:
                return _without_port(values[0])
        for name in (*order[1:], *self._fallback):
            if (node := self._usable(labels, name)) is not None:
                return node
        return self._default

    def decision(self) -> NodeLabelChoice:
        """Return the current choice."""
        order = self._decide()
        label = order[0] if order else None
        evidence = _Evidence() if label is None else self._evidence.get(label, _Evidence())
        doubt = ""
        if label is not None and evidence.share("address") > 0.5:
            doubt = "values are addresses, which may move to other nodes"
        elif label is not None and evidence.share("like a pod", "pod") > 0.5:
            doubt = "values look like names of pods"
        elif label is not None and evidence.collisions >= max(_COLLIDING * len(evidence.of_device), 1):
            doubt = "several GPUs at one PCI address share a value"
        examples = tuple(_without_port(value) for value in nsmallest(_EXAMPLES, evidence.kinds))
        return NodeLabelChoice(label, len(evidence.kinds), examples, dict(self._rejected), doubt)

    def _decide(self) -> tuple[str, ...]:
        if not self._is_decided:
            order = self._usable_labels()
            self._revision += order != self._order
            self._order, self._is_decided = order, True
        return self._order

    def _usable_labels(self) -> tuple[str, ...]:
        present = [name for name in self.names if name in self._evidence]
        if self.is_given:
            return tuple(present) or self.names
        rejected = {name: reason for name in present if (reason := self._reason_by_kind(name)) is not None}
        if any(reason == _REASONS["pod"] for reason in rejected.values()):
            for name in present:
                if self._evidence[name].share("address") > 0.5:
                    rejected[name] = "values are addresses of pods"
        candidates = [name for name in present if name not in rejected]
        for name in candidates:
            reason = self._reason_by_comparison(name, [other for other in candidates if other != name])
            if reason is not None:
                rejected[name] = reason
        usable = [name for name in present if name not in rejected]
        usable.sort(key=lambda name: (self._evidence[name].share("address") > 0.5, name != self._preferred))
        self._rejected = rejected
        self._preferred = usable[0] if usable else self._preferred
        return tuple(usable)

    def _reason_by_kind(self, name: str) -> str | None:
        evidence = self._evidence[name]
        for kind, reason in _REASONS.items():
            if evidence.share(kind) > 0.5:
                return reason
        others = [self._evidence[other] for other in self._evidence if other != name]
        if evidence.share("like a pod") > 0.5 and any(other.share("name") > 0.5 for other in others):
            return _REASONS["pod"]
        return None

    def _reason_by_comparison(self, name: str, others: Sequence[str]) -> str | None:
        evidence = self._evidence[name]
        devices = len(evidence.of_device)
        rivals = [self._evidence[other] for other in others]
        rivals = [rival for rival in rivals if len(rival.of_device) >= _COVERAGE * devices]
        # A replaced board has the address of its predecessor: a few collisions are not evidence.
        if evidence.collisions >= max(_COLLIDING * devices, 1):
            better = any(rival.collisions < evidence.collisions for rival in rivals)
            if better or evidence.crowd >= _CROWD:
                return "several GPUs at one PCI address share a value"
        better = any(
            evidence.changes > rival.changes + 1 and rival.collisions <= evidence.collisions for rival in rivals
        )
        return "values change while the GPUs stay" if better else None

    def _usable(self, labels: Mapping[str, str], name: str) -> str | None:
        value = label_value(labels, name)
        if value is None:
            return None
        if not self.is_given and name in self._evidence:
            kind = self._evidence[name].kinds.get(value) or _kind_of(name, value, {}, labels)
            if kind in _REASONS and name not in self._trusted:
                return None
        return _without_port(value)


def label_value(labels: Mapping[str, str], name: str) -> str | None:
    """Return a label's value; None if it is missing or means "no value"."""
    value = labels.get(name, "").strip()
    return None if value.casefold() in _NO_VALUE else value


def _without_port(value: str) -> str:
    match = _PORT.fullmatch(value)
    return value if match is None else match["v6"] or match["host"]


def _kind_of(name: str, value: str, values: Mapping[str, str], labels: Mapping[str, str]) -> ValueKind:
    """Return the kind of a label's value; ``values``: values of all candidate labels of the series."""
    bare = _without_port(value)
    if is_address(bare):
        return "service" if _LOCAL.fullmatch(bare) else "address"
    lowered = bare.casefold()
    is_node_label = {label: label.removeprefix("exported_") in _OF_NODES for label in (name, *values)}
    confirmed = any(
        are_one_node(bare, other) for label, other in values.items() if label != name and is_node_label[label]
    )
    is_of_exporter = _EXPORTER.search(lowered) is not None
    kinds: list[tuple[ValueKind, bool]] = [
        ("pod", any(labels.get(label) == bare for label in _POD_LABELS)),
        ("name", confirmed),
        ("pod", is_of_exporter and _POD.fullmatch(lowered) is not None),
        ("service", is_of_exporter or _LOCAL.fullmatch(lowered) is not None),
        ("service", any(labels.get(label) == bare for label in _SERVICE_LABELS)),
        ("container", _CONTAINER.fullmatch(lowered) is not None),
        ("like a pod", not is_node_label[name] and _RANDOM_SUFFIX.fullmatch(lowered) is not None),
    ]
    return next((kind for kind, holds in kinds if holds), "name")
