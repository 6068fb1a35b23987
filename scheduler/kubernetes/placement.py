"""Whether a pod's successor could run on another node: selectors, affinity, volumes, taints, allocatable resources."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import quote

from foundation.kubernetes.api import CLAIM_VERSIONS, Object, parse_quantity
from scheduler.kubernetes.api import CachedReads, UndecidedError
from scheduler.kubernetes.pods import LIVING
from scheduler.ports.errors import SchedulerError
from scheduler.ports.workloads import UNRESTRICTED, Placement

_CORE: Final = "/api/v1"
_CLAIMS: Final = "/apis/resource.k8s.io"
_PAGE: Final = 250
_HOSTNAME: Final = "kubernetes.io/hostname"
_HARD: Final = ("NoSchedule", "NoExecute")
_ZONES: Final = frozenset({"topology.kubernetes.io/zone", "topology.kubernetes.io/region"})
_BASIC: Final = ("cpu", "memory", "ephemeral-storage")  # resources of every node, even if unreported


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    labels: Mapping[str, str]
    taints: tuple[Object, ...]
    size: Mapping[str, Decimal]


class PlacementCheck:
    """Decides about pods, based on a node list that is at most 30 s old.

    Free capacity does not matter, because an evicted pod waits in its queue: requests are compared with the allocatable
    resources of an empty node.
    """

    def __init__(self, reads: CachedReads, *, kueue_replaces_nodes: bool) -> None:
        self._reads, self._kueue_replaces_nodes = reads, kueue_replaces_nodes

    def placement_of(self, pod: Object) -> Placement:
        """Return where a pod can run; failed reads leave it undecided."""
        try:
            return self._checked(pod)
        except (UndecidedError, SchedulerError) as undecided:
            return Placement(None, str(undecided))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return Placement(None, f"its specification cannot be parsed: {error!r}")

    def _checked(self, pod: Object) -> Placement:
        spec, home = pod["spec"], pod["spec"]["nodeName"]
        if _names_its_node(pod):
            return Placement(False, f"its template sets nodeName {home}")
        if _HOSTNAME in (spec.get("nodeSelector") or {}) and _is_placed_by_kueue(pod):
            if not self._kueue_replaces_nodes:
                raise UndecidedError(
                    f"Kueue assigned it to {home} (set kubernetes.kueue_replaces_nodes if Kueue replaces tainted nodes)"
                )
            spec = {**spec, "nodeSelector": {k: v for k, v in spec["nodeSelector"].items() if k != _HOSTNAME}}
        selectors = [*_own_selectors(spec), *self._volume_selectors(pod)]
        requests, tolerations = _requests(spec), spec.get("tolerations") or ()
        affinity, anti_affinity = _pod_terms(spec, "podAffinity"), _pod_terms(spec, "podAntiAffinity")
        spread = [rule for rule in spec.get("topologySpreadConstraints") or () if _is_hard(rule)]
        drivers = self._device_drivers() if spec.get("resourceClaims") else {}
        self._check_shared_claims(pod)
        matching = tolerated = 0
        excluded_by_pods = False
        admits: Callable[[_Node], bool] | None = None
        for node in self._nodes():
            if node.name == home or not all(_selects(terms, node) for _, terms in selectors):
                continue
            matching += 1
            if not all(_is_tolerated(taint, tolerations) for taint in node.taints):
                continue
            tolerated += 1
            if not _is_large_enough(node, requests) or not drivers.get(home, set()) <= drivers.get(node.name, set()):
                continue
            if admits is None and (anti_affinity or spread):
                admits = self._beside_others(pod, anti_affinity, spread, [terms for _, terms in selectors])
            if (admits is not None and not admits(node)) or not self._same_domains(home, node, affinity):
                excluded_by_pods = True
                continue
            return UNRESTRICTED
        if excluded_by_pods:
            return Placement(
                None, "its required affinity to other pods, or its spread, excludes all other nodes at present"
            )
        if tolerated:
            text = ", ".join(f"{name} {amount}" for name, amount in sorted(requests.items()))
            claimed = f"; devices of {', '.join(sorted(drivers[home]))}" if drivers.get(home) else ""
            return Placement(False, f"no other node that it may use is large enough ({text}{claimed})")
        if matching:
            return Placement(False, f"the {matching} other nodes that it may use are tainted, cordoned or not ready")
        text = "; ".join(dict.fromkeys(name for name, _ in selectors))
        return Placement(False, text or "there is no other node")

    def _volume_selectors(self, pod: Object) -> Iterator[tuple[str, list[Object]]]:
        """Yield the node requirements of a pod's persistent volumes."""
        namespace = pod["metadata"].get("namespace") or "default"
        for volume in pod["spec"].get("volumes") or ():
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim is None:
                continue
            path = f"{_CORE}/namespaces/{quote(namespace, safe='')}/persistentvolumeclaims/{quote(claim, safe='')}"
            found = self._reads.object(path, "persistentvolumeclaims")
            bound = (found.get("spec") or {}).get("volumeName")
            if not bound or (found.get("status") or {}).get("phase") == "Lost":
                raise UndecidedError(f"its claim {claim} is not bound")
            if found["metadata"].get("deletionTimestamp"):
                raise UndecidedError(f"its claim {claim} is being deleted, and no further pod may use it")
            raw = self._reads.object(f"{_CORE}/persistentvolumes/{quote(bound, safe='')}", "persistentvolumes")
            source, labels = raw.get("spec") or {}, raw["metadata"].get("labels") or {}
            for key in _ZONES & labels.keys():  # of volumes without a node affinity, as before CSI
                values = labels[key].split("__")
                term = {"matchExpressions": [{"key": key, "operator": "In", "values": values}]}
                yield f"its volume {bound} is in {labels[key]}", [term]
            required = (source.get("nodeAffinity") or {}).get("required")
            if required is not None:
                yield f"its volume {bound} is bound to nodes", list(required.get("nodeSelectorTerms") or ())
            elif "hostPath" in source or "local" in source:
                yield f"its volume {bound} is a directory of the node", []

    def _nodes(self) -> list[_Node]:
        """Return all nodes, except those being deleted."""
        path = f"{_CORE}/nodes"
        return self._reads.cached(
            path, "list nodes", lambda: self._reads.api.client.list_all(path, {}, _node, _PAGE)[0]
        )

    def _device_drivers(self) -> Mapping[str, set[str]]:
        """Return the DRA drivers of each node; the number of claimed devices is not compared."""

        def read() -> Mapping[str, set[str]]:
            drivers: defaultdict[str, set[str]] = defaultdict(set)

            def note(raw: Object) -> None:
                drivers[raw["spec"].get("nodeName") or ""].add(raw["spec"]["driver"])

            self._reads.api.listing(f"{_CLAIMS}/{self._claims_version()}/resourceslices", {}, _PAGE, note)
            return drivers

        try:
            return self._reads.cached(_CLAIMS, "list resourceslices", read)
        except SchedulerError as error:
            raise UndecidedError(f"it has resource claims, and the devices of nodes cannot be read: {error}") from None

    def _claims_version(self) -> str | None:
        return next((v for v in CLAIM_VERSIONS if self._reads.api.read(f"{_CLAIMS}/{v}") is not None), None)

    def _check_shared_claims(self, pod: Object) -> None:
        """Raise ``UndecidedError`` if other pods share a resource claim: it stays allocated on this node."""
        metadata, claims = pod["metadata"], pod["spec"].get("resourceClaims") or ()
        for name in filter(None, (claim.get("resourceClaimName") for claim in claims)):
            folder = f"{_CLAIMS}/{self._claims_version()}/namespaces/{metadata.get('namespace') or 'default'}"
            claim = self._reads.object(f"{folder}/resourceclaims/{quote(name, safe='')}", "resourceclaims")
            users = [user.get("name") for user in (claim.get("status") or {}).get("reservedFor") or ()]
            others = ", ".join(sorted(str(user) for user in users if user != metadata["name"]))
            if others:
                raise UndecidedError(f"its resource claim {name} stays on this node for {others}")

    def _home_label(self, home: str, key: str) -> str | None:
        raw = self._reads.object(f"{_CORE}/nodes/{quote(home, safe='')}", "nodes")
        labels = (raw.get("metadata") or {}).get("labels") or {}
        return home if key == _HOSTNAME else labels.get(key)

    def _same_domains(self, home: str, node: _Node, affinity: list[Object]) -> bool:
        """Whether a node shares every topology domain of the pod's required affinity with ``home``."""
        for term in affinity:
            key = term.get("topologyKey") or _HOSTNAME
            domain = self._home_label(home, key)
            if domain is None or _label_of(node, key) != domain:
                return False
        return True

    def _beside_others(
        self, pod: Object, anti_affinity: list[Object], spread: list[Object], selectors: list[list[Object]]
    ) -> Callable[[_Node], bool]:
        """Return a predicate for nodes that admit the pod alongside the current pods of its namespace."""
        metadata = pod["metadata"]
        namespace = metadata.get("namespace") or "default"
        params = {"fieldSelector": LIVING, "limit": str(_PAGE * 4)}
        path = f"{_CORE}/namespaces/{quote(namespace, safe='')}/pods"
        page = self._reads.uncached("list pods", lambda: self._reads.api.client.get(path, params))
        if (page.get("metadata") or {}).get("continue"):
            raise UndecidedError(f"namespace {namespace} has too many pods for its anti-affinity or spread")
        others = [
            (node, other["metadata"].get("labels") or {})
            for other in page.get("items") or ()
            if other["metadata"].get("namespace") == namespace
            and other["metadata"].get("uid") != metadata.get("uid")
            and (node := other["spec"].get("nodeName"))
        ]
        nodes = self._nodes()
        node_of = {node.name: node for node in nodes}

        def domains_of(term: Object) -> Counter[str]:
            key = term.get("topologyKey") or _HOSTNAME
            selector = term.get("labelSelector") or {}
            hosts = [
                node_of.get(name) or _Node(name, {}, (), {}) for name, labels in others if _picks(selector, labels)
            ]
            return Counter(domain for node in hosts if (domain := _label_of(node, key)) is not None)

        limits: list[tuple[str, Counter[str], int, bool]] = []  # most others in a domain, whether a node must be in one
        for term in anti_affinity:
            if term.get("namespaces") or term.get("namespaceSelector") is not None:
                raise UndecidedError("its required anti-affinity names other namespaces")
            limits.append((term.get("topologyKey") or _HOSTNAME, domains_of(term), 0, False))
        for rule in spread:
            labels = metadata.get("labels") or {}
            chosen = {key: labels[key] for key in rule.get("matchLabelKeys") or () if key in labels}
            selector = dict(rule.get("labelSelector") or {})
            selector["matchLabels"] = {**(selector.get("matchLabels") or {}), **chosen}
            count, key = domains_of({**rule, "labelSelector": selector}), rule["topologyKey"]
            # drained nodes still count: nodeTaintsPolicy ignores taints by default
            eligible = [node for node in nodes if all(_selects(terms, node) for terms in selectors)]
            domains = {domain for node in eligible if (domain := _label_of(node, key)) is not None}
            smallest = 0 if len(domains) < (rule.get("minDomains") or 1) else min(count[domain] for domain in domains)
            limit = smallest + int(rule["maxSkew"]) - _picks(selector, labels)
            limits.append((key, count, limit, True))

        def admits(node: _Node) -> bool:
            domains = [(_label_of(node, key), count, limit, needed) for key, count, limit, needed in limits]
            return all(not needed if name is None else count[name] <= limit for name, count, limit, needed in domains)

        return admits


