"""The counter file of dcgm-exporter: how it reads one, what its stock file has, and the line of each channel."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from telemetry.dataset.channel import Channel
from telemetry.errors import InputError

TYPES: Final = ("gauge", "counter", "label")
"""Types that a line may have (the exporter knows ``histogram`` and ``summary`` too, which no field is)."""

EXPORTER_FIELDS: Final = MappingProxyType(
    {
        "DCGM_EXP_XID_ERRORS_COUNT": "XIDs of the last window by number",
    }
)
"""Metrics that the exporter makes itself, of use to us."""

LATER_FIELDS: Final = frozenset({"DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "DCGM_FI_DEV_FABRIC_HEALTH_SUMMARY"})
"""Names that exporter 4.4.1-4.5.2 did not know and would not start with; those built on DCGM 4.6 know them."""

STOCK_FIELDS: Final = frozenset(
    {
        "DCGM_FI_DEV_SM_CLOCK",
        "DCGM_FI_DEV_MEM_CLOCK",
        "DCGM_FI_DEV_MEMORY_TEMP",
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "DCGM_FI_DEV_ENC_UTIL",
        "DCGM_FI_DEV_DEC_UTIL",
        "DCGM_FI_DEV_XID_ERRORS",
        "DCGM_FI_DEV_FB_FREE",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_FB_RESERVED",
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "DCGM_FI_PROF_PCIE_TX_BYTES",
        "DCGM_FI_PROF_PCIE_RX_BYTES",
    }
)
"""What dcgm-exporter's default-counters.csv (4.x, 2026) switches on of the catalogue."""


@dataclass(frozen=True, slots=True)
class CounterLine:
    """One line of a counter file.

    ``type``: one of :data:`TYPES`.
    ``number``: line number, from 1.
    """

    field: str
    type: str
    help: str
    number: int


def counter_name(channel: Channel) -> str | None:
    """Return the DCGM name that exporters of every age accept, or None for a channel that DCGM does not have.

    DCGM 4.6 renamed its fields and keeps the old names as aliases, so it is the old one; only the clocks' event reasons
    had their new name since DCGM 4.0 and before.
    """
    if not channel.dcgm_names:
        return None
    return channel.dcgm_names[0] if channel.name == "clocks_event_reasons" else channel.dcgm_names[-1]


def counter_line(channel: Channel) -> str | None:
    """Return the line of the counter file that switches a channel on, or None where DCGM does not have it."""
    name = counter_name(channel)
    if name is None:
        return None
    kind = "counter" if channel.kind == "counter" else "gauge"
    return f"{name}, {kind}, {channel.help.replace(',', ';')}"


def in_stock_file(channel: Channel) -> bool:
    """Whether dcgm-exporter's own default file switches the channel on."""
    return any(name in STOCK_FIELDS for name in channel.dcgm_names)


def read_counter_file(text: str, where: str) -> list[CounterLine]:
    """Read a counter file by dcgm-exporter's rules.

    Returns: in the file's order; comments (lines that begin with ``#``) and empty lines left out.
    Raises ``InputError`` if the exporter would not start with it: a line without exactly three fields, with a bare
    quote, or of an unknown type; or a field stands there twice, which would give a page with repeated lines.
    """
    lines: list[CounterLine] = []
    known: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        place = f"{where}, line {number}"
        if '"' in line:
            raise InputError("the line holds a quote", place, "Write the help without quotes.")
        fields = [each.strip(" ") for each in next(csv.reader([line]))]
        if len(fields) != 3:
            raise InputError(
                f"the line has {len(fields)} fields, the exporter wants 3", place, "Write FIELD, type, help."
            )
        field, kind, text_of = fields
        if kind not in TYPES:
            raise InputError(f"{kind!r} is no type", place, f"Use one of {', '.join(TYPES)}.")
        if field in known:
            raise InputError(f"{field} stands there twice, first in line {known[field]}", place, "Remove one of them.")
        known[field] = number
        lines.append(CounterLine(field, kind, text_of, number))
    return lines


def missing_from(lines: list[CounterLine], channels: Mapping[str, Channel]) -> list[Channel]:
    """Return the channels that DCGM has and a counter file does not switch on."""
    fields = {line.field for line in lines}
    return [each for each in channels.values() if each.dcgm_names and not fields.intersection(each.dcgm_names)]
