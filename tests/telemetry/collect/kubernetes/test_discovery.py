"""Targets from EndpointSlices."""

from typing import Any

import pytest

from telemetry.collect.kubernetes.api import Refused, Unreachable
from telemetry.collect.kubernetes.discovery import service_targets, slice_targets
from telemetry.errors import InputError
from tests.telemetry.collect.kubernetes.memory_api import MemoryApi

WHERE = "kubernetes:gpu-operator/dcgm"
METRICS = [{"name": "metrics", "port": 9400}]


def endpoint(address: str, node: str | None = None, *, pod: str | None = None, **more: Any) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "uid": pod}} if pod else {}
    return {"addresses": [address], **({"nodeName": node} if node else {}), **target, **more}


def slice_of(*endpoints: dict[str, Any], family: str = "IPv4", ports: Any = METRICS) -> dict[str, Any]:
    return {"addressType": family, "endpoints": list(endpoints), "ports": ports, "metadata": {"name": f"s-{family}"}}


def test_rows_carry_the_node_that_the_endpoint_names() -> None:
    targets = slice_targets([slice_of(endpoint("10.0.0.1", "gpu-01"))], None, WHERE)
    assert [(each.url, each.node) for each in targets] == [("http://10.0.0.1:9400/metrics", "gpu-01")]
    old = endpoint("10.0.0.2", topology={"kubernetes.io/hostname": "gpu-02"})
    assert slice_targets([slice_of(old)], None, WHERE)[0].node == "gpu-02"
    assert slice_targets([slice_of(endpoint("10.0.0.3"))], None, WHERE)[0].node is None


def test_an_exporter_that_does_not_get_ready_is_scraped_and_one_that_ends_is_not() -> None:
    unready = endpoint("10.0.0.1", conditions={"ready": False})
    ending = endpoint("10.0.0.2", conditions={"ready": False, "serving": True, "terminating": True})
    targets = slice_targets([slice_of(unready, ending)], None, WHERE)
    assert [each.host for each in targets] == ["10.0.0.1"]


def test_a_pod_with_two_addresses_is_one_target() -> None:
    four = slice_of(endpoint("10.0.0.1", "a", pod="p1"))
    six = slice_of(endpoint("fd00::1", "a", pod="p1"), endpoint("fd00::2", "b", pod="p2"), family="IPv6")
    for slices in ([four, six], [six, four]):
        assert {each.url for each in slice_targets(slices, None, WHERE)} == {
            "http://10.0.0.1:9400/metrics",
            "http://[fd00::2]:9400/metrics",
        }
    assert slice_targets([slice_of(endpoint("x.example.com"), family="FQDN")], None, WHERE) == []


@pytest.mark.parametrize(
    ("port", "url"), [(9401, ":9401/"), ("9401", ":9401/"), ("health", ":9401/"), (None, ":9400/")]
)
def test_which_port(port: int | str | None, url: str) -> None:
    ports = [{"name": "health", "port": 9401}, *METRICS]
    (target,) = slice_targets([slice_of(endpoint("10.0.0.1"), ports=ports)], port, WHERE)
    assert url in target.url


def test_a_port_that_is_not_clear_is_refused() -> None:
    ports = [{"name": "a", "port": 1}, {"name": "b", "port": 2}]
    with pytest.raises(InputError, match=r"not clear which port is meant: it has a \(1\), b \(2\)"):
        slice_targets([slice_of(endpoint("10.0.0.1"), ports=ports)], None, WHERE)
    (target,) = slice_targets([slice_of(endpoint("10.0.0.1"), ports=[{"name": "https", "port": 443}])], None, WHERE)
    assert target.url.startswith("https://10.0.0.1:443/")


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_slices_are_asked_for_by_the_services_label(version: str) -> None:
    api = MemoryApi()
    api.failures = [Refused(404, "not found")] * (version == "v1beta1")
    place = f"/apis/discovery.k8s.io/{version}/namespaces/gpu-operator/endpointslices"
    api.put(place, slice_of(endpoint("10.0.0.1", "a")))
    assert len(service_targets("gpu-operator", "dcgm", api=api)) == 1
    assert api.params == [{"labelSelector": "kubernetes.io/service-name=dcgm"}]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (Refused(403, "forbidden"), r"refuses: forbidden.*kubernetes:gpu-operator/dcgm.*collector-rbac"),
        (Unreachable("refused"), "does not answer"),
    ],
)
def test_what_goes_wrong_is_said(failure: Exception, message: str) -> None:
    api = MemoryApi()
    api.failures = [failure]
    with pytest.raises(InputError, match=message):
        service_targets("gpu-operator", "dcgm", api=api)
    with pytest.raises(InputError, match=r"there is no such service.*kubectl get endpointslices -n gpu-operator"):
        service_targets("gpu-operator", "dcgm", api=api)
