"""Import of OpenMetrics dumps of a Prometheus database as staged samples.

A dump is ordered by series, rows by time. So the file is read once and its samples are spilled to disk, then split into
time ranges of similar size; each is assembled and staged. Staged files are named after a digest of the dump: a second
run, or one after a kill, adds no duplicates.

``promtool tsdb dump-openmetrics`` and files for ``promtool tsdb create-blocks-from openmetrics`` have timestamps in
seconds and end in ``# EOF``; ``promtool tsdb dump`` (the only one in older versions) has milliseconds. The first
timestamp shows which: 1e11 is the year 1973 in milliseconds, 5138 in seconds. Other exports are converted first.
"""

import csv
import hashlib
import io
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foundation.errors import InputError
from foundation.files import check_regular, disk_errors
from foundation.text import quantity
from telemetry.accounting import Accounting
from telemetry.collect.outbox import Outbox
from telemetry.collect.series.batch import SeriesBook, read_batch
from telemetry.collect.series.exposition import BAD_LINE, LineReader
from telemetry.collect.series.identity import XID_COUNT_METRICS, SeriesCatalogue
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.importing.files.series import dump_lines
from telemetry.packing import DAMAGED, lines_of, open_packed
from telemetry.staging.folder import StagingFolder
from telemetry.values.links import LinkTotals

NO_TIME: Final = "line without timestamp"
"""Reason to leave out a line, besides those of malformed lines and unknown metrics."""

_BLOCK_SAMPLES: Final = 100_000
_MAX_LINE: Final = 1 << 20
_SECONDS_BELOW: Final = 1e11
_MAX_PARTS: Final = 4096
_SAMPLED: Final = 1 << 20  # sampled times, from which the quantiles that split the samples are computed
_LAYOUT_VERSION: Final = 2  # part of the digest; bump it when the split changes
_RECORD: Final = np.dtype([("index", "<i4"), ("ms", "<i8"), ("value", "<f8")])
_DO: Final = "Give a dump of lines `name{labels} value timestamp`."


def stage_dump(
    path: Path,
    staging: StagingFolder,
    catalogue: SeriesCatalogue,
    *,
    accounting: Accounting,
    delay: timedelta = timedelta(minutes=10),
    held_samples: int = 2_000_000,
    progress: Callable[[int, int], None] = lambda _n_done, _total: None,
) -> dict[str, Any]:
    """Stage the samples of a dump, plain or packed (see :mod:`telemetry.packing`); return a report.

    ``accounting`` counts lines (``sample values``) and staged rows. ``delay``: from an XID to its ``known_at``.
    ``held_samples``: maximum in memory (about 100 bytes each). ``progress(done, total)``: bytes, then parts.
    Raises ``InputError`` if the file cannot be read or has no sample of a channel, or the disk is full (40 bytes per
    sample are spilled).
    """
    check_regular(path)
    digest = _digest(path, catalogue)
    staged = {"rows staged": 0, "files staged": 0, "XID events staged": 0}
    with Outbox(staging, f"dump-{digest}") as outbox, _empty_folder(staging.state(f"dump-{digest}")) as folder:
        if outbox.position:
            return outbox.position | staged
        reader, lines, samples, size = _DumpReader(path, catalogue), 0, 0, path.stat().st_size
        spilled = folder / "samples"
        for block in reader.blocks():
            lines += len(block)
            with disk_errors(folder), spilled.open("ab") as stream:
                stream.write(block.tobytes())
            progress(min(reader.characters_read, size), size)
        lines += reader.left_out.total()
        reader.book.identify()
        xids, links = XidCounts(delay), LinkTotals()
        parts = divide(spilled, held_samples)
        for n_done, part in enumerate(parts, start=1):
            block = np.fromfile(part, _RECORD)
            # Parts are processed in time order even if already staged: XID counts need their predecessors.
            place = reader.book.places(block["index"], reader.left_out)
            usable = place >= 0
            samples += int(usable.sum())
            columns = place[usable], block["ms"][usable], block["value"][usable]
            tables = read_batch(reader.book.series, *columns, xids=xids, problems=reader.left_out, links=links)
            new = tables.stage(staging, f"dump-{digest}-{part.name}")
            staged["XID events staged"] += new["events"]
            staged["rows staged"] += new["samples"]
            staged["files staged"] += "samples" in new
            for kind in ("samples", "events"):
                accounting.take(kind, getattr(tables, kind).num_rows, {})
            progress(n_done, len(parts))
        if samples == 0:
            raise _no_samples_error(path, reader)
        report = {
            "samples": samples,
            "series": len(reader.book.series),
            "gpus": len({entry.gpu for entry in reader.book.series}),
            "node": str(catalogue.report_nodes()),
            "GPUs by place": catalogue.placed(),
        }
        accounting.take("sample values", lines, reader.left_out, reader.examples)
        outbox.commit(report)
    return report | staged


