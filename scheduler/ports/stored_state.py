"""The safety state as one text that a scheduler can keep: JSON, packed, with a check sum."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

from policy.plan import PolicyState
from scheduler.ports.codec import object_of, plain_of

LONGEST = 900_000
"""Characters. A Kubernetes object holds 1.5 MiB at most (etcd's request limit), a ConfigMap 1 MiB of data."""

FORMAT = 1
"""Version of the safety state; another one is refused."""

_HEAD = "predrain-state 1"
_LARGEST = 64 * 2**20


def state_text(state: PolicyState) -> str:
    """Write a state.

    Raises ``ValueError`` if it is longer than a scheduler keeps.
    """
    plain = json.dumps(state_json(state), sort_keys=True, separators=(",", ":")).encode()
    text = packed(_HEAD, plain)
    if len(text) > LONGEST:
        raise ValueError(f"the safety state has {len(text)} characters, {LONGEST} fit: lower policy.forget")
    return text


def state_of(text: str) -> PolicyState:
    """Read what :func:`state_text` wrote.

    Raises ``ValueError`` if it is damaged or of another format. Whoever reads it then begins with an empty state and
    says so.
    """
    return state_from_json(json.loads(unpacked(_HEAD, text, "the safety state")))


def state_json(state: PolicyState) -> dict[str, Any]:
    """Give a state as a JSON object."""
    return {"format": FORMAT, **plain_of(state)}


def state_from_json(content: Mapping[str, Any]) -> PolicyState:
    """Read what :func:`state_json` wrote.

    Raises ``ValueError`` if it is of another format, or damaged, with the place. An empty state then only makes tiers
    rise later: what stands on the nodes is read from the scheduler.
    """
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, Mapping) else content
        raise ValueError(f"a policy state of format {found!r}, this code reads {FORMAT}")
    state = object_of(PolicyState, {name: value for name, value in content.items() if name != "format"}, "state")
    assert isinstance(state, PolicyState)
    return state


def packed(head: str, plain: bytes) -> str:
    """Pack a content as one text, with its name and a check sum."""
    return f"{head} {hashlib.sha256(plain).hexdigest()} {base64.b64encode(zlib.compress(plain, 6)).decode()}"


def unpacked(head: str, text: str, what: str) -> bytes:
    """Read what :func:`packed` wrote.

    Raises ``ValueError`` if it has another name, or is damaged; ``what`` is what errors call it.
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
    return plain
