"""Event sources to one list of events: reading, finding the unit, and dropping what several sources say twice."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.columns import KEY_ALIASES, Columns, as_text, map_values, require, resolve_columns
from telemetry.instants import OK, PROBLEMS, parse_instants
from telemetry.inventory import naive_error
from telemetry.mapping import TableMapping
from telemetry.quarantine import Quarantine, row_text
from telemetry.reading import Batch, read_batches
from telemetry.schema import EVENT_TYPES, EVENTS
from telemetry.stays import Stays

_XID = re.compile(r"(?:XID[\s:#_-]*)?(\d{1,6})(?:\.0+)?\Z", re.IGNORECASE)
AFTERWARDS: Final = frozenset({"repair", "replacement", "diagnostic", "driver", "other"})
"""Types that may follow a removal: the work on a part that is out of its node."""

_KEY = ("known_at", "timestamp", "node", "gpu", "type", "code", "source", "detail")


def empty_events() -> pd.DataFrame:
    """Return a frame of no events."""
    return EVENTS.empty_table().to_pandas()


@dataclass(slots=True)
class EventIntake:
    """Reads event tables and places each event on its unit.

    ``delay``: ``known_at`` of an event whose source does not give it is its time plus this.
    """

    mapping: TableMapping
    stays: Stays
    quarantine: Quarantine
    delay: timedelta
    counts: Counter[str] = field(default_factory=Counter)

    def read(self, file: Path) -> pd.DataFrame:
        """Read one table of events; ``timestamp`` and ``type`` are required, and ``gpu`` or ``node``.

        Returns: usable events in the layout of :data:`telemetry.schema.EVENTS`.
        Raises ``InputError`` if a required column is missing, a column is unknown, or all instants are naive.
        """
        frames = []
        known = list(EVENTS.names)
        naive, usable, example = 0, 0, None
        where = ""
        for batch in read_batches(file, "events", self.quarantine):
            names = batch.table.column_names
            columns = resolve_columns(names, self.mapping, known, KEY_ALIASES, str(file))
            require(columns, ["timestamp", "type", "node" if "node" in columns else "gpu"], names, str(file))
            if self.stays.unit == "node":
                require(columns, ["node"], names, str(file))
            wanted = self._of_interest(batch, columns)
            if len(wanted.rows) == 0:
                continue
            where = f"{file}, column {columns.source.get('timestamp', 'timestamp')!r}"
            stamped = columns.get(wanted.table, "timestamp")
            assert stamped is not None
            instants = parse_instants(stamped, self.mapping.time, where)
            naive_rows = instants.status == 3
            if naive_rows.any() and example is None:
                example = stamped.filter(pa.array(naive_rows))
            naive += int(naive_rows.sum())
            usable += int((instants.status == OK).sum())
            frames.append(self._frame(file, wanted.rows, wanted.table, columns, instants.ms, instants.status))
        if naive and not usable:
            raise naive_error(where, "events", example)
        return pd.concat(frames, ignore_index=True) if frames else empty_events()

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
        return Batch(batch.rows[kept.to_numpy(zero_copy_only=False)], batch.table.filter(kept))

    def _frame(
        self,
        file: Path,
        rows: npt.NDArray[np.int64],
        table: pa.Table,
        columns: Columns,
        ms: npt.NDArray[np.int64],
        status: npt.NDArray[np.int8],
    ) -> pd.DataFrame:
        length = table.num_rows
        good = np.ones(length, dtype=bool)

        def refuse(reason: str, chosen: npt.NDArray[np.bool_], details: npt.NDArray[np.object_] | None = None) -> None:
            chosen = chosen & good
            shown = None if details is None else [details[index] for index in np.flatnonzero(chosen)]
            self.quarantine.add_rows(reason, "events", file.name, chosen, rows, table, shown)
            good[chosen] = False

        text: dict[str, npt.NDArray[np.object_]] = {}
        for name in ("node", "gpu", "type", "code", "detail", "source"):
            text[name] = as_text(columns.get(table, name), length)
            if name in self.mapping.values:
                text[name], dropped = map_values(text[name], self.mapping.values[name])
                self.counts["rows_left_out_by_mapping"] += int((dropped & good).sum())
                good[dropped] = False
        for problem, reason in PROBLEMS.items():
            refuse(reason, status == problem)
        text["type"] = np.array([None if each is None else each.lower() for each in text["type"]], dtype=object)
        refuse("unknown event type", ~np.isin(text["type"].astype(str), EVENT_TYPES), text["type"])
        text["code"] = _codes(text["code"], text["type"])
        refuse("xid event without a code", (text["type"] == "xid") & pd.isna(text["code"]))
        if self.stays.unit == "node":
            text["gpu"] = np.full(length, None, dtype=object)
        reasons = place_events(text, ms, self.stays)
        for reason in sorted({each for each in reasons[good] if each}):
            refuse(reason, reasons == reason)
        known_ms = self._known_ms(file, columns, table, ms, refuse)
        made = pd.DataFrame({name: values[good] for name, values in text.items()})
        made["source"] = made["source"].where(made["source"].notna(), file.name)
        made["timestamp"] = pd.to_datetime(ms[good], unit="ms", utc=True).as_unit("ms")
        made["known_at"] = pd.to_datetime(known_ms[good], unit="ms", utc=True).as_unit("ms")
        return made[EVENTS.names]

    def _known_ms(
        self, file: Path, columns: Columns, table: pa.Table, ms: npt.NDArray[np.int64], refuse: Any
    ) -> npt.NDArray[np.int64]:
        default = ms + int(self.delay.total_seconds() * 1000)
        column = columns.get(table, "known_at")
        if column is None:
            return default
        instants = parse_instants(column, self.mapping.time, f"{file}, column 'known_at'")
        for problem, reason in PROBLEMS.items():
            if problem != 1:
                refuse(f"{reason} in known_at", instants.status == problem)
        known = np.where(instants.status == OK, instants.ms, default)
        self.counts["known_at_before_the_event"] += int((known < ms).sum())
        # Nothing is known before it happens: such an entry time is a clock error or a backdated ticket.
        return np.maximum(known, ms)


def place_events(
    text: dict[str, npt.NDArray[np.object_]], ms: npt.NDArray[np.int64], stays: Stays
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
        for index in np.flatnonzero(placed):
            there = stays.nodes[stay[index]]
            if node[index] is None:
                node[index] = there
            elif node[index] != there:
                reasons[index] = "on another node than the inventory says"
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


def _codes(codes: npt.NDArray[np.object_], kinds: npt.NDArray[np.object_]) -> npt.NDArray[np.object_]:
    """Write XID codes as bare numbers."""
    made = codes.copy()
    for index in np.flatnonzero(kinds == "xid"):
        match = None if codes[index] is None else _XID.match(codes[index])
        if match is not None:
            made[index] = str(int(match[1]))
    return made


def sort_events(events: pd.DataFrame) -> pd.DataFrame:
    """Sort events by when they were known, and everything else after it, so that the order is the content's alone."""
    keys = {
        name: events[name] if name in ("known_at", "timestamp") else events[name].astype("str").fillna("")
        for name in _KEY
    }
    order = pd.DataFrame(keys).sort_values(list(_KEY), kind="stable").index
    return events.loc[order].reset_index(drop=True)


