"""Values stored in the scheduler as one text, e.g. the safety state: compressed JSON with a checksum."""

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import orjson

from policy.plan import PolicyState
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import LeaseLostError, SchedulerAdapter
from scheduler.ports.readings import StoredState, WriteResult

T = TypeVar("T")

MAX_CHARACTERS = 900_000
"""Limit in characters: etcd limits a request to 1.5 MiB, and a ConfigMap's data to 1 MiB."""

FORMAT = 1
"""Version of the stored value; others are rejected."""

_SAFETY_STATE = "the safety state"
_MAX_BYTES = 64 * 2**20


def state_json(state: PolicyState) -> dict[str, Any]:
    """Return the safety state as a JSON object."""
    return {"format": FORMAT, **plain_of(state)}


def state_from_json(content: object) -> PolicyState:
    """Parse the result of :func:`state_json`; raises ``ValueError`` with the location."""
    return _from_json(PolicyState, content, _SAFETY_STATE)


class StoredValue(Generic[T]):
    """A value stored in the scheduler, as last read or written by this process.

    ``prefix``: prefix of the text. ``label``: its name in errors. ``setting``: the setting to lower if it is too long.
    ``known``: whether it was ever read in this process.
    """

    def __init__(
        self,
        empty: T,
        prefix: str,
        label: str,
        setting: str,
        load: Callable[[], StoredState],
        save: Callable[[str, str], WriteResult],
    ) -> None:
        self.value = self._empty = empty
        self.known = False
        self._prefix, self._label, self._setting = prefix, label, setting
        self._load, self._save = load, save
        self._version = ""
        self._text: str | None = None  # packed form of the value

    def load(self) -> str | None:
        """Reload the value; raises ``SchedulerError`` if it cannot be read.

        Returns: the error if the stored text is invalid; the value is then empty, which is always safe.
        """
        stored, message = self._load(), None
        if stored.text is None or stored.text != self._text:
            self.value, self._text = self._empty, None
            try:
                if stored.text is not None:
                    self.value = unpack(self._prefix, type(self._empty), stored.text, self._label)
                    self._text = stored.text
            except ValueError as error:
                message = str(error)
        self._version, self.known = stored.version, True
        return message

    def save(self, value: T) -> str | None:
        """Store a value; return why it may not be stored, or None.

        Raises ``LeaseLostError`` if another process has written it in between.
        """
        try:
            text = pack(self._prefix, value, self._label, self._setting)
            result = self._save(text, self._version)
            if result.kind == "conflict":
                raise LeaseLostError(f"another process wrote {self._label}: {result.message}")
            stored = StoredState(text if result.confirmed else None, result.version or self._version)
            # It may have been stored: only the stored text tells.
            if result.kind == "timeout":
                stored = self._load()
        except (ValueError, SchedulerError) as error:
            return str(error)
        if stored.text != text:
            return f"{result.kind} {result.message}"
        self._version, self.value, self._text = stored.version, value, text
        return None


def stored_policy_state(scheduler: SchedulerAdapter) -> StoredValue[PolicyState]:
    """Return the safety state; if it is lost, tiers only rise later, because markers are read from the nodes."""
    load, save = scheduler.load_state, scheduler.save_state
    return StoredValue(PolicyState(), "predrain-state 1", _SAFETY_STATE, "policy.forget", load, save)


def pack(prefix: str, value: object, label: str, setting: str) -> str:
    """Pack a value as one text with a prefix and a checksum.

    Raises ``ValueError``, which names ``label`` and ``setting``, if it is too long to be stored in a scheduler.
    """
    plain = orjson.dumps({"format": FORMAT, **plain_of(value)}, option=orjson.OPT_SORT_KEYS)
    text = f"{prefix} {hashlib.sha256(plain).hexdigest()} {base64.b64encode(zlib.compress(plain, 6)).decode()}"
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{label} has {len(text)} characters, more than {MAX_CHARACTERS}: lower {setting}")
    return text


def unpack(prefix: str, kind: type[T], text: str, label: str) -> T:
    """Unpack the result of :func:`pack`.

    Raises ``ValueError``, which names ``label``, if the text is corrupt, or has another prefix or format.
    """
    start, _, payload = text.rpartition(" ")
    name, _, digest = start.rpartition(" ")
    if name != prefix:
        raise ValueError(f"{label} begins with {text[:24]!r}, expected {prefix!r}")
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(base64.b64decode(payload, validate=True), _MAX_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"{label} is damaged: {error}") from None
    if unpacker.unconsumed_tail or not unpacker.eof or hashlib.sha256(plain).hexdigest() != digest:
        raise ValueError(f"{label} is damaged: checksum mismatch")
    return _from_json(kind, json.loads(plain), label)


def _from_json(kind: type[T], content: object, label: str) -> T:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        stored = content.get("format") if isinstance(content, dict) else content
        raise ValueError(f"{label} has format {stored!r}, but this code reads {FORMAT}")
    return cast(T, object_of(kind, {name: value for name, value in content.items() if name != "format"}, "state"))
