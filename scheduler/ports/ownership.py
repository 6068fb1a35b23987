"""Who owns what carries predrain's names on a node: one rule for every scheduler.

Anyone can write a reason, taint or label in predrain's form, edit one that predrain wrote, or copy it to another node,
so form proves nothing. Next to its marks predrain writes a record to the node, with a digest of each mark as written,
sealed with the name of the node. A mark is predrain's while the record is intact and the mark is exactly the recorded
one. All else under predrain's names is somebody else's: it is reported, and never overwritten or removed.

A mark without its record has no owner. So a record is written no later than its marks, and removed after them.
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
"""How often a mark is set that another client removes at once: it would do so again."""

_SEAL: Final = "seal"
_OWNER: Final = "owner"


class DamagedRecordError(ValueError):
    """A node carries a record of predrain that this installation did not write so: nothing on the node is its own.

    ``advice``: what a person has to do about it; empty: nothing.
    """

    advice = "remove it by hand"


class OtherInstallationError(DamagedRecordError):
    """A node carries the intact record of another installation of predrain."""

    advice = ""


@dataclass(frozen=True, slots=True)
class OwnershipRecord:
    """What predrain put on a node, and until when.

    ``level``: the highest mark; if the actual level is lower before ``until``, another client removed it.
    ``marks``: digest of each mark as written, by its name.
    ``set_at``: when the highest mark was set.
    ``since``: when the node was taken out of service.
    ``refused``: how often the mark was removed while it was being set; on Slurm, how often the soft mark was restored
    since the prediction was last renewed.
    ``weight``, ``soft``: Slurm: the weight before the soft mark, and with it.
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
        """Add a mark, or replace it."""
        return replace(self, marks={**self.marks, name: digest_of(content)})

    def without(self, *names: str) -> "OwnershipRecord":
        """Drop marks."""
        return replace(self, marks={name: digest for name, digest in self.marks.items() if name not in names})

    def matches(self, name: str, content: str) -> bool:
        """Whether a mark is exactly the one that was recorded."""
        return self.marks.get(name) == digest_of(content)


def digest_of(content: str) -> str:
    """Return the digest of a mark, as a record holds it."""
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def sealed(record: OwnershipRecord, node: str, owner: str) -> dict[str, Any]:
    """Return an installation's record as the JSON object that is written to a node."""
    plain = plain_of(replace(record, risk=None if record.risk is None else round(record.risk, 6)))
    content = {name: value for name, value in plain.items() if value is not None and (name, value) != ("refused", 0)}
    content[_OWNER] = owner
    return {**content, _SEAL: _seal(content, node)}


def unsealed(content: object, node: str, owner: str) -> OwnershipRecord:
    """Read the record of an installation from a node.

    Raises ``DamagedRecordError`` if it is not exactly as predrain wrote it there, or another installation wrote it.
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
    """Return the marks under predrain's names that are not predrain's, each with the reason why.

    ``present``: the content of each existing mark, by its name.
    """
    foreign: dict[str, str] = {}
    for name, content in present.items():
        if record is None or name not in record.marks:
            foreign[name] = "predrain has no record of it"
        elif not record.matches(name, content):
            foreign[name] = "it was edited since predrain wrote it"
    return foreign


def _seal(content: Mapping[str, Any], node: str) -> str:
    return digest_of(f"{node}\n{json.dumps(content, sort_keys=True, separators=(',', ':'))}")
