"""Discovery of the exporters behind a Kubernetes service, and of their nodes."""

import ipaddress
from collections.abc import Iterable
from functools import cache
from typing import Any, Final, NamedTuple

from foundation.errors import InputError
from foundation.kubernetes.api import ApiRefused, Object, Unreachable
from foundation.kubernetes.client import KubernetesClient, input_error
from foundation.kubernetes.credentials import connect

_METRICS_PORTS: Final = ("metrics", "http-metrics", "https-metrics")


class Exporter(NamedTuple):
    """URL of an exporter (without path), and the node of its pod."""

    url: str
    node: str | None


@cache
def _connected() -> KubernetesClient:
    return connect()


def service_exporters(
    namespace: str, service: str, port: int | str | None = None, *, api: KubernetesClient | None = None
) -> list[Exporter]:
    """Return the current exporters behind a service.

    ``port``: number or name of the endpoint port; default: one named ``metrics`` or similar, else the only one.
    ``api``: default: a cached :func:`foundation.kubernetes.credentials.connect`.
    Returns: one exporter per pod, sorted by URL. Endpoints that are not ready are included, so that failing exporters
    are noticed; terminating ones are not.
    Raises ``InputError`` if there is no such service or port, or the server rejects the request or does not respond.
    """
    location = f"kubernetes:{namespace}/{service}"
    api = api or _connected()
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    try:
        slices, _ = api.list_all(path, {"labelSelector": f"kubernetes.io/service-name={service}"}, lambda item: item)
    except (ApiRefused, Unreachable) as error:
        # Reconnect next time: the kubeconfig's certificate or token may have been rotated.
        _connected.cache_clear()
        raise input_error(error, api, f" ({location})") from error
    if not slices:
        raise InputError(
            "there is no such service, or it selects no pods",
            location,
            f"Check it with: kubectl get endpointslices -n {namespace}",
        )
    return sorted(slice_exporters(slices, port, location), key=lambda exporter: exporter.url)


def slice_exporters(slices: Iterable[Object], port: int | str | None, location: str) -> list[Exporter]:
    """Return the exporters in EndpointSlices; raises ``InputError`` if no port or several ports match."""
    chosen: dict[str, Exporter] = {}
    # A dual-stack service lists each pod in a slice per family: keep one exporter, preferably IPv4.
    for family in ("IPv6", "IPv4"):
        for item in slices:
            if item.get("addressType", "IPv4") != family:
                continue
            for endpoint in item.get("endpoints") or ():
                if (endpoint.get("conditions") or {}).get("terminating") or not endpoint.get("addresses"):
                    continue
                exporter = _exporter(_port(item.get("ports") or (), port, location), endpoint)
                chosen[str((endpoint.get("targetRef") or {}).get("uid") or exporter.url)] = exporter
    return list({exporter.url: exporter for exporter in chosen.values()}.values())


def _port(ports: Iterable[Any], requested: int | str | None, location: str) -> tuple[str, int]:
    known = [(str(port.get("name") or ""), int(port["port"])) for port in ports if port.get("port")]
    if requested is not None:
        fitting = [(name, number) for name, number in known if str(requested) in (name, str(number))]
    else:
        fitting = [(name, number) for name, number in known if name in _METRICS_PORTS] or known
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(f"{name or 'unnamed'} ({number})" for name, number in known) or "none"
    problem = f"the service has no port {requested!r}" if requested is not None else "the port is ambiguous"
    raise InputError(f"{problem}: it has {listed}", location, "Give one of them: kubernetes:NAMESPACE/SERVICE:PORT.")


def _exporter(port: tuple[str, int], endpoint: Object) -> Exporter:
    address = endpoint["addresses"][0]
    host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    scheme = "https" if port[0].startswith("https") else "http"
    return Exporter(f"{scheme}://{host}:{port[1]}", endpoint.get("nodeName"))
