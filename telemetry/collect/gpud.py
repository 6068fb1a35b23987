"""Collector of gpud's events API, as staged events.

gpud reads the node's kernel log and keeps events for days, so its XIDs are those of the kernel log, with their times.
Its health states are derived from these events and are not read.
"""

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ValidationError

from foundation.instants import from_ms, to_ms
from foundation.text import storable
from telemetry.accounting import Accounting
from telemetry.bounds import BAD_TIME, EARLIEST_MS, LATEST_MS
from telemetry.collect.kubernetes.rules import KubernetesRules, default_rules
from telemetry.collect.outbox import DROPPED, Outbox
from telemetry.collect.scraping.collector import Fetch, ScrapeError, Watch
from telemetry.collect.scraping.targets import Page, Target
from telemetry.dataset.event import Event
from telemetry.kernel_log.catalogue import DETAIL_LENGTH, KernelFinding, shipped
from telemetry.kernel_log.mentions import named_gpu, xid_faults

SOURCE: Final = "gpud"
EVENTS: Final = Page("https", 15132, "/v1/events")
"""gpud's events API, by default with a self-signed certificate."""

FIRST_SINCE: Final = timedelta(days=30)
"""Lookback of a node's first request, beyond gpud's retention."""

OVERLAP: Final = timedelta(hours=1)
"""Each request starts this long before the last one: after its own restart, gpud reads the kernel log late."""

_SHORTEST: Final = timedelta(minutes=1)
CONCURRENCY: Final = 32
"""Maximum concurrent scrapes: at the maximum size of a response, they stay within the scraper's memory limit."""

MAX_EVENTS: Final = 100_000
"""Maximum events kept while writes fail."""

NO_EVIDENCE: Final = "no evidence about a GPU"
_SERIOUS: Final = ("Warning", "Critical", "Fatal")
_SXID: Final = re.compile(r"\bSXid:? (\d{1,9})\b", re.IGNORECASE)
_PLAIN_DIGITS: Final = 18
_RECOVERY: Final = "154"
# Its meaning is in the kernel message, which gpud keeps only for entries from NVSentinel.

_log = logging.getLogger(__name__)


_Text = Annotated[str, BeforeValidator(lambda text: storable(text) if isinstance(text, str) else text)]


class _Entry(BaseModel):
    time: AwareDatetime
    name: _Text
    type: _Text = ""
    message: _Text = ""


class _Component(BaseModel):
    component: _Text
    events: Annotated[list[Any], BeforeValidator(lambda events: events or [])] = []


def read_events(
    page: bytes, node: str, known_at: Callable[[datetime], datetime], rules: KubernetesRules | None = None
) -> dict[str, list[Event] | str]:
    """Return each entry's events, or why it is left out, by its digest; ``ScrapeError`` for another format."""
    try:
        components = [_Component.model_validate(part) for part in json.loads(page, parse_int=_number) or []]
    except (ValueError, TypeError, RecursionError):  # a ValidationError is a ValueError
        raise ScrapeError("parse", "not a list of gpud's components") from None
    by_digest: dict[str, list[Event] | str] = {}
    for component in components:
        for raw_entry in component.events:
            digest = hashlib.sha256(storable(f"{component.component} {_written(raw_entry)}").encode())
            try:
                entry = _Entry.model_validate(raw_entry)
            except ValidationError as error:
                problem = error.errors()[0]
                field_path = ".".join((component.component, *map(str, problem["loc"])))
                by_digest[digest.hexdigest()[:16]] = f"{field_path}: {problem['msg']}"
                continue
            if not EARLIEST_MS <= to_ms(entry.time) < LATEST_MS:
                by_digest[digest.hexdigest()[:16]] = f"{component.component}: {BAD_TIME}"
                continue
            by_digest[digest.hexdigest()[:16]] = [
                Event(entry.time, node, finding.type, SOURCE, known_at(entry.time), *finding[1:5])
                for finding in _findings(component.component, entry, rules or default_rules())
            ] or f"{NO_EVIDENCE}: {component.component} {entry.name}"
    return by_digest


def _number(text: str) -> float:
    """Parse an integer; beyond 18 digits as a float, which may be infinite."""
    return int(text) if len(text) <= _PLAIN_DIGITS else float(text)


def _written(entry: Any) -> str:
    try:
        return json.dumps(entry, sort_keys=True)
    except RecursionError:  # json.loads ran at a shallower stack depth
        return "nested too deeply"


