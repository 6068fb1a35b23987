"""Hard rules: reported faults that set a node's tier without the model, their validity, and their remedies."""

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
"""Facts without a rule: a remedy was carried out on the drained node, and the diagnostic passed."""

_DAY = timedelta(days=1)


@checked(frozen=True, slots=True)
class HardRule:
    """Rule for one fact.

    ``tier``: minimum tier of the node, regardless of its risk.
    ``holds``: validity after the fact was last seen.
    ``description``: text of the fact in reasons.
    ``event``: whether the fact is a one-time event, not a state that is read repeatedly.
    ``remedy``: recovery action. Faults that a reset or reboot clears also end with any boot of the node, and when the
    driver withdraws its request.
    """

    fact: str
    tier: Literal["watch", "elevated", "high"]
    holds: PositiveTime
    description: str
    event: bool = False
    remedy: Remedy = "replace"


RULES: tuple[HardRule, ...] = (
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
action (NVML field 230, as announced by XID 154). The validities are our choice, for nodes whose remedy is not reported:
a state (recovery action) is read repeatedly, so a day suffices; an event is reported once."""

REPORTED = ("timestamp", "node", "gpu", "type", "code", "detail", "known_at")
"""Columns of events that :func:`reported` reads."""

REPAIRS = ("repair", "replacement")
"""Event types that void earlier reports about a unit."""

KINDS = ("xid", "diagnostic", *REPAIRS)
"""Event types of units that :func:`reported` uses."""

BOOT = ("other", "boot")
"""Type and code of node events that :func:`reported` uses."""

_RECOVERY = re.compile(r"recovery action\b[^(]*\((0x[0-9a-f]+)\)", re.IGNORECASE)
_ACTIONS = {1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_and_reset"}
"""Recovery actions by number (NVML's nvmlDeviceGpuRecoveryAction_t); 0 withdraws the request."""

_FACT = re.compile(rf"xid [1-9][0-9]*|recovery_action ({'|'.join(_ACTIONS.values())})|diagnostic_failed")


@checked(frozen=True, slots=True)
class HardRulesConfig:
    """Settings of hard rules.

    ``rules``: at most one per fact; ``holds``: validity after the fact was last seen.
    ``repeat``: a fault that recurs within this time after a reset or reboot requires a replacement.
    """

    rules: tuple[HardRule, ...] = RULES
    repeat: PositiveTime = 7 * _DAY

    def __post_init__(self) -> None:
        names = [rule.fact for rule in self.rules]
        if unknown := sorted({name for name in names if not _FACT.fullmatch(name)}):
            raise ValueError(
                f"rules names facts that nothing reports: {', '.join(unknown)}: give `xid NUMBER`, `recovery_action "
                f"NAME` ({', '.join(_ACTIONS.values())}) or `diagnostic_failed`"
            )
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"rules has more than one rule on {', '.join(repeated)}: give one rule per fact")

    @property
    def xids(self) -> frozenset[str]:
        """XID codes that :func:`reported` uses."""
        return frozenset({"154", *(rule.fact.removeprefix("xid ") for rule in self.rules if rule.fact[:4] == "xid ")})

    @property
    def max_hold(self) -> timedelta:
        """Maximum age of a relevant report: the longest validity of any rule."""
        return max((rule.holds for rule in self.rules), default=timedelta(0))


Reported = tuple[tuple[Fact, ...], datetime | None]
"""Facts of a unit, and the time before which its facts are void."""

DEFAULT_RULES = HardRulesConfig()


def reported(
    rows: Iterable[Mapping[str, Any]], now: datetime, rules: HardRulesConfig = DEFAULT_RULES
) -> dict[str, Reported]:
    """Return for each unit the facts from events known by ``now``, and the time before which facts are void.

    ``rows``: events of units, boots and repairs of nodes, with :data:`REPORTED` and, for repeated events, ``last_at``.

    An ``xid`` event becomes the fact ``xid CODE`` if a rule names it, a ``diagnostic`` with code ``fail`` becomes
    ``diagnostic_failed``; a passed diagnostic, a repair or a replacement voids earlier facts. The latest XID 154 that
    names a recovery action becomes ``recovery_action NAME``, unless the request was withdrawn. A repair of a node that
    names no GPU voids earlier facts of all its GPUs; it is also returned under the node's name, for units without
    other reports. Faults that a reset or reboot clears end with the next boot, or when a request is withdrawn. Repeated
    events were last seen at ``last_at``, or at their start if that is in the future.
    """
    facts: defaultdict[str, dict[tuple[str, datetime], Fact]] = defaultdict(dict)
    void: dict[str, datetime] = {}
    requested: dict[str, Fact] = {}
    known = tuple(_known(rows, now))
    names, oldest = {rule.fact for rule in rules.rules}, now - rules.max_hold
    curable = {rule.fact for rule in rules.rules if rule.remedy in ("reset", "reboot")}
    cured = _cured(known)
    for row, seen_at, code in known:
        unit, kind = row["gpu"], row["type"]
        if unit is None:
            if kind in REPAIRS:  # unknown GPU: applies to every GPU of the node
                void[row["node"]] = max(void.get(row["node"], seen_at), seen_at)
            continue
        if kind == "xid" and code == "154":
            action = _RECOVERY.search(row["detail"] or "")
            if action is not None and (unit not in requested or requested[unit].seen_at <= seen_at):
                requested[unit] = Fact(f"recovery_action {_ACTIONS.get(int(action[1], 16), '')}", seen_at)
        name = f"xid {code}" if kind == "xid" else "diagnostic_failed"
        if name in names and (kind == "xid" or (kind == "diagnostic" and code == "fail")):
            minute = seen_at.replace(second=0, microsecond=0)  # at most one a minute
            earlier = facts[unit].get((name, minute))
            if seen_at > oldest and (earlier is None or earlier.seen_at < seen_at):
                facts[unit][name, minute] = Fact(name, seen_at)
        elif kind in REPAIRS or (kind == "diagnostic" and code == "pass"):
            void[unit] = max(void.get(unit, seen_at), seen_at)
    for unit, fact in requested.items():
        if fact.name in names and fact.seen_at > oldest:
            facts[unit][fact.name, fact.seen_at] = fact
    homes = {row["gpu"]: row["node"] for row, _, _ in known}
    result: dict[str, Reported] = {}
    for unit in sorted({*facts, *void}):
        ends = [end for key in (unit, (homes.get(unit, unit),)) if (end := cured.get(key)) is not None]
        end = max(ends, default=None)
        facts_left = tuple(
            fact for fact in facts[unit].values() if end is None or fact.name not in curable or fact.seen_at >= end
        )
        repaired = max((time for time in (void.get(unit), void.get(homes.get(unit, ""))) if time), default=None)
        if facts_left or repaired is not None:
            result[unit] = facts_left, repaired
    return result


_Known = tuple[Mapping[str, Any], datetime, str]


def _known(rows: Iterable[Mapping[str, Any]], now: datetime) -> Iterator[_Known]:
    """Yield the events known by ``now``, with the time when they were last seen, and their code."""
    for row in rows:
        seen_at, last_at = row["timestamp"], row.get("last_at")
        if row["known_at"] <= now and seen_at <= now:
            last = last_at if last_at is not None and seen_at < last_at <= now else seen_at
            yield row, last, (row["code"] or "").strip().lower()


def _cured(known: Iterable[_Known]) -> dict[str | tuple[str], datetime]:
    """Return the time until which resettable faults are cleared, by unit name, or by node name in a 1-tuple."""
    ends: dict[str | tuple[str], datetime] = {}
    for row, seen_at, code in known:
        key: str | tuple[str] | None = (row["node"],) if (row["type"], code) == BOOT else None
        if row["gpu"] is not None and row["type"] == "xid" and code == "154":
            action = _RECOVERY.search(row["detail"] or "")
            key = row["gpu"] if action is not None and int(action[1], 16) == 0 else key
        if key is not None:
            ends[key] = max(ends.get(key, seen_at), seen_at)
    return ends


@dataclass(frozen=True, slots=True)
class RuleHit:
    """A rule that currently applies to a node."""

    unit: str
    rule: HardRule
    seen_at: datetime
    expires_at: datetime

    @property
    def reason(self) -> str:
        """Description with unit, remedy, time seen and expiry."""
        seen_at, end = (f"{instant:%Y-%m-%d %H:%M} UTC" for instant in (self.seen_at, self.expires_at))
        remedy = INSTRUCTIONS[self.rule.remedy]
        return f"{self.unit}: {self.rule.description} (seen {seen_at}, valid until {end}; remedy: {remedy})"


def hits_of(node: NodeView, config: HardRulesConfig, now: datetime) -> Iterator[RuleHit]:
    """Yield a hit for every valid fact of a node that has a rule.

    Facts from before the unit's ``valid_from``, and from the future (a wrong clock), are ignored.
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
    """Return the hits on a node, one per unit and rule (the latest), most severe first."""
    newest = sorted(hits_of(node, config, now), key=lambda hit: hit.seen_at)
    if not newest:
        return ()
    hits = {(hit.unit, hit.rule.fact): hit for hit in newest}

    def worst_first(hit: RuleHit) -> tuple[int, float, str, str]:
        return -TIERS.index(hit.rule.tier), -hit.expires_at.timestamp(), hit.unit, hit.rule.fact

    return tuple(sorted(hits.values(), key=worst_first))
