"""An API server of a few kinds over real HTTP: versions, patches, pages, preconditions, and faults as told."""

import copy
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import format_datetime
from typing import Any

import urllib3

from foundation.kubernetes.api import ClientLimits
from foundation.kubernetes.client import KubernetesClient
from tests import http_server
from tests.http_server import Handler

Raw = dict[str, Any]
LIMITS = ClientLimits(connect_timeout_s=30.0, read_timeout_s=30.0, retry_timeout_s=60.0, attempts=4)
"""What is given up is given up after a number of attempts: a busy machine must not end a request."""
MEANWHILE = -1


@dataclass
class Fault:
    """What the next matching requests meet: a status, or a cut; ``after``: it was carried out all the same.

    ``then`` happens meanwhile; with ``MEANWHILE`` as status nothing else does, and the request is answered as ever.
    """

    method: str
    path: str
    status: int = 0
    content: Raw = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    times: int = 1
    skip: int = 0
    then: Callable[[], object] | None = None


class World:
    """Objects by path, and what was asked."""

    def __init__(self) -> None:
        self.objects: dict[str, Raw] = {}
        self.version = 100
        self.faults: list[Fault] = []
        self.asked: list[tuple[str, str]] = []
        self.agents: set[str] = set()
        self.params: list[dict[str, str]] = []
        self.budgets: dict[str, str] = {}
        self.evicted: list[tuple[Raw, Raw]] = []  # pods and their nodes, as they were when it was accepted
        self.expire_pages = 0
        self.discovery: dict[str, Raw] = {}
        self.denied: set[tuple[str, str]] = set()
        self.kinds: tuple[str, ...] = ()
        self.now: Callable[[], datetime] | None = None
        self.lock = threading.RLock()

    def put(self, path: str, content: Raw) -> Raw:
        with self.lock:
            self.version += 1
            made = copy.deepcopy(content)
            metadata = made.setdefault("metadata", {})
            metadata.setdefault("name", path.rsplit("/", 1)[1])
            metadata.setdefault("uid", f"uid-{self.version}")
            metadata.setdefault("creationTimestamp", "2026-11-01T00:00:00Z")
            metadata["resourceVersion"] = str(self.version)
            self.objects[path] = made
            return made

    def edit(self, path: str, change: Callable[[Raw], object]) -> None:
        """Change an object by somebody else's hand."""
        with self.lock:
            content = copy.deepcopy(self.objects[path])
            change(content)
            self.put(path, content)

    def fail(self, method: str, path: str, status: int = 0, **how: Any) -> None:
        self.faults.append(Fault(method, path, status, **how))

    def meet(self, method: str, path: str) -> Fault | None:
        """Give the fault that a request meets."""
        with self.lock:
            for fault in self.faults:
                if fault.method == method and re.search(fault.path, path) and fault.times > 0:
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def serve(self, method: str, path: str, params: dict[str, str], body: Any, kind: str) -> tuple[int, Raw]:
        with self.lock:
            if method == "GET":
                return self._get(path, params)
            if method == "POST":
                return self._post(path, body)
            if method == "DELETE":
                return self._delete(path, body)
            target = path.removesuffix("/status")
            if target not in self.objects:
                return _status(404, f"{target} not found")
            if method == "PUT":
                return self._replace(target, body)
            writer = params.get("fieldManager", "unknown")
            return self._patch(target, body, kind, writer, status_only=path.endswith("/status"))

    def _get(self, path: str, params: dict[str, str]) -> tuple[int, Raw]:
        if path == "/api/v1":
            return 200, {"resources": [{"name": "pods/eviction", "group": "policy", "version": "v1"}]}
        if path in self.objects:
            return 200, self.objects[path]
        if path in self.discovery:
            return 200, self.discovery[path]
        if not path.endswith(("/nodes", "/pods", *self.kinds)):
            return _status(404, f"{path} not found")
        kind = path.rsplit("/", 1)[1]
        items = [item for name, item in sorted(self.objects.items()) if f"/{kind}/" in name and _selected(item, params)]
        start, limit = int(params.get("continue", "0")), int(params.get("limit", "0"))
        if start and self.expire_pages:
            self.expire_pages -= 1
            return _status(410, "the continue token has expired")
        page = items[start : start + limit] if limit else items
        more = limit and start + limit < len(items)
        metadata = {"resourceVersion": str(self.version), **({"continue": str(start + limit)} if more else {})}
        return 200, {"kind": "List", "metadata": metadata, "items": page}

    def _post(self, path: str, body: Raw) -> tuple[int, Raw]:
        if path.endswith("/selfsubjectaccessreviews"):
            wanted = body["spec"]["resourceAttributes"]
            return 201, {"status": {"allowed": (wanted["verb"], wanted["resource"]) not in self.denied}}
        if path.endswith("/eviction"):
            return self._evict(path.removesuffix("/eviction"), body)
        return self._create(f"{path}/{body['metadata']['name']}", body)

    def _create(self, path: str, body: Raw) -> tuple[int, Raw]:
        if path in self.objects:
            return _status(409, f"{path} already exists")
        return 201, self.put(path, body)

    def _replace(self, path: str, body: Raw) -> tuple[int, Raw]:
        if body["metadata"].get("resourceVersion") != self.objects[path]["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        return 200, self.put(path, body)

    def _delete(self, path: str, body: Raw) -> tuple[int, Raw]:
        if path not in self.objects:
            return _status(404, f"{path} not found")
        metadata = self.objects[path]["metadata"]
        for name, value in (body or {}).get("preconditions", {}).items():
            if metadata.get(name) != value:
                return _status(409, f"Precondition failed: {name}")
        del self.objects[path]
        return 200, {"kind": "Status", "status": "Success"}

    def _evict(self, path: str, body: Raw) -> tuple[int, Raw]:
        if path not in self.objects:
            return _status(404, "pod not found")
        pod = self.objects[path]
        if body["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"]:
            return _status(409, "Precondition failed: UID")
        if path in self.budgets:
            content = _status(429, "Cannot evict pod as it would violate the pod's disruption budget.")[1]
            cause = {"reason": "DisruptionBudget", "message": f"The disruption budget {self.budgets[path]} needs 2"}
            return 429, {**content, "details": {"causes": [cause]}}
        self.evicted.append((pod, self.objects.get(f"/api/v1/nodes/{pod['spec']['nodeName']}", {})))
        self.edit(path, lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-02T00:00:00Z"))
        return 201, {"kind": "Status", "status": "Success"}

    def _patch(self, path: str, body: Any, kind: str, writer: str, *, status_only: bool) -> tuple[int, Raw]:
        content = copy.deepcopy(self.objects[path])
        if kind.startswith("application/strategic"):
            version = content["metadata"]["resourceVersion"]
            if body.get("metadata", {}).get("resourceVersion", version) != version:
                return _status(409, "the object has been modified")
        elif body["metadata"].pop("uid", content["metadata"]["uid"]) != content["metadata"]["uid"]:
            return _status(409, "Precondition failed: UID in precondition")
        merge(content, body)
        if any("!" in item["key"] for item in content.get("spec", {}).get("taints") or ()):
            return _status(422, "Node is invalid: bad taint key")
        if status_only:
            content["spec"] = self.objects[path].get("spec", {})
        out = content.get("spec", {}).get("unschedulable")
        if content["metadata"].get("managedFields") and out != self.objects[path]["spec"].get("unschedulable"):
            content["metadata"]["managedFields"] = managed(writer if out else None)
        return 200, self.put(path, content)


def managed(cordoner: str | None) -> list[Raw]:
    """Who wrote what of a node, as a server tells it: a kubelet its status, and somebody the cordon."""
    fields = [{"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {"f:conditions": {}}}}]
    if cordoner is not None:
        wrote = {"f:spec": {"f:unschedulable": {}}}
        fields.append({"manager": cordoner, "operation": "Update", "fieldsV1": wrote})
    return fields


def merge(content: Raw, patch: Raw) -> None:
    """Carry out a patch: maps are merged, conditions by their type, and other lists replaced."""
    for key, value in patch.items():
        if key == "conditions":
            types = {item["type"] for item in value}
            kept = [item for item in content.get(key, ()) if item["type"] not in types]
            content[key] = kept + [item for item in value if item.get("$patch") != "delete"]
        elif isinstance(value, dict):
            content[key] = content.get(key) or {}
            merge(content[key], value)
        elif value is None:
            content.pop(key, None)
        else:
            content[key] = value


def _selected(raw: Raw, params: dict[str, str]) -> bool:
    if "labelSelector" in params:
        key, _, value = params["labelSelector"].partition("=")
        labels = raw["metadata"].get("labels") or {}
        return key in labels and value in ("", labels[key])
    for term in filter(None, params.get("fieldSelector", "").split(",")):
        name, value = term.replace("!=", "=").split("=")
        section, part = name.split(".")
        if (str((raw.get(section) or {}).get(part) or "") == value) is ("!=" in term):
            return False
    return True


def _status(code: int, message: str) -> tuple[int, Raw]:
    return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}


@contextmanager
def served(world: World) -> Iterator[KubernetesClient]:
    """Serve a world; gives a connection to it."""

    class Answering(Handler):
        def date_time_string(self, timestamp: float | None = None) -> str:
            return "" if world.now is None else format_datetime(world.now(), usegmt=True)

        def handle_request(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            params = dict(urllib.parse.parse_qsl(url.query))
            data = self.body()
            world.asked.append((self.command, url.path))
            world.params.append(params)
            world.agents.add(self.headers.get("User-Agent", ""))
            fault = world.meet(self.command, url.path)
            status, content, headers = 0, {}, {}
            if fault is None or fault.after:
                body = json.loads(data) if data else None
                status, content = world.serve(
                    self.command, url.path, params, body, self.headers.get("Content-Type", "")
                )
            if fault is not None:
                if fault.then is not None:
                    fault.then()
                if fault.status != MEANWHILE:
                    status, content, headers = fault.status, fault.content, fault.headers
            if not status:
                self.close_connection = True  # cut without an answer
                return
            self.reply(status, json.dumps(content).encode(), headers)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

    with http_server.serving(Answering) as address, urllib3.PoolManager() as pool:
        yield KubernetesClient(pool, address, dict, limits=LIMITS, agent="predrain-act/test")