def dedupe_events(events: pd.DataFrame, dedupe: timedelta) -> pd.DataFrame:
    """Keep one event of those in which several sources tell the same, hearing of them one after the other.

    ``events``: in the layout of :data:`telemetry.schema.EVENTS`, in any order.
    ``dedupe``: an event is dropped when one of the same unit, type and code, but of another source, that was known
    earlier lies within this span of its ``timestamp``. What one source says at two times are two events, for repeats
    within minutes are what makes some XIDs a fault; at one time, it says one thing twice. What a source made of an
    exporter's count never drops another source's event.
    Returns: sorted by ``known_at``.

    Going by ``known_at`` makes it causal: what was known at a time does not depend on what was reported later. The type
    is part of the key because a failure and its repair may both come without a code.
    """
    events = sort_events(events)
    if len(events) < 2:
        return events
    span = int(dedupe.total_seconds() * 1000)
    stamps = events["timestamp"].dt.tz_localize(None).to_numpy().astype("datetime64[ms]").astype(np.int64)
    key = same_thing(events)
    source = pd.factorize(events["source"].astype("str").fillna("\0"))[0]
    weak = is_from_exporter(events["source"])
    made_of_counts = set(source[weak].tolist())
    size = np.bincount(key)
    keep = np.ones(len(events), dtype=bool)
    kept: dict[int, list[tuple[int, int]]] = {}
    for index in np.flatnonzero(size[key] > 1).tolist():
        heard = kept.setdefault(int(key[index]), [])
        stamp, said_by = int(stamps[index]), int(source[index])
        near = heard[bisect_left(heard, (stamp - span, -1)) : bisect_right(heard, (stamp + span, len(events)))]
        if not weak[index]:
            near = [each for each in near if each[1] not in made_of_counts]
        if any(other != said_by or when == stamp for when, other in near):
            keep[index] = False
        else:
            insort(heard, (stamp, said_by))
    return events[keep].reset_index(drop=True)


def is_from_exporter(source: pd.Series) -> npt.NDArray[np.bool_]:
    """Return which sources are the exporters' counts (``exporter:METRIC``), that tell late and not of every event."""
    return source.astype("str").fillna("").str.startswith("exporter:").to_numpy(dtype=bool)


def same_thing(events: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return a number for each event that is the same for events of one unit, type and code.

    A GPU keeps its identity when it moves; an event of the whole node is the node's.
    """
    parts = [events[name].astype("str").fillna("\0") for name in ("node", "gpu", "type", "code")]
    owner = parts[1].where(events["gpu"].notna(), "\0" + parts[0])
    return np.asarray(pd.MultiIndex.from_arrays([owner, parts[2], parts[3]]).factorize()[0], np.int64)


def quarantine_frame(events: pd.DataFrame, reasons: npt.NDArray[np.object_], file: str, quarantine: Quarantine) -> None:
    """Set aside the events that have a reason; their row is their place in the frame."""
    for index in np.flatnonzero(reasons != ""):
        record = {name: value for name, value in events.iloc[index].to_dict().items() if not pd.isna(value)}
        quarantine.add(str(reasons[index]), "events", file, int(index) + 1, row_text(record))
