"""Reads event sources and assigns each event to a node and GPU."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InputError
from telemetry.dataset.schema import EVENT_RUNS, EVENTS, MAINTENANCE_BEGIN, MAINTENANCE_END, ms_of
from telemetry.identity.devices import normalise_pci_bus_id
from telemetry.importing.batch import Batch
from telemetry.importing.columns import KEY_ALIASES, as_counts, as_text, missing_column
from telemetry.importing.event_runs import RUN_MS, stack_events, with_runs
from telemetry.importing.files.log_tables import document_lines, is_document, table_lines
from telemetry.importing.files.sources import is_kernel_log, kind_of, stem_of
from telemetry.importing.files.tables import read_batches
from telemetry.importing.instants import parse_instants, times_of
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.mapping import ImportMapping, KernelLogMapping, TableMapping
from telemetry.importing.quarantine import NUMBER_AS_TYPE, Quarantine
from telemetry.importing.tickets import (
    TICKET_COLUMNS,
    GpuPlaces,
    name_gpus,
    names_xids,
    node_finder,
    nodes_of_list,
    one_row_per_xid,
    resolutions,
    resolve_tickets,
    strip_markup,
    types_of,
    xids_of,
)
from telemetry.kernel_log.importing import last_written, parse_kernel_log, read_lines
from telemetry.packing import read_errors
from telemetry.phrases import WORK, PhraseReview

AFTERWARDS: Final = frozenset({"repair", "replacement", "diagnostic", "driver", "other"})
"""Event types allowed after a removal: work on a GPU that is no longer in its node."""

SHARED: Final = "identity of GPUs on several nodes"
"""Reason for events that name a GPU id used on several nodes without naming one of these nodes."""

_MOST: Final = 0.5
_FAIR_SHARE: Final = 0.2
_NAMED: Final = 5

NOT_SEEN_YET: Final = ("unknown gpu", "unknown node", "name of several nodes", "before installation")
"""Reasons that a later observation may resolve."""


def place_events(
    text: dict[str, npt.NDArray[np.object_]], ms: npt.NDArray[np.int64], installations: InstallationIndex
) -> npt.NDArray[np.object_]:
    """Resolve the node and GPU of each event.

    Names are normalized to the inventory's spelling. A PCI address identifies the GPU, a GPU its node, and a MIG
    instance its parent GPU.

    ``text``: ``node``, ``gpu``, ``type``, and ``pci_bus_id`` if known; ``node`` and ``gpu`` are updated in place.
    Returns: reason for rejecting the event, or an empty string; shape (n,).
    """
    gpu, node, kind = text["gpu"], text["node"], text["type"]
    _locate(text, ms, installations)
    of_gpu, named = ~pd.isna(gpu), ~pd.isna(node)
    node[named] = installations.names.written_all(node[named])
    gpu[of_gpu] = [installations.gpu(name, home) for name, home in zip(gpu[of_gpu], node[of_gpu], strict=True)]
    codes = installations.codes([None if pd.isna(name) else name for name in gpu])
    installation = installations.find(codes, ms) if installations.unit == "gpu" else np.full(len(gpu), -1)
    home = np.array([*installations.nodes, None], dtype=object)[np.where(installation >= 0, installation, -1)]
    rows = np.flatnonzero((installation >= 0) & named)
    at_home = rows[~installations.are_elsewhere(node[rows], home[rows])]
    node[at_home] = home[at_home]
    since = pd.Series(node, dtype=object).map(installations.node_since)
    missing = "missing node and gpu" if installations.unit == "gpu" else "missing node"
    of_node = np.select(
        [of_gpu, pd.isna(node), since.isna(), ms < since], ["", missing, "unknown node", "before installation"], ""
    )
    reasons = of_node.astype(object)
    for row in np.flatnonzero(reasons == "unknown node"):
        if installations.names.is_ambiguous(node[row]):
            reasons[row] = "name of several nodes"
    if installations.unit == "gpu":
        afterwards = of_gpu & (installation == -3) & np.isin(kind.astype(str), sorted(AFTERWARDS))
        # Installations outweigh events: a ticket may quote the serial number of another GPU in the node. They have
        # already been corrected by samples.
        reasons[of_gpu & (installation == -1)] = "unknown gpu"
        is_shared = np.array([installations.is_shared(name) if isinstance(name, str) else False for name in gpu], bool)
        reasons[of_gpu & (installation == -2)] = "before installation"
        reasons[of_gpu & (installation == -3) & ~afterwards] = "after removal"
        placed = of_gpu & (installation >= 0)
        unnamed = placed & pd.isna(node)
        node[unnamed] = home[unnamed]
        reasons[placed & (node != home)] = "on another node than the inventory says"
        reasons[is_shared & (reasons != "")] = SHARED
        has_left = afterwards & pd.isna(node)
        node[has_left] = installations.nodes[installations.last_row(codes[has_left], ms[has_left])]
    return reasons


def _locate(
    text: dict[str, npt.NDArray[np.object_]], ms: npt.NDArray[np.int64], installations: InstallationIndex
) -> None:
    """Set the GPU of events that name a node and a PCI address, unless it is ambiguous."""
    addresses = text.get("pci_bus_id")
    if addresses is None:
        return
    rows = np.flatnonzero(pd.isna(text["gpu"]) & ~pd.isna(addresses) & ~pd.isna(text["node"]))
    places = GpuPlaces(installations) if len(rows) else None
    buses = {address: normalise_pci_bus_id(address) or address for address in set(addresses[rows])}
    for row, node in zip(rows.tolist(), installations.names.written_all(text["node"][rows]), strict=True):
        assert places is not None
        text["gpu"][row] = places.gpu_at(str(node), buses[addresses[row]], int(ms[row]))


_PLACE = ("node", "gpu", "type", "pci_bus_id")
_TEXTS = ("node", "gpu", "code", "detail", "source")


def empty_events() -> pd.DataFrame:
    """Return an empty event frame."""
    return EVENTS.empty_table().to_pandas()


def parse_events(
    batch: Batch,
    mapping: TableMapping,
    known: Sequence[str],
    delay: timedelta,
    counts: Counter[str],
    texts: Sequence[str] = _TEXTS,
    aliases: Mapping[str, str] = KEY_ALIASES,
    installations: InstallationIndex | None = None,
    review: PhraseReview | None = None,
) -> tuple[Batch, dict[str, npt.NDArray[Any]]]:
    """Parse events, and reject those without a usable time; :mod:`telemetry.importing.tickets` handles tickets.

    Requires ``timestamp``, ``type``, and ``gpu`` or ``node``.
    ``installations``: used to find GPUs by slot, address and serial number.
    ``delay``: default for ``known_at - timestamp``.
    Returns: the batch without rows skipped by the mapping, and its columns; times in ms.
    Raises ``InputError`` if a required column is missing, a column is unknown, or all timestamps are naive.
    """
    batch.resolve(mapping, [*known, *TICKET_COLUMNS], "timestamp", "type", aliases=aliases)
    if "node" not in batch and "gpu" not in batch:
        raise missing_column("gpu", batch.table.column_names, str(batch.file))
    strip_markup(batch)
    kinds = batch.texts("type")
    wanted = batch.valid
    batch.keep(wanted)  # In a table of states (a daily row per drive with `failure` 0 or 1), few rows are events.
    rows: dict[str, npt.NDArray[Any]] = {name: batch.texts(name) for name in texts}
    if installations is not None:
        rows["node"] = np.array([*map(node_finder(installations), rows["node"]), None], dtype=object)[:-1]
    details = rows["detail"].copy()
    written = as_text(batch.column("type"), len(batch.rows))
    rows["type"] = types_of(kinds[wanted], written, rows, review or PhraseReview())
    if names_xids(batch.columns.get("code", "")):
        has_xid = np.array([code is not None and bool(xids_of(code)) for code in rows["code"]], dtype=bool)
        is_open = np.isin(rows["type"].astype(str), ("failure", "other")) & (kinds[wanted] != "other")
        rows["type"][has_xid & is_open] = "xid"
    details = details[one_row_per_xid(batch, rows)]
    instants = batch.instants("timestamp", day_end=True)  # for a date, no earlier time is certain
    assert instants is not None
    batch.refuse(NUMBER_AS_TYPE, pd.isna(rows["type"]))
    _write_ends(batch, rows, instants.ms)
    batch.refuse("xid event without a code", (rows["type"] == "xid") & (pd.isna(rows["code"]) | (rows["code"] == "0")))
    name_gpus(batch, rows, instants.ms, installations, counts)
    resolve_tickets(batch, rows, details, instants.ms, counts)
    known_ms = instants.ms + int(delay.total_seconds() * 1000)
    entered = batch.instants("known_at", optional=True, day_end=True)
    if entered is not None:
        known_ms = np.where(entered.ok, entered.ms, known_ms)
        counts["known_at_before_the_event"] += int((known_ms < instants.ms).sum())
    # known_at before the event is a clock error or a backdated ticket.
    return batch, {**rows, "timestamp": instants.ms, "known_at": np.maximum(known_ms, instants.ms)}


def read_events(
    file: Path,
    rules: ImportMapping,
    installations: InstallationIndex,
    quarantine: Quarantine,
    delay: timedelta,
    counts: Counter[str],
    review: PhraseReview | None = None,
) -> pd.DataFrame:
    """Read an event table or a kernel log, and assign each event to its node and GPU.

    Returns: usable events, with at least the columns of :data:`telemetry.dataset.schema.EVENTS`.
    Raises ``InputError`` if a required column is missing, a column is unknown, or timestamps cannot be parsed.
    """
    if is_kernel_log(file):
        return _read_kernel_log(file, rules.kernel_log, installations, quarantine, delay, counts)
    frames, matches = [empty_events()], _NodeMatches(installations, is_log=False)
    for file_rows in read_batches(file, "events", quarantine):
        batch, rows = parse_events(
            file_rows, rules.events, EVENT_RUNS.names, delay, counts, installations=installations, review=review
        )
        if installations.unit == "node":
            if "node" not in batch:
                raise missing_column("node", batch.table.column_names, str(file))
            rows["gpu"] = np.full(len(batch.rows), None, dtype=object)
        spread = _spread(rows, installations)
        reasons = place_events(rows, rows["timestamp"], installations)
        matches.add(rows["node"][batch.valid], reasons[batch.valid])
        earlier = rows["timestamp"] < installations.begin  # tickets often predate the telemetry
        for reason in sorted(set(reasons) - {""}):
            batch.refuse(reason, (reasons == reason) & earlier, lost=False)
            batch.refuse(reason, reasons == reason, lost=not (installations.is_observed and reason == "unknown node"))
        rows["source"] = np.where(pd.isna(rows["source"]), file.name, rows["source"])
        opened_ms, resolved = (
            events.assign(**{name: times_of(events[name].to_numpy(np.int64)) for name in ("timestamp", "known_at")})
            for events in (pd.DataFrame(rows)[batch.valid], resolutions(rows, batch.valid, delay))
        )
        events = _add_runs(opened_ms[EVENTS.names], batch)
        if installations.unit == "gpu":
            counts["repairs_without_a_gpu"] += sum(
                int((frame["type"].isin(WORK) & frame["gpu"].isna()).sum()) for frame in (opened_ms, resolved)
            )
        events, resolved = (_at_each(frame, spread) for frame in (events, resolved[EVENTS.names]))
        quarantine.read("events", len(events) + len(resolved) - len(opened_ms))
        frames += [events, resolved]
    if installations.is_observed:
        matches.check(file, quarantine.max_loss)
    return stack_events(frames)


def _read_kernel_log(
    file: Path,
    mapping: KernelLogMapping,
    installations: InstallationIndex,
    quarantine: Quarantine,
    delay: timedelta,
    counts: Counter[str],
) -> pd.DataFrame:
    settings = mapping.model_dump() | {"messages": mapping.messages}
    settings["node"] = settings["node"] or installations.names.find(stem_of(file))
    settings["reference_time"] = settings["reference_time"] or last_written(file)
    with read_errors(file):
        try:
            if kind_of(file) == "csv":
                lines = table_lines(file, quarantine)
            else:
                lines = document_lines(file) if is_document(file) else read_lines(file)
            log = parse_kernel_log(lines, **settings, source=file.name)
        except InputError as error:
            location = error.location if error.location == str(file) else f"{file}, {error.location}"
            raise InputError(error.problem, location, error.advice) from error
    quarantine.add(log.accounting)
    quarantine.read_rows("events", file, len(log.events) + len(log.unparsed))
    for number, line, problem in log.unparsed:
        quarantine.set_aside(problem, "events", file, number, line)
    # The sum has microsecond resolution, unlike all other sources.
    events = log.events.assign(known_at=(log.events["timestamp"] + delay).astype("datetime64[ms, UTC]"))
    ms = ms_of(events["timestamp"])
    text = {name: events[name].astype(object).where(events[name].notna(), None).to_numpy(copy=True) for name in _PLACE}
    # Ignore a UUID that is not installed at that time: use the PCI address, or assign the event to the node.
    installation = (
        installations.find(installations.codes(text["gpu"]), ms)
        if installations.unit == "gpu"
        else np.full(len(ms), -1)
    )
    text["gpu"][installation < 0] = None
    text["node"][installation >= 0] = installations.nodes[installation[installation >= 0]]
    reasons = place_events(text, ms, installations)
    counts["xids_without_a_gpu"] += int((pd.isna(text["gpu"]) & (events["type"] == "xid")).sum())
    if installations.is_observed:
        matches = _NodeMatches(installations, is_log=True)
        matches.add(text["node"], reasons)
        matches.check(file, quarantine.max_loss)
    events = events[EVENTS.names]
    earlier = ms < installations.begin
    for reason in sorted(set(reasons) - {""}):
        for old in (False, True):
            part = events[(reasons == reason) & (earlier == old)]
            lost = not (old or (installations.is_observed and reason == "unknown node"))
            quarantine.set_aside_frame(reason, "events", file, part, lost=lost)
    return events.assign(gpu=text["gpu"], node=text["node"])[reasons == ""]


@dataclass(slots=True)
class _NodeMatches:
    """Counts the events of a source on nodes with and without samples, where no inventory defines the fleet."""

    installations: InstallationIndex
    is_log: bool
    matched: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    def add(self, nodes: npt.NDArray[np.object_], reasons: npt.NDArray[np.object_]) -> None:
        """Count events by their node, resolved by :func:`place_events`."""
        is_unknown = reasons == "unknown node"
        self.unknown.update(map(str, nodes[is_unknown]))
        self.matched.update(map(str, nodes[~is_unknown & ~pd.isna(nodes)]))

    def check(self, file: Path, max_loss: float | None) -> None:
        """Raise ``InputError`` if most events are on nodes without samples, which may have other names there.

        Tickets may cover more machines: they are accepted if they match enough nodes of the samples. A kernel log with
        GPU messages is of nodes with GPUs.
        """
        lost, known = self.unknown.total(), sorted(self.installations.node_since)
        limit = _MOST if max_loss is None else max(_MOST, max_loss)
        covers_more = not self.is_log and len(self.matched) >= _FAIR_SHARE * len(known) > 0
        if lost < 2 or lost <= limit * (lost + self.matched.total()) or covers_more or max_loss is None:
            return
        names = ", ".join(sorted(self.unknown)[:_NAMED])
        raise InputError(
            f"{lost} of {lost + self.matched.total()} events are on nodes without a sample, such as {names}; the "
            f"samples name {', '.join(known[:_NAMED])}",
            str(file),
            "If these are the same nodes, give `nodes.aliases` in the mapping. If not, leave these events out by "
            f"`--max-loss {min(lost * 100 // (lost + self.matched.total()) + 1, 100) / 100:.2f}`.",
        )


def _add_runs(events: pd.DataFrame, batch: Batch) -> pd.DataFrame:
    """Add the run columns if the file has them, as exports of a dataset's events do."""
    count, last = batch.column("count"), batch.column("last_at")
    if count is None:
        return events
    events["count"] = as_counts(count, len(batch.rows))[batch.valid]
    if last is not None:
        first = ms_of(events["timestamp"])
        # A run spans at most a minute, so a later end is invalid.
        ms = parse_instants(last, batch.mapping.time, f"{batch.file}, column 'last_at'").ms[batch.valid]
        events["last_at"] = times_of(np.clip(ms, first, first + RUN_MS))
    return with_runs(events)


