"""The task with DuckDB: decision times joined to the samples of each window, grouped."""

from __future__ import annotations

import duckdb

from benchmarks.peers.task import Task, hours


def run(task: Task) -> None:
    """Do the task."""
    base = duckdb.connect()
    base.execute("SET TimeZone = 'UTC'")
    files = [str(path) for path in task.files]
    values = ", ".join(f'"{name}"::DOUBLE AS "{name}"' for name in task.channels)
    base.execute(
        f"CREATE TABLE samples AS SELECT timestamp, gpu::VARCHAR AS gpu, {values} FROM read_parquet($1)",  # noqa: S608
        [files],
    )
    base.execute("CREATE TABLE times (decision_time TIMESTAMPTZ)")
    base.executemany("INSERT INTO times VALUES (?)", [(time,) for time in task.times])
    delay = f"INTERVAL '{round(task.delay.total_seconds())} seconds'"
    parts = []
    for window in task.windows:
        name = f"{hours(window)}h"
        told = []
        for channel in task.channels:
            value = f's."{channel}"'
            told += [
                f'avg({value}) AS "{channel}__mean__{name}"',
                f'stddev_samp({value}) AS "{channel}__std__{name}"',
                f'min({value}) AS "{channel}__min__{name}"',
                f'max({value}) AS "{channel}__max__{name}"',
                f'regr_slope({value}, epoch_ms(s.timestamp) / 3600000.0 - 438000) AS "{channel}__slope__{name}"',
            ]
        begin = f"d.decision_time - {delay} - INTERVAL '{hours(window)} hours'"
        parts.append(
            f"SELECT s.gpu, d.decision_time, {', '.join(told)} FROM times d JOIN samples s "  # noqa: S608
            f"ON s.timestamp > {begin} AND s.timestamp <= d.decision_time - {delay} GROUP BY s.gpu, d.decision_time"
        )
    query = f"SELECT * FROM ({parts[0]})"  # noqa: S608
    for part in parts[1:]:
        query += f" FULL JOIN ({part}) USING (gpu, decision_time)"
    base.execute(f"COPY ({query}) TO '{task.out}' (FORMAT parquet)")
