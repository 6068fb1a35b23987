"""The history features in plain, slow Python: one unit, one decision time, one column."""

import math
from datetime import timedelta

import pandas as pd

from features.config import LabelSection
from features.groups.domains import AGE_STEP, HALF_LIFE
from features.groups.history import RECENCY_HALF_LIFE
from features.labels.evidence import IncidentEvidence
from features.labels.incidents import known_onsets
from tests.features import oracle
from tests.features.builders import at

GROUPS = {"48": "xid_memory", "79": "xid_bus", "74": "xid_interconnect", "149": "xid_interconnect",
          "63": "xid_precursor", "31": "xid_app", "46": "xid_watch"}  # fmt: skip


def kinds_of(row):
    kind = row["type"]
    if kind == "xid":
        return {GROUPS[row["code"]]} | ({"xid_hardware"} if row["code"] != "31" else set())
    out = {kind} & {"failure", "driver"}
    if oracle.is_end(row):
        out.add("repair")
    if kind == "diagnostic" and row["code"] == "failed":
        out.add("diagnostic_failed")
    return out


def place(unit, time, gpus):
    """Node and slot that a unit was last put in."""
    installations = [row for row in oracle.stays_of(unit, gpus) if row["installed_at"] <= time] if unit else []
    return (installations[-1]["node"], installations[-1]["slot"]) if installations else None


def facts_of(events: pd.DataFrame, inventory: pd.DataFrame, labels: LabelSection) -> list[tuple]:
    """(kinds, time, from when until when it counts, unit, node, xid) of events and onsets.

    What an onset is, is another oracle's matter.
    """
    records, gpus = oracle.records(events), oracle.records(inventory)
    moments = sorted({oracle.known(row) for row in records if row["type"] == "maintenance"})

    def until(unit, node, time, known):
        later = [known, *(moment for moment in moments if moment > known)]
        visible = (r for r in later if oracle.in_maintenance(unit, time, records, gpus, r, node=node))
        return next(visible, oracle.FOR_EVER)

    def fact(kinds, time, known, unit, node, xid, planned_counts):
        here = oracle.FOR_EVER if planned_counts else until(unit, node, time, known)
        return kinds, time, (known, here), unit, node, xid

    out = [
        fact(
            kinds_of(r), r["timestamp"], oracle.known(r), r["gpu"], r["node"],
            r["code"] if r["type"] == "xid" else None, r["type"] in ("repair", "replacement", "driver"),
        )
        for r in records
    ]  # fmt: skip
    onsets = oracle.records(known_onsets(IncidentEvidence.of(events, inventory, labels)))
    return out + [fact({"incident"}, r["timestamp"], r["known_at"], r["unit"], r["node"], None, False) for r in onsets]


def counts(span, t):
    """Whether a fact is known at a time, and was not yet known to be of a planned maintenance."""
    return span[0] <= t < span[1]


def domain_of(scope, row, t):
    """What an installation's unit shares with others at a time, by the name of the scope; None: nothing."""
    if scope == "fleet":
        return "all"
    if scope == "age":
        return (t - row["first"]) // AGE_STEP
    return (row["node"], row["slot"]) if scope == "node_slot" else int(row["unit"][1:]) // 2


def exposure(scope, domain, installations, since, t, weight=lambda begin, end: (end - begin) / timedelta(days=1)):
    """Days in service of a domain's units in (since, t], installation by installation."""
    total = 0.0
    for row in installations:
        begin, end = max(since, row["installed_at"]), min(t, row["removed_at"] or t)
        if scope == "age":
            begin = max(begin, row["first"] + domain * AGE_STEP)
            end = min(end, row["first"] + (domain + 1) * AGE_STEP)
        elif domain_of(scope, row, t) != domain:
            continue
        total += weight(begin, end) if begin < end else 0.0
    return total


def plain_domain(column, t, unit, facts, gpus):
    """Compute a domain's column."""
    installations = [dict(row, unit=row["gpu"]) for row in gpus if row["installed_at"] <= t]
    for row in installations:
        row["first"] = min(other["installed_at"] for other in installations if other["unit"] == row["unit"])

    def stay_of(name, time):
        installed = [row for row in installations if row["unit"] == name and row["installed_at"] <= time]
        return max(installed, key=lambda row: row["installed_at"]) if installed else None

    def ages(scope, domain):
        """Of each kind, how long ago."""
        for kinds, time, known, gpu, _, _ in facts:
            row = stay_of(gpu, time) if counts(known, t) else None
            if row is not None and domain_of(scope, row, time) == domain:
                yield from ((kind, t - time) for kind in kinds)

    def counted(scope, domain):
        return sum(kind == column.channel and age < column.window for kind, age in ages(scope, domain))

    own_stay = stay_of(unit, t)
    if own_stay is None:
        return math.nan
    domain = domain_of(column.scope, own_stay, t)
    incidents = [age for kind, age in ages(column.scope, domain) if kind == "incident"]
    if column.statistic == "since":
        return min(incidents) / timedelta(hours=1) if incidents else math.nan
    if column.statistic == "recency_rate":
        weight = sum(0.5 ** (age / HALF_LIFE) for age in incidents)

        def faded(begin, end):  # the integral of 0.5 to the power of half-lives since
            old, new = (0.5 ** ((t - instant) / HALF_LIFE) for instant in (begin, end))
            return (new - old) * (HALF_LIFE / timedelta(days=1)) / math.log(2)

        return 1000 * weight / (exposure(column.scope, domain, installations, at(days=-100), t, faded) or 1.0)
    lived = exposure(column.scope, domain, installations, t - column.window, t)
    count = counted(column.scope, domain)
    if column.statistic == "rate":
        return 1000 * count / lived if lived else math.nan
    fleet_rate = counted("fleet", "all") / exposure("fleet", "all", installations, t - column.window, t)
    return (count + 1) / (fleet_rate * lived + 1)


def plain_value(column, t, unit, node, facts, gpus):
    """Compute a column's value from the facts and the inventory's records."""
    if column.scope not in ("gpu", "slot", "node"):
        return plain_domain(column, t, unit, facts, gpus)
    here = place(unit, t, gpus)
    values = []
    for kinds, time, known, gpu, where, xid in facts:
        if not counts(known, t):
            continue
        own_events = {
            "gpu": gpu == unit and place(gpu, time, gpus) is not None,
            "slot": gpu is not None and here is not None and place(gpu, time, gpus) == here,
            "node": where == node,
        }[column.scope]
        if own_events:
            values.append((kinds, time, xid))
    ages = [t - time for kinds, time, _ in values if column.channel in kinds]
    if column.statistic == "count":
        return float(sum(age < column.window for age in ages))
    if column.statistic == "since":
        return min(ages) / timedelta(hours=1) if ages else math.nan
    if column.statistic == "recency":
        return sum(0.5 ** (age / RECENCY_HALF_LIFE) for age in ages)
    return float(len({xid for _, time, xid in values if xid is not None and t - time < column.window}))
