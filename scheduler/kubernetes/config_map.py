"""A text with a version, kept in a ConfigMap; and the switches that a person sets on it as annotations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from scheduler.kubernetes.api import ApiServer
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Answer, StoredState, Switches
from telemetry.collect.kubernetes.api import Object, Response, Unreachable, is_named
from telemetry.collect.kubernetes.client import METADATA_ONLY

_TEXT: Final = "state"
_REVISION: Final = "revision"
_TRIES: Final = 4

Change = Callable[[Object | None], dict[str, Any] | Answer]
"""Makes of the object that is there (None: none) the one to be written, or an answer without writing."""


class ConfigMapText:
    """A text in a ConfigMap.

    Its version is a revision that each writing raises, with a digest of the text. It is not the object's
    resourceVersion: that changes also where a person sets a switch beside it, which is no other writer of the text.
    The writing itself is a PUT of the very object that was read, by resourceVersion.
    """

    def __init__(self, api: ApiServer, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self.path = f"{self._folder}/{name}"

    def load(self) -> StoredState:
        """Read the text.

        Raises ``SchedulerError`` if it cannot be read.
        """
        found = self._api.read(self.path, named=self._name)
        return StoredState(_text(found), _version(found))

    def save(self, text: str, version: str) -> Answer:
        """Replace the text, if it still has this version."""

        def change(found: Object | None) -> dict[str, Any] | Answer:
            if _version(found) != version:
                if _text(found) == text and _revision(found) == _revision_of(version) + 1:
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
        """Read the annotations alone, without the text.

        Raises ``SchedulerError`` if they cannot be read.
        """
        found = self._api.read(self.path, accept=METADATA_ONLY, named=self._name)
        return {} if found is None else _annotations(found)

    def annotate(self, wanted: Mapping[str, str | None]) -> Answer:
        """Set annotations; None: take it off."""

        def change(found: Object | None) -> dict[str, Any] | Answer:
            there = {} if found is None else _annotations(found)
            then = {**there, **{key: value for key, value in wanted.items() if value is not None}}
            then = {key: value for key, value in then.items() if wanted.get(key, value) is not None}
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

    def _change(self, change: Change) -> Answer:
        try:
            for _ in range(_TRIES):
                answer = self._changed_once(change)
                if answer is not None:
                    return answer
        except Unreachable as error:
            return Answer("timeout" if error.sent else "refused", str(error))
        return Answer("conflict", "others kept writing to it")

    def _changed_once(self, change: Change) -> Answer | None:
        """Read, change and write it; None: another writer came in between."""
        read = self._api.request("GET", self.path)
        strange = read.ok and not is_named(read.content, self._name)
        if strange or (not read.ok and read.status != 404):
            return Answer("refused", "the answer is not the ConfigMap" if strange else read.problem)
        found = read.content if read.ok else None
        made = change(found)
        if isinstance(made, Answer):
            return made
        response = self._written(made, new=found is None)
        if response.ok:
            done = is_named(response.content, self._name)
            return (
                Answer("done", "", (), _version(response.content))
                if done
                else Answer("timeout", "the answer is not the ConfigMap")
            )
        if response.status == 404 and found is None:
            return Answer("refused", f"{response.problem} (is there a namespace {self._namespace}?)")
        return None if response.status in (404, 409) else Answer("refused", response.problem)

    def _written(self, made: dict[str, Any], *, new: bool) -> Response:
        if new:
            return self._api.request("POST", self._folder, body=made)
        return self._api.request("PUT", self.path, body=made)


class SwitchAnnotations:
    """The switches as annotations of a ConfigMap, where ``kubectl annotate`` sets them too.

    ``prefix``: of the annotations: ``PREFIX/kill``, ``PREFIX/release-all``, ``PREFIX/reset-breaker-at``.
    """

    def __init__(self, kept: ConfigMapText, prefix: str) -> None:
        self._kept = kept
        self.kill = f"{prefix}/kill"
        self.release_all = f"{prefix}/release-all"
        self.reset_breaker_at = f"{prefix}/reset-breaker-at"

    def read(self) -> tuple[Switches, str | None]:
        """Read them.

        A switch whose annotation is neither ``true`` nor ``false`` counts as ``kill``. The second value says what could
        not be parsed.

        Raises ``SchedulerError`` if they cannot be read.
        """
        found = self._kept.annotations()
        unclear = [
            f"{key}={found[key]!r}"
            for key in (self.kill, self.release_all)
            if found.get(key, "false").strip().lower() not in ("true", "false")
        ]
        reset = found.get(self.reset_breaker_at)
        reset_at = None if reset is None else _time(reset)
        if reset is not None and reset_at is None:
            unclear.append(f"{self.reset_breaker_at}={reset!r}")
        words = f"switches that cannot be parsed: {', '.join(unclear)}" if unclear else None
        kill = any(not each.startswith(self.reset_breaker_at) for each in unclear) or _is_true(found.get(self.kill))
        return Switches(kill, _is_true(found.get(self.release_all)), reset_at), words

    def write(self, switches: Switches) -> Answer:
        """Set them."""
        reset = switches.reset_breaker_at
        return self._kept.annotate(
            {
                self.kill: "true" if switches.kill else None,
                self.release_all: "true" if switches.release_all else None,
                self.reset_breaker_at: None if reset is None else reset.astimezone(UTC).isoformat(),
            }
        )


def _text(found: Object | None) -> str | None:
    data = None if found is None else found.get("data")
    text = data.get(_TEXT) if isinstance(data, dict) else None
    return text if isinstance(text, str) else None


def _revision(found: Object | None) -> int:
    data = None if found is None else found.get("data")
    text = data.get(_REVISION) if isinstance(data, dict) else None
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else 0


def _version(found: Object | None) -> str:
    text = _text(found)
    digest = "none" if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{_revision(found)}.{digest}"


def _revision_of(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isascii() and head.isdigit() else 0


def _annotations(found: Object) -> dict[str, str]:
    metadata = found.get("metadata")
    if not isinstance(metadata, dict):
        raise SchedulerError("a ConfigMap without metadata was answered")
    return {str(key): str(value) for key, value in (metadata.get("annotations") or {}).items()}


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() == "true"


def _time(text: str) -> datetime | None:
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return when if when.tzinfo is not None else None
