"""Where the exporters behind a Kubernetes service are, and on which nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from telemetry.collect.exporters.targets import DEFAULT_PATH, Target
from telemetry.collect.kubernetes.api import Object, Refused, Unreachable
from telemetry.collect.kubernetes.client import KubernetesClient, connect, input_error
from telemetry.errors import InputError

_METRICS_PORTS: Final = ("metrics", "http-metrics", "https-metrics")


@cache
def _connected() -> KubernetesClient:
    return connect()


def service_targets(
    namespace: str, service: str, port: int | str | None = None, *, api: KubernetesClient | None = None
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
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    try:
        slices, _ = api.list_all(path, {"labelSelector": f"kubernetes.io/service-name={service}"}, lambda item: item)
    except (Refused, Unreachable) as error:
        # After a refusal the file is read again the next time: its certificate or token may have been replaced.
        _connected.cache_clear()
        raise input_error(error, api, f" ({where})") from error
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
    chosen: dict[str, Target] = {}
    # A dual-stack service has each pod in a slice of either family: one target, IPv4 for preference.
    for family in ("IPv6", "IPv4"):
        for item in slices:
            if item.get("addressType", "IPv4") != family:
                continue
            for endpoint in item.get("endpoints") or ():
                if (endpoint.get("conditions") or {}).get("terminating") or not endpoint.get("addresses"):
                    continue
                target = _target(_port(item.get("ports") or (), port, where), endpoint)
                chosen[str((endpoint.get("targetRef") or {}).get("uid") or target.url)] = target
    return list({target.url: target for target in chosen.values()}.values())


def _port(ports: Iterable[Any], wanted: int | str | None, where: str) -> tuple[str, int]:
    """Return name and number of the port that is meant."""
    known = [(str(port.get("name") or ""), int(port["port"])) for port in ports if port.get("port")]
    if wanted is not None:
        fitting = [(name, number) for name, number in known if str(wanted) in (name, str(number))]
    else:
        fitting = [(name, number) for name, number in known if name in _METRICS_PORTS] or known
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(f"{name or 'unnamed'} ({number})" for name, number in known) or "none"
    problem = f"the service has no port {wanted!r}" if wanted is not None else "it is not clear which port is meant"
    raise InputError(f"{problem}: it has {shown}", where, "Write one of them: kubernetes:NAMESPACE/SERVICE:PORT.")


def _target(port: tuple[str, int], endpoint: Object) -> Target:
    address = endpoint["addresses"][0]
    host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    scheme = "https" if port[0].startswith("https") else "http"
    return Target(f"{scheme}://{host}:{port[1]}{DEFAULT_PATH}", endpoint.get("nodeName"))
