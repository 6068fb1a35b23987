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

_ASSETS: Final = ("cmdb ci", "ci", "ci name", "configuration item", "affected ci", "affected host", "asset name")
"""What helpdesks call the host of a ticket."""

KEYS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "samples": {
        "timestamp": ("timestamp", "time", "ts", "datetime", "sampled at", "collected at", "epoch"),
        "node": ("node", "node name", "host", "host name", "hostname", "server", "machine", "instance"),
        "gpu": ("uuid", "gpu uuid", "device uuid", "gpu id", "device id"),
    },
    "events": {
        "timestamp": (
            *("timestamp", "time", "ts", "datetime", "date", "event time", "event date", "occurred at", "occurred"),
            *("start", "when", "incident date", "incident time", "failure date", "failed at", "date time"),
        ),
        "node": (
            "node",
            "node name",
            "host",
            "host name",
            "hostname",
            "server",
            "machine",
            "instance",
            "asset",
            *_ASSETS,
        ),
        "gpu": ("uuid", "gpu uuid", "device uuid", "gpu id", "device id"),
        "slot": ("slot", "gpu", "gpu index", "gpu slot", "gpu number", "index", "position", "bay"),
        "pci_bus_id": ("pci bus id", "bus id", "pci address", "pci"),
        "serial": ("serial", "serial number", "gpu serial", "sn"),
        "type": ("type", "event", "event type", "kind", "category", "action", "work", "incident type", "issue type"),
        "code": ("code", "xid", "error code", "fault code"),
        "detail": (
            *("detail", "details", "message", "description", "short description", "comment", "summary", "notes"),
            *("text", "title", "subject"),
        ),
        "known_at": (
            *("known at", "entered at", "created", "created at", "created date", "creation date", "reported at"),
            *("reported", "recorded at", "opened at", "opened", "opened date", "open date", "date opened"),
        ),
        "resolved_at": (
            *("resolved", "resolved at", "resolution date", "resolved date", "closed", "closed at", "close date"),
            *("closed date", "completed", "completed at", "fixed at", "date closed", "date resolved"),
            *("solved", "solved at", "solved date", "resolved on", "closed on", "actual end"),
        ),
        "resolution": (
            *("resolution", "resolution notes", "resolution summary", "resolution details", "close notes"),
            *("closure notes", "closing notes", "closing comment", "solution", "work done", "corrective action"),
        ),
        "source": ("source", "system"),
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
