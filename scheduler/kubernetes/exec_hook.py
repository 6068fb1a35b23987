"""A checkpoint by a command in the pod's own container: ``pods/exec``, which is a right of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from scheduler.kubernetes.pods import annotations_of
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.ports.workloads import TRY_LATER, HookReply, reply_of
from telemetry.collect.kubernetes.api import Object, Refused, Unreachable

if TYPE_CHECKING:
    from telemetry.collect.kubernetes.client import KubernetesClient
    from telemetry.collect.kubernetes.pod_exec import Executed

DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
"""Annotation that names the default container of a pod."""

_NOT_FOUND: Final = 404
_MAY_PASS: Final = frozenset({408, 409, 429, 500, 502, 503, 504})


class PodExecHook:
    """Runs the settings' command in the pods that ask for it.

    What is run is the operator's (``checkpoint_exec``), followed by ``checkpoint`` and the key: a pod can say that it
    wants to be told this way, never what is run. Exit code 0 means that the checkpoint is written, 75 that it is on its
    way (it is run again with the same key), any other one that it failed; the last line of the standard output may be a
    JSON object with a ``state`` that says more. It is run at least once: a controller that dies in between, or that had
    no answer in time, runs it again with the same key; what was begun in the container is not ended by us.

    The pod is read right before and must have the uid that was asked for. ``exec`` itself goes by name: a pod of the
    same name that comes to be between the two is told to write a checkpoint, which harms nobody.
    """

    def __init__(self, scheduler: KubernetesScheduler, client: KubernetesClient) -> None:
        self._scheduler = scheduler
        self._client = client
        self._command = scheduler.settings.checkpoint_exec
        self._container = scheduler.settings.checkpoint_container
        self._timeout = scheduler.settings.checkpoint_exec_timeout

    def tell(self, payload: Mapping[str, Any], key: str, url: str | None = None) -> HookReply:  # noqa: ARG002
        """Run it; see :class:`scheduler.ports.workloads.Hook`. A workload's own address is passed over."""
        workload = payload["workload"]
        namespace, _, name = str(workload["name"]).partition("/")
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
        container, unready = self._ready(path, str(workload["uid"]))
        if unready is not None:
            return unready
        words = [*self._command, str(payload.get("kind", "")), key]
        try:
            done = self._client.execute(f"{path}/exec", words, container, timeout_s=self._timeout.total_seconds())
        except Refused as refused:
            return HookReply("timeout" if refused.status in _MAY_PASS else "refused", str(refused))
        except Unreachable as error:
            return HookReply("timeout", str(error))
        return _reply(done, self._command[0])

    def _ready(self, path: str, uid: str) -> tuple[str | None, HookReply | None]:
        """Read the pod; return the container to run the command in, or why it cannot run."""
        if self._scheduler.leadership.left() <= timedelta(0):
            return None, HookReply("refused", "the lease has ended, nothing was run")
        try:
            found = self._scheduler.api.request("GET", path)
        except Unreachable as error:
            return None, HookReply("timeout", f"nothing was run: {error}")
        if not found.ok:
            gone = found.status == _NOT_FOUND
            return None, HookReply("refused", "there is no such pod any more" if gone else found.problem)
        container, why = self._container_of(found.content, uid)
        return container, None if why is None else HookReply("refused", why)

    def _container_of(self, pod: Object, uid: str) -> tuple[str | None, str | None]:
        metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
        if metadata.get("uid") != uid:
            return None, f"another pod of that name is there (uid {metadata.get('uid')})"
        names = [str(each.get("name")) for each in (pod.get("spec") or {}).get("containers") or ()]
        wanted = self._container or annotations_of(pod).get(DEFAULT_CONTAINER) or (names[0] if names else "")
        if wanted not in names:
            return None, f"it has no container {wanted!r}"
        states = {str(each.get("name")): each.get("state") or {} for each in status.get("containerStatuses") or ()}
        if "running" not in states.get(wanted, {}):
            return None, f"its container {wanted} does not run"
        return wanted, None


def _reply(done: Executed, name: str) -> HookReply:
    content = _last_object(done.stdout)
    if done.code == 0:
        return reply_of("done", "exit code 0", content)
    if done.code == TRY_LATER:
        return reply_of("waiting", f"exit code {done.code}", content)
    stderr = done.stderr.decode("utf-8", "replace").strip()[-200:]
    if done.code is None:
        return HookReply("timeout", f"{name} was not run to its end: {done.message}", content)
    return reply_of("failed", f"{name} ended with exit code {done.code}{f': {stderr}' if stderr else ''}", content)


def _last_object(output: bytes) -> Mapping[str, Any]:
    lines = [line for line in output.splitlines() if line.strip()]
    try:
        content = json.loads(lines[-1]) if lines else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
