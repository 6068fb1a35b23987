"""Event sources to one list of events: reading, and finding the unit."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.dataset.schema import EVENT_RUNS, EVENT_TYPES, EVENTS, ms_of
from telemetry.errors import InputError
from telemetry.importing.columns import KEY_ALIASES, Columns, mapped_text, require, resolve_columns
from telemetry.importing.event_runs import RUN_MS, with_runs
from telemetry.importing.instants import parse_instants, times_of
from telemetry.importing.inventory import Installations
from telemetry.importing.mapping import KernelLogMapping, TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.reading import Batch, read_batches
from telemetry.xids.kernel_log import locate, parse_kernel_log

_XID = re.compile(r"(?:XID[\s:#_-]*)?(\d{1,6})(?:\.0+)?\Z", re.IGNORECASE)
_PLACE = ("node", "gpu", "type")
AFTERWARDS: Final = frozenset({"repair", "replacement", "diagnostic", "driver", "other"})
"""Types that may follow a removal: the work on a part that is out of its node."""


def empty_events() -> pd.DataFrame:
    """Return a frame of no events."""
    return EVENTS.empty_table().to_pandas()


@dataclass(slots=True)
class EventIntake:
    """Reads event tables and places each event on its unit.

    ``delay``: ``known_at`` of an event whose source does not give it is its time plus this.
    """

    mapping: TableMapping
    kernel_log: KernelLogMapping
    stays: Installations
    quarantine: Quarantine
    delay: timedelta
    counts: Counter[str] = field(default_factory=Counter)

    def read(self, file: Path) -> pd.DataFrame:
        """Read one table of events; ``timestamp`` and ``type`` are required, and ``gpu`` or ``node``.

        Returns: usable events in the layout of :data:`telemetry.dataset.schema.EVENTS`.
        Raises ``InputError`` if a required column is missing, a column is unknown, or all instants are naive.
        """
        frames = []
        for batch in read_batches(file, "events", self.quarantine):
            names = batch.table.column_names
            columns = resolve_columns(names, self.mapping, list(EVENT_RUNS.names), KEY_ALIASES, str(file))
            require(columns, ["timestamp", "type", "node" if "node" in columns else "gpu"], names, str(file))
            if self.stays.unit == "node":
                require(columns, ["node"], names, str(file))
            wanted = self._of_interest(batch, columns)
            if len(wanted.rows):
                frames.append(self._frame(wanted, columns))
        return pd.concat(frames, ignore_index=True) if frames else empty_events()

    def read_kernel_log(self, file: Path) -> pd.DataFrame:
        """Read the XID events of a kernel log."""
        said = self.kernel_log
        node = said.node or (file.stem if file.stem in self.stays.node_since else None)
        try:
            with io.TextIOWrapper(pa.input_stream(file), encoding="utf-8", errors="replace") as lines:
                log = parse_kernel_log(
                    lines,
                    node=node,
                    boot_time=said.boot_time,
                    reference_time=said.reference_time,
                    timezone=said.timezone,
                    source=file.name,
                )
        except InputError as error:
            raise InputError(error.what, f"{file}, {error.where}", error.do) from error
        self.quarantine.loss.read("events", file, len(log.events) + len(log.unparsed))
        for number, line, problem in log.unparsed:
            self.quarantine.add(problem, "events", file, number, line)
        self.counts["kernel_log_lines"] += log.n_lines
        self.counts["events_read"] += len(log.events) + len(log.unparsed)
        for code, times in log.unknown_codes.items():
            self.counts[f"xid_{code}_without_description"] += times
        found, unmatched = locate(log.events, self.stays.frame, delay=self.delay)
        self.counts["xids_without_a_gpu"] += unmatched
        text = {
            name: found[name].astype(object).where(found[name].notna(), None).to_numpy(copy=True) for name in _PLACE
        }
        reasons = place_events(text, ms_of(found["timestamp"]), self.stays)
        self.quarantine.add_frame(reasons, "events", file, found)
        found["gpu"], found["node"] = text["gpu"], text["node"]
        return found[reasons == ""]

    def _of_interest(self, batch: Batch, columns: Columns) -> Batch:
        """Leave out the rows whose type the mapping maps to null before anything else is made of them.

        A source of states (a daily row a drive with a column ``failure`` of 0 and 1) has an event in few rows.
        """
        self.counts["events_read"] += len(batch.rows)
        unwanted = [value for value, ours in self.mapping.values.get("type", {}).items() if ours is None]
        column = columns.get(batch.table, "type")
        if not unwanted or column is None or pa.types.is_floating(column.type):
            return batch
        text = pc.utf8_trim_whitespace(column.cast(pa.string()))
        left_out = pc.is_in(text, value_set=pa.array(unwanted, pa.string()))
        self.counts["rows_left_out_by_mapping"] += int(pc.sum(left_out).as_py() or 0)
        kept = pc.invert(left_out)
        return replace(batch, rows=batch.rows[kept.to_numpy(zero_copy_only=False)], table=batch.table.filter(kept))

    def _frame(self, batch: Batch, columns: Columns) -> pd.DataFrame:
        text: dict[str, npt.NDArray[np.object_]] = {}
        for name in ("node", "gpu", "type", "code", "detail", "source"):
            text[name], dropped = mapped_text(columns, batch.table, name, self.mapping)
            self.counts["rows_left_out_by_mapping"] += int((dropped & batch.good).sum())
            batch.good &= ~dropped
        instants = batch.instants(columns, "timestamp", self.mapping.time)
        assert instants is not None
        ms = instants.ms
        text["type"] = _lowered(text["type"])
        batch.refuse("unknown event type", ~np.isin(text["type"].astype(str), EVENT_TYPES), text["type"])
        text["code"] = _codes(text["code"], text["type"])
        batch.refuse("xid event without a code", (text["type"] == "xid") & pd.isna(text["code"]))
        if self.stays.unit == "node":
            text["gpu"] = np.full(len(ms), None, dtype=object)
        reasons = place_events(text, ms, self.stays)
        for reason in sorted({each for each in reasons[batch.good] if each}):
            batch.refuse(reason, reasons == reason)
        known_ms = self._known_ms(batch, columns, ms)
        good = batch.good
        made = pd.DataFrame({name: values[good] for name, values in text.items()})
        made["source"] = made["source"].where(made["source"].notna(), batch.file.name)
        made["timestamp"], made["known_at"] = times_of(ms[good]), times_of(known_ms[good])
        return self._with_runs(made[EVENTS.names], batch, columns)

    def _with_runs(self, made: pd.DataFrame, batch: Batch, columns: Columns) -> pd.DataFrame:
        """Add the columns of runs of a dataset's own events, where the file has them."""
        count, last = columns.get(batch.table, "count"), columns.get(batch.table, "last_at")
        if count is None:
            return made
        number = pd.to_numeric(count.to_pandas(), errors="coerce").to_numpy(np.float64)[batch.good]
        made["count"] = np.clip(np.nan_to_num(number, nan=1.0, posinf=1.0, neginf=1.0), 1, 2**31 - 1).astype(np.int64)
        if last is not None:
            first = ms_of(made["timestamp"])
            # A run lies within one minute, so a last time further off is none.
            ms = parse_instants(last, self.mapping.time, f"{batch.file}, column 'last_at'").ms[batch.good]
            made["last_at"] = times_of(np.clip(ms, first, first + RUN_MS))
        return with_runs(made)

    def _known_ms(self, batch: Batch, columns: Columns, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        default = ms + int(self.delay.total_seconds() * 1000)
        instants = batch.instants(columns, "known_at", self.mapping.time, optional=True)
        if instants is None:
            return default
        known = np.where(instants.ok, instants.ms, default)
        self.counts["known_at_before_the_event"] += int((known < ms).sum())
        # Nothing is known before it happens: such an entry time is a clock error or a backdated ticket.
        return np.maximum(known, ms)


def place_events(
    text: dict[str, npt.NDArray[np.object_]], ms: npt.NDArray[np.int64], stays: Installations
) -> npt.NDArray[np.object_]:
    """Check events against the inventory, and fill in the node of a GPU and the parent of a MIG instance.

    ``text``: ``node``, ``gpu``, ``type``; the first two are changed in place.
    ``ms``: shape (n,).
    Returns: why an event cannot be used, or an empty text; shape (n,).
    """
    reasons = np.full(len(ms), "", dtype=object)
    gpu, node, kind = text["gpu"], text["node"], text["type"]
    on_gpu = np.array([each is not None for each in gpu], dtype=bool)
    gpu[:] = [None if each is None else stays.parents.get(each, each) for each in gpu]
    if stays.unit == "gpu":
        stay = stays.find(stays.codes(gpu), ms)
        later = np.isin(kind.astype(str), sorted(AFTERWARDS))
        reasons[on_gpu & (stay == -1)] = "unknown gpu"
        reasons[on_gpu & (stay == -2)] = "before installation"
        reasons[on_gpu & (stay == -3) & ~later] = "after removal"
        placed = on_gpu & (stay >= 0)
        there = stays.nodes[np.clip(stay, 0, None)]
        unnamed = placed & pd.isna(node)
        node[unnamed] = there[unnamed]
        reasons[placed & (node != there)] = "on another node than the inventory says"
        for index in np.flatnonzero(on_gpu & (stay == -3) & later):
            if node[index] is None:
                node[index] = stays.last_node(str(gpu[index]), int(ms[index]))
    for index in np.flatnonzero(~on_gpu):
        since = stays.node_since.get(node[index])
        if node[index] is None:
            reasons[index] = "missing node and gpu" if stays.unit == "gpu" else "missing node"
        elif since is None:
            reasons[index] = "unknown node"
        elif ms[index] < since:
            reasons[index] = "before installation"
    return reasons


def _lowered(texts: npt.NDArray[np.object_]) -> npt.NDArray[np.object_]:
    place, distinct = pd.factorize(texts)
    return np.array([*(text.lower() for text in distinct), None], dtype=object)[place]


def _codes(codes: npt.NDArray[np.object_], kinds: npt.NDArray[np.object_]) -> npt.NDArray[np.object_]:
    """Write XID codes as bare numbers."""
    chosen = np.flatnonzero((kinds == "xid") & ~pd.isna(codes))
    place, distinct = pd.factorize(codes[chosen])
    matches = [(_XID.match(text), text) for text in distinct]
    bare = np.array([text if match is None else str(int(match[1])) for match, text in matches], dtype=object)
    made = codes.copy()
    made[chosen] = bare[place]
    return made