def _node(raw: Object) -> _Node | None:
    """Parse a node; None if it is being deleted."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    hard = tuple(taint for taint in spec.get("taints") or () if taint.get("effect") in _HARD)
    if metadata.get("deletionTimestamp"):
        return None
    if spec.get("unschedulable") or not ready:  # kept, so that the reason counts it
        hard = (*hard, {"key": "node.kubernetes.io/unschedulable", "effect": "out of service"})
    size = {
        name: amount for name, text in (status.get("allocatable") or {}).items() if (amount := parse_quantity(text))
    }
    return _Node(metadata["name"], metadata.get("labels") or {}, hard, size)


def _is_large_enough(node: _Node, requests: Mapping[str, Decimal]) -> bool:
    """Whether an empty node has enough of each resource; unreported devices count as none."""
    return all(amount <= node.size[name] if name in node.size else name in _BASIC for name, amount in requests.items())


def _label_of(node: _Node, key: str) -> str | None:
    return node.labels.get(key, node.name if key == _HOSTNAME else None)


def _names_its_node(pod: Object) -> bool:
    """Whether the pod's creator set ``nodeName``; a binding by the scheduler leaves no such managed field."""
    for entry in pod["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        if not entry.get("subresource") and "f:nodeName" in (fields.get("f:spec") or {}):
            return "scheduler" not in str(entry.get("manager"))
    return False


def _is_placed_by_kueue(pod: Object) -> bool:
    """Whether Kueue's topology-aware scheduling, not the template, selected the node."""
    metadata = pod["metadata"]
    keys = {*(metadata.get("labels") or {}), *(metadata.get("annotations") or {})}
    return any(key == "kueue.x-k8s.io/tas" or fnmatchcase(key, "kueue.x-k8s.io/podset-*-topology") for key in keys)


def _own_selectors(spec: Object) -> Iterator[tuple[str, list[Object]]]:
    """Yield the node selector and affinity of a pod: a message, and terms of which one must match."""
    for key, value in (spec.get("nodeSelector") or {}).items():
        term = {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}
        yield f"its node selector {key}={value} matches no other node", [term]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is not None:
        yield "its required node affinity matches no other node", list(required.get("nodeSelectorTerms") or ())


def _selects(terms: Iterable[Object], node: _Node) -> bool:
    """Whether one of the terms of a node selector matches; an empty term matches nothing."""
    return any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and all(
            _matches(rule, _label_of(node, rule["key"]))
            for rule in term.get("matchExpressions") or ()
        )
        and all(_matches(rule, node.name) for rule in term.get("matchFields") or ())
        for term in terms
    )  # fmt: skip