def _findings(component: str, entry: _Entry, rules: KubernetesRules) -> list[KernelFinding]:
    """Return the events of an entry; empty if it is not about a GPU."""
    kernel = shipped().read(entry.message)  # an entry from NVSentinel
    if kernel is not None and kernel.type in ("failure", "other", "driver"):
        return [kernel]
    detail = f"{entry.type}: {entry.message}"[:DETAIL_LENGTH]
    if sxid := _SXID.search(entry.message):
        return [KernelFinding("failure" if entry.type == "Fatal" else "other", f"sxid_{int(sxid[1])}", detail)]
    rule = rules.for_condition(f"{SOURCE}/{component}/{entry.name}")
    if rule is None or rule.type == "ignore" or (entry.type not in _SERIOUS and rule.type != "xid" and not rule.code):
        return []
    if rule.type != "xid":
        return [KernelFinding(rule.type, rule.code or f"{SOURCE}_{entry.name}", detail, *named_gpu(entry.message))]
    faults = xid_faults("", "", entry.message)
    if not faults and entry.type in _SERIOUS:
        return [KernelFinding("other", f"{SOURCE}_xid", detail)]
    return [_with_meaning(fault)._replace(detail=fault.detail or detail) for fault in faults]


def _with_meaning(fault: KernelFinding) -> KernelFinding:
    # An XID without a GPU would count for every GPU of the node.
    is_clear = (fault.gpu or fault.pci_bus_id) and (fault.detail is not None or fault.code != _RECOVERY)
    return fault if is_clear else fault._replace(type="other", code=f"xid_{fault.code}")


@dataclass(frozen=True, slots=True)
class NodeEvents:
    """New events of a node, and the position after them."""

    url: str
    position: Mapping[str, Any]
    events: list[Event]


class EventSink:
    """Stages events together with each node's position."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.positions: dict[str, Mapping[str, Any]] = dict(outbox.position.get("nodes", {}))
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, batch: NodeEvents) -> None:
        """Buffer events; drop the oldest beyond :data:`MAX_EVENTS`."""
        with self._lock:
            self.positions[batch.url] = batch.position
            self._events += batch.events
            excess = max(0, len(self._events) - MAX_EVENTS)
            del self._events[:excess]
        self._outbox.accounting.take("events", excess, {DROPPED: excess})

    def write(self) -> None:
        """Write the buffered events and positions; raises ``InputError``."""
        with self._lock:
            newest_ms = max((position["until"] for position in self.positions.values()), default=0)
            # Drop targets that are gone, so that the state does not grow without bound.
            oldest_ms = newest_ms - FIRST_SINCE // timedelta(milliseconds=1)
            self.positions = {url: known for url, known in self.positions.items() if known["until"] >= oldest_ms}
            events, positions = list(self._events), dict(self.positions)
        if events or positions != self._outbox.position.get("nodes", {}):
            self._outbox.commit({"nodes": positions}, events=events)
            with self._lock:
                del self._events[: len(events)]  # more may have arrived meanwhile
        self._outbox.flush()


class EventsWatch(Watch[NodeEvents]):
    """Reads gpud on one node.

    ``delay``: from an event to its ``known_at``, for events before the node's first request. ``rules``: classify
    entries; default: :func:`telemetry.collect.kubernetes.rules.default_rules`.
    """

    advice = "Check that gpud runs there; a certificate of its own needs --insecure-skip-verify."

    def __init__(
        self,
        target: Target,
        sink: EventSink,
        accounting: Accounting,
        *,
        delay: timedelta,
        rules: KubernetesRules | None = None,
    ) -> None:
        super().__init__(target)
        self._sink, self._accounting, self._delay, self._rules = sink, accounting, delay, rules

    async def scrape(self, fetch: Fetch, now: datetime, started_s: float) -> NodeEvents:
        """Return the events since the last response."""
        known = self._sink.positions.get(self.target.url)
        start = now - FIRST_SINCE if known is None else from_ms(known["until"]) - OVERLAP
        while True:
            try:
                page = await fetch(f"{self.target.url}?startTime={int(start.timestamp())}")
                break
            except ScrapeError as error:
                if error.kind != "too_large" or now - start < _SHORTEST:
                    raise
                start = now - (now - start) / 2  # responses are not paginated: prefer the newest events
                reason = "older than one response can hold"
                self._accounting.left_out("gpud answers", reason, example=f"{self.target.address} {start.isoformat()}")
                self._accounting.read("gpud answers")
                _log.warning(
                    "%s: too many events for one response, those before %s are left out",
                    self.target.address,
                    start.isoformat(),
                )

        def known_at(time: datetime) -> datetime:
            return min(now, time + self._delay) if known is None else now

        entries = read_events(page.body, self.target.node or self.target.host, known_at, self._rules)
        known_digests = set() if known is None else set(known["seen"])
        news = [entry for digest, entry in entries.items() if digest not in known_digests]
        for reason in (entry for entry in news if isinstance(entry, str)):
            self._accounting.take("gpud entries", 1, {reason: 1}, self.target.address)
        read = [entry for entry in news if not isinstance(entry, str)]
        self._accounting.take("gpud entries", len(read), {})
        remembered = [
            digest
            for digest, entry in entries.items()
            if isinstance(entry, str) or entry[0].timestamp >= now - OVERLAP - _SHORTEST
        ]
        return NodeEvents(self.target.url, {"until": to_ms(now), "seen": remembered}, list(chain.from_iterable(read)))
