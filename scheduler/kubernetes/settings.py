"""Settings of the Kubernetes adapter."""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.kubernetes.api import ClientLimits
from foundation.kubernetes.foreign_marks import ForeignMark
from foundation.settings import PositiveTime
from telemetry.collect.kubernetes.rules import KubernetesRules, default_rules

_PageSize = Annotated[int, Field(ge=1, le=500)]
_DNS_NAME = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_DnsName = Annotated[str, Field(pattern=f"^{_DNS_NAME}$")]
_LABEL_PART = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_Label = Annotated[str, Field(pattern=f"^({_DNS_NAME}/)?{_LABEL_PART}={_LABEL_PART}$")]


@checked(frozen=True, slots=True)
class KubernetesSettings:
    """Settings of the Kubernetes adapter; docs/reference/settings.md has the table of all settings."""

    kubeconfig: str | None = None
    context: str | None = None
    prefix: _DnsName = "predrain.io"
    namespace: _DnsName = "predrain"
    lease: _DnsName = "predrain-controller"
    state: _DnsName = "predrain-state"
    progress: _DnsName = "predrain-evacuations"
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
    condition: bool = True
    foreign_marks: tuple[ForeignMark, ...] = ()
    avoid_label: _Label | None = None
    device_taints: bool = False
    cordon: bool = False
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 200.0
    burst: PositiveInt = 200
    connect_timeout: PositiveTime = timedelta(seconds=3)
    request_timeout: PositiveTime = timedelta(seconds=5)
    retry_timeout: PositiveTime = timedelta(seconds=10)
    node_page_size: _PageSize = 100
    pod_page_size: _PageSize = 250
    diagnostic_job: str | None = None
    probe_priority_class: str = "predrain-probe"
    eviction_scope: Literal["all", "gpu"] = "all"
    evict_unmanaged: bool = False
    evict_local_data: bool = False
    kueue_replaces_nodes: bool = False

    def __post_init__(self) -> None:
        if self.avoid_label is not None and self.avoid_label.startswith(f"{self.prefix}/"):
            raise ValueError(f"avoid_label is {self.avoid_label!r}: give a key that does not begin with {self.prefix}/")
        if self.state == self.progress:
            raise ValueError(f"state and progress are both {self.state!r}: give two names")

    @property
    def limits(self) -> ClientLimits:
        """Limits of the client's requests."""
        timeouts = (self.connect_timeout, self.request_timeout, self.retry_timeout)
        connect_s, read_s, retry_s = (timeout.total_seconds() for timeout in timeouts)
        return ClientLimits(self.requests_per_second, self.burst, connect_s, read_s, retry_s, attempts=None)

    @property
    def rules(self) -> KubernetesRules:
        """The collector's rules for nodes and pods, overridden by these settings."""
        base = default_rules()
        labels = {
            "cluster": self.cluster_labels, "group": self.group_labels, "rack": self.rack_labels,
            "nvlink_domain": self.domain_labels,
        }  # fmt: skip
        return base.model_copy(
            update={
                "prefix": self.prefix,
                "labels": base.labels | {name: list(keys) for name, keys in labels.items() if keys},
                "gpu_resources": self.gpu_resources or base.gpu_resources,
                "slice_resources": self.slice_resources or base.slice_resources,
            }
        )
