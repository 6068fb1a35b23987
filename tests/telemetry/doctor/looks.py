"""Pages and observations that the doctor's tests look at."""

from datetime import UTC, datetime
from typing import Any

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import ChannelSeen, Observation
from telemetry.doctor.groups import counter_name

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
H100 = "NVIDIA H100 80GB HBM3"


def labels(gpu: int, *, model: str = H100, host: str = "node07", extra: str = "") -> str:
    return (
        f'gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="00000000:3{gpu}:00.0",device="nvidia{gpu}",modelName="{model}",'
        f'Hostname="{host}",DCGM_FI_DRIVER_VERSION="580.95.05"{extra}'
    )


def page(
    channels: dict[str, float] | None = None, *, gpus: int = 2, model: str = H100, stamp: str = "", more: str = ""
) -> str:
    """Give a page of dcgm-exporter with the channels (default: all that DCGM has), the same value on each GPU."""
    if channels is None:
        channels = {name: 1.0 for name, channel in CATALOGUE.items() if channel.dcgm_names}
    lines = []
    for channel, value in channels.items():
        name = counter_name(CATALOGUE[channel])
        lines.append(f"# HELP {name} {channel}\n# TYPE {name} gauge")
        lines += [f"{name}{{{labels(gpu, model=model)}}} {value:g}{stamp}" for gpu in range(gpus)]
    return "\n".join(lines) + "\n" + more


def observation(**given: Any) -> Observation:
    """Give what was seen of a healthy H100 node, with changes."""
    seen = {name: ChannelSeen(name, 8) for name, channel in CATALOGUE.items() if channel.dcgm_names or not channel.amd}
    whole: dict[str, Any] = {
        "kind": "exporter page",
        "where": "http://node07:9400/metrics",
        "at": NOW,
        "units": 8,
        "nodes": 1,
        "models": {H100: 8},
        "channels": seen,
        "xid_events": True,
    }
    return Observation(**whole | given)


def without(*names: str) -> dict[str, ChannelSeen]:
    return {name: seen for name, seen in observation().channels.items() if name not in names}


USED = frozenset({"pcie_replay_total", "ecc_sbe_volatile_total", "gpu_temp_c", "xid_last"})
