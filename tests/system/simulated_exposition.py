"""A simulated fleet as a dcgm-exporter would have shown it to Prometheus: OpenMetrics text with time stamps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from telemetry.dataset.store import Dataset


def metric_of(dataset: Dataset, channel: str) -> str:
    """Return dcgm-exporter's name of a channel (the older one), or our own where DCGM has none."""
    names = dataset.meta.channels[channel].dcgm_names
    return names[-1] if names else channel


def exposition(dataset: Dataset) -> Iterator[str]:
    """Yield the lines of the text, without the last."""
    held = dataset.inventory().set_index("gpu")
    slots = {gpu: str(slot) for gpu, slot in held["slot"].items()}
    for bucket in dataset.buckets():
        frame = dataset.read_bucket(bucket).to_pandas()
        seconds = frame["timestamp"].astype("int64").to_numpy() // 1000
        assert (frame["timestamp"].dt.microsecond == 0).all()
        for (gpu, node), rows in frame.groupby(["gpu", "node"], observed=True).indices.items():
            stay = held.loc[[gpu]].iloc[0]
            labels = (
                f'gpu="{slots[gpu]}",UUID="{gpu}",pci_bus_id="{stay["pci_bus_id"]}",device="nvidia{slots[gpu]}",'
                f'modelName="{stay["model"]}",Hostname="{node}",DCGM_FI_DRIVER_VERSION="{stay["driver"]}",'
                f'job="dcgm-exporter",instance="{node}:9400"'
            )
            for channel in dataset.meta.channels:
                values = frame[channel].iloc[rows]
                shown = ~values.isna().to_numpy()
                if not shown.any():
                    continue
                name = f"{metric_of(dataset, channel)}{{{labels}}}"
                for value, at in zip(values.to_numpy()[shown].tolist(), seconds[rows][shown].tolist(), strict=True):
                    yield f"{name} {value!r} {at}\n"


def write_openmetrics(dataset: Dataset, path: Path) -> int:
    lines = 0
    with path.open("w") as stream:
        for line in exposition(dataset):
            stream.write(line)
            lines += 1
        stream.write("# EOF\n")
    return lines


def samples_of(dataset: Dataset) -> pd.DataFrame:
    """Return all samples of a dataset, sorted, with plain names."""
    frames = [dataset.read_bucket(bucket).to_pandas() for bucket in dataset.buckets()]
    frame = pd.concat([part.astype({"node": str, "gpu": str}) for part in frames], ignore_index=True)
    return frame.sort_values(["gpu", "timestamp"], ignore_index=True)


def same_values(left: pd.Series, right: pd.Series) -> bool:
    """Whether two columns hold the same values, bit by bit, and the same nulls."""
    a, b = left.to_numpy(), right.to_numpy()
    if a.dtype.kind == "f":
        return bool(np.array_equal(a, b.astype(a.dtype), equal_nan=True))
    return bool(left.isna().equals(right.isna())) and bool((left.dropna() == right.dropna()).all())
