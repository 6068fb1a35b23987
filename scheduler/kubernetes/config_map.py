"""A text with a version, kept in a ConfigMap; and the switches that a person sets on it as annotations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Any, Final

from scheduler.kubernetes.api import ApiServer
from scheduler.ports.codec import instant
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Answer, StoredState, Switches
from telemetry.collect.kubernetes.api import Object, Unreachable, is_named
from telemetry.collect.kubernetes.client import METADATA_ONLY

_TEXT: Final = "state"
_REVISION: Final = "revision"
_TRIES: Final = 4

Change = Callable[[Object | None], dict[str, Any] | Answer]
"""Makes of the object that is there (None: none) the one to be written, or an answer without writing."""


class ConfigMapText:
    """A text in a ConfigMap.

    Its version is a revision that each write raises, with a digest of the text, not the object's resourceVersion: that
    changes also when a person sets a switch on it. The write itself is a PUT of the object that was read.
    """

    def __init__(self, api: ApiServer, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self.path = f"{self._folder}/{name}"

    def load(self) -> StoredState:
        """Read the text; raises ``SchedulerError`` if it cannot be read."""
        found = self._api.read(self.path, named=self._name)
        return StoredState(_text(found), _version(found))

    def save(self, text: str, version: str) -> Answer:
        """Replace the text, if it still has this version."""

        def change(found: Object | None) -> dict[str, Any] | Answer:
            if _version(found) != version:
                if _text(found) == text and _revision(found) == _count(version.partition(".")[0]) + 1:
                    # our own earlier try, of which we had no answer
                    return Answer("done", "", (), _version(found))
                return Answer("conflict", f"it has version {_version(found)}, expected {version}")
            if _text(found) == text:
                return Answer("done", "", (), version)
            made = self._object(found)
            kept: Any = made.get("data") or {}
            return {**made, "data": {**kept, _TEXT: text, _REVISION: str(_revision(found) + 1)}}

        return self._change(change)

    def annotations(self) -> Mapping[str, str]:
        """Read the annotations alone; raises ``SchedulerError`` if they cannot be read."""
        found = self._api.read(self.path, accept=METADATA_ONLY, named=self._name)
        return {} if found is None else _annotations(found)

    def annotate(self, wanted: Mapping[str, str | None]) -> Answer:
        """Set annotations; None: take it off."""

        def change(found: Object | None) -> dict[str, Any] | Answer:
            there = {} if found is None else _annotations(found)
            then = {key: value for key, value in {**there, **wanted}.items() if value is not None}
            if then == there:
                return Answer("already")
            made = self._object(found)
            return {**made, "metadata": {**made["metadata"], "annotations": then}}

        return self._change(change)

    def _object(self, found: Object | None) -> dict[str, Any]:
        if found is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        return {"apiVersion": "v1", "kind": "ConfigMap", **found}

    def _change(self, change: Change) -> Answer:  # noqa: PLR0911 - one line an outcome
        """Read, change and write it; again where another writer came in between."""
        try:
            for _ in range(_TRIES):
                found = self._api.read(self.path, named=self._name)
                changed = change(found)
                if isinstance(changed, Answer):
                    return changed
                if found is None:
                    response = self._api.request("POST", self._folder, body=changed)
                else:
                    response = self._api.request("PUT", self.path, body=changed)
                if response.ok:
                    if is_named(response.content, self._name):
                        return Answer("done", "", (), _version(response.content))
                    return Answer("timeout", "the answer is not the ConfigMap")
                if response.status == 404 and found is None:
                    return Answer("refused", f"{response.problem} (is there a namespace {self._namespace}?)")
                if response.status not in (404, 409):
                    return Answer("refused", response.problem)
        except SchedulerError as error:
            return Answer("refused", str(error))
        except Unreachable as error:
            return Answer("timeout" if error.sent else "refused", str(error))
        return Answer("conflict", "others kept writing to it")


class SwitchAnnotations:
    """The switches as annotations of a ConfigMap, where ``kubectl annotate`` sets them too."""

    def __init__(self, kept: ConfigMapText, prefix: str) -> None:
        self._kept = kept
        self.kill = f"{prefix}/kill"
        self.release_all = f"{prefix}/release-all"
        self.reset_breaker_at = f"{prefix}/reset-breaker-at"

    def read(self) -> tuple[Switches, str | None]:
        """Read them, and what could not be parsed; raises ``SchedulerError`` if they cannot be read.

        A switch whose annotation is neither ``true`` nor ``false`` counts as ``kill``.
        """
        found = self._kept.annotations()
        unclear = [
            f"{key}={found[key]!r}"
            for key in (self.kill, self.release_all)
            if found.get(key, "false").strip().lower() not in ("true", "false")
        ]
        kill = bool(unclear) or _is_true(found.get(self.kill))
        reset = found.get(self.reset_breaker_at)
        reset_at = instant((reset or "").strip())
        if reset is not None and reset_at is None:
            unclear.append(f"{self.reset_breaker_at}={reset!r}")
        message = f"switches that cannot be parsed: {', '.join(unclear)}" if unclear else None
        return Switches(kill, _is_true(found.get(self.release_all)), reset_at), message

    def write(self, switches: Switches) -> Answer:
        """Set them."""
        reset = switches.reset_breaker_at
        wanted = {
            self.kill: "true" if switches.kill else None,
            self.release_all: "true" if switches.release_all else None,
            self.reset_breaker_at: None if reset is None else reset.astimezone(UTC).isoformat(),
        }
        return self._kept.annotate(wanted)


def _data(found: Object | None) -> dict[str, Any]:
    data = None if found is None else found.get("data")
    return data if isinstance(data, dict) else {}


def _text(found: Object | None) -> str | None:
    text = _data(found).get(_TEXT)
    return text if isinstance(text, str) else None


def _revision(found: Object | None) -> int:
    return _count(_data(found).get(_REVISION))


def _version(found: Object | None) -> str:
    text = _text(found)
    digest = "none" if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{_revision(found)}.{digest}"


def _count(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else 0


def _annotations(found: Object) -> dict[str, str]:
    metadata = found.get("metadata")
    if not isinstance(metadata, dict):
        raise SchedulerError("a ConfigMap without metadata was answered")
    return {str(key): str(value) for key, value in (metadata.get("annotations") or {}).items()}


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() == "true"
