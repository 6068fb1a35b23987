"""A versioned text in a ConfigMap, and the operator's switches as annotations on it."""

import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Any, Final

from foundation.kubernetes.api import Object, Unreachable, is_named
from foundation.kubernetes.client import METADATA_ONLY
from scheduler.kubernetes.api import ApiServer
from scheduler.kubernetes.pods import annotations_of
from scheduler.ports.codec import instant
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import StoredState, Switches, WriteResult

_TEXT: Final = "state"
_TRIES: Final = 4

Change = Callable[[dict[str, Any]], dict[str, Any] | WriteResult]
"""Returns the object that replaces the current one, or a result if there is nothing to write."""


class ConfigMapText:
    """A text in a ConfigMap.

    Its version is a digest of the text, because the resourceVersion also changes when an operator sets a switch. The
    write is a PUT with the resourceVersion that was read.
    """

    def __init__(self, api: ApiServer, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self.path = f"{self._folder}/{name}"

    def load(self) -> StoredState:
        """Read the text; raises ``SchedulerError`` if it cannot be read."""
        return _stored(self._api.read(self.path, named=self._name) or {})

    def save(self, text: str, version: str) -> WriteResult:
        """Replace the text, if it still has this version."""

        def change(current: dict[str, Any]) -> dict[str, Any] | WriteResult:
            stored = _stored(current)
            if stored.text == text:  # possibly written by an earlier attempt without a response
                return WriteResult("done", "", (), stored.version)
            if stored.version != version:
                return WriteResult("conflict", f"it has version {stored.version}, expected {version}")
            return {**current, "data": {**(current.get("data") or {}), _TEXT: text}}

        return self._change(change)

    def annotations(self) -> Mapping[str, str]:
        """Read the annotations alone; raises ``SchedulerError`` if they cannot be read."""
        current = self._api.read(self.path, accept=METADATA_ONLY, named=self._name)
        return {} if current is None else annotations_of(current)

    def annotate(self, annotations: Mapping[str, str | None]) -> WriteResult:
        """Set annotations; None removes one."""

        def change(current: dict[str, Any]) -> dict[str, Any] | WriteResult:
            old = annotations_of(current)
            new = {key: value for key, value in {**old, **annotations}.items() if value is not None}
            if new == old:
                return WriteResult("already")
            return {**current, "metadata": {**current["metadata"], "annotations": new}}

        return self._change(change)

    def _change(self, change: Change) -> WriteResult:
        """Read, change and write the object; retry on update conflicts."""
        new = {"metadata": {"name": self._name, "namespace": self._namespace}}
        try:
            for _ in range(_TRIES):
                current = self._api.read(self.path, named=self._name)
                changed = change({"apiVersion": "v1", "kind": "ConfigMap", **(current or new)})
                if isinstance(changed, WriteResult):
                    return changed
                if current is None:
                    response = self._api.request("POST", self._folder, body=changed)
                else:
                    response = self._api.request("PUT", self.path, body=changed)
                if response.ok:
                    if not is_named(response.content, self._name):
                        return WriteResult("timeout", "the response is not the ConfigMap")
                    if not _holds(response.content, changed):
                        return WriteResult(
                            "refused", "the server accepted it but stored something else, probably because of a webhook"
                        )
                    return WriteResult("done", "", (), _stored(response.content).version)
                if response.status == 404 and current is None:
                    return WriteResult("refused", f"{response.problem} (is there a namespace {self._namespace}?)")
                if response.status not in (404, 409):
                    return WriteResult("refused", response.problem)
        except SchedulerError as error:
            return WriteResult("refused", str(error))
        except Unreachable as error:
            return WriteResult("timeout" if error.sent else "refused", str(error))
        return WriteResult("conflict", "gave up after repeated update conflicts")


class SwitchAnnotations:
    """The switches as annotations of a ConfigMap, which ``kubectl annotate`` can set too."""

    def __init__(self, stored: ConfigMapText, prefix: str) -> None:
        self._stored = stored
        self.kill = f"{prefix}/kill"
        self.release_all = f"{prefix}/release-all"
        self.reset_breaker_at = f"{prefix}/reset-breaker-at"

    def read(self) -> tuple[Switches, str | None]:
        """Read the switches and a message about unparsable ones; raises ``SchedulerError`` if they cannot be read.

        A kill or release-all annotation that is neither ``true`` nor ``false`` counts as ``kill``.
        """
        texts = {key: str(text).strip() for key, text in self._stored.annotations().items()}
        values = {key: texts.get(key, "false").lower() for key in (self.kill, self.release_all)}
        unclear = [key for key, value in values.items() if value not in ("true", "false")]
        kill = bool(unclear) or values[self.kill] == "true"
        reset_at = instant(texts.get(self.reset_breaker_at))
        if self.reset_breaker_at in texts and reset_at is None:
            unclear.append(self.reset_breaker_at)
        listed = ", ".join(f"{key}={texts[key]!r}" for key in unclear)
        message = f"switches that cannot be parsed: {listed}" if unclear else None
        return Switches(kill, values[self.release_all] == "true", reset_at), message

    def write(self, switches: Switches) -> WriteResult:
        """Set the switches."""
        reset = switches.reset_breaker_at
        annotations = {
            self.kill: "true" if switches.kill else None,
            self.release_all: "true" if switches.release_all else None,
            self.reset_breaker_at: None if reset is None else reset.astimezone(UTC).isoformat(),
        }
        return self._stored.annotate(annotations)


def _holds(answer: Object, sent: Object) -> bool:
    return _stored(answer) == _stored(sent) and annotations_of(sent).items() <= annotations_of(answer).items()


def _stored(current: Object) -> StoredState:
    data = current.get("data")
    text = data.get(_TEXT) if isinstance(data, dict) else None
    if not isinstance(text, str):
        return StoredState(None, "none")
    return StoredState(text, hashlib.sha256(text.encode()).hexdigest()[:16])