def _write_ends(batch: Batch, rows: dict[str, npt.NDArray[Any]], starts: npt.NDArray[np.int64]) -> None:
    """Normalize the planned end of maintenance to UTC in ISO 8601, and reject maintenance without one."""
    words = np.array([str(code).strip().lower() for code in rows["code"]], dtype=object)
    to_write = np.flatnonzero((rows["type"] == "maintenance") & ~np.isin(words, (MAINTENANCE_BEGIN, MAINTENANCE_END)))
    if not len(to_write):
        return
    codes = batch.column("code")
    column = pa.chunked_array([pa.nulls(len(to_write))]) if codes is None else codes.take(pa.array(to_write))
    if pa.types.is_string(column.type) and batch.mapping.time.unit is None:
        # A bare number is another kind of code; parsed without a unit it would fail the whole table.
        is_number = pc.match_substring_regex(column, r"^\s*[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?\s*$")
        column = pc.if_else(is_number, None, column)
    ends = parse_instants(column, batch.mapping.time, f"{batch.file}, column 'code'", day_end=True)
    rows["code"][to_write] = [end.isoformat() for end in times_of(ends.ms)]
    for reason, rejected in (
        ("a maintenance whose code is not its end time", ~ends.ok),
        ("a maintenance that ends before it begins", ends.ms <= starts[to_write]),
    ):
        batch.refuse(reason, np.isin(np.arange(len(words)), to_write[rejected]))


