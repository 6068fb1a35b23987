"""Kernel logs to XID events: dmesg, syslog and the journal, and from PCI addresses to GPUs through the inventory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

from telemetry.dataset.schema import EVENTS, ms_of
from telemetry.errors import InputError
from telemetry.xids.log_stamp import Stamped, split_line
from telemetry.xids.node_names import NodeNames
from telemetry.xids.pci import normalise_pci_bus_id
from telemetry.xids.xid_message import (
    DESCRIBED_XIDS,
    mentions_xid,
    parse_gpu_introduction,
    parse_xid_message,
)

COLUMNS = ("timestamp", "node", "gpu", "pci_bus_id", "type", "code", "detail", "source")
"""Columns of parsed events before :func:`locate`."""

_DESCRIBED = frozenset(str(code) for code in DESCRIBED_XIDS)
_FOREVER = 1 << 62
_REFERENCE_SLACK = timedelta(days=1)
# A log is often fetched by a machine whose clock or zone differs a little.


@dataclass(frozen=True, slots=True)
class KernelLog:
    """What a kernel log held.

    ``events``: XID events with the columns of :data:`COLUMNS`; ``gpu`` only where a message gave the UUID.
    ``unknown_codes``: XIDs that we have no description of, with their number; their events are kept.
    ``unparsed``: line number from 1, line and problem of lines about an XID that made no event.
    """

    events: pd.DataFrame
    unknown_codes: dict[str, int]
    unparsed: list[tuple[int, str, str]]
    n_lines: int


def parse_kernel_log(
    lines: Iterable[str],
    *,
    node: str | None = None,
    boot_time: datetime | None = None,
    reference_time: datetime | None = None,
    timezone: str | None = None,
    source: str = "kernel_log",
) -> KernelLog:
    """Find the XID events in a kernel log.

    ``lines``: lines of ``dmesg``, ``dmesg -T``, a syslog file, or ``journalctl -k -o json``.
    ``node``: node of lines that name no host.
    ``boot_time``: Aware; when the kernel of ``[ 12.345]`` stamps booted.
    ``reference_time``: Aware; a moment after the last line, such as when the log was fetched. It gives the year to
    syslog stamps without one; a turn of the year inside the log is seen by the month falling back.
    ``timezone``: zone of stamps without an offset; an hour that a change of the clocks repeats is taken as the first.
    ``source``: ``source`` of the events.
    Raises ``InputError`` if an XID cannot be timed or placed without ``node``, ``boot_time``, ``reference_time`` or
    ``timezone``; the message says which to give.
    """
    unparsed: list[tuple[int, str, str]] = []
    unknown: Counter[str] = Counter()
    records: list[tuple[object, ...]] = []
    uuids: dict[tuple[str | None, str], str] = {}
    n_lines = 0
    for number, line, stamped in _dated(lines, reference_time):
        n_lines = number
        message = line if stamped is None else stamped.message
        host = node if stamped is None or stamped.host is None else stamped.host
        introduced = parse_gpu_introduction(message)
        if introduced is not None:
            uuids[(host, introduced[0])] = introduced[1]
        if not mentions_xid(message):
            continue
        xid = parse_xid_message(message)
        if xid is None:
            unparsed.append((number, line, "no XID number or GPU"))
            continue
        if xid.code not in _DESCRIBED:
            unknown[xid.code] += 1
        when = None if stamped is None else _instant(stamped, boot_time, timezone, number)
        if when is None:
            unparsed.append((number, line, "no usable time stamp"))
            continue
        if host is None:
            raise InputError(
                "the kernel log does not name its node",
                f"line {number}: {line[:120]}",
                "Give `kernel_log: {node: NAME}` in the mapping, or name the file after the node.",
            )
        uuid = xid.gpu or (uuids.get((host, xid.pci_bus_id)) if xid.pci_bus_id else None)
        records.append((when, host, uuid, xid.pci_bus_id, "xid", xid.code, xid.detail, source))
    events = pd.DataFrame(records, columns=list(COLUMNS))
    events["timestamp"] = pd.to_datetime(events["timestamp"], utc=True).astype("datetime64[ms, UTC]")
    return KernelLog(events, dict(sorted(unknown.items())), unparsed, n_lines)


def locate(
    events: pd.DataFrame, inventory: pd.DataFrame, *, delay: timedelta = timedelta(0)
) -> tuple[pd.DataFrame, int]:
    """Find the GPU of each event by its node and PCI address at its time.

    ``events``: with the columns of :data:`COLUMNS`.
    ``inventory``: stays in the layout of :data:`telemetry.dataset.schema.INVENTORY`.
    ``delay``: ``known_at`` is the event's time plus this.
    Returns ``events``: in the layout of :data:`EVENTS`, the node as the inventory writes it. An event
    whose address is not in the inventory at that time, or that of several GPUs, has a null ``gpu``: it is the node's.
    """
    names = NodeNames(inventory["node"])
    by_place: dict[tuple[str, str], list[int]] = {}
    by_gpu: dict[str, list[int]] = {}
    stays = list(inventory[["gpu", "node", "pci_bus_id", "installed_at", "removed_at"]].itertuples(index=False))
    for index, stay in enumerate(stays):
        if isinstance(stay.gpu, str):
            by_gpu.setdefault(stay.gpu, []).append(index)
        if isinstance(stay.pci_bus_id, str):
            bus = normalise_pci_bus_id(stay.pci_bus_id) or stay.pci_bus_id
            by_place.setdefault((stay.node, bus), []).append(index)
    made = events.copy()
    gpus, places = np.full(len(events), None, dtype=object), np.full(len(events), None, dtype=object)
    stamps = ms_of(events["timestamp"])
    starts = ms_of(inventory["installed_at"], unknown=-_FOREVER)
    ends = ms_of(inventory["removed_at"], unknown=_FOREVER)
    # A flood names few places: each is looked up once.
    asked = events[["node", "gpu", "pci_bus_id"]].astype(object).fillna("")
    for (node, gpu, bus), rows in asked.groupby(["node", "gpu", "pci_bus_id"], sort=False).indices.items():
        host = names.written(node)
        candidates = by_gpu.get(gpu) or by_place.get((host, bus), [])
        when = stamps[rows]
        there = np.array([(starts[each] <= when) & (when <= ends[each]) for each in candidates], dtype=bool)
        there = there.reshape(len(candidates), len(rows))
        # At the instant of a swap both stays cover it; the newer one is in the slot.
        inner = there & np.array([when != ends[each] for each in candidates], dtype=bool).reshape(there.shape)
        there = np.where(inner.any(axis=0), inner, there)
        patterns, pattern = np.unique(there, axis=1, return_inverse=True)
        for number, column in enumerate(patterns.T):
            found = [candidates[place] for place in np.flatnonzero(column)]
            named = {stays[each].gpu for each in found if isinstance(stays[each].gpu, str)}
            chosen = rows[pattern.reshape(-1) == number]
            gpus[chosen] = named.pop() if len(named) == 1 else None
            places[chosen] = stays[found[-1]].node if found else host
    made["gpu"] = pd.Series(gpus, index=made.index, dtype=object)
    made["node"] = pd.Series(places, index=made.index, dtype=object)
    # The sum is in microseconds, which do not stack with the milliseconds of every other source.
    made["known_at"] = (made["timestamp"] + delay).astype("datetime64[ms, UTC]")
    return made[list(EVENTS.names)], int(pd.isna(gpus).sum())


def _dated(lines: Iterable[str], reference: datetime | None) -> Iterator[tuple[int, str, Stamped | None]]:
    """Split lines, give years to stamps without one, and yield those of the driver; an empty last one has the count.

    The year of the last such stamp is the latest that does not pass the reference time; going back, it falls by one
    where the stamps turn from December to January.
    """
    split: list[tuple[int, str, Stamped | None]] = []
    turns, newest, number = 0, None, 0
    turn_of: dict[int, int] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.rstrip("\r\n")
        stamped = split_line(line)
        if "NVRM" in (
            line if stamped is None else stamped.message
        ):  # only these can say anything; a log of a year has many others
            split.append((number, line, stamped))
        if stamped is not None and stamped.yearless and stamped.naive is not None:
            if newest is not None and newest - stamped.naive > timedelta(days=183):
                turns += 1
            newest = stamped.naive
            turn_of[number] = turns
    total = number
    last_year: int | None = None
    if newest is not None and reference is not None:
        limit = reference.astimezone(UTC).replace(tzinfo=None) + _REFERENCE_SLACK
        last_year = limit.year if _with_year(newest, limit.year, limit) <= limit else limit.year - 1
    for number, line, stamped in split:
        if stamped is None or not stamped.yearless:
            yield number, line, stamped
        elif last_year is None:
            if mentions_xid(stamped.message):
                raise InputError(
                    "the kernel log's time stamps have no year",
                    f"line {number}: {line[:120]}",
                    "Give `kernel_log: {reference_time: …}` in the mapping: a moment after the last line.",
                )
            yield number, line, stamped
        else:
            assert stamped.naive is not None
            year = last_year - turns + turn_of[number]
            try:
                yield number, line, replace(stamped, naive=stamped.naive.replace(year=year), yearless=False)
            except ValueError:  # 29 February of a year without one
                yield number, line, Stamped(stamped.message, stamped.host)
    yield total, "", None


def _with_year(naive: datetime, year: int, otherwise: datetime) -> datetime:
    try:
        return naive.replace(year=year)
    except ValueError:
        return otherwise + timedelta(days=1)


def _instant(stamped: Stamped, boot_time: datetime | None, timezone: str | None, number: int) -> datetime | None:
    if stamped.aware is not None:
        return stamped.aware.astimezone(UTC)
    if stamped.naive is not None:
        if timezone is None:
            raise InputError(
                "the kernel log's time stamps are naive (without a time zone)",
                f"line {number}: {stamped.message[:120]}",
                "Give `kernel_log: {timezone: UTC}` in the mapping, with the zone they were written in.",
            )
        return stamped.naive.replace(tzinfo=ZoneInfo(timezone)).astimezone(UTC)
    if stamped.since_boot is not None:
        if boot_time is None:
            raise InputError(
                "the kernel log counts seconds since boot",
                f"line {number}: {stamped.message[:120]}",
                "Give `kernel_log: {boot_time: …}` in the mapping, or write the log with `dmesg --time-format iso`.",
            )
        return boot_time.astimezone(UTC) + stamped.since_boot
    return None
