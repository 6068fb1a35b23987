"""OpenMetrics dumps of a Prometheus database into landed samples.

A dump lists one series after the other, each over its whole time; we need all channels of a GPU at one time. So the
file is read once and its samples are spilled to disk by day and group of GPUs; then each part is assembled and lands.
What lands is named after the file's content, so a second run of the same file lands nothing, and an interrupted one
goes on: with reading if it was reading, with the next part if it was landing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from telemetry.atomic import disk_errors, fsync_path, write_bytes
from telemetry.collect.openmetrics.lines import DumpReader
from telemetry.collect.series.identity import Series, SeriesCatalogue, XidCount
from telemetry.collect.series.mapping import SourceMapping
from telemetry.collect.series.rows import assemble, observed_spans
from telemetry.collect.series.xid_counts import XidCounts, split, watched
from telemetry.dataset.channel import channel_as_dict
from telemetry.errors import InputError
from telemetry.landing.folder import Landing

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


_LAYOUT_VERSION: Final = 1
"""Part of the names of what lands: a change of how parts are cut must not be taken for what landed before."""


@dataclass(frozen=True, slots=True)
class DumpResult:
    """What came of a dump.

    ``rows``: rows that landed now; fewer than the file has where parts had landed before.
    ``events``: XID events that landed now, of the exporter's own counts (``xid_last`` is read when samples are folded).
    ``left_out``: lines and values that are not in the rows, by reason.
    ``first_fault``: the first line that could not be read.
    """

    digest: str
    samples: int
    series: int
    gpus: int
    rows: int
    files: int
    events: int
    left_out: dict[str, int]
    first_fault: str | None


def land_dump(
    path: Path,
    landing: Landing,
    catalogue: SeriesCatalogue,
    mapping: SourceMapping | None = None,
    *,
    delay: timedelta = timedelta(minutes=10),
    held_samples: int = 2_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> DumpResult:
    """Land the samples of a dump.

    ``path``: the file, plain or compressed, see :class:`telemetry.collect.openmetrics.lines.DumpReader`.
    ``catalogue``: made with ``mapping``.
    ``delay``: reporting delay of XID events: ``known_at`` is the sample's time plus it.
    ``held_samples``: samples in memory at a time (some 100 bytes each).
    ``progress``: ``progress(done, total)``: bytes while the file is read, then parts that have landed.
    Raises ``InputError`` if the file cannot be read, holds no sample of ours, or the disk is full (20 bytes a sample
    are spilled).
    """
    advance = progress or (lambda _done, _total: None)
    digest = _digest(path, catalogue, mapping)
    with _alone(landing.state(f"dump-{digest}.lock"), path):
        return _land(path, landing, catalogue, digest, delay, held_samples, advance)


def _land(
    path: Path,
    landing: Landing,
    catalogue: SeriesCatalogue,
    digest: str,
    delay: timedelta,
    held_samples: int,
    advance: Callable[[int, int], None],
) -> DumpResult:
    spill = Spill(landing.state(f"dump-{digest}"), held_samples=held_samples)
    ended = landing.state(f"dump-{digest}.json")
    if ended.exists():
        spill.remove()
        return DumpResult(digest=digest, rows=0, files=0, events=0, **json.loads(ended.read_text(encoding="utf-8")))
    note = spill.finished() or _spill(path, spill, catalogue, advance)
    series = [_entry(each) for each in note["series"]]
    problems: Counter[str] = Counter(note["left_out"])
    rows = files = events = 0
    xids = XidCounts(delay)
    parts = spill.parts()
    for done, part in enumerate(parts):
        for piece, samples in enumerate(slices(part, held_samples)):
            name = f"dump-{digest}-{part.name}-{piece}"
            if len(samples) == 0:
                continue
            told, counts = split(series, samples["index"], samples["ms"], samples["value"])
            table = assemble(told.series, told.index, told.ms, told.values, problems=problems)
            # Of equal name as the samples, and before them: samples of an unknown GPU would be set aside.
            landing.land("inventory", observed_spans(told.series, told.index, told.ms), name=name)
            # Parts come in the order of time, those that have landed before too: a count needs the one before it.
            seen = watched(told)
            rises = xids.follow(counts.series, counts.index, counts.ms, counts.values, watched=seen)
            events += landing.land("events", rises, name=name) is not None and rises.num_rows
            if landing.land("samples", table, name=name) is not None:
                rows, files = rows + table.num_rows, files + 1
        advance(done + 1, len(parts))
    known = {"samples": note["samples"], "series": len(series), "gpus": len({each.gpu for each in series})}
    known |= {"left_out": dict(problems), "first_fault": note["first_fault"]}
    write_bytes(ended, json.dumps(known).encode())
    spill.remove()
    return DumpResult(digest=digest, rows=rows, files=files, events=events, **known)


@contextlib.contextmanager
def _alone(lock: Path, path: Path) -> Iterator[None]:
    """Hold the lock of a dump: two runs would write into one spill."""
    try:
        with disk_errors(lock), FileLock(lock, blocking=False, fallback_to_soft=False):
            yield
    except Timeout:
        raise InputError("another run is reading this dump", str(path), "Wait until it has ended.") from None


def _spill(path: Path, spill: Spill, catalogue: SeriesCatalogue, advance: Callable[[int, int], None]) -> dict[str, Any]:
    reader = DumpReader(path, catalogue)
    size = path.stat().st_size
    spill.begin()
    samples = 0
    try:
        for block in reader.blocks():
            samples += len(block.index)
            spill.add(reader.series, block.index, block.ms, block.values)
            advance(min(block.bytes_read, size), size)
        if samples == 0:
            raise _nothing(path, reader)
    except InputError:
        spill.remove()
        raise
    note = {
        "samples": samples,
        "series": [asdict(each) for each in reader.series],
        "left_out": dict(reader.left_out),
        "first_fault": reader.first_fault,
    }
    spill.finish(reader.series, note)
    return note


def _nothing(path: Path, reader: DumpReader) -> InputError:
    if reader.first_fault is not None:
        return InputError(
            f"the file holds no sample of ours, and a line cannot be read: {reader.first_fault}",
            str(path),
            "Give a dump of lines `name{labels} value timestamp`.",
        )
    most = ", ".join(f"{reason} ({count} lines)" for reason, count in reader.left_out.most_common(3))
    return InputError(
        "the file holds no sample of ours",
        str(path),
        f"Map its metrics and labels with --mapping. {f'It holds {most}.' if most else 'It is empty.'}",
    )


def _entry(content: dict[str, Any]) -> Series | XidCount:
    content = {**content, "inventory": tuple((key, value) for key, value in content["inventory"])}
    return XidCount(**content) if "xid" in content else Series(**content)


def _digest(path: Path, catalogue: SeriesCatalogue, mapping: SourceMapping | None) -> str:
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
    except FileNotFoundError:
        raise InputError("the file does not exist", str(path), "Give the path of a dump.") from None
    except OSError as error:
        raise InputError(f"the file cannot be read: {error.strerror}", str(path), "Give a file.") from error
    rules = {
        "layout": _LAYOUT_VERSION,
        "mapping": None if mapping is None else mapping.model_dump(mode="json"),
        "channels": [channel_as_dict(channel) for channel in catalogue.channels.values()],
    }
    digest.update(json.dumps(rules, sort_keys=True).encode())
    return digest.hexdigest()[:24]
