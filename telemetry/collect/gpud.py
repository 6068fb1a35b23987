"""What gpud found on each node, from its events API, to landed events.

gpud reads the kernel log on the node and keeps events for days: an XID that it has is the kernel log's, at its time.
Its health states are verdicts about these events, and are not read.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ValidationError

from foundation.errors import InputError
from foundation.instants import from_ms, to_ms
from foundation.running import Wait
from telemetry.bounds import BAD_TIME, EARLIEST_MS, LATEST_MS, later, storable
from telemetry.collect.event import Event
from telemetry.collect.exporters.targets import Page, Target
from telemetry.collect.exporters.watch import ScrapeError, Scraper
from telemetry.collect.outbox import Outbox
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.kernel_log.catalogue import BOOT, shipped

SOURCE: Final = "gpud"
EVENTS: Final = Page("https", 15132, "/v1/events")
"""gpud's events API, by default behind a certificate that it signed itself."""

FIRST_SINCE: Final = timedelta(days=30)
"""How far back a node is asked the first time; gpud keeps less."""

OVERLAP: Final = timedelta(hours=1)
"""A node is asked again for so long before the last time: gpud reads the kernel log late after a start of its own."""

_SHORTEST: Final = timedelta(minutes=1)
_CONCURRENCY: Final = 32
# With whole pages of the scraper's bound at once, all of them stay below its bound on memory.
_DETAIL_LENGTH: Final = 400
_GPU: Final = "accelerator-"
_SERIOUS: Final = ("Warning", "Critical", "Fatal")
_XID: Final = re.compile(r"\bXID (\d{1,9})\b")
_SXID: Final = re.compile(r"\bSXid:? (\d{1,9})\b", re.IGNORECASE)
_PCI: Final = re.compile(r"\bPCI:[0-9A-Fa-f:.]+")
_PLAIN_DIGITS: Final = 18
_UUID: Final = re.compile(r"\bGPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_RECOVERY: Final = "154"
# Its meaning is in the kernel's text, which gpud keeps of what it has from NVSentinel only.

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


def read_events(page: bytes, node: str, known_at: Callable[[datetime], datetime]) -> dict[str, Event | str]:
    """Return the events of an answer, or why an entry is none, by what tells an entry from others.

    Raises ``ScrapeError`` if it is no answer of gpud.
    """
    try:
        components = [_Component.model_validate(part) for part in json.loads(page, parse_int=_number) or []]
    except (ValueError, TypeError, RecursionError):  # a ValidationError is a ValueError
        raise ScrapeError("parse", "this is no list of gpud's components") from None
    found: dict[str, Event | str] = {}
    for component in components:
        for given in component.events:
            digest = hashlib.sha256(storable(f"{component.component} {_written(given)}").encode())
            try:
                entry = _Entry.model_validate(given)
            except ValidationError as error:
                problem = error.errors()[0]
                where = ".".join((component.component, *map(str, problem["loc"])))
                found[digest.hexdigest()[:16]] = f"{where}: {problem['msg']}"
                continue
            if not EARLIEST_MS <= to_ms(entry.time) < LATEST_MS:
                found[digest.hexdigest()[:16]] = f"{component.component}: {BAD_TIME}"
                continue
            what = _event(component.component, entry)
            if what is not None:
                event = Event(entry.time, node, source=SOURCE, known_at=known_at(entry.time), **what)
                found[digest.hexdigest()[:16]] = event
    return found


def _number(text: str) -> float:
    """Read a whole number, one of thousands of digits as infinite."""
    return int(text) if len(text) <= _PLAIN_DIGITS else float(text)


def _written(entry: Any) -> str:
    try:
        return json.dumps(entry, sort_keys=True)
    except RecursionError:  # it was read at a shallower depth of the stack
        return "nested too deeply"


def _event(component: str, entry: _Entry) -> dict[str, Any] | None:
    """Return type, code, detail and GPU of an event; None: it says nothing of a GPU's health."""
    if (component, entry.name) == ("os", "reboot"):
        return {"type": "other", "code": BOOT, "detail": entry.message[:_DETAIL_LENGTH] or None}
    kernel = shipped().read(entry.message)  # what gpud has from NVSentinel
    if kernel is not None and kernel.type in ("failure", "other", "driver"):
        place = {"gpu": kernel.gpu, "pci_bus_id": kernel.pci_bus_id}
        return {"type": kernel.type, "code": kernel.code, "detail": kernel.detail, **place}
    kernel = kernel if kernel is not None and kernel.type == "xid" else None
    if sxid := _SXID.search(entry.message):
        kind = "failure" if entry.type == "Fatal" else "other"
        return {
            "type": kind,
            "code": f"sxid_{int(sxid[1])}",
            "detail": f"{entry.type}: {entry.message}"[:_DETAIL_LENGTH],
        }
    xid, uuid, address = (pattern.search(entry.message) for pattern in (_XID, _UUID, _PCI))
    gpu, bus = uuid[0] if uuid else None, normalise_pci_bus_id(address[0]) if address else None
    number = kernel.code if kernel else str(int(xid[1])) if xid else None
    if entry.name == "error_xid" and number is not None:
        # Of no GPU it would count as one of every GPU of the node.
        is_clear = (gpu or bus) and (kernel or number != _RECOVERY)
        kind, code = ("xid", number) if is_clear else ("other", f"xid_{number}")
    elif component.startswith(_GPU) and entry.type in _SERIOUS:
        kind, code = "other", f"{SOURCE}_{entry.name}"
    else:
        return None
    detail = kernel.detail if kernel else f"{entry.type}: {entry.message}"[:_DETAIL_LENGTH]
    return {"type": kind, "code": code, "detail": detail, "gpu": gpu, "pci_bus_id": bus}


class GpudCollector:
    """Asks gpud on every node.

    ``delay``: from an event to when it counts as known, of those from before a node is first asked.
    ``counts``: ``answers``, ``failed``, ``events``, and ``unreadable`` entries.
    """

    def __init__(
        self,
        outbox: Outbox,
        scraper: Scraper,
        read_targets: Callable[[], Sequence[Target]],
        *,
        clock: Callable[[], datetime],
        delay: timedelta,
    ) -> None:
        self._outbox, self._scraper, self._read_targets = outbox, scraper, read_targets
        self._clock, self._delay = clock, delay
        self._failing: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def run(self, interval_s: float, wait: Wait, *, once: bool = False) -> None:
        """Ask every node each interval, until ``wait`` is true.

        Raises ``InputError`` if the first time the targets cannot be read or nothing can be written, and with ``once``
        if no node answers.
        """
        is_first = True
        while True:
            try:
                asyncio.run(self._look(wait))
            except InputError as error:
                if is_first:
                    raise
                _log.error("%s", error)
            if once and self._failing and not self.counts["answers"]:
                url, reason = next(iter(self._failing.items()))
                do = "Check that gpud runs there; a certificate of its own needs --insecure-skip-verify."
                raise InputError(f"no node answers: {reason}", url, do)
            is_first = False
            if once or wait(interval_s):
                return

    async def _look(self, stop: Wait) -> None:
        before: Mapping[str, Any] = self._outbox.position.get("nodes", {})
        slots, events, after = asyncio.Semaphore(_CONCURRENCY), [], {}

        async def ask(target: Target) -> None:
            known = after[target.url] = before.get(target.url, {})
            async with slots:
                if stop(0.0):
                    return
                try:
                    after[target.url], news = await self._ask(target, known)
                except ScrapeError as error:
                    self.counts["failed"] += 1
                    if self._failing.get(target.url) != str(error):
                        _log.warning("%s does not answer: %s", target.address, error)
                    self._failing[target.url] = str(error)
                    return
            self.counts["answers"] += 1
            events.extend(news)
            if self._failing.pop(target.url, None) is not None:
                _log.warning("%s answers again", target.address)

        await asyncio.gather(*map(ask, self._read_targets()))
        if after != before:
            self._outbox.commit({"nodes": after}, events=events)
            self._outbox.flush()
            self.counts["events"] += len(events)

    async def _ask(self, target: Target, known: Mapping[str, Any]) -> tuple[dict[str, Any], list[Event]]:
        """Return how far a node was read, and its new events; ``known``: how far it was read before."""
        now = self._clock()
        start = from_ms(known["until"]) - OVERLAP if known else now - FIRST_SINCE
        while True:
            try:
                page = await self._scraper.fetch(f"{target.url}?startTime={int(start.timestamp())}")
                break
            except ScrapeError as error:
                if error.kind != "too_large" or now - start < _SHORTEST:
                    raise
                start = now - (now - start) / 2  # an answer has no pages: the newest events count most
                _log.warning("%s: too many events, those before %s are left out", target.address, start.isoformat())

        def known_at(time: datetime) -> datetime:
            return now if known else min(now, later(time, self._delay))

        found = read_events(page.body, target.node or target.host, known_at)
        seen = set(known.get("seen", ()))
        news = [entry for name, entry in found.items() if name not in seen]
        problems = [entry for entry in news if isinstance(entry, str)]
        if problems:
            self.counts["unreadable"] += len(problems)
            _log.warning("%s: %d entries cannot be read, such as %s", target.address, len(problems), problems[0])
        kept = [
            name
            for name, entry in found.items()
            if isinstance(entry, str) or entry.timestamp >= now - OVERLAP - _SHORTEST
        ]
        return {"until": to_ms(now), "seen": kept}, [entry for entry in news if isinstance(entry, Event)]
