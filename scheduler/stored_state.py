"""The safety state as one text that a scheduler can keep: JSON, packed, with a check sum."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib

from policy.state import PolicyState

LONGEST = 900_000
"""Characters. A Kubernetes object holds 1.5 MiB at most (etcd's request limit), a ConfigMap 1 MiB of data."""

_HEAD = "predrain-state 1"
_LARGEST = 64 * 2**20


def state_text(state: PolicyState) -> str:
    """Write a state.

    Raises
    ------
    ValueError
        If it is longer than a scheduler keeps.
    """
    plain = json.dumps(state.to_json(), sort_keys=True, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(plain, 6)).decode()
    text = f"{_HEAD} {hashlib.sha256(plain).hexdigest()} {packed}"
    if len(text) > LONGEST:
        raise ValueError(f"the safety state has {len(text)} characters, {LONGEST} fit: lower policy.forget")
    return text


def state_of(text: str) -> PolicyState:
    """Read what :func:`state_text` wrote.

    Raises
    ------
    ValueError
        If it is damaged or of another format. Whoever reads it then begins with an empty state and says so.
    """
    head, _, rest = text.rpartition(" ")
    name, _, digest = head.rpartition(" ")
    if name != _HEAD:
        raise ValueError(f"the safety state begins with {text[:24]!r}, expected {_HEAD!r}")
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(base64.b64decode(rest, validate=True), _LARGEST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"the safety state is damaged: {error}") from None
    if unpacker.unconsumed_tail or not unpacker.eof or hashlib.sha256(plain).hexdigest() != digest:
        raise ValueError("the safety state is damaged: its check sum does not fit")
    return PolicyState.from_json(json.loads(plain))
