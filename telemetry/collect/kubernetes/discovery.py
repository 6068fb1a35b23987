"""Where the exporters behind a Kubernetes service are, and on which nodes."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

from telemetry.collect.exporters.targets import DEFAULT_PATH, Target
from telemetry.collect.kubernetes.api import Api, Object, Refused, Unreachable
from telemetry.collect.kubernetes.client import connect, not_allowed, unreachable
from telemetry.errors import InputError

_SLICE_VERSIONS: Final = ("v1", "v1beta1")
_SERVICE_LABEL: Final = "kubernetes.io/service-name"
_MISSING: Final = 404
_UNKNOWN_USER: Final = 401

_connections: dict[str, Api] = {}
_connecting = threading.Lock()


def service_targets(
    namespace: str, service: str, port: int | str | None = None, *, api: Api | None = None
) -> list[Target]:
    """Return a target for each endpoint of a service, as it is now; ask again to see nodes come and go.

    ``port``: number or name of the endpoints' port; default: the one named ``metrics``, else the only one.
    ``api``: Default: the server that :func:`telemetry.collect.kubernetes.client.connect` finds, connected to once.
    Returns: sorted by URL, one per pod, with the node that the pod runs on. Endpoints that are not ready are among them
    (an exporter that no longer gets ready is news), those that are being ended are not.
    Raises ``InputError`` if there is no such service or port, the server refuses, or does not answer.

    Read from EndpointSlices (``discovery.k8s.io/v1``, or ``v1beta1`` before Kubernetes 1.21), and from Endpoints where
    the server has neither.
    """
    where = f"kubernetes:{namespace}/{service}"
    api = api or _connected()
    try:
        found = _from_slices(api, namespace, service, port, where)
        if found is None:
            found = _from_endpoints(api, namespace, service, port, where)
    except Refused as refused:
        if refused.status == _MISSING:
            raise InputError(
                "there is no such service", where, f"Look it up with: kubectl get services -n {namespace}"
            ) from refused
        if refused.status == _UNKNOWN_USER:
            _connections.clear()  # a certificate or token of the file was replaced: read it again the next time
        raise not_allowed(refused, f" ({where})", api) from refused
    except Unreachable as error:
        raise unreachable(error, api) from error
    return sorted(found, key=lambda target: target.url)


def slice_targets(slices: Iterable[Object], port: int | str | None, where: str) -> list[Target]:
    """Return the targets of EndpointSlices of one service, of either version.

    Raises ``InputError`` if no port, or more than one, can be meant.
    """
    chosen: dict[str, tuple[int, Target]] = {}
    for each in slices:
        family = each.get("addressType", "IPv4")
        if family not in ("IPv4", "IPv6"):
            continue
        rank = 0 if family == "IPv4" else 1
        number: tuple[str, int] | None = None
        for endpoint in each.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            if conditions.get("terminating"):
                continue
            number = number or _port(each.get("ports") or (), port, where)
            topology = endpoint.get("topology") or endpoint.get("deprecatedTopology") or {}
            node = endpoint.get("nodeName") or topology.get("kubernetes.io/hostname")
            for address in (endpoint.get("addresses") or ())[:1]:
                target = _target(number, address, node)
                # A dual-stack service has each pod in a slice of either family: one target, IPv4 for preference.
                key = str((endpoint.get("targetRef") or {}).get("uid") or target.url)
                if key not in chosen or rank < chosen[key][0]:
                    chosen[key] = (rank, target)
    return list({target.url: target for _, target in chosen.values()}.values())


def endpoints_targets(endpoints: Object, port: int | str | None, where: str) -> list[Target]:
    """Return the targets of an Endpoints object.

    Raises ``InputError`` if no port, or more than one, can be meant.
    """
    found: dict[str, Target] = {}
    for subset in endpoints.get("subsets") or ():
        addresses = [*(subset.get("addresses") or ()), *(subset.get("notReadyAddresses") or ())]
        if not addresses:
            continue
        number = _port(subset.get("ports") or (), port, where)
        for address in addresses:
            target = _target(number, address["ip"], address.get("nodeName"))
            found[target.url] = target
    return list(found.values())


def _from_slices(api: Api, namespace: str, service: str, port: int | str | None, where: str) -> list[Target] | None:
    for version in _SLICE_VERSIONS:
        path = f"/apis/discovery.k8s.io/{version}/namespaces/{namespace}/endpointslices"
        try:
            slices = list(_items(api, path, {"labelSelector": f"{_SERVICE_LABEL}={service}"}))
        except Refused as refused:
            if refused.status == _MISSING:
                continue
            raise
        if not slices:
            break  # the service has no selector, or is not there: its Endpoints tell which
        return slice_targets(slices, port, where)
    return None


def _from_endpoints(api: Api, namespace: str, service: str, port: int | str | None, where: str) -> list[Target]:
    path = f"/api/v1/namespaces/{namespace}/endpoints/{service}"
    return endpoints_targets(api.get(path), port, where)


def _items(api: Api, path: str, params: dict[str, str]) -> Iterator[Object]:
    for page in api.pages(path, params):
        yield from page.get("items") or ()


def _port(ports: Iterable[Any], wanted: int | str | None, where: str) -> tuple[str, int]:
    """Return name and number of the port that is meant."""
    known = [(str(each.get("name") or ""), int(each["port"])) for each in ports if each.get("port")]
    if wanted is not None:
        fitting = [each for each in known if str(wanted) in (each[0], str(each[1]))]
    else:
        fitting = [each for each in known if each[0] in ("metrics", "http-metrics", "https-metrics")]
        fitting = fitting or known
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(f"{name or 'unnamed'} ({number})" for name, number in known) or "none"
    what = f"the service has no port {wanted!r}" if wanted is not None else "it is not clear which port is meant"
    raise InputError(
        f"{what}: it has {shown}", where, f"Write one of them: {where.split(':', 2)[0]}:NAMESPACE/SERVICE:PORT."
    )


def _target(port: tuple[str, int], address: str, node: str | None) -> Target:
    host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    scheme = "https" if port[0].startswith("https") else "http"
    return Target(f"{scheme}://{host}:{port[1]}{DEFAULT_PATH}", node)


def _connected() -> Api:
    with _connecting:
        if "default" not in _connections:
            _connections["default"] = connect()
        return _connections["default"]
