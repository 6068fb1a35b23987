"""The reason that we give Slurm for a drain: made so that ours can be told from any other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from policy.plan import Action
from policy.tiers import TIERS, Tier
from telemetry.collect.slurm.nodes import OWN_PREFIX

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
