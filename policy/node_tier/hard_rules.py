"""Hard rules: which reported faults decide a node's tier without the model, how long they hold, and what ends them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked

from foundation.settings import PositiveTime
from policy.fleet import Fact, NodeView
from policy.ladder.remedies import INSTRUCTIONS, Remedy
from policy.tiers import TIERS

REMEDIED = ("remedied reset", "remedied reboot")
"""Facts that no rule names: a remedy was carried out on the emptied node, and the diagnostic passed."""

_DAY = timedelta(days=1)


@checked(frozen=True, slots=True)
class HardRule:
    """What follows from a fact.

    ``tier``: the tier of the node, regardless of its risk; not ``clear``.
    ``holds``: for how long after the fact was last seen.
    ``description``: the fact, as reasons name it.
    ``event``: whether the fact is something that happened, and not a state that is read again and again.
    ``remedy``: what ends it. A fact that a reset or a reboot ends also ends with any boot of its node, and when the
    driver takes its request back.
    """

    fact: str
    tier: Literal["watch", "elevated", "high"]
    holds: PositiveTime
    description: str
    event: bool = False
    remedy: Remedy = "replace"

    @property
    def ends_with_boot(self) -> bool:
        """Whether a boot of its node ends the fact."""
        return self.remedy in ("reset", "reboot")


RULES: tuple[HardRule, ...] = (
    HardRule("row_remap_failure", "high", _DAY, "row remap failed: no spare memory rows left"),
    HardRule("row_remap_pending", "elevated", _DAY, "row remap pending until the next reset", remedy="reset"),
    HardRule("xid 64", "high", 7 * _DAY, "XID 64: a row remap or page retirement failed", event=True, remedy="reset"),
    HardRule("xid 79", "high", 2 * _DAY, "XID 79: the GPU has fallen off the bus", event=True, remedy="reboot"),
    HardRule("xid 95", "high", _DAY, "XID 95: an uncontained memory error", event=True, remedy="reset"),
    HardRule("recovery_action reset", "high", _DAY, "the driver requests a GPU reset", remedy="reset"),
    HardRule("recovery_action reboot", "high", _DAY, "the driver requests a reboot of the node", remedy="reboot"),
    HardRule(
        "recovery_action drain_p2p",
        "high",
        _DAY,
        "the driver requests a stop of all peer-to-peer traffic of the GPU",
        remedy="reset",
    ),
    HardRule(
        "recovery_action drain_and_reset", "high", _DAY, "the driver requests a drain and a GPU reset", remedy="reset"
    ),
    HardRule("diagnostic_failed", "high", 7 * _DAY, "a diagnostic failed", event=True),
)
"""NVIDIA's XID catalogue (64: reset and support; 79: restart of the machine; 95: reset) and its driver's recovery
action (NVML field 230, also announced by XID 154). A pending remap harms no running work and takes effect at the next
reset, so it only keeps new work away. After a reset that did not help, ``row_remap_failure`` is still read, and asks
for a replacement. The lengths are ours, for nodes whose remedy no one reports: a state (remap, recovery action) is read
again and again and needs no more than a day; an event speaks once."""

REPORTED = ("timestamp", "node", "gpu", "type", "code", "detail", "known_at")
"""What :func:`reported` reads of an event."""

REPAIRS = ("repair", "replacement")
"""Types of events that void earlier reports about a unit."""

KINDS = ("xid", "diagnostic", *REPAIRS)
"""Types of events of units that it looks at."""

BOOT = ("other", "boot")
"""Type and code of the events of nodes that it looks at."""

XIDS = frozenset(rule.fact.removeprefix("xid ") for rule in RULES if rule.fact.startswith("xid ")) | {"154"}
"""Codes of the XIDs that it looks at."""

LONGEST = max(rule.holds for rule in RULES)
"""Longest age of a report that can matter: no rule holds for longer."""

_NAMES = frozenset(rule.fact for rule in RULES)
_CURED = frozenset(rule.fact for rule in RULES if rule.ends_with_boot)
_RECOVERY = re.compile(r"recovery action\b[^(]*\((0x[0-9a-f]+)\)", re.IGNORECASE)
_ACTIONS = {1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_and_reset"}
"""What the driver may ask for, by NVML's numbers (nvmlDeviceGpuRecoveryAction_t); 0 takes it back."""


