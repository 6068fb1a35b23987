"""The task in pandas: rolling windows by unit, read at rows inserted at the decision times."""

import numpy as np
import pandas as pd

from benchmarks.peers.task import Task, hours


def run(task: Task) -> None:
    """Run the task."""
    columns = ["timestamp", "node", "gpu", *task.channels]
    frame = pd.concat([pd.read_parquet(path, columns=columns) for path in task.files], ignore_index=True)
    frame["gpu"] = frame["gpu"].astype(str)
    frame = frame.sort_values(["gpu", "timestamp"], kind="stable")
    borders = pd.DatetimeIndex(task.times).tz_convert("UTC").as_unit("ms") - task.delay
    start = frame["timestamp"].min()
    channels = list(task.channels)
    features = []
    for gpu, samples in frame.groupby("gpu", sort=True):
        values = samples.set_index("timestamp")[channels].astype(np.float64)
        asked = pd.DataFrame(np.nan, index=borders, columns=channels)
        both = pd.concat([values.assign(asked=False), asked.assign(asked=True)]).sort_index(kind="stable")
        rows = both.pop("asked").to_numpy(dtype=bool)
        passed = ((both.index - start) / pd.Timedelta(hours=1)).to_numpy()[:, None]
        time = both.notna().to_numpy() * passed
        time = pd.DataFrame(np.where(both.notna(), time, np.nan), index=both.index, columns=channels)
        pieces = {}
        for window in task.windows:
            name = f"{hours(window)}h"
            rolling = both.rolling(window, min_periods=1)
            means = rolling.mean()[rows]
            mean_time = time.rolling(window, min_periods=1).mean()[rows]
            product = (both * time).rolling(window, min_periods=1).mean()[rows]
            square = (time * time).rolling(window, min_periods=1).mean()[rows]
            below = (square - mean_time**2).where(lambda spread: spread > 1e-6)
            statistics = {
                "mean": means,
                "std": rolling.std()[rows],
                "min": rolling.min()[rows],
                "max": rolling.max()[rows],
                "slope": (product - means * mean_time) / below,
            }
            for statistic, values_of in statistics.items():
                for channel in channels:
                    pieces[f"{channel}__{statistic}__{name}"] = values_of[channel].to_numpy()
        piece = pd.DataFrame(pieces)
        piece.insert(0, "decision_time", pd.DatetimeIndex(task.times))
        piece.insert(0, "gpu", str(gpu))
        features.append(piece)
    pd.concat(features, ignore_index=True).to_parquet(task.out)
