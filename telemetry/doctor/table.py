"""docs/reference/channels.md: the catalogue as a page, made from the catalogue."""

from __future__ import annotations

from collections.abc import Mapping

from telemetry.channel import Channel
from telemetry.doctor.counters import LATER_FIELDS, in_stock_file
from telemetry.doctor.groups import grouped

_INTRODUCTION = """\
# Channels

Every numeric series of a GPU that predrain knows by itself. This page is made by `predrain doctor --channels`; a test
holds it to the code. Your own channels are declared in `channels:` of params.yaml.

A *gauge* is a level, a *counter* only rises (and may start again), *flags* is a bitmask, *enum* an integer code. A
value outside the range is set aside at import, with its reason. DCGM names stand newest first; fields keep their id
through renamings, and exporters from DCGM 4.6 on accept the old names too. *Stock* says whether dcgm-exporter's own
counter file switches it on; `deploy/dcgm-exporter/predrain-counters.csv` has them all ("later" marks names that only
exporters built on DCGM 4.6 know). "GPM" is NVML's profiling interface of Hopper and later.
"""


def channels_page(channels: Mapping[str, Channel]) -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for group, mine in grouped(channels):
        title = group.name[0].upper() + group.name[1:]
        condition = f" {group.condition}" if group.condition else ""
        parts.append(f"\n## {title}\n\n{group.why[0].upper()}{group.why[1:]}.{condition}\n")
        columns = ("channel", "what", "kind", "unit", "range", "DCGM", "NVML", "AMD", "stock")
        parts.append(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        parts += [_row(channel) for channel in mine]
    return "\n".join(parts) + "\n"


def _row(channel: Channel) -> str:
    dcgm = ""
    if channel.dcgm_id is not None:
        dcgm = f"{channel.dcgm_id} " + " ".join(f"`{name}`" for name in channel.dcgm_names)
    stock = ""
    if channel.dcgm_names:
        stock = "yes" if in_stock_file(channel) else "later" if LATER_FIELDS.intersection(channel.dcgm_names) else "no"
    cells = (
        f"`{channel.name}`",
        channel.help,
        channel.kind,
        channel.unit,
        _range(channel),
        dcgm,
        f"`{channel.nvml}`" if channel.nvml else "",
        " ".join(f"`{name}`" for name in channel.amd),
        stock,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _range(channel: Channel) -> str:
    if channel.low is None and channel.high is None:
        return "any"
    if channel.high is None:
        return f"from {channel.low:g}"
    if channel.low is None:
        return f"to {channel.high:g}"
    return f"{channel.low:g} to {channel.high:g}"