def _matches(rule: Object, value: str | None) -> bool:
    operator, values = rule["operator"], list(rule.get("values") or ())
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) is (operator == "Exists")
    if operator in ("Gt", "Lt"):
        if value is None or not value.lstrip("-").isdecimal():
            return False
        return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
    raise UndecidedError(f"its node affinity has the unknown operator {operator}")


def _is_hard(rule: Object) -> bool:
    return (rule.get("whenUnsatisfiable") or "DoNotSchedule") == "DoNotSchedule"


def _picks(selector: Object, labels: Mapping[str, str]) -> bool:
    exact = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return exact and all(_matches(rule, labels.get(rule["key"])) for rule in selector.get("matchExpressions") or ())


def _is_tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    for toleration in tolerations:
        if toleration.get("effect") not in (None, "", taint.get("effect")):
            continue
        if taint.get("effect") not in _HARD:
            continue  # out of service: cannot be tolerated
        key, operator = toleration.get("key"), toleration.get("operator") or "Equal"
        if not key and operator == "Exists":
            return True
        same = operator == "Exists" or (toleration.get("value") or "") == (taint.get("value") or "")
        if key == taint.get("key") and same:
            return True
    return False


def _pod_terms(spec: Object, kind: str) -> list[Object]:
    affinity = (spec.get("affinity") or {}).get(kind) or {}
    return list(affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or ())


def _requests(spec: Object) -> dict[str, Decimal]:
    """Return a pod's requests: the sum over containers and sidecars, or an init container's request if larger."""
    total: dict[str, Decimal] = {}
    init_containers = spec.get("initContainers") or ()
    sidecars = [container for container in init_containers if container.get("restartPolicy") == "Always"]
    overhead = {"resources": {"requests": spec.get("overhead") or {}}}
    for container in (*(spec.get("containers") or ()), *sidecars, overhead):
        for name, amount in _resource_amounts(container):
            total[name] = total.get(name, Decimal(0)) + amount
    for container in (*init_containers, spec):  # pod-level resources
        for name, amount in _resource_amounts(container):
            total[name] = max(total.get(name, Decimal(0)), amount)
    return total


def _resource_amounts(container: Object) -> Iterator[tuple[str, Decimal]]:
    resources: Any = container.get("resources") or {}
    # the request defaults to the limit
    for name, text in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
        amount = parse_quantity(text)
        if amount:
            yield name, amount
