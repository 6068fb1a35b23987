"""Detects frozen telemetry: an exporter keeps serving stale values of a GPU that no longer responds.

After an XID 79, dcgm-exporter repeats the last temperature, power and utilization for days, while fields that the
driver reads from the device disappear. These samples are excluded from the dataset, and their onset becomes an event.
Thresholds and fields are in ``instruments.yaml``.

A sample is evaluated from itself and earlier samples only, so that training sees the same data as a live decision.
The first samples of a frozen stretch therefore stay in the dataset.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.files import disk_errors
from telemetry.dataset.parquet import write_small
from telemetry.importing.samples.block import Block, ChannelValues
from telemetry.importing.samples.instrument_rules import RULES, MinRepetition
from telemetry.importing.samples.pages import Pages

STATE_NAME: Final = "instruments.parquet"
"""Dataset file with the detector state and the frozen stretches of each GPU."""

EVENT_CODE: Final = "frozen_telemetry"
"""Code of the ``other`` event at the first sample detected as frozen."""

FROZEN: Final = "frozen instrument"
DEAD_CHANNEL: Final = "dead field"
"""Reasons for excluding samples and channel values."""

_MINUTE_MS: Final = 60_000
_NO_ROW: Final = -1

_SERIES: Final = (*RULES.fluctuating, RULES.load, RULES.energy)
_ACTIVITY: Final = RULES.activity.channels
_LASTING: Final = {name: f"{name}_above_zero_ms" for name in RULES.lasting_counters.channels}
_NUMBERS: Final = ("last_ms", "since_ms", "samples", "fields_before", "fields")
STATE: Final = pa.schema(
    [
        pa.field("unit", pa.string(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in _NUMBERS),
        pa.field("is_frozen", pa.bool_(), nullable=False),
        *(pa.field(name, pa.float64()) for name in _SERIES),
        *(pa.field(f"{name}_zero_{what}", pa.int64()) for name in _ACTIVITY for what in ("samples", "since_ms")),
        *(pa.field(name, pa.int64()) for name in _LASTING.values()),
        pa.field("stretches_ms", pa.list_(pa.int64()), nullable=False),
    ]
)
"""State per unit that the next import continues from.

