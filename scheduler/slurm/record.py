"""What we remember on a node itself: a flat JSON object among whatever else its ``extra`` holds."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, cast

from policy.fleet import Level, Published
from policy.plan import Action
from policy.tiers import TIERS, Tier
from scheduler.ports.codec import object_of, plain_of
from scheduler.slurm.settings import HIGHEST_WEIGHT
from telemetry.collect.slurm.nodes import OWN_PREFIX

KEY: Final = "predrain"
_RECORD = re.compile(r'"predrain"\s*:\s*(?P<record>\{[^{}]*\})')
_ALONE: Final = "alone"


class DamagedRecordError(ValueError):
    """The node's extra names us, and what it says there cannot be read: somebody else edited it."""


@dataclass(frozen=True, slots=True)
class Record:
    """What we put on a node, since when and until when.

    ``level``: what we put on; where less stands before ``until``, a person took it off.
    ``since``: when we took the node out of service.
    ``weight``, ``soft``: the weight that we found, and the one that we set; None: no soft mark.
    ``reason``: digest of the reason that we wrote: one that was edited is not ours any more.
    """

    tier: Tier
    risk: float | None
    until: datetime
    level: Level
    since: datetime | None = None
    drain_at: datetime | None = None
    weight: int | None = None
    soft: int | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        for weight in (self.weight, self.soft):
            if weight is not None and not 0 <= weight <= HIGHEST_WEIGHT:
                raise ValueError(f"a weight is {weight}")


def digest_of(reason: str) -> str:
    """Give the digest of a reason that stands in a record."""
    return hashlib.sha256(reason.encode()).hexdigest()[:12]


def record_in(extra: str) -> Record | None:
    """Read our record; None: there is none.

    Raises ``DamagedRecordError`` if there is something of ours that cannot be read.
    """
    found = list(_RECORD.finditer(extra))
    if not found:
        if f'"{KEY}"' in extra:
            raise DamagedRecordError(f"extra holds {KEY!r}, and no record of ours")
        return None
    if len(found) > 1 or extra.count(f'"{KEY}"') > 1:
        raise DamagedRecordError(f"extra holds {KEY!r} twice")
    try:
        content = {"risk": None} | json.loads(found[0]["record"])
        content.pop(_ALONE, None)
        return cast(Record, object_of(Record, content, "it"))
    except ValueError as error:
        raise DamagedRecordError(f"our record in extra cannot be read: {error}") from None


def with_record(extra: str, record: Record | None) -> str:
    """Put our record into an ``extra``, or take it out; all else in it stays as it is, to the letter.

    ``extra``: an object of JSON gets one more key (Slurm can filter nodes by such an ``extra``), any other text gets an
    object after it.
    ``record``: None: it is taken out.
    Raises ``DamagedRecordError`` as :func:`record_in`.
    """
    standing = record_in(extra)
    found = _RECORD.search(extra)
    if found is not None and standing is not None:
        if record is not None:
            alone = {_ALONE: 1} if _ALONE in json.loads(found["record"]) else {}
            return extra[: found.start("record")] + _text(record, alone) + extra[found.end() :]
        return _without(extra, found)
    if record is None:
        return extra
    if not extra:
        return f'{{"{KEY}":{_text(record, {_ALONE: 1})}}}'
    if _is_object(extra):
        end = extra.rindex("}")
        comma = "" if not json.loads(extra) else ","
        return f'{extra[:end]}{comma}"{KEY}":{_text(record, {})}{extra[end:]}'
    return f'{extra} {{"{KEY}":{_text(record, {_ALONE: 1})}}}'


def _without(extra: str, found: re.Match[str]) -> str:
    before, after = extra[: found.start()], extra[found.end() :]
    if _ALONE in json.loads(found["record"]) and before.rstrip().endswith("{") and after.lstrip().startswith("}"):
        left = before[: before.rindex("{")]  # the braces around it are ours too
        return left.removesuffix(" ") + after[after.index("}") + 1 :]
    if before.rstrip().endswith(","):
        return before[: before.rindex(",")] + after
    return before + (after.lstrip()[1:] if after.lstrip().startswith(",") else after)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _text(record: Record, more: dict[str, int]) -> str:
    content = plain_of(replace(record, risk=None if record.risk is None else round(record.risk, 6)))
    return json.dumps({k: v for k, v in content.items() if v is not None} | more, separators=(",", ":"))


LONGEST: Final = 240
_OURS = re.compile(
    r"predrain: tier=(?P<tier>[a-z]+) risk=(?P<risk>unknown|[0-9.]{1,10}) "
    r"until=(?P<until>\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z)(?P<words>; [^\"\\]+)?"
)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\"\\]+")


def reason_for(action: Action, until: datetime) -> str:
    """Write the reason of an action: tier, risk, end, and the weightiest of its reasons in words.

    The end is rounded up to whole seconds. ``scontrol`` takes quotation marks off the ends of a reason, so that none
    is written.
    """
    until += timedelta(microseconds=-until.microsecond % 1_000_000)
    risk = "unknown" if action.risk is None else f"{action.risk:.4f}"
    text = f"{OWN_PREFIX} tier={action.tier} risk={risk} until={until.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    words = " ".join(_UNSAFE.sub(" ", action.reasons[0]).split()) if action.reasons else ""
    return f"{text}; {words}"[:LONGEST].rstrip() if words else text


def read_reason(reason: str | None) -> Published | None:
    """Read a reason; None where it is not one that we wrote, also if it only begins like one."""
    found = _OURS.fullmatch(reason or "")
    if found is None or found["tier"] not in TIERS:
        return None
    try:
        return Published(found["tier"], datetime.fromisoformat(found["until"]))
    except ValueError:
        return None
