"""Sorting by (GPU, time) what does not fit into memory: samples are spilled by day and group of GPUs."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from telemetry.atomic import disk_errors, fsync_path, write_bytes
from telemetry.collect.series.identity import Series, XidCount

DAY_MS: Final = 86_400_000
GROUPS: Final = 8
"""Groups of GPUs. With days they make parts that usually fit; larger ones are cut in time."""

RECORD: Final = np.dtype([("index", "<i4"), ("ms", "<i8"), ("value", "<f8")])
_DONE: Final = "spilled.json"
_SCAN_ROWS: Final = 2_000_000


class Spill:
    """Samples on disk, by part.

    ``folder``: where the parts are; what an interrupted run left there is removed, unless it had finished.
    """

    def __init__(self, folder: Path, *, held_samples: int = 2_000_000) -> None:
        self.folder = folder
        self._held = held_samples
        self._blocks: list[npt.NDArray[Any]] = []
        self._count = 0
        self._group = np.empty(0, np.int64)

    def finished(self) -> dict[str, Any] | None:
        """Return the note of an earlier run that had spilled everything, None if there was none."""
        try:
            note: dict[str, Any] = json.loads((self.folder / _DONE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return note

    def begin(self) -> None:
        """Start with an empty folder."""
        with disk_errors(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def add(
        self,
        series: Sequence[Series | XidCount],
        index: npt.NDArray[np.int32],
        ms: npt.NDArray[np.int64],
        values: npt.NDArray[np.float64],
    ) -> None:
        """Take samples; ``series`` may have grown since the last time."""
        if len(index) == 0:
            return
        block = np.empty(len(index), RECORD)
        block["index"], block["ms"], block["value"] = index, ms, values
        self._blocks.append(block)
        self._count += len(block)
        if self._count >= self._held:
            self._write(series)

    def finish(self, series: Sequence[Series | XidCount], note: dict[str, Any]) -> None:
        """Write what is held, and note that everything is there."""
        self._write(series)
        with disk_errors(self.folder):
            for path in self.folder.glob("part-*"):
                fsync_path(path)
            fsync_path(self.folder)
        write_bytes(self.folder / _DONE, json.dumps(note).encode())

    def remove(self) -> None:
        """Remove the parts: all of them have landed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def parts(self) -> list[Path]:
        """Return the parts, by day and group."""
        return sorted(self.folder.glob("part-*"))

    def _write(self, series: Sequence[Series | XidCount]) -> None:
        if not self._blocks:
            return
        if len(series) > len(self._group):
            fresh = [zlib.crc32(each.gpu.encode()) % GROUPS for each in series[len(self._group) :]]
            self._group = np.append(self._group, np.array(fresh, np.int64))
        samples = np.concatenate(self._blocks)
        self._blocks, self._count = [], 0
        key = samples["ms"] // DAY_MS * GROUPS + self._group[samples["index"]]
        order = np.argsort(key, kind="stable")
        key = key[order]
        starts = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        with disk_errors(self.folder):
            for start, end in zip(starts, np.append(starts[1:], len(key)), strict=True):
                day, group = divmod(int(key[start]), GROUPS)
                with (self.folder / f"part-{day:06d}-{group}").open("ab") as stream:
                    stream.write(samples[order[start:end]].tobytes())


def slices(path: Path, most: int) -> Iterator[npt.NDArray[Any]]:
    """Yield a part's samples in pieces of about ``most``, each of a time span of its own.

    ``most``: samples that fit into memory. Samples of one instant stay together, so that a piece may be larger.
    """
    count = path.stat().st_size // RECORD.itemsize
    if count <= most:
        yield np.fromfile(path, RECORD)
        return
    whole = np.memmap(path, RECORD, mode="r")
    pieces = -(-count // most)
    # The day in equal spans of time: samples come at a steady pace, and a span is the same on every run.
    low = int(whole["ms"][0]) // DAY_MS * DAY_MS
    edges = [low + DAY_MS * number // pieces for number in range(pieces + 1)]
    for begin, end in pairwise(edges):
        found = []
        for start in range(0, count, _SCAN_ROWS):
            block = np.asarray(whole[start : start + _SCAN_ROWS])
            found.append(block[(block["ms"] >= begin) & (block["ms"] < end)])
        yield np.concatenate(found)
