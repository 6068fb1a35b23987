"""How the Kubernetes adapter works: names, places, limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from telemetry.collect.kubernetes.api import ClientLimits
from telemetry.collect.kubernetes.rules import KubernetesRules, default_rules

_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """How the Kubernetes adapter works.

    ``kubeconfig``, ``context``: where the credentials are; None: those of the pod that we run in, else as ``kubectl``
    finds them.
    ``prefix``: DNS name under which all labels, annotations and taints of ours stand.
    ``namespace``: where lease, state and switches lie.
    ``lease``, ``state``, ``progress``: names of the Lease and of the ConfigMaps of the controller's and of the
    evacuations' state.
    ``cluster``: what the cluster is called in budgets and in the ledger, where no label says it.
    ``group``: group of the nodes that no label puts into one.
    ``selector``: label selector of the nodes that may be acted on; empty: every node that has GPUs.
    ``gpu_resources``, ``slice_resources``: extended resources that are whole GPUs, and patterns of those that are
    parts; empty: the collector's.
    ``cluster_labels``, ``group_labels``, ``rack_labels``, ``domain_labels``: labels of a node that say where it stands,
    first found counts; empty: the collector's.
    ``gpu_annotations``: further annotations of a node in which the UUIDs of its GPUs stand (``GPU-…``), such as HAMi's
    ``hami.io/node-nvidia-register``; ``PREFIX/gpus`` is read always. Only where the scores name GPUs by UUID.
    ``read_pods``: whether pods are read, so that floors per job hold. Without, the breaker stays open: nothing hard is
    begun.
    ``condition``, ``events``: whether the node condition and the events are written beside what is published.
    ``device_taints``: whether a hard mark stands once more as a device taint of each GPU that it is due to, where the
    server offers them (``DeviceTaintRule``) and GPUs are given by resource claims.
    ``cordon``: whether a hard mark cordons the node besides, for tools that look at nothing else. The taint does the
    same, and tells who it was. Only where the server tells who wrote what (``managedFields``, all servers from 1.22
    on).
    ``requests_per_second``, ``burst``: at most; what is more waits.
    ``connect_timeout``, ``request_timeout``: until the connection stands; of silence, until an answer is given up.
    ``retry_timeout``: for how long a request that the server could not serve is repeated (429, 5xx, cut connections).
    ``node_page_size``, ``pod_page_size``: objects a page of a listing; one page at a time is held as JSON.
    ``diagnostic_job``: file with the manifest of a Job that checks an emptied node, for ``evacuation.verification.by:
    scheduler``.
    ``eviction_scope``: ``all``: a node is empty when no pod is left but those of daemon sets and mirrors; ``gpu``: when
    none with GPUs is left.
    ``evict_unmanaged``: whether pods go that nobody would start elsewhere.
    ``evict_local_data``: whether pods go whose ``emptyDir`` on disk is lost with them. One in memory (``/dev/shm``)
    never holds a pod.
    """

    kubeconfig: str | None = None
    context: str | None = None
    prefix: str = "predrain.io"
    namespace: str = "predrain"
    lease: str = "predrain-controller"
    state: str = "predrain-state"
    progress: str = "predrain-evacuations"
    cluster: str = "kubernetes"
    group: str = "none"
    selector: str = ""
    gpu_resources: tuple[str, ...] = ()
    slice_resources: tuple[str, ...] = ()
    cluster_labels: tuple[str, ...] = ()
    group_labels: tuple[str, ...] = ()
    rack_labels: tuple[str, ...] = ()
    domain_labels: tuple[str, ...] = ()
    gpu_annotations: tuple[str, ...] = ()
    read_pods: bool = True
    condition: bool = True
    events: bool = True
    device_taints: bool = False
    cordon: bool = False
    requests_per_second: float = 200.0
    burst: int = 200
    connect_timeout: timedelta = timedelta(seconds=3)
    request_timeout: timedelta = timedelta(seconds=5)
    retry_timeout: timedelta = timedelta(seconds=10)
    node_page_size: int = 100
    pod_page_size: int = 250
    diagnostic_job: str | None = None
    eviction_scope: Literal["all", "gpu"] = "all"
    evict_unmanaged: bool = False
    evict_local_data: bool = False

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "request_timeout", "retry_timeout"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive time")
        for name in ("prefix", "namespace", "lease", "state", "progress"):
            if not _DNS_NAME.fullmatch(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give a DNS name (small letters, digits, - and .)")
        if self.state == self.progress:
            raise ValueError(f"state and progress are both {self.state!r}: give two names")
        if not self.requests_per_second > 0 or self.burst < 1:
            raise ValueError(
                f"requests_per_second is {self.requests_per_second}, burst is {self.burst}: give positive numbers"
            )
        for name in ("node_page_size", "pod_page_size"):
            if not 1 <= getattr(self, name) <= 500:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 to 500")

    @property
    def limits(self) -> ClientLimits:
        """Bounds of the client's requests."""
        return ClientLimits(
            self.requests_per_second,
            self.burst,
            self.connect_timeout.total_seconds(),
            self.request_timeout.total_seconds(),
            self.retry_timeout.total_seconds(),
            attempts=None,
        )

    @property
    def rules(self) -> KubernetesRules:
        """The collector's rules about nodes and pods, with what is set here in their place."""
        base = default_rules()
        labels = {
            "cluster": self.cluster_labels, "group": self.group_labels, "rack": self.rack_labels,
            "nvlink_domain": self.domain_labels,
        }  # fmt: skip
        return base.model_copy(
            update={
                "prefix": self.prefix,
                "labels": base.labels | {name: list(keys) for name, keys in labels.items() if keys},
                "gpu_resources": list(self.gpu_resources) or base.gpu_resources,
                "slice_resources": list(self.slice_resources) or base.slice_resources,
            }
        )
