"""What the collector remembers from one run to the next, so that a restart tells nothing twice."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from telemetry.atomic import write_bytes
from telemetry.collect.nvml.device import Identity
from telemetry.collect.nvml.tables import Event

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
            "outbox": [
                {
                    "name": each.name,
                    "at": each.at.isoformat(),
                    "gpu": each.gpu,
                    "pci_bus_id": each.pci_bus_id,
                    "type": each.type,
                    "code": each.code,
                    "detail": each.detail,
                }
                for each in self.outbox
            ],
            "inventory": self.inventory,
            "inventory_at": None if self.inventory_at is None else self.inventory_at.isoformat(),
        }


def boot_id() -> str:
    """Return what the kernel calls this boot of the machine; an empty text where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
