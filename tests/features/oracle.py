"""Slow, plain readings of the label rules that the fast code is compared with."""

from datetime import datetime, timedelta
from itertools import combinations

import pandas as pd

from features.config import LabelSection

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
DEFAULT = LabelSection()
FOR_EVER = datetime.max.replace(tzinfo=pd.Timestamp(0, tz="UTC").tzinfo)


def records(frame: pd.DataFrame) -> list[dict]:
    """Rows as dicts with plain datetimes and None for null."""
    out = []
    for row in frame.to_dict("records"):
        for key, value in row.items():
            if pd.isna(value):
                row[key] = None
            elif isinstance(value, pd.Timestamp):
                row[key] = value.to_pydatetime()
        out.append(row)
    return out


def known(row: dict) -> datetime:
    """When an event could first be used."""
    return max(row["known_at"], row["timestamp"])


def stays_of(unit: str, inventory: list[dict]) -> list[dict]:
    return sorted((row for row in inventory if row["gpu"] == unit), key=lambda row: row["installed_at"])


def departures(unit: str, inventory: list[dict], r: datetime) -> list[datetime]:
    """When a unit left service for more than an instant, as far as known at r."""
    installations = [row for row in stays_of(unit, inventory) if row["installed_at"] <= r]
    out = []
    for row in installations:
        end = row["removed_at"]
        if end is None or end > r:
            continue
        if not any(
            s is not row and s["installed_at"] <= end and (s["removed_at"] or FOR_EVER) > end for s in installations
        ):
            out.append(end)
    return out


def on_node(unit: str, node: str, time: datetime, inventory: list[dict]) -> bool:
    return any(
        row["node"] == node and row["installed_at"] <= time <= (row["removed_at"] or FOR_EVER)
        for row in stays_of(unit, inventory)
    )


def concerns(row: dict, unit: str, inventory: list[dict]) -> bool:
    """Whether an event names the unit, or its whole node while the unit sat there."""
    if row["gpu"] is not None:
        installations = stays_of(unit, inventory)
        return row["gpu"] == unit and bool(installations) and installations[0]["installed_at"] <= row["timestamp"]
    return on_node(unit, row["node"], row["timestamp"], inventory)


def is_end(row: dict) -> bool:
    return row["type"] in ("repair", "replacement") or (row["type"] == "other" and row["code"] == "reboot")


def is_own(row: dict) -> bool:
    return row["source"].startswith("predrain")


def answers_late(row: dict) -> bool:
    """Whether an event may be the answer to a doubtful error of days ago."""
    if row["code"] in ("reset", "planned"):
        return False
    drained = row["type"] == "drain" and row["code"] == "drain" and not is_own(row)
    return row["type"] in ("repair", "replacement") or drained or (row["type"], row["code"]) == ("diagnostic", "failed")


def signs(
    unit: str, events: list[dict], inventory: list[dict], r: datetime, labels: LabelSection = DEFAULT
) -> list[dict]:
    """Label-worthy events of a unit by the facts known at r, by time."""
    facts = [row for row in events if known(row) <= r and concerns(row, unit, inventory)]
    rows = [row for row in facts if row["gpu"] == unit]
    doubtful = [
        row
        for row in rows
        if row["type"] == "xid" and (row["code"] == "74" or (row["code"] == "149" and " Fatal" in row["detail"]))
    ]
    answers = [row for row in facts if is_tied(row, unit, events, inventory, labels)]
    proofs = [
        row["timestamp"]
        for row in answers
        if is_end(row)
        or row["type"] == "failure"
        or (row["type"], row["code"]) == ("diagnostic", "failed")
        or (row["type"] == "drain" and row["code"] != "release" and not is_own(row))
    ] + departures(unit, inventory, r)
    chosen = [row for row in rows if row["type"] == "failure" or (row["type"] == "xid" and row["code"] in ("48", "79"))]
    for row in doubtful:
        followed = any(timedelta(0) <= proof - row["timestamp"] <= HOUR for proof in proofs)
        other_times = [other["timestamp"] for other in doubtful if other is not row]
        repeated = any(
            max(a, b, row["timestamp"]) - min(a, b, row["timestamp"]) <= DAY for a, b in combinations(other_times, 2)
        )
        if followed or repeated or any(_answered(row, answer, rows, doubtful, labels, r) for answer in answers):
            chosen.append(row)
    return sorted(chosen, key=lambda row: row["timestamp"])


def is_error(row: dict) -> bool:
    """Whether an event speaks of a failure, certain or not."""
    fatal = row["code"] == "149" and " Fatal" in row["detail"]
    return row["type"] == "failure" or (row["type"] == "xid" and (row["code"] in ("48", "79", "74") or fatal))


def is_tied(work: dict, unit: str, events: list[dict], inventory: list[dict], labels: LabelSection) -> bool:
    """Whether a repair may be that of a unit: one of its node alone answers one unit, or those that erred together."""
    if work["gpu"] is not None or work["type"] not in ("repair", "replacement"):
        return True

    def was_there(row: dict) -> bool:
        installations = [
            installation
            for installation in stays_of(row["gpu"], inventory)
            if installation["installed_at"] <= row["timestamp"]
        ]
        return bool(installations) and installations[-1]["node"] == work["node"]

    first = work["timestamp"] - labels.confirm_within
    errors = [row for row in events if row["gpu"] is not None and is_error(row) and known(row) <= known(work)]
    errors = [row for row in errors if first <= row["timestamp"] <= work["timestamp"] and was_there(row)]
    together = {max(errors, key=lambda row: row["timestamp"])["timestamp"]} if errors else set()
    for row in sorted(errors, key=lambda row: row["timestamp"], reverse=True):
        if min(together) - row["timestamp"] <= labels.node_window:
            together.add(row["timestamp"])
    units = {row["gpu"] for row in errors if row["timestamp"] in together}
    return unit in units and units == {row["gpu"] for row in errors}