``last_ms``: newest sample. ``since_ms``, ``samples``: start and length of the current repetition of power and
temperature. ``fields``: maximum number of device fields in its samples; ``fields_before``: the same for the previous
repetition. The values of the repetition follow; load and energy are null once they have changed in it.
``stretches_ms``: first and last sample of each frozen stretch, alternating.
"""

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class InstrumentFindings:
    """Frozen rows and dead channels of a block.

    ``frozen``: marks frozen rows. ``onsets``: the row of each stretch at which it was detected.
    ``dead``: marks, by channel, the rows in which it is not measured.
    """

    frozen: _Bools
    onsets: _Ints
    dead: dict[str, _Bools]


class Instruments:
    """Stateful detector across blocks; rows of a unit must arrive in time order.

    ``units``: names by unit code. ``state``: rows of :data:`STATE`; may include units that are gone.
    """

    def __init__(self, units: Sequence[str], state: pa.Table | None = None) -> None:
        self._units = units
        self._other = (STATE.empty_table() if state is None else state).to_pylist()
        self.stretches: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        codes = {unit: code for code, unit in enumerate(units)}
        known = [(codes[row["unit"]], row) for row in self._other if row["unit"] in codes]
        self._other = [row for row in self._other if row["unit"] not in codes]
        places = np.array([code for code, _ in known], np.int64)

        def column(name: str, absent: float, kind: type[np.generic]) -> npt.NDArray[Any]:
            state = np.full(len(units), absent, kind)
            if len(places):
                values = [row.get(name) for _, row in known]
                state[places] = [absent if value is None else value for value in values]
            return state

        self._state: dict[str, npt.NDArray[Any]] = {
            **{name: column(name, 0 if name == "samples" else _NO_ROW, np.int64) for name in _NUMBERS},
            "is_frozen": column("is_frozen", False, np.bool_),
            **{name: column(name, np.nan, np.float64) for name in _SERIES},
            **{f"{name}_zero_samples": column(f"{name}_zero_samples", 0, np.int64) for name in _ACTIVITY},
            **{f"{name}_zero_since_ms": column(f"{name}_zero_since_ms", _NO_ROW, np.int64) for name in _ACTIVITY},
            **{name: column(name, _NO_ROW, np.int64) for name in _LASTING.values()},
        }
        for code, row in known:
            ends = row["stretches_ms"]
            if ends:
                self.stretches[code] = list(zip(ends[::2], ends[1::2], strict=True))

    def check(self, block: Block, raw: _Bools | None = None) -> InstrumentFindings:
        """Evaluate the new rows of a block sorted by (unit, ms), and update the state.

        Stored rows (order -1) were evaluated when they were new. They, and new rows older than the newest one of their
        unit, are only compared with known stretches: a repeated row may have filled a stored one. ``raw``: marks
        stored rows that are raw samples rather than rolled-up cells (default: none).
        """
        frozen = np.zeros(len(block), np.bool_)
        dead = {name: np.zeros(len(block), np.bool_) for name in _ACTIVITY if name in block.series}
        is_late = block.ms <= self._state["last_ms"][block.unit]
        is_new = block.order >= 0
        is_known = is_late & (is_new if raw is None else is_new | raw)
        for code in sorted(self.stretches.keys() & set(np.unique(block.unit[is_known]).tolist())):
            for since_ms, until_ms in self.stretches[code]:
                frozen |= is_known & (block.unit == code) & (block.ms >= since_ms) & (block.ms <= until_ms)
        rows = np.flatnonzero(is_new & ~is_late)
        is_apart = self._have_stamps_of_their_own(block, rows)
        onsets = self._follow(block, rows[~is_apart], frozen)
        for name, marks in dead.items():
            self._follow_zeros(name, block, rows[~is_apart], marks)
        if is_apart.any():
            onsets = np.sort(np.append(onsets, self._follow_pages(block, rows[is_apart], frozen, dead)))
        dead |= {name: self._dropped_to_zero(name, block, rows) for name in _LASTING if name in block.series}
        last = _ends(block.unit[rows])
        self._state["last_ms"][block.unit[rows[last]]] = block.ms[rows[last]]
        return InstrumentFindings(frozen, onsets, dead)

    def _have_stamps_of_their_own(self, block: Block, rows: _Ints) -> _Bools:
        """Mark the rows of units that never report power and temperature in the same row."""
        power, temperature = (
            np.logical_or.reduce([~np.isnan(_column(block, name, rows)) for name in names])
            for names in (RULES.power, RULES.temperature)
        )
        has_both, any_power, any_temperature = np.zeros((3, len(self._units)), np.bool_)
        has_both[block.unit[rows[power & temperature]]] = True
        any_power[block.unit[rows[power]]] = True
        any_temperature[block.unit[rows[temperature]]] = True
        return np.asarray((any_power & any_temperature & ~has_both)[block.unit[rows]])

    def _follow_pages(self, block: Block, rows: _Ints, frozen: _Bools, dead: dict[str, _Bools]) -> _Ints:
        """Evaluate rows with one channel each by page; return the rows at which a frozen stretch was detected."""
        pages = Pages.of(block, rows, RULES.temperature)
        pages.complete([name for name in RULES.device_fields.channels if name not in _SERIES])
        all_rows = np.arange(len(pages.block))
        was_frozen, are_frozen = self._state["is_frozen"].copy(), np.zeros(len(all_rows), np.bool_)
        onsets = self._follow(pages.block, all_rows, are_frozen)
        frozen[rows] = pages.spread(are_frozen, was_frozen)
        for name, marks in dead.items():
            are_dead = np.zeros(len(all_rows), np.bool_)
            self._follow_zeros(name, pages.block, all_rows, are_dead)
            marks[rows] = pages.spread(are_dead, np.zeros(len(self._units), np.bool_))
            marks[rows] &= _column(block, name, rows) == 0
        return pages.ends[onsets]

    def _follow(self, block: Block, rows: _Ints, frozen: _Bools) -> _Ints:
        """Mark frozen rows; return the rows at which a frozen stretch was detected."""
        values = {name: _column(block, name, rows) for name in _SERIES}
        page_age_s = _column(block, RULES.page_age, rows)
        with np.errstate(invalid="ignore"):
            is_witness = np.logical_and.reduce(
                [
                    np.logical_or.reduce([values[name] > 0 for name in names])
                    for names in (RULES.power, RULES.temperature)
                ]
            )
        # Other rows, for example of sources with one file per metric, are no evidence.
        rows = rows[is_witness]
        if len(rows) == 0:
            return np.empty(0, np.int64)
        state, join = self._state, _WithHeads.of(block.unit[rows])
        fields = np.zeros(len(rows), np.int64)
        for name in RULES.device_fields.channels:
            if name in block.series:
                fields += block.series[name].valid[rows]
        values = {name: join(state[name], column[is_witness]) for name, column in values.items()}
        page_age_s = join(np.nan, page_age_s[is_witness])
        ms, fields = join(state["since_ms"], block.ms[rows]), join(state["fields"], fields)
        known_samples, fields_before = join(state["samples"], 1), join(state["fields_before"], 0)
        # A repetition starts when power or temperature changes, or when device fields disappear or reappear.
        changes = [_differs(values[name]) for name in RULES.fluctuating]
        is_start = join.is_head | np.append(True, np.logical_or.reduce([*changes, np.diff(fields > 0)]))
        # A unit without history has nothing to repeat.
        is_start[join.heads + 1] |= known_samples[join.heads] == 0
        start = np.maximum.accumulate(np.where(is_start, join.position, 0))
        samples = join.position - start + known_samples[start]
        most_fields = _most_so_far(fields, np.cumsum(is_start))
        fields_before = np.where(join.is_head[start], fields_before[start], most_fields[start - 1])
        evidence_tests: dict[str, Callable[[], _Bools]] = {
            "vanished": lambda: (fields_before >= RULES.device_fields.fewest) & (fields == 0),
            "energy": lambda: _is_still(values[RULES.energy], start) & (values[RULES.energy] > 0),
            "load": lambda: _is_still(values[RULES.load], start) & (values[RULES.load] > 0),
            "page": lambda: page_age_s >= RULES.frozen.page.minutes * 60,
        }
        is_certain = join.is_head & join(state["is_frozen"], False)
        for evidence, holds in evidence_tests.items():
            minimum: MinRepetition = getattr(RULES.frozen, evidence)
            is_long = samples >= minimum.samples
            if is_long.any():  # rare
                is_long &= ms - ms[start] >= minimum.minutes * _MINUTE_MS
                is_certain |= holds() & is_long & ~join.is_head
        newest_certain = np.maximum.accumulate(np.where(is_certain, join.position, _NO_ROW))
        # From the first certain row to the end of the repetition; a live decision has already used the rows before it.
        is_frozen = newest_certain >= start
        onset = np.flatnonzero(is_frozen & ~join.is_head & ~np.append(False, is_frozen[:-1]))
        frozen[rows] = is_frozen[join.rows]
        self._note_stretches(join, ms, start, is_frozen, block.unit[rows])
        last = join.ends
        units, first = block.unit[rows[_ends(block.unit[rows])]], start[last]
        state["since_ms"][units], state["samples"][units] = ms[first], samples[last]
        state["fields_before"][units], state["fields"][units] = fields_before[last], most_fields[last]
        state["is_frozen"][units] = is_frozen[last]
        of_newest = np.flatnonzero(start >= np.repeat(first, np.diff(join.heads, append=len(join.position))))
        begins = np.searchsorted(of_newest, first)
        for name in _SERIES:
            has_moved = values[name][of_newest] != values[name][start[of_newest]]
            is_still = ~np.logical_or.reduceat(has_moved, begins)
            state[name][units] = np.where(is_still, values[name][first], np.nan)
        return rows[np.searchsorted(join.rows, onset)]

    def _note_stretches(self, join: "_WithHeads", ms: _Ints, start: _Ints, is_frozen: _Bools, unit: Any) -> None:
        """Record frozen stretches, because late rows within them are frozen too."""
        chosen = np.flatnonzero(is_frozen & ~join.is_head)
        if len(chosen) == 0:
            return
        begins, firsts = np.unique(start[chosen], return_index=True)
        for begin, first, last in zip(begins, firsts, np.append(firsts[1:], len(chosen)) - 1, strict=True):
            code = int(unit[np.searchsorted(join.rows, chosen[first])])
            since_ms = int(ms[chosen[first]])
            if join.is_head[begin] and is_frozen[begin] and self.stretches[code]:
                # Continues a stretch that began in an earlier block.
                since_ms = self.stretches[code].pop()[0]
            self.stretches[code].append((since_ms, int(ms[chosen[last]])))

    def _follow_zeros(self, name: str, block: Block, rows: _Ints, dead: _Bools) -> None:
        """Mark rows in which a profiling field is exactly zero because it is not measured."""
        values = _column(block, name, rows)
        is_known = ~np.isnan(values)
        rows, values = rows[is_known], values[is_known]
        if len(rows) == 0:
            return
        samples_name, since_name = f"{name}_zero_samples", f"{name}_zero_since_ms"
        join = _WithHeads.of(block.unit[rows])
        with np.errstate(invalid="ignore"):
            is_busy = _column(block, RULES.load, rows) >= RULES.activity.busy_pct
        # Only zeros of a busy GPU are evidence: an idle one measures zero.
        counted, is_nonzero = join(False, (values == 0) & is_busy), join(True, values != 0)
        known_samples, since_ms = join(self._state[samples_name], 0), join(self._state[since_name], _NO_ROW)
        start = np.maximum.accumulate(np.where(is_nonzero, join.position, 0))
        total = np.cumsum(counted)
        samples = total - total[start] + known_samples[start]
        ms = join(_NO_ROW, block.ms[rows])
        first = np.maximum.accumulate(np.where(counted & (samples == 1), join.position, _NO_ROW))
        begin_ms = np.where(first >= start, ms[first], since_ms[start])
        minimum = RULES.activity
        is_dead = (samples >= minimum.samples) & (ms - begin_ms >= minimum.minutes * _MINUTE_MS) & ~is_nonzero
        dead[rows] = is_dead[join.rows]
        units = block.unit[rows[_ends(block.unit[rows])]]
        self._state[samples_name][units] = samples[join.ends]
        self._state[since_name][units] = begin_ms[join.ends]

    def _dropped_to_zero(self, name: str, block: Block, rows: _Ints) -> _Bools:
        """Return the rows in which a counter that the board stores is zero, shortly after it was above zero."""
        dead = np.zeros(len(block), np.bool_)
        values = _column(block, name, rows)
        rows, values = rows[~np.isnan(values)], values[~np.isnan(values)]
        if len(rows):
            ms, state, join = block.ms[rows], self._state[_LASTING[name]], _WithHeads.of(block.unit[rows])
            above_zero_ms = join(state, np.where(values > 0, ms, _NO_ROW))
            is_latest = join.is_head | (above_zero_ms != _NO_ROW)
            above_zero_ms = above_zero_ms[np.maximum.accumulate(np.where(is_latest, join.position, 0))]
            state[join.units] = above_zero_ms[join.ends]
            since_ms = above_zero_ms[join.rows]
            is_recent = ms - since_ms < RULES.lasting_counters.minutes * _MINUTE_MS
            dead[rows] = (values == 0) & (since_ms != _NO_ROW) & is_recent
        return dead

    def table(self) -> pa.Table:
        """Return the state as :data:`STATE`, one row per unit with samples."""
        rows = list(self._other)
        for code in np.flatnonzero(self._state["last_ms"] != _NO_ROW).tolist():
            row = {name: column[code].item() for name, column in self._state.items()}
            row |= {name: None for name in _SERIES if np.isnan(row[name])}
            stretches = [ms for stretch in self.stretches.get(code, ()) for ms in stretch]
            rows.append(row | {"unit": self._units[code], "stretches_ms": stretches})
        return pa.Table.from_pylist(sorted(rows, key=itemgetter("unit")), schema=STATE)


@dataclass(frozen=True, slots=True)
class _WithHeads:
    """Rows of units, each unit preceded by a head row that represents all earlier rows.

    ``heads``, ``rows``, ``ends``: positions of the head rows, the other rows, and the last row of each unit.
    """

    units: npt.NDArray[Any]
    heads: _Ints
    rows: _Ints
    ends: _Ints
    is_head: _Bools
    position: _Ints

    @classmethod
    def of(cls, unit: npt.NDArray[Any]) -> "_WithHeads":
        begins = np.flatnonzero(np.append(True, unit[1:] != unit[:-1]))
        heads = begins + np.arange(len(begins))
        position = np.arange(len(unit) + len(begins))
        is_head = np.zeros(len(position), np.bool_)
        is_head[heads] = True
        return cls(
            unit[begins], heads, np.flatnonzero(~is_head), np.append(heads[1:], len(position)) - 1, is_head, position
        )

    def __call__(self, of_units: Any, of_rows: Any) -> npt.NDArray[Any]:
        """Combine head values (an array by unit code, or a constant) with row values."""
        first = of_units[self.units] if isinstance(of_units, np.ndarray) else of_units
        combined = np.empty(len(self.position), np.asarray(of_rows).dtype)
        combined[self.heads], combined[self.rows] = first, of_rows
        return combined


def _ends(unit: npt.NDArray[Any]) -> _Ints:
    """Return the last row of each unit."""
    return np.flatnonzero(np.append(unit[1:] != unit[:-1], True)) if len(unit) else np.empty(0, np.int64)


def _column(block: Block, name: str, rows: _Ints) -> _Floats:
    """Return a channel's values as float64, NaN where missing."""
    series = block.series.get(name)
    if series is None:
        return np.full(len(rows), np.nan)
    return np.where(series.valid[rows], series.values[rows].astype(np.float64), np.nan)


