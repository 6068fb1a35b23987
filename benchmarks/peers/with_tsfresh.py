"""The task with tsfresh: each window of each unit and decision is laid out as a series of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from tsfresh import extract_features

from benchmarks.peers.task import Task, hours

ASKED = {
    "mean": None,
    "minimum": None,
    "maximum": None,
    "standard_deviation": None,
    "length": None,
    "linear_trend_timewise": [{"attr": "slope"}],
}
"""What tsfresh calls the statistics; its deviation divides by the number of samples, so that is asked for too."""


def run(task: Task) -> None:
    """Do the task."""
    columns = ["timestamp", "node", "gpu", *task.channels]
    frame = pd.concat([pd.read_parquet(path, columns=columns) for path in task.files], ignore_index=True)
    frame["gpu"] = frame["gpu"].astype(str)
    frame = frame.sort_values(["gpu", "timestamp"], kind="stable", ignore_index=True)
    rows = pd.MultiIndex.from_product([frame["gpu"].unique(), range(len(task.times))], names=["gpu", "at"])
    told = pd.DataFrame(index=rows)
    for window in task.windows:
        series, sample = _laid_out(frame, task, int(window.total_seconds() * 1000))
        stamps = pd.DatetimeIndex(frame["timestamp"])[sample]
        for channel in task.channels:
            values = pd.DataFrame(
                {"series": series, channel: frame[channel].to_numpy(np.float64)[sample]}, index=stamps
            )
            found = extract_features(
                values.dropna(), column_id="series", default_fc_parameters=ASKED, n_jobs=0, disable_progressbar=True
            )
            count = found[f"{channel}__length"]
            named = {
                "mean": found[f"{channel}__mean"],
                "std": found[f"{channel}__standard_deviation"] * np.sqrt(count / (count - 1).where(count > 1)),
                "min": found[f"{channel}__minimum"],
                "max": found[f"{channel}__maximum"],
                "slope": found[f'{channel}__linear_trend_timewise__attr_"slope"'],
            }
            for statistic, values_of in named.items():
                values_of.index = rows[values_of.index]
                told[f"{channel}__{statistic}__{hours(window)}h"] = values_of
    told = told.reset_index()
    told.insert(1, "decision_time", pd.DatetimeIndex(task.times)[told.pop("at")])
    told.to_parquet(task.out)


def _laid_out(frame: pd.DataFrame, task: Task, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each series' row and the place of each sample, one pair for each sample in a window."""
    borders = pd.DatetimeIndex(task.times).tz_convert("UTC").as_unit("ms").asi8 - int(task.delay.total_seconds() * 1000)

    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for unit, (_, samples) in enumerate(frame.groupby("gpu", sort=True)):
            stamps = pd.DatetimeIndex(samples["timestamp"]).as_unit("ms").asi8
            first = np.searchsorted(stamps, borders - window, side="right")
            last = np.searchsorted(stamps, borders, side="right")
            for at, (begin, end) in enumerate(zip(first, last, strict=True)):
                yield np.full(end - begin, unit * len(borders) + at), samples.index.to_numpy()[begin:end]

    series, sample = zip(*pieces(), strict=True)
    return np.concatenate(series), np.concatenate(sample)
