"""Ownership of markers under predrain's keys on a node: one rule for every scheduler.

Anyone can write a reason, taint or label in predrain's format, edit one of predrain's, or copy it to another node, so
the format proves nothing. Along with its markers predrain writes a record to the node, with a digest of each marker,
sealed with the node's name. predrain owns a marker only while the record is valid and the marker matches it exactly.
All other markers under its keys are foreign: they are reported, and never overwritten or removed.

A marker without a record has no owner, so the record is written no later than its markers, and removed after them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, cast

from policy.fleet import Level
from policy.tiers import Tier
from scheduler.ports.codec import object_of, plain_of

MAX_TRIES: Final = 2
"""How often a marker is set that another client removes immediately."""

_SEAL: Final = "seal"
_OWNER: Final = "owner"


class DamagedRecordError(ValueError):
    """The record on a node is not as this installation wrote it, so it owns nothing on the node.

    ``advice``: what an operator should do; empty: nothing.
    """

    advice = "remove it by hand"


class OtherInstallationError(DamagedRecordError):
    """The node has a valid record of another installation of predrain."""

    advice = ""


@dataclass(frozen=True, slots=True)
class OwnershipRecord:
    """Record of predrain's markers on a node, and their expiry.

    ``level``: the highest marker; if the actual level is lower before ``until``, another client removed one.
    ``since``: when the node was taken out of service.
    ``refused``: how often the marker was dropped while it was set; on Slurm, how often the soft marker was restored
    since its weight was last found intact.
    ``weight``, ``soft``: Slurm: the weight before the soft marker, and with it.
    """

    tier: Tier
    risk: float | None
    until: datetime
    level: Level
    marks: Mapping[str, str] = field(default_factory=dict)
    set_at: datetime | None = None
    since: datetime | None = None
    drain_at: datetime | None = None
    refused: int = 0
    weight: int | None = None
    soft: int | None = None

    def with_mark(self, name: str, content: str) -> "OwnershipRecord":
        """Return the record with a marker added or replaced."""
        return replace(self, marks={**self.marks, name: digest_of(content)})

    def without(self, *names: str) -> "OwnershipRecord":
        """Return the record without these markers."""
        return replace(self, marks={name: digest for name, digest in self.marks.items() if name not in names})

    def matches(self, name: str, content: str) -> bool:
        """Whether a marker is exactly as recorded."""
        return self.marks.get(name) == digest_of(content)


def digest_of(content: str) -> str:
    """Return the digest of a marker for the record."""
    # 48 bits detect edits and copies and keep the record short, which Slurm stores in the node's `extra`. There is no
    # secret: whoever can write the record can also drain the node.
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def seal(record: OwnershipRecord, node: str, owner: str) -> dict[str, Any]:
    """Return the record as a sealed JSON object for a node."""
    plain = plain_of(replace(record, risk=None if record.risk is None else round(record.risk, 6)))
    content = {name: value for name, value in plain.items() if value is not None and (name, value) != ("refused", 0)}
    content[_OWNER] = owner
    return {**content, _SEAL: _seal(content, node)}


def unseal(content: object, node: str, owner: str) -> OwnershipRecord:
    """Parse a node's sealed record.

    Raises ``DamagedRecordError`` if it was edited or copied, and ``OtherInstallationError`` if another installation
    wrote it.
    """
    if not isinstance(content, dict):
        raise DamagedRecordError("the record of predrain is not a JSON object")
    plain = {name: value for name, value in content.items() if name != _SEAL}
    if content.get(_SEAL) != _seal(plain, node):
        raise DamagedRecordError("the record of predrain was edited, or copied from another node")
    writer = plain.pop(_OWNER, None)
    if writer != owner:
        raise OtherInstallationError(f"its predrain markers belong to another installation, {writer}")
    try:
        return cast(OwnershipRecord, object_of(OwnershipRecord, {"risk": None} | plain, "the record"))
    except ValueError as error:
        raise DamagedRecordError(f"the record of predrain cannot be read: {error}") from None


def foreign_marks(record: OwnershipRecord | None, present: Mapping[str, str]) -> dict[str, str]:
    """Return the markers under predrain's keys that it does not own, with the reason."""
    foreign: dict[str, str] = {}
    for name, content in present.items():
        if record is None or name not in record.marks:
            foreign[name] = "predrain has no record of it"
        elif not record.matches(name, content):
            foreign[name] = "it was edited since predrain wrote it"
    return foreign


def _seal(content: Mapping[str, Any], node: str) -> str:
    return digest_of(f"{node}\n{json.dumps(content, sort_keys=True, separators=(',', ':'))}")
