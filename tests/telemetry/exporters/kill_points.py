"""Run as a script: collects with a process that kills itself at its Nth step of writing, for each N there is.

Prints the number of points. Each process scrapes the same two targets and goes on where the one before was killed.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from telemetry.exporters.status import STATE_NAME, own_state, write_state
from tests.telemetry.exporters.exporter_pages import (
    FakeFetcher,
    FleetClock,
    exporter_page,
    make_collector,
    run_for,
    run_virtual,
)


def collect(root: Path, life: int, kill_at: int) -> None:
    reached = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal reached
            reached += 1
            if reached == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for name in ("fsync", "link", "unlink", "rename", "replace"):
        setattr(os, name, counted(getattr(os, name)))
    pq.write_table = counted(pq.write_table)

    async def work() -> None:
        async def state(collector: Any) -> None:
            now = collector.clock.now()
            write_state(root / "state" / STATE_NAME, own_state(collector, now), now)

        def answer(url: str, number: int) -> str:
            return exporter_page(url[7:9], 1000 * life + number)

        clock = FleetClock()
        clock.offset = life * timedelta(hours=1)
        collector = make_collector(root, FakeFetcher(answer), ["n1", "n2"], clock=clock, on_round=state)
        await run_for(collector, 125)

    run_virtual(work)


def main() -> None:
    root, kill_at = Path(sys.argv[1]), 0
    while True:
        kill_at += 1
        pid = os.fork()
        if pid == 0:
            collect(root, kill_at, kill_at)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
            break
    sys.stdout.write(f"{kill_at - 1}\n")


if __name__ == "__main__":
    main()
