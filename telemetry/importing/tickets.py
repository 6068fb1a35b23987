"""Tickets as events: classifying their words, the second event of a resolved ticket, and the GPU a ticket names."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from html import unescape
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from foundation.slurm import expand_hostlist
from foundation.times import NEVER
from telemetry.dataset.event import EVENT_TYPES
from telemetry.dataset.schema import ms_of
from telemetry.identity.devices import GpuNames, is_placeholder, normalise_pci_bus_id
from telemetry.importing.batch import Batch
from telemetry.importing.columns import split_words
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.slots import is_index, slot_key
from telemetry.kernel_log.mentions import gpu_names, listed_codes, xid_codes
from telemetry.phrases import OTHER, UNSURE, WORK, PhraseReview, classify

RESOLVED: Final = "resolved_at"
REPLACED: Final = "replaced_at"
RESOLUTION: Final = "resolution"
GPU_COLUMNS: Final = ("slot", "pci_bus_id", "serial")
TICKET_COLUMNS: Final = (RESOLVED, REPLACED, RESOLUTION, *GPU_COLUMNS)
RESOLVED_BEFORE_OPENED: Final = "resolved before it was opened"
"""Reason a ticket has no second event; its first event is kept."""

UNKNOWN_GPU: Final = "events_of_the_node_as_their_gpu_is_unknown"
"""Count of events whose slot, address or index matches no GPU at the time."""

NAMED_IN_TEXT: Final = "gpus_named_in_the_text_of_their_events"
"""Count of events whose GPU is named only in their text, by UUID, PCI address or index."""

SEVERAL_IN_TEXT: Final = "events_of_the_node_as_their_text_names_several_gpus"
"""Count of events whose text names several GPUs, or one GPU by contradictory names."""

_OF_NODES: Final = ("drain", "maintenance")
_LIMITS: Final = {"installed_at": -NEVER, "removed_at": NEVER}
Texts = npt.NDArray[np.object_]
_PLAIN_NUMBER: Final = re.compile(r"\s*-?\d+(?:\.\d*)?\s*\Z")
_ONE_XID: Final = re.compile(r"(?:XID[\s:#_-]*)?(\d{1,6})(?:\.0+)?\Z", re.IGNORECASE)
_RELEASE: Final = "resume"
_MARKUP: Final = re.compile(
    r"</?(?:p|br|div|span|b|i|u|a|li|ul|ol|pre|code|strong|em|t[dhr]|table|h\d)\b[^<>]*>|&#?\w+;"
)
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_INDEX_IN_TEXT: Final = re.compile(
    r"(?<!gres[/:=])(?<!--)(?:\bgpus?[\s#:._-]*|(?<![\w/.:=-])gpu\s*=\s*)(?:(?:no|number|index|idx|id|slot)\b[\s#:=._-]*)?(?P<index>\d{1,2})\b"
    r"(?P<more>\s*(?:[-–/,&+]|and|or|to|bis|und|et)\s*#?\d)?"
    r"(?!\s*(?:%|°|×|(?:x|of\s+\d+|gi?b|[wc]|gpus?|(?:hour|day|minute|time|node|server|error|failure)s?)\b)|[.:]\d)",
    re.IGNORECASE,
)
"""``GPU 3``, ``GPU #3``, ``gpu index: 3``; ``more`` if others follow, as in ``GPUs 0-3``."""


def strip_markup(batch: Batch) -> None:
    """Remove HTML from the texts of a table, in place: with it, ``GPU&nbsp;1`` names no GPU."""
    for source in {batch.columns.get(name) for name in ("type", "detail", RESOLUTION)} & {*batch.table.column_names}:
        column = batch.table.column(source)
        if pa.types.is_string(column.type) and pc.any(pc.match_substring_regex(column, _MARKUP.pattern)).as_py():
            texts = [text and _MARKUP.sub(" ", unescape(unescape(text))) for text in column.to_pylist()]
            place = batch.table.column_names.index(source)
            batch.table = batch.table.set_column(place, source, pa.array(texts, pa.string()))


