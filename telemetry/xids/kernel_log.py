"""Saved kernel logs to XID events, for an import: dmesg, syslog, the journal; and which GPU a PCI address is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo

import pandas as pd

from foundation.errors import InputError
from telemetry.dataset.schema import EVENTS, ms_of
from telemetry.identity.nodes import NodeNames
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.xids.log_stamp import Stamped, instant_of, split_line
from telemetry.xids.xid_message import DESCRIBED_XIDS, mentions_xid, parse_gpu_introduction, parse_xid_message

COLUMNS = ("timestamp", "node", "gpu", "pci_bus_id", "type", "code", "detail", "source")
"""Columns of parsed events before :func:`locate`."""

_FOREVER = 1 << 62
_DISORDER = timedelta(days=182)

_Line = tuple[int, str, Stamped | None]
# Number, text, and the text taken apart.


@dataclass(frozen=True, slots=True)
class KernelLog:
    """What a kernel log held.

    ``events``: XID events with the columns of :data:`COLUMNS`; ``gpu`` only where a message gave the UUID.
    ``unknown_codes``: XIDs without a description, with their number; their events are kept.
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
    timezone: tzinfo | None = None,
    source: str = "kernel_log",
) -> KernelLog:
    """Find the XID events in a kernel log.

    ``lines``: lines of ``dmesg``, ``dmesg -T``, a syslog file, or ``journalctl -k -o json``.
    ``node``: node of lines that name no host.
    ``boot_time``: Aware; when the kernel of ``[ 12.345]`` stamps booted.
    ``reference_time``: Aware; a moment after the last line, such as when the log was fetched. It gives the year to
    syslog stamps without one.
    ``timezone``: zone of stamps without an offset.
    ``source``: ``source`` of the events.
    Raises ``InputError`` if an XID cannot be timed or placed without ``node``, ``boot_time``, ``reference_time`` or
    ``timezone``; the message says which to give.
    """
    kept, n_lines = _driver_lines(lines)
    instants = _instants(kept, boot_time, reference_time, timezone)
    unparsed: list[tuple[int, str, str]] = []
    unknown: Counter[str] = Counter()
    records: list[tuple[object, ...]] = []
    uuids: dict[tuple[str | None, str], str] = {}
    for (number, line, stamped), when in zip(kept, instants, strict=True):
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
        if int(xid.code) not in DESCRIBED_XIDS:
            unknown[xid.code] += 1
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
    ``inventory``: installations in the layout of :data:`telemetry.dataset.schema.INVENTORY`.
    ``delay``: ``known_at`` is the event's time plus this.
    Returns ``events``: in the layout of :data:`EVENTS`, the node as the inventory writes it. An event
    whose address is not in the inventory at that time, or that of several GPUs, has a null ``gpu``: it is the node's.
    """
    names = NodeNames(inventory["node"])
    nodes = events["node"].map({node: names.written(node) for node in events["node"].unique()}).astype(object)
    places = inventory[["gpu", "node"]].astype(object)
    places["bus"] = inventory["pci_bus_id"].map(lambda bus: normalise_pci_bus_id(bus) or bus, na_action="ignore")
    places["start"] = ms_of(inventory["installed_at"], unknown=-_FOREVER)
    places["end"] = ms_of(inventory["removed_at"], unknown=_FOREVER)
    by_address = places.assign(key=places["node"] + "\n" + places["bus"])
    by_gpu = places.assign(key=places["gpu"])
    is_known = events["gpu"].isin(by_gpu["key"].dropna())
    key = events["gpu"].astype(object).where(is_known, nodes + "\n" + events["pci_bus_id"].astype(object))
    queries = pd.DataFrame({"event": range(len(events)), "ms": ms_of(events["timestamp"]), "key": key.to_numpy()})
    pairs = queries.dropna(subset="key").merge(pd.concat([by_gpu, by_address]), on="key")
    pairs = pairs[(pairs["start"] <= pairs["ms"]) & (pairs["ms"] <= pairs["end"])]
    # At the instant of a swap both installations cover it; the newer one is in the slot.
    inner = pairs["ms"] < pairs["end"]
    pairs = pairs[inner | ~pairs["event"].isin(pairs.loc[inner, "event"])]
    match = pairs.groupby("event").agg(gpu=("gpu", "first"), gpus=("gpu", "nunique"), node=("node", "last"))
    match = match.reindex(range(len(events))).set_axis(events.index)
    gpus = match["gpu"].astype(object).where(match["gpus"] == 1, None)
    # The sum is in microseconds, which do not stack with the milliseconds of every other source.
    known_at = (events["timestamp"] + delay).astype("datetime64[ms, UTC]")
    located = events.assign(gpu=gpus, node=match["node"].astype(object).fillna(nodes), known_at=known_at)
    return located[list(EVENTS.names)], int(located["gpu"].isna().sum())


def _driver_lines(lines: Iterable[str]) -> tuple[list[_Line], int]:
    """Return the GPU driver's lines, and the number of all lines."""
    kept: list[_Line] = []
    number = 0
    for number, raw in enumerate(lines, start=1):
        line = raw.rstrip("\r\n")
        if "NVRM" in line or line.startswith("{"):
            kept.append((number, line, split_line(line)))
    return kept, number


def _instants(
    lines: list[_Line], boot_time: datetime | None, reference_time: datetime | None, zone: tzinfo | None
) -> list[datetime | None]:
    """Return when each line was written; only lines about an XID must have all that this takes.

    From the last line to the first, none is over half a year later than the one after it, which gives the years.
    """
    instants: list[datetime | None] = []
    limit = (reference_time or datetime.now(UTC)).astimezone(UTC)
    for number, line, stamped in reversed(lines):
        when, lacking = None, None
        if stamped is None:
            pass
        elif stamped.yearless and reference_time is None:
            lacking = (
                "have no year",
                "Give `kernel_log: {reference_time: …}` in the mapping: a moment after the last line.",
            )
        elif stamped.naive is not None and zone is None:
            lacking = (
                "are naive (without a time zone)",
                "Give `kernel_log: {timezone: UTC}` in the mapping, with the zone they were written in.",
            )
        elif stamped.since_boot is None:
            when = instant_of(stamped, zone or UTC, limit)
        elif boot_time is None:
            lacking = (
                "are seconds since boot",
                "Give `kernel_log: {boot_time: …}` in the mapping, or write the log with `dmesg --time-format iso`.",
            )
        else:
            when = boot_time.astimezone(UTC) + stamped.since_boot
        if lacking is not None and mentions_xid(line):
            raise InputError(f"the kernel log's time stamps {lacking[0]}", f"line {number}: {line[:120]}", lacking[1])
        if when is not None and when < limit:
            limit = min(limit, when + _DISORDER)
        instants.append(when)
    return instants[::-1]
