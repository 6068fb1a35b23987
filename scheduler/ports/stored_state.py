"""What a scheduler keeps for us as one text, such as the safety state: JSON, packed, with a check sum."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from typing import Any, TypeVar, cast

from policy.plan import PolicyState
from scheduler.ports.codec import object_of, plain_of

T = TypeVar("T")

LONGEST = 900_000
"""Characters. A Kubernetes object holds 1.5 MiB at most (etcd's request limit), a ConfigMap 1 MiB of data."""

FORMAT = 1
"""Version of what is kept; another one is refused."""

_HEAD, _WHAT = "predrain-state 1", "the safety state"
_LARGEST = 64 * 2**20


def state_text(state: PolicyState) -> str:
    """Write the safety state; raises ``ValueError`` as :func:`packed`."""
    return packed(_HEAD, state, _WHAT, "policy.forget")


def state_of(text: str) -> PolicyState:
    """Read the safety state; raises ``ValueError`` as :func:`unpacked`.

    Whoever reads it then begins with an empty state and says so. That only makes tiers rise later: what stands on the
    nodes is read from the scheduler.
    """
    return unpacked(_HEAD, PolicyState, text, _WHAT)


def state_json(state: PolicyState) -> dict[str, Any]:
    """Give the safety state as a JSON object."""
    return {"format": FORMAT, **plain_of(state)}


def state_from_json(content: object) -> PolicyState:
    """Read what :func:`state_json` wrote; raises ``ValueError`` with the place."""
    return _from_json(PolicyState, content, _WHAT)


def packed(head: str, value: object, what: str, setting: str) -> str:
    """Pack a value as one text, with its name and a check sum.

    Raises ``ValueError`` if it is longer than a scheduler keeps; ``what`` it is and the ``setting`` to lower are named.
    """
    plain = json.dumps({"format": FORMAT, **plain_of(value)}, sort_keys=True, separators=(",", ":")).encode()
    text = f"{head} {hashlib.sha256(plain).hexdigest()} {base64.b64encode(zlib.compress(plain, 6)).decode()}"
    if len(text) > LONGEST:
        raise ValueError(f"{what} has {len(text)} characters, {LONGEST} fit: lower {setting}")
    return text


def unpacked(head: str, kind: type[T], text: str, what: str) -> T:
    """Read what :func:`packed` wrote.

    Raises ``ValueError`` if it has another name or format, or is damaged; ``what`` is what errors call it.
    """
    start, _, rest = text.rpartition(" ")
    name, _, digest = start.rpartition(" ")
    if name != head:
        raise ValueError(f"{what} begins with {text[:24]!r}, expected {head!r}")
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(base64.b64decode(rest, validate=True), _LARGEST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"{what} is damaged: {error}") from None
    if unpacker.unconsumed_tail or not unpacker.eof or hashlib.sha256(plain).hexdigest() != digest:
        raise ValueError(f"{what} is damaged: its check sum does not fit")
    return _from_json(kind, json.loads(plain), what)


def _from_json(kind: type[T], content: object, what: str) -> T:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise ValueError(f"{what} has format {found!r}, this code reads {FORMAT}")
    return cast(T, object_of(kind, {name: value for name, value in content.items() if name != "format"}, "state"))
