"""What waits in a landing folder, looked at before anything of it is compacted."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from foundation.files import disk_errors
from telemetry.accounting import Accounting
from telemetry.dataset.channels import Channel, with_rollups
from telemetry.dataset.schema import INSTANT
from telemetry.importing.instants import WRONG_CLOCK
from telemetry.landing.folder import Landing
from telemetry.landing.observations import collapse, from_landed, from_samples, no_runs
from telemetry.landing.tables import KINDS, SAMPLE_KEYS, Kind, lay_out

_LOG = logging.getLogger(__name__)

SETTLING_STEPS: Final = 2
"""Rows of this many newest steps wait for the next compaction: a step is rolled up once, and sources lag."""

AHEAD: Final = timedelta(hours=1)
"""A row this far in the future has a wrong clock."""

EARLIEST: Final = datetime(2016, 1, 1, tzinfo=UTC)
"""A row before this has a clock that was never set: there was no DCGM yet."""

_KEYS: Final = frozenset({*SAMPLE_KEYS.names, "sample_count"})


@dataclass(slots=True)
class Waiting:
    """The landed files of one compaction.

    ``files``: those that can be compacted, by kind.
    ``pieces``: what is compacted of the sample files: the files themselves, or those of their rows that have settled.
    ``undeclared``: channels that no parameter declares; files that hold them go on waiting.
    ``held_back``: rows that are too new.
    ``refused``: files that cannot be used and were put aside.
    ``seen``: observations of all rows that are compacted, see
    :func:`telemetry.landing.observations.merge_observations`.
    """

    landing: Landing
    channels: Mapping[str, Channel]
    step: timedelta
    now: datetime
    files: dict[Kind, list[Path]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    pieces: list[Path] = field(default_factory=list)
    undeclared: set[str] = field(default_factory=set)
    held_back: int = 0
    refused: int = 0
    seen: pd.DataFrame = field(default_factory=no_runs)
    accounting: Accounting = field(default_factory=Accounting)

    @property
    def settled_until(self) -> datetime:
        """End of the last step whose rows are all expected to have come."""
        beyond = (self.now - SETTLING_STEPS * self.step) - datetime(1970, 1, 1, tzinfo=UTC)
        return datetime(1970, 1, 1, tzinfo=UTC) + (beyond // self.step) * self.step

    def look(self) -> None:
        """Read every waiting file once; put aside what cannot be used, and set back what is too new."""
        known = set(with_rollups(self.channels))
        sampled: list[pd.DataFrame] = []
        frames: list[pd.DataFrame] = []
        for kind in KINDS:
            for path in self.landing.waiting(kind):
                try:
                    table = pq.read_table(path)
                    self._check(kind, table)
                except FileNotFoundError:
                    continue
                except (pa.ArrowException, OSError, ValueError, KeyError) as error:
                    self._refuse(path, error)
                    continue
                self.accounting.read("landed files")
                if kind == "samples":
                    unknown = set(table.column_names) - _KEYS - known
                    self.undeclared |= unknown
                    if unknown:
                        self._wait(f"a declaration of {min(unknown)} under `channels:`", table.num_rows, path)
                    table = table.slice(0, 0) if unknown else self._settle(path, table)
                    if table.num_rows == 0:
                        self.accounting.waiting("landed files", "its rows", 1, path.name)
                        continue
                    sampled.append(from_samples(self._plausible(table, "timestamp")))
                elif kind == "inventory":
                    plausible = self._plausible(table, "seen_at")
                    self.accounting.read("observations", table.num_rows)
                    self.accounting.used("observations", plausible.num_rows)
                    wrong = table.num_rows - plausible.num_rows
                    self.accounting.left_out("observations", WRONG_CLOCK, wrong, path.name)
                    frames.append(from_landed(plausible))
                self.accounting.used("landed files")
                self.files[kind].append(path)
        full = [frame for frame in (*frames, collapse(sampled)) if len(frame)]
        self.seen = pd.concat(full, ignore_index=True) if full else no_runs()

    def _check(self, kind: Kind, table: pa.Table) -> None:
        if kind != "samples":
            lay_out(kind, table, self.channels)
            return
        channels = [name for name in table.column_names if name not in _KEYS]
        lay_out(kind, table.drop_columns(channels), self.channels)
        if not channels:
            raise ValueError("it has no channel")
        for name in channels:
            if not _is_number(table.schema.field(name).type):
                raise ValueError(f"column {name!r} holds no numbers")

    def _settle(self, path: Path, table: pa.Table) -> pa.Table:
        """Land the rows that are too new once more, under a name of their own, and keep the others."""
        limit = pa.scalar(self.settled_until, INSTANT)
        # A clock in the future would be too new for ever: such a row is compacted now, into the quarantine.
        wrong = pc.greater(table.column("timestamp"), pa.scalar(self.now + AHEAD, INSTANT))
        done = pc.or_(pc.less_equal(table.column("timestamp"), limit), wrong)
        settled = table.filter(done)
        if settled.num_rows == table.num_rows:
            self.pieces.append(path)
            return table
        rest = table.filter(pc.invert(done))
        self.held_back += rest.num_rows
        self._wait("the end of their step", rest.num_rows, path)
        if settled.num_rows == 0:
            return settled  # nothing of it is compacted: the file itself goes on waiting
        self.landing.stage("samples", rest, name=f"rest-{_digest(path)}-{limit.value // 1000}")
        piece = self.landing.root / "tmp" / f"settled-{_digest(path)}.parquet"
        with disk_errors(piece):
            piece.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(settled, piece, compression="lz4")
        self.pieces.append(piece)
        return settled

    def _plausible(self, table: pa.Table, column: str) -> pa.Table:
        """Leave out the rows of clocks that cannot be right; the compaction quarantines them."""
        low, high = pa.scalar(EARLIEST, INSTANT), pa.scalar(self.now + AHEAD, INSTANT)
        stamps = table.column(column)
        return table.filter(pc.and_(pc.greater_equal(stamps, low), pc.less_equal(stamps, high)))

    def _wait(self, reason: str, number: int, path: Path) -> None:
        self.accounting.read("samples", number)
        self.accounting.waiting("samples", reason, number, path.name)

    def _refuse(self, path: Path, error: Exception) -> None:
        self.accounting.read("landed files")
        self.accounting.left_out("landed files", "cannot be read", 1, f"{path.name}: {error}")
        target = self.landing.put_aside(path, "refused")
        _LOG.error("%s cannot be used and is put aside as %s: %s", path, target, error)
        self.refused += 1


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _digest(path: Path) -> str:
    return hashlib.sha256(f"{path.parent.name}/{path.name}".encode()).hexdigest()[:24]
