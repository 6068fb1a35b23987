"""How long a service takes to take in one scrape round: 10,000 GPUs with 20 channels, pushed as it would be over HTTP.

Run it alone: ``python benchmarks/online_update.py [--quick]``. A round is one sample of every GPU, raw, a minute after
the one before, as an Arrow body through the reader that ``POST /v1/telemetry`` uses, onto the disk (the journal, forced
to it) and into the online state; every tenth round also closes a step. The peer is what a service without a window of
its own would do: append the round to a table of everything that is looked back on, and drop what has aged (pandas); it
keeps nothing on the disk. Before anything is timed, what the state holds is compared with what was pushed.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa

from features.live import live_rows
from serving.online.journal import Journal
from serving.online.state import OnlineState
from telemetry.events import empty_events
from telemetry.receiving.push import read_arrow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, it would find only its own folder

from tests.serving.online.measure_online_state import START, Clock, Source, config_of

REQUIRED_MS: Final = 250.0
"""Most milliseconds that a round may take."""

AIM: Final = f"{REQUIRED_MS:g} ms of CPU a round at most"

_MINUTE: Final = timedelta(minutes=1)
_DAYS = 30.0  # of look-back: what is done a round does not depend on how much of it is held


def fleet(source: Source) -> pd.DataFrame:
    """Return the inventory of a source's GPUs."""
    none = pd.Series([None] * source.n, dtype="datetime64[ms, UTC]")
    since = pd.Series([START - timedelta(days=99)] * source.n, dtype="datetime64[ms, UTC]")
    keys = {"node": source.nodes.to_pylist(), "gpu": source.gpus.to_pylist(), "model": "H100"}
    return pd.DataFrame(keys | {"installed_at": since, "removed_at": none})


def body_of(table: pa.Table) -> bytes:
    """Return a table as a sender sends it."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def check(days: float) -> None:
    """Compare rows from a small state with those of the same samples in one table; leave if they differ."""
    config, clock, source = config_of(days), Clock(), Source(64, 2)
    state = OnlineState.of(config, fleet(source), empty_events(), clock)
    given = []
    for _ in range(24):
        clock.now += config.step
        given.append(source.round(clock.now, config.step.total_seconds(), jitter_ms=0))
        state.push(given[-1])
    inventory, events = state.fleet
    found = state.rows(clock.now)
    frame = live_rows(pa.concat_tables(given), events, inventory, clock.now, config)
    expected = frame[[column.name for column in config.columns]].to_numpy(np.float32)
    if not np.allclose(found.values, expected, rtol=1e-6, atol=1e-9, equal_nan=True):
        sys.exit("the rows of the online state are not those of its samples: nothing is measured")


def main() -> None:
    """Check, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2,000 GPUs")
    gpus = 2_000 if parser.parse_args().quick else 10_000
    check(_DAYS)
    config, clock, source = config_of(_DAYS), Clock(), Source(gpus, 1)
    state = OnlineState.of(config, fleet(source), empty_events(), clock)
    begun = clock.now
    while clock.now < begun + timedelta(hours=1):  # six steps, so that there is something to join and to close
        clock.now += _MINUTE
        state.push(source.round(clock.now, 60, jitter_ms=0))
    if (held := state.totals).stored != held.rows:
        sys.exit(f"{held.rows - held.stored} rows were not stored: nothing is measured")
    folder = tempfile.TemporaryDirectory(prefix="online-update-")
    journal = Journal(Path(folder.name) / "journal")
    ours: list[tuple[float, float]] = []
    decoding: list[float] = []
    keeping: list[float] = []
    peer: list[float] = []
    table: pd.DataFrame | None = None
    for _ in range(30):
        clock.now += _MINUTE
        now = clock.now
        samples = source.round(now, 60, jitter_ms=0)
        body = body_of(samples)

        wall, cpu = time.perf_counter(), time.process_time()
        read = read_arrow(body, "samples", config.channels, now=now, row_limit=10_000, byte_limit=2**26)["samples"]
        decoding.append(time.perf_counter() - wall)
        began = time.perf_counter()
        journal.append("samples", read, now)
        keeping.append(time.perf_counter() - began)
        state.push(read, at=now)
        ours.append((time.perf_counter() - wall, time.process_time() - cpu))
        state.tidy()
        frame = samples.to_pandas()

        began = time.perf_counter()
        both = frame if table is None else pd.concat([table, frame], ignore_index=True)
        table = both[both["timestamp"] > now - timedelta(hours=1)]
        peer.append(time.perf_counter() - began)
    journal.close()
    folder.cleanup()
    walls, cpus = (sorted(each) for each in zip(*ours, strict=True))
    middle = walls[len(walls) // 2]
    print(f"a round of {gpus:,} GPUs with {len(config.channels)} channels, {len(body) / 1e6:.1f} MB")
    print(f"{'':<34}{'wall ms':>10}{'CPU ms':>10}")
    for name, wall, cpu in (
        ("taken in, median", middle, cpus[len(cpus) // 2]),
        ("taken in, slowest (closes a step)", walls[-1], cpus[-1]),
        ("of it reading the body, median", sorted(decoding)[len(decoding) // 2], math.nan),
        ("of it writing the journal, median", sorted(keeping)[len(keeping) // 2], math.nan),
        ("pandas: append and drop, median", sorted(peer)[len(peer) // 2], math.nan),
    ):
        processor = "" if math.isnan(cpu) else f"{1000 * cpu:.1f}"
        print(f"{name:<34}{1000 * wall:>10.1f}{processor:>10}")
    line = {
        "name": "online_update",
        "value": round(1000 * middle, 1),
        "unit": "ms a round",
        "peer": "pandas, append and drop",
        "ratio": round(sorted(peer)[len(peer) // 2] / middle, 2),
        "limit_share": round(1000 * middle / REQUIRED_MS, 3),
        "checked": True,
        "aim": AIM,
        "met": 1000 * cpus[-1] <= REQUIRED_MS,
    }
    print(json.dumps(line))
    if not line["met"]:
        sys.exit(f"a round takes {1000 * cpus[-1]:.0f} ms of CPU; it must be {REQUIRED_MS:.0f} ms at most")


if __name__ == "__main__":
    main()
