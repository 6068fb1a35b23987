"""What the collector knows: as the tables that land, and as the file that it remembers over a restart."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from telemetry.atomic import write_bytes
from telemetry.collect.nvml.device import Identity
from telemetry.collect.nvml.node_reader import Row
from telemetry.dataset.channel import Channel
from telemetry.dataset.schema import CHANNEL_TYPES, INSTANT
from telemetry.landing.tables import LANDED_EVENTS, LANDED_INVENTORY
from telemetry.xids.pci import normalise_pci_bus_id

_LOG = logging.getLogger(__name__)
_VERSION = 1


@dataclass(slots=True)
class RunState:
    """The collector's state file.

    ``driver``: the driver's version when it was last opened.
    ``boot``: which boot of the machine this is about: after another one, GPUs may stand in other places, and a GPU that
    is still lost is lost anew.
    ``known``: the GPUs that were seen in this boot, by their place in the driver's list.
    ``outbox``: events that are decided but perhaps not landed: they are written here first and landed under their
    names, so that a kill between the two neither loses nor doubles them.
    ``inventory``, ``inventory_at``: what the last landed inventory said, and when.
    """

    path: Path
    boot: str = ""
    driver: str | None = None
    known: dict[int, Identity] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    outbox: list[Event] = field(default_factory=list)
    inventory: str = ""
    inventory_at: datetime | None = None

    @classmethod
    def read(cls, path: Path, boot: str) -> RunState:
        """Read the file; where there is none, or a damaged one, remember nothing."""
        state = cls._read(path)
        if state.boot != boot:
            state.boot = boot
            state.known, state.lost, state.hung = {}, set(), set()
        return state

    @classmethod
    def _read(cls, path: Path) -> RunState:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}")
            return cls(
                path,
                boot=content["boot"],
                driver=content["driver"],
                known={each["index"]: Identity(**each) for each in content["known"]},
                lost=set(content["lost"]),
                hung=set(content["hung"]),
                outbox=[Event(**{**each, "at": datetime.fromisoformat(each["at"])}) for each in content["outbox"]],
                inventory=content["inventory"],
                inventory_at=None
                if content["inventory_at"] is None
                else datetime.fromisoformat(content["inventory_at"]),
            )
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("%s cannot be read (%s): events of the last run may be told once more", path, error)
            return cls(path)

    def write(self) -> None:
        """Replace the file; an InputError where the disk is full."""
        write_bytes(self.path, json.dumps(self._content(), sort_keys=True).encode())

    def _content(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "boot": self.boot,
            "driver": self.driver,
            "known": [asdict(each) for each in self.known.values()],
            "lost": sorted(self.lost),
            "hung": sorted(self.hung),
            "outbox": [{**asdict(each), "at": each.at.isoformat()} for each in self.outbox],
            "inventory": self.inventory,
            "inventory_at": None if self.inventory_at is None else self.inventory_at.isoformat(),
        }


def boot_id() -> str:
    """Return what the kernel calls this boot of the machine; an empty text where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


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
