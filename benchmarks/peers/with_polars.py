"""The task in Polars: lazy dynamic groups at the decision times, window by window."""

from datetime import UTC, datetime, timedelta

import polars as pl

from benchmarks.peers.task import Task, hours


def _text(span: timedelta) -> str:
    return f"{round(span / timedelta(minutes=1))}m"


def run(task: Task) -> None:
    """Run the task."""
    epoch = datetime(2020, 1, 1, tzinfo=UTC)
    passed = (pl.col("timestamp") - epoch).dt.total_milliseconds() / 3_600_000.0
    values = [pl.col(name).cast(pl.Float64) for name in task.channels]
    samples = (
        pl.scan_parquet([str(path) for path in task.files])
        .select(pl.col("timestamp"), pl.col("gpu").cast(pl.String), *values)
        .sort("gpu", "timestamp")
        .with_columns([pl.when(pl.col(name).is_not_null()).then(passed).alias(f"{name}@") for name in task.channels])
        .collect()
    )
    joined: pl.DataFrame | None = None
    for window in task.windows:
        name = f"{hours(window)}h"
        statistics = []
        for channel in task.channels:
            value, time = pl.col(channel), pl.col(f"{channel}@")
            middle, begin = value.mean(), time.mean()
            slope = ((value - middle) * (time - begin)).sum() / ((time - begin) ** 2).sum()
            statistics += [
                middle.alias(f"{channel}__mean__{name}"),
                value.std().alias(f"{channel}__std__{name}"),
                value.min().alias(f"{channel}__min__{name}"),
                value.max().alias(f"{channel}__max__{name}"),
                slope.alias(f"{channel}__slope__{name}"),
            ]
        features = (
            samples.lazy()
            .group_by_dynamic(
                "timestamp",
                every=_text(task.every),
                period=_text(window),
                offset=f"-{_text(window + task.delay)}",
                closed="right",
                group_by="gpu",
            )
            .agg(statistics)
            .with_columns((pl.col("timestamp") + window + task.delay).alias("decision_time"))
            .drop("timestamp")
            .collect()
        )
        keys = ["gpu", "decision_time"]
        joined = features if joined is None else joined.join(features, on=keys, how="full", coalesce=True)
    assert joined is not None
    joined.filter(pl.col("decision_time").is_in(list(task.times))).write_parquet(task.out)