@contextmanager
def _empty_folder(folder: Path) -> Iterator[Path]:
    """Create an empty folder for a dump's parts and remove it afterwards; a killed run may have left one."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _DumpReader:
    """Reads a dump in blocks, with bounded memory; series are numbered in ``book``."""

    def __init__(self, path: Path, catalogue: SeriesCatalogue) -> None:
        self.path = path
        self.book = SeriesBook(catalogue)
        self.left_out: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.characters_read = 0
        self._catalogue = catalogue
        self._known = {*catalogue.metric_names(), *XID_COUNT_METRICS}
        self._lines: LineReader[int | str] = LineReader(self._number)

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the samples of known metrics: ``index``, ``ms`` (Unix), ``value``.

        Raises ``InputError`` if the file does not exist, is corrupt or truncated, or has a line over 1 MiB.
        """
        samples = self._samples()
        while block := list(islice(samples, _BLOCK_SAMPLES)):
            yield np.array(block, _RECORD)

    def _samples(self) -> Iterator[tuple[int, int, float]]:
        lines, head = self._read_lines(), []
        for line in lines:
            head.append(line)
            if line.strip() and not line.startswith("#"):
                break
        in_seconds = not head or (dump_lines(self.path) is None and _is_seconds(head[-1].rsplit(None, 1)[-1:]))
        for number, value, ms in self._lines.read(
            chain(head, lines), openmetrics=in_seconds, problems=self.left_out, examples=self.examples
        ):
            if isinstance(number, str):
                self.left_out[number] += 1
            elif ms is None:
                self.left_out[NO_TIME] += 1
            else:
                yield number, ms, value

    def _read_lines(self) -> Iterator[str]:
        try:
            for line in dump_lines(self.path) or ():
                self.characters_read += len(line)
                yield line
            if self.characters_read:
                return
            with (
                open_packed(self.path) as (_, stream),
                io.TextIOWrapper(stream, encoding="utf-8", errors="replace") as text,
            ):
                for line in lines_of(text, self.path, _MAX_LINE):
                    self.characters_read += len(line)
                    yield line.rstrip("\n")
        except (*DAMAGED, UnicodeDecodeError, RecursionError, csv.Error) as error:
            raise InputError(
                f"the file is damaged or truncated: {error}", str(self.path), "Create it again; no rows were read."
            ) from error

    def _number(self, name: str, labels: dict[str, str]) -> int | str:
        if name not in self._known:
            return self._catalogue.left_out_reason(name)
        return self.book.number((("__name__", name), *self._catalogue.deciding(labels)))


def divide(spilled: Path, held_samples: int) -> list[Path]:
    """Split spilled samples by time into files of about half of ``held_samples``; return them in time order.

    Samples with equal times stay together, so a file may be larger. The split is deterministic.
    """
    if not spilled.exists():
        return []
    records = np.memmap(spilled, _RECORD, mode="r")
    number = min(-(-2 * len(records) // held_samples), _MAX_PARTS)
    chosen = np.arange(len(records))
    if len(records) > _SAMPLED:
        chosen = np.sort(np.random.default_rng(0).integers(len(records), size=_SAMPLED))
    limits = np.unique(np.quantile(records["ms"][chosen], np.linspace(0, 1, number + 1)[1:-1], method="lower"))
    with disk_errors(spilled):
        for start in range(0, len(records), _SAMPLED):
            block = records[start : start + _SAMPLED]
            part_of_row = np.searchsorted(limits, block["ms"], side="right")
            for part in np.unique(part_of_row).tolist():
                with spilled.with_name(f"part-{part:04d}").open("ab") as stream:
                    stream.write(block[part_of_row == part].tobytes())
    return sorted(spilled.parent.glob("part-*"))


def _no_samples_error(path: Path, reader: _DumpReader) -> InputError:
    problem = "the file has no samples of a known channel"
    if fault := reader.examples.get(BAD_LINE):
        return InputError(f"{problem}, and a line cannot be read: {fault}", str(path), _DO)
    reasons = ", ".join(f"{reason} ({quantity(count, 'line')})" for reason, count in reader.left_out.most_common(3))
    advice = f"Map its metrics and labels with --mapping. {f'It has {reasons}.' if reasons else 'It is empty.'}"
    return InputError(problem, str(path), advice)


def _digest(path: Path, catalogue: SeriesCatalogue) -> str:
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
    except OSError as error:
        raise InputError(f"the file cannot be read: {error.strerror}", str(path), "Give a dump.") from error
    digest.update(b"%d" % _LAYOUT_VERSION + catalogue.rules())
    return digest.hexdigest()[:24]


def _is_seconds(stamp: list[str]) -> bool:
    try:
        return abs(float(stamp[0])) < _SECONDS_BELOW
    except (ValueError, IndexError):
        return True