def types_of(kinds: Texts, written: Texts, rows: Mapping[str, Texts], review: PhraseReview) -> Texts:
    """Return the type of each event; null if the given type is a number.

    Words that are not event types are classified as ticket text. They become the ``detail`` if the event has none, and
    XIDs in them the ``code``: ``rows`` is modified in place.
    ``written``: the types before the mapping's ``values``, which name the type of words that still say more.
    """
    types = np.array([None if kind is None else str(kind).strip().lower() for kind in kinds], dtype=object)
    is_type = np.isin(types.astype(str), EVENT_TYPES)
    for row in np.flatnonzero(~is_type | (written != kinds)).tolist():
        phrase = "" if written[row] is None else str(written[row])
        if _PLAIN_NUMBER.match(phrase):
            types[row] = types[row] if is_type[row] else None
            continue
        kind = types[row] if is_type[row] else classify(phrase, "ticket").type if phrase else UNSURE.type
        if kind == "xid" and pd.isna(rows["code"][row]):
            rows["code"][row] = ", ".join(xid_codes(phrase)) or None
            kind = OTHER if rows["code"][row] is None else kind
        if phrase and pd.isna(rows["detail"][row]):
            rows["detail"][row] = phrase
        review.add(phrase or "(empty)", kind)
        types[row] = kind
    return types


