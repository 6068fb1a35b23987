"""Where the exporters behind a Kubernetes service are, and on which nodes."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterable
from typing import Any, Final

from telemetry.collect.exporters.targets import DEFAULT_PATH, Target
from telemetry.collect.kubernetes.api import Api, Object, Refused, Unreachable
from telemetry.collect.kubernetes.client import connect, not_allowed, unreachable
from telemetry.errors import InputError

_SERVICE_LABEL: Final = "kubernetes.io/service-name"
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
    """
    where = f"kubernetes:{namespace}/{service}"
    api = api or _connected()
    try:
        slices = _slices(api, namespace, service)
    except Refused as refused:
        if refused.status == _UNKNOWN_USER:
            _connections.clear()  # a certificate or token of the file was replaced: read it again the next time
        raise not_allowed(refused, f" ({where})", api) from refused
    except Unreachable as error:
        raise unreachable(error, api) from error
    if not slices:
        raise InputError(
            "there is no such service, or it selects no pods",
            where,
            f"Look it up with: kubectl get endpointslices -n {namespace}",
        )
    return sorted(slice_targets(slices, port, where), key=lambda target: target.url)


def slice_targets(slices: Iterable[Object], port: int | str | None, where: str) -> list[Target]:
    """Return the targets of EndpointSlices of one service.

    Raises ``InputError`` if no port, or more than one, can be meant.
    """
    chosen: dict[str, tuple[int, Target]] = {}
    for item in slices:
        family = item.get("addressType", "IPv4")
        if family not in ("IPv4", "IPv6"):
            continue
        rank = 0 if family == "IPv4" else 1
        number: tuple[str, int] | None = None
        for endpoint in item.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            if conditions.get("terminating"):
                continue
            number = number or _port(item.get("ports") or (), port, where)
            node = endpoint.get("nodeName") or (endpoint.get("topology") or {}).get("kubernetes.io/hostname")
            for address in (endpoint.get("addresses") or ())[:1]:
                target = _target(number, address, node)
                # A dual-stack service has each pod in a slice of either family: one target, IPv4 for preference.
                key = str((endpoint.get("targetRef") or {}).get("uid") or target.url)
                if key not in chosen or rank < chosen[key][0]:
                    chosen[key] = (rank, target)
    return list({target.url: target for _, target in chosen.values()}.values())


def _slices(api: Api, namespace: str, service: str) -> list[Object]:
    selector = {"labelSelector": f"{_SERVICE_LABEL}={service}"}
    for version in ("v1", "v1beta1"):  # the latter before Kubernetes 1.21
        path = f"/apis/discovery.k8s.io/{version}/namespaces/{namespace}/endpointslices"
        try:
            return [item for page in api.pages(path, selector) for item in page.get("items") or ()]
        except Refused as refused:
            if refused.status != 404 or version == "v1beta1":
                raise
    raise AssertionError("unreachable")


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
