"""How many GPUs resource claims hold (dynamic resource allocation), read for all jobs at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from scheduler.kubernetes.api import ApiServer
from scheduler.kubernetes.pods import PodPart
from scheduler.ports.errors import SchedulerError
from telemetry.collect.kubernetes.api import Object
from telemetry.collect.kubernetes.claims import gpus_of
from telemetry.collect.kubernetes.rules import KubernetesRules

_GROUP: Final = "/apis/resource.k8s.io"
_VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
_PAGE: Final = 250

Claim = tuple[str, str]
"""Namespace and name."""


class ClaimCounts:
    """The GPUs of claims, as of the last listing; a claim that is not known counts as one GPU."""

    def __init__(self, api: ApiServer, rules: KubernetesRules) -> None:
        self._api = api
        self._rules = rules
        self._version: str | None = None
        self._held: Mapping[Claim, int] = {}

    def refresh(self, parts: Iterable[PodPart]) -> None:
        """List the claims anew, where any pod has one; what cannot be listed stays as it was."""
        if not any(part.claims for part in parts):
            return
        try:
            if self._version is None:
                self._version = self._offered()
            if self._version is None:
                return
            path = f"{_GROUP}/{self._version}/resourceclaims"
            self._held = dict(self._api.listing(path, {}, _PAGE, self._view))
        except SchedulerError:
            self._version = None  # without the right to, or on another server by now

    def counted(self, parts: Iterable[PodPart]) -> Iterator[PodPart]:
        """Give the parts of jobs with the GPUs that they hold by claims.

        Pods may share a claim, and its GPUs with it: within one job it counts once, with the first pod that has it.
        """
        seen: set[tuple[str, str, str]] = set()
        for part in parts:
            held = 0
            for claim in part.claims:
                if (part.job, part.namespace, claim) not in seen:
                    seen.add((part.job, part.namespace, claim))
                    held += self._held.get((part.namespace, claim), 1)
            yield replace(part, gpus=part.gpus + held) if part.claims else part

    def _view(self, raw: Object) -> tuple[Claim, int] | None:
        try:
            metadata = raw["metadata"]
            return (metadata["namespace"], metadata["name"]), gpus_of(raw, self._rules)
        except (KeyError, TypeError, AttributeError):
            return None

    def _offered(self) -> str | None:
        group = self._api.read(_GROUP) or {}
        named = {str(each.get("version")) for each in group.get("versions") or () if isinstance(each, dict)}
        return next((version for version in _VERSIONS if version in named), None)