def _answered(
    row: dict, answer: dict, of_unit: list[dict], doubtful: list[dict], labels: LabelSection, r: datetime
) -> bool:
    """Whether an answer to the doubtful error came, and nothing newer was known by then that it answers instead."""
    first, last = row["timestamp"], answer["timestamp"]
    if not answers_late(answer) or not first <= last <= first + labels.confirm_within:
        return False
    known_at = max(known(row), known(answer) + (DAY if answer["type"] == "drain" else timedelta(0)))
    sure = [e for e in of_unit if e["type"] == "failure" or (e["type"] == "xid" and e["code"] in ("48", "79"))]
    newer = [e for e in sure if e["timestamp"] >= first]
    newer += [e for e in doubtful if e["timestamp"] > first + labels.merge_window]
    return known_at <= r and not any(e["timestamp"] <= last and known(e) <= known_at for e in newer)


def ends(
    unit: str, events: list[dict], inventory: list[dict], r: datetime, labels: LabelSection = DEFAULT
) -> list[datetime]:
    facts = [
        row
        for row in events
        if known(row) <= r
        and concerns(row, unit, inventory)
        and is_end(row)
        and not leaves_another_open(row, unit, events, inventory, labels)
    ]
    return sorted([row["timestamp"] for row in facts] + departures(unit, inventory, r))


def leaves_another_open(
    repair: dict, unit: str, events: list[dict], inventory: list[dict], labels: LabelSection
) -> bool:
    """Whether a repair of one failure of a unit came, when another one was known that nothing had ended."""
    facts = [row for row in events if known(row) <= known(repair) and concerns(row, unit, inventory)]
    failures = [row for row in facts if row["type"] == "failure" and row["gpu"] == unit]

    def repairs(end: dict) -> str | None:
        names = {f["code"] for f in failures if f["timestamp"] <= end["timestamp"] and known(f) <= known(end)}
        names_one = end["type"] == "repair" and end["code"] in names
        return end["code"] if names_one else None

    def is_open(failure: dict) -> bool:
        if not failure["timestamp"] <= repair["timestamp"] < failure["timestamp"] + labels.cooldown:
            return False
        gone = departures(unit, inventory, known(repair))
        stops = [f["timestamp"] for f in facts if is_end(f) and repairs(f) in (None, failure["code"])] + gone
        return not any(failure["timestamp"] <= stop <= repair["timestamp"] for stop in stops)

    return repairs(repair) is not None and any(is_open(failure) for failure in failures)


def in_maintenance(
    unit: str | None, time: datetime, events: list[dict], inventory: list[dict], r: datetime, *, node: str = ""
) -> bool:
    """Whether a unit (None: a whole node) was in a planned maintenance at a time, by what was known at r."""
    maintenance = [row for row in events if row["type"] == "maintenance" and known(row) <= r]
    for row in maintenance:
        if row["code"] == "end" or not row["timestamp"] <= time:
            continue
        if row["code"] == "begin":
            whose = (row["gpu"], row["node"] if row["gpu"] is None else None)
            ends = [
                e["timestamp"]
                for e in maintenance
                if e["code"] == "end" and (e["gpu"], e["node"] if e["gpu"] is None else None) == whose
                and e["timestamp"] >= row["timestamp"] and concerned_ever(e, inventory)
            ]  # fmt: skip
            end = min([row["timestamp"] + timedelta(days=31), *ends])
        else:
            end = datetime.fromisoformat(row["code"])
        here = row["node"] == node if unit is None else on_node(unit, row["node"], time, inventory)
        of_node = row["gpu"] is None and here
        if time < end and (
            of_node or (row["gpu"] is not None and row["gpu"] == unit and concerned_ever(row, inventory))
        ):
            return True
    return False


def concerned_ever(row: dict, inventory: list[dict]) -> bool:
    """Whether an event is dated after its GPU was first installed."""
    return row["gpu"] is None or any(s["installed_at"] <= row["timestamp"] for s in stays_of(row["gpu"], inventory))


def incidents(
    unit: str, events: list[dict], inventory: list[dict], labels: LabelSection, r: datetime, seen_until: datetime
) -> list[tuple[datetime, datetime | None]]:
    """(start, end) of each incident of a unit, by what was known at r."""
    worthy = [row["timestamp"] for row in signs(unit, events, inventory, r, labels)]
    stops = ends(unit, events, inventory, r, labels)
    mended = [
        row["timestamp"]
        for row in events
        if known(row) <= r
        and concerns(row, unit, inventory)
        and row["type"] in ("repair", "replacement")
        and row["code"] != "reset"
        and not leaves_another_open(row, unit, events, inventory, labels)
    ] + departures(unit, inventory, r)
    groups: list[list[datetime]] = []
    for time in worthy:
        last = groups[-1][-1] if groups else None
        if last is not None and (
            time - last <= labels.merge_window
            or (time - last < labels.cooldown and not any(last <= stop <= time for stop in stops))
        ):
            groups[-1].append(time)
        else:
            groups.append([time])
    out = []
    for i, group in enumerate(groups):
        last = group[-1]
        following = groups[i + 1][0] if i + 1 < len(groups) else FOR_EVER
        soon = [stop for stop in stops if last <= stop <= last + labels.cooldown]
        late = [stop for stop in mended if last <= stop <= last + timedelta(days=30) and stop < following]
        end = min(soon) if soon else min(late) if late else last + labels.cooldown
        out.append((group[0], end if soon or late or end <= seen_until else None))
    return out
