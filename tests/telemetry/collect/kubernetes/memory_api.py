"""An API server in memory: objects of a few kinds, every change kept, watches that end when there is nothing more."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foundation.kubernetes.api import ApiRefused, Object
from foundation.kubernetes.client import KubernetesClient

NODES, PODS, EVENTS = "/api/v1/nodes", "/api/v1/pods", "/api/v1/events"


class MemoryApi(KubernetesClient):
    """Selectors are not looked at; what a test does not want selected it does not put in."""

    def __init__(self) -> None:
        self.name = "memory:6443"
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.changes: list[tuple[int, str, str, dict[str, Any]]] = []
        self.version = 100
        self.oldest = 0
        self.failures: list[Exception] = []
        self.asked: list[str] = []
        self.params: list[Mapping[str, str]] = []

    def put(self, path: str, item: Mapping[str, Any]) -> None:
        kept = copy.deepcopy(dict(item))
        key = (path, kept["metadata"]["name"])
        self._change("MODIFIED" if key in self.objects else "ADDED", path, kept)
        self.objects[key] = kept

    def remove(self, path: str, name: str) -> None:
        self._change("DELETED", path, copy.deepcopy(self.objects.pop((path, name))))

    def forget(self) -> None:
        """Lose the history, as a compaction does."""
        self.changes.clear()
        self.version += 1
        self.oldest = self.version

    def get(self, path: str, params: Mapping[str, str] | None = None, **_: Any) -> Object:
        self._maybe_fail(path)
        if params is not None:  # a listing
            self.params.append(params)
            items = [copy.deepcopy(item) for (place, _), item in sorted(self.objects.items()) if place == path]
            return {"items": items, "metadata": {"resourceVersion": str(self.version)}}
        folder, _, name = path.rpartition("/")
        if (folder, name) not in self.objects:
            raise ApiRefused(404, f"{path} not found")
        return self.objects[(folder, name)]

    def watch(
        self, path: str, params: Mapping[str, str], version: str, begun: Callable[[], object]
    ) -> Iterator[Object]:
        self._maybe_fail(path)
        begun()
        if int(version) < self.oldest:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            return
        for number, kind, place, item in list(self.changes):
            if number > int(version) and place == path:
                yield {"type": kind, "object": item}
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}

    def _change(self, kind: str, path: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.changes.append((self.version, kind, path, copy.deepcopy(item)))

    def _maybe_fail(self, path: str) -> None:
        self.asked.append(path)
        if self.failures:
            raise self.failures.pop(0)
