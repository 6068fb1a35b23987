"""The catalogue's channels in groups that are switched on together, with what each group is for and what it needs.

And dcgm-exporter's counter file: what its stock file has, and the line that switches a channel on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from telemetry.dataset.channel import Channel

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


@dataclass(frozen=True, slots=True)
class Group:
    """Channels that belong together.

    ``condition``: what must hold of board, driver or permissions for a source to have it, a sentence; empty if nothing.
    ``channels``: in the order of presentation.
    ``precursor``: whether failures are known to announce themselves here: what is judged where no model says what it
    uses.
    """

    name: str
    why: str
    condition: str
    channels: tuple[str, ...]
    precursor: bool = False


GROUPS: Final[tuple[Group, ...]] = (
    Group(
        "XIDs",
        "the failures themselves, and most of their precursors",
        "The gauge holds only the last XID, and exporters leave it out until there is one: follow the kernel log as "
        "well, which has each with its time.",
        ("xid_last",),
        precursor=True,
    ),
    Group(
        "driver's advice",
        "what the driver itself asks for: reset, reboot, drain; the state of the NVLink fabric",
        "recovery_action needs a driver that has NVML's field 230; fabric_health a board on an NVSwitch fabric. "
        "Exporters before DCGM 4.6 know neither name and do not start with it: try one node first.",
        ("recovery_action", "fabric_health"),
        precursor=True,
    ),
    Group(
        "ECC",
        "memory errors, corrected ones long before uncorrected ones",
        "ECC must be on: `nvidia-smi -q -d ECC`, and `nvidia-smi -e 1` with a reset where it is off. Counters of "
        "on-chip memory need Ampere or later; consumer boards have none.",
        (
            "ecc_sbe_volatile_total",
            "ecc_dbe_volatile_total",
            "ecc_sbe_aggregate_total",
            "ecc_dbe_aggregate_total",
            "ecc_sbe_dram_volatile_total",
            "ecc_dbe_dram_volatile_total",
            "ecc_sbe_sram_volatile_total",
            "ecc_dbe_sram_volatile_total",
            "sram_threshold_exceeded",
        ),
        precursor=True,
    ),
    Group(
        "row remapping",
        "rows that failed and were replaced, remaps that wait for a reset, remaps that failed",
        "Needs Ampere or later with ECC on; older boards retire pages instead.",
        (
            "row_remap_uncorrectable_total",
            "row_remap_correctable_total",
            "row_remap_pending",
            "row_remap_failure",
        ),
        precursor=True,
    ),
    Group(
        "retired pages",
        "pages that failed and were put out of use",
        "Only boards before Ampere retire pages; later ones remap rows.",
        ("retired_pages_sbe_total", "retired_pages_dbe_total", "retired_pages_pending"),
        precursor=True,
    ),
    Group(
        "PCIe",
        "packets sent again, and links that came up narrower or slower than fitted",
        "",
        ("pcie_replay_total", "pcie_link_gen", "pcie_link_width"),
        precursor=True,
    ),
    Group(
        "NVLink",
        "errors on the links between GPUs, and their traffic",
        "Needs a board with NVLink whose links are up: `nvidia-smi nvlink --status`.",
        (
            "nvlink_crc_flit_total",
            "nvlink_crc_data_total",
            "nvlink_replay_total",
            "nvlink_recovery_total",
            "nvlink_bandwidth_mib_s",
        ),
        precursor=True,
    ),
    Group(
        "throttling",
        "why the clocks are down: a power brake or a hardware slowdown points at the board or its supply",
        "",
        (
            "clocks_event_reasons",
            "power_violation_ns",
            "thermal_violation_ns",
            "reliability_violation_ns",
            "sm_clock_mhz",
            "mem_clock_mhz",
            "pstate",
        ),
        precursor=True,
    ),
    Group(
        "temperature and power",
        "how hot and how loaded a board runs beside its neighbours",
        "Memory temperature needs a sensor in the memory (HBM boards have one); passively cooled boards have no fan.",
        (
            "gpu_temp_c",
            "mem_temp_c",
            "gpu_margin_c",
            "memory_margin_c",
            "slowdown_temp_c",
            "power_w",
            "power_instant_w",
            "power_limit_w",
            "energy_mj",
            "fan_speed_pct",
        ),
    ),
    Group(
        "load",
        "what a board was doing: tells a hot board from a busy one",
        "With MIG on, utilisation of the whole GPU is not reported.",
        (
            "gpu_util_pct",
            "mem_util_pct",
            "enc_util_pct",
            "dec_util_pct",
            "fb_used_mib",
            "fb_free_mib",
            "fb_reserved_mib",
        ),
    ),
    Group(
        "profiling",
        "how busy the parts of a board are, far finer than utilisation",
        "Needs a data-centre board (Volta or later), DCGM's profiling module, and CAP_SYS_ADMIN in a container; it is "
        "blank while a profiler such as Nsight runs on the board.",
        (
            "gr_engine_active_ratio",
            "sm_active_ratio",
            "sm_occupancy_ratio",
            "tensor_active_ratio",
            "dram_active_ratio",
            "pcie_tx_bytes_s",
            "pcie_rx_bytes_s",
        ),
    ),
    Group(
        "scraping",
        "exporters that slow down, fail or freeze, as they do before a GPU falls off the bus",
        "Made by `predrain collect exporters` while it scrapes: no page and no Prometheus has it.",
        ("scrape_duration_s", "scrape_failures_total", "page_age_s", "clock_skew_s", "channels_reported"),
    ),
)
"""Every channel of the catalogue, in the order in which it is worth switching on where nothing else is known."""

OTHER: Final = Group("your own", "channels declared in params", "", ())
"""Group of channels that the catalogue does not have."""

_BY_CHANNEL: Final[Mapping[str, Group]] = {name: group for group in GROUPS for name in group.channels}


def group_of(channel: str) -> Group:
    """Return a channel's group; :data:`OTHER` for one that the catalogue does not have."""
    return _BY_CHANNEL.get(channel, OTHER)


def grouped(channels: Mapping[str, Channel]) -> list[tuple[Group, list[Channel]]]:
    """Return the groups with those of their channels that are given; groups without any are left out."""
    found = [(group, [channels[name] for name in group.channels if name in channels]) for group in GROUPS]
    found.append((OTHER, [channel for name, channel in channels.items() if name not in _BY_CHANNEL]))
    return [(group, mine) for group, mine in found if mine]


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
