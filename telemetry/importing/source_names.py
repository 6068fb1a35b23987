"""What sources call columns, units and the words of channels: the tables that guesses go by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("temperature", "temperatures"), "temp"),
    **dict.fromkeys(("memory", "vram", "fb", "framebuffer", "hbm"), "mem"),
    **dict.fromkeys(("utilization", "utilisation", "activity"), "util"),
    **dict.fromkeys(("clocks", "frequency", "freq"), "clock"),
    **dict.fromkeys(("corrected", "correctable", "single", "ce"), "sbe"),
    **dict.fromkeys(("uncorrected", "uncorrectable", "double", "ue"), "dbe"),
    **dict.fromkeys(("count", "counter", "counts"), "total"),
    **dict.fromkeys(("vol",), "volatile"),
    **dict.fromkeys(("agg",), "aggregate"),
    **dict.fromkeys(("pages",), "page"),
    **dict.fromkeys(("rows", "remapped"), "row"),
    **dict.fromkeys(("reasons",), "reason"),
    **dict.fromkeys(("replays",), "replay"),
    **dict.fromkeys(("pci",), "pcie"),
    **dict.fromkeys(("sent", "transmit"), "tx"),
    **dict.fromkeys(("received", "receive"), "rx"),
}
"""Words of a name, and the one word that stands for them."""

SAYS_NOTHING: Final = re.compile(
    "gpu|dcgm|fi|dev|prof|nvidia|nvml|metric|value|errors?|bit|draw|current|graphics|board|avg|mean|reading|per|second|"
    "celsius|watts"
)
"""Words that tell no channel from another."""

UNITS: Final[Mapping[str, Mapping[str, tuple[float, float]]]] = {
    "C": {"c": (1, 0), "celsius": (1, 0), "f": (5 / 9, -160 / 9), "k": (1, -273.15), "kelvin": (1, -273.15)},
    "W": {"w": (1, 0), "watts": (1, 0), "watt": (1, 0), "mw": (1e-3, 0), "milliwatts": (1e-3, 0), "kw": (1e3, 0)},
    "mJ": {"mj": (1, 0), "j": (1e3, 0), "joules": (1e3, 0), "kj": (1e6, 0), "wh": (3.6e6, 0), "kwh": (3.6e9, 0)},
    "%": {"pct": (1, 0), "percent": (1, 0), "ratio": (100, 0), "fraction": (100, 0)},
    "ratio": {"ratio": (1, 0), "fraction": (1, 0), "pct": (0.01, 0), "percent": (0.01, 0)},
    "MHz": {"mhz": (1, 0), "hz": (1e-6, 0), "khz": (1e-3, 0), "ghz": (1e3, 0)},
    "ns": {"ns": (1, 0), "us": (1e3, 0), "ms": (1e6, 0), "s": (1e9, 0), "seconds": (1e9, 0)},
    "s": {"s": (1, 0), "seconds": (1, 0), "ms": (1e-3, 0), "us": (1e-6, 0), "ns": (1e-9, 0)},
    **{
        unit: {name: (size / own, 0) for size, names in sizes for name in names}
        for sizes in [
            [
                (1, ("b", "bytes")),
                (1e3, ("kb",)),
                (2**10, ("kib",)),
                (1e6, ("mb",)),
                (2**20, ("mib",)),
                (1e9, ("gb",)),
                (2**30, ("gib",)),
            ]
        ]
        for unit, own in (("MiB", 2**20), ("B/s", 1), ("MiB/s", 2**20))
    },
}
"""A channel's unit: words for a source's unit, and the factor and offset from there."""

KEYS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "samples": {
        "timestamp": ("timestamp", "time", "ts", "datetime", "sampled at", "collected at", "epoch"),
        "node": ("node", "node name", "host", "host name", "hostname", "server", "machine", "instance"),
        "gpu": ("uuid", "gpu uuid", "device uuid", "gpu id", "device id"),
    },
    "events": {
        "timestamp": ("timestamp", "time", "ts", "datetime", "date", "event time", "occurred at", "start", "when"),
        "node": ("node", "node name", "host", "host name", "hostname", "server", "machine", "instance"),
        "gpu": ("uuid", "gpu uuid", "device uuid", "gpu id", "device id"),
        "type": ("type", "event", "event type", "kind", "category", "action"),
        "code": ("code", "xid", "error code", "fault code"),
        "detail": ("detail", "details", "message", "description", "comment", "summary", "notes", "text"),
        "known_at": (
            "known at",
            "entered at",
            "created",
            "created at",
            "reported at",
            "recorded at",
            "opened at",
            "opened",
        ),
        "source": ("source", "system"),
        "resolved_at": ("resolved at", "resolved", "closed at", "closed", "resolution date", "fixed at", "completed"),
        "slot": ("slot", "gpu slot", "gpu index", "index", "position", "bay"),
        "pci_bus_id": ("pci bus id", "bus id", "pci address", "pci"),
        "serial": ("serial", "serial number", "sn"),
    },
    "inventory": {
        "node": ("node", "node name", "host", "host name", "hostname", "server", "machine"),
        "gpu": ("uuid", "gpu uuid", "device uuid", "gpu id", "device id"),
        "slot": ("slot", "index", "gpu index", "position"),
        "pci_bus_id": ("pci bus id", "bus id", "pci address", "pci"),
        "serial": ("serial", "serial number", "sn"),
        "model": ("model", "model name", "gpu model", "product", "card"),
        "driver": ("driver", "driver version"),
        "rack": ("rack", "cabinet"),
        "installed_at": ("installed at", "installed", "since", "in service", "start", "from", "insert"),
        "removed_at": ("removed at", "removed", "until", "end", "to", "remove"),
    },
    "jobs": {
        "job": ("job", "job id", "jobid", "id"),
        "node": ("node", "node name", "host", "host name", "hostname", "server", "machine"),
        "gpu": ("uuid", "gpu uuid"),
        "gpus": ("gpus", "gpu count", "num gpus", "n gpus"),
        "started_at": ("started at", "start", "start time", "started", "begin"),
        "ended_at": ("ended at", "end", "end time", "ended", "finished at", "finish"),
        "checkpointed_at": ("checkpointed at", "last checkpoint", "checkpoint"),
        "outcome": ("outcome", "state", "status", "result"),
    },
}
"""Columns that are no channels, and what sources call them."""