def _at_each(events: pd.DataFrame, spread: Mapping[int, list[str]]) -> pd.DataFrame:
    """Duplicate each event for every node that its row names."""
    if not spread:
        return events
    nodes = [spread.get(row, node) for row, node in events["node"].items()]
    return events.assign(node=pd.Series(nodes, events.index, dtype=object)).explode("node", ignore_index=True)


def _spread(rows: dict[str, npt.NDArray[Any]], installations: InstallationIndex) -> dict[int, list[str]]:
    """Return the nodes, by row, of events that name several, for example ``gpu[01-04]`` or ``gpu01, gpu02``.

    Maintenance may also name a glob pattern, a rack or an NVLink domain. The first node replaces the text in ``rows``;
    text that matches no node is kept.
    """
    to_spread = np.flatnonzero(pd.isna(rows["gpu"]) & ~pd.isna(rows["node"]))
    places = installations.frame.reindex(columns=["node", "rack", "nvlink_domain"]).astype(object).drop_duplicates()
    out: dict[int, list[str]] = {}
    for row in to_spread.tolist():
        pattern, start = rows["node"][row], rows["timestamp"][row]
        if pattern in installations.node_since:
            continue
        listed = nodes_of_list(pattern, installations)
        if listed or rows["type"][row] != "maintenance":
            if listed:
                rows["node"][row], out[row] = listed[0], listed
            continue
        matches = places["node"].map(lambda node, pattern=pattern: fnmatchcase(node, pattern)).to_numpy(dtype=bool)
        if not matches.any():
            matches = (places[["rack", "nvlink_domain"]] == pattern).any(axis=1).to_numpy(dtype=bool)
        names = sorted({str(node) for node in places["node"][matches]})
        existing = [node for node in names if installations.node_since[node] <= start]
        if names:
            rows["node"][row] = (existing or names)[0]
            out[row] = existing or names[:1]
    return out
