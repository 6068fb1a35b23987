"""Group commit: the samples of concurrent requests are written together.

A request is answered only once its samples are on disk, without a file per request. The first request of a group
starts a timer; the group is written when the timer expires or enough samples are pending.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InputError
from foundation.files import write_bytes
from foundation.running import Failing
from foundation.server.problems import RequestRefused
from telemetry.collect.remote_write.decoding import Samples
from telemetry.collect.series.batch import InventoryNews, read_batch
from telemetry.collect.series.xid_counts import XidCounts
from telemetry.dataset.schema import INSTANT
from telemetry.staging.folder import STAGED_EVENTS, StagingFolder

_LOG = logging.getLogger(__name__)
_WRITING = "writing samples"
_STATE = "receive-xid-counts.json"
_SAVE_EVERY = timedelta(minutes=1)
# Well below FORGOTTEN_AFTER_MS, so that a restart neither repeats nor misses an XID.


class SampleWriter:
    """Stages batches of samples; for one thread at a time."""

    def __init__(self, staging: StagingFolder, clock: Callable[[], datetime]) -> None:
        self._staging = staging
        self._clock = clock
        self._news = InventoryNews()
        self._xids = self._read_counts()
        self._events: list[pa.Table] = []
        self._saved = clock()

    def write(self, batches: Sequence[Samples]) -> tuple[int, Counter[str]]:
        """Write the samples of ``batches`` to disk; return the number of rows, and problems by reason.

        Raises ``InputError`` if the disk is full or not writable. Files are complete or absent; rows staged again after
        a client's retry are deduplicated later.
        """
        problems: Counter[str] = Counter()
        rows = 0
        books: dict[int, list[Samples]] = {}
        for batch in batches:
            if len(batch):
                books.setdefault(id(batch.series), []).append(batch)
        for same_series in books.values():
            columns = ([getattr(batch, name) for batch in same_series] for name in ("index", "ms", "values"))
            index, ms, values = map(np.concatenate, columns)
            tables = read_batch(same_series[0].series, index, ms, values, xids=self._xids, problems=problems)
            if tables.events.num_rows:  # XidCounts returns each only once: kept until staged, and known as of now
                now, event_times = pa.scalar(self._clock(), INSTANT), tables.events.column("timestamp")
                known = pc.if_else(pc.greater(event_times, now), event_times, now)
                place = STAGED_EVENTS.get_field_index("known_at")
                self._events.append(tables.events.set_column(place, "known_at", known))
            # The inventory first: samples of GPUs missing from it would be quarantined.
            self._staging.stage("inventory", self._news.select(tables.inventory))
            self._stage_events()
            self._staging.stage("samples", tables.samples)
            self._news.staged()
            rows += tables.samples.num_rows
        return rows, problems

    def close(self) -> None:
        """Save the XID counts for the next run; if that fails, an XID may be repeated."""
        try:
            self._save()
        except (InputError, OSError) as error:
            _LOG.warning("cannot save the XID counts for the next start: %s", error)

    def _stage_events(self) -> None:
        if self._events:
            self._staging.stage("events", pa.concat_tables(self._events))
        if self._events or self._clock() - self._saved > _SAVE_EVERY:
            self._events = []
            self._save()

    def _save(self) -> None:
        self._saved = self._clock()
        write_bytes(self._staging.state(_STATE), json.dumps(self._xids.as_state()).encode())

    def _read_counts(self) -> XidCounts:
        state: Any = None
        try:
            state = json.loads(self._staging.state(_STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, InputError) as error:
            _LOG.warning("cannot read the saved XID counts, starting at zero: %s", error)
        return XidCounts(timedelta(0), state)


MIB = 2**20


@dataclass(frozen=True, slots=True)
class ReceiverSettings:
    """Limits of the receiver; requests beyond a temporary one (memory, concurrency) are answered with 503.

    ``tokens``: file of bearer tokens; None disables authentication. ``body_bytes``: maximum size of a body,
    ``held_bytes`` of all bodies being read, ``decoded_bytes`` of a decompressed body.
    ``flush_interval_s``: maximum wait before a group is written; ``flush_samples`` pending samples end it early.
    """

    tokens: Path | None = None
    body_bytes: int = 32 * MIB
    held_bytes: int = 256 * MIB
    decoded_bytes: int = 64 * MIB
    request_rows: int = 1_000_000
    flush_interval_s: float = 1.0
    flush_samples: int = 250_000
    held_samples: int = 4_000_000
    body_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    concurrency: int = 512


class GroupCommit:
    """Collects batches and writes them in groups, on one event loop.

    ``write``: writes a group, as :meth:`SampleWriter.write` does; called in a thread, one call at a time.
    ``written``: called with the samples, rows and problems of each written group.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Samples]], tuple[int, Counter[str]]],
        settings: ReceiverSettings,
        written: Callable[[int, int, Counter[str]], None],
    ) -> None:
        self._write_batches, self._settings, self._written = write, settings, written
        self._writing = asyncio.Lock()
        self._gathering: list[Samples] = []
        self._groups: list[asyncio.Task[list[RequestRefused | None]]] = []  # the last one collects, if any does
        self._hurry = asyncio.Event()
        self.held_samples = 0
        """Samples in memory, pending or being written."""
        self.failing = Failing(_LOG)
        """True while the last group could not be written."""

    async def add(self, batch: Samples) -> None:
        """Wait until a batch is on disk; raises ``RequestRefused`` (503) if memory is exhausted or the write fails."""
        self.check_room(len(batch))
        self.held_samples += len(batch)
        if not self._gathering:
            self._groups.append(asyncio.create_task(self._write_group()))
        group, position = self._groups[-1], len(self._gathering)
        self._gathering.append(batch)
        if sum(map(len, self._gathering)) >= self._settings.flush_samples:
            self._hurry.set()
        # A client that disconnects must not cancel the write of its group.
        failure = (await asyncio.shield(group))[position]
        if failure is not None:
            raise failure

    def check_room(self, samples: int = 1) -> None:
        """Raise ``RequestRefused`` (503) if ``samples`` more would exceed the memory limit."""
        # A request above the limit is accepted if nothing else is pending; otherwise it never would be.
        if self.held_samples and self.held_samples + samples > self._settings.held_samples:
            raise RequestRefused.busy("too many samples wait to be written", "memory")

    async def close(self) -> None:
        """Write pending batches without waiting for the timer."""
        while self._groups:
            self._hurry.set()
            await asyncio.wait(self._groups)

    async def _write_group(self) -> list[RequestRefused | None]:
        """Write the batches added until the timer expires; return each one's error, None if it is on disk."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.flush_interval_s):
                await self._hurry.wait()
        self._hurry.clear()
        group, self._gathering = self._gathering, []
        try:
            return await self._commit(group)
        finally:
            self._groups = [task for task in self._groups if task is not asyncio.current_task()]

    async def _commit(self, batches: list[Samples]) -> list[RequestRefused | None]:
        size = sum(map(len, batches))
        failure: RequestRefused | None = None
        try:
            async with self._writing:
                rows, problems = await asyncio.to_thread(self._write_batches, batches)
        except (InputError, OSError) as error:
            self.failing.failed(_WRITING, error, level=logging.ERROR)
            failure = RequestRefused.busy(f"samples cannot be stored now: {error}", "disk")
        except Exception:  # every request of the group must be answered
            if len(batches) > 1:
                # Write one by one, so that a request that cannot be written does not fail the others.
                return [failure for batch in batches for failure in await self._commit([batch])]
            _LOG.exception("samples cannot be written")
            self.failing.failed(_WRITING, "see above", level=logging.ERROR)
            failure = RequestRefused.busy("samples cannot be stored now: see the receiver's log", "internal")
        else:
            self.failing.recovered(_WRITING)
            self._written(size, rows, problems)
        self.held_samples -= size
        return [failure] * len(batches)
