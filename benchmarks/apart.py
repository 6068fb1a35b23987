"""What each step of a build of features takes by one thread: where the time goes beside reading."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from features.groups.history import History
from features.groups.static import StaticPlan
from features.matrix import build_tasks
from features.matrix.slabs import SlabJoiner
from features.matrix.spill import Spill
from telemetry.dataset.store import Dataset

STEPS = (
    "samples decoded from Parquet",
    "cut into blocks of nodes",
    "panes summed up, windows of rows made of them",
    "spilled",
    "read back",
    "history",
    "static facts",
    "rows joined, compared with the fleet",
    "parts encoded and written",
)


class Apart:
    """Counts the seconds of each of :data:`STEPS` in the builds of this process, which must run on one thread.

    A step that calls another one pays for its own part alone.
    """

    def __init__(self) -> None:
        self.spent = dict.fromkeys(STEPS, 0.0)
        self._open: list[str] = []
        self._since = 0.0
        for owner, name, step in (
            (Dataset, "read_runs", STEPS[0]),
            (build_tasks, "read_samples", STEPS[1]),
            (build_tasks, "bucket_values", STEPS[2]),
            (Spill, "keep", STEPS[3]),
            (Spill, "read", STEPS[4]),
            (History, "values", STEPS[5]),
            (StaticPlan, "values", STEPS[6]),
            (SlabJoiner, "columns", STEPS[7]),
            (build_tasks, "write_part", STEPS[8]),
        ):
            self._count(owner, name, step)

    @contextmanager
    def _in(self, step: str) -> Iterator[None]:
        self._mark()
        self._open.append(step)
        try:
            yield
        finally:
            self._mark()
            self._open.pop()

    def _mark(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.spent[self._open[-1]] += now - self._since
        self._since = now

    def _count(self, owner: Any, name: str, step: str) -> None:
        counted = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            with self._in(step):
                found = counted(*args, **options)
            if step == STEPS[1]:  # blocks are cut when they are asked for
                return replace(
                    found,
                    blocks=self._cut(found.blocks),
                    onset=None if found.onset is None else self._cut(found.onset),
                )
            return found

        setattr(owner, name, call)

    def _cut(self, blocks: Iterable[Any]) -> Iterator[Any]:
        each = iter(blocks)
        while True:
            with self._in(STEPS[1]):
                block = next(each, None)
            if block is None:
                return
            yield block
