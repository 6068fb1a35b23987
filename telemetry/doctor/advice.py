"""How a missing channel is switched on: the counter file's line, or what board, driver and permissions need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from telemetry.channel import Channel
from telemetry.doctor.counters import LATER_FIELDS, counter_line
from telemetry.doctor.groups import Group
from telemetry.doctor.observation import SourceKind


def how_to(group: Group, bad: Sequence[tuple[Channel, str]], kind: SourceKind) -> Iterator[str]:
    """Yield the steps that bring channels of a group, one line each."""
    if group.name == "scraping":
        yield "Scrape the exporters with `predrain collect exporters`, which measures it."
        return
    missing = [channel for channel, status in bad if status in ("missing", "unsure")]
    there = [channel.name for channel, status in bad if status in ("empty", "partly")]
    stale = [channel.name for channel, status in bad if status == "stale"]
    if group.name == "XIDs" and missing:
        yield "Follow the kernel log: `predrain collect kernel-log --source journal --dataset DATASET` on each node."
    if kind == "NVML":
        if missing or there:
            yield group.condition or "The driver does not give it: update the driver, or look at `nvidia-smi -q`."
        return
    lines = [(channel, counter_line(channel)) for channel in missing]
    now = [line for channel, line in lines if line and not LATER_FIELDS.intersection(channel.dcgm_names)]
    later = [line for channel, line in lines if line and LATER_FIELDS.intersection(channel.dcgm_names)]
    if now:
        yield "Add to the exporter's counter file (deploy/dcgm-exporter/predrain-counters.csv has it all):"
        yield from (f"    {line}" for line in now)
    if later:
        yield "With an exporter built on DCGM 4.6 or later add as well:"
        yield from (f"    {line}" for line in later)
    if kind == "dataset" and (now or later):
        yield "Then collect again: `predrain collect prometheus` for history, `predrain collect exporters` from now on."
    own = [channel.name for channel, line in lines if line is None]
    if own:
        yield f"No exporter gives {', '.join(own)}: map it from your own metrics (--mapping), or leave it."
    if there:
        yield (
            f"Some or all GPUs give no {', '.join(there)}: compare nodes that have it with nodes that have not "
            "(counter file, driver, ECC, MIG)."
        )
    if stale:
        yield f"{', '.join(stale)} came once and stopped: look at the exporters and their targets."
    if (now or later or there) and group.condition:
        yield group.condition
