"""What we remember on a node itself: a flat JSON object among whatever else its ``extra`` holds."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, get_args

from policy.fleet import Level
from policy.plan import Action
from policy.tiers import TIERS, Tier
from scheduler.slurm.settings import HIGHEST_WEIGHT
from telemetry.collect.slurm.nodes import OWN_PREFIX

KEY: Final = "predrain"
_RECORD = re.compile(r'"predrain"\s*:\s*(?P<record>\{[^{}]*\})')
_ALONE: Final = "alone"
_WHOLE: Final = frozenset({"tier", "until", "level"})


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
        return _record(json.loads(found[0]["record"]))
    except (ValueError, TypeError, KeyError) as error:
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
    content: dict[str, Any] = {
        "tier": record.tier,
        "risk": None if record.risk is None else round(record.risk, 6),
        "until": _written(record.until),
        "level": record.level.name.lower(),
        "since": _written(record.since),
        "drain_at": _written(record.drain_at),
        "weight": record.weight,
        "soft": record.soft,
        "reason": record.reason,
    }
    return json.dumps({k: v for k, v in content.items() if v is not None} | more, separators=(",", ":"))


def _record(content: dict[str, Any]) -> Record:
    lacking = _WHOLE - content.keys()
    if lacking:
        raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    if content["tier"] not in get_args(Tier):
        raise ValueError(f"tier is {content['tier']!r}")
    made = Record(
        content["tier"],
        None if content.get("risk") is None else float(content["risk"]),
        _read(content["until"]),
        Level[str(content["level"]).upper()],
    )
    reason = content.get("reason")
    if reason is not None and not isinstance(reason, str):
        raise ValueError(f"reason is {reason!r}")
    since, drain_at = (_read(content[name]) if name in content else None for name in ("since", "drain_at"))
    weight, soft = (_weight(content.get(name)) for name in ("weight", "soft"))
    return replace(made, since=since, drain_at=drain_at, weight=weight, soft=soft, reason=reason)


def _weight(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= HIGHEST_WEIGHT):
        return value
    raise ValueError(f"a weight is {value!r}")


def _written(when: datetime | None) -> str | None:
    return None if when is None else when.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _read(text: object) -> datetime:
    when = datetime.fromisoformat(str(text))
    if when.tzinfo is None:
        raise ValueError(f"{text!r} has no zone")
    return when


PREFIX: Final = OWN_PREFIX
"""By it the collector of Slurm's events knows our drains from others."""

LONGEST: Final = 240
_OURS = re.compile(
    r"predrain: tier=(?P<tier>[a-z]+) risk=(?P<risk>unknown|[0-9.]{1,10}) "
    r"until=(?P<until>\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z)(?P<words>; [^\"\\]+)?"
)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\"\\]+")


@dataclass(frozen=True, slots=True)
class OurReason:
    """What a reason of ours says."""

    tier: Tier
    until: datetime


def reason_for(action: Action, until: datetime) -> str:
    """Write the reason of an action: tier, risk, end, and the weightiest of its reasons in words.

    The end is rounded up to whole seconds. ``scontrol`` takes quotation marks off the ends of a reason, so that none
    is written.
    """
    until += timedelta(microseconds=-until.microsecond % 1_000_000)
    risk = "unknown" if action.risk is None else f"{action.risk:.4f}"
    text = f"{PREFIX} tier={action.tier} risk={risk} until={until.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    words = " ".join(_UNSAFE.sub(" ", action.reasons[0]).split()) if action.reasons else ""
    return f"{text}; {words}"[:LONGEST].rstrip() if words else text


def read_reason(reason: str | None) -> OurReason | None:
    """Read a reason; None where it is not one that we wrote, also if it only begins like one."""
    found = _OURS.fullmatch(reason or "")
    if found is None:
        return None
    tier = next((each for each in TIERS if each == found["tier"]), None)
    try:
        until = datetime.fromisoformat(found["until"])
    except ValueError:
        return None
    return None if tier is None else OurReason(tier, until)
