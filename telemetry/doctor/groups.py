"""Groups of channels that are enabled together, with their purpose and requirements.

Also the fields of dcgm-exporter's default counter file, and the counter file line of a channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from foundation.yaml import read_yaml
from telemetry.dataset.channels import Channel

LATER_FIELDS: Final = frozenset({"DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "DCGM_FI_DEV_FABRIC_HEALTH_SUMMARY"})
"""Fields with which dcgm-exporter 4.4.1 to 4.5.2 fails to start; exporters built on DCGM 4.6 support them."""


def counter_name(channel: Channel) -> str | None:
    """Return the DCGM name that all versions of the exporter accept; None if DCGM does not have the channel.

    DCGM 4.6 renamed its fields and keeps the old names as aliases, so this is the old name, except for the clock event
    reasons, which got their new name by DCGM 4.0.
    """
    if not channel.dcgm_names:
        return None
    return channel.dcgm_names[0] if channel.name == "clocks_event_reasons" else channel.dcgm_names[-1]


def counter_line(channel: Channel) -> str | None:
    """Return the counter file line that enables a channel; None if DCGM does not have it."""
    kind = "counter" if channel.kind == "counter" else "gauge"
    name = counter_name(channel)
    return name and f"{name}, {kind}, {channel.help.replace(',', ';')}"


@dataclass(frozen=True, slots=True)
class Group:
    """Channels that belong together.

    ``condition``: requirements on board, driver or permissions, as a sentence; may be empty.
    ``channels``: in display order.
    ``precursor``: whether these channels are known to precede failures; used instead of a model's channels.
    ``classes``: failure classes with precursors in these channels.
    """

    name: str
    why: str
    channels: tuple[str, ...]
    condition: str = ""
    precursor: bool = False
    classes: tuple[str, ...] = ()


_TABLE: Final = read_yaml(Path(__file__).with_name("groups.yaml").read_text(encoding="utf-8"))

ABSENT: Final[tuple[dict[str, Any], ...]] = tuple(_TABLE["absent"])
"""Channels that some boards cannot report: ``channels`` (patterns), ``boards`` (a regular expression), ``reason``."""

STOCK_FIELDS: Final[frozenset[str]] = frozenset(_TABLE["stock_fields"])
"""Fields of the catalogue that are enabled in dcgm-exporter's default-counters.csv (4.x, 2026)."""

GROUPS: Final[tuple[Group, ...]] = TypeAdapter(tuple[Group, ...]).validate_python(_TABLE["groups"])
"""All channels of the catalogue, in order of recommendation."""

OTHER: Final = Group("your own", "channels declared in params", ())


def grouped(channels: Mapping[str, Channel]) -> list[tuple[Group, list[Channel]]]:
    """Return the given channels by group, without empty groups."""
    groups = [(group, [channels[name] for name in group.channels if name in channels]) for group in GROUPS]
    grouped_names = {name for group in GROUPS for name in group.channels}
    groups.append((OTHER, [channel for name, channel in channels.items() if name not in grouped_names]))
    return [(group, members) for group, members in groups if members]


def channels_page(channels: Mapping[str, Channel]) -> str:
    """Return the page docs/reference/channels.md."""
    parts = [_TABLE["introduction"]]
    for group, members in grouped(channels):
        title = group.name[0].upper() + group.name[1:]
        condition = f" {group.condition}" if group.condition else ""
        parts.append(f"\n## {title}\n\n{group.why[0].upper()}{group.why[1:]}.{condition}\n")
        columns = ("channel", "meaning", "kind", "unit", "range", "DCGM", "NVML", "AMD", "default")
        parts.append(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        parts += [_row(channel) for channel in members]
    return "\n".join(parts) + "\n"


def _row(channel: Channel) -> str:
    names = channel.dcgm_names
    dcgm = "" if channel.dcgm_id is None else f"{channel.dcgm_id} " + " ".join(f"`{name}`" for name in names)
    enabled = (word for word, fields in (("yes", STOCK_FIELDS), ("later", LATER_FIELDS)) if fields & set(names))
    default = next(enabled, "no" if names else "")
    low = "" if channel.low is None else f"{channel.low:g}"
    high = "" if channel.high is None else f"to {channel.high:g}"
    cells = (
        f"`{channel.name}`",
        channel.help,
        channel.kind,
        channel.unit,
        f"{low} {high}".strip() if high else f"from {low}" if low else "any",
        dcgm,
        f"`{channel.nvml}`" if channel.nvml else "",
        " ".join(f"`{name}`" for name in channel.amd),
        default,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
