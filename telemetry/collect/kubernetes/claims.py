"""GPUs that pods get through resource claims (dynamic resource allocation, Kubernetes 1.32 and later)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from telemetry.collect.kubernetes.api import Api, Object, Refused, Unreachable
from telemetry.collect.kubernetes.rules import KubernetesRules

log = logging.getLogger(__name__)

_VERSIONS = ("v1", "v1beta2", "v1beta1")
_KEPT = 50_000
_RETRY_S = 600.0


def gpus_of(claim: Object, rules: KubernetesRules) -> int:
    """Return how many GPUs a ResourceClaim holds: its allocated devices of GPU drivers, parts of one GPU once."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    devices = set()
    for result in (allocation.get("devices") or {}).get("results") or ():
        if result.get("driver") in (rules.claim_drivers or ()) and not result.get("adminAccess"):
            # NVIDIA's driver calls whole GPUs gpu-0 and parts of one gpu-0-mig-1g.5gb-0-1.
            devices.add((result.get("pool"), str(result.get("device")).split("-mig-", 1)[0]))
    return len(devices)


class ClaimBook:
    """Looks claims up when a pod names one; without the permission, or on a server without claims, each holds none.

    ``monotonic_s``: seconds of a clock that never jumps.
    """

    def __init__(self, api: Api, rules: KubernetesRules, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._rules = rules
        self._monotonic_s = monotonic_s
        self._known: dict[tuple[str, str], int] = {}
        self._version: str | None = None
        self._closed_until_s = float("-inf")

    def gpus(self, namespace: str, name: str) -> int:
        """Return how many GPUs a claim holds; 0 where that cannot be told now."""
        key = (namespace, name)
        if key in self._known:
            return self._known[key]
        claim = self._read(namespace, name)
        if claim is None:
            return 0
        count = gpus_of(claim, self._rules)
        if count:
            if len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[key] = count
        return count

    def _read(self, namespace: str, name: str) -> Object | None:
        if self._monotonic_s() < self._closed_until_s:
            return None
        for version in _VERSIONS if self._version is None else (self._version,):
            path = f"/apis/resource.k8s.io/{version}/namespaces/{namespace}/resourceclaims/{name}"
            try:
                claim = self._api.get(path)
            except Refused as refused:
                if refused.status == 404:
                    continue
                self._close(refused)
                return None
            except Unreachable as error:
                self._close(error)
                return None
            self._version = version
            return claim
        return None

    def _close(self, error: Exception) -> None:
        log.warning("%s: GPUs of resource claims are not counted: %s", self._api.name, error)
        self._closed_until_s = self._monotonic_s() + _RETRY_S