def one_row_per_xid(batch: Batch, rows: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Repeat the row of an XID event for each XID in its ``code``; return the earlier index of each row.

    ``batch`` and ``rows`` are modified in place.
    """
    given = zip(rows["type"], rows["code"], strict=True)
    codes = [(xids_of(code) or (code,)) if kind == "xid" and isinstance(code, str) else (code,) for kind, code in given]
    places = np.repeat(np.arange(len(codes)), [len(listed) for listed in codes])
    if len(places) > len(codes):
        batch.repeat(places)
        rows |= {name: column[places] for name, column in rows.items()}
    rows["code"] = np.array([*(code for listed in codes for code in listed), None], dtype=object)[:-1]
    return places


def names_xids(column: str) -> bool:
    """Return whether a column with this name has XIDs, regardless of the text in the row."""
    return "xid" in split_words(column)


@cache
def xids_of(text: str) -> Sequence[str]:
    """Return the XIDs in a code; empty for 0 (no XID) and for other text."""
    match = _ONE_XID.match(text)
    if match is not None:
        return (str(int(match[1])),) if int(match[1]) else ()
    return xid_codes(text) or listed_codes(text)


def node_finder(installations: InstallationIndex) -> Callable[[str | None], str | None]:
    """Return a function that converts a node name, or text naming one, to the node's known name.

    A title like ``node-17: GPU 3 is lost`` means the only known node in it; other text is treated as a name.
    """

    @cache
    def written(text: str | None) -> str | None:
        if text is None or installations.names.find(text) is not None or " " not in text.strip():
            return None if text is None else installations.names.written(text)
        words = [word for word in _NAME.findall(text) if not word.isdigit()]
        nodes = {node for word in words if (node := installations.names.find(word)) in installations.node_since}
        return str(nodes.pop()) if len(nodes) == 1 else installations.names.written(text)

    return written


def nodes_of_list(text: str, installations: InstallationIndex) -> list[str]:
    """Return the nodes of a list of names; empty if it is not a list or a node is unknown."""
    try:
        listed = expand_hostlist(re.sub(r"\s*(?:[;/&+,\s]|\band\b)\s*", ",", text.strip()))
    except ValueError:
        return []
    nodes = [installations.names.find(name) for name in listed]
    return list(dict.fromkeys(map(str, nodes))) if all(node in installations.node_since for node in nodes) else []


def resolve_tickets(
    batch: Batch,
    rows: dict[str, npt.NDArray[Any]],
    texts: Texts,
    opened_ms: npt.NDArray[np.int64],
    counts: Counter[str],
) -> None:
    """Read :data:`RESOLVED` and :data:`REPLACED`: a resolved ticket is two events, the problem and its resolution.

    Adds ``resolved_ms`` (-1: none), ``resolved_type`` and ``resolved_detail`` to ``rows``. If the type of a resolved
    ticket is the work done (``repair``, ``replacement``), its first event is a ``failure``. :data:`RESOLUTION` is the
    text of the second event and distinguishes replacement from repair; a time in :data:`REPLACED` means replacement.
    ``texts``: the details as given, without those set by :func:`types_of`.
    """
    ends = [batch.instants(name, optional=True, day_end=True) for name in (RESOLVED, REPLACED)]
    if ends == [None, None]:
        return
    no_times = np.zeros(len(batch.rows), np.int64), np.zeros(len(batch.rows), np.bool_)
    (resolved_ms, is_resolved), (replaced_ms, is_replaced) = ((end.ms, end.ok) if end else no_times for end in ends)
    ms = np.where(is_replaced, replaced_ms, resolved_ms)
    is_resolution = (is_resolved | is_replaced) & batch.valid
    is_early = is_resolution & (ms < opened_ms)
    batch.set_aside(RESOLVED_BEFORE_OPENED, np.flatnonzero(is_early), rows=0)
    kinds, details = rows["type"], rows["detail"]
    notes = batch.texts(RESOLUTION) if RESOLUTION in batch else np.full(len(kinds), None, dtype=object)
    of_tickets = zip(kinds, notes, texts, strict=True)
    work = np.array([_work_of(kind, of_ticket) for kind, *of_ticket in of_tickets], dtype=object)
    work[is_replaced] = "replacement"
    has_work = np.array([kind is not None for kind in work], dtype=bool)
    counts["tickets_resolved_without_work"] += int((is_resolution & ~has_work).sum())
    chosen = is_resolution & ~is_early & has_work
    rows["resolved_ms"] = np.where(chosen, ms, -1)
    rows["resolved_type"] = work
    rows["resolved_detail"] = np.where(pd.isna(notes), details, notes)
    rows["type"] = np.where(chosen & np.isin(kinds.astype(str), sorted(WORK)), "failure", kinds)


def _work_of(kind: object, texts: Sequence[object]) -> str | None:
    """Return the event type of a ticket's resolution; None if no work is known to have been done.

    ``texts``: the first text that names work decides.
    """
    if kind in WORK or kind == "drain":
        return str(kind)
    types = (classify(text, "ticket").type for text in texts if isinstance(text, str))
    unnamed = "repair" if kind in ("failure", "xid", "diagnostic") else None
    return next((work for work in types if work in WORK), unnamed)


def resolutions(rows: Mapping[str, npt.NDArray[Any]], valid: npt.NDArray[np.bool_], delay: timedelta) -> pd.DataFrame:
    """Return the resolution events of the good rows, once GPUs and nodes are resolved; times in milliseconds."""
    if "resolved_ms" not in rows:
        return pd.DataFrame(rows)[:0]
    events = pd.DataFrame(rows)[valid & (rows["resolved_ms"] >= 0)]
    is_drain, is_failure = events["resolved_type"] == "drain", events["type"] == "failure"
    # A repair with its failure's code leaves other failures open; codes of XIDs and diagnostics have another meaning.
    code = events["code"].where(is_failure, None).mask(is_drain, _RELEASE)
    known_ms = events["resolved_ms"] + int(delay.total_seconds() * 1000)
    texts = {"type": events["resolved_type"], "code": code, "detail": events["resolved_detail"]}
    return events.assign(timestamp=events["resolved_ms"], known_at=known_ms, **texts)


def name_gpus(
    batch: Batch,
    rows: Mapping[str, Texts],
    ms: npt.NDArray[np.int64],
    installations: InstallationIndex | None,
    counts: Counter[str],
) -> None:
    """Resolve each row's GPU to its identity; ``rows`` is modified in place.

    A GPU is given by identity, serial number, PCI address or slot, in ``gpu`` or in a separate column, or else named
    in the event's text. Slots and addresses are resolved to the GPU in that node at that time; if it is unknown, the
    event is attributed to the node and counted, and so is each index of a table that counts from 1 where slots begin
    at 0.
    """
    gpu, node = rows["gpu"], rows["node"]
    texts = {name: batch.texts(name) for name in GPU_COLUMNS if name in batch and name not in rows}
    places = None if installations is None or installations.unit != "gpu" else GpuPlaces(installations)
    slots = texts.get("slot", gpu)
    from_one = places is not None and _count_from_one(slots, node, places)
    for row in range(len(gpu)):
        if places is not None and isinstance(gpu[row], str) and places.is_known(gpu[row]):
            continue
        unnamed = isinstance(node[row], str) and is_placeholder(gpu[row] if isinstance(gpu[row], str) else None)
        name = None if unnamed or not isinstance(gpu[row], str) else gpu[row]
        names = [text for text in (name, *(texts[column][row] for column in texts)) if isinstance(text, str)]
        if not names:
            text = rows["detail"][row]
            is_of_gpu = isinstance(text, str) and places is not None and rows["type"][row] not in _OF_NODES
            named = _gpus_in_text(text) if is_of_gpu else set()
            found_of = {places.find([text], None, node[row], int(ms[row])) for text in named} if places else set()
            is_one = len(found_of) == 1 and found_of != {None}
            counts[NAMED_IN_TEXT] += is_one
            counts[SEVERAL_IN_TEXT] += len(named) > 1 and not is_one
            gpu[row] = found_of.pop() if is_one else name
            continue
        slot = texts["slot"][row] if "slot" in texts else None
        unambiguous = [text for text in names if not (from_one and is_index(text))]
        located = None if places is None else places.find(unambiguous, slot, node[row], int(ms[row]))
        is_place = name is None or is_index(name) or normalise_pci_bus_id(name) is not None
        if located is None and is_place and isinstance(node[row], str):
            counts[UNKNOWN_GPU] += 1
            _keep_address(rows, row, names)
            name = None
        gpu[row] = located or name


def _count_from_one(slots: Texts, nodes: Texts, places: "GpuPlaces") -> bool:
    """Whether a table names the slot after a node's last and never slot 0, though the node has one."""
    pairs = zip(nodes, slots, strict=True)
    named = {(node, int(slot_key(slot))) for node, slot in pairs if isinstance(slot, str) and is_index(slot)}
    return all(index for _, index in named) and any(
        [places.has_slot(node, number) for number in (0, index - 1, index)] == [True, True, False]
        for node, index in named
        if isinstance(node, str)
    )


def _gpus_in_text(text: str) -> set[str]:
    """Return the GPUs named in a text by UUID, PCI address or index; of a range of indices, both ends."""
    indices = list(_INDEX_IN_TEXT.finditer(text))
    lists = {re.sub(r"\D+", "", match["more"]) for match in indices if match["more"]}
    return {*gpu_names(text), *(match["index"] for match in indices), *lists}


def _keep_address(rows: Mapping[str, Texts], row: int, names: list[str]) -> None:
    """Keep an unresolved GPU's names: an address in ``pci_bus_id``, and all of them in ``detail``."""
    if "pci_bus_id" in rows and pd.isna(rows["pci_bus_id"][row]):
        rows["pci_bus_id"][row] = next(filter(None, map(normalise_pci_bus_id, names)), None)
    detail = rows["detail"][row]
    rows["detail"][row] = "; ".join(dict.fromkeys([*([detail] if isinstance(detail, str) else []), *names]))


class GpuPlaces:
    """Finds GPUs by serial number, or by node and PCI address or slot at a given time."""

    def __init__(self, installations: InstallationIndex) -> None:
        self._installations = installations
        frame = installations.frame.reindex(columns=["node", "gpu", *GPU_COLUMNS]).astype(object)
        limits = [ms_of(installations.frame[name], unknown=ms).tolist() for name, ms in _LIMITS.items()]
        serials: dict[str, str] = {}
        self._by_place: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
        for place, start, end in zip(frame.itertuples(index=False, name=None), *limits, strict=True):
            node, gpu, slot, address, serial = place
            if isinstance(serial, str) and not is_placeholder(serial):
                serials[serial] = gpu
            bus = normalise_pci_bus_id(address) or address if isinstance(address, str) else None
            for key in filter(None, (f"gpu {gpu}", bus, None if pd.isna(slot) else f"slot {slot_key(str(slot))}")):
                self._by_place.setdefault((node, key), []).append((start, end, gpu))
        self._gpus = GpuNames(map(str, installations.units), serials)

    def is_known(self, name: str) -> bool:
        """Return whether a name is the identity of a GPU."""
        return int(self._installations.codes([name])[0]) >= 0

    def find(self, names: list[str], slot: object, node: object, ms: int) -> str | None:
        """Return the GPU that any of the names refers to in a node at a time; None if unknown or ambiguous."""
        for name in names:
            match = self._gpus.find(name)
            if match is not None:
                return match
        if not isinstance(node, str):
            return None
        place = self._installations.names.written(node)
        of_address = (self.gpu_at(place, key, ms) for key in map(normalise_pci_bus_id, names) if key is not None)
        keys = [slot_key(name) for name in names if name == slot or is_index(name)]
        return next(filter(None, of_address), None) or next(
            filter(None, (self._in_slot(place, key, ms) for key in keys)), None
        )

    def gpu_at(self, node: str, key: str, ms: int) -> str | None:
        """Return the GPU at an address or slot of a node at a time; at the instant of a swap, the new one."""
        installed = [
            installation
            for installation in self._by_place.get((node, key), ())
            if installation[0] <= ms <= installation[1]
        ]
        gpus = {gpu for _, end, gpu in installed if ms < end} or {gpu for *_, gpu in installed}
        return gpus.pop() if len(gpus) == 1 else None

    def has_slot(self, node: str, index: int) -> bool:
        """Return whether a slot of a node ever had a GPU."""
        place = self._installations.names.written(node)
        return (place, f"slot {index}") in self._by_place or self._installations.slots.has_slot(place, str(index))

    def _in_slot(self, node: str, slot: str, ms: int) -> str | None:
        """Return the GPU of a slot at a time; None if samples and inventory disagree."""
        gpu, slots = self.gpu_at(node, f"slot {slot}", ms), self._installations.slots
        observed = slots.find(node, slot, ms)
        if observed is None:
            return None if node in slots.renumbered else gpu
        return observed if gpu in (None, observed) and self.gpu_at(node, f"gpu {observed}", ms) else None
