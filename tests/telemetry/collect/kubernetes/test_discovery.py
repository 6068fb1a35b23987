"""Targets from EndpointSlices."""

from contextlib import nullcontext
from typing import Any

import pytest

from foundation.errors import InputError
from foundation.kubernetes.api import ApiRefused, Unreachable
from telemetry.collect.kubernetes.discovery import service_exporters, slice_exporters
from tests.telemetry.collect.kubernetes.memory_api import MemoryApi

WHERE = "kubernetes:gpu-operator/dcgm"
METRICS = [{"name": "metrics", "port": 9400}]


def endpoint(address: str, node: str | None = None, *, pod: str | None = None, **more: Any) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "uid": pod}} if pod else {}
    return {"addresses": [address], **({"nodeName": node} if node else {}), **target, **more}


def slice_of(*endpoints: dict[str, Any], family: str = "IPv4", ports: Any = METRICS) -> dict[str, Any]:
    return {"addressType": family, "endpoints": list(endpoints), "ports": ports, "metadata": {"name": f"s-{family}"}}


def test_an_exporter_that_does_not_get_ready_is_scraped_and_one_that_ends_is_not() -> None:
    unready = endpoint("10.0.0.1", "gpu-01", conditions={"ready": False})
    ending = endpoint("10.0.0.2", conditions={"ready": False, "serving": True, "terminating": True})
    targets = slice_exporters([slice_of(unready, ending)], None, WHERE)
    assert [(target.url, target.node) for target in targets] == [("http://10.0.0.1:9400", "gpu-01")]


def test_a_pod_with_two_addresses_is_one_target() -> None:
    four = slice_of(endpoint("10.0.0.1", "a", pod="p1"))
    six = slice_of(endpoint("fd00::1", "a", pod="p1"), endpoint("fd00::2", "b", pod="p2"), family="IPv6")
    for slices in ([four, six], [six, four]):
        assert {exporter.url for exporter in slice_exporters(slices, None, WHERE)} == {
            "http://10.0.0.1:9400",
            "http://[fd00::2]:9400",
        }
    assert slice_exporters([slice_of(endpoint("x.example.com"), family="FQDN")], None, WHERE) == []


HEALTH = {"name": "health", "port": 9401}


@pytest.mark.parametrize(
    ("port", "ports", "url"),
    [
        (9401, [HEALTH, *METRICS], "http://10.0.0.1:9401"),
        ("health", [HEALTH, *METRICS], "http://10.0.0.1:9401"),
        (None, [HEALTH, *METRICS], "http://10.0.0.1:9400"),
        (None, [{"name": "https", "port": 443}], "https://10.0.0.1:443"),
        (None, [HEALTH, {"name": "b", "port": 2}], r"not clear which port is meant: it has health \(9401\), b \(2\)"),
        ("x", METRICS, r"has no port 'x': it has metrics \(9400\)"),
    ],
)
def test_which_port(port: int | str | None, ports: list[dict[str, Any]], url: str) -> None:
    refused = nullcontext() if url.startswith("http") else pytest.raises(InputError, match=url)
    with refused:
        (target,) = slice_exporters([slice_of(endpoint("10.0.0.1"), ports=ports)], port, WHERE)
        assert target.url.startswith(url)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ApiRefused(403, "forbidden"), r"refuses: forbidden.*kubernetes:gpu-operator/dcgm.*collector-rbac"),
        (Unreachable("refused"), "does not answer"),
    ],
)
def test_an_api_failure_is_reported(failure: Exception, message: str) -> None:
    api = MemoryApi()
    api.failures = [failure]
    with pytest.raises(InputError, match=message):
        service_exporters("gpu-operator", "dcgm", api=api)
    with pytest.raises(InputError, match=r"there is no such service.*kubectl get endpointslices -n gpu-operator"):
        service_exporters("gpu-operator", "dcgm", api=api)
    api.put("/apis/discovery.k8s.io/v1/namespaces/gpu-operator/endpointslices", slice_of(endpoint("10.0.0.1", "a")))
    assert len(service_exporters("gpu-operator", "dcgm", api=api)) == 1
    assert api.params[-1]["labelSelector"] == "kubernetes.io/service-name=dcgm"