def _differs(column: _Floats) -> _Bools:
    current, previous = column[1:], column[:-1]
    return (current != previous) & ~(np.isnan(current) & np.isnan(previous))


def _is_still(column: _Floats, start: _Ints) -> _Bools:
    """Mark the rows at which a value has been known and constant since the start of the repetition."""
    last_change = np.where(column == column[start], _NO_ROW, np.arange(len(column)))
    return np.maximum.accumulate(last_change) < start


def _most_so_far(numbers: _Ints, group: _Ints) -> _Ints:
    """Return the running maximum of small non-negative numbers within each group of consecutive rows."""
    span = 1 << 20
    return np.maximum.accumulate(group * span + np.maximum(numbers, 0)) - group * span


def without_dead_values(block: Block, findings: InstrumentFindings) -> Block:
    """Return the block without values of frozen rows and dead fields; frozen rows get ``count`` 0."""
    if not findings.frozen.any() and not any(rows.any() for rows in findings.dead.values()):
        return block
    series = dict(block.series)
    for name, values in series.items():
        is_dead = np.zeros(len(block), np.bool_) if name in RULES.kept else findings.frozen
        is_dead = is_dead | findings.dead.get(name, False)
        if is_dead.any():
            valid = values.valid & ~is_dead
            series[name] = ChannelValues(np.where(valid, values.values, np.zeros(1, values.values.dtype)), valid)
    count = np.where(findings.frozen, 0, block.count).astype(np.int32)
    keys: dict[str, Any] = {key: getattr(block, key) for key in ("unit", "node", "ms", "order", "mig")}
    return Block(**keys, count=count, series=series)


def has_values(block: Block) -> npt.NDArray[np.bool_]:
    """Mark rows with raw samples or any remaining channel value."""
    present = block.count > 0
    if not present.all():
        for series in block.series.values():
            present = present | series.valid
    return present


def read_instruments(root: Path) -> pa.Table:
    """Return the rows of :data:`STATE` of a dataset; empty without the file."""
    path = root / STATE_NAME
    return pq.read_table(path, schema=STATE) if path.exists() else STATE.empty_table()


def write_instruments(root: Path, state: pa.Table) -> None:
    """Write the file for :func:`read_instruments`, unless no unit has samples."""
    if state.num_rows:
        with disk_errors(root):
            write_small(root / STATE_NAME, state)