def reported(rows: Iterable[Mapping[str, Any]], now: datetime) -> dict[str, tuple[tuple[Fact, ...], datetime | None]]:
    """Give what events say of each unit that was known at a time: facts, and since when what was before is void.

    ``rows``: events of units, boots and repairs of nodes, with :data:`REPORTED` and, of a run of events, ``last_at``.

    An ``xid`` event is the fact ``xid CODE`` where a rule names it, a ``diagnostic`` of code ``fail`` is
    ``diagnostic_failed``; one of code ``pass``, a repair and a replacement void what was before them. The newest
    XID 154 that names a recovery action is the fact ``recovery_action NAME``, or none where the action was taken back.
    A repair of a node that names no GPU voids what was before it of each GPU there; the result has it under the node's
    name, too, for units without other reports.
    What a reset or a restart cures ends with the next boot of its node, and where an action was taken back.
    A run of events was seen last at its ``last_at``, and at its beginning where that lies in the future.
    """
    facts: defaultdict[str, dict[tuple[str, datetime], Fact]] = defaultdict(dict)
    void: dict[str, datetime] = {}
    requested: dict[str, Fact] = {}
    known = tuple(_known(rows, now))
    cured = _cured(known)
    for row, seen_at, code in known:
        unit, kind = row["gpu"], row["type"]
        if unit is None:
            if kind in REPAIRS:  # which GPU is not known: it is over for each on the node
                void[row["node"]] = max(void.get(row["node"], seen_at), seen_at)
            continue
        if kind == "xid" and code == "154":
            action = _RECOVERY.search(row["detail"] or "")
            if action is not None and (unit not in requested or requested[unit].seen_at <= seen_at):
                requested[unit] = Fact(f"recovery_action {_ACTIONS.get(int(action[1], 16), '')}", seen_at)
        name = f"xid {code}" if kind == "xid" else "diagnostic_failed"
        if name in _NAMES and (kind == "xid" or (kind == "diagnostic" and code == "fail")):
            minute = seen_at.replace(second=0, microsecond=0)  # of a flood, one a minute
            earlier = facts[unit].get((name, minute))
            if seen_at > now - LONGEST and (earlier is None or earlier.seen_at < seen_at):
                facts[unit][name, minute] = Fact(name, seen_at)
        elif kind in REPAIRS or (kind == "diagnostic" and code == "pass"):
            void[unit] = max(void.get(unit, seen_at), seen_at)
    for unit, fact in requested.items():
        if fact.name in _NAMES and fact.seen_at > now - LONGEST:
            facts[unit][fact.name, fact.seen_at] = fact
    homes = {row["gpu"]: row["node"] for row, _, _ in known}
    result: dict[str, tuple[tuple[Fact, ...], datetime | None]] = {}
    for unit in sorted({*facts, *void}):
        ends = [end for key in (unit, (homes.get(unit, unit),)) if (end := cured.get(key)) is not None]
        end = max(ends, default=None)
        facts_left = tuple(
            fact for fact in facts[unit].values() if end is None or fact.name not in _CURED or fact.seen_at >= end
        )
        repaired = max((time for time in (void.get(unit), void.get(homes.get(unit, ""))) if time), default=None)
        if facts_left or repaired is not None:
            result[unit] = facts_left, repaired
    return result


_Known = tuple[Mapping[str, Any], datetime, str]


def _known(rows: Iterable[Mapping[str, Any]], now: datetime) -> Iterator[_Known]:
    """Give the events that were known at a time, each with when it was last seen and its code."""
    for row in rows:
        seen_at, last_at = row["timestamp"], row.get("last_at")
        if row["known_at"] <= now and seen_at <= now:
            last = last_at if last_at is not None and seen_at < last_at <= now else seen_at
            yield row, last, (row["code"] or "").strip().lower()


def _cured(known: Iterable[_Known]) -> dict[str | tuple[str], datetime]:
    """Give until when what a restart or reset cures has ended: by the name of a unit, and of a node in a tuple."""
    ends: dict[str | tuple[str], datetime] = {}
    for row, seen_at, code in known:
        key: str | tuple[str] | None = (row["node"],) if (row["type"], code) == BOOT else None
        if row["gpu"] is not None and row["type"] == "xid" and code == "154":
            action = _RECOVERY.search(row["detail"] or "")
            key = row["gpu"] if action is not None and int(action[1], 16) == 0 else key
        if key is not None:
            ends[key] = max(ends.get(key, seen_at), seen_at)
    return ends


@checked(frozen=True, slots=True)
class HardRulesConfig:
    """Which rules apply.

    ``rules``: each fact at most once.
    ``repeat``: a fault that a reset or a reboot ended, and that is back within this time, asks for a replacement.
    """

    rules: tuple[HardRule, ...] = RULES
    repeat: PositiveTime = 7 * _DAY

    def __post_init__(self) -> None:
        names = [rule.fact for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"rules holds more than one rule on {', '.join(twice)}: give one rule a fact")


@dataclass(frozen=True, slots=True)
class RuleHit:
    """A rule that holds on a node now."""

    unit: str
    rule: HardRule
    seen_at: datetime
    expires_at: datetime

    @property
    def reason(self) -> str:
        """The rule's reason with the unit, the remedy and both times."""
        seen, end = (f"{when:%Y-%m-%d %H:%M} UTC" for when in (self.seen_at, self.expires_at))
        remedy = INSTRUCTIONS[self.rule.remedy]
        return f"{self.unit}: {self.rule.description} (seen {seen}, valid until {end}; remedy: {remedy})"


def hits_of(node: NodeView, config: HardRulesConfig, now: datetime) -> Iterator[RuleHit]:
    """Give what each fact of a node asks for.

    ``node``: facts that no rule names are passed over, so are those from before a unit's ``valid_from`` and those from
    the future, which only a wrong clock can have seen.
    """
    for unit in node.units:
        for fact in unit.facts:
            rule = next((rule for rule in config.rules if rule.fact == fact.name), None)
            if rule is None or fact.seen_at > now or now >= fact.seen_at + rule.holds:
                continue
            if unit.valid_from is not None and fact.seen_at < unit.valid_from:
                continue
            yield RuleHit(unit.name, rule, fact.seen_at, fact.seen_at + rule.holds)


def rule_hits(node: NodeView, config: HardRulesConfig, now: datetime) -> tuple[RuleHit, ...]:
    """Find the rules that hold on a node, each once, by the newest of its facts."""
    newest = sorted(hits_of(node, config, now), key=lambda hit: hit.seen_at)
    if not newest:
        return ()
    hits = {(hit.unit, hit.rule.fact): hit for hit in newest}

    def worst_first(hit: RuleHit) -> tuple[int, float, str, str]:
        return -TIERS.index(hit.rule.tier), -hit.expires_at.timestamp(), hit.unit, hit.rule.fact

    return tuple(sorted(hits.values(), key=worst_first))
