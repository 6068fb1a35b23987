"""What the collector knows, as the tables that land."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from telemetry.collect.nvml.device import Identity
from telemetry.collect.nvml.node_reader import Row
from telemetry.dataset.channel import Channel
from telemetry.dataset.schema import CHANNEL_TYPES, INSTANT
from telemetry.landing.tables import LANDED_EVENTS, LANDED_INVENTORY
from telemetry.xids.pci import normalise_pci_bus_id

SOURCE = "nvml"
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Event:
    """One row of events, as it is kept until it has landed.

    ``name``: key under which it lands once and never again; None for what can only be heard once.
    ``at``: when it happened and could first be told; aware, UTC.
    ``type``, ``code``, ``detail``: see :data:`telemetry.dataset.schema.EVENTS`.
    """

    name: str | None
    at: datetime
    gpu: str | None
    pci_bus_id: str | None
    type: str
    code: str
    detail: str | None


def samples_table(rows: Sequence[Row], node: str, channels: Mapping[str, Channel]) -> pa.Table:
    """Return raw samples in the landing layout: one row a reading, one column a channel that any row has."""
    columns: dict[str, pa.Array] = {
        "timestamp": pa.array([row.at for row in rows], INSTANT),
        "node": pa.array([node] * len(rows), pa.string()),
        "gpu": pa.array([row.identity.gpu for row in rows], pa.string()),
    }
    reported = {name for row in rows for name in row.values}
    for name, channel in channels.items():
        if name in reported:
            values = [_typed(row.values.get(name), channel) for row in rows]
            columns[name] = pa.array(values, CHANNEL_TYPES[channel.kind])
    return pa.table(columns)


def events_table(events: Sequence[Event], node: str) -> pa.Table:
    """Return events in the landing layout."""
    rows = [
        {
            "timestamp": each.at,
            "node": node,
            "gpu": each.gpu,
            "type": each.type,
            "code": each.code,
            "detail": each.detail,
            "source": SOURCE,
            "known_at": each.at,
            "pci_bus_id": each.pci_bus_id,
        }
        for each in events
    ]
    return pa.Table.from_pylist(rows, schema=LANDED_EVENTS)


def inventory_table(present: Sequence[Identity], node: str, driver: str, seen_at: datetime) -> pa.Table:
    """Return one sighting a GPU in the landing layout."""
    rows = [
        {
            "gpu": each.gpu,
            "node": node,
            "slot": str(each.index),
            "pci_bus_id": address_of(each),
            "serial": each.serial,
            "model": each.model,
            "driver": driver,
            "nvlink_domain": each.nvlink_domain,
            "seen_at": seen_at,
        }
        for each in present
    ]
    return pa.Table.from_pylist(rows, schema=LANDED_INVENTORY)


def address_of(identity: Identity) -> str | None:
    """Return a GPU's PCI address as we write it."""
    return None if identity.pci_bus_id is None else normalise_pci_bus_id(identity.pci_bus_id)


def _typed(value: float | None, channel: Channel) -> float | int | None:
    if value is None or math.isnan(value) or channel.kind in ("gauge", "counter"):
        return value
    number = round(value)
    # Flags are a mask of 64 bits, an enum has 31: what does not fit is no value of the channel.
    return number if 0 <= number < 2**64 and (channel.kind == "flags" or number <= _INT32_MAX) else None
